//! Limits of requests and bytes per second, with bursts: token buckets that several cores share.
//!
//! A bucket is one word: the time at which it would be full again. Taking a token moves that time on, and is refused while it lies further
//! ahead than the burst takes to refill. So over any interval T at most `rate·T + burst` is let through, and the one request that
//! was let through last (a request larger than the burst passes, and the next one waits for longer). Any number of cores take from one
//! bucket with a compare-and-swap each; a queue without a limit touches none.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ticks of a bucket's clock per ns: one of 10 million requests per second is counted to 0.02 %, and the clock lasts 9 years.
const TICKS_PER_NS: u64 = 64;

/// Fraction bits of the ticks that one unit takes.
const FRACTION: u32 = 20;

/// The shortest time that a burst lasts at its rate, ns. A core looks at a limited queue some tens of microseconds late, and what is not taken
/// meanwhile is lost to a bucket that holds less.
const SHORTEST_BURST_NS: u64 = 1_000_000;

/// A rate and what may go beyond it at once. In requests, or in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Units per second.
    pub per_second: NonZeroU64,
    /// Units that may pass at once after a pause. Less than what the rate lets through in a millisecond counts as that much.
    pub burst: u64,
}

impl RateLimit {
    /// The burst that holds.
    pub fn effective_burst(&self) -> u64 {
        let shortest = u128::from(self.per_second.get()) * u128::from(SHORTEST_BURST_NS) / 1_000_000_000;
        self.burst.max(shortest as u64)
    }

    /// Ticks per unit, with [`FRACTION`] bits after the point.
    fn ticks_per_unit(&self) -> u64 {
        let second = u128::from(1_000_000_000 * TICKS_PER_NS) << FRACTION;
        u64::try_from(second / u128::from(self.per_second.get())).unwrap_or(u64::MAX).max(1)
    }
}

/// Ticks that so many units take, rounded up.
fn ticks(units: u64, per_unit: u64) -> u64 {
    let exact = u128::from(units) * u128::from(per_unit);
    u64::try_from(exact.div_ceil(1 << FRACTION)).unwrap_or(u64::MAX)
}

/// One bucket. Shared by every core that serves a queue under its limit. Times are ns from an epoch that all of these share.
#[derive(Debug)]
pub struct RateBucket {
    /// Tick at which the bucket is full again, or was.
    full_at: AtomicU64,
    per_unit: AtomicU64,
    /// Ticks that the burst takes to refill.
    burst: AtomicU64,
}

impl RateBucket {
    /// A full bucket.
    pub fn new(limit: RateLimit) -> Self {
        let per_unit = limit.ticks_per_unit();
        RateBucket {
            full_at: AtomicU64::new(0),
            per_unit: AtomicU64::new(per_unit),
            burst: AtomicU64::new(ticks(limit.effective_burst(), per_unit)),
        }
    }

    /// Another rate and burst, from now on: what has been taken ahead stays taken, in units. Control plane. A core that takes at the same moment may
    /// still take one request at the old rate.
    pub fn change(&self, limit: RateLimit, now_ns: u64) {
        let now = now_ns.saturating_mul(TICKS_PER_NS);
        let new = limit.ticks_per_unit();
        let old = self.per_unit.swap(new, Ordering::AcqRel);
        let burst = ticks(limit.effective_burst(), new);
        let old_burst = self.burst.swap(burst, Ordering::AcqRel);
        let convert = |full_at: u64| {
            // What is in the bucket stays in it, as far as there is room, and so does what it owes.
            let ahead = u128::from(full_at.saturating_sub(now)) * u128::from(new) / u128::from(old);
            let old_burst = u128::from(old_burst) * u128::from(new) / u128::from(old);
            let ahead = (ahead + u128::from(burst)).saturating_sub(old_burst);
            now.saturating_add(u64::try_from(ahead).unwrap_or(u64::MAX))
        };
        let _ = self.full_at.fetch_update(Ordering::AcqRel, Ordering::Acquire, |at| Some(convert(at)));
    }

    /// When the next request may pass, ns; a time that is past if it may pass now.
    #[inline]
    pub fn ready_at(&self) -> u64 {
        let at = self.full_at.load(Ordering::Acquire).saturating_sub(self.burst.load(Ordering::Acquire));
        at.div_ceil(TICKS_PER_NS)
    }

