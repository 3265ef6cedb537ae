//! How long a core sleeps while all that it polls waits for completions.
//!
//! Pure: from what the core has seen to a time. To poll costs the processor until work comes. To sleep costs it little, but the work that
//! comes in the sleep waits for a wake-up: some 5 us on bare metal and several times that in a VM, much beside a wait of 30 us and little
//! beside one of 500 us. So there are three choices, of which the cheapest is taken:
//!
//! - **Poll**, if work is expected about as soon as a wake-up takes.
//! - **Sleep until shortly before work is expected**, then poll. This pays where the times without work are alike, as with one request in flight.
//! - **Sleep until work comes**, if it is far away or at no time of which anything is known. Then no clock ends the sleep but that of the core's
//!   other timers: that would be a system call and a wake-up for nothing.
//!
//! What is expected follows from a histogram of the times without work so far, and from how long the core is without work now: of a
//! disk that answers two thirds of a batch at once and the others 100 us later, the core polls shortly and then sleeps. A core that sleeps
//! does not see when work came. So where it sleeps one in 64 times without work is *measured*: polled through, whatever the plan is, and only those count.
//! After four in a row that are like each other, and as there were few before, the core forgets what it knew: its load has changed.
//!
//! With many in flight that complete one by one, each is under way for long: there the core sleeps until a thirty-second part of them has ended.

use std::time::Duration;

/// What a sleep takes of the processor, ns.
const SLEEP_NS: u64 = 5_000;

/// An ns by which work is later is worth so many ns of the processor at most, and less where the delay is less of the time without work: as much
/// as the processor's if it is an eighth.
const LATE_WORTH_MOST: u64 = 4;
const LATE_WORTH: u64 = 8;

/// The shortest sleep. A shorter one costs more processor time than it saves.
const SHORTEST: Duration = Duration::from_micros(10);

/// The part of those in flight that ends a sleep, if there are twice as many or more.
const PART: usize = 32;

/// A sleep until that part has ended may last so many times as long as that takes on average.
const PATIENCE: u32 = 4;

/// One in so many times without work is measured.
const MEASURED: u32 = 64;

/// So many times without work in a row as there were few before are a change.
const UNLIKE: u32 = 4;

/// The longest for which the core polls to measure.
const MOST_POLLED: Duration = Duration::from_millis(1);

/// What a wake-up takes, as long as none was measured, and the limits of what is believed, ns.
const WAKE_NS: u64 = 20_000;
const WAKE_NS_LEAST: u64 = 2_000;
const WAKE_NS_MOST: u64 = 50_000;

/// A sleep, and what ends it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sleep {
    /// At most so long. `None`: until work comes.
    pub(super) time: Option<Duration>,
    /// So many completions end it.
    pub(super) completions: usize,
}

/// What the core has seen of its disks.
#[derive(Debug)]
pub(super) struct WaitPolicy {
    /// [`crate::CoreSettings::completion_wait`].
    most: Duration,
    gaps: Gaps,
    plan: Plan,
    /// Gaps since the plan was made.
    unplanned: u32,
    /// Times without work since one was measured.
    unmeasured: u32,
    /// The time without work that has begun is measured.
    measures: bool,
    /// So many times without work in a row, like each other, as there were few before, and the first of them, ns.
    unlike: (u32, u64),
    /// In the last time without work of which the plan was to poll it slept until a part of those in flight had ended.
    sleeps_for_parts: bool,
    /// What a wake-up takes, ns: by how much sleeps last longer than they were to.
    wake_ns: u64,
    /// One was measured.
    knows_wake: bool,
    /// Mean time from one completion to the next, of all queues, ns.
    each_ns: f64,
    /// Completions at the last [`WaitPolicy::count`].
    counted: u64,
}

impl WaitPolicy {
    pub(super) fn new(most: Duration) -> Self {
        WaitPolicy {
            most,
            gaps: Gaps::default(),
            plan: Gaps::default().plan(WAKE_NS),
            unplanned: 0,
            unmeasured: 0,
            measures: true,
            unlike: (0, 0),
            sleeps_for_parts: false,
            wake_ns: WAKE_NS,
            knows_wake: false,
            each_ns: 0.0,
            counted: 0,
        }
    }

