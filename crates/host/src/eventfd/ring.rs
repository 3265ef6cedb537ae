//! Raising an eventfd by an io_uring of its own, which it is registered with: the kernel raises it when a request has ended, as
//! with AIO. For systems without AIO; costs a descriptor and some pages for each eventfd.

#![allow(unsafe_code)]
// UNSAFETY: submitting to an io_uring is unsafe, for what requests point at; a no-op points at nothing.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use io_uring::{IoUring, opcode};

/// An io_uring that raises one eventfd.
pub(super) struct Ring {
    /// Only ever tried: nobody waits for it.
    ring: Mutex<IoUring>,
    wanted: AtomicBool,
}

impl Ring {
    /// Fails if the kernel gives no io_uring, or if `eventfd` is none.
    pub(super) fn new(eventfd: BorrowedFd<'_>) -> io::Result<Self> {
        let ring = IoUring::new(1)?;
        ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        Ok(Ring { ring: Mutex::new(ring), wanted: AtomicBool::new(false) })
    }

    /// Raises the eventfd by one, unless its counter is full; or has the thread do it that is at it now.
    pub(super) fn raise(&self) {
        self.wanted.store(true, Ordering::SeqCst);
        // Whoever finds the ring taken leaves its wish to who has it, who looks again after giving it back.
        while self.wanted.load(Ordering::SeqCst) {
            let Ok(mut ring) = self.ring.try_lock() else { return };
            if self.wanted.swap(false, Ordering::SeqCst) {
                // SAFETY: a no-op points at nothing.
                let _ = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
                let _ = ring.submit();
                ring.completion().for_each(drop);
            }
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").finish_non_exhaustive()
    }
}
