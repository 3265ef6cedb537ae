//! What the daemon says of its pool of I/O cores.

use serde::{Deserialize, Serialize};

use crate::spec::CpuList;

/// `ioplane core pool --json`, `GET /v1/pool`. Counts are since the daemon was started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PoolReport {
    /// Whether the configuration has a `[pool]`. Without one, cores come, go and change places only as users say.
    pub configured: bool,
    /// Cores that there are at least.
    pub min: u32,
    /// Cores that there are at most.
    pub max: u32,
    /// Processors for its cores; nothing if they are not pinned.
    pub cpus: Option<CpuList>,
    /// Cores that take queues now.
    pub open: u32,
    /// Cores whose queues are being moved away.
    pub draining: u32,
    /// Cores that the pool has started.
    pub grown: u64,
    /// Cores that the pool has ended.
    pub shrunk: u64,
    /// Queues that were moved, other than by `core move`.
    pub moved: u64,
    /// Moves that failed: the queue stayed where it was.
    pub failed: u64,
    /// Decisions so far: the number of the next one.
    pub decisions: u64,
}

words! {
    /// What was decided.
    DecisionWord, Other,
    /// One core more.
    Grow "grow",
    /// A core ends when its queues have left.
    Shrink "shrink",
    /// A queue goes to another core.
    Move "move",
    /// A queue stays where it is, and something about that is not well.
    Stuck "stuck",
    /// A queue is armed for most of the time: its driver is asked to kick.
    Arm "arm",
    /// A queue is polled for most of the time.
    Poll "poll",
    /// A limit, or the CPU ceiling of a core, begins to bite or no longer does.
    Throttle "throttle",
    /// Something else has come of what is asked of a core.
    Objective "objective",
    /// Something else: `text` says what.
    Other "other",
}

/// One decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DecisionReport {
    /// They rise by one while the daemon lives, from 0 on.
    pub number: u64,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// What.
    pub decision: DecisionWord,
    /// The device whose queue it is about.
    pub device: Option<String>,
    /// That queue.
    pub queue: Option<u16>,
    /// The core it is about: one that ends, or where a queue is.
    pub from: Option<u32>,
    /// Where a queue goes.
    pub to: Option<u32>,
    /// In words, with the reason.
    pub text: String,
}

/// `ioplane core decisions --json`, `GET /v1/pool/decisions`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DecisionsReport {
    /// Those that are kept, oldest first.
    pub decisions: Vec<DecisionReport>,
    /// How many that were asked for are no longer kept.
    pub lost: u64,
    /// The number of the next one: ask from there for what comes after these.
    pub next: u64,
}
