//! What a toy's "disk" can do: answer, or not.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

use crate::conformance::Valve;

/// A stalled disk at the turn of a hand: while it is shut nothing that was taken ends.
#[derive(Debug)]
pub struct Gate {
    shut: AtomicBool,
    events: Vec<OwnedFd>,
}

impl Gate {
    /// An open gate for `queues` pollers.
    pub fn new(queues: u16) -> Arc<Self> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        Arc::new(Gate { shut: AtomicBool::new(false), events: (0..queues).map(|_| event()).collect() })
    }

    /// Stalls.
    pub fn shut(&self) {
        self.shut.store(true, Ordering::SeqCst);
    }

    /// Answers again.
    pub fn open(&self) {
        self.shut.store(false, Ordering::SeqCst);
        for event in &self.events {
            let _ = rustix::io::write(event, &1u64.to_ne_bytes());
        }
    }

    pub(super) fn is_shut(&self) -> bool {
        self.shut.load(Ordering::SeqCst)
    }

    pub(super) fn event(&self, queue: u16) -> BorrowedFd<'_> {
        self.events[usize::from(queue)].as_fd()
    }
}

impl Valve for Gate {
    fn shut(&self) {
        Gate::shut(self);
    }

    fn open(&self) {
        Gate::open(self);
    }
}

/// Empties an eventfd; says what it held.
pub(super) fn drain(fd: BorrowedFd<'_>) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(fd, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}
