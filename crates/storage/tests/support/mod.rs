//! What the tests of this crate share: a channel with a guest behind it, throw-away images and loop devices.
#![allow(dead_code)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{RingChoice, context_with_ring};
use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::*;
use rustix::event::{PollFd, PollFlags, Timespec};

/// Bytes of the guest's memory.
pub const MEMORY: u64 = 1 << 20;

/// A channel and a guest.
pub struct Rig {
    pub channel: Box<dyn IoChannel>,
    pub view: GuestView,
    context: CoreContext,
}

impl Rig {
    pub fn new(backing: &dyn Backing, depth: u16) -> Rig {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(MEMORY).unwrap()));
        let context = context_with_ring(RingChoice::Plain).unwrap();
        Rig { channel: backing.channel(depth).unwrap(), view, context }
    }

    pub fn submit(&mut self, op: &Op<'_>, tag: Tag) -> Submitted {
        self.channel.submit(&mut self.context, &self.view, op, tag)
    }

    /// What a poller and its core do at the end of a turn.
    pub fn push(&mut self) {
        self.channel.push(&mut self.context);
        self.enter();
    }

    pub fn reap(&mut self, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let ended = self.channel.reap(&mut self.context, done);
        self.enter();
        ended
    }

    fn enter(&mut self) {
        if let Some(io) = self.context.io() {
            io.enter();
        }
    }

    /// One operation to its end.
    pub fn run(&mut self, op: &Op<'_>) -> Outcome {
        match self.submit(op, Tag(0)) {
            Submitted::Done(outcome) => outcome,
            Submitted::Pending => {
                self.push();
                let mut all = self.finish();
                assert_eq!(all.len(), 1);
                all.pop().unwrap().1
            }
        }
    }

    /// Everything in flight to its end.
    pub fn finish(&mut self) -> Vec<(Tag, Outcome)> {
        let mut ended = Vec::new();
        while self.channel.in_flight() > 0 {
            let before = ended.len();
            self.reap(&mut |tag, outcome| ended.push((tag, outcome)));
            if ended.len() == before && !self.channel.held_back() {
                assert!(
                    self.readable(20_000),
                    "the waker stays silent with {} in flight",
                    self.channel.in_flight()
                );
            }
        }
        ended
    }

    /// Whether the waker becomes readable within `ms`, or something ends on the ring.
    pub fn readable(&mut self, ms: u64) -> bool {
        let deadline = Instant::now() + Duration::from_millis(ms);
        loop {
            let time = Timespec { tv_sec: 0, tv_nsec: 0 };
            if let Some(waker) = self.channel.waker()
                && rustix::event::poll(&mut [PollFd::new(&waker, PollFlags::IN)], Some(&time)).unwrap() == 1
            {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now()).min(Duration::from_millis(1));
            if self.context.io().is_some_and(|io| io.wait(left)) {
                return true;
            }
            if left.is_zero() {
                return false;
            }
        }
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

/// As a core does it: the queue leaves, and what is in flight is seen to its end by the ring.
impl Drop for Rig {
    fn drop(&mut self) {
        self.channel.detach(&mut self.context);
        let context = std::mem::take(&mut self.context);
        std::thread::spawn(move || drop(context));
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
