//! What the policy remembers of a queue: its load over some time, and how its moves went.

use std::collections::BTreeMap;

use super::readings::PoolReadings;
use crate::log::QueueKey;

/// Time over which a load that rises is averaged, ns.
const RISE_NS: u64 = 50_000_000;

/// Time over which a load that falls is averaged: a load that comes and goes counts as one that is there.
const FALL_NS: u64 = 1_000_000_000;

/// The first pause after a move that failed, ns. Each one more doubles it.
const RETRY_NS: u64 = 1_000_000_000;

/// The longest pause between two moves of a queue, ns.
const LONGEST_NS: u64 = 60_000_000_000;

/// A load, averaged.
#[derive(Debug, Clone, Default)]
struct Average {
    /// Thousandths of a core.
    load: f64,
    seen_ns: u64,
}

impl Average {
    fn look(&mut self, load_permille: u32, now_ns: u64) {
        let wanted = f64::from(load_permille);
        let over = if wanted > self.load { RISE_NS } else { FALL_NS };
        let passed = now_ns.saturating_sub(self.seen_ns);
        let weight = if self.seen_ns == 0 { 1.0 } else { (passed as f64 / over as f64).min(1.0) };
        self.load += (wanted - self.load) * weight;
        self.seen_ns = now_ns;
    }

    fn permille(&self) -> u32 {
        self.load.round() as u32
    }
}

/// One queue.
#[derive(Debug, Clone, Default)]
pub(super) struct QueueMemory {
    load: Average,
    /// Not to be moved for balance before, and not at all before.
    balance_at_ns: u64,
    move_at_ns: u64,
    balanced: u32,
    failed: u32,
}

impl QueueMemory {
    /// Averaged load, thousandths of a core.
    pub(super) fn load(&self) -> u32 {
        self.load.permille()
    }

    /// Whether it may be moved, since its user or its core's end asks for it.
    pub(super) fn may_move(&self, now_ns: u64) -> bool {
        now_ns >= self.move_at_ns
    }

    /// Whether it may be moved for balance.
    pub(super) fn may_balance(&self, now_ns: u64) -> bool {
        now_ns >= self.balance_at_ns.max(self.move_at_ns)
    }

    /// Whether its last move failed.
    pub(super) fn is_stuck(&self) -> bool {
        self.failed > 0
    }

    fn pause(first_ns: u64, times: u32) -> u64 {
        first_ns.saturating_mul(1 << times.min(16)).min(LONGEST_NS)
    }

    /// It is moved for balance now.
    pub(super) fn balance(&mut self, now_ns: u64, settle_ns: u64) {
        // One that has stayed for ten times its pause begins again.
        let pause = QueueMemory::pause(settle_ns, self.balanced);
        if now_ns >= self.balance_at_ns.saturating_add(pause.saturating_mul(10)) {
            self.balanced = 0;
        }
        self.balance_at_ns = now_ns + QueueMemory::pause(settle_ns, self.balanced);
        self.balanced += 1;
    }

    /// Its move has failed: not again for the returned time, ns.
    fn fail(&mut self, now_ns: u64) -> u64 {
        let pause = QueueMemory::pause(RETRY_NS, self.failed);
        self.failed += 1;
        self.move_at_ns = now_ns + pause;
        pause
    }

    /// It has been moved after all.
    pub(super) fn moved(&mut self) {
        self.failed = 0;
    }
}

/// All queues.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    queues: BTreeMap<QueueKey, (QueueMemory, u32)>,
    nothing: QueueMemory,
    /// Of all queues together: when load goes from one queue to another, the sum of their averages has it twice.
    total: Average,
}

impl Memory {
    /// Takes new readings in. The queues whose moves have failed, each with the time until it is tried again, ns.
    pub(super) fn look(&mut self, readings: &PoolReadings) -> Vec<(QueueKey, u64)> {
        let now = readings.now_ns;
        let mut before = std::mem::take(&mut self.queues);
        self.total.look(readings.queues.iter().map(|queue| queue.load_permille.min(1000)).sum(), now.max(1));
        for queue in &readings.queues {
            let (mut memory, core) =
                before.remove(&queue.queue).unwrap_or((QueueMemory::default(), queue.core));
            if core != queue.core {
                memory.moved();
            }
            memory.load.look(queue.load_permille.min(1000), now.max(1));
            self.queues.insert(queue.queue, (memory, queue.core));
        }
        let fail = |queue: &QueueKey| Some((*queue, self.queues.get_mut(queue)?.0.fail(now)));
        readings.not_quiet.iter().filter_map(fail).collect()
    }

    /// Averaged load of all queues together, thousandths of a core.
    pub(super) fn total(&self) -> u32 {
        self.total.permille()
    }

    /// What is known of a queue.
    pub(super) fn of(&self, queue: QueueKey) -> &QueueMemory {
        self.queues.get(&queue).map_or(&self.nothing, |(memory, _)| memory)
    }

    /// [`QueueMemory::balance`].
    pub(super) fn balance(&mut self, queue: QueueKey, now_ns: u64, settle_ns: u64) {
        if let Some((memory, _)) = self.queues.get_mut(&queue) {
            memory.balance(now_ns, settle_ns);
        }
    }
}
