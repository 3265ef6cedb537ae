//! Other people's clients against our exports, on memory and on an image, by a core that is polled or notified; and programs that are clients of
//! ours and servers of others at once, with every client and our import behind them.

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;
mod support;

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::Notify;
use ioplane_nbd::export::{ConnectionEnd, ExportOptions};
use ioplane_nbd::import::{AtStart, ConnectionStatus, ImportOptions, Unfenced};
use ioplane_storage::{Backing, FileBacking, FileOptions, MemoryBacking, Op};
use rig::Rig;
use support::listener::Listening;
use support::{PATIENCE, pattern};

const SIZE: usize = 32 << 20;

/// Runs a program; `None` if it is not installed, which is said past the capture of the test harness.
fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    found(program, Command::new(program).args(arguments).stdin(Stdio::null()).output())
}

fn found<T>(program: &str, started: std::io::Result<T>) -> Option<T> {
    match started {
        Ok(started) => Some(started),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let package = match program {
                "nbdinfo" | "nbdcopy" => "libnbd-bin",
                "nbdkit" => "nbdkit",
                "qemu-storage-daemon" => "qemu-system-common",
                "fio" => "fio",
                _ => "qemu-utils",
            };
            let why = format!("SKIPPED: NBD was NOT tested with {program}: install {package}");
            let _ = writeln!(std::io::stderr(), "\n*** {why} ***");
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "{why}");
            None
        }
        Err(error) => panic!("{program}: {error}"),
    }
}

/// A server of others on a Unix socket. It is asked to end and waited for, so that its own connections are closed in order.
struct Other {
    child: Child,
    socket: PathBuf,
}

