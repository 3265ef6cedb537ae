//! Poll or arm: each queue by itself, from the gaps between its requests.
//!
//! A queue that has run dry is looked at for a while, its *spin*, and then armed: the driver is asked to kick. Looking costs
//! processor time, and arming costs the next request a kick and a wake-up. The spin is the time for which the sum of both would have
//! been smallest over the queue's recent gaps. So a queue whose gaps are all shorter than what a wake-up costs is polled; one whose gaps are
//! all longer is armed at once; and one that has both (a load that comes in bursts) is looked at for as long as the short ones last.
//!
//! Two things count for more than their time. A request that waits for a wake-up waits: its latency counts [`PollingCosts::latency_weight`]
//! times the processor time that polling would have taken, as long as it is not known that it brings no requests (`worth`). And a burst that begins with a wake-up loses that time as a whole: where a wake-up is more
//! than some 3 % of the burst that follows, gaps of up to twice the burst are polled through.
//!
//! Hysteresis: a spin becomes shorter when that would have been cheaper by an eighth, and is looked at again after 16 to 64 gaps.
//!
//! Some 512 gaps are remembered. A busy queue makes as many in a millisecond, one with 1,000 requests a second in half a second, so what a busy load has left
//! would decide for long about the slow one that follows. Sixteen long gaps in a row, where most were short before, make the queue forget the short ones;
//! sixteen short ones in a row, where most were long, the long ones.
//!
//! Gaps may be long only because the queues are armed: see [`PollTrials`]. A rare gap that is longer than the spin arms no queue that has been polled for long: a
//! twenty-fourth of the time polled, 2 ms at most, may be polled past the spin.

mod ceiling;
mod gaps;
mod spare;
mod trial;
mod worth;

pub use ceiling::{CoreObjective, CpuCeiling, ObjectiveMeter, ObjectiveReport};

pub use trial::PollTrials;

use gaps::{GapHistogram, Prices, edge};
use spare::SpareTime;
use worth::Worth;

/// What notifications and looking cost on a core, and what the core would do otherwise. One per core; times in ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollingCosts {
    /// A kick, for the guest: an exit, or a system call of an emulated one.
    pub kick_ns: u64,
    /// From the kick until the core steps the queue. About the time that a sleeping thread takes to wake; on a core that is awake for
    /// others, the time between two questions to the kernel.
    pub wake_ns: u64,
    /// Arming, sleeping and disarming, in processor time of the core.
    pub arm_ns: u64,
    /// What polling this queue takes of a processor, in thousandths: 1000 where the core would sleep otherwise. Where it is
    /// awake for other queues, the part of a turn that a look takes: see [`PollingCosts::among`].
    pub polling_permille: u32,
    /// How many ns of processor time an ns of a request's latency is worth.
    pub latency_weight: u32,
    /// The longest spin that is chosen for its cost, ns. A p99 objective may take more.
    pub most_spin_ns: u64,
}

impl Default for PollingCosts {
    fn default() -> Self {
        PollingCosts {
            kick_ns: 2_000,
            wake_ns: 12_000,
            arm_ns: 4_000,
            polling_permille: 1000,
            latency_weight: 2,
            most_spin_ns: 2_000_000,
        }
    }
}

impl PollingCosts {
    /// What polling one more queue costs where a look takes `look_ns` and a turn of the other queues `turn_ns`; no turn if the core
    /// would sleep.
    pub fn among(self, look_ns: u64, turn_ns: u64) -> Self {
        let permille = if turn_ns == 0 { 1000 } else { look_ns * 1000 / (look_ns + turn_ns) };
        PollingCosts { polling_permille: permille.clamp(1, 1000) as u32, ..self }
    }

    /// Takes a measured wake-up into account, an eighth of it.
    pub fn woke_in(&mut self, wake_ns: u64) {
        self.wake_ns = (self.wake_ns * 7 + wake_ns.min(1_000_000)) / 8;
    }

    /// What an arrival costs that finds the queue armed, if waiting costs `weighted_ns`.
    fn armed_ns(&self, weighted_ns: u64) -> u64 {
        self.arm_ns + self.kick_ns + weighted_ns
    }

    /// From here on a gap is long: the cost of an arrival that finds the queue armed and has no burst after it.
    fn long_ns(&self) -> u64 {
        self.armed_ns(self.wake_ns * u64::from(self.latency_weight))
    }
}

