//! Other people's clients against our exports, on memory and on an image, by a core that is polled or notified.

mod support;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use ioplane_cores::Notify;
use ioplane_nbd::export::{ConnectionEnd, ExportOptions};
use ioplane_storage::{Backing, FileBacking, FileOptions, MemoryBacking};
use support::listener::Listening;
use support::pattern;

const SIZE: usize = 32 << 20;

/// Runs a program; `None` if it is not installed, which is said past the capture of the test harness.
fn run(program: &str, arguments: &[&str]) -> Option<Output> {
    let command = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    match command {
        Ok(output) => Some(output),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let package = match program {
                "nbdinfo" | "nbdcopy" => "libnbd-bin",
                "fio" => "fio",
                _ => "qemu-utils",
            };
            let why = format!("SKIPPED: our exports were NOT tested with {program}: install {package}");
            let _ = writeln!(std::io::stderr(), "\n*** {why} ***");
            assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "{why}");
            None
        }
        Err(error) => panic!("{program}: {error}"),
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
        assert!(map.contains(&SIZE.to_string()) && map.contains("data"), "{map}");
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

#[test]
fn qemu_io() {
    each(|listening, _| {
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
        let uri = listening.uri();
        arguments.push(&uri);
        let Some(said) = output("qemu-io", &arguments) else { return };
        assert!(!said.contains("failed") && !said.contains("rror"), "{said}");
    });
}

#[test]
fn fio() {
    each(|listening, folder| {
        let uri = format!("--uri={}", listening.uri());
        let aux = format!("--aux-path={}", folder.display());
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
    });
}
