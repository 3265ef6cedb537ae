//! Scheduling of I/O cores: from readings to decisions. No threads, no I/O (but the reading of sysfs and `/proc`), no clock of its own.
//!
//! ```text
//!   on a core, at every poll or look at its clock            in the daemon, every 10 to 100 ms
//!   +---------------------------------------------+          +----------------------------------------+
//!   | QueuePolling  poll or arm, by the gaps      |          | divide       a group's weight by cores |
//!   | CpuCeiling    how much polling is left      | readings | DiskShares   a host's disk by weights  |
//!   |                                             |          | PoolPlanner  cores and queues          |
//!   | FairTurns     who is next, for how much     |--------->| DecisionLog  what, when, why           |
//!   | RateBucket    whether a request may pass    |<---------| ChoiceWatch  which choices have lasted |
//!   | ChoiceMeter   what was chosen, why, how long|  weights +----------------------------------------+
//!   +---------------------------------------------+  limits, moves
//! ```
//!
//! The left half is data that a core owns and asks: no call of it allocates, locks, blocks, or looks at a clock, and each takes some
//! nanoseconds. The right half depends on nothing but settings and readings, so that a recorded trace gives the same decisions again. docs/decisions/0041-scheduling.md
//! says who asks each of them.
//!
//! Times are ns from an epoch of the caller's. [`RateBucket`] is the only thing that cores share, so their epoch is one. A [`ChoiceMeter`] has one writer.
//!
//! Must not know: rings, pollers, threads, files but those of sysfs and `/proc`, the daemon.

mod choice;
mod disks;
mod fair;
mod limit;
mod log;
mod polling;
mod pool;
mod process;
mod reservation;
mod split;
mod topology;
mod watch;

pub use choice::{ChoiceMeter, ModeCount, QueueChoices, QueueMode};
pub use disks::{DiskLane, DiskNumber, DiskPart, DiskShares};
pub use fair::{
    BackingUse, BlockDevice, FairTurns, Grant, GroupId, IN_FLIGHT, LARGEST_SLICE, MOST_IN_FLIGHT,
    MOST_PER_POLL, Polled, QUANTUM, REQUEST_COST, TenantReading, WHOLE, poll_cost,
};
pub use limit::{LimitPlace, LimitSet, LimitUnit, RateBucket, RateLimit};
pub use log::{
    Decision, DecisionLog, GrowReason, LoggedDecision, MoveReason, QueueKey, ShrinkReason, StuckReason,
};
pub use polling::{
    ArmReason, CoreObjective, CpuCeiling, IdleChoice, ObjectiveMeter, ObjectiveReport, PollTrials,
    PollingCosts, QueuePolling, SpinReason,
};
pub use pool::{CoreLoad, CoreUse, PoolPlanner, PoolReadings, PoolSettings, QueueLoad};
pub use process::ProcessNodes;
pub use reservation::{Capacity, ReservedRates, Shortage};
pub use split::{GroupOnCore, InFlightSettings, LocalShare, divide};
pub use topology::{CpuPlace, CpuTopology, TopologyError};
pub use watch::{ChoiceWatch, CoreLook, QueueLook};
