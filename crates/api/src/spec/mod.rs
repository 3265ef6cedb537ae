//! What disks, NICs, PCI functions, switches, groups and I/O cores are to be: the one form that the configuration, the API, the command line and the state
//! file fill in, and what may be wrong with it.

#[macro_use]
mod words;

mod address;
mod checks;
mod core;
mod cpu_list;
mod disk;
mod export;
mod fields;
mod function;
mod group;
mod host_list;
mod limit;
mod limit_fields;
mod listen_address;
mod lost;
mod nbd_uri;
mod network;
mod online;
mod pci_address;
mod physical;
mod pool;
mod remote;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::core::{CORES, CoreChangeForm, CoreForm, CoreSpec};
pub use address::{MacAddress, VlanSpec};
pub use checks::{name_flaw, socket_flaw};
pub use cpu_list::CpuList;
pub(crate) use disk::backing_fields;
pub use disk::{BackingForm, BackingSpec, DiskForm, DiskLimitsForm, DiskSpec};
pub use export::{ExportChangeForm, ExportForm, ExportSpec};
pub use fields::{FieldSource, FieldValue, Form, SpecFields};
use fields::{differing, form, served_fields, spec, values};
pub use function::{
    CableSpec, ChipWord, FaultSpec, FaultWord, FunctionForm, FunctionSpec, ModeWord, SourceSpec,
};
pub use group::{GROUP_WEIGHT, GroupChangeForm, GroupForm, GroupSpec, set_group};
use group::{group_flaw, named};
pub use host_list::HostList;
pub use limit::{LimitFields, LimitsSpec};
pub(crate) use limit_fields::{
    disk_limits, export_limits, limit_names, limited, limits_of, rx_limits, set_limits, tx_limits,
    with_limits,
};
pub use listen_address::ListenAddress;
pub use lost::{OnTimeout, TimeoutSpec};
pub use nbd_uri::NbdUri;
pub use network::{MTU, NIC_QUEUE_SIZE, NicChangeForm, NicForm, NicSpec, SwitchForm, SwitchSpec};
pub use pci_address::PciAddress;
pub use physical::{AdoptSpec, SettingWord, TagWord, VfLinkWord, VfSetting, VfSettings, VfVlan};
pub use pool::{PoolForm, PoolSpec};
pub(crate) use remote::remote_options;
pub use remote::{OptionValue, RemoteSpec};

/// One thing that is wrong with a form: which field, why, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// The field, as it is called in the configuration.
    pub field: &'static str,
    /// What is wrong.
    pub reason: String,
    /// What to do.
    pub remedy: String,
}

impl Flaw {
    /// A flaw of `field`.
    pub fn new(field: &'static str, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Flaw { field, reason: reason.into(), remedy: remedy.into() }
    }
}

words! {
    /// How guests' requests are noticed.
    NotifyWord, Adaptive,
    /// The core looks; guests need not kick.
    Polled "polled",
    /// The core looks while that costs less than a kick, and decides for each queue.
    Adaptive "adaptive",
    /// Guests kick.
    Notified "notified",
}

words! {
    /// Whether a core yields its processor to other threads.
    YieldWord, Yields,
    /// Never yields.
    Dedicated "dedicated",
    /// Yields when idle.
    Yields "yields",
    /// Runs at nice 19 as well.
    Nice "nice",
}

words! {
    /// The format of an image, where it is stated.
    FormatWord, Raw,
    /// Raw, whatever its content looks like.
    Raw "raw",
}

words! {
    /// Whether an image's I/O goes past the page cache.
    DirectWord, Auto,
    /// Where it can.
    Auto "auto",
    /// Always, or refuse.
    On "on",
    /// Never.
    Off "off",
}

words! {
    /// What happens when the server of a disk of another machine has not been reachable for `timeout_s`.
    TimeoutWord, Error,
    /// Nothing: requests wait.
    Wait "wait",
    /// Requests fail.
    Error "error",
    /// The VM is paused, and requests wait.
    Pause "pause",
}

impl TimeoutWord {
    /// For what is written down: left out where it is the usual.
    pub fn is_usual(&self) -> bool {
        *self == TimeoutWord::default()
    }
}

