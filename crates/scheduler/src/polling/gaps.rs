//! How long a queue is silent between two requests, as a histogram that forgets.

/// Buckets: below 256 ns, two for each power of two up to 4.3 s, and what is longer.
pub(super) const BUCKETS: usize = 50;

/// What one gap adds to its bucket, so that halving keeps a trace of it for some time.
const ONE: u32 = 256;

/// Gaps after which all counts are halved: the memory is some 512 gaps long.
const FULL: u32 = 512 * ONE;

/// A core that polls for nearly all of the time anyway polls on where arming would save less than one part in so many: who waits for a wake-up
/// now and then has his processor asleep as well, and is slower for longer than that.
pub(super) const SAVES: u64 = 24;

/// The bucket of a gap.
fn bucket(ns: u64) -> usize {
    if ns < 256 {
        return 0;
    }
    let power = 63 - ns.leading_zeros() as usize;
    let half = (ns >> (power - 1)) as usize & 1;
    (1 + (power - 8) * 2 + half).min(BUCKETS - 1)
}

/// The end of a bucket, ns: every gap in it is shorter.
pub(super) fn edge(bucket: usize) -> u64 {
    match bucket {
        0 => 256,
        _ if bucket >= BUCKETS - 1 => u64::MAX,
        _ => {
            let (power, half) = (8 + (bucket as u64 - 1) / 2, (bucket as u64 - 1) % 2);
            (3 + half) << (power - 1)
        }
    }
}

/// The length that the gaps of a bucket are taken for, ns.
fn middle(bucket: usize) -> u64 {
    let start = if bucket == 0 { 0 } else { edge(bucket - 1) };
    if bucket == BUCKETS - 1 { start * 2 } else { start + (edge(bucket) - start) / 2 }
}

/// The gaps of one queue: recent ones count more. 216 bytes; nothing is allocated.
#[derive(Debug, Clone)]
pub(super) struct GapHistogram {
    counts: [u32; BUCKETS],
    total: u32,
    /// Requests that came meanwhile, those that ended no gap included.
    requests: u64,
}

impl Default for GapHistogram {
    fn default() -> Self {
        GapHistogram { counts: [0; BUCKETS], total: 0, requests: 0 }
    }
}

/// What looking and being found armed cost.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices {
    /// What an ns of looking in vain costs, in thousandths of an ns of a processor.
    pub(super) polling_permille: u64,
    /// What one arrival costs that finds the queue armed, ns.
    pub(super) armed_ns: u64,
}

impl Prices {
    /// What looking in vain for so long costs, ns of a processor.
    pub(super) fn polled_ns(&self, ns: u64) -> u64 {
        ns.saturating_mul(self.polling_permille) / 1000
    }
}

impl GapHistogram {
    /// Adds a gap.
    pub(super) fn add(&mut self, ns: u64) {
        self.counts[bucket(ns)] += ONE;
        self.total += ONE;
        if self.total >= FULL {
            self.total = 0;
            for count in &mut self.counts {
                *count /= 2;
                self.total += *count;
            }
            self.requests /= 2;
        }
    }

    /// Adds requests, whether or not one of them ended a gap.
    #[inline]
    pub(super) fn arrived(&mut self, requests: u32) {
        self.requests += u64::from(requests) * u64::from(ONE);
    }

    /// Whether most gaps are shorter than this, as far as buckets tell.
    pub(super) fn mostly_below(&self, ns: u64) -> bool {
        let below: u32 = self.counts[..bucket(ns)].iter().sum();
        below > self.total - below
    }

    /// Forgets the gaps that are shorter than this, or those that are not.
    pub(super) fn forget(&mut self, ns: u64, shorter: bool) {
        let (below, others) = self.counts.split_at_mut(bucket(ns));
        for count in if shorter { below } else { others } {
            self.total -= std::mem::take(count);
        }
        self.requests = self.total.into();
    }

    /// Gaps remembered.
    pub(super) fn len(&self) -> u32 {
        self.total / ONE
    }

    /// What it costs to look for so long after each request and then to arm. `last`: the bucket up to whose end is looked, or none.
    pub(super) fn cost(&self, last: Option<usize>, prices: &Prices) -> u128 {
        let spin = last.map_or(0, edge);
        let mut cost = 0u128;
        for (at, &count) in self.counts.iter().enumerate() {
            if count == 0 {
                continue;
            }
            let (looked, armed) = match last {
                Some(last) if at <= last => (middle(at), 0),
                _ => (spin, prices.armed_ns),
            };
            cost += u128::from(count) * u128::from(prices.polled_ns(looked).saturating_add(armed));
        }
        cost
    }

    /// The bucket up to whose end looking is cheapest: the first of those that cost the same, `None` for arming at once. Looks at
    /// those whose end is at most `most_ns`. One pass over the buckets: a busy queue asks every 64 gaps.
    pub(super) fn cheapest(&self, prices: &Prices, most_ns: u64) -> (Option<usize>, u128) {
        let mut best = (None, self.cost(None, prices));
        // What the gaps cost that are polled through, and how many are longer.
        let (mut through, mut longer) = (0u128, u128::from(self.total));
        for last in (0..BUCKETS).take_while(|last| edge(*last) <= most_ns) {
            // Only the end of a bucket that has gaps can be better than a shorter time.
            let count = u128::from(self.counts[last]);
            if count > 0 {
                through += count * u128::from(prices.polled_ns(middle(last)));
                longer -= count;
                let each = prices.polled_ns(edge(last)).saturating_add(prices.armed_ns);
                let cost = through + longer * u128::from(each);
                if cost < best.1 {
                    best = (Some(last), cost);
                }
            }
        }
        best
    }