/// Why a queue is armed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ArmReason {
    /// Its gaps are longer than what looking on is worth.
    LongGaps,
    /// It was looked at for its spin.
    SpunInVain,
    /// The core's CPU ceiling leaves no polling.
    Ceiling,
    /// The core's p99 objective takes a longer spin than its settings allow, and it was looked at for that.
    Objective,
    /// Its requests wait for a disk for longer than a core polls meanwhile.
    SlowDisk,
}

/// What to do with a queue that had no work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleChoice {
    /// Look again in the next turn.
    Poll,
    /// Arm it and look at it once more.
    Arm(ArmReason),
}

/// Why a spin was chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SpinReason {
    /// Too few gaps are known: as long as a wake-up costs, at most twice what the best choice would take.
    #[default]
    FewGaps,
    /// It is the cheapest for the queue's gaps.
    Cheapest,
    /// The core's p99 objective is shorter than a wake-up, and takes so much.
    Objective,
}

/// Gaps below which nothing is known of a queue.
const FEWEST_GAPS: u32 = 8;

/// Gaps between two choices while few are known, and when many are: a choice takes about 1 us.
const GAPS_PER_CHOICE: u32 = 16;
const GAPS_PER_LATER_CHOICE: u32 = 64;

/// The queues of a closed loop have equally many gaps, and would all choose in one turn: so long a turn puts their drivers to sleep. So the next choice of each
/// comes after up to so many gaps less, by the time of this one.
const GAPS_APART: u64 = 8;
const CHOICES_APART_NS: u64 = 128;

/// How exactly the length of a gap is known that a wake-up has ended: to so many parts of the wake-up.
const WAKE_PARTS: u64 = 4;

/// Thousandths of the requests that may find a queue armed under a p99 objective that a wake-up misses: half of one in a hundred.
const ARMED_PERMILLE: u64 = 5;

/// Long gaps in a row after which the load is another one if those before were mostly short; or the other way round. Half of them may have been forgotten
/// meanwhile.
const GAPS_ALIKE: u32 = 2 * FEWEST_GAPS;

/// A burst loses a wake-up of more than one part in so many.
const BURST_PARTS: u64 = 32;

/// When one queue is polled and when it is armed. Lives beside its slot on the core; every call is on the core's thread, takes some
/// nanoseconds and allocates nothing. Times are ns of the core's clock, from an epoch of the caller's.
#[derive(Debug, Clone)]
pub struct QueuePolling {
    gaps: GapHistogram,
    spin_ns: u64,
    /// The spin that saves processor time, if latency were worth nothing; never longer than the other.
    plain_ns: u64,
    /// Whether the difference is worth asking about.
    doubts: bool,
    worth: Worth,
    spare: SpareTime,
    /// The bucket at whose end the spin ends; none if the queue is armed at once.
    last: Option<usize>,
    reason: SpinReason,
    idle_since: Option<u64>,
    armed: bool,
    gaps_since_choice: u32,
    /// Whether the last gaps were long, and how many of them in a row.
    long: bool,
    alike: u32,
    /// How many of the last gaps in a row were short, or may be long only because of wake-ups.
    near: u32,
    /// When the last long gap ended, and how long the bursts between two long gaps are.
    burst_since: Option<u64>,
    burst_ns: u64,
}

impl QueuePolling {
    /// A queue of which nothing is known.
    pub fn new(costs: &PollingCosts, objective: &CoreObjective) -> Self {
        let mut queue = QueuePolling {
            gaps: GapHistogram::default(),
            spin_ns: 0,
            plain_ns: 0,
            doubts: false,
            worth: Worth::default(),
            spare: SpareTime::default(),
            last: None,
            reason: SpinReason::FewGaps,
            idle_since: None,
            armed: false,
            gaps_since_choice: 0,
            long: false,
            alike: 0,
            near: 0,
            burst_since: None,
            burst_ns: 0,
        };
        queue.choose(costs, objective);
        queue
    }

