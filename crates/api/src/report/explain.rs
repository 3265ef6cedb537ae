//! Where the time of requests goes.

use serde::{Deserialize, Serialize};

/// `ioplane explain NAME --json`, `GET /v1/explain/{name}`: where the time of one device's, or of one VM's, requests went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExplainReport {
    /// What was asked about.
    pub name: String,
    /// For how long was looked, in seconds.
    pub seconds: f64,
    /// The devices: the one of this name, or those of the VM.
    pub devices: Vec<DeviceTimes>,
    /// How the cores learned of the requests of each queue that had some, and why, in words; nothing of queues whose core decides nothing.
    #[serde(default)]
    pub choices: Vec<ChoiceText>,
    /// What slows them down, the worst first; none if nothing stands out.
    pub findings: Vec<Slowdown>,
}

/// How a core learned of the requests of one queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ChoiceText {
    /// The device.
    pub device: String,
    /// The queue.
    pub queue: u16,
    /// How, and why.
    pub text: String,
}

/// Where the time of one device's requests went. A unit is a request of a disk or a frame of a NIC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceTimes {
    /// `disk` or `nic`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// Units per second.
    pub units_per_s: f64,
    /// Bytes per second, in units of a million.
    pub mb_per_s: f64,
    /// Waiting for the core: half of the units were taken within this, microseconds. As far as it can be seen: see `wait_p99_us` of a queue.
    pub wait_p50_us: f64,
    /// 99 of 100 were.
    pub wait_p99_us: f64,
    /// In the device: half of the units were done within this from when they were taken, microseconds.
    pub device_p50_us: f64,
    /// 99 of 100 were.
    pub device_p99_us: f64,
    /// To the interrupt: half of the interrupts were sent within this from when the core had the results that they announce, microseconds.
    #[serde(default)]
    pub interrupt_p50_us: f64,
    /// 99 of 100 were.
    #[serde(default)]
    pub interrupt_p99_us: f64,
    /// Kicks for each unit.
    pub kicks_per_unit: f64,
    /// Interrupts for each unit.
    pub interrupts_per_unit: f64,
    /// Where the time of a unit goes on average, in words: a sentence for each direction that had some. Empty from a daemon that does not say.
    #[serde(default)]
    pub text: String,
}

/// What slows a device down.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Slowdown {
    /// Of what kind.
    pub cause: SlowdownCause,
    /// Which device.
    pub device: String,
    /// What was seen.
    pub text: String,
    /// What would help.
    pub remedy: String,
}

/// Of what kind a finding is. Further ones may come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SlowdownCause {
    /// A queue has stopped, since its guest broke a rule.
    StoppedQueue,
    /// A limit holds requests back.
    Limit,
    /// The core does not get the processor time that it wants.
    StarvedCore,
    /// The CPU ceiling of the core forbids polling, so that requests wait for a wake-up.
    Ceiling,
    /// Another device takes most of the core.
    GreedyNeighbour,
    /// The disk below is slow.
    SlowDisk,
    /// The ring is full: the guest has more requests than it may have in flight.
    FullRing,
    /// One of several queues has all the work.
    OneQueue,
    /// The guest does not take its frames fast enough.
    SlowReceiver,
    /// The driver does not use VIRTIO_F_EVENT_IDX (virtio 1.3, section 2.7.7).
    NoEventIdx,
}