    /// What a wake-up takes, ns, if one was measured.
    pub(super) fn wake_ns(&self) -> Option<u64> {
        self.knows_wake.then_some(self.wake_ns)
    }

    /// Whether the core sleeps for completions at all.
    pub(super) fn sleeps(&self) -> bool {
        !self.most.is_zero()
    }

    /// For how long it may sleep without having its guests asked to kick.
    pub(super) fn unasked(&self) -> Duration {
        self.most
    }

    /// How long to sleep after `idle` without work, with so many operations in flight that the ring knows of. `None`: poll.
    pub(super) fn sleep(&mut self, idle: Duration, in_flight: usize) -> Option<Sleep> {
        let now_ns = ns(idle);
        let sleep = match self.plan.choice(now_ns) {
            Choice::Poll => {
                let part = self.sleep_for_part(in_flight);
                self.sleeps_for_parts = part.is_some();
                part
            }
            Choice::UntilWork => Some(Sleep { time: None, completions: 1 }),
            Choice::Until(at_ns) => {
                let time = Duration::from_nanos(at_ns.saturating_sub(self.wake_ns + now_ns));
                (time >= SHORTEST).then_some(Sleep { time: Some(time), completions: 1 })
            }
        };
        // Of what is longer than may be measured it is enough to know that.
        sleep.filter(|_| !self.measures || idle >= MOST_POLLED)
    }

    /// With many in flight.
    fn sleep_for_part(&self, in_flight: usize) -> Option<Sleep> {
        let part = in_flight / PART;
        let time = Duration::from_nanos((self.each_ns * part as f64) as u64);
        (part > 1 && time >= SHORTEST)
            .then(|| Sleep { time: Some((time * PATIENCE).min(self.most)), completions: part })
    }

    /// The core is without work from now on.
    pub(super) fn idle_begins(&mut self) {
        self.unmeasured += 1;
        let sleeps = self.plan.sleeps || self.sleeps_for_parts;
        self.measures = !sleeps || self.gaps.sum < PLANNED_GAPS || self.unmeasured >= MEASURED;
        if self.measures {
            self.unmeasured = 0;
        }
    }

    /// A sleep that was to last for `time` at most has lasted for `took`. `by_work`: something else than the clock has ended it.
    pub(super) fn slept(&mut self, time: Option<Duration>, took: Duration, by_work: bool) {
        if let (false, Some(time)) = (by_work, time.filter(|time| took >= *time)) {
            let late = ns(took.saturating_sub(time)).clamp(WAKE_NS_LEAST, WAKE_NS_MOST);
            self.knows_wake = true;
            // Up fast, down slowly: to be late costs a request, to be early some polling.
            let part = if late > self.wake_ns { 4 } else { 8 };
            self.wake_ns = (self.wake_ns * (part - 1) + late) / part;
            if self.wake_ns.abs_diff(self.plan.wake_ns) > self.plan.wake_ns / 4 {
                self.plan();
            }
        }
    }

    /// Work has come after `idle` without any, of which all queues waited for completions.
    pub(super) fn work_came(&mut self, idle: Duration) {
        let gap_ns = ns(idle);
        self.forget_if_changed(gap_ns);
        if !self.measures {
            return;
        }
        self.gaps.add(gap_ns);
        self.unplanned += 1;
        if self.unplanned >= PLANNED_GAPS {
            // Whether a wake-up takes so long still is only known by a sleep.
            self.wake_ns = (self.wake_ns - self.wake_ns / 128).max(WAKE_NS_LEAST);
            self.plan();
        }
    }

    /// Forgets what it knew, if the last few gaps are like each other and unlike the others.
    fn forget_if_changed(&mut self, gap_ns: u64) {
        let (times, like_ns) = self.unlike;
        let alike = times > 0 && bin_of(gap_ns).abs_diff(bin_of(like_ns)) <= LIKE_BINS;
        self.unlike = match self.gaps.sum < PLANNED_GAPS || self.gaps.has_like(gap_ns) {
            true => (0, 0),
            false if alike => (times + 1, like_ns),
            false => (1, gap_ns),
        };
        if self.unlike.0 >= UNLIKE {
            (self.gaps, self.unplanned, self.unlike) = (Gaps::default(), 0, (0, 0));
        }
    }

    fn plan(&mut self) {
        self.unplanned = 0;
        self.plan = self.gaps.plan(self.wake_ns);
    }

