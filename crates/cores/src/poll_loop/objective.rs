//! Adaptive cores: what the user asks of one. The ceiling says whether it may poll in vain, the objective for how long a queue has to be polled;
//! once a second the core says what came of both.

use std::time::{Duration, Instant};

use ioplane_scheduler::{CoreObjective, CpuCeiling, ObjectiveMeter, ObjectiveReport};

use super::PollLoop;
use crate::settings::Notify;

/// How often the core says whether its objective was kept.
const REPORT: Duration = Duration::from_secs(1);

/// What is asked of one core, and what came of it.
#[derive(Debug)]
pub(super) struct Objective {
    asked: CoreObjective,
    ceiling: Option<CpuCeiling>,
    meter: ObjectiveMeter,
    reported: Instant,
    /// Time awake since [`Objective::correct`], as looks at the clock have it, and the thread's processor time by then, ns.
    awake_ns: u64,
    cpu_ns: u64,
}

impl Objective {
    pub(super) fn new(asked: CoreObjective, now: Instant) -> Self {
        Objective {
            asked,
            ceiling: None,
            meter: ObjectiveMeter::default(),
            reported: now,
            awake_ns: 0,
            cpu_ns: 0,
        }
    }

    pub(super) fn asked(&self) -> &CoreObjective {
        &self.asked
    }

    /// Whether queues may be polled in vain.
    #[inline]
    pub(super) fn may_poll(&self) -> bool {
        self.ceiling.as_ref().is_none_or(CpuCeiling::may_poll)
    }

    /// Whether requests are to be measured.
    #[inline]
    pub(super) fn has_p99(&self) -> bool {
        self.asked.p99_ns.is_some()
    }

    /// A poll took `requests`, the first of which has waited for `wait` at most.
    pub(super) fn took(&mut self, requests: u32, wait: Duration) {
        let may_poll = self.may_poll();
        self.meter.took(&self.asked, requests, wait.as_nanos() as u64, may_poll);
    }

    /// Adds what the thread's processor time is above the time that it was seen awake: entering the kernel and waking up.
    fn correct(&mut self, now_ns: u64, cpu: Duration) {
        let cpu_ns = cpu.as_nanos() as u64;
        let unseen = cpu_ns.saturating_sub(self.cpu_ns).saturating_sub(self.awake_ns);
        // What was seen and not had went to other threads: it is not held against what is not seen later.
        (self.cpu_ns, self.awake_ns) = (cpu_ns, 0);
        if let Some(ceiling) = &mut self.ceiling {
            ceiling.spent(now_ns, unseen);
        }
    }
}

impl PollLoop {
    /// Reads what the user asks of the core. Queues choose anew if that is another than before.
    pub(super) fn read_objective(&mut self) {
        let (asked, adaptive) = (self.shared.objective(), self.notify == Notify::Adaptive);
        let now = self.context.look();
        let ceiling = asked.cpu_permille.filter(|_| adaptive);
        if asked == self.objective.asked && ceiling.is_some() == self.objective.ceiling.is_some() {
            return;
        }
        let now_ns = self.shared.age_ns(now);
        self.objective = Objective::new(asked, now);
        self.objective.ceiling = ceiling.map(|permille| CpuCeiling::new(permille, now_ns));
        self.objective.cpu_ns = self.context.thread_cpu().map_or(0, |cpu| cpu.as_nanos() as u64);
        for entry in self.slots.iter_mut().flatten() {
            entry.adaptive.rechoose(&asked, entry.slot.meter());
            entry.looked = now;
        }
        self.shared.report(ObjectiveReport::default(), now);
    }

    /// Has the ceiling know that the core was awake for `awake`.
    #[inline]
    pub(super) fn spend(&mut self, now: Instant, awake: Duration) {
        if let Some(ceiling) = &mut self.objective.ceiling {
            let awake_ns = awake.as_nanos() as u64;
            ceiling.spent(self.shared.age_ns(now), awake_ns);
            self.objective.awake_ns += awake_ns;
        }
    }

    /// Every 10 ms while the core has something to do.
    pub(super) fn check_objective(&mut self, now: Instant) {
        if self.objective.ceiling.is_some()
            && let Some(cpu) = self.context.thread_cpu()
        {
            self.objective.correct(self.shared.age_ns(now), cpu);
        }
        if now.saturating_duration_since(self.objective.reported) >= REPORT {
            self.objective.reported = now;
            let objective = &mut self.objective;
            let report = objective.meter.period(&objective.asked, objective.ceiling.as_ref());
            self.shared.report(report, now);
        }
    }
}
