//! Switches and NICs.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{ChoiceReport, Counts, FaultReport, RetryReport, ServedState, VmReport};
use crate::size::Size;
use crate::spec::{LimitsSpec, limits_of};

/// One switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SwitchReport {
    /// Its name.
    pub name: String,
    /// `config`, or `added` at run time.
    pub origin: String,
    /// The TAP interface behind it.
    pub uplink: Option<String>,
    /// The I/O core that it is served on, if it is.
    pub uplink_core: Option<u32>,
    /// Why the uplink does not work.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
    /// When it is tried again.
    #[serde(default)]
    pub retry: Option<RetryReport>,
    /// Its ports: NICs by name, and the uplink.
    pub ports: Vec<PortReport>,
    /// Addresses it has learned and not forgotten.
    pub learned: u32,
}

/// `GET /v1/switches/NAME`: a switch with its table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SwitchTableReport {
    /// The switch.
    #[serde(flatten)]
    pub switch: SwitchReport,
    /// Where it would send what.
    pub table: Vec<LearnedReport>,
}

/// One port of a switch. `sent` is what came from its owner (the guest, or the host behind an uplink) into the switch,
/// `received` what went to its owner.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PortReport {
    /// Name of its NIC, or of the interface.
    pub name: String,
    /// It is the uplink.
    pub uplink: bool,
    /// Its link is up: that of a NIC when a driver has started its queues and nobody has taken it down, that of an emulated PCI function from the
    /// beginning.
    pub up: bool,
    /// It exchanges nothing with other isolated ports.
    pub isolated: bool,
    /// Its configured address.
    pub mac: Option<String>,
    /// Addresses that have been learned there, besides that.
    pub learned: u32,
    /// Frame batches that wait for its owner.
    pub waiting: u64,
    /// Frames that the switch accepted from it. A frame with segmentation left to do counts as one.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames from it that were dropped, by cause.
    pub sent_drops: BTreeMap<String, u64>,
    /// Frames that its owner took.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames for it that were dropped, by cause.
    pub received_drops: BTreeMap<String, u64>,
}

impl PortReport {
    /// All drops together.
    pub fn dropped(&self) -> u64 {
        self.sent_drops.values().chain(self.received_drops.values()).sum()
    }
}

/// An address that a switch has learned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LearnedReport {
    /// The address.
    pub mac: String,
    /// Its VLAN; 0 for untagged.
    pub vlan: u16,
    /// The port that it was seen on.
    pub port: String,
    /// Seconds since it was seen there last.
    pub age_s: u64,
    /// It moved too often, and is kept where it is for a while.
    pub held: bool,
}

/// One NIC.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NicReport {
    /// Its name.
    pub name: String,
    /// Whether it is there.
    pub state: ServedState,
    /// Why it is not.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
    /// When it is tried again.
    #[serde(default)]
    pub retry: Option<RetryReport>,
    /// `config`, or `added` at run time.
    pub origin: String,
    /// A front end (a VMM) is connected.
    pub connected: bool,
    /// Front ends that have come so far.
    pub connections: u64,
    /// Whose front end it is.
    pub vm: Option<VmReport>,
    /// Where front ends connect.
    pub socket: PathBuf,
    /// The switch it is plugged into.
    pub switch: String,
    /// Its address.
    pub mac: String,
    /// It reaches no other isolated NIC.
    pub isolated: bool,
    /// Its VLANs: `all`, a number, or `trunk:` and numbers.
    pub vlan: String,
    /// Pairs of queues.
    pub pairs: u16,
    /// Most entries of a ring.
    pub queue_size: u16,
    /// Bytes of a frame behind its Ethernet header.
    pub mtu: u16,
    /// `up` or `down`.
    pub link: String,
    /// The core that its queues prefer.
    pub core: Option<u32>,
    /// The group it is in, if any.
    #[serde(default)]
    pub group: Option<String>,
    /// Frames per second that its guest may send, if they are limited.
    #[serde(default)]
    pub tx_frame_limit: Option<u64>,
    /// Frames that it may send at once after a pause, if somebody has said so.
    #[serde(default)]
    pub tx_frame_burst: Option<u64>,
    /// Bytes per second that its guest may send, if they are limited.
    #[serde(default)]
    pub tx_bandwidth_limit: Option<Size>,
    /// Bytes that it may send at once after a pause, if somebody has said so.
    #[serde(default)]
    pub tx_bandwidth_burst: Option<Size>,
    /// Frames per second that its guest may receive, if they are limited.
    #[serde(default)]
    pub rx_frame_limit: Option<u64>,
    /// Frames that it may receive at once after a pause, if somebody has said so.
    #[serde(default)]
    pub rx_frame_burst: Option<u64>,
    /// Bytes per second that its guest may receive, if they are limited.
    #[serde(default)]
    pub rx_bandwidth_limit: Option<Size>,
    /// Bytes that it may receive at once after a pause, if somebody has said so.
    #[serde(default)]
    pub rx_bandwidth_burst: Option<Size>,
    /// Virtio features that its driver accepted, as bits.
    pub features: u64,
    /// What front ends did wrong, by name of the fault.
    pub front_end_faults: BTreeMap<String, u64>,
    /// The last of those, in words.
    pub last_front_end_fault: Option<String>,
    /// Memory mappings that its front end has taken.
    #[serde(default)]
    pub mappings: u64,
    /// Its port of the switch.
    pub port: PortReport,
    /// What its guest received.
    pub received: FrameCounts,
    /// What its guest sent.
    pub sent: FrameCounts,
    /// Each of its queues.
    pub queues: Vec<NicQueueReport>,
}