    /// So many completions there were since the core was started, and `ns` have gone by since the last call.
    pub(super) fn count(&mut self, ended: u64, ns: u64) {
        let new = ended - self.counted;
        self.counted = ended;
        self.each_ns = if new == 0 { 0.0 } else { ns as f64 / new as f64 };
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// What costs least. Times are since the core has no work, ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Choice {
    Poll,
    /// Be awake again then.
    Until(u64),
    /// Sleep until there is work.
    UntilWork,
}

/// Bins of [`Gaps`]: four for each factor of two, from 1 us to 67 ms.
const BINS: usize = 64;
const FIRST_OCTAVE: u32 = 10;

/// Bins between a gap and one that is twice as long.
const LIKE_BINS: usize = 4;

/// So many gaps are remembered; then each counts half.
const MOST_GAPS: u32 = 128;

/// Gaps after which a new plan is made.
const PLANNED_GAPS: u32 = 16;

/// A histogram of the times without work. Old ones count less and less.
#[derive(Debug)]
struct Gaps {
    bins: [u32; BINS],
    sum: u32,
}

impl Default for Gaps {
    fn default() -> Self {
        Gaps { bins: [0; BINS], sum: 0 }
    }
}

fn bin_of(ns: u64) -> usize {
    let ns = ns.max(1 << FIRST_OCTAVE);
    let octave = ns.ilog2();
    let quarter = (ns >> (octave - 2)) & 3;
    ((octave - FIRST_OCTAVE) as usize * 4 + quarter as usize).min(BINS - 1)
}

/// Where a bin begins, ns.
fn begin_of(bin: usize) -> u64 {
    (4 + bin as u64 % 4) << (bin as u32 / 4 + FIRST_OCTAVE - 2)
}

impl Gaps {
    /// Whether one in four was about as long: half as long to twice.
    fn has_like(&self, gap_ns: u64) -> bool {
        let bin = bin_of(gap_ns);
        let like: u32 =
            self.bins[bin.saturating_sub(LIKE_BINS)..=(bin + LIKE_BINS).min(BINS - 1)].iter().sum();
        like * 4 >= self.sum
    }

    fn add(&mut self, gap_ns: u64) {
        self.bins[bin_of(gap_ns)] += 1;
        self.sum += 1;
        if self.sum >= MOST_GAPS {
            self.bins.iter_mut().for_each(|count| *count /= 2);
            self.sum = self.bins.iter().sum();
        }
    }

