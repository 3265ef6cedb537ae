//! What every plan for a pool keeps, whatever the load does.

use std::collections::{BTreeMap, BTreeSet};

use ioplane_scheduler::{
    CoreLoad, CoreUse, Decision, MoveReason, PoolReadings, PoolSettings, QueueKey, QueueLoad,
};

/// A queue moves for balance only off a core that is busier than this.
const CALM_PERMILLE: u32 = 700;
/// The first pause after a move that failed, and the longest of any, ns.
const RETRY_NS: u64 = 1_000_000_000;
const LONGEST_NS: u64 = 60_000_000_000;

/// What is remembered of one queue.
#[derive(Default)]
struct Moved {
    /// Moves for balance in a row, and when the next one may come.
    balanced: u32,
    balance_at_ns: u64,
    /// Failures in a row, and when it may be tried again.
    failed: u32,
    retry_at_ns: u64,
    core: Option<u32>,
}

/// Looks at each plan, with the readings it was made from, and fails where one breaks a rule.
#[derive(Default)]
pub struct Rules {
    queues: BTreeMap<QueueKey, Moved>,
}

/// The pause after so many before.
fn pause(first_ns: u64, times: u32) -> u64 {
    first_ns.saturating_mul(1 << times.min(16)).min(LONGEST_NS)
}

impl Rules {
    pub fn check(&mut self, settings: &PoolSettings, readings: &PoolReadings, plan: &[Decision]) {
        let now = readings.now_ns;
        for queue in &readings.queues {
            let moved = self.queues.entry(queue.queue).or_default();
            if moved.core.replace(queue.core).is_some_and(|before| before != queue.core) {
                moved.failed = 0;
            }
        }
        for queue in &readings.not_quiet {
            let Some(moved) = self.queues.get_mut(queue) else { continue };
            moved.retry_at_ns = now + pause(RETRY_NS, moved.failed);
            moved.failed += 1;
        }
        check_count(settings, readings, plan);
        let mut seen = BTreeSet::new();
        for decision in plan {
            let Decision::Move { queue, from, to, reason } = *decision else { continue };
            assert!(seen.insert(queue), "{now}: {queue} is moved twice: {plan:?}");
            self.check_move(settings, readings, decision, (queue, from, to, reason));
        }
        assert!(seen.len() <= settings.moves_per_plan, "{now}: {} moves", seen.len());
    }

    fn check_move(
        &mut self,
        settings: &PoolSettings,
        readings: &PoolReadings,
        decision: &Decision,
        (key, from, to, reason): (QueueKey, u32, u32, MoveReason),
    ) {
        let now = readings.now_ns;
        let core = |number: u32| readings.cores.iter().find(|core| core.core == number);
        let queue = readings.queues.iter().find(|queue| queue.queue == key);
        let (Some(queue), Some(here), Some(there)) = (queue, core(from), core(to)) else {
            panic!("{now}: {decision}: of something that is not there")
        };
        assert!(queue.core == from && from != to && !queue.moving, "{now}: {decision}: it is not there");
        assert!(takes(there, queue), "{now}: {decision}: that core takes no such queue");
        check_reason(readings, decision, (queue, here, there, reason));
        let moved = self.queues.get_mut(&key).expect("it has been seen");
        assert!(now >= moved.retry_at_ns, "{now}: {decision}: tried again before {}", moved.retry_at_ns);
        if matches!(reason, MoveReason::Balance { .. } | MoveReason::BesideHotQueue(_) | MoveReason::Node(_))
        {
            assert!(settings.balance && queue.pinned.is_none(), "{now}: {decision}");
            assert!(now >= moved.balance_at_ns, "{now}: {decision}: it rests until {}", moved.balance_at_ns);
            // One that has stayed for ten times its pause begins again.
            let rest = pause(settings.settle_ns, moved.balanced);
            if now >= moved.balance_at_ns + 10 * rest {
                moved.balanced = 0;
            }
            moved.balance_at_ns = now + pause(settings.settle_ns, moved.balanced);
            moved.balanced += 1;
        }
    }
}

/// Whether a queue may be brought to a core.
fn takes(core: &CoreLoad, queue: &QueueLoad) -> bool {
    let open = match core.used_for {
        CoreUse::Open => true,
        CoreUse::Reserved(group) => group == queue.group,
        CoreUse::Draining | CoreUse::Ending => false,
    };
    open || queue.pinned == Some(core.core)
}

/// Minimum and maximum hold, and cores do not come and go at once.
fn check_count(settings: &PoolSettings, readings: &PoolReadings, plan: &[Decision]) {
    let now = readings.now_ns;
    let open =
        readings.cores.iter().filter(|core| matches!(core.used_for, CoreUse::Open | CoreUse::Reserved(_)));
    let open = open.count() as u32;
    let count = |is: fn(&Decision) -> bool| plan.iter().filter(|one| is(one)).count() as u32;
    let grown = count(|one| matches!(one, Decision::Grow { .. }));
    let ended = count(|one| matches!(one, Decision::Shrink { .. }));
    let (min, max) = (settings.min_cores, settings.max_cores.max(settings.min_cores));
    assert!(grown == 0 || open + grown <= max, "{now}: {open} cores and {grown} more, {max} at most");
    assert!(
        ended == 0 || (ended == 1 && grown == 0 && open > min.max(1)),
        "{now}: {ended} of {open} cores end: {plan:?}"
    );
    for one in plan {
        if let Decision::Shrink { core, .. } = one {
            let core = readings.cores.iter().find(|load| load.core == *core).expect("it is there");
            assert!(core.used_for == CoreUse::Open && !core.kept, "{now}: {one}: {core:?}");
        }
    }
}

/// What a move says why it is made is so.
fn check_reason(
    readings: &PoolReadings,
    decision: &Decision,
    (queue, from, to, reason): (&QueueLoad, &CoreLoad, &CoreLoad, MoveReason),
) {
    let now = readings.now_ns;
    let is_so = match reason {
        MoveReason::Pinned => queue.pinned == Some(to.core),
        MoveReason::Draining => matches!(from.used_for, CoreUse::Draining | CoreUse::Ending),
        MoveReason::Reserved => {
            from.used_for != CoreUse::Reserved(queue.group)
                && (from.used_for != CoreUse::Open || to.used_for == CoreUse::Reserved(queue.group))
        }
        MoveReason::Balance { from_permille, to_permille } => {
            from_permille > to_permille && from_permille.max(from.busy_permille) >= CALM_PERMILLE
        }
        MoveReason::BesideHotQueue(hot) => {
            hot != queue.queue
                && readings.queues.iter().any(|other| other.queue == hot && other.core == from.core)
        }
        MoveReason::Node(node) => queue.node == Some(node),
    };
    assert!(is_so, "{now}: {decision}: it is not so");
}
