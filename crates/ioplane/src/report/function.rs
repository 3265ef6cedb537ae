//! PCI functions.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{PortReport, ServedState, VmReport};

/// What a function does just now, as far as its owners can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Its guest uses it, or may.
    Running,
    /// It is on its way to rest; its guest goes on.
    Quiescing,
    /// It is at rest, and what its guest does to it waits.
    Held,
    /// It is being exchanged: what its guest does to it waits.
    Away,
}

impl Stage {
    /// In a word.
    pub fn word(self) -> &'static str {
        match self {
            Stage::Running => "running",
            Stage::Quiescing => "quiescing",
            Stage::Held => "held",
            Stage::Away => "away",
        }
    }
}

/// One PCI function: `ioplane pci show --json`, `GET /v1/pci/NAME`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FunctionReport {
    /// Its name.
    pub name: String,
    /// Whether it is there.
    pub state: ServedState,
    /// Why it is not.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
    /// `config`, or `added` at run time.
    pub origin: String,
    /// A VMM is connected.
    pub connected: bool,
    /// VMMs that have come so far.
    pub connections: u64,
    /// Which VM that is.
    pub vm: Option<VmReport>,
    /// Where VMMs connect (vfio-user).
    pub socket: PathBuf,
    /// `virtual` (under watch), `passthrough` or `emulated`.
    pub mode: String,
    /// Address on this host, if it is a function of the host.
    pub host: Option<String>,
    /// The emulated chip, or the state model that watches.
    pub model: Option<String>,
    /// Vendor and device, as `10ec:8139`.
    pub id: Option<String>,
    /// What becomes of accesses that the state model does not allow, by cause.
    pub on_fault: Option<String>,
    /// The switch that an emulated NIC is plugged into.
    pub switch: Option<String>,
    /// Or its TAP interface.
    pub tap: Option<String>,
    /// Address of an emulated NIC.
    pub mac: Option<String>,
    /// The image that keeps QEMU from migrating a guest with this function.
    pub guard: PathBuf,
    /// What it does just now.
    pub stage: Stage,
    /// Milliseconds until it goes on by itself, if somebody has brought it to rest.
    pub held_ms: Option<u64>,
    /// What VMMs did wrong, by name of the fault.
    pub front_end_faults: BTreeMap<String, u64>,
    /// The last of those, in words.
    pub last_front_end_fault: Option<String>,
    /// What came from the VMM.
    pub traffic: TrafficReport,
    /// What the monitor saw, of a function under watch.
    pub watch: Option<WatchReport>,
    /// The port of an emulated NIC.
    pub port: Option<PortReport>,
}

/// What a VMM asked of a function. Each access was an exit of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrafficReport {
    /// Reads of registers.
    pub reads: u64,
    /// Writes of registers.
    pub writes: u64,
    /// Interrupts that the daemon sent. Those that the hardware sends past it are not known.
    pub interrupts: u64,
    /// Ranges of guest memory that the function reaches now.
    pub memory_ranges: u64,
    /// Their bytes.
    pub memory_bytes: u64,
    /// Quiescent points that the VMM needed and that had to be forced.
    pub forced: u64,
}

/// What the monitor saw. Counts are since the function was added, or since the daemon was started if that was later.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct WatchReport {
    /// The state of each region of the model, in the model's order.
    pub states: Vec<RegionReport>,
    /// All of them are in a reusable state: the function could change hands.
    pub reusable: bool,
    /// It has been stopped because of a fault.
    pub stopped: bool,
    /// Accesses to registers.
    pub accesses: u64,
    /// Those that the model was asked about.
    pub hooked: u64,
    /// Their share, in percent.
    pub hooked_percent: f64,
    /// Changes of state.
    pub transitions: u64,
    /// Descriptors and blocks that were checked and translated before the hardware saw them.
    pub dma_vetted: u64,
    /// Their bytes.
    pub dma_bytes: u64,
    /// Interrupts of the hardware.
    pub interrupts: u64,
    /// What was denied, by cause.
    pub faults: BTreeMap<String, u64>,
    /// The last of those, in words.
    pub last_fault: Option<String>,
    /// What happened last, the oldest first.
    pub events: Vec<EventReport>,
}

/// One region of a state model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionReport {
    /// The region.
    pub region: String,
    /// Its state.
    pub state: String,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventReport {
    /// Its number: they rise by one.
    pub number: u64,
    /// In words.
    pub what: String,
}

/// `POST /v1/pci/NAME/quiesce`: how a function came to rest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestReport {
    /// Its name.
    pub name: String,
    /// By itself (nothing is in flight), or by force (what was in flight is recorded).
    pub drained: bool,
    /// How long it took.
    pub waited_us: u64,
    /// Why it had to be by force.
    pub reason: Option<String>,
    /// Milliseconds until it goes on by itself.
    pub held_ms: u64,
}

/// The file of `ioplane pci save`, the body of `GET` and `PUT /v1/pci/NAME/state`. Hostile input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StateFile {
    /// [`StateFile::FORMAT`].
    pub format: String,
    /// [`StateFile::VERSION`].
    pub version: u32,
    /// What saved it, as the device calls itself: `rtl8139`.
    pub kind: String,
    /// Version of the device's own encoding.
    pub state_version: u32,
    /// That encoding, in base64.
    pub body: String,
}

impl StateFile {
    /// What kind of file it is.
    pub const FORMAT: &'static str = "ioplane-function";
    /// Version of the file.
    pub const VERSION: u32 = 1;
}