impl NicReport {
    /// The limits of what its guest sends.
    pub fn tx_limits(&self) -> LimitsSpec {
        limits_of!(tx_limits of self)
    }

    /// The limits of what its guest receives.
    pub fn rx_limits(&self) -> LimitsSpec {
        limits_of!(rx_limits of self)
    }
}

/// What a queue of a NIC is for. (Its VMM keeps the control queue.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Frames to the guest.
    Receive,
    /// Frames from the guest.
    Transmit,
}

impl Role {
    /// Of the queue `index` (virtio 1.3, 5.1.2).
    pub fn of(index: u16) -> Self {
        if index.is_multiple_of(2) { Role::Receive } else { Role::Transmit }
    }

    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Role::Receive => "receive",
            Role::Transmit => "transmit",
        }
    }
}

/// One queue of a NIC.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct NicQueueReport {
    /// Its number.
    pub index: u16,
    /// What it is for.
    pub role: Role,
    /// Entries of its ring; 0 until the driver has set it up.
    pub size: u16,
    /// The I/O core it is on, if it runs.
    pub core: Option<u32>,
    /// Why it has stopped for good.
    pub fault: Option<FaultReport>,
    /// How its core learns of its frames, and why; nothing while it is on none.
    #[serde(default)]
    pub choice: Option<ChoiceReport>,
    /// What it did.
    #[serde(flatten)]
    pub counts: FrameCounts,
}

/// What queues of a NIC did.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FrameCounts {
    /// Frames. One with segmentation left to do counts as one.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Kicks: each is an exit of the guest.
    pub kicks: u64,
    /// That many for each frame; 0 without frames.
    pub kicks_per_frame: f64,
    /// Batches of frames that were found by looking, each without a kick.
    pub kicks_avoided: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// That many for each frame; 0 without frames.
    pub interrupts_per_frame: f64,
    /// Batches shown to the driver without one.
    pub interrupts_avoided: u64,
    /// Times that the core looked at the queues and left frames waiting because of a limit.
    #[serde(default)]
    pub limited: u64,
    /// Faults of the guest; each stops a queue.
    pub faults: u64,
    /// Device time: half of the frames were done within this, from when they were taken.
    pub p50_us: f64,
    /// 99 of 100 were.
    pub p99_us: f64,
    /// Waiting for the core: half of the frames were taken within this.
    pub wait_p50_us: f64,
    /// 99 of 100 were.
    pub wait_p99_us: f64,
    /// Time to the interrupt: half of the interrupts were sent within this, from when the core had done the frames that they announce.
    #[serde(default)]
    pub interrupt_p50_us: f64,
    /// 99 of 100 were.
    #[serde(default)]
    pub interrupt_p99_us: f64,
    /// Buckets of the device time, for the metrics.
    #[serde(skip)]
    pub latency: Vec<u64>,
    /// The same for the waiting.
    #[serde(skip)]
    pub wait: Vec<u64>,
    /// The same for the time to the interrupt.
    #[serde(skip)]
    pub interrupt: Vec<u64>,
}

impl From<Counts> for FrameCounts {
    fn from(counts: Counts) -> Self {
        FrameCounts {
            frames: counts.requests,
            bytes: counts.bytes,
            kicks: counts.kicks,
            kicks_per_frame: counts.kicks_per_request,
            kicks_avoided: counts.kicks_avoided,
            interrupts: counts.interrupts,
            interrupts_per_frame: counts.interrupts_per_request,
            interrupts_avoided: counts.interrupts_avoided,
            limited: counts.limited,
            faults: counts.faults,
            p50_us: counts.p50_us,
            p99_us: counts.p99_us,
            wait_p50_us: counts.wait_p50_us,
            wait_p99_us: counts.wait_p99_us,
            interrupt_p50_us: counts.interrupt_p50_us,
            interrupt_p99_us: counts.interrupt_p99_us,
            latency: counts.latency,
            wait: counts.wait,
            interrupt: counts.interrupt,
        }
    }
}

impl NicQueueReport {
    /// One of which nothing is known.
    pub fn blank(index: u16) -> Self {
        let role = Role::of(index);
        let counts = FrameCounts::default();
        NicQueueReport { index, role, size: 0, core: None, fault: None, choice: None, counts }
    }
}