impl Other {
    /// The word `SOCKET` among the arguments, also within one, is its socket's path.
    fn start(program: &str, arguments: &[&str], socket: PathBuf) -> Option<Other> {
        let path = socket.to_str().unwrap();
        // nbdkit leaves its own behind.
        let _ = std::fs::remove_file(&socket);
        let arguments = arguments.iter().map(|argument| argument.replace("SOCKET", path));
        let child = found(program, Command::new(program).args(arguments).stdin(Stdio::null()).spawn())?;
        let mut other = Other { child, socket };
        let end = Instant::now() + PATIENCE;
        while UnixStream::connect(&other.socket).is_err() {
            assert!(other.child.try_wait().unwrap().is_none(), "{program} has ended");
            assert!(Instant::now() < end, "{program} does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(other)
    }

    fn uri(&self, name: &str) -> String {
        format!("nbd+unix:///{name}?socket={}", self.socket.display())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let end = Instant::now() + PATIENCE;
        while self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            if Instant::now() >= end {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What a program that must succeed has printed.
fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = run(program, arguments)?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {}: {}\n{out}\n{err}", arguments.join(" "), output.status);
    Some(out.into_owned())
}

fn image(folder: &Path) -> Arc<dyn Backing> {
    let path = folder.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(SIZE as u64).unwrap();
    FileBacking::open(FileOptions { raw: ioplane_storage::Raw::Stated, ..FileOptions::new(path) }).unwrap()
}

fn memory() -> Arc<dyn Backing> {
    MemoryBacking::new(SIZE as u64).unwrap()
}

/// Every kind of disk and core, with a folder for a client's files.
fn each(test: impl Fn(&Listening, &Path)) {
    for notify in [Notify::Notified, Notify::Polled] {
        let folder = tempfile::tempdir().unwrap();
        for backing in [memory(), image(folder.path())] {
            let listening = Listening::new(backing, ExportOptions::default(), notify);
            test(&listening, folder.path());
            for ended in listening.close() {
                assert!(
                    matches!(ended.end, ConnectionEnd::Disconnected | ConnectionEnd::Closed),
                    "{ended:?}"
                );
            }
        }
    }
}

#[test]
fn nbdinfo() {
    each(|listening, _| {
        let Some(json) = output("nbdinfo", &["--json", &listening.uri()]) else { return };
        let has = |text: &str| assert!(json.contains(text), "{text} is not in {json}");
        has(&format!("\"export-size\": {SIZE}"));
        has("\"can_multi_conn\": true");
        has("\"can_flush\": true");
        has("\"can_fua\": true");
        has("\"can_trim\": true");
        has("\"can_zero\": true");
        has("\"is_read_only\": false");
        has("base:allocation");
        has("\"block_size_minimum\": 512");
        has("\"structured\": true");
        let list = format!("nbd://{}", listening.address);
        let listed = output("nbdinfo", &["--list", "--json", &list]).unwrap_or_default();
        assert!(listed.contains("\"export-name\": \"disk\""), "{listed}");
        let map = output("nbdinfo", &["--map", &listening.uri()]).unwrap_or_default();
        // What was read from memory may be there since.
        assert!(map.contains("hole"), "{map}");
    });
    let listening = Listening::new(
        memory(),
        ExportOptions { read_only: true, ..ExportOptions::default() },
        Notify::Notified,
    );
    if let Some(json) = output("nbdinfo", &["--json", &listening.uri()]) {
        assert!(json.contains("\"is_read_only\": true"), "{json}");
    }
    let other = format!("nbd://{}/other", listening.address);
    if let Some(refused) = run("nbdinfo", &[&other]) {
        assert!(!refused.status.success());
    }
}

#[test]
fn nbdcopy() {
    each(|listening, folder| {
        let (from, to) = (folder.join("from"), folder.join("to"));
        // Data, zeros, data: some is written by NBD_CMD_WRITE_ZEROES.
        let mut data = pattern(0, SIZE, 1);
        data[4 << 20..12 << 20].fill(0);
        std::fs::write(&from, &data).unwrap();
        let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
        if output("nbdcopy", &["--flush", "--connections=4", from, &listening.uri()]).is_none() {
            return;
        }
        output("nbdcopy", &["--connections=4", &listening.uri(), to]);
        assert!(std::fs::read(to).unwrap() == data, "other bytes came back");
        output("nbdcopy", &["--connections=1", "--requests=1", "--synchronous", &listening.uri(), to]);
        assert!(std::fs::read(to).unwrap() == data, "other bytes came back");
    });
}

/// Bytes that a file takes.
fn taken(path: &str) -> u64 {
    std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap()) * 512
}

/// A disk of which little was written: what is copied from it takes no more.
#[test]
fn holes_stay_holes() {
    const DATA: usize = 1 << 20;
    each(|listening, folder| {
        let (from, to) = (folder.join("from"), folder.join("to"));
        let file = std::fs::File::create(&from).unwrap();
        file.set_len(SIZE as u64).unwrap();
        for at in [0, 9 << 20, SIZE - DATA] {
            std::os::unix::fs::FileExt::write_all_at(&file, &pattern(at as u64, DATA, 5), at as u64).unwrap();
        }
        let data = std::fs::read(&from).unwrap();
        let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
        if output("nbdcopy", &["--flush", from, &listening.uri()]).is_none() {
            return;
        }
        let map = output("nbdinfo", &["--map", "--json", &listening.uri()]).unwrap();
        let extents: Vec<(u64, u64, u64)> = map
            .split('}')
            .filter_map(|one| {
                let field = |name: &str| {
                    let rest = one.split_once(&format!("\"{name}\":"))?.1;
                    rest.trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
                };
                Some((field("offset")?, field("length")?, field("type")?))
            })
            .collect();
        let (hole, mib) = (3, 1 << 20);
        let expected = [
            (0, mib, 0),
            (mib, 8 * mib, hole),
            (9 * mib, mib, 0),
            (10 * mib, 21 * mib, hole),
            (31 * mib, mib, 0),
        ];
        assert_eq!(extents, expected, "{map}");
        // Zeros among the data are not looked for.
        output("nbdcopy", &["--sparse=0", &listening.uri(), to]);
        assert!(std::fs::read(to).unwrap() == data, "other bytes came back");
        assert!(taken(to) < 4 << 20, "{} bytes were written", taken(to));
        if let Some(map) = output("qemu-img", &["map", "--output=json", "-f", "raw", &listening.uri()]) {
            let holes = map.lines().filter(|line| line.contains("\"zero\": true")).count();
            let data = map.lines().filter(|line| line.contains("\"data\": true")).count();
            assert_eq!((holes, data), (2, 3), "{map}");
            let copy = folder.join("qemu");
            let copy = copy.to_str().unwrap();
            output("qemu-img", &["convert", "-f", "raw", "-O", "raw", &listening.uri(), copy]);
            assert!(std::fs::read(copy).unwrap() == std::fs::read(from).unwrap(), "other bytes came back");
            assert!(taken(copy) < 4 << 20, "{} bytes were written", taken(copy));
            output("qemu-img", &["compare", "-f", "raw", "-F", "raw", from, &listening.uri()]);
        }
    });
}

#[test]
fn qemu_img() {
    each(|listening, folder| {
        let from = folder.join("from");
        let data = pattern(0, SIZE, 2);
        std::fs::write(&from, &data).unwrap();
        let from = from.to_str().unwrap();
        if output("qemu-img", &["info", "-f", "raw", &listening.uri()]).is_none() {
            return;
        }
        output("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", "-W", from, &listening.uri()]);
        output("qemu-img", &["compare", "-f", "raw", "-F", "raw", from, &listening.uri()]);
        output("qemu-img", &["bench", "-f", "raw", "-c", "2000", "-d", "64", "-s", "4096", &listening.uri()]);
        output(
            "qemu-img",
            &["bench", "-f", "raw", "-w", "-c", "500", "-d", "8", "-s", "131072", &listening.uri()],
        );
    });
}

/// What `qemu-io` writes and finds again on `uri`.
fn by_qemu_io(uri: &str) {
    let commands = [
        "write -P 0x11 0 3M",
        "write -P 0x22 -f 1M 64k",
        "write -z 2M 64k",
        "write -z -u 3M 64k",
        "discard 8M 1M",
        "flush",
        "aio_write -P 0x33 4M 1M",
        "aio_write -P 0x44 5M 1M",
        "aio_flush",
        "read -P 0x11 0 1M",
        "read -P 0x22 1M 64k",
        "read -P 0 2M 64k",
        "read -P 0 3M 64k",
        "read -P 0x33 4M 1M",
        "read -P 0x44 5M 1M",
        // Not aligned: QEMU reads, changes and writes the block.
        "write -P 0x55 6291457 100",
        "read -P 0x55 6291457 100",
    ];
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(uri);
    let Some(said) = output("qemu-io", &arguments) else { return };
    assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
}

#[test]
fn qemu_io() {
    each(|listening, _| by_qemu_io(&listening.uri()));
}

/// What fio's engine `nbd` writes and finds again on `uri`.
fn by_fio(uri: &str, folder: &Path) {
    let (uri, aux) = (format!("--uri={uri}"), format!("--aux-path={}", folder.display()));
    let arguments = [
        "--name=verify",
        "--ioengine=nbd",
        &uri,
        &aux,
        "--rw=randwrite",
        "--bsrange=4k-256k",
        "--iodepth=32",
        "--size=32M",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
        "--fsync=50",
        "--output-format=terse",
    ];
    let Some(said) = output("fio", &arguments) else { return };
    assert!(!said.contains("verify:"), "{said}");
}

#[test]
fn fio() {
    each(|listening, folder| by_fio(&listening.uri(), folder));
}

/// Writes `data` to `there` and expects it of `back`, which are the same disk, by whatever ways.
fn there_and_back(there: &str, back: &str, data: &[u8], folder: &Path) {
    let (from, to) = (folder.join("from"), folder.join("to"));
    std::fs::write(&from, data).unwrap();
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    if output("nbdcopy", &["--flush", "--connections=4", from, there]).is_none() {
        return;
    }
    output("nbdcopy", &["--connections=4", back, to]);
    assert!(std::fs::read(to).unwrap() == data, "from {there} to {back}: other bytes");
}

/// What our import writes by way of `uri` is read by way of it, and by `direct`.
fn by_our_import(uri: &str, direct: &str, salt: u64, folder: &Path) {
    let import = scripted::import(ImportOptions {
        at_start: AtStart::Wait,
        unfenced: Unfenced::Replay,
        ..ImportOptions::new(uri.parse().unwrap())
    });
    let info = import.info();
    assert!(info.bytes == SIZE as u64 && info.volatile_cache && !info.read_only, "{info:?}");
    let mut rig = Rig::new(&*import, 16);
    let mut wanted = vec![0; SIZE];
    // The guest of the rig has 1 MiB; the disk's old bytes are taken away first.
    for (offset, len) in [(0, SIZE / 2), (SIZE / 2, SIZE / 2)] {
        rig.run(&Op::WriteZeroes { offset: offset as u64, len: len as u64, unmap: true }).unwrap();
    }
    for (offset, len) in
        [(0, 4096), (512 * 9, 512), (1 << 20, 300 << 10), (5 << 20, 1 << 20), (SIZE - 512, 512)]
    {
        let data = pattern(offset as u64, len, salt);
        rig.write(offset as u64, &data).unwrap();
        wanted[offset..offset + len].copy_from_slice(&data);
        assert!(rig.read(offset as u64, len as u32).unwrap() == data, "{len} bytes at {offset} by {uri}");
    }
    rig.run(&Op::Discard { offset: 6 << 20, len: 64 << 10 }).unwrap();
    rig.run(&Op::Flush).unwrap();
    let status = import.status();
    let fault = |one: &ConnectionStatus| one.losses + one.device_errors > 0;
    assert!(!status.connections.iter().any(fault), "{status:?}");
    drop(rig);
    assert!(import.wait_quiet(Instant::now() + PATIENCE));
    let to = folder.join("direct");
    if output("nbdcopy", &[direct, to.to_str().unwrap()]).is_some() {
        let mut is = std::fs::read(to).unwrap();
        // What is discarded may keep its bytes, or be zeros.
        for disk in [&mut is, &mut wanted] {
            disk[6 << 20..(6 << 20) + (64 << 10)].fill(0);
        }
        assert!(is == wanted, "the export has other bytes than were written by {uri}");
    }
}

/// Every client, and our import, by way of a program that is a client of our export and serves what it finds there.
fn all_by_way_of(other: &Other, listening: &Listening, folder: &Path) {
    let uri = other.uri("disk");
    if let Some(json) = output("nbdinfo", &["--json", &uri]) {
        let has = |text: &str| assert!(json.contains(text), "{text} is not in {json}");
        has(&format!("\"export-size\": {SIZE}"));
        has("\"can_flush\": true");
        has("\"can_fua\": true");
        has("\"can_trim\": true");
        has("\"can_zero\": true");
        has("\"is_read_only\": false");
    }
    let mut data = pattern(0, SIZE, 4);
    data[4 << 20..12 << 20].fill(0);
    there_and_back(&uri, &listening.uri(), &data, folder);
    there_and_back(&listening.uri(), &uri, &pattern(0, SIZE, 5), folder);
    by_qemu_io(&uri);
    by_fio(&uri, folder);
    by_our_import(&uri, &listening.uri(), 6, folder);
}

#[test]
fn nbdkit_is_a_client_of_an_export_and_every_client_is_behind_it() {
    each(|listening, folder| {
        let upstream = format!("uri={}", listening.uri());
        let arguments = ["--exit-with-parent", "-f", "-U", "SOCKET", "nbd", &upstream];
        let Some(nbdkit) = Other::start("nbdkit", &arguments, folder.join("nbdkit.sock")) else { return };
        // Its plugin tells on what it was told.
        if let Some(json) = output("nbdinfo", &["--json", &nbdkit.uri("disk")]) {
            assert!(json.contains("\"can_multi_conn\": true"), "{json}");
        }
        all_by_way_of(&nbdkit, listening, folder);
    });
}

#[test]
fn qemu_is_a_client_of_an_export_and_every_client_is_behind_it() {
    each(|listening, folder| {
        let port = listening.address.port();
        let node = format!(
            "driver=nbd,node-name=n,server.type=inet,server.host=127.0.0.1,server.port={port},export=disk,\
             discard=unmap,detect-zeroes=unmap"
        );
        let arguments = [
            "--blockdev",
            &node,
            "--nbd-server",
            "addr.type=unix,addr.path=SOCKET,max-connections=16",
            "--export",
            "type=nbd,id=e,node-name=n,name=disk,writable=on",
        ];
        let socket = folder.join("qsd.sock");
        let Some(qemu) = Other::start("qemu-storage-daemon", &arguments, socket) else { return };
        all_by_way_of(&qemu, listening, folder);
    });
}

/// Servers of others, on an image of their own in `folder`.
fn servers(folder: &Path, name: &str) -> Vec<(Other, PathBuf)> {
    let start = |program: &str, arguments: &[&str]| {
        let image = folder.join(format!("{name}-{program}.img"));
        std::fs::File::create(&image).unwrap().set_len(SIZE as u64).unwrap();
        let arguments = [arguments, &[image.to_str().unwrap()]].concat();
        let other = Other::start(program, &arguments, folder.join(format!("{name}-{program}.sock")))?;
        Some((other, image))
    };
    let qemu =
        start("qemu-nbd", &["-t", "-f", "raw", "-e", "8", "--discard=unmap", "-x", "disk", "-k", "SOCKET"]);
    let nbdkit = start("nbdkit", &["--exit-with-parent", "-f", "-U", "SOCKET", "file"]);
    [qemu, nbdkit].into_iter().flatten().collect()
}

#[test]
fn nbdcopy_between_servers_of_others_and_an_export_in_both_directions() {
    each(|listening, folder| {
        let ours = listening.uri();
        for (salt, ((from, source), (to, target))) in
            servers(folder, "a").into_iter().zip(servers(folder, "b").into_iter().rev()).enumerate()
        {
            // Data, zeros, data, on the image of the one; the other one's has other bytes everywhere.
            let mut data = pattern(0, SIZE, 10 + salt as u64);
            data[8 << 20..16 << 20].fill(0);
            std::fs::write(&source, &data).unwrap();
            std::fs::write(&target, pattern(0, SIZE, 20)).unwrap();
            let copy = ["--flush", "--connections=4", &from.uri("disk"), &ours];
            if output("nbdcopy", &copy).is_none() {
                return;
            }
            output("nbdcopy", &["--flush", "--connections=4", &ours, &to.uri("disk")]);
            drop(to);
            assert!(std::fs::read(&target).unwrap() == data, "other bytes in {}", target.display());
        }
    });
}
