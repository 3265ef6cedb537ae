//! Where parked pollers go: one inbox per device.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use atomic_waker::AtomicWaker;
use crossbeam_queue::SegQueue;

use crate::parked::{Parked, PollerId};

/// The parked pollers of one device: I/O cores push them, the device's one owner pops them. Nothing that has arrived is
/// lost, whether or not anybody is waiting.
#[derive(Debug, Default)]
pub struct ParkedInbox {
    arrived: SegQueue<(PollerId, Parked)>,
    waker: AtomicWaker,
}

impl ParkedInbox {
    /// Adds a parked poller and wakes the owner. Called on an I/O core.
    pub(crate) fn push(&self, id: PollerId, parked: Parked) {
        self.arrived.push((id, parked));
        self.wake();
    }

    /// Wakes the owner if it waits.
    pub(crate) fn wake(&self) {
        self.waker.wake();
    }

    /// The next parked poller.
    pub(crate) fn pop(&self) -> Option<(PollerId, Parked)> {
        self.arrived.pop()
    }

    /// Registers the owner's task, to be woken at the next arrival or acknowledgement.
    pub(crate) fn register(&self, waker: &Waker) {
        self.waker.register(waker);
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// How long a thread parks at a time that waits for as long as it takes.
const ROUND: Duration = Duration::from_secs(60);

/// Blocks the calling thread until `poll` is ready, for as long as that takes.
pub(crate) fn block<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
    loop {
        if let Some(done) = block_until(Instant::now() + ROUND, &mut poll) {
            return done;
        }
    }
}

/// Blocks the calling thread (a vCPU or a socket thread, never an I/O core) until `poll` is ready or `deadline` has
/// passed.
pub(crate) fn block_until<T>(
    deadline: Instant,
    mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Option<T> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(done) = poll(&mut context) {
            return Some(done);
        }
        let left = deadline.checked_duration_since(Instant::now())?;
        std::thread::park_timeout(left);
    }
}
