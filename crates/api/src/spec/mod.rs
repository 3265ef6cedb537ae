//! What disks, NICs, PCI functions, switches and I/O cores are to be: the one form that the configuration, the API, the command line and the state
//! file fill in, and what may be wrong with it.

#[macro_use]
mod words;

mod address;
mod core;
mod function;
mod network;
mod pci_address;

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use self::core::{CORES, CoreSpec};
pub use address::{Mac, VlanSpec};
pub use function::{
    CableSpec, ChipWord, FaultSpec, FaultWord, FunctionForm, FunctionSpec, ModeWord, SourceSpec,
};
pub use network::{MTU, NIC_QUEUE_SIZE, NicForm, NicSpec, SwitchForm, SwitchSpec};
pub use pci_address::PciAddress;

use crate::size::Size;

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

/// Where a disk's bytes live.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum BackingSpec {
    /// A raw image or a block device.
    File {
        /// Absolute.
        path: PathBuf,
        /// If it is left out, an image that looks like one of another format than raw is refused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        format: Option<FormatWord>,
        /// Past the page cache or not.
        direct: DirectWord,
        /// Who does the I/O.
        engine: EngineWord,
    },
    /// Memory of the daemon: gone with it.
    Memory {
        /// Size.
        bytes: u64,
    },
}

impl BackingSpec {
    /// What people call it.
    pub fn name(&self) -> String {
        match self {
            BackingSpec::File { path, .. } => path.display().to_string(),
            BackingSpec::Memory { bytes } => format!("memory ({})", Size(*bytes)),
        }
    }
}

/// A disk, complete and checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Unique among the daemon's disks.
    pub name: String,
    /// What is behind it.
    pub backing: BackingSpec,
    /// Writes are refused.
    pub read_only: bool,
    /// What the guest reads as its serial number.
    pub serial: String,
    /// Number of queues.
    pub queues: u16,
    /// Entries of a ring, as `qemu-args` asks for them.
    pub queue_size: u16,
    /// Logical block shown to the guest, if it is to differ from the backing's.
    pub block_size: Option<u32>,
    /// The vhost-user socket, if it is not `RUN_DIR/NAME.sock`.
    pub socket: Option<PathBuf>,
    /// A second vhost-user socket, for the destination of a migration on this host.
    #[serde(default)]
    pub twin: Option<PathBuf>,
    /// Files that VMMs may share as memory of their guests.
    #[serde(default, skip_serializing_if = "MemoryWord::is_usual")]
    pub guest_memory: MemoryWord,
    /// The core that its queues prefer.
    pub core: Option<u32>,
}

/// A disk as somebody asks for it. See [`DiskForm::spec`] for what is left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[serde(default)]
#[expect(missing_docs, reason = "the fields are those of DiskSpec and BackingSpec")]
pub struct DiskForm {
    pub path: Option<PathBuf>,
    pub memory: Option<Size>,
    pub format: Option<FormatWord>,
    pub read_only: Option<bool>,
    pub serial: Option<String>,
    pub queues: Option<u64>,
    pub queue_size: Option<u64>,
    pub block_size: Option<u64>,
    pub direct: Option<DirectWord>,
    pub engine: Option<EngineWord>,
    pub core: Option<u32>,
    pub socket: Option<PathBuf>,
    pub twin: Option<PathBuf>,
    pub guest_memory: Option<MemoryWord>,
}

/// Longest path of a unix socket (sun_path, with its end).
const SOCKET_PATH: usize = 107;
/// Most queues of one disk.
const QUEUES: u16 = 64;
/// Bytes of a serial number (virtio 1.3, 5.2.6).
const SERIAL: usize = 20;
/// Entries of a ring if nobody says: enough for a disk, and what most of QEMU's versions take without being told.
const QUEUE_SIZE: u16 = 128;
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