    /// A poll took `requests`. True if the spin has changed by this: worth an entry in the core's log.
    #[inline]
    pub fn worked(
        &mut self,
        now_ns: u64,
        requests: u32,
        costs: &PollingCosts,
        objective: &CoreObjective,
        trials: &mut PollTrials,
    ) -> bool {
        let told = self.worth.worked(now_ns, requests, self.doubts, &mut trials.comparison);
        match self.idle_since.take() {
            None => {
                self.gaps.arrived(requests);
                self.armed = false;
                told
            }
            Some(since) => {
                let armed = std::mem::take(&mut self.armed);
                let seen = now_ns.saturating_sub(since);
                if self.worth.tries_otherwise(now_ns, &trials.comparison) {
                    self.burst_since = None;
                    self.spare.waits();
                    return told;
                }
                self.gaps.arrived(requests);
                if armed {
                    self.spare.armed();
                } else {
                    self.spare.polled(since, now_ns, seen.saturating_sub(self.spin().0));
                    trials.polled(now_ns, seen >= costs.long_ns());
                }
                // The request was there before the core was: what a wake-up takes is no part of the gap.
                let least = seen.min(costs.wake_ns / WAKE_PARTS);
                let gap = if armed { seen.saturating_sub(costs.wake_ns).max(least) } else { seen };
                self.near = if PollTrials::may_be_short(gap, costs) { self.near + 1 } else { 0 };
                if armed && self.near >= FEWEST_GAPS && gap >= costs.long_ns() && !self.worth.found_plain() {
                    trials.doubt(now_ns, costs);
                }
                let other = self.gap_ended(since, gap, now_ns, costs);
                if other {
                    self.worth.forget(self.long, now_ns, &mut trials.comparison);
                    if !self.long {
                        trials.helped();
                    }
                }
                let chooses = other || self.may_choose();
                let changed = chooses && self.choose(costs, objective);
                if chooses && !self.knows_few() {
                    self.gaps_since_choice = (now_ns / CHOICES_APART_NS % GAPS_APART) as u32;
                }
                changed || told
            }
        }
    }

    /// A gap has ended. True if the load is another one, as the last gaps have it.
    fn gap_ended(&mut self, since: u64, gap: u64, now: u64, costs: &PollingCosts) -> bool {
        self.gaps.add(gap);
        let long = gap >= costs.long_ns();
        self.alike = if long == self.long { self.alike + 1 } else { 1 };
        self.long = long;
        if long {
            if let Some(burst_since) = self.burst_since {
                let burst = since.saturating_sub(burst_since);
                // A longer one loses too little to count. Its length in the mean would count until it is forgotten.
                let loses = burst < costs.wake_ns * BURST_PARTS;
                self.burst_ns = (self.burst_ns * 7 + if loses { burst } else { 0 }) / 8;
            }
            self.burst_since = Some(now);
        }
        let other = self.alike == GAPS_ALIKE && self.gaps.mostly_below(costs.long_ns()) == long;
        if other {
            self.gaps.forget(costs.long_ns(), long);
            self.burst_ns = 0;
        }
        other
    }

    /// Whether so few gaps are known that each changes much.
    fn knows_few(&self) -> bool {
        self.gaps.len() < 2 * GAPS_PER_LATER_CHOICE
    }

    /// Whether enough gaps have ended since the last choice.
    fn may_choose(&mut self) -> bool {
        self.gaps_since_choice += 1;
        let known = self.gaps.len();
        let enough = if self.knows_few() { GAPS_PER_CHOICE } else { GAPS_PER_LATER_CHOICE };
        self.gaps_since_choice >= enough || known < GAPS_PER_CHOICE
    }

