//! Imports from other people's servers: nbdkit, qemu-nbd, nbd-server; killed, stopped, slow and failing.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_memory::GuestRange;
use ioplane_nbd::import::{AtStart, Import, ImportOptions, Unfenced};
use ioplane_storage::{Backing, Fault, Op, Submitted, Tag};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use rig::{Rig, skip};
use scripted::{import, is_connected, until};

const DISK: u64 = 4 << 20;

/// A program that is killed when the test is over.
struct Running(Child);

impl Running {
    /// `None`, and said loudly, where the program is missing.
    fn start(program: &str, arguments: &[&str]) -> Option<Running> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        match command.spawn() {
            Ok(child) => Some(Running(child)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                skip(&format!("{program} is not installed: script/bootstrap --checks"));
                None
            }
            Err(error) => panic!("{program}: {error}"),
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for the server to be there.
fn open(address: &str) -> Arc<Import> {
    import(options(address))
}

fn options(address: &str) -> ImportOptions {
    ImportOptions {
        at_start: AtStart::Wait,
        unfenced: Unfenced::Replay,
        retry: (Duration::from_millis(5), Duration::from_millis(50)),
        ..ImportOptions::new(address.parse().unwrap())
    }
}

fn unix(path: &Path) -> String {
    format!("nbd+unix:///?socket={}", path.display())
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn image(folder: &Path) -> String {
    let path = rig::image(folder, DISK);
    path.to_str().unwrap().to_owned()
}

/// Random operations, four at a time on parts of their own, against a vector. `between` is called after each round.
fn exercise(import: &Import, seed: u8, rounds: u32, mut between: impl FnMut(u32)) -> Vec<u8> {
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let bytes = import.info().bytes.min(DISK);
    let mut model = vec![0u8; bytes as usize];
    let mut rig = Rig::new(import, 8);
    let part = bytes / 4;
    for round in 0..rounds {
        let mut wanted = Vec::new();
        for tag in 0..4u16 {
            let units = part / 512;
            let at = random.next_u64() % units;
            let len = (1 + random.next_u64() % 130).min(units - at) * 512;
            let offset = u64::from(tag) * part + at * 512;
            let gpa = u64::from(tag) * (128 << 10) + random.next_u64() % 512;
            let (first, rest) = (len / 3 / 4 * 4, len - len / 3 / 4 * 4);
            let ranges =
                [GuestRange { gpa, len: first as u32 }, GuestRange { gpa: gpa + first, len: rest as u32 }];
            let span = offset as usize..(offset + len) as usize;
            let op = match random.next_u64() % 8 {
                0..3 => {
                    let value = random.next_u64();
                    let data: Vec<u8> = (0..len).map(|at| (value >> (at % 8)) as u8 ^ at as u8).collect();
                    rig.view.write(gpa, &data).unwrap();
                    model[span].copy_from_slice(&data);
                    Op::Write { offset, from: &ranges }
                }
                3..6 => {
                    rig.view.write(gpa, &vec![0xa5; len as usize]).unwrap();
                    wanted.push((gpa, span));
                    Op::Read { offset, into: &ranges }
                }
                6 => {
                    model[span].fill(0);
                    Op::WriteZeroes { offset, len, unmap: round % 2 == 0 }
                }
                _ => Op::Flush,
            };
            match rig.submit(&op, Tag(tag)) {
                Submitted::Pending => {}
                Submitted::Done(outcome) => assert_eq!(outcome, Ok(())),
            }
        }
        rig.push();
        between(round);
        for (tag, outcome) in rig.finish() {
            assert_eq!(outcome, Ok(()), "{tag:?} in round {round}: {:?}", import.status());
        }
        for (gpa, span) in wanted {
            let mut is = vec![0; span.len()];
            rig.view.read(gpa, &mut is).unwrap();
            assert!(is == model[span.clone()], "round {round}: {span:?} reads wrong");
        }
    }
    for at in (0..bytes).step_by(256 << 10) {
        assert!(rig.read(at, 256 << 10).unwrap() == model[at as usize..][..256 << 10], "at {at} in the end");
    }
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    model
}

fn holds(path: &str, model: &[u8]) {
    assert!(std::fs::read(path).unwrap()[..model.len()] == *model, "the image holds something else");
}

#[test]
fn qemu_nbd() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (image(folder.path()), folder.path().join("s"));
    let arguments = ["-t", "-f", "raw", "-e", "4", "-k", socket.to_str().unwrap(), &file];
    let Some(_server) = Running::start("qemu-nbd", &arguments) else { return };
    let import = open(&unix(&socket));
    let info = import.info();
    assert!(info.bytes == DISK && info.discards && info.volatile_cache && !info.read_only, "{info:?}");
    holds(&file, &exercise(&import, 1, 200, |_| {}));
}

#[test]
fn qemu_nbd_read_only() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (image(folder.path()), folder.path().join("s"));
    let arguments = ["-t", "-r", "-f", "raw", "-k", socket.to_str().unwrap(), &file];
    let Some(_server) = Running::start("qemu-nbd", &arguments) else { return };
    let import = open(&unix(&socket));
    assert!(import.info().read_only);
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.write(0, &[1; 512]), Err(Fault::ReadOnly));
    assert_eq!(rig.read(0, 512), Ok(vec![0; 512]));
}

#[test]
fn nbd_server() {
    let folder = tempfile::tempdir().unwrap();
    let (file, port) = (image(folder.path()), free_port());
    let config = folder.path().join("config");
    let text = format!(
        "[generic]\nlistenaddr = 127.0.0.1\nport = {port}\nuser = root\ngroup = root\n[disk]\nexportname = {file}\nflush = true\ntrim = true\n"
    );
    std::fs::write(&config, text).unwrap();
    let Some(_server) = Running::start("nbd-server", &["-d", "-C", config.to_str().unwrap()]) else { return };
    let import = open(&format!("nbd://127.0.0.1:{port}/disk"));
    holds(&file, &exercise(&import, 2, 200, |_| {}));
}