    /// What costs least, if work that comes in a sleep waits for `wake_ns`: backwards from the last bin, since what a bin's beginning costs follows
    /// from what later ones do.
    fn plan(&self, wake_ns: u64) -> Plan {
        let late_cost =
            |gap_ns: u64| (LATE_WORTH * wake_ns * wake_ns / gap_ns.max(1)).min(LATE_WORTH_MOST * wake_ns);
        let known = self.bins.iter().rposition(|count| *count > 0).map_or(0, |bin| begin_of(bin + 1));
        // Nothing is known of what takes longer.
        let mut plan = Plan {
            wake_ns,
            choices: [Choice::Poll; BINS],
            known_ns: known,
            polled_ns: known + 2 * wake_ns,
            sleeps: false,
        };
        // For each bin: how many gaps end in it or later, and what they cost from its beginning on, in all, and if the core sleeps into each.
        let (mut left, mut cost, mut late) = ([0u64; BINS + 1], [0u64; BINS + 1], [0u64; BINS + 1]);
        for bin in (0..BINS).rev() {
            let (begin, end, count) = (begin_of(bin), begin_of(bin + 1), u64::from(self.bins[bin]));
            left[bin] = left[bin + 1] + count;
            late[bin] = late[bin + 1] + count * late_cost((begin + end) / 2);
            let polled = count * (end - begin) / 2 + left[bin + 1] * (end - begin) + cost[bin + 1];
            let mut best = (polled, Choice::Poll);
            let mut consider = |cost: u64, choice| {
                if cost < best.0 {
                    best = (cost, choice);
                }
            };
            consider(SLEEP_NS * left[bin] + late[bin], Choice::UntilWork);
            for later in bin + 1..BINS {
                if left[later] > 0 && begin_of(later) >= end + wake_ns + ns(SHORTEST) {
                    let cost = SLEEP_NS * left[bin] + late[bin] - late[later] + cost[later];
                    consider(cost, Choice::Until(begin_of(later)));
                }
            }
            (cost[bin], plan.choices[bin]) = best;
            plan.sleeps |= left[bin] > 0 && best.1 != Choice::Poll;
        }
        plan
    }
}

/// What to do after so much time without work.
#[derive(Debug)]
struct Plan {
    /// Made for wake-ups of that time.
    wake_ns: u64,
    choices: [Choice; BINS],
    /// No gap was longer.
    known_ns: u64,
    /// Until when the core polls if one is.
    polled_ns: u64,
    /// Not only for what takes longer than any did.
    sleeps: bool,
}

impl Plan {
    fn choice(&self, now_ns: u64) -> Choice {
        if now_ns < self.known_ns {
            self.choices[bin_of(now_ns)]
        } else if now_ns < self.polled_ns {
            Choice::Poll
        } else {
            Choice::UntilWork
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// After many completions that came after such times without work, in turn.
    fn used_to(gaps: &[u64]) -> WaitPolicy {
        let mut policy = WaitPolicy::new(us(50));
        uses(&mut policy, gaps);
        takes(&mut policy, us(10));
        policy
    }

    /// The time without work that follows is not measured, unless the core never sleeps.
    fn uses(policy: &mut WaitPolicy, gaps: &[u64]) {
        for _ in 0..200 {
            for gap in gaps {
                policy.work_came(us(*gap));
                (0..MEASURED).for_each(|_| policy.idle_begins());
            }
        }
        policy.idle_begins();
    }

    /// A wake-up takes so long.
    fn takes(policy: &mut WaitPolicy, time: Duration) {
        policy.wake_ns = ns(time);
        policy.plan();
    }

    const UNTIL_WORK: Option<Sleep> = Some(Sleep { time: None, completions: 1 });

    #[test]
    fn the_bins_are_in_order_and_without_gaps() {
        assert_eq!((bin_of(0), bin_of(1024), bin_of(u64::MAX)), (0, 0, BINS - 1));
        for bin in 0..BINS {
            assert_eq!(bin_of(begin_of(bin)), bin);
            assert_eq!(bin_of(begin_of(bin + 1) - 1), bin);
        }
    }

    #[test]
    fn a_core_whose_next_completion_is_near_polls() {
        let mut policy = used_to(&[11]);
        assert_eq!(policy.sleep(us(0), 1), None);
        assert_eq!(policy.sleep(us(10), 1), None);
    }

    #[test]
    fn a_core_sleeps_until_shortly_before_the_completion_is_expected() {
        let mut policy = used_to(&[45]);
        let sleep = policy.sleep(us(5), 1).unwrap();
        let awake = us(5) + sleep.time.unwrap() + Duration::from_nanos(policy.wake_ns);
        assert!(awake > us(35) && awake <= us(45), "{sleep:?}");
        // Later it polls.
        assert_eq!(policy.sleep(us(42), 1), None);
        // A long sleep is one sleep.
        let sleep = used_to(&[78]).sleep(us(5), 1).unwrap();
        assert!(sleep.time > Some(us(50)), "{sleep:?}");
    }

    #[test]
    fn a_core_that_does_not_know_when_sleeps_until_work_comes() {
        let mut policy = used_to(&[80, 150, 220, 300, 370, 440, 520, 600]);
        assert_eq!(policy.sleep(us(5), 32), UNTIL_WORK);
        // So does one whose disk answers in two parts, once the first has not come.
        let mut policy = used_to(&[6, 6, 6, 6, 6, 100, 170, 250]);
        assert_eq!(policy.sleep(us(4), 1), None);
        assert_eq!(policy.sleep(us(9), 1), UNTIL_WORK);
    }

    #[test]
    fn what_is_overdue_is_polled_for_as_long_as_two_wake_ups_take() {
        let mut policy = used_to(&[11]);
        assert_eq!(policy.sleep(us(30), 1), None);
        assert_eq!(policy.sleep(MOST_POLLED, 1), UNTIL_WORK);
        // So is what has never completed.
        let mut policy = WaitPolicy::new(us(50));
        policy.measures = false;
        assert_eq!(policy.sleep(us(5), 1), None);
        assert_eq!(policy.sleep(us(39), 1), None);
        assert_eq!(policy.sleep(us(40), 1), UNTIL_WORK);
    }

    #[test]
    fn with_many_in_flight_that_complete_one_by_one_a_part_of_them_ends_the_sleep() {
        let mut policy = used_to(&[3]);
        policy.count(1000, 5_000_000);
        assert_eq!(policy.sleep(us(0), 64), None, "is measured");
        policy.idle_begins();
        assert_eq!(policy.sleep(us(0), 64), Some(Sleep { time: Some(us(40)), completions: 2 }));
        assert_eq!(
            policy.sleep(us(0), 128),
            Some(Sleep { time: Some(us(50)), completions: 4 }),
            "80 us are too long"
        );
        assert_eq!(policy.sleep(us(0), 63), None, "each of them ends it");
        policy.count(11_000, 5_000_000);
        assert_eq!(policy.sleep(us(0), 128), None, "2 us are too short");
    }

    #[test]
    fn a_wake_up_takes_what_sleeps_last_too_long() {
        let mut policy = used_to(&[100]);
        takes(&mut policy, us(20));
        let time = |policy: &mut WaitPolicy| policy.sleep(us(5), 1).and_then(|sleep| sleep.time);
        let before = time(&mut policy).unwrap();
        (0..200).for_each(|_| policy.slept(Some(us(50)), us(80), false));
        let after = time(&mut policy).unwrap();
        assert!(after < before - us(5), "{before:?} {after:?}");
        // What work has ended says nothing of it.
        (0..200).for_each(|_| policy.slept(Some(us(50)), us(20), true));
        assert_eq!(time(&mut policy), Some(after));
    }

    #[test]
    fn when_work_came_is_measured_now_and_then_by_polling() {
        let mut policy = used_to(&[500]);
        let mut polled = 0;
        for _ in 0..10 * MEASURED {
            policy.idle_begins();
            let polls = policy.sleep(us(5), 1).is_none();
            polled += u32::from(polls);
            assert_eq!(policy.sleep(us(1000), 1), UNTIL_WORK, "longer than a measurement may take");
            // What a core sees that slept is later than what came.
            policy.work_came(us(if polls { 510 } else { 530 }));
        }
        assert_eq!(polled, 10);
        assert_eq!(policy.gaps.bins[bin_of(530_000)], 0);
    }

    #[test]
    fn a_core_with_many_in_flight_measures_too() {
        let mut policy = used_to(&[3]);
        policy.count(1000, 5_000_000);
        let mut polled = 0;
        for _ in 0..=10 * MEASURED {
            policy.idle_begins();
            let polls = policy.sleep(us(5), 128).is_none();
            polled += u32::from(polls);
            policy.work_came(us(200));
        }
        assert!((10..40).contains(&polled), "{polled}");
        assert_ne!(policy.gaps.bins[bin_of(200_000)], 0);
    }

    #[test]
    fn times_of_many_kinds_make_a_plan() {
        let kinds = [5, 20, 80, 320, 900];
        let mut policy = used_to(&kinds);
        assert_eq!(policy.sleep(us(100), 1), UNTIL_WORK);
        let measured = (0..1000).filter(|n| {
            policy.idle_begins();
            policy.work_came(us(kinds[n % kinds.len()]));
            policy.measures
        });
        assert!(measured.count() < 40);
    }

    #[test]
    fn a_sleep_that_ends_early_says_nothing_of_wake_ups() {
        let mut policy = used_to(&[100]);
        let before = policy.wake_ns;
        (0..20).for_each(|_| policy.slept(Some(us(50)), us(3), false));
        assert_eq!(policy.wake_ns, before);
    }

    #[test]
    fn a_core_whose_load_has_changed_forgets_what_it_knew() {
        let mut policy = used_to(&[500]);
        for (gap, sleeps) in [(15, false), (500, true), (15, false)] {
            for _ in 0..UNLIKE + PLANNED_GAPS + 1 {
                policy.idle_begins();
                policy.work_came(us(gap));
            }
            (0..2).for_each(|_| policy.idle_begins());
            assert_eq!(policy.sleep(us(5), 1).is_some(), sleeps, "{gap}: {policy:?}");
        }
    }

    #[test]
    fn a_core_that_is_not_to_sleep_does_not() {
        assert!(!WaitPolicy::new(Duration::ZERO).sleeps());
    }
}