    /// Chooses the spin anew; true if it is another than before.
    #[cold]
    fn choose(&mut self, costs: &PollingCosts, objective: &CoreObjective) -> bool {
        self.gaps_since_choice = 0;
        let before = self.spin();
        if self.gaps.len() < FEWEST_GAPS {
            let spin = costs.long_ns() * 1000 / u64::from(costs.polling_permille.max(1));
            (self.spin_ns, self.reason) = (spin.min(costs.most_spin_ns), SpinReason::FewGaps);
            (self.plain_ns, self.doubts) = (self.spin_ns, false);
        } else {
            let prices = Prices {
                polling_permille: costs.polling_permille.into(),
                armed_ns: costs.armed_ns(self.weighted_wake_ns(costs)),
            };
            let (last, cost) = self.gaps.cheapest(&prices, costs.most_spin_ns);
            let through = |last: Option<usize>| last.map(|last| self.gaps.through(last, costs.most_spin_ns));
            // A longer spin at once, since a shorter one costs a wake-up for each gap of the tail; a shorter one when it is worth it.
            let kept = self.reason == SpinReason::Cheapest
                && self.last >= last
                && self.gaps.cost(through(self.last), &prices) <= cost.saturating_mul(8) / 7;
            let through = through(if kept { self.last } else { last });
            if !kept {
                (self.last, self.reason) = (last, SpinReason::Cheapest);
            }
            // Nothing is known of gaps longer than all that are remembered: one more wake-up's worth of looking is at most twice the best choice for
            // them, and spares a polled queue the wake-ups of the tail of its gaps.
            let tail =
                if through.is_some_and(|last| self.gaps.none_beyond(last)) { costs.long_ns() } else { 0 };
            self.spin_ns = through.map_or(0, edge).saturating_add(tail);
            self.choose_plain(through, &prices, costs);
        }
        if objective.p99_ns.is_some_and(|p99| costs.wake_ns > p99) {
            // Few requests say nothing about one in a hundred: polled until more have come.
            let covering = self.gaps.covering(ARMED_PERMILLE);
            let spin = if self.gaps.len() < FEWEST_GAPS { u64::MAX } else { edge(covering) };
            if spin > self.spin_ns {
                (self.spin_ns, self.reason) = (spin, SpinReason::Objective);
            }
            // Latency is what the user has asked for.
            (self.plain_ns, self.doubts) = (self.spin_ns, false);
        }
        before != self.spin()
    }

    /// Chooses the spin for a latency that is worth nothing, where `through` is the last bucket of the other spin.
    fn choose_plain(&mut self, through: Option<usize>, prices: &Prices, costs: &PollingCosts) {
        let prices = Prices { armed_ns: costs.armed_ns(0), ..*prices };
        (self.plain_ns, self.doubts) = (self.spin_ns, false);
        // Shorter gaps are polled through for the sake of the processor, too. A busy queue has no others, and chooses often.
        if through.is_some_and(|last| prices.polled_ns(edge(last)) > prices.armed_ns) {
            let (last, least) = self.gaps.cheapest(&prices, costs.most_spin_ns);
            self.plain_ns = last.map_or(0, edge).min(self.spin_ns);
            self.doubts = self.gaps.cost(through, &prices).saturating_mul(7) > least.saturating_mul(8);
        }
    }

    /// What waiting for a wake-up is worth, ns of processor time.
    fn weighted_wake_ns(&self, costs: &PollingCosts) -> u64 {
        let alone = costs.wake_ns * u64::from(costs.latency_weight);
        alone.max(2 * self.burst_ns)
    }

    /// A poll found nothing. `may_poll`: what [`CpuCeiling::may_poll`] says.
    #[inline]
    pub fn idle(&mut self, now_ns: u64, may_poll: bool, trials: &PollTrials) -> IdleChoice {
        let idle = now_ns.saturating_sub(*self.idle_since.get_or_insert(now_ns));
        let (spin_ns, plain) = self.spin_at(now_ns, trials);
        let polls_past_it =
            || self.may_spare(idle) || (self.near >= FEWEST_GAPS && trials.polls(now_ns, idle));
        if !may_poll {
            IdleChoice::Arm(ArmReason::Ceiling)
        } else if idle < spin_ns || (!plain && polls_past_it()) {
            IdleChoice::Poll
        } else if spin_ns == 0 {
            IdleChoice::Arm(ArmReason::LongGaps)
        } else {
            IdleChoice::Arm(ArmReason::SpunInVain)
        }
    }

    /// A poll has found nothing, by `now_ns`. When its spin ends, if nothing comes: before that [`QueuePolling::idle`] says to poll, unless there is a ceiling. `u64::MAX`: never.
    #[inline]
    pub fn spin_ends(&mut self, now_ns: u64, trials: &PollTrials) -> u64 {
        let (spin_ns, _) = self.spin_at(now_ns, trials);
        self.idle_since.get_or_insert(now_ns).saturating_add(spin_ns)
    }

    /// The spin at this moment, and whether it is the plain one, past which nothing is polled.
    #[inline]
    fn spin_at(&self, now_ns: u64, trials: &PollTrials) -> (u64, bool) {
        let plain = self.worth.is_plain(now_ns, &trials.comparison);
        (if plain { self.plain_ns } else { self.spin_ns }, plain)
    }

