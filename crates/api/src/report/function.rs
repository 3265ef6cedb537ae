//! PCI functions.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::request::{PhysicalForm, StopWord, VectorForm};
use crate::spec::{MacAddress, VfSettings};

use super::{PortReport, RetryReport, ServedState, VmReport};

/// What a function does just now, as far as its owners can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Its guest uses it, or may.
    Running,
    /// It becomes quiescent; its guest runs.
    Quiescing,
    /// It is quiescent, and what its guest does to it waits.
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

/// Where a function is on its way from one host to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum MoveStep {
    /// It was told to stand still, for its state to go along. Nobody has let it go on since.
    AtRest,
    /// It stands still with the state of another host's function.
    Taken,
    /// Its guest went on with another host's function.
    Left,
    /// It stood still, and what it was to go on from ended with the daemon or with its VMM.
    Lost,
}

impl MoveStep {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            MoveStep::AtRest => "stands still, to be moved",
            MoveStep::Taken => "stands still, with the state of another host's function",
            MoveStep::Left => "has left: its guest is another host's",
            MoveStep::Lost => "was to be moved, and its state is lost",
        }
    }
}

/// One PCI function: `ioplane pci show --json`, `GET /v1/pci/NAME`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct FunctionReport {
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
    /// A VMM is connected.
    pub connected: bool,
    /// VMMs that have come so far.
    pub connections: u64,
    /// Which VM that is.
    pub vm: Option<VmReport>,
    /// Where VMMs connect (vfio-user).
    pub socket: PathBuf,
    /// `virtual` (mediated), `passthrough`, `migratable`, `cooperating` or `emulated`.
    pub mode: String,
    /// Address on this host, if it is a function of the host.
    pub host: Option<String>,
    /// The emulated chip, or the state model that mediates.
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
    /// Where it is on its way to or from another host. It is written down before it is so.
    #[serde(default)]
    pub step: Option<MoveStep>,
    /// Milliseconds until it resumes by itself, if somebody has quiesced it.
    pub held_ms: Option<u64>,
    /// What VMMs did wrong, by name of the fault.
    pub front_end_faults: BTreeMap<String, u64>,
    /// The last of those, in words.
    pub last_front_end_fault: Option<String>,
    /// What came from the VMM.
    pub traffic: TrafficReport,
    /// What the monitor saw, of a mediated function.
    pub watch: Option<WatchReport>,
    /// What an emulated NIC did.
    pub chip: Option<ChipReport>,
    /// What went wrong with a function of the host that is passed through as it is, by name.
    pub hardware_faults: BTreeMap<String, u64>,
    /// Why its last reset did not happen, if it did not.
    pub not_reset: Option<String>,
    /// Why it takes no guest, and what to do about that: it could not be reset, or somebody keeps what an earlier guest was given.
    #[serde(default)]
    pub unusable: Option<String>,
    /// Why it could not be brought to a state now, of one that its guest drives itself and that can be moved: its physical function is
    /// not driven by this host, is down, or has no link.
    #[serde(default)]
    pub no_replay: Option<String>,
    /// The port of an emulated NIC.
    pub port: Option<PortReport>,
    /// What its guest's driver has announced, of one that is added to cooperate.
    #[serde(default)]
    pub cooperation: Option<CooperationReport>,
    /// Pages of its registers that its guest uses without an exit just now, of a migratable one that was added with `mapped`: none while it is moved,
    /// and none without the library in QEMU.
    #[serde(default)]
    pub mapped_pages: Option<u64>,
    /// What its physical function has for it, of one that can be moved.
    #[serde(default)]
    pub physical: Option<PhysicalReport>,
}

/// What a physical function of this host has for a virtual one: as `ip link show` and `ip link set PF vf N` have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PhysicalReport {
    /// Interface of the physical function.
    pub interface: String,
    /// Which of its virtual functions.
    pub number: u32,
    /// The address that it has now, whoever has set it.
    pub address: Option<MacAddress>,
    /// What the administrator has set, or a guest that moved here has brought along.
    pub settings: VfSettings,
    /// What it was before that, and is again when the guest is gone.
    #[serde(default)]
    pub own: Option<VfSettings>,
}

/// What a driver that cooperates has announced.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CooperationReport {
    /// There is such a driver, and its page is believed.
    pub announced: bool,
    /// Why its page is not.
    pub refused: Option<String>,
    /// Entries of its list.
    pub entries: u64,
    /// How often its function was reset under it, which it is told.
    pub moves: u32,
    /// What that was when it brought its function back last.
    pub replayed: u32,
}

/// What a VMM asked of a function. Each access was an exit of the guest.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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
    /// Times that the VMM needed it quiescent, and it had to be suspended.
    pub forced: u64,
}

