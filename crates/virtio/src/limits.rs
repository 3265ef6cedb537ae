//! Limits of a device in one direction.

use std::sync::Arc;
use std::time::Instant;

use ioplane_device::clock::since_epoch;
use ioplane_scheduler::{LimitSet, LimitUnit, RateBucket, RateLimit};

/// Limits that devices of a group have together in one direction.
pub type SharedLimits = Vec<(LimitUnit, Arc<RateBucket>)>;

/// What limits a device in one direction: its own limits, and those of its group. Clones share the buckets, so that several queues, and several
/// front ends of one device, have one limit together.
#[derive(Debug, Clone, Default)]
pub struct DeviceLimits {
    requests: Option<Arc<RateBucket>>,
    bytes: Option<Arc<RateBucket>>,
    group: SharedLimits,
}

impl DeviceLimits {
    /// The device's own limits are these from now on. One that is another than before goes on from what was taken of it.
    pub fn change(&mut self, requests: Option<RateLimit>, bytes: Option<RateLimit>, now: Instant) {
        let now = since_epoch(now);
        for (bucket, limit) in [(&mut self.requests, requests), (&mut self.bytes, bytes)] {
            match (&*bucket, limit) {
                (Some(bucket), Some(limit)) => bucket.change(limit, now),
                (_, limit) => *bucket = limit.map(|limit| Arc::new(RateBucket::new(limit))),
            }
        }
    }

    /// The limits that it has together with others.
    pub fn join(&mut self, group: SharedLimits) {
        self.group = group;
    }

    /// Its own limits, for those who have them together with it.
    pub fn own(&self) -> SharedLimits {
        let own = [(LimitUnit::Requests, &self.requests), (LimitUnit::Bytes, &self.bytes)];
        own.into_iter().filter_map(|(unit, bucket)| Some((unit, bucket.clone()?))).collect()
    }

    /// All of them, for a queue. A group has two at most; what is beyond [`LimitSet::MOST`] is left out.
    pub fn set(&self) -> LimitSet {
        let mut set = LimitSet::default();
        for (unit, bucket) in self.own().into_iter().chain(self.group.iter().cloned()) {
            let added = set.add(unit, bucket);
            debug_assert!(added, "more limits than a set has room for");
        }
        set
    }
}