#[test]
fn nbdkit_in_memory_over_tcp() {
    let port = free_port().to_string();
    let arguments = ["--exit-with-parent", "-f", "-i", "127.0.0.1", "-p", &port, "memory", "4M"];
    let Some(_server) = Running::start("nbdkit", &arguments) else { return };
    let import = open(&format!("nbd://127.0.0.1:{port}/"));
    exercise(&import, 3, 200, |_| {});
    let status = import.status();
    assert!(status.connections.iter().all(|connection| connection.losses == 0), "{status:?}");
}

/// Killed in the middle of requests and started again on the same port: the guest notices nothing but time.
#[test]
fn nbdkit_killed_and_started_again() {
    let folder = tempfile::tempdir().unwrap();
    let (file, port) = (image(folder.path()), free_port().to_string());
    let start = || {
        let arguments = [
            "--exit-with-parent",
            "-f",
            "-i",
            "127.0.0.1",
            "-p",
            &port,
            "--filter=delay",
            "file",
            &file,
            "wdelay=2ms",
            "rdelay=2ms",
        ];
        Running::start("nbdkit", &arguments)
    };
    let Some(first) = start() else { return };
    let mut server = Some(first);
    let import = open(&format!("nbd://127.0.0.1:{port}/"));
    let (mut kills, mut losses, mut replays) = (0, 0, 0);
    let model = exercise(&import, 4, 200, |round| {
        if round % 20 == 10 {
            std::thread::sleep(Duration::from_millis(1));
            drop(server.take());
            server = start();
            kills += 1;
        }
        let connection = &import.status().connections[0];
        (losses, replays) = (connection.losses, connection.replays);
    });
    assert!(losses >= kills && kills == 10, "{kills} kills, {losses} losses");
    assert!(replays > 0, "nothing was in flight when the server was killed");
    holds(&file, &model);
}

/// Stopped with requests in its buffers, and continued after the importer has given the connection up. (nbdkit 1.32 aborts now and then when
/// it finds a handshake whose client has gone, so it is qemu-nbd that is stopped.)
#[test]
fn qemu_nbd_stopped_and_continued() {
    let folder = tempfile::tempdir().unwrap();
    let (file, socket) = (image(folder.path()), folder.path().join("s"));
    let arguments = ["-t", "-f", "raw", "-e", "8", "-k", socket.to_str().unwrap(), &file];
    let Some(server) = Running::start("qemu-nbd", &arguments) else { return };
    let (dead_after, connect_timeout) = (Duration::from_millis(150), Duration::from_millis(300));
    let import = import(ImportOptions { dead_after, connect_timeout, ..options(&unix(&socket)) });
    let mut continues = None;
    let model = exercise(&import, 5, 60, |round| {
        if round == 20 {
            server.signal(rustix::process::Signal::STOP);
            let pid = rustix::process::Pid::from_child(&server.0);
            continues = Some(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(500));
                rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
            }));
        }
    });
    continues.unwrap().join().unwrap();
    holds(&file, &model);
}

#[test]
fn nbdkit_that_is_slow_is_not_dead_and_one_that_fails_is_a_device_failure() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let arguments = [
        "--exit-with-parent",
        "-f",
        "-U",
        socket.to_str().unwrap(),
        "--filter=error",
        "--filter=delay",
        "memory",
        "4M",
        "rdelay=80ms",
        "error-pwrite=ENOSPC",
        "error-pwrite-rate=100%",
    ];
    let Some(_server) = Running::start("nbdkit", &arguments) else { return };
    let import = import(ImportOptions { dead_after: Duration::from_millis(400), ..options(&unix(&socket)) });
    let mut rig = Rig::new(&*import, 8);
    let begun = Instant::now();
    assert_eq!(rig.read(0, 4096), Ok(vec![0; 4096]));
    assert!(begun.elapsed() >= Duration::from_millis(80));
    assert_eq!(rig.write(0, &[1; 512]), Err(Fault::NoSpace));
    let connection = import.status().connections[0].clone();
    assert_eq!((connection.losses, connection.device_errors), (0, 1));
}

#[test]
fn nbdkit_without_parallel_connections() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let arguments = [
        "--exit-with-parent",
        "-f",
        "-U",
        socket.to_str().unwrap(),
        "--filter=multi-conn",
        "memory",
        "4M",
        "multi-conn-mode=disable",
    ];
    let Some(_server) = Running::start("nbdkit", &arguments) else { return };
    let import = open(&unix(&socket));
    let first = Rig::new(&*import, 4);
    assert!(import.channel(4).is_err());
    drop(first);
    exercise(&import, 6, 20, |_| {});
}

#[test]
fn an_export_that_is_not_there_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let arguments = ["-t", "-f", "raw", "-x", "there", "-k", socket.to_str().unwrap(), &image(folder.path())];
    let Some(_server) = Running::start("qemu-nbd", &arguments) else { return };
    let there = format!("nbd+unix:///there?socket={}", socket.display());
    let import = open(&there);
    let rig = Rig::new(&*import, 4);
    until(&import, "connected", |status| status.connections.iter().all(is_connected));
    drop(rig);
    drop(import);
    let missing = there.replace("/there", "/missing");
    let refused = scripted::runtime()
        .block_on(Import::open(ImportOptions { at_start: AtStart::Refuse, ..options(&missing) }));
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("missing"), "{why}");
}