/// What the monitor saw. Counts are since the function was added, or since the daemon was started if that was later.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WatchReport {
    /// The state of each region of the model, in the model's order.
    pub states: Vec<RegionReport>,
    /// All of them are in a reusable state: the function could change hands.
    pub reusable: bool,
    /// It has been stopped because of a fault.
    pub stopped: bool,
    /// The hardware no longer answers.
    pub gone: bool,
    /// The guest reads registers from a page, without an exit.
    pub shadow_page: bool,
    /// Accesses of the guest to registers, without the configuration space.
    pub accesses: u64,
    /// Those that the model was asked about.
    pub hooked: u64,
    /// Their share, in percent.
    pub hooked_percent: f64,
    /// Those that went straight to the hardware.
    pub straight: u64,
    /// Those that were answered without the hardware: interrupt status and mask, addresses of rings.
    pub kept: u64,
    /// Times that the model was asked or told of something.
    pub updates: u64,
    /// Descriptors that passed their check and were translated before the hardware saw them.
    pub dma_vetted: u64,
    /// Bytes of their buffers, and of blocks and transfers that passed.
    pub dma_bytes: u64,
    /// Bytes through the card's data port.
    pub port_bytes: u64,
    /// Interrupts of the hardware.
    pub interrupts: u64,
    /// Interrupts that the guest was given.
    pub interrupts_given: u64,
    /// What was denied, all causes together.
    pub denied: u64,
    /// What was denied, and what the hardware did wrong.
    pub faults: Vec<WatchFaultReport>,
    /// What happened last, the oldest first; at most 64.
    pub events: Vec<EventReport>,
}

/// Faults of one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WatchFaultReport {
    /// The name, such as `descriptor-outside`.
    pub name: String,
    /// `dma`, `register` or `hardware`.
    pub cause: String,
    /// How many.
    pub count: u64,
    /// The last one, in words.
    pub last: String,
}

/// What an emulated NIC did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ChipReport {
    /// Frames that the guest sent.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that the guest received.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames that came to nothing, by cause.
    pub drops: BTreeMap<String, u64>,
    /// DMA to where the guest has no memory.
    pub wrong_dma: u64,
    /// Interrupts signalled.
    pub interrupts: u64,
    /// Resets by the guest.
    pub resets: u64,
}

/// One region of a state model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RegionReport {
    /// The region.
    pub region: String,
    /// Its state.
    pub state: String,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EventReport {
    /// Its number: they rise by one.
    pub number: u64,
    /// Microseconds since the function was opened.
    pub at_us: u64,
    /// In words.
    pub what: String,
}

/// `POST /v1/pci/NAME/quiesce`: how a function was quiesced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct QuiesceReport {
    /// Its name.
    pub name: String,
    /// Drained (nothing is in flight), or suspended (what was in flight is recorded).
    pub drained: bool,
    /// How long it took.
    pub waited_us: u64,
    /// Why it was suspended.
    pub reason: Option<String>,
    /// A VM is connected: its guest waits until the function resumes.
    #[serde(default)]
    pub connected: bool,
    /// Milliseconds until it resumes by itself.
    pub held_ms: u64,
}

/// `POST /v1/pci/NAME/move`: another function took the place of one that a guest uses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MovedFunctionReport {
    /// Its name.
    pub name: String,
    /// The function of the host that it was.
    pub from: String,
    /// The one that it is.
    pub to: String,
    /// Bytes of the state that went from one to the other.
    pub state_bytes: u64,
    /// Register accesses that brought the former to rest.
    pub stop_accesses: u64,
    /// Register accesses that brought the other one to where it was.
    pub replay_accesses: u64,
    /// From the first of them to the last, microseconds.
    pub took_us: u64,
    /// What was not done afterwards.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub complaint: Option<String>,
}

/// `POST /v1/pci/NAME/rest`: a function that a guest drives itself stands still.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RestedFunctionReport {
    /// Its name.
    pub name: String,
    /// Register accesses that brought it there.
    pub stop_accesses: u64,
    /// How long it took, microseconds.
    pub waited_us: u64,
    /// Pages that its VMM was told of, since the function had written them; `None` if they were not logged, or the guest runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pages_sent: Option<u64>,
}

/// `POST /v1/pci/NAME/replay`: a function that stood still goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ReplayedFunctionReport {
    /// Its name.
    pub name: String,
    /// Register accesses that brought it to where it was.
    pub replay_accesses: u64,
    /// Messages to its physical function that did so.
    #[serde(default)]
    pub replay_messages: u64,
    /// Frames that its physical function has sent to it, which moved the heads of its receive rings to where they were.
    #[serde(default)]
    pub replay_frames: u64,
    /// Messages that its physical function had been told ahead, and that were not said again; 0: all of them were.
    #[serde(default)]
    pub messages_ahead: u64,
    /// From the first of them to the last, microseconds.
    pub took_us: u64,
}

