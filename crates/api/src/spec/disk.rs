//! What disks are to be.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checks::{CountField, checked, foreign, path_flaw, socket_flaw};
use super::{
    DirectWord, EngineWord, Flaw, FormatWord, LimitFields, LimitsSpec, MemoryWord, NbdUri, OnTimeout,
    QUEUE_SIZE_MAX, RemoteSpec, ServedSpec, SpecFields, StartWord, TimeoutSpec, TimeoutWord, differing, form,
    group_flaw, limit_names, limited, limits_of, named, served_fields, set_limits, spec, with_limits,
};
use crate::size::Size;

/// Queues of one disk.
const QUEUES: CountField = CountField { name: "queues", range: 1..=64, power_of_two: false, usual: 1 };
/// Bytes of a serial number (virtio 1.3, 5.2.6).
const SERIAL: usize = 20;
/// Entries of a ring if nobody says: enough for a disk, and what most of QEMU's versions take without being told.
const QUEUE_SIZE: CountField =
    CountField { name: "queue_size", range: 2..=QUEUE_SIZE_MAX, power_of_two: true, usual: 128 };

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
    /// An NBD server's export.
    Remote(RemoteSpec),
}

impl BackingSpec {
    /// What people call it.
    pub fn name(&self) -> String {
        match self {
            BackingSpec::File { path, .. } => path.display().to_string(),
            BackingSpec::Memory { bytes } => format!("memory ({})", Size(*bytes)),
            BackingSpec::Remote(spec) => spec.remote.to_string(),
        }
    }

    /// The field of the form that says which kind it is.
    pub fn field(&self) -> &'static str {
        match self {
            BackingSpec::File { .. } => "path",
            BackingSpec::Memory { .. } => "memory",
            BackingSpec::Remote { .. } => "remote",
        }
    }

    /// Its kind, in a word.
    pub fn kind(&self) -> &'static str {
        match self {
            BackingSpec::File { .. } => "file",
            BackingSpec::Memory { .. } => "memory",
            BackingSpec::Remote { .. } => "remote",
        }
    }

    /// The disk of another machine that it is, if it is one.
    pub fn remote(&self) -> Option<&RemoteSpec> {
        match self {
            BackingSpec::Remote(spec) => Some(spec),
            BackingSpec::File { .. } | BackingSpec::Memory { .. } => None,
        }
    }

    /// What is to be kept for it of an exporter's capacity: rates without bursts.
    pub fn reserved(&self) -> LimitsSpec {
        self.remote().map_or_else(LimitsSpec::default, RemoteSpec::reserved)
    }

    /// Other rates are to be kept for it; of a disk of another machine.
    pub fn set_reserved(&mut self, reserved: LimitsSpec) {
        if let BackingSpec::Remote(spec) = self {
            (spec.reserve_iops, spec.reserve_bandwidth) = (reserved.rate, reserved.bandwidth);
        }
    }

    /// What happens when its server cannot be reached.
    pub fn on_timeout(&self) -> OnTimeout<'_> {
        let Some(spec) = self.remote() else { return OnTimeout::Wait };
        OnTimeout::of(spec.timeout_s, spec.on_timeout.unwrap_or_default(), spec.qmp.as_deref())
    }

    /// Something else is to happen then; of a disk of another machine.
    pub fn set_on_timeout(&mut self, change: &TimeoutSpec) {
        let BackingSpec::Remote(spec) = self else { return };
        if let Some(seconds) = change.timeout_s {
            spec.timeout_s = (seconds > 0).then_some(seconds);
            // There is nothing that it could follow.
            spec.on_timeout = spec.on_timeout.filter(|_| seconds > 0);
        }
        spec.on_timeout = change.on_timeout.or(spec.on_timeout).filter(|word| !word.is_usual());
        if let Some(path) = &change.qmp {
            spec.qmp = (!path.as_os_str().is_empty()).then(|| path.clone());
        }
    }

    /// All fields that say it, as a change that makes another one say the same.
    pub fn timeout_fields(&self) -> TimeoutSpec {
        let Some(spec) = self.remote() else { return TimeoutSpec::default() };
        TimeoutSpec {
            timeout_s: Some(spec.timeout_s.unwrap_or(0)),
            on_timeout: Some(spec.on_timeout.unwrap_or_default()),
            qmp: Some(spec.qmp.clone().unwrap_or_default()),
        }
    }

    /// Whether what is behind the two is the same.
    pub fn same_content(&self, other: &Self) -> bool {
        match (self, other) {
            (BackingSpec::File { path, .. }, BackingSpec::File { path: other, .. }) => path == other,
            (BackingSpec::Remote(spec), BackingSpec::Remote(other)) => spec.remote == other.remote,
            (one, other) => one == other,
        }
    }

    /// Fields of the form in which this one differs from `other`.
    pub fn differing(&self, other: &Self) -> Vec<&'static str> {
        match (self, other) {
            (
                BackingSpec::File { path, format, direct, engine },
                BackingSpec::File { path: path2, format: format2, direct: direct2, engine: engine2 },
            ) => differing! {
                path: path, path2;
                format: format, format2;
                direct: direct, direct2;
                engine: engine, engine2;
            },
            (BackingSpec::Memory { bytes }, BackingSpec::Memory { bytes: bytes2 }) => {
                differing! { memory: bytes, bytes2; }
            }
            (BackingSpec::Remote(spec), BackingSpec::Remote(other)) => spec.differing(other),
            (BackingSpec::File { .. } | BackingSpec::Memory { .. } | BackingSpec::Remote { .. }, _) => {
                vec![self.field()]
            }
        }
    }
}

