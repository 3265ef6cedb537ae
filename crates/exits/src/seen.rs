//! How much a watch has seen, whoever records.

use std::time::Duration;

use crate::trace::Losses;

/// How much was seen, and how much not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatchCounts {
    /// `kvm_exit` as counted by perf in the kernel, recorded or not.
    pub counted: u64,
    /// Hits of all tracepoints that we asked for, counted likewise.
    pub events: u64,
    /// Records of events that we have read.
    pub records: u64,
    /// Threads that were watched.
    pub threads: usize,
    /// What tracefs has lost.
    pub losses: Losses,
    /// In a sample: how long it was recorded, and in how many slices.
    pub recorded: (Duration, u64),
    /// Exits that KVM has counted while the watch was being switched on and off: so far its count may be from ours.
    pub slack: u64,
}
