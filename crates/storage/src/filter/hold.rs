//! Disks that take their time.

#![expect(clippy::disallowed_types, reason = "the list of channels to wake at a release: control plane")]

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::gate::{Judge, Verdict, Wake, gate};
use crate::channel::{Backing, BackingInfo, IoChannel, Op, StorageError};
use crate::orphan::OrphanedIo;

/// Every operation begins `delay` after it was submitted.
#[derive(Debug)]
pub struct Delay {
    below: Arc<dyn Backing>,
    judge: Arc<Later>,
    orphans: Arc<OrphanedIo>,
}

#[derive(Debug)]
struct Later(Duration);

impl Judge for Later {
    fn judge(&self, _: &Op<'_>) -> Verdict {
        Verdict::Until(Instant::now() + self.0)
    }
}

impl Delay {
    /// Puts `delay` in front of `below`.
    pub fn new(below: Arc<dyn Backing>, delay: Duration) -> Arc<Self> {
        Arc::new(Delay { below, judge: Arc::new(Later(delay)), orphans: Arc::default() })
    }
}

/// A disk that can be stalled: what is submitted from then on hangs until it is released, and happens then, in order, also if
/// its channel has been dropped meanwhile (until that is over [`Backing::wait_quiet`] says no).
pub struct Stall {
    below: Arc<dyn Backing>,
    judge: Arc<Stopped>,
    channels: Mutex<Vec<Weak<Wake>>>,
    orphans: Arc<OrphanedIo>,
}

#[derive(Debug)]
struct Stopped(AtomicBool);

impl Judge for Stopped {
    fn judge(&self, _: &Op<'_>) -> Verdict {
        if self.open() { Verdict::Pass } else { Verdict::Hold }
    }

    fn open(&self) -> bool {
        !self.0.load(Ordering::Acquire)
    }
}

impl Stall {
    /// A disk that is not stalled yet.
    pub fn new(below: Arc<dyn Backing>) -> Arc<Self> {
        let judge = Arc::new(Stopped(AtomicBool::new(false)));
        Arc::new(Stall { below, judge, channels: Mutex::default(), orphans: Arc::default() })
    }

    /// From now on operations hang.
    pub fn stall(&self) {
        self.judge.0.store(true, Ordering::Release);
    }

    /// Those that hang may go, and new ones pass.
    pub fn release(&self) {
        self.judge.0.store(false, Ordering::Release);
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        channels.retain(|channel| channel.upgrade().map(|channel| channel.raise()).is_some());
    }
}

impl fmt::Debug for Stall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stall")
            .field("below", &self.below)
            .field("judge", &self.judge)
            .finish_non_exhaustive()
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        // Nobody could release them any more.
        self.release();
    }
}

impl Backing for Delay {
    fn info(&self) -> BackingInfo {
        self.below.info()
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        Ok(gate(&*self.below, depth, &self.judge, &self.orphans)?.0)
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.below.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.orphans.wait_quiet(deadline) && self.below.wait_quiet(deadline)
    }
}

impl Backing for Stall {
    fn info(&self) -> BackingInfo {
        self.below.info()
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        let (channel, wake) = gate(&*self.below, depth, &self.judge, &self.orphans)?;
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        channels.retain(|channel| channel.strong_count() > 0);
        channels.push(Arc::downgrade(&wake));
        Ok(channel)
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.below.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.orphans.wait_quiet(deadline) && self.below.wait_quiet(deadline)
    }
}
