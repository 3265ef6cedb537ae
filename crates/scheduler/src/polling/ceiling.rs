//! The most processor time that a core may take, and the objective that it may serve with it.

/// What a user may ask of one core. With neither, each queue weighs a processor's time against its requests' latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CoreObjective {
    /// 99 % of requests are to be taken within this time of being made available, ns.
    pub p99_ns: Option<u64>,
    /// The most of its processor that the core may take, in thousandths. It wins over `p99_ns`.
    pub cpu_permille: Option<u32>,
}

/// Time over which a core may be above its ceiling if it was below it before, ns.
const WINDOW_NS: i64 = 20_000_000;

/// How much polling the ceiling of a core leaves. One per core, asked at each of its looks at the clock.
///
/// Requests are served above the ceiling as well: only polling in vain is given up. So a core keeps its ceiling wherever being notified of
/// each request would, and says so where it does not.
#[derive(Debug, Clone)]
pub struct CpuCeiling {
    permille: i64,
    left_ns: i64,
    looked_ns: u64,
    polls: bool,
    over_ns: u64,
}

impl CpuCeiling {
    /// A ceiling in thousandths of a processor, from `now_ns` on.
    pub fn new(permille: u32, now_ns: u64) -> Self {
        let permille = i64::from(permille.min(1000));
        CpuCeiling { permille, left_ns: 0, looked_ns: now_ns, polls: permille == 1000, over_ns: 0 }
    }

    fn most_ns(&self) -> i64 {
        WINDOW_NS * self.permille / 1000
    }

    /// The core has been awake for `awake_ns` since the last call, work and polling together.
    pub fn spent(&mut self, now_ns: u64, awake_ns: u64) {
        let passed = now_ns.saturating_sub(self.looked_ns).min(i64::MAX as u64 / 1000) as i64;
        self.looked_ns = now_ns;
        let awake = i64::try_from(awake_ns).unwrap_or(i64::MAX);
        let left = self.left_ns.saturating_add(passed * self.permille / 1000).saturating_sub(awake);
        self.over_ns += u64::try_from(-(left + WINDOW_NS)).unwrap_or(0);
        self.left_ns = left.clamp(-WINDOW_NS, self.most_ns());
        // Switches at two levels, so that a queue is not armed and disarmed at every look.
        self.polls = match self.polls {
            true => self.left_ns > 0 || self.permille == 1000,
            false => self.left_ns > self.most_ns() / 2 || self.permille == 1000,
        };
    }

    /// Whether queues may be polled in vain.
    #[inline]
    pub fn may_poll(&self) -> bool {
        self.polls
    }

    /// Time by which work alone has been above the ceiling since it was set, ns.
    pub fn over_ns(&self) -> u64 {
        self.over_ns
    }
}

/// Whether an objective was kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ObjectiveReport {
    /// No objective, or too few requests to say.
    #[default]
    Unknown,
    /// Kept.
    Kept,
    /// So many thousandths of the requests came late, since the CPU ceiling forbade polling.
    LateByCeiling(u32),
    /// So many thousandths of the requests came late, though their queues were polled: the core has too much to do.
    LateByLoad(u32),
    /// The work alone took more than the ceiling, by so many ns.
    OverCeiling(u64),
}

/// Requests of one period, and those of them that waited for longer than the objective. One per core.
#[derive(Debug, Clone, Default)]
pub struct ObjectiveMeter {
    requests: u64,
    late: u64,
    forbidden: bool,
    over_ns: u64,
}

/// Requests of a period below which nothing is said about its p99.
const FEWEST: u64 = 100;

impl ObjectiveMeter {
    /// A poll took `requests` that may have waited for `wait_ns`, the upper bound of the queue's meter. `may_poll`: what
    /// [`CpuCeiling::may_poll`] said.
    #[inline]
    pub fn took(&mut self, objective: &CoreObjective, requests: u32, wait_ns: u64, may_poll: bool) {
        self.requests += u64::from(requests);
        if objective.p99_ns.is_some_and(|p99| wait_ns > p99) {
            self.late += u64::from(requests);
            self.forbidden |= !may_poll;
        }
    }

    /// What came of the objective since the last call; call it every second or so.
    pub fn period(&mut self, objective: &CoreObjective, ceiling: Option<&CpuCeiling>) -> ObjectiveReport {
        let of = std::mem::take(self);
        self.over_ns = ceiling.map_or(0, CpuCeiling::over_ns);
        let over = self.over_ns.saturating_sub(of.over_ns);
        if over > 0 {
            return ObjectiveReport::OverCeiling(over);
        }
        if objective.p99_ns.is_none() && ceiling.is_some() {
            return ObjectiveReport::Kept;
        }
        if objective.p99_ns.is_none() || of.requests < FEWEST {
            return ObjectiveReport::Unknown;
        }
        let late = (of.late * 1000 / of.requests) as u32;
        match of.late * 100 > of.requests {
            false => ObjectiveReport::Kept,
            true if of.forbidden => ObjectiveReport::LateByCeiling(late),
            true => ObjectiveReport::LateByLoad(late),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn polling_is_bounded_by_the_ceiling() {
        let mut ceiling = CpuCeiling::new(300, 0);
        let (mut now, mut awake_all) = (0, 0);
        while now < 1_000_000_000 {
            let awake = if ceiling.may_poll() { 1000 } else { 0 };
            now += 1000;
            awake_all += awake;
            ceiling.spent(now, awake);
        }
        assert!((290_000_000..=300_001_000).contains(&awake_all), "{awake_all}");
        assert_eq!(ceiling.over_ns(), 0);
    }

    #[test]
    fn work_above_the_ceiling_is_told() {
        let mut ceiling = CpuCeiling::new(300, 0);
        let objective = CoreObjective { p99_ns: None, cpu_permille: Some(300) };
        (1..=1000).for_each(|ms| ceiling.spent(ms * 1_000_000, 500_000));
        assert!(!ceiling.may_poll());
        let told = ObjectiveMeter::default().period(&objective, Some(&ceiling));
        assert!(matches!(told, ObjectiveReport::OverCeiling(ns) if ns > 150_000_000), "{told:?}");
    }

    #[test]
    fn a_whole_processor_is_no_ceiling() {
        let mut ceiling = CpuCeiling::new(1000, 0);
        (1..1000).for_each(|ms| ceiling.spent(ms * 1_000_000, 1_000_000));
        assert!(ceiling.may_poll());
        assert_eq!(ceiling.over_ns(), 0);
    }

    #[test]
    fn one_in_a_hundred_may_be_late() {
        let objective = CoreObjective { p99_ns: Some(10_000), cpu_permille: None };
        let mut meter = ObjectiveMeter::default();
        meter.took(&objective, 990, 5_000, true);
        meter.took(&objective, 10, 50_000, true);
        assert_eq!(meter.period(&objective, None), ObjectiveReport::Kept);
        meter.took(&objective, 980, 5_000, true);
        meter.took(&objective, 20, 50_000, false);
        assert_eq!(meter.period(&objective, None), ObjectiveReport::LateByCeiling(20));
        assert_eq!(meter.period(&objective, None), ObjectiveReport::Unknown);
    }
}