    /// Takes so many units, or says when to try again, ns.
    #[inline]
    pub fn take(&self, now_ns: u64, units: u64) -> Result<(), u64> {
        let now = now_ns.saturating_mul(TICKS_PER_NS);
        let cost = ticks(units, self.per_unit.load(Ordering::Acquire));
        let burst = self.burst.load(Ordering::Acquire);
        let mut full_at = self.full_at.load(Ordering::Acquire);
        loop {
            if full_at > now.saturating_add(burst) {
                return Err((full_at - burst).div_ceil(TICKS_PER_NS));
            }
            let next = full_at.max(now).saturating_add(cost);
            match self.full_at.compare_exchange_weak(full_at, next, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Ok(()),
                Err(other) => full_at = other,
            }
        }
    }

    /// Takes so many units in any case and says from when on they may be used, ns. Whoever comes later waits for longer, so nobody overtakes.
    pub fn reserve(&self, now_ns: u64, units: u64) -> u64 {
        let now = now_ns.saturating_mul(TICKS_PER_NS);
        let cost = ticks(units, self.per_unit.load(Ordering::Acquire));
        let before = self
            .full_at
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |at| Some(at.max(now).saturating_add(cost)))
            .unwrap_or_else(|at| at);
        before.saturating_sub(self.burst.load(Ordering::Acquire)).div_ceil(TICKS_PER_NS)
    }

    /// Gives back what was taken and not used.
    pub fn give_back(&self, units: u64) {
        let cost = ticks(units, self.per_unit.load(Ordering::Acquire));
        let _ = self
            .full_at
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |at| Some(at.saturating_sub(cost)));
    }
}

/// What a bucket counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LimitUnit {
    /// Requests, or frames.
    Requests,
    /// Bytes.
    Bytes,
}

/// One limit of a set.
#[derive(Debug, Clone)]
struct Limit {
    unit: LimitUnit,
    bucket: Arc<RateBucket>,
    /// A part of the bucket's rate that is kept for this queue and those that share it.
    reserved: Option<Arc<RateBucket>>,
}

/// Which bucket a request was let through by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Source {
    #[default]
    Shared,
    /// The reserved one. The shared one is charged as well, so that the others get what is left.
    Reserved,
}

impl Limit {
    /// What the request counts in it. What carries nothing (a flush) does not wait for what others carry.
    fn units(&self, bytes: u64) -> Option<u64> {
        match self.unit {
            LimitUnit::Requests => Some(1),
            LimitUnit::Bytes => (bytes > 0).then_some(bytes),
        }
    }

    fn ready_at(&self) -> u64 {
        let shared = self.bucket.ready_at();
        self.reserved.as_ref().map_or(shared, |reserved| reserved.ready_at().min(shared))
    }

    fn take(&self, now_ns: u64, units: u64) -> Result<Source, u64> {
        let Some(reserved) = &self.reserved else {
            return self.bucket.take(now_ns, units).map(|()| Source::Shared);
        };
        match reserved.take(now_ns, units) {
            Ok(()) => {
                self.bucket.reserve(now_ns, units);
                Ok(Source::Reserved)
            }
            Err(at) => {
                self.bucket.take(now_ns, units).map(|()| Source::Shared).map_err(|other| at.min(other))
            }
        }
    }

    /// See [`LimitSet::reserve`].
    fn reserve(&self, now_ns: u64, units: u64) -> (Source, u64) {
        let shared = || (Source::Shared, self.bucket.reserve(now_ns, units));
        let Some(reserved) = &self.reserved else { return shared() };
        let ready = reserved.ready_at();
        // Where the shared rate has room, what is reserved is kept for when it has none.
        if ready > now_ns && self.bucket.ready_at() < ready {
            return shared();
        }
        self.bucket.reserve(now_ns, units);
        (Source::Reserved, reserved.reserve(now_ns, units))
    }

    fn give_back(&self, source: Source, units: u64) {
        self.bucket.give_back(units);
        if let (Source::Reserved, Some(reserved)) = (source, &self.reserved) {
            reserved.give_back(units);
        }
    }
}

/// The place of a request in the order of its limits. Given back by [`LimitSet::cancel`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LimitPlace {
    /// From when on the request may pass, ns.
    pub at: u64,
    sources: [Source; LimitSet::MOST],
}

