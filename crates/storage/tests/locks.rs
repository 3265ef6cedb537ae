//! The same image twice: refused, by name, between ioplane and ioplane and between ioplane and QEMU.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ioplane_storage::*;
use support::{Rig, image, skip};

fn refused(options: FileOptions) -> String {
    match FileBacking::open(options) {
        Err(error @ StorageError::InUse { .. }) => error.to_string(),
        other => panic!("not refused: {other:?}"),
    }
}

fn read_only(path: &Path) -> FileOptions {
    FileOptions { read_only: true, ..FileOptions::new(path) }
}

/// A QEMU tool that holds an image until it is dropped.
struct Tool(Child);

impl Tool {
    /// Starts it and waits for the line that says it is there.
    fn start(command: &mut Command, wait_for: &str, ask: &str) -> Option<Tool> {
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().ok()?;
        let mut input = child.stdin.take()?;
        input.write_all(ask.as_bytes()).ok()?;
        let mut output = BufReader::new(child.stdout.take()?);
        let (mut line, mut seen) = (String::new(), false);
        while !seen && output.read_line(&mut line).ok()? > 0 {
            seen = line.contains(wait_for);
            line.clear();
        }
        child.stdin = Some(input);
        let tool = Tool(child);
        seen.then_some(tool)
    }
}

impl Drop for Tool {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What `qemu-io` says when it opens the image for writing; empty if it may.
fn qemu_io(path: &Path, arguments: &[&str]) -> Option<String> {
    let done = Command::new("qemu-io").args(arguments).args(["-f", "raw"]).arg(path).output().ok()?;
    Some(String::from_utf8_lossy(&done.stderr).into_owned())
}

#[test]
fn twice_in_one_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let first = FileBacking::open(FileOptions::new(&path)).unwrap();
    let message = refused(FileOptions::new(&path));
    assert!(message.contains("another disk of this daemon"), "{message}");
    assert!(message.contains(path.to_str().unwrap()), "{message}");
    refused(read_only(&path));
    // By another name it is the same image.
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    refused(FileOptions::new(link));
    drop(first);
    // Readers share; a writer waits for all of them.
    let readers =
        [FileBacking::open(read_only(&path)).unwrap(), FileBacking::open(read_only(&path)).unwrap()];
    refused(FileOptions::new(&path));
    drop(readers);
    FileBacking::open(FileOptions::new(&path)).unwrap();
}

#[test]
fn one_owner_has_one_read_only_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let owned = |name: &str| FileOptions { owner: Some(name.into()), ..read_only(&path) };
    let _first = FileBacking::open(owned("web/root")).unwrap();
    let _second = FileBacking::open(owned("mail/root")).unwrap();
    refused(owned("web/root"));
}

#[test]
fn a_lane_that_lives_keeps_the_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let backing = FileBacking::open(FileOptions::new(&path)).unwrap();
    let mut rig = Rig::new(&*backing, 4);
    drop(backing);
    assert_eq!(rig.write(0, &[1; 512]), Ok(()));
    refused(FileOptions::new(&path));
    drop(rig);
    FileBacking::open(FileOptions::new(&path)).unwrap();
}

#[test]
fn qemu_refuses_ours() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    if qemu_io(&path, &["-c", "read 0 512"]).is_none() {
        return skip("qemu-io is not installed");
    }
    for engine in [EngineChoice::IoUring, EngineChoice::Threads] {
        let backing = FileBacking::open(FileOptions { engine, ..FileOptions::new(&path) }).unwrap();
        let mut rig = Rig::new(&*backing, 4);
        assert_eq!(rig.write(0, &[1; 512]), Ok(()));
        let said = qemu_io(&path, &["-c", "write 0 512"]).unwrap();
        assert!(said.contains("lock"), "{said}");
        // A VM that would write, and one that would only read but wants nobody to write meanwhile.
        for (read_only, lock) in [("off", "\"write\" lock"), ("on", "shared \"write\" lock")] {
            let drive = format!("file={},format=raw,if=virtio,readonly={read_only}", path.display());
            let vm = Command::new("timeout")
                .args([
                    "20",
                    "qemu-system-x86_64",
                    "-accel",
                    "tcg",
                    "-S",
                    "-nodefaults",
                    "-display",
                    "none",
                    "-m",
                    "64",
                ])
                .args(["-drive", &drive])
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&vm.stderr);
            assert!(vm.status.code() == Some(1) && said.contains(lock), "read-only {read_only}: {said}");
        }
        // Who neither writes nor minds may look, as with a disk of QEMU's own.
        assert_eq!(qemu_io(&path, &["-U", "-r", "-c", "read 0 512"]).unwrap(), "");
        let info = Command::new("qemu-img").args(["info", "-f", "raw"]).arg(&path).output().unwrap();
        assert!(info.status.success());
        drop((rig, backing));
        assert_eq!(
            qemu_io(&path, &["-c", "write 0 512"]).unwrap(),
            "",
            "free at once after the last has gone"
        );
    }
    let _reader = FileBacking::open(read_only(&path)).unwrap();
    assert_eq!(qemu_io(&path, &["-r", "-c", "read 0 512"]).unwrap(), "", "readers share");
    assert!(qemu_io(&path, &["-c", "write 0 512"]).unwrap().contains("lock"));
}

#[test]
fn we_refuse_qemus() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let node = format!("driver=file,node-name=f,filename={}", path.display());
    let storage_daemon = |writable: &str| {
        let export = format!(
            "type=vhost-user-blk,id=e,node-name=f,addr.type=unix,addr.path={}/s,{writable}",
            folder.path().display()
        );
        Tool::start(
            Command::new("qemu-storage-daemon").args(["--blockdev", &node, "--export", &export]).args([
                "--chardev",
                "stdio,id=c",
                "--monitor",
                "chardev=c",
            ]),
            "QMP",
            "",
        )
    };
    let Some(daemon) = storage_daemon("writable=on") else {
        return skip("qemu-storage-daemon is not installed");
    };
    let message = refused(FileOptions::new(&path));
    assert!(
        message.contains("qemu-storage") && message.contains(&format!("pid {}", daemon.0.id())),
        "{message}"
    );
    refused(read_only(&path));
    drop(daemon);
    FileBacking::open(FileOptions::new(&path)).unwrap();
}

#[test]
fn the_vm_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let drive = format!("file={},format=raw,if=virtio", path.display());
    let vm = Tool::start(
        Command::new("qemu-system-x86_64")
            .args(["-accel", "tcg", "-S", "-nodefaults", "-display", "none", "-m", "64"])
            .args(["-name", "guest=web7,debug-threads=on", "-drive", &drive, "-qmp", "stdio"]),
        "\"return\"",
        "{\"execute\": \"qmp_capabilities\"}\n",
    );
    let Some(vm) = vm else { return skip("qemu-system-x86_64 is not installed") };
    let message = refused(FileOptions::new(&path));
    assert!(message.contains("VM web7") && message.contains(&format!("pid {}", vm.0.id())), "{message}");
    assert!(message.contains("shut that down"), "{message}");
}

#[test]
fn a_passing_holder_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = image(folder.path(), 1 << 20);
    let first = FileBacking::open(FileOptions::new(&path)).unwrap();
    let (mut first, mut reports) = (Some(first), 0);
    FileBacking::open_watched(FileOptions::new(&path), &mut |waiting: Waiting| {
        assert_eq!(waiting.timeout, Duration::from_secs(60));
        reports += 1;
        if reports == 3 {
            first.take();
        }
    })
    .unwrap();
    assert!(reports >= 3);
}