limited! { spec! spec [disk_limits]
    {
        /// A disk, complete and checked.
        DiskSpec
    } {
        /// Unique among the daemon's disks.
        name: String,
        /// What is behind it.
        backing: BackingSpec => BackingSpec::differing,
        /// Writes are refused.
        read_only: bool,
        /// What the guest reads as its serial number.
        serial: String,
        /// Number of queues.
        queues: u16,
        /// Entries of a ring, as `qemu-args` asks for them.
        queue_size: u16,
        /// Logical block shown to the guest, if it is to differ from the backing's.
        block_size: Option<u32>,
        /// What becomes of it if its server is not reachable when it is opened, if somebody has said so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        at_start: Option<StartWord>,
        /// The vhost-user socket, if it is not `RUN_DIR/NAME.sock`.
        socket: Option<PathBuf>,
        /// A second vhost-user socket, for the destination of a migration on this host.
        #[serde(rename = "twin", alias = "migration_socket", default)]
        migration_socket: Option<PathBuf>,
        /// Files that VMMs may share as memory of their guests.
        #[serde(default, skip_serializing_if = "MemoryWord::is_usual")]
        guest_memory: MemoryWord,
        /// The core that its queues prefer.
        core: Option<u32>,
        /// The group it is in, if any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        group: Option<String>,
    }
}

