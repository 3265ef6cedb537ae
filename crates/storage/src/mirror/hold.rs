//! A rate to which a guest's writes are held while they make more work for the copier than it does (docs/decisions/0047-swap.md).

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ioplane_device::clock::since_epoch;
use ioplane_scheduler::{RateBucket, RateLimit};

/// Shared by all queues of a disk.
#[derive(Debug)]
pub(super) struct Hold {
    on: AtomicBool,
    bucket: RateBucket,
}

/// What may be marked at once after a pause: what the rate allows in a tenth of a second, as with the limits of a disk.
fn limit(per_second: NonZeroU64) -> RateLimit {
    RateLimit { per_second, burst: per_second.get() / 10 }
}

impl Default for Hold {
    fn default() -> Self {
        Hold { on: AtomicBool::new(false), bucket: RateBucket::new(limit(NonZeroU64::MIN)) }
    }
}

impl Hold {
    /// Control plane.
    pub fn hold(&self, per_second: NonZeroU64, now: Instant) {
        self.bucket.change(limit(per_second), since_epoch(now));
        self.on.store(true, Ordering::SeqCst);
    }

    pub fn release(&self) {
        self.on.store(false, Ordering::SeqCst);
    }

    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Lets so many bytes be marked, or says when to ask again, ns since the epoch of limits.
    pub fn take(&self, now: Instant, bytes: u64) -> Result<(), u64> {
        self.bucket.take(since_epoch(now), bytes)
    }

    /// They are not marked after all.
    pub fn give_back(&self, bytes: u64) {
        self.bucket.give_back(bytes);
    }
}