/// All limits of one queue in one direction: of its device and of its group, in requests and in bytes. A NIC has one set per direction.
/// Cloned to the core that serves the queue; nothing is allocated there.
///
/// A limit may have a reserved part ([`LimitSet::add_reserved`]). A request passes by the reserved bucket if that lets it through, and by the shared one
/// otherwise. Both are charged for what is reserved, so the shared bucket may owe what reserved ones have let through: at most the sum of their bursts, as
/// long as their rates together are not more than its own. Over any interval T all queues of one shared bucket together get at most
/// `rate·T + burst`, the bursts of the reserved buckets, and one request for each bucket; a queue that always asks gets at least what is reserved for it.
#[derive(Debug, Clone, Default)]
pub struct LimitSet {
    limits: [Option<Limit>; LimitSet::MOST],
}

impl LimitSet {
    /// Limits in a set: two of the device, two of its group.
    pub const MOST: usize = 4;

    /// With one limit more. False if there are [`LimitSet::MOST`] already.
    pub fn add(&mut self, unit: LimitUnit, bucket: Arc<RateBucket>) -> bool {
        self.enter(Limit { unit, bucket, reserved: None })
    }

    /// The same, with a part of the bucket's rate that is reserved for this queue and those that are given the same `reserved`.
    pub fn add_reserved(
        &mut self,
        unit: LimitUnit,
        bucket: Arc<RateBucket>,
        reserved: Arc<RateBucket>,
    ) -> bool {
        self.enter(Limit { unit, bucket, reserved: Some(reserved) })
    }

    fn enter(&mut self, limit: Limit) -> bool {
        let free = self.limits.iter_mut().find(|place| place.is_none());
        free.map(|place| *place = Some(limit)).is_some()
    }

    /// Whether nothing is limited.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.limits[0].is_none()
    }

    /// The limits that a request of so many bytes counts in, each with its place and how much it counts.
    fn each(&self, bytes: u64) -> impl Iterator<Item = (usize, &Limit, u64)> {
        let limits = self.limits.iter().enumerate();
        limits.filter_map(move |(place, limit)| {
            let limit = limit.as_ref()?;
            Some((place, limit, limit.units(bytes)?))
        })
    }

    /// Lets one request of so many bytes pass, or says when to try again, ns. All limits are taken from, or none.
    #[inline]
    pub fn admit(&self, now_ns: u64, bytes: u64) -> Result<(), u64> {
        if self.is_empty() {
            return Ok(());
        }
        // Most are refused here, before anything is taken that another core would miss.
        if let Some(at) = self.each(bytes).map(|(_, limit, _)| limit.ready_at()).max()
            && at > now_ns
        {
            return Err(at);
        }
        let mut sources = [Source::default(); LimitSet::MOST];
        for (place, limit, units) in self.each(bytes) {
            match limit.take(now_ns, units) {
                Ok(source) => sources[place] = source,
                Err(at) => {
                    let taken = self.each(bytes).take_while(|(before, ..)| *before < place);
                    taken.for_each(|(before, limit, units)| limit.give_back(sources[before], units));
                    return Err(at);
                }
            }
        }
        Ok(())
    }

    /// What holds a request of so many bytes back for longest; nothing without limits. For whoever was refused.
    pub fn binding(&self, bytes: u64) -> Option<LimitUnit> {
        self.each(bytes).max_by_key(|(_, limit, _)| limit.ready_at()).map(|(_, limit, _)| limit.unit)
    }

    /// The place of one request in the order of its limits: from the time in it on it may pass, whatever others take meanwhile. For
    /// a flush, of which a queue holds one at a time.
    pub fn reserve(&self, now_ns: u64, bytes: u64) -> LimitPlace {
        let mut reserved = LimitPlace { at: 0, sources: [Source::default(); LimitSet::MOST] };
        for (place, limit, units) in self.each(bytes) {
            let (source, at) = limit.reserve(now_ns, units);
            reserved.sources[place] = source;
            reserved.at = reserved.at.max(at);
        }
        reserved
    }

    /// Gives a place back that was reserved for a request that does not come: its queue has left.
    pub fn cancel(&self, place: LimitPlace, bytes: u64) {
        self.each(bytes).for_each(|(at, limit, units)| limit.give_back(place.sources[at], units));
    }
}
