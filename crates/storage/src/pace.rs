//! What threads of the control side need that move data beside a guest: a rate that they keep, memory, and a short wait for their channels.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_memory::{GuestMap, GuestView};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::channel::{Backing, IoChannel, StorageError};

/// How often somebody looks who waits for what ends without a word.
pub(crate) const LOOK: Duration = Duration::from_millis(1);
/// How much may be moved at once after a pause, where there is a rate.
const BURST: Duration = Duration::from_millis(100);

/// Bytes per second at most.
#[derive(Debug)]
pub(crate) struct Pace {
    rate: Option<f64>,
    /// The most that is moved at once: more than a low rate allows in [`BURST`].
    largest: f64,
    filled: Instant,
    credit: f64,
}

impl Pace {
    /// `rate`: bytes per second. `largest`: bytes that are moved at once.
    pub fn new(rate: Option<u64>, largest: u64, now: Instant) -> Self {
        Pace { rate: rate.map(|rate| rate as f64), largest: largest as f64, filled: now, credit: 0.0 }
    }

    /// Whether something may begin now. Always without a rate.
    pub fn may_begin(&mut self, now: Instant) -> bool {
        let Some(rate) = self.rate else { return true };
        self.credit += rate * now.duration_since(self.filled).as_secs_f64();
        self.credit = self.credit.min((rate * BURST.as_secs_f64()).max(self.largest));
        self.filled = now;
        self.credit >= 0.0
    }

    /// So many bytes have been moved.
    pub fn spend(&mut self, bytes: u64) {
        self.credit -= bytes as f64;
    }
}

/// Memory for `bytes` in transit to or from `image`. `doing`: what for, if there is none.
pub(crate) fn transit_memory(
    bytes: u64,
    image: &dyn Backing,
    doing: &'static str,
) -> Result<GuestView, StorageError> {
    let memory = GuestMap::anonymous(bytes).map_err(|error| StorageError::Os {
        image: image.info().name,
        doing,
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(GuestView::new(Arc::new(memory)))
}

/// Waits until one of both channels has something to reap, for [`LOOK`] at most.
pub(crate) fn wait_for_either(one: &dyn IoChannel, other: &dyn IoChannel) {
    let wakers = [one.waker(), other.waker()];
    let mut ready: Vec<PollFd<'_>> =
        wakers.iter().flatten().map(|waker| PollFd::new(waker, PollFlags::IN)).collect();
    let time = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
    let _ = rustix::event::poll(&mut ready, Some(&time));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Over ten seconds of a clock of its own, in steps of a millisecond.
    #[test]
    fn a_rate_is_kept() {
        const RUN: u64 = 256 << 10;
        for rate in [4 << 10, 1 << 20, 300 << 20u64] {
            let start = Instant::now();
            let mut pace = Pace::new(Some(rate), RUN, start);
            let mut moved = 0;
            for step in 0..10_000 {
                let now = start + Duration::from_millis(step);
                while pace.may_begin(now) {
                    pace.spend(RUN);
                    moved += RUN;
                }
            }
            let most = 10 * rate + rate / 10 + 2 * RUN;
            assert!(moved <= most && moved + 2 * RUN >= 10 * rate, "{moved} bytes in 10 s at {rate}");
        }
        assert!(Pace::new(None, RUN, Instant::now()).may_begin(Instant::now()));
    }
}
