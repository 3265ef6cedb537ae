//! The I/O core's last look at the clock, for pollers that want to know about when they were called without looking themselves.
//!
//! A core looks once in every idle turn and now and then in busy ones, and when it wakes. What it saw lies in a cell of its
//! thread: reading it costs a load.

use std::cell::Cell;
use std::time::Instant;

thread_local! {
    static LOOKED: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// The core of this thread has looked at the clock. Only cores call it.
#[inline]
pub fn looked(now: Instant) {
    LOOKED.set(Some(now));
}

/// The last look of this thread's core, never later than now. On a thread that is no core's (tests that turn a poller by
/// hand) the clock itself.
#[inline]
pub fn last_look() -> Instant {
    LOOKED.get().unwrap_or_else(Instant::now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_look_stays_until_the_next() {
        let before = Instant::now();
        assert!(last_look() >= before, "nobody has looked: the clock itself");
        looked(before);
        assert_eq!(last_look(), before);
        std::thread::spawn(move || assert!(last_look() > before)).join().unwrap();
    }
}