    /// The bucket up to whose end to look, where `last` is cheapest: the last that has gaps, if arming in the gaps beyond would save less than one part in
    /// [`SAVES`] of the time that all gaps take. Looks at those whose end is at most `most_ns`.
    pub(super) fn through(&self, last: usize, most_ns: u64) -> usize {
        let (mut all, mut saved, mut longest) = (0u128, 0u128, last);
        for (at, &count) in self.counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            all += u128::from(count) * u128::from(middle(at));
            if at > last {
                saved += u128::from(count) * u128::from(middle(at) - edge(last));
                if edge(at) <= most_ns {
                    longest = at;
                }
            }
        }
        if saved * u128::from(SAVES) < all { longest } else { last }
    }

    /// Whether no remembered gap is longer than those of that bucket.
    pub(super) fn none_beyond(&self, bucket: usize) -> bool {
        self.counts[bucket + 1..].iter().all(|count| *count == 0)
    }

    /// The first bucket after whose end at most `permille` of all requests end a gap.
    pub(super) fn covering(&self, permille: u64) -> usize {
        let allowed = self.requests.max(self.total.into()) * permille / 1000;
        let mut beyond = 0;
        for at in (0..BUCKETS).rev() {
            beyond += u64::from(self.counts[at]);
            if beyond > allowed {
                return at;
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_between_the_ends_of_its_bucket_and_the_one_before() {
        for ns in [0, 1, 255, 256, 383, 384, 511, 512, 1000, 50_000, 1 << 31, (1 << 32) - 1] {
            let at = bucket(ns);
            assert!(ns < edge(at), "{ns} is not before {}", edge(at));
            assert!(at == 0 || ns >= edge(at - 1), "{ns} is before {}", edge(at - 1));
        }
        assert_eq!((bucket(1 << 40), edge(BUCKETS - 1)), (BUCKETS - 1, u64::MAX));
        assert_eq!(edge(BUCKETS - 2), 1 << 32);
    }

    #[test]
    fn looking_pays_for_gaps_that_are_shorter_than_what_arming_costs() {
        let prices = Prices { polling_permille: 1000, armed_ns: 30_000 };
        let mut gaps = GapHistogram::default();
        (0..100).for_each(|_| gaps.add(5_000));
        let (last, _) = gaps.cheapest(&prices, 1_000_000);
        assert!(last.is_some_and(|last| (5_000..10_000).contains(&edge(last))));
        // Long gaps beside them change nothing: the short ones are still found polled.
        (0..100).for_each(|_| gaps.add(900_000));
        assert_eq!(gaps.cheapest(&prices, 1 << 30).0, last);
        // Long gaps alone: armed at once.
        let mut gaps = GapHistogram::default();
        (0..100).for_each(|_| gaps.add(900_000));
        assert_eq!(gaps.cheapest(&prices, 1 << 30).0, None);
        // Looking that costs next to nothing, because the core is awake for others.
        let cheap = Prices { polling_permille: 10, ..prices };
        assert!(gaps.cheapest(&cheap, 1 << 30).0.is_some());
    }

    #[test]
    fn the_cheapest_is_the_first_that_costs_least() {
        let mut gaps = GapHistogram::default();
        for turn in 0..2_000u64 {
            gaps.add((turn * 2_654_435_761) % (1 << (8 + turn % 24)));
            let prices = Prices { polling_permille: 1 + turn % 1000, armed_ns: 30_000 + turn * 7 };
            let ends = (0..BUCKETS).filter(|at| edge(*at) <= 2_000_000 && gaps.counts[*at] > 0);
            let each = std::iter::once(None).chain(ends.map(Some));
            let least = each
                .map(|last| (last, gaps.cost(last, &prices)))
                .reduce(|best, one| if one.1 < best.1 { one } else { best });
            assert_eq!(Some(gaps.cheapest(&prices, 2_000_000)), least);
        }
    }

    #[test]
    fn rare_gaps_are_polled_through_where_arming_would_save_little() {
        let prices = Prices { polling_permille: 1000, armed_ns: 30_000 };
        let mut gaps = GapHistogram::default();
        (0..400).for_each(|_| gaps.add(10_000));
        gaps.add(140_000);
        let last = gaps.cheapest(&prices, 1 << 21).0.unwrap();
        assert!(edge(last) < 20_000);
        assert!((140_000..280_000).contains(&edge(gaps.through(last, 1 << 21))));
        // A second of silence beside them is worth being armed.
        gaps.add(1_000_000_000);
        assert_eq!(gaps.through(last, 1 << 21), last);
    }

    #[test]
    fn what_was_is_forgotten() {
        let mut gaps = GapHistogram::default();
        (0..10_000).for_each(|_| gaps.add(5_000));
        assert!(gaps.len() <= 512);
        (0..5_000).for_each(|_| gaps.add(900_000));
        assert_eq!(gaps.counts[bucket(5_000)], 0);
    }

    #[test]
    fn few_of_many_requests_may_end_a_long_gap() {
        let mut gaps = GapHistogram::default();
        for turn in 0..400 {
            gaps.arrived(1);
            gaps.add(if turn % 100 == 0 { 900_000 } else { 2_000 });
        }
        assert!(edge(gaps.covering(20)) < 4_000);
        assert!(edge(gaps.covering(5)) > 900_000);
    }
}