impl DiskForm {
    /// The complete disk. Left out: one queue of 128 entries, the backing's block size, its name as the serial number,
    /// writable, and whatever core has time.
    pub fn spec(self, name: &str) -> Result<DiskSpec, Vec<Flaw>> {
        let mut flaws = Vec::new();
        let backing = match (self.path, self.memory) {
            (Some(path), None) => Some(BackingSpec::File {
                path,
                format: self.format,
                direct: self.direct.unwrap_or_default(),
                engine: self.engine.unwrap_or_default(),
            }),
            (None, Some(Size(bytes))) => {
                let fields = [
                    ("format", self.format.is_some()),
                    ("direct", self.direct.is_some()),
                    ("engine", self.engine.is_some()),
                ];
                for (field, given) in fields {
                    if given {
                        let reason = format!("{field} says nothing about a disk in memory");
                        flaws.push(Flaw::new(field, reason, "leave it out, or give path"));
                    }
                }
                Some(BackingSpec::Memory { bytes })
            }
            (Some(_), Some(_)) => {
                flaws.push(Flaw::new("memory", "both path and memory", "give one of them"));
                None
            }
            (None, None) => {
                let remedy = "give path = \"IMAGE\" or memory = \"64M\"";
                flaws.push(Flaw::new("path", "neither path nor memory", remedy));
                None
            }
        };
        let queues = number(&mut flaws, "queues", self.queues, 1, 1..=QUEUES);
        let queue_size = number(&mut flaws, "queue_size", self.queue_size, QUEUE_SIZE, 1..=QUEUE_SIZE_MAX);
        let block_size = self.block_size.map(|size| u32::try_from(size).unwrap_or(0));
        let serial =
            self.serial.unwrap_or_else(|| name.chars().filter(char::is_ascii_graphic).take(SERIAL).collect());
        let spec = DiskSpec {
            name: name.to_owned(),
            backing: backing.unwrap_or(BackingSpec::Memory { bytes: 1 << 20 }),
            read_only: self.read_only.unwrap_or(false),
            serial,
            queues,
            queue_size,
            block_size,
            socket: self.socket,
            twin: self.twin,
            guest_memory: self.guest_memory.unwrap_or_default(),
            core: self.core,
        };
        checked(spec, flaws)
    }
}

impl ServedSpec for DiskSpec {
    fn name(&self) -> &str {
        &self.name
    }

    fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    fn core(&self) -> Option<u32> {
        self.core
    }

    fn twin(&self) -> Option<&Path> {
        self.twin.as_deref()
    }

    fn guest_memory(&self) -> MemoryWord {
        self.guest_memory
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn flaws(&self) -> Vec<Flaw> {
        let mut flaws: Vec<Flaw> = name_flaw(&self.name).into_iter().collect();
        let mut flaw = |field, reason: String, remedy: &str| flaws.push(Flaw::new(field, reason, remedy));
        let block = self.block_size.unwrap_or(512);
        if !block.is_power_of_two() || !(512..=4096).contains(&block) {
            flaw("block_size", format!("block_size = {block}"), "give 512, 1024, 2048 or 4096");
        }
        match &self.backing {
            BackingSpec::File { path, .. } if !path.is_absolute() => {
                flaw("path", format!("{} is not an absolute path", path.display()), "begin it with /");
            }
            BackingSpec::Memory { bytes }
                if *bytes == 0 || !bytes.is_multiple_of(u64::from(block.max(512))) =>
            {
                let reason = format!("{bytes} bytes is no size for a disk with blocks of {block}");
                flaw("memory", reason, "give a multiple of the block size, and not zero");
            }
            _ => {}
        }
        if !(1..=QUEUES).contains(&self.queues) {
            flaw("queues", format!("queues = {}", self.queues), "give 1 to 64");
        }
        if !self.queue_size.is_power_of_two() || !(2..=QUEUE_SIZE_MAX).contains(&self.queue_size) {
            flaw(
                "queue_size",
                format!("queue_size = {}", self.queue_size),
                "give a power of two from 2 to 1024",
            );
        }
        if self.serial.len() > SERIAL || self.serial.chars().any(|c| !c.is_ascii_graphic()) {
            let remedy = "give at most 20 characters of ASCII without spaces";
            flaw("serial", format!("{:?} is no serial number", self.serial), remedy);
        }
        flaws.extend(self.socket.as_deref().and_then(socket_flaw));
        let twin_flaw = |twin: &Path| match &self.socket {
            Some(socket) if socket == twin => {
                Some(Flaw::new("twin", "twin is the disk's socket", "give it a path of its own"))
            }
            _ => socket_flaw(twin).map(|flaw| Flaw { field: "twin", ..flaw }),
        };
        flaws.extend(self.twin.as_deref().and_then(twin_flaw));
        flaws
    }

    fn same_content(one: &Self, other: &Self) -> bool {
        match (&one.backing, &other.backing) {
            (BackingSpec::File { path, .. }, BackingSpec::File { path: other, .. }) => path == other,
            (one, other) => one == other,
        }
    }

    fn three_way(base: &Self, configured: &Self, now: &Self) -> Self {
        DiskSpec {
            name: configured.name.clone(),
            backing: pick(&base.backing, &configured.backing, &now.backing),
            read_only: pick(&base.read_only, &configured.read_only, &now.read_only),
            serial: pick(&base.serial, &configured.serial, &now.serial),
            queues: pick(&base.queues, &configured.queues, &now.queues),
            queue_size: pick(&base.queue_size, &configured.queue_size, &now.queue_size),
            block_size: pick(&base.block_size, &configured.block_size, &now.block_size),
            socket: pick(&base.socket, &configured.socket, &now.socket),
            twin: pick(&base.twin, &configured.twin, &now.twin),
            guest_memory: pick(&base.guest_memory, &configured.guest_memory, &now.guest_memory),
            core: pick(&base.core, &configured.core, &now.core),
        }
    }
}
