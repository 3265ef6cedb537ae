//! The limits of one slot. The core lends them to the poller for the length of a poll, in its [`crate::CoreContext`].

use ioplane_scheduler::{LimitPlace, LimitSet, LimitUnit};

/// What holds back the requests of one queue. Times are ns since [`crate::clock::epoch`].
#[derive(Debug)]
pub struct SlotLimits {
    set: LimitSet,
    /// The place that was reserved for the request at the head of the queue.
    place: Option<LimitPlace>,
    /// What has held the last request back that was.
    pub(crate) binding: LimitUnit,
}

impl SlotLimits {
    /// `None` if nothing is limited.
    pub(crate) fn of(set: LimitSet) -> Option<Box<Self>> {
        (!set.is_empty()).then(|| Box::new(SlotLimits { set, place: None, binding: LimitUnit::Requests }))
    }

    /// Lets a request of so many bytes pass, or says when to try again.
    pub(crate) fn admit(&mut self, now: u64, bytes: u64) -> Result<(), u64> {
        // The guest has put another request in the place of the one that had reserved.
        self.give_up_place();
        let admitted = self.set.admit(now, bytes);
        if admitted.is_err() {
            self.binding = self.set.binding(bytes).unwrap_or(LimitUnit::Requests);
        }
        admitted
    }

    /// Takes a place for a request without bytes, once, and lets it pass when its time has come.
    pub(crate) fn reserve(&mut self, now: u64) -> Result<(), u64> {
        let at = self.place.get_or_insert_with(|| self.set.reserve(now, 0)).at;
        if at > now {
            self.binding = LimitUnit::Requests;
            return Err(at);
        }
        self.place = None;
        Ok(())
    }

    fn give_up_place(&mut self) {
        if let Some(place) = self.place.take() {
            self.set.cancel(place, 0);
        }
    }
}

impl Drop for SlotLimits {
    /// The queue leaves its core, or has other limits from now on.
    fn drop(&mut self) {
        self.give_up_place();
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::sync::Arc;

    use ioplane_scheduler::{LimitUnit, RateBucket, RateLimit};

    use super::*;

    /// One request per second, and the bucket that says so.
    fn slow() -> (Arc<RateBucket>, Box<SlotLimits>) {
        let limit = RateLimit { per_second: NonZeroU64::MIN, burst: 0 };
        let bucket = Arc::new(RateBucket::new(limit));
        let mut set = LimitSet::default();
        assert!(set.add(LimitUnit::Requests, bucket.clone()));
        (bucket, SlotLimits::of(set).unwrap())
    }

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_flush_keeps_its_place_and_takes_one_only() {
        let (bucket, mut limits) = slow();
        assert_eq!(limits.admit(0, 4096), Ok(()));
        let at = limits.reserve(0).unwrap_err();
        assert!((SECOND - 10..=SECOND).contains(&at), "{at}");
        // Asked again it has taken nothing more, and nobody passes it meanwhile.
        let behind = bucket.ready_at();
        assert_eq!(limits.reserve(at / 2), Err(at));
        assert_eq!(bucket.ready_at(), behind);
        assert!(bucket.take(at, 1).is_err());
        assert_eq!(limits.reserve(at), Ok(()));
        assert!(limits.reserve(at).is_err(), "the next flush has a place of its own");
    }

    #[test]
    fn a_place_that_is_not_used_is_given_back() {
        let (bucket, mut limits) = slow();
        assert_eq!(limits.admit(0, 0), Ok(()));
        let before = bucket.ready_at();
        assert!(limits.reserve(0).is_err());
        assert!(limits.admit(0, 512).is_err());
        assert_eq!(bucket.ready_at(), before, "another request came to its head");
        assert!(limits.reserve(0).is_err());
        drop(limits);
        assert_eq!(bucket.ready_at(), before, "the queue has left");
        assert!(SlotLimits::of(LimitSet::default()).is_none());
    }
}
