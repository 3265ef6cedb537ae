//! What disks, NICs, PCI functions, switches and I/O cores are to be: the one form that the configuration, the API, the command line and the state
//! file fill in, and what may be wrong with it.

#[macro_use]
mod words;

mod address;
mod core;
mod disk;
mod fields;
mod function;
mod network;
mod pci_address;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::core::{CORES, CoreForm, CoreSpec};
pub use address::{Mac, VlanSpec};
pub use disk::{BackingSpec, DiskForm, DiskSpec};
pub use fields::{FieldSource, FieldValue, Form};
use fields::{form, spec, values};
pub use function::{
    CableSpec, ChipWord, FaultSpec, FaultWord, FunctionForm, FunctionSpec, ModeWord, SourceSpec,
};
pub use network::{MTU, NIC_QUEUE_SIZE, NicForm, NicSpec, SwitchForm, SwitchSpec};
pub use pci_address::PciAddress;

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
    NotifyWord, Polled,
    /// The core looks; guests need not kick.
    Polled "polled",
    /// Guests kick.
    Notified "notified",
}

words! {
    /// How a core treats others on its processor.
    MannersWord, Yields,
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
    /// Whether a NIC's cable is plugged in, as its guest sees it.
    LinkWord, Up,
    /// It is.
    Up "up",
    /// It is not: nothing goes in or out.
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

/// Longest path of a unix socket (sun_path, with its end).
const SOCKET_PATH: usize = 107;
/// Most entries of a ring: QEMU's own limit. vhost-user has no message for a smaller one, so a front end that was not
/// started with our arguments may set up this many, and is served.
pub const QUEUE_SIZE_MAX: u16 = 1024;

/// What the daemon serves on a socket of its own: what disks and NICs have in common.
pub trait ServedSpec: Clone + PartialEq + Send + Sync + 'static {
    /// Unique among everything that the daemon serves.
    fn name(&self) -> &str;
    /// Where its front end connects, if it is not `RUN_DIR/NAME.sock`.
    fn socket(&self) -> Option<&Path>;
    /// The core that its queues prefer.
    fn core(&self) -> Option<u32>;
    /// Where a second front end connects, the destination of a migration, if one can.
    fn twin(&self) -> Option<&Path> {
        None
    }
    /// Files that its front ends may share as memory.
    fn guest_memory(&self) -> MemoryWord;
    /// Number of its queues.
    fn queues(&self) -> u16;
    /// Everything that is wrong with it in itself. The state file is checked by this too.
    fn flaws(&self) -> Vec<Flaw>;
    /// The fields of `configured` where they differ from `base`, what the configuration was; the fields of `now` elsewhere.
    fn three_way(base: &Self, configured: &Self, now: &Self) -> Self;
    /// Fields of the form in which this one, as somebody asks for it, differs from `other`.
    fn differing(&self, other: &Self) -> Vec<&'static str>;
    /// Its place on a switch: the switch's name, and the address that no other port of that switch may have.
    fn port(&self) -> Option<(&str, Mac)> {
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

/// What is wrong with a name, if anything.
pub fn name_flaw(name: &str) -> Option<Flaw> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let remedy = "use 1 to 40 letters, digits, '-', '_' and '.', beginning with a letter or a digit";
    if name.is_empty() || name.len() > 40 {
        return Some(Flaw::new("name", format!("a name of {} characters", name.chars().count()), remedy));
    }
    if let Some(bad) = name.chars().find(|c| !plain(*c)) {
        return Some(Flaw::new("name", format!("{bad:?} in the name {name:?}"), remedy));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return Some(Flaw::new("name", format!("the name {name:?} begins with a sign"), remedy));
    }
    None
}

/// What is wrong with the path of a socket, if anything.
pub fn socket_flaw(path: &Path) -> Option<Flaw> {
    if !path.is_absolute() {
        return Some(Flaw::new(
            "socket",
            format!("{} is not an absolute path", path.display()),
            "begin it with /",
        ));
    }
    let len = path.as_os_str().len();
    if len > SOCKET_PATH {
        let reason =
            format!("{} is {len} bytes long; a socket's path has {SOCKET_PATH} at most", path.display());
        return Some(Flaw::new("socket", reason, "choose a shorter run_dir or socket"));
    }
    None
}

/// A number that a form gives or leaves out; one that is out of range is a flaw, and the default stands in for it.
fn number(
    flaws: &mut Vec<Flaw>,
    field: &'static str,
    given: Option<u64>,
    default: u16,
    range: RangeInclusive<u16>,
) -> u16 {
    let value = given.unwrap_or(u64::from(default));
    u16::try_from(value).ok().filter(|value| range.contains(value)).unwrap_or_else(|| {
        let remedy = format!("give {} to {}", range.start(), range.end());
        flaws.push(Flaw::new(field, format!("{field} = {value}"), remedy));
        default
    })
}

/// The specification that a form makes, unless it has flaws of its own or the form had. One flaw a field is enough.
fn checked<S: ServedSpec>(spec: S, mut flaws: Vec<Flaw>) -> Result<S, Vec<Flaw>> {
    for flaw in spec.flaws() {
        if !flaws.iter().any(|known| known.field == flaw.field) {
            flaws.push(flaw);
        }
    }
    if flaws.is_empty() { Ok(spec) } else { Err(flaws) }
}