    /// Whether a gap that is longer than the spin is polled through all the same. One that is armed at once is not.
    fn may_spare(&self, idle_ns: u64) -> bool {
        self.spin_ns > 0 && self.spare.covers(idle_ns.saturating_sub(self.spin_ns))
    }

    /// A poll found nothing but requests that wait for a disk: what follows is no gap.
    pub fn waits(&mut self) {
        self.idle_since = None;
        self.spare.waits();
    }

    /// The queue has been armed, and the look after that found nothing.
    pub fn armed(&mut self) {
        self.armed = true;
    }

    /// For how long it is looked at in vain, ns, and why. `u64::MAX`: for ever.
    pub fn spin(&self) -> (u64, SpinReason) {
        (if self.worth.found_plain() { self.plain_ns } else { self.spin_ns }, self.reason)
    }

    /// For how long it is looked at where latency is worth what the costs say, ns: what was found out about that is of gaps, and not of disks.
    pub fn spin_for_latency(&self) -> u64 {
        self.spin_ns
    }

    /// The same queue on another core, whose clock and costs are others: what is known of its gaps stays.
    pub fn elsewhere(&self, costs: &PollingCosts, objective: &CoreObjective) -> Self {
        let mut queue = QueuePolling {
            spare: SpareTime::default(),
            idle_since: None,
            armed: false,
            burst_since: None,
            worth: self.worth.elsewhere(),
            ..self.clone()
        };
        queue.choose(costs, objective);
        queue
    }

