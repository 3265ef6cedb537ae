//! The functions of a port, the switch between them, and the cable.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ioplane_network::tap_of_frames;
use ioplane_nic::vf82599::Vf82599;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use serde::Serialize;

/// Longest frame that the cable carries.
const LONGEST: usize = 16 << 10;
/// Frames that are taken from the cable at once.
const BATCH: usize = 64;
/// Steps that a function gets at once, and after the last thing that was done to it.
const BURST: u32 = 16;
const AFTERWARDS: u32 = 512;
/// How long nothing is looked at when nothing is to be done.
const IDLE: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// What is known of a function outside of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SiliconReading {
    /// Rules of the silicon that were broken, first to last.
    pub violations: Vec<String>,
    /// Register accesses.
    pub accesses: u64,
    /// Messages that the physical function has taken.
    pub messages: u64,
    /// Frames that it has taken in.
    pub received: u64,
    /// Frames that it has sent.
    pub sent: u64,
    /// Those of them that the cable did not take.
    pub unsent: u64,
}

/// One function, as the port and its owner share it.
pub(super) struct Shared {
    vf: Mutex<Vf82599>,
    pub(super) accesses: AtomicU64,
    received: AtomicU64,
    sent: AtomicU64,
    unsent: AtomicU64,
}

impl Shared {
    pub(super) fn vf(&self) -> MutexGuard<'_, Vf82599> {
        self.vf.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Inner {
    functions: Vec<Arc<Shared>>,
    cable: OwnedFd,
    /// Somebody has done something to a function.
    done: OwnedFd,
    stop: AtomicBool,
}

/// A running port. Its time ends with it.
pub struct SiliconPort {
    inner: Arc<Inner>,
    thread: Option<JoinHandle<()>>,
}

/// What a function's owner tells its port.
#[derive(Clone)]
pub(super) struct Wake(Arc<Inner>);

impl Wake {
    pub(super) fn wake(&self) {
        // A full counter is readable too.
        let _ = rustix::io::write(&self.0.done, &1u64.to_ne_bytes());
    }
}

impl SiliconPort {
    /// One with these functions, whose cable is the TAP interface `cable`, made if it is not there.
    pub fn start(functions: Vec<Vf82599>, cable: &str) -> io::Result<SiliconPort> {
        let cable = tap_of_frames(cable).map_err(io::Error::other)?;
        let shared = |vf| {
            let none = AtomicU64::default;
            let [accesses, received, sent, unsent] = [none(), none(), none(), none()];
            Arc::new(Shared { vf: Mutex::new(vf), accesses, received, sent, unsent })
        };
        let done = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let functions = functions.into_iter().map(shared).collect();
        let inner = Arc::new(Inner { functions, cable, done, stop: AtomicBool::new(false) });
        let runs = inner.clone();
        let thread = std::thread::Builder::new().name("silicon".into()).spawn(move || runs.run())?;
        Ok(SiliconPort { inner, thread: Some(thread) })
    }

    pub(super) fn function(&self, number: usize) -> Option<Arc<Shared>> {
        self.inner.functions.get(number).cloned()
    }

    pub(super) fn wake(&self) -> Wake {
        Wake(self.inner.clone())
    }

    /// How many functions it has.
    pub fn functions(&self) -> usize {
        self.inner.functions.len()
    }

    /// What is known of each.
    pub fn read(&self) -> Vec<SiliconReading> {
        let read = |shared: &Arc<Shared>| {
            let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
            let vf = shared.vf();
            SiliconReading {
                violations: vf.violations().iter().map(|violation| format!("{violation:x?}")).collect(),
                messages: vf.pf().taken,
                accesses: count(&shared.accesses),
                received: count(&shared.received),
                sent: count(&shared.sent),
                unsent: count(&shared.unsent),
            }
        };
        self.inner.functions.iter().map(read).collect()
    }
}

impl Drop for SiliconPort {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Relaxed);
        self.wake().wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn run(&self) {
        let mut frame = vec![0; LONGEST];
        let mut left = AFTERWARDS;
        while !self.stop.load(Ordering::Relaxed) {
            let wait = if left > 0 { Timespec { tv_sec: 0, tv_nsec: 0 } } else { IDLE };
            let mut files = [&self.cable, &self.done].map(|file| PollFd::new(file, PollFlags::IN));
            let _ = rustix::event::poll(&mut files, Some(&wait));
            let [cable, done] = files.map(|file| file.revents().contains(PollFlags::IN));
            if done {
                let _ = rustix::io::read(self.done.as_fd(), &mut [0; 8]);
            }
            if cable {
                for _ in 0..BATCH {
                    let Ok(len) = rustix::io::read(&self.cable, &mut frame[..]) else { break };
                    self.deliver(&frame[..len], None);
                }
            }
            if done || cable {
                left = AFTERWARDS;
            }
            left = if self.steps() { AFTERWARDS } else { left.saturating_sub(BURST) };
        }
    }

    /// To each function but the one that sent it.
    fn deliver(&self, frame: &[u8], from: Option<usize>) {
        for (number, shared) in self.functions.iter().enumerate() {
            if Some(number) != from && shared.vf().receive(frame) {
                shared.received.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Some steps of each function. Whether any has sent something.
    fn steps(&self) -> bool {
        let mut any = false;
        for (number, shared) in self.functions.iter().enumerate() {
            let frames = {
                let mut vf = shared.vf();
                (0..BURST).for_each(|_| vf.step());
                vf.take_sent()
            };
            any |= !frames.is_empty();
            shared.sent.fetch_add(frames.len() as u64, Ordering::Relaxed);
            for frame in frames {
                // One that the cable has no room for is lost, as at the next switch.
                if rustix::io::write(&self.cable, &frame).is_err() {
                    shared.unsent.fetch_add(1, Ordering::Relaxed);
                }
                self.deliver(&frame, Some(number));
            }
        }
        any
    }
}
