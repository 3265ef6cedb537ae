//! How the pool would be after the moves that a plan has in it so far.

use super::memory::Memory;
use super::readings::{CoreLoad, CoreUse, PoolReadings, QueueLoad};
use crate::fair::GroupId;
use crate::log::QueueKey;
use crate::topology::CpuTopology;

/// From here on a queue takes a core of its own.
pub(super) const HOT_PERMILLE: u32 = 900;

/// Load that an idle queue is reckoned at where one more is placed, so that idle queues are spread.
const IDLE_PERMILLE: u32 = 5;

/// Load that another node than that of a queue's memory is reckoned at.
const FAR_PERMILLE: u32 = 200;

/// One core, with the queues that it would have.
#[derive(Debug, Clone)]
pub(super) struct CoreOutlook {
    pub(super) load: CoreLoad,
    pub(super) node: Option<u32>,
    /// Sum of its queues' loads: above 1000 after moves to it.
    pub(super) permille: u32,
    pub(super) queues: u32,
}

impl CoreOutlook {
    /// Its load as a queue with memory on `node` would find it.
    pub(super) fn loaded(&self, node: Option<u32>) -> u32 {
        let far = matches!((self.node, node), (Some(here), Some(there)) if here != there);
        self.permille + if far { FAR_PERMILLE } else { 0 }
    }

    /// Whether it takes queues at all.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.load.used_for, CoreUse::Open | CoreUse::Reserved(_))
    }
}

/// One queue, with the core that it would be on and its averaged load.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueOutlook {
    pub(super) load: QueueLoad,
    pub(super) permille: u32,
}

/// The pool.
#[derive(Debug, Clone)]
pub(super) struct Outlook {
    pub(super) cores: Vec<CoreOutlook>,
    pub(super) queues: Vec<QueueOutlook>,
}

impl Outlook {
    pub(super) fn new(readings: &PoolReadings, memory: &Memory, topology: &CpuTopology) -> Self {
        let queues: Vec<QueueOutlook> = readings
            .queues
            .iter()
            .map(|load| QueueOutlook { load: *load, permille: memory.of(load.queue).load() })
            .collect();
        let core = |load: &CoreLoad| {
            let here = queues.iter().filter(|queue| queue.load.core == load.core);
            CoreOutlook {
                load: *load,
                node: load.cpu.and_then(|cpu| topology.node(cpu)),
                permille: here.clone().map(|queue| queue.permille).sum(),
                queues: here.count() as u32,
            }
        };
        Outlook { cores: readings.cores.iter().map(core).collect(), queues }
    }

    pub(super) fn core(&self, core: u32) -> Option<&CoreOutlook> {
        self.cores.iter().find(|other| other.load.core == core)
    }

    /// Whether a queue of that group may be on that core, its pin aside.
    pub(super) fn takes(&self, core: &CoreOutlook, group: GroupId) -> bool {
        match core.load.used_for {
            CoreUse::Reserved(whose) => whose == group,
            CoreUse::Open => !self.cores.iter().any(|c| c.load.used_for == CoreUse::Reserved(group)),
            CoreUse::Draining | CoreUse::Ending => false,
        }
    }

    /// What a core would cost a queue with memory on `node`: less is better.
    fn cost(&self, core: &CoreOutlook, node: Option<u32>) -> u32 {
        core.loaded(node) + core.queues * IDLE_PERMILLE
    }

    /// The best core for a queue, but not `except`. Of those that cost the same, the one with the lowest number.
    pub(super) fn best(
        &self,
        group: GroupId,
        node: Option<u32>,
        except: Option<u32>,
    ) -> Option<&CoreOutlook> {
        self.cores
            .iter()
            .filter(|core| self.takes(core, group) && Some(core.load.core) != except)
            .min_by_key(|core| (self.cost(core, node), core.load.core))
    }

    /// The queue that takes the whole of a core by itself, if there is one.
    pub(super) fn hot(&self, core: u32) -> Option<&QueueOutlook> {
        self.queues.iter().find(|queue| queue.load.core == core && queue.permille >= HOT_PERMILLE)
    }

    /// Brings a queue to another core.
    pub(super) fn bring(&mut self, queue: QueueKey, to: u32) {
        let Some(queue) = self.queues.iter_mut().find(|other| other.load.queue == queue) else { return };
        let (from, permille) = (std::mem::replace(&mut queue.load.core, to), queue.permille);
        for core in &mut self.cores {
            if core.load.core == from {
                core.permille -= permille;
                core.queues -= 1;
            } else if core.load.core == to {
                core.permille += permille;
                core.queues += 1;
            }
        }
    }
}