    /// The core has been given another objective, or none, or its costs have changed by much: chooses at once.
    pub fn rechoose(&mut self, costs: &PollingCosts, objective: &CoreObjective) -> bool {
        self.choose(costs, objective)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COSTS: PollingCosts = PollingCosts {
        kick_ns: 2_000,
        wake_ns: 12_000,
        arm_ns: 4_000,
        polling_permille: 1000,
        latency_weight: 2,
        most_spin_ns: 2_000_000,
    };
    const NONE: CoreObjective = CoreObjective { p99_ns: None, cpu_permille: None };

    /// Requests that take no time, with such gaps between them; armed whenever the queue asks for it.
    fn after(gaps: impl IntoIterator<Item = u64>, objective: &CoreObjective) -> QueuePolling {
        let (mut queue, mut trials) = (QueuePolling::new(&COSTS, objective), PollTrials::default());
        let mut now = 0;
        for gap in gaps {
            queue.idle(now, true, &trials);
            let armed = gap > queue.spin().0;
            if armed {
                queue.armed();
            }
            now += gap + if armed { COSTS.wake_ns } else { 0 };
            queue.worked(now, 1, &COSTS, objective, &mut trials);
        }
        queue
    }

    #[test]
    fn a_queue_without_history_is_looked_at_for_what_a_wake_up_costs() {
        assert_eq!(after([], &NONE).spin(), (COSTS.long_ns(), SpinReason::FewGaps));
    }

    #[test]
    fn short_gaps_are_polled_and_long_ones_armed_at_once() {
        let mut busy = after([2_000; 100], &NONE);
        assert_eq!(busy.spin().1, SpinReason::Cheapest);
        assert_eq!(busy.idle(1 << 40, true, &PollTrials::default()), IdleChoice::Poll);
        let mut slow = after([1_000_000; 100], &NONE);
        assert_eq!(slow.spin(), (0, SpinReason::Cheapest));
        assert_eq!(slow.idle(1 << 40, true, &PollTrials::default()), IdleChoice::Arm(ArmReason::LongGaps));
    }

    #[test]
    fn a_queue_finds_its_way_out_of_each_mode() {
        let slow_then_busy = (0..60).map(|_| 1_000_000).chain((0..200).map(|_| 3_000));
        assert!(after(slow_then_busy, &NONE).spin().0 > 3_000);
        let busy_then_slow = (0..10_000).map(|_| 3_000).chain((0..600).map(|_| 1_000_000));
        assert!(after(busy_then_slow, &NONE).spin().0 < 10_000);
    }

    #[test]
    fn a_slow_load_is_not_judged_by_the_busy_one_before_it() {
        let slow = [500_000; GAPS_ALIKE as usize];
        let busy_then_slow = after([3_000; 10_000].into_iter().chain(slow), &NONE);
        // Less than an eighth of what a wake-up costs.
        assert!(busy_then_slow.spin().0 < COSTS.long_ns() / 7);
        // Bursts: the short gaps are still there.
        let bursts = (0..10_000).map(|turn| if turn % 10 == 0 { 500_000 } else { 3_000 });
        assert!(after(bursts, &NONE).spin().0 > 3_000);
    }

    #[test]
    fn gaps_about_as_long_as_a_wake_up_is_worth_do_not_make_it_waver() {
        let (mut queue, mut trials) = (after([], &NONE), PollTrials::default());
        let (mut now, mut changes) = (0, 0);
        for turn in 0..10_000u64 {
            queue.idle(now, true, &trials);
            let gap = COSTS.long_ns() - 3_000 + turn % 2 * 6_000;
            if gap > queue.spin().0 {
                queue.armed();
                now += COSTS.wake_ns;
            }
            now += gap;
            changes += u32::from(queue.worked(now, 1, &COSTS, &NONE, &mut trials));
        }
        assert!(changes < 20, "changed {changes} times in {} choices", 10_000 / GAPS_PER_CHOICE);
    }

    #[test]
    fn queues_of_one_loop_do_not_all_choose_in_one_turn() {
        let mut trials = PollTrials::default();
        let mut queues: Vec<_> = (0..8).map(|_| QueuePolling::new(&COSTS, &NONE)).collect();
        let (mut now, mut choices, mut together) = (0, 0, 0);
        for turn in 0..10_000u64 {
            queues.iter_mut().for_each(|queue| _ = queue.idle(now, true, &trials));
            now += 3_000 + turn * 37 % 500;
            let mut chose = 0;
            for (at, queue) in (0..).zip(&mut queues) {
                let before = queue.gaps_since_choice;
                queue.worked(now + at * 150, 1, &COSTS, &NONE, &mut trials);
                chose += u32::from(queue.gaps_since_choice != before + 1);
            }
            choices += chose;
            together += u32::from(chose > 4);
            now += 8 * 150;
        }
        assert!(choices > 8 * 10_000 / 64, "{choices}");
        // In the first turns, while few gaps are known, all choose in each.
        assert!(together < 30, "{together} turns with more than half of the queues");
    }

    #[test]
    fn bursts_that_a_wake_up_would_shorten_are_waited_for() {
        // 100 requests in 500 us, then 500 us of silence.
        let wave = |wake_ns: u64| {
            let costs = PollingCosts { wake_ns, ..COSTS };
            let (mut queue, mut trials) = (QueuePolling::new(&costs, &NONE), PollTrials::default());
            let mut now = 0;
            for turn in 0..10_000u64 {
                queue.idle(now, true, &trials);
                let gap = if turn % 100 == 0 { 500_000 } else { 5_000 };
                let armed = gap > queue.spin().0;
                if armed {
                    queue.armed();
                    now += wake_ns;
                }
                now += gap;
                queue.worked(now, 1, &costs, &NONE, &mut trials);
            }
            queue.spin().0 > 500_000
        };
        assert!(wave(50_000), "a tenth of each burst");
        assert!(!wave(5_000), "a hundredth");
    }

    #[test]
    fn an_objective_shorter_than_a_wake_up_is_served_by_polling() {
        let tight = CoreObjective { p99_ns: Some(8_000), cpu_permille: None };
        let loose = CoreObjective { p99_ns: Some(80_000), cpu_permille: None };
        assert!(after([1_000_000; 400], &tight).spin().0 > 1_000_000);
        assert_eq!(after([1_000_000; 400], &loose).spin().0, 0);
        assert_eq!(after([], &tight).spin(), (u64::MAX, SpinReason::Objective));
    }

    #[test]
    fn the_ceiling_wins() {
        let mut queue = after([2_000; 100], &CoreObjective { p99_ns: Some(8_000), cpu_permille: Some(100) });
        assert_eq!(queue.idle(1 << 40, false, &PollTrials::default()), IdleChoice::Arm(ArmReason::Ceiling));
    }

    #[test]
    fn a_queue_beside_busy_ones_is_looked_at_for_longer() {
        assert_eq!(COSTS.among(30, 0).polling_permille, 1000);
        assert_eq!(COSTS.among(30, 2_970).polling_permille, 10);
        let mut measured = COSTS;
        (0..100).for_each(|_| measured.woke_in(20_000));
        assert!((19_000..=20_000).contains(&measured.wake_ns));
    }
}