/// What the driver of a guest has said to its function's physical function so far, while it runs: the body of `GET` and `PUT
/// /v1/pci/NAME/ahead`. Hostile input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct SaidFunctionV1 {
    /// [`SaidFunctionV1::FORMAT`].
    pub format: String,
    /// [`SaidFunctionV1::VERSION`].
    pub version: u32,
    /// The messages, in base64.
    pub said: String,
}

impl crate::spec::Form for SaidFunctionV1 {
    const FIELDS: &'static [&'static str] = &["format", "version", "said"];
}

impl SaidFunctionV1 {
    /// What kind of file it is.
    pub const FORMAT: &'static str = "ioplane-said-function";
    /// Version of the file.
    pub const VERSION: u32 = 1;
}

/// `PUT /v1/pci/NAME/ahead`: what another host's guest has said was said here as well, while it runs there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct AheadFunctionReport {
    /// Its name.
    pub name: String,
    /// Messages that stand, whether they were said now or before.
    pub messages_ahead: u64,
    /// Microseconds.
    pub took_us: u64,
}

/// What a function that stands still has, and what another host's needs to go on from there: the body of `GET` and `PUT
/// /v1/pci/NAME/carried`. Hostile input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct CarriedFunctionV1 {
    /// [`CarriedFunctionV1::FORMAT`].
    pub format: String,
    /// [`CarriedFunctionV1::VERSION`].
    pub version: u32,
    /// What saved it, as the function calls itself: `rtl8139`.
    pub kind: String,
    /// Version of the state's encoding.
    pub state_version: u32,
    /// The state, in base64.
    pub state: String,
    /// Its command register, as its guest sees it.
    pub command: u16,
    /// Its BARs, as its guest sees them.
    pub bars: [u32; 6],
    /// Message control of its MSI-X capability; 0 without one.
    pub msix: u16,
    /// The vectors of MSI-X that signal somebody.
    pub vectors: Vec<u16>,
    /// What its physical function has for it, of one that its guest drives itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub physical: Option<PhysicalForm>,
}

impl crate::spec::Form for CarriedFunctionV1 {
    const FIELDS: &'static [&'static str] = &[
        "format",
        "version",
        "kind",
        "state_version",
        "state",
        "command",
        "bars",
        "msix",
        "vectors",
        "physical",
    ];
}

impl CarriedFunctionV1 {
    /// What kind of file it is.
    pub const FORMAT: &'static str = "ioplane-carried-function";
    /// Version of the file.
    pub const VERSION: u32 = 1;
}

/// The file of `ioplane pci save`, the body of `GET` and `PUT /v1/pci/NAME/state`. Hostile input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct StateFileV1 {
    /// [`StateFileV1::FORMAT`].
    pub format: String,
    /// [`StateFileV1::VERSION`].
    pub version: u32,
    /// What saved it, as the device calls itself: `rtl8139`.
    pub kind: String,
    /// Version of the device's own encoding.
    pub state_version: u32,
    /// That encoding, in base64.
    pub body: String,
}

impl crate::spec::Form for StateFileV1 {
    const FIELDS: &'static [&'static str] = &["format", "version", "kind", "state_version", "body"];
}

impl StateFileV1 {
    /// What kind of file it is.
    pub const FORMAT: &'static str = "ioplane-function";
    /// Version of the file.
    pub const VERSION: u32 = 1;
}

/// How the guest has set a PCI function up, and its VMM: `POST /v1/pci/NAME/set-up`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SetUpFunctionReport {
    /// Its command register (PCI Local Bus Specification 3.0, 6.2.2).
    pub command: u16,
    /// It has a pin for a wired interrupt (6.2.4).
    pub pin: bool,
    /// Its MSI-X, if it has the capability.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub msix: Option<MsixReport>,
}

/// MSI-X of a PCI function (the same specification, 6.8.2).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MsixReport {
    /// Where the capability is in configuration space.
    pub at: u8,
    /// Its message control.
    pub control: u16,
    /// All entries of the table, as the VMM has it, which emulates it; empty unless MSI-X is in use.
    pub table: Vec<VectorForm>,
}

/// The vCPUs of a PCI function's VMM, as ioplane's library in its process says: `GET /v1/pci/NAME/vcpus`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VcpusReport {
    /// None enters the guest.
    pub held: bool,
    /// How many are in the guest, or have come from there with something to do.
    pub inside: u32,
    /// What becomes of one that the VMM wants back: `ask`, `keep` or `free`.
    pub stop: StopWord,
    /// How many the VMM wants back that wait.
    pub waiting: u32,
    /// The VMM's main thread waits for another thread, and not for a processor, a device or events: as far as this host can tell.
    pub main_waits: bool,
}
