//! How the control side tells a poller that something it waits for is there, also one whose core sleeps.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Rung by any thread, heard by one poller.
#[derive(Debug)]
pub(super) struct Bell {
    event: OwnedFd,
    rung: AtomicBool,
}

impl Bell {
    /// One that is quiet.
    pub fn new() -> std::io::Result<Arc<Bell>> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Bell { event, rung: AtomicBool::new(false) }))
    }

    /// The poller looks before long at what was stored before.
    pub fn ring(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Whether it was rung: what was stored before that is seen from now on.
    #[inline]
    pub fn heard(&self) -> bool {
        self.rung.load(Ordering::Relaxed) && self.quieten()
    }

    #[cold]
    fn quieten(&self) -> bool {
        // Between the mark and the event of whoever rings there is nothing to read: it is heard in the next poll.
        let quiet = rustix::io::read(&self.event, &mut [0; 8]).is_ok();
        if quiet {
            self.rung.swap(false, Ordering::AcqRel);
        }
        quiet
    }
}

impl AsFd for Bell {
    /// Readable while it is rung.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    fn readable(bell: &Bell) -> bool {
        poll(&mut [PollFd::new(bell, PollFlags::IN)], Some(&rustix::time::Timespec::default())).unwrap() > 0
    }

    #[test]
    fn what_was_stored_before_it_was_rung_is_seen_and_then_it_is_quiet() {
        const COUNT: u64 = 20_000;
        let bell = Bell::new().unwrap();
        let stored = AtomicU64::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..=COUNT {
                    stored.store(number, Ordering::Release);
                    bell.ring();
                }
            });
            let mut seen = 0;
            while seen < COUNT {
                if bell.heard() {
                    seen = stored.load(Ordering::Acquire);
                } else {
                    std::thread::yield_now();
                }
            }
        });
        // The last may have been seen with the ring before it.
        bell.heard();
        assert!(!bell.heard() && !readable(&bell), "a core that sleeps would be woken for ever");
        bell.ring();
        bell.ring();
        assert!(readable(&bell) && bell.heard() && !bell.heard() && !readable(&bell));
    }
}
