//! What the tests of this crate share: a lane with a guest behind it, throw-away images and loop devices.
#![allow(dead_code)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::*;
use rustix::event::{PollFd, PollFlags, Timespec};

/// Bytes of the guest's memory.
pub const MEMORY: u64 = 1 << 20;

/// A lane and a guest.
pub struct Rig {
    pub lane: Box<dyn IoChannel>,
    pub view: GuestView,
}

impl Rig {
    pub fn new(backing: &dyn Backing, depth: u16) -> Rig {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(MEMORY).unwrap()));
        Rig { lane: backing.channel(depth).unwrap(), view }
    }

    /// One operation to its end.
    pub fn run(&mut self, op: &Op<'_>) -> Outcome {
        match self.lane.submit(&self.view, op, Tag(0)) {
            Submitted::Done(outcome) => outcome,
            Submitted::Pending => {
                self.lane.push();
                let mut all = self.finish();
                assert_eq!(all.len(), 1);
                all.pop().unwrap().1
            }
        }
    }

    /// Everything in flight to its end.
    pub fn finish(&mut self) -> Vec<(Tag, Outcome)> {
        let mut ended = Vec::new();
        while self.lane.in_flight() > 0 {
            let before = ended.len();
            self.lane.reap(&mut |tag, outcome| ended.push((tag, outcome)));
            if ended.len() == before {
                assert!(
                    self.readable(20_000),
                    "the waker stays silent with {} in flight",
                    self.lane.in_flight()
                );
            }
        }
        ended
    }

    /// Whether the waker becomes readable within `ms`.
    pub fn readable(&self, ms: i64) -> bool {
        let waker = self.lane.waker().expect("a lane with operations in flight has a waker");
        let time = Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 };
        rustix::event::poll(&mut [PollFd::new(&waker, PollFlags::IN)], Some(&time)).unwrap() == 1
    }

    pub fn read(&mut self, offset: u64, len: u32) -> Result<Vec<u8>, Fault> {
        self.run(&Op::Read { offset, into: &[GuestRange { gpa: 0, len }] })?;
        let mut bytes = vec![0; len as usize];
        self.view.read(0, &mut bytes).unwrap();
        Ok(bytes)
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Outcome {
        self.view.write(0, bytes).unwrap();
        self.run(&Op::Write { offset, from: &[GuestRange { gpa: 0, len: bytes.len() as u32 }] })
    }
}

/// A sparse file of `bytes` in `folder`.
pub fn image(folder: &Path, bytes: u64) -> PathBuf {
    let path = folder.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

/// Says why a test did not run, past the capture of the test harness, so that nobody takes it for a pass. With `IOPLANE_NO_SKIP`
/// set (where everything is known to be there) it is a failure.
pub fn skip(why: &str) {
    let _ = writeln!(std::io::stderr(), "\n*** SKIPPED: {why} ***");
    assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: {why}");
}

/// Runs a command and gives its standard output; `None` if it is not there or fails.
pub fn output(command: &str, arguments: &[&str]) -> Option<String> {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let done = Command::new(command).args(arguments).env("PATH", path).stdin(Stdio::null()).output().ok()?;
    done.status.success().then(|| String::from_utf8_lossy(&done.stdout).trim().to_owned())
}

/// A loop device on a file, taken away again when dropped.
pub struct LoopDevice {
    pub path: String,
    _file: tempfile::TempDir,
}

impl LoopDevice {
    /// `None` where this host or user has no loop devices.
    pub fn new(bytes: u64, sector: u32) -> Option<LoopDevice> {
        let folder = tempfile::tempdir().unwrap();
        let file = image(folder.path(), bytes);
        let sector = sector.to_string();
        let path = output("losetup", &["--find", "--show", "--sector-size", &sector, file.to_str()?])?;
        Some(LoopDevice { path, _file: folder })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        output("losetup", &["--detach", &self.path]);
    }
}

/// A file system on a loop device, mounted; unmounted when dropped.
pub struct Mount {
    pub path: PathBuf,
    folder: Option<tempfile::TempDir>,
    _device: Option<LoopDevice>,
}

impl Mount {
    pub fn ext4(bytes: u64, sector: u32) -> Option<Mount> {
        let device = LoopDevice::new(bytes, sector)?;
        output("mkfs.ext4", &["-q", "-m", "0", "-O", "^has_journal", "-b", "4096", &device.path])?;
        let folder = tempfile::tempdir().unwrap();
        output("mount", &[&device.path, folder.path().to_str()?])?;
        Some(Mount { path: folder.path().to_owned(), folder: Some(folder), _device: Some(device) })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        output("umount", &[self.path.to_str().unwrap()]);
        drop(self.folder.take());
    }
}

/// Every way to open a file here: name, options.
pub fn ways(path: &Path) -> Vec<(String, FileOptions)> {
    let mut ways = Vec::new();
    for engine in [EngineChoice::IoUring, EngineChoice::Threads] {
        for direct in [Direct::On, Direct::Off] {
            ways.push((
                format!("{engine:?} direct {direct:?}"),
                FileOptions { engine, direct, ..FileOptions::new(path) },
            ));
        }
    }
    ways
}
