//! What the pool's policy is given: the user's settings, and how cores and queues are.

use std::collections::BTreeSet;

use crate::fair::GroupId;
use crate::log::QueueKey;

/// What a user says of the pool. Loads are thousandths of a core.
#[derive(Debug, Clone)]
pub struct PoolSettings {
    /// Cores that there are at least.
    pub min_cores: u32,
    /// Cores that there are at most.
    pub max_cores: u32,
    /// Processors on which a core may be started; with none, cores are not pinned.
    pub cpus: BTreeSet<u32>,
    /// The load of each core above which there is to be one more.
    pub high_permille: u32,
    /// The load that each of the other cores may have at most for one to be ended.
    pub low_permille: u32,
    /// How long the load has to be high, ns.
    pub grow_after_ns: u64,
    /// How long the load has to be low, ns.
    pub shrink_after_ns: u64,
    /// A queue that was moved for balance is not moved again for this time, ns; each time that it is, for twice as long.
    pub settle_ns: u64,
    /// Queues that one plan moves at most.
    pub moves_per_plan: usize,
    /// Whether queues are moved for balance and to their memory's node. What users have asked for is done in any case.
    pub balance: bool,
}

impl Default for PoolSettings {
    fn default() -> Self {
        PoolSettings {
            min_cores: 1,
            max_cores: 1,
            cpus: BTreeSet::new(),
            high_permille: 800,
            low_permille: 500,
            grow_after_ns: 50_000_000,
            shrink_after_ns: 5_000_000_000,
            settle_ns: 250_000_000,
            moves_per_plan: 32,
            balance: true,
        }
    }
}

/// What a core is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoreUse {
    /// Any queue.
    Open,
    /// Queues of one group only, which are on no other core.
    Reserved(GroupId),
    /// No queue: a user drains it, and it stays.
    Draining,
    /// No queue: it ends when the last one has left.
    Ending,
}

/// How one core is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreLoad {
    /// Which.
    pub core: u32,
    /// The processor that it is pinned to.
    pub cpu: Option<u32>,
    /// What it is for.
    pub used_for: CoreUse,
    /// A user has asked for this core: the pool does not end it.
    pub kept: bool,
    /// Time that it had work in the last period, in thousandths.
    pub busy_permille: u32,
}

/// How one queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLoad {
    /// Which.
    pub queue: QueueKey,
    /// Whose.
    pub group: GroupId,
    /// Where it is.
    pub core: u32,
    /// Time of its core that it took in the last period, in thousandths.
    pub load_permille: u32,
    /// The core that a user has pinned it to.
    pub pinned: Option<u32>,
    /// The NUMA node of its guest's memory, where it is known.
    pub node: Option<u32>,
    /// Whether it is on its way to another core.
    pub moving: bool,
}

/// How the pool is at one moment.
#[derive(Debug, Clone, Default)]
pub struct PoolReadings {
    /// When, ns since the caller's epoch.
    pub now_ns: u64,
    /// All cores that have not ended.
    pub cores: Vec<CoreLoad>,
    /// All queues that are on one.
    pub queues: Vec<QueueLoad>,
    /// Queues whose move has failed since the last readings: their requests in flight did not end.
    pub not_quiet: Vec<QueueKey>,
}