/// A form with the fields that say what is behind a disk. Others stand between them and behind them: the order is a promise.
macro_rules! backing_form {
    ($(#[doc = $about:literal])* $name:ident { $($between:tt)* } { $($behind:tt)* }) => {
        backing_form! { @ ["memory", "remote"] $(#[doc = $about])* $name { $($between)* } { $($behind)* } }
    };
    // With what may be given in place of an image.
    (@ [$($instead:literal),*] $(#[doc = $about:literal])* $name:ident { $($between:tt)* } { $($behind:tt)* }) => {
        $crate::spec::remote_options! {
            backing_form! @fields [$($instead),*] { $(#[doc = $about])* $name } { $($between)* } { $($behind)* }
        }
    };
    (@fields [$($instead:literal),*] { $($head:tt)* } { $($between:tt)* } { $($behind:tt)* }
        $([$option:ident: $kind:ty = $value:literal, $needs:literal, $help:literal, $change:literal])*) => {
        form! {
            $($head)* {
                /// A raw image or a block device
                [long, value_name = "FILE", required_unless_present_any = [$($instead),*], conflicts_with_all = [$($instead),*]]
                path: PathBuf,
                /// Memory of the daemon, of this size; its content goes with the daemon
                [long, value_name = "SIZE", conflicts_with = "remote"]
                memory: Size,
                /// A disk of another machine: its name in the directory (`ioplane devices`), or the URI of an NBD server's export, such as nbds://host-a/data
                [long, value_name = "NAME|URI"]
                remote: NbdUri,
                $(
                    #[doc = $help]
                    [long, value_name = $value, requires = $needs]
                    $option: $kind,
                )*
                /// Say that the image is raw whatever it looks like: one with the bytes of another format is refused otherwise
                [long, value_name = "FORMAT", conflicts_with_all = ["memory", "remote"]]
                format: FormatWord,
                $($between)*
                /// Whether the image's I/O goes past the host's page cache
                [long, value_name = "WHEN", conflicts_with_all = ["memory", "remote"]]
                direct: DirectWord,
                /// Who does the image's I/O
                [long, value_name = "WHO", conflicts_with_all = ["memory", "remote"]]
                engine: EngineWord,
                $($behind)*
            }
        }
    };
}

/// The fields of a backing, from a form that has them, as those of another.
macro_rules! backing_fields {
    ($to:ident of $form:ident $(, ..$rest:expr)?) => {
        $crate::spec::remote_options! { backing_fields! @ $to $form { $(..$rest)? } }
    };
    (@ $to:ident $form:ident { $($rest:tt)* } $([$option:ident: $($about:tt)*])*) => {
        $to {
            path: $form.path,
            memory: $form.memory,
            remote: $form.remote,
            $($option: $form.$option,)*
            format: $form.format,
            direct: $form.direct,
            engine: $form.engine,
            $($rest)*
        }
    };
}

pub(crate) use backing_fields;
pub(super) use backing_form;

backing_form! {
    /// What is to be behind a disk, as somebody asks for it.
    BackingForm {} {}
}

limited! { backing_form! form [disk_limits]
    {
        /// A disk as somebody asks for it. See [`DiskForm::spec`] for what is left out.
        DiskForm {
            /// Refuse writes
            [long, num_args = 0, default_missing_value = "true"]
            read_only: bool,
            /// What the guest reads as its serial number [default: the name]
            [long]
            serial: String,
            /// Number of queues [default: 1]
            [long, value_name = "N"]
            queues: u64,
            /// Entries of a queue [default: 128]
            [long, value_name = "N"]
            queue_size: u64,
            /// Logical block shown to the guest: 512 to 4096 bytes [default: the backing's]
            [long, value_name = "BYTES"]
            block_size: u64,
            /// If the server of a disk of another machine is not reachable: wait (it is tried again until it is) or refuse [default: refuse for `disk add`, wait for
            /// a disk of the configuration]
            [long, value_name = "WHAT", requires = "remote"]
            at_start: StartWord,
        }
    } {
        /// The I/O core that its queues prefer [default: whichever has time]
        [long, value_name = "ID"]
        core: u32,
        /// Its vhost-user socket [default: NAME.sock in the run directory]
        [id = "vhost_socket", long = "vhost-socket", value_name = "PATH"]
        socket: PathBuf,
        /// A second vhost-user socket, for the destination of a migration on this host
        [long, alias = "twin", value_name = "PATH"]
        migration_socket was "twin": PathBuf,
        /// Files that a VMM may share as its guest's memory: ram (memfd, tmpfs, hugetlbfs), or any, where page faults may wait
        /// for a disk or a network [default: ram]
        [long, value_name = "FILES"]
        guest_memory: MemoryWord,
        /// The group it is in: its weight and its limits are the group's [default: none, all devices in none count as one group of weight 1]
        [long, value_name = "NAME"]
        group: String,
    }
}

limited! { form! change [disk_limits]
    {
        /// Other limits of a disk, another reservation, another group, or what happens when its server cannot be reached. What is left out stays as it is.
        DiskLimitsForm
    } {
        /// Of a disk of another machine: fail requests when its server has not been reachable for so many seconds, or do what --on-timeout says; 0 for never
        [long, value_name = "SECONDS"]
        timeout_s: u64,
        /// What happens then: error (requests fail), pause (the VM is paused by --qmp until the server is back), or wait
        [long, value_name = "WHAT"]
        on_timeout: TimeoutWord,
        /// A QMP socket of the VM that uses the disk; '' for none
        [long, value_name = "SOCKET"]
        qmp: PathBuf,
        /// Have the exporter of a disk of another machine keep so many requests per second for it; refused if they are not free there; 0 for none
        [long, value_name = "N"]
        reserve_iops: u64,
        /// Have the exporter keep so many bytes per second for it; refused if they are not free there; 0 for none
        [long, value_name = "SIZE"]
        reserve_bandwidth: Size,
        /// The group it is to be in; '' for none
        [long, value_name = "NAME"]
        group: String,
    }
}

impl DiskSpec {
    /// The fields of its limits.
    pub const LIMITS: LimitFields = limit_names!(disk_limits);

    /// The limits of its guest.
    pub fn limits(&self) -> LimitsSpec {
        limits_of!(disk_limits of self)
    }

    /// What is wrong with limits that somebody asks for, beside what may be stored.
    pub fn limit_flaws(&self) -> Vec<Flaw> {
        self.limits().lonely(Self::LIMITS)
    }

    /// Other limits.
    pub fn set_limits(&mut self, limits: LimitsSpec) {
        set_limits!(disk_limits of self = limits);
    }
}

macro_rules! remote_of_form {
    ($([$option:ident: $($about:tt)*])*) => {
        impl BackingForm {
            /// The options of a disk of another machine, and whether each is there.
            fn remote_options(&self) -> Vec<(&'static str, bool)> {
                vec![$((stringify!($option), self.$option.is_some()),)*]
            }

            /// What it asks for of one there.
            fn remote_spec(&self, remote: NbdUri) -> RemoteSpec {
                RemoteSpec { remote, $($option: self.$option.clone(),)* }.without_the_usual()
            }
        }
    };
}

super::remote_options! { remote_of_form! }

impl BackingForm {
    /// What it asks for. It has all of `flaws` that are added, and may be complete besides.
    pub fn spec(self, flaws: &mut Vec<Flaw>) -> Option<BackingSpec> {
        let of_remote = self.remote_options();
        let asked = self.remote.clone().map(|remote| self.remote_spec(remote));
        let BackingForm { path, memory, format, direct, engine, .. } = self;
        let of_file =
            [("format", format.is_some()), ("direct", direct.is_some()), ("engine", engine.is_some())];
        match (path, memory, asked) {
            (Some(path), None, None) => {
                foreign(flaws, "an image", "leave it out, or give remote", &of_remote);
                let (direct, engine) = (direct.unwrap_or_default(), engine.unwrap_or_default());
                Some(BackingSpec::File { path, format, direct, engine })
            }
            (None, Some(Size(bytes)), None) => {
                foreign(flaws, "a disk in memory", "leave it out, or give path", &of_file);
                foreign(flaws, "a disk in memory", "leave it out, or give remote", &of_remote);
                Some(BackingSpec::Memory { bytes })
            }
            (None, None, Some(remote)) => {
                foreign(flaws, "a disk of another machine", "leave it out, or give path", &of_file);
                Some(BackingSpec::Remote(remote))
            }
            (None, None, None) => {
                let remedy = "give path = \"IMAGE\", memory = \"64M\" or remote = \"nbd://HOST/EXPORT\"";
                flaws.push(Flaw::new("path", "neither path nor memory nor remote", remedy));
                None
            }
            (path, memory, remote) => {
                let (field, what) = match (path, memory, remote) {
                    (Some(_), Some(_), Some(_)) => ("remote", "path, memory and remote"),
                    (Some(_), Some(_), _) => ("memory", "both path and memory"),
                    (Some(_), ..) => ("remote", "both path and remote"),
                    _ => ("remote", "both memory and remote"),
                };
                flaws.push(Flaw::new(field, what, "give one of them"));
                None
            }
        }
    }
}

impl DiskForm {
    /// The complete disk. Left out: one queue of 128 entries, the backing's block size, its name as the serial number,
    /// writable, no limits, in no group, and whatever core has time.
    pub fn spec(self, name: &str) -> Result<DiskSpec, Vec<Flaw>> {
        let mut flaws = Vec::new();
        let backing = backing_fields!(BackingForm of self).spec(&mut flaws);
        let queues = QUEUES.read(&mut flaws, self.queues);
        let queue_size = QUEUE_SIZE.read(&mut flaws, self.queue_size);
        let block_size = self.block_size.map(|size| u32::try_from(size).unwrap_or(u32::MAX));
        let serial =
            self.serial.unwrap_or_else(|| name.chars().filter(char::is_ascii_graphic).take(SERIAL).collect());
        let limits = limits_of!(disk_limits of self).asked();
        let spec = with_limits!(
            DiskSpec {
                name: name.to_owned(),
                backing: backing.unwrap_or(BackingSpec::Memory { bytes: 1 << 20 }),
                read_only: self.read_only.unwrap_or(false),
                serial,
                queues,
                queue_size,
                block_size,
                at_start: self.at_start,
                socket: self.socket,
                migration_socket: self.migration_socket,
                guest_memory: self.guest_memory.unwrap_or_default(),
                core: self.core,
                group: named(self.group),
            },
            disk_limits = limits
        );
        flaws.extend(spec.limit_flaws());
        checked(spec, flaws)
    }
}

impl ServedSpec for DiskSpec {
    served_fields!();

    fn core(&self) -> Option<u32> {
        self.core
    }

    fn group(&self) -> Option<&str> {
        self.group.as_deref()
    }

    fn migration_socket(&self) -> Option<&Path> {
        self.migration_socket.as_deref()
    }

    fn queues(&self) -> u16 {
        self.queues
    }

    fn own_flaws(&self) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        let block = self.block_size.unwrap_or(512);
        let sound = block.is_power_of_two() && (512..=4096).contains(&block);
        if !sound {
            let remedy = "give 512, 1024, 2048 or 4096";
            flaws.push(Flaw::new("block_size", format!("block_size = {block}"), remedy));
        }
        let remote = matches!(self.backing, BackingSpec::Remote { .. });
        let at_start = [("at_start", self.at_start.is_some() && !remote)];
        foreign(&mut flaws, "a disk of this host", "leave it out, or give remote", &at_start);
        match &self.backing {
            BackingSpec::File { path, .. } => flaws.extend(path_flaw("path", path)),
            BackingSpec::Memory { bytes } => {
                // Whatever the block size should have been, it is a multiple of the smallest.
                let unit = if sound { block } else { 512 };
                if *bytes == 0 || !bytes.is_multiple_of(unit.into()) {
                    let reason = format!("{bytes} bytes is no size for a disk with blocks of {block}");
                    let remedy = "give a multiple of the block size, and not zero";
                    flaws.push(Flaw::new("memory", reason, remedy));
                }
            }
            BackingSpec::Remote(spec) => flaws.extend(spec.flaws(self.queues, "queue")),
        }
        flaws.extend(self.limits().flaws(Self::LIMITS));
        flaws.extend(group_flaw(self.group.as_deref()));
        flaws.extend(QUEUES.flaw(self.queues));
        flaws.extend(QUEUE_SIZE.flaw(self.queue_size));
        if self.serial.len() > SERIAL || self.serial.chars().any(|c| !c.is_ascii_graphic()) {
            let reason = format!("{:?} is no serial number", self.serial);
            let remedy = "give at most 20 characters of ASCII without spaces";
            flaws.push(Flaw::new("serial", reason, remedy));
        }
        let field = "migration_socket";
        let migration_flaw = |migration: &Path| match &self.socket {
            Some(socket) if socket == migration => {
                Some(Flaw::new(field, format!("{field} is the disk's socket"), "give it a path of its own"))
            }
            _ => socket_flaw(migration).map(|flaw| Flaw { field, ..flaw }),
        };
        flaws.extend(self.migration_socket.as_deref().and_then(migration_flaw));
        flaws
    }

    fn same_content(one: &Self, other: &Self) -> bool {
        one.backing.same_content(&other.backing)
    }
}