words! {
    /// What becomes of writes and flushes without an answer when the connection to a server is lost of which nobody knows whether it carries them out: one
    /// other than ioplane. Reads are sent again.
    DoubtWord, Fail,
    /// They fail; so does the next flush, if there are acknowledged writes that were not flushed.
    Fail "fail",
    /// They are sent again.
    Resend "resend",
}

words! {
    /// What becomes of a disk of another machine whose server is not reachable when it is opened.
    StartWord, Wait,
    /// It is tried again until the server is there.
    Wait "wait",
    /// It is not served until somebody asks again.
    Refuse "refuse",
}

words! {
    /// Who does an image's I/O.
    EngineWord, Auto,
    /// io_uring where allowed.
    Auto "auto",
    /// io_uring, or refuse.
    IoUring "io_uring",
    /// Threads.
    Threads "threads",
}

words! {
    /// Link state of a NIC's port.
    LinkWord, Up,
    /// Frames pass.
    Up "up",
    /// No frame passes.
    Down "down",
}

words! {
    /// Files that a VMM may share as memory of its guest.
    MemoryWord, Ram,
    /// Those whose pages are memory: memfd, tmpfs, hugetlbfs.
    Ram "ram",
    /// Of any file system: a page fault may then wait for a disk, a network or another process, and an I/O core with it.
    Any "any",
}

impl MemoryWord {
    /// For what is written down: left out where it is the usual.
    pub fn is_usual(&self) -> bool {
        *self == MemoryWord::default()
    }
}

/// Most entries of a ring: QEMU's own limit. vhost-user has no message for a smaller one, so a front end that was not
/// started with our arguments may set up this many, and is served.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// A place on a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortSpec {
    /// The switch's name.
    pub switch: String,
    /// The address. No other port of the switch may have it, unless both may share theirs.
    pub mac: MacAddress,
    /// Its guest may migrate, and has a device of this address at both ends meanwhile (docs/guide/migration.md).
    pub shares_mac: bool,
}

impl PortSpec {
    /// Whether the two cannot be at the same time.
    pub fn excludes(&self, other: &PortSpec) -> bool {
        self.switch == other.switch && self.mac == other.mac && !(self.shares_mac && other.shares_mac)
    }
}

/// What the daemon serves on a socket of its own: what disks and NICs have in common.
pub trait ServedSpec: SpecFields + Clone + PartialEq + Send + Sync + 'static {
    /// Unique among everything that the daemon serves.
    fn name(&self) -> &str;
    /// Where its front end connects, if it is not `RUN_DIR/NAME.sock`.
    fn socket(&self) -> Option<&Path>;
    /// The core that its queues prefer.
    fn core(&self) -> Option<u32>;
    /// Where a second front end connects, the destination of a migration, if one can.
    fn migration_socket(&self) -> Option<&Path> {
        None
    }
    /// Files that its front ends may share as memory.
    fn guest_memory(&self) -> MemoryWord;
    /// The group that it is in. All devices in none count as one group.
    fn group(&self) -> Option<&str> {
        None
    }
    /// Number of its queues.
    fn queues(&self) -> u16;
    /// What is wrong with the fields that only this kind has.
    fn own_flaws(&self) -> Vec<Flaw>;
    /// Everything that is wrong with it in itself. The state file is checked by this too.
    fn flaws(&self) -> Vec<Flaw> {
        let mut flaws: Vec<Flaw> = name_flaw(self.name()).into_iter().collect();
        flaws.extend(self.own_flaws());
        flaws.extend(self.socket().and_then(socket_flaw));
        flaws
    }
    /// Its place on a switch.
    fn port(&self) -> Option<PortSpec> {
        None
    }

    /// Whether what is behind the two is the same.
    fn same_content(_one: &Self, _other: &Self) -> bool {
        true
    }

    /// Where its front end connects.
    fn socket_in(&self, run_dir: &Path) -> PathBuf {
        self.socket().map_or_else(|| run_dir.join(format!("{}.sock", self.name())), Path::to_owned)
    }
}

/// What holds of one field: the configuration if that was changed since `base`, else what it is `now`.
pub fn pick<T: PartialEq + Clone>(base: &T, configured: &T, now: &T) -> T {
    if base == configured { now.clone() } else { configured.clone() }
}
