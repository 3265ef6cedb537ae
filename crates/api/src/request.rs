//! Bodies of requests that change something; those that make something are the forms of [`crate::spec`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::size::Size;
use crate::spec::{
    BackingForm, DirectWord, DiskLimitsForm, EngineWord, Form, FormatWord, LimitsSpec, ListenAddress,
    MacAddress, NbdUri, NotifyWord, PciAddress, TimeoutSpec, VfSettings, backing_fields, limited, limits_of,
    remote_options, set_limits,
};
pub use crate::spec::{CoreChangeForm, CoreForm};

/// A body, and the names of its fields; behind `was` is the name that one had before.
macro_rules! body {
    (
        $(#[$about:meta])*
        $name:ident { $($(#[$meta:meta])+ $field:ident $(was $old:literal)?: $kind:ty,)* }
        $(also $other:literal)?
    ) => {
        #[derive(Debug, Clone, Serialize, Deserialize)]
        #[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
        #[serde(deny_unknown_fields)]
        $(#[$about])*
        pub struct $name {
            $($(#[$meta])+ $(#[serde(alias = $old)])? pub $field: $kind,)*
        }

        impl Form for $name {
            const FIELDS: &'static [&'static str] = &[$(stringify!($field),)* $($other)?];
            const OLD_FIELDS: &'static [(&'static str, &'static str)] = &[$($(($old, stringify!($field)),)?)*];
        }
    };
}

/// The body that changes a disk, from the list of what can be said of one of another machine.
macro_rules! change_form {
    ($([$option:ident: $kind:ty = $value:literal, $needs:literal, $help:literal, $change:literal])*) => {
        limited! { body! body [disk_limits]
            {
                /// A change of a disk: a new size, another backing, or other limits, another reservation, another group, and what happens when its server cannot be reached.
                #[derive(Default)]
                #[serde(default)]
                ChangeForm
            } {
                /// New size.
                size: Option<Size>,
                /// It may be smaller than the old one.
                shrink: bool,
                /// Another image, whose content is the same.
                path: Option<PathBuf>,
                /// Other memory: zeros, of this size.
                memory: Option<Size>,
                /// Another NBD server's export, whose content is the same.
                remote: Option<NbdUri>,
                $(
                    #[doc = $change]
                    #[serde(skip_serializing_if = "Option::is_none")]
                    $option: Option<$kind>,
                )*
                /// Of that image: `raw`, whatever it looks like.
                format: Option<FormatWord>,
                /// Past the page cache.
                direct: Option<DirectWord>,
                /// Who does the I/O.
                engine: Option<EngineWord>,
                /// Another group; an empty name is none.
                #[serde(skip_serializing_if = "Option::is_none")]
                group: Option<String>,
            }
        }
    };
}

remote_options! { change_form! }

impl ChangeForm {
    /// What it changes of the limits.
    pub fn limits(&self) -> LimitsSpec {
        limits_of!(disk_limits of self)
    }

    /// What it changes of the reservation, unless it asks for another backing.
    pub fn reserved(&self) -> LimitsSpec {
        let BackingForm { reserve_iops: rate, reserve_bandwidth: bandwidth, .. } = self.fields();
        let other = self.backing() != BackingForm::default();
        if other { LimitsSpec::default() } else { LimitsSpec { rate, bandwidth, ..LimitsSpec::default() } }
    }

    /// What it changes for the case that the server cannot be reached, unless it asks for another backing.
    pub fn on_timeout(&self) -> TimeoutSpec {
        let BackingForm { timeout_s, on_timeout, qmp, .. } = self.fields();
        let other = self.backing() != BackingForm::default();
        if other { TimeoutSpec::default() } else { TimeoutSpec { timeout_s, on_timeout, qmp } }
    }

    /// The backing that it asks for, if any.
    pub fn backing(&self) -> BackingForm {
        let fields = self.fields();
        let (reserve_iops, reserve_bandwidth, timeout_s, on_timeout, qmp) = Default::default();
        let others =
            BackingForm { reserve_iops, reserve_bandwidth, timeout_s, on_timeout, qmp, ..fields.clone() };
        if others == BackingForm::default() { others } else { fields }
    }

    fn fields(&self) -> BackingForm {
        let form = self.clone();
        backing_fields!(BackingForm of form)
    }
}

impl From<BackingForm> for ChangeForm {
    fn from(form: BackingForm) -> Self {
        backing_fields!(ChangeForm of form, ..ChangeForm::default())
    }
}

impl From<DiskLimitsForm> for ChangeForm {
    fn from(form: DiskLimitsForm) -> Self {
        let limits = limits_of!(disk_limits of form);
        let DiskLimitsForm { group, reserve_iops, reserve_bandwidth, timeout_s, on_timeout, qmp, .. } = form;
        let mut change = ChangeForm {
            group,
            reserve_iops,
            reserve_bandwidth,
            timeout_s,
            on_timeout,
            qmp,
            ..ChangeForm::default()
        };
        set_limits!(disk_limits of change = limits);
        change
    }
}

body! {
    /// A migration socket for a disk.
    #[derive(Default)]
    #[serde(default)]
    MigrationSocketForm {
        /// Where [default: beside the first].
        socket: Option<PathBuf>,
    }
}

body! {
    /// A swap of a disk to another backing.
    #[derive(Default)]
    #[serde(default)]
    SwapForm {
        /// To this image; it is made if it is not there.
        path: Option<PathBuf>,
        /// To memory of the daemon: the size of the disk.
        memory: Option<Size>,
        /// To this export of an NBD server.
        remote: Option<NbdUri>,
        /// Of that export: fail requests when its server has not been reachable for so many seconds.
        timeout_s: Option<u64>,
        /// Of that image: `raw`, whatever it will look like.
        format: Option<FormatWord>,
        /// Past the page cache.
        direct: Option<DirectWord>,
        /// Who does the I/O.
        engine: Option<EngineWord>,
        /// Bytes per second to copy at most.
        rate: Option<Size>,
        /// Bytes per second that the guest's writes may make to be copied again while the copy does not get ahead of them.
        hold: Option<Size>,
        /// What is there may be lost: an image that holds something, a device, an export.
        overwrite: bool,
    }
}

body! {
    /// A comparison of a disk with another copy [default: with what it was on before it was swapped].
    #[derive(Default)]
    #[serde(default)]
    VerifyForm {
        /// With this image.
        path: Option<PathBuf>,
        /// With this export of an NBD server.
        remote: Option<NbdUri>,
        /// Bytes of each copy to read per second at most.
        rate: Option<Size>,
    }
}

body! {
    /// Another size of an export.
    ExportSizeForm {
        /// New size.
        size: Size,
        /// It may be smaller than the old one, if nobody has the export attached.
        #[serde(default)]
        shrink: bool,
    }
}

body! {
    /// How queues learn of requests.
    #[derive(Default)]
    #[serde(default)]
    NotifyForm {
        /// Polled, adaptive or notified.
        notify: Option<NotifyWord>,
        /// Microseconds without work before a polled core stops polling a queue and asks for kicks.
        spin_us: Option<u64>,
    }
}

body! {
    /// A queue that is to move.
    MoveForm {
        /// Whose: a disk's, a NIC's, or that of a switch's uplink. Read as `device` too.
        #[serde(alias = "device")]
        disk: String,
        /// Which.
        queue: u16,
        /// Where to.
        core: u32,
    }
    also "device"
}

body! {
    /// A queue that may be on any core again.
    UnpinForm {
        /// Whose: a disk's, a NIC's, or that of a switch's uplink.
        device: String,
        /// Which.
        queue: u16,
    }
}

body! {
    /// Another function of the host in the place of one that a guest drives itself. The guest's processors stand still from before the request until its answer.
    MoveFunctionForm {
        /// Which.
        to: PciAddress,
        /// How long it may take, milliseconds.
        deadline_ms: u64,
        /// Take it although the host uses it.
        #[serde(default)]
        force: bool,
        /// Take it although this host does not remap interrupts.
        #[serde(default)]
        unsafe_interrupts: bool,
        /// Whoever asks has stopped the guest. It is not done otherwise, but where its driver cooperates.
        #[serde(default)]
        guest_stopped: bool,
    }
}

body! {
    /// A step by which a PCI function that a guest drives itself goes to another one. The guest's processors stand still from before the
    /// first step until after the last one.
    FunctionStepForm {
        /// How long it may take, milliseconds; at most 4000.
        deadline_ms: u64,
        /// Whoever asks has stopped the guest. It is not done otherwise, but where its driver cooperates.
        #[serde(default)]
        guest_stopped: bool,
        /// Of `rest`: what the function has written is not sent yet. Another `rest` sends it, once all functions of the guest are at rest, which may write
        /// to the same pages.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unsent: bool,
    }
}

body! {
    /// What the administrator of a host has for a virtual function at its physical function, for a guest that moves. Hostile input.
    #[derive(Copy, Default, PartialEq, Eq)]
    PhysicalForm {
        /// The address that the function has now, whoever has set it.
        address: Option<MacAddress>,
        /// What the administrator has set.
        settings: VfSettings,
    }
}

/// A PCI function of a VM that moves, as its guest had it before anything was done to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotedFunction {
    /// Its name at both daemons.
    pub name: String,
    /// Its guest drives the hardware itself.
    pub direct: bool,
    /// Its place on the guest's bus: bus, slot, function.
    pub place: [u8; 3],
    /// QEMU's `id` of it.
    pub id: String,
    /// Vendor and device, as `8086:10ca`.
    pub kind: String,
    /// Its command register, once that is about to be changed.
    pub command: Option<u32>,
    /// It has a wired interrupt, which is switched off by that register; so it is of a note that does not say.
    #[serde(default = "yes")]
    pub pin: bool,
}

fn yes() -> bool {
    true
}

/// An image that keeps QEMU from migrating a VM, which is taken away for a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct NotedGuard {
    /// QEMU's name of it.
    pub node: String,
    /// Where it is.
    pub file: String,
}

body! {
    /// What a move of a VM with PCI functions is about to change, and who has the guest: written down by whoever drives the move, so that
    /// another one brings it to its end if that one dies.
    #[derive(PartialEq, Eq)]
    MoveNoteForm {
        /// The host where it goes, if its daemon is reached by its certificate: `there` and `qmp_there` are sockets of this daemon then.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        peer: Option<MovePeerForm>,
        /// Process of the VM's VMM here.
        pid: u32,
        /// The guest is the other host's from here on. It is never taken back.
        gone: bool,
        /// Where to, as QEMU was told.
        to: String,
        /// Its monitor here.
        qmp: String,
        /// The control socket of the daemon there.
        there: PathBuf,
        /// The monitor of the QEMU there.
        qmp_there: PathBuf,
        /// The guest ran before.
        running: bool,
        /// `pause-before-switchover` was on before.
        paused_before: bool,
        /// The downtime limit of its QEMU here, ms, once that is about to be lowered.
        downtime_limit: Option<u64>,
        /// What the guest has in the address port of its bus, once that is about to be used.
        latch: Option<u32>,
        /// Images that were taken away.
        guards: Vec<NotedGuard>,
        /// Its functions.
        functions: Vec<NotedFunction>,
    }
}

body! {
    /// The host to which a VM is to move.
    #[derive(PartialEq, Eq)]
    MovePeerForm {
        /// Its name, or an address.
        host: String,
        /// The port at which its daemon expects the VM [default: 10806].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
        /// The name in its certificate [default: `host`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tls_hostname: Option<String>,
    }
}

body! {
    /// A VM that another host may move here, once.
    ExpectForm {
        /// That host, by the name in its certificate.
        from: String,
        /// The monitor of the QEMU that waits here.
        qmp: PathBuf,
        /// libvirt starts that QEMU only within the migration: its monitor need not be there yet.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        libvirt: bool,
        /// Where this daemon listens for the other host as long as a VM is expected there [default: `[::]:10806`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        listen: Option<ListenAddress>,
        /// For how long, seconds: 1 to 864000 [default: 3600].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        valid_s: Option<u64>,
    }
}

/// A vector of MSI-X, as an entry of a function's table has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct VectorForm {
    /// Where the message goes.
    pub address: u64,
    /// What it is.
    pub data: u32,
    /// Whether it is held back.
    pub masked: bool,
}

body! {
    /// The MSI-X table of a PCI function, which its VMM emulates, as another host's VMM has it.
    WriteVectorsForm {
        /// All of its entries.
        table: Vec<VectorForm>,
        /// How long the VMM may take, milliseconds; at most 4000.
        deadline_ms: u64,
        /// Whoever asks has stopped the guest. It is not done otherwise.
        #[serde(default)]
        guest_stopped: bool,
    }
}

body! {
    /// Whether the vCPUs of a PCI function's VMM may enter the guest.
    HoldVcpusForm {
        /// They may not.
        held: bool,
    }
}

/// What becomes of a vCPU that its VMM wants back from its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum StopWord {
    /// It waits, for ten seconds at most; those that waited already when this was said last come back.
    Ask,
    /// All have left the guest, and wait, for a minute at most. It is refused if none waits.
    Keep,
    /// All come back.
    Free,
    /// Those that wait come back, and those that are wanted back from now on wait as before. It is refused unless vCPUs wait because of `ask`.
    Pass,
}

body! {
    /// What becomes of vCPUs that the VMM of a PCI function wants back from its guest.
    KeepVcpusForm {
        /// That.
        stop: StopWord,
    }
}

body! {
    /// How a PCI function is to be quiesced.
    #[serde(default)]
    QuiesceForm {
        /// How long it may take to become quiescent while its guest runs, milliseconds.
        deadline_ms: u64,
        /// If it has not by then, it resumes instead of being suspended.
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        or_resume was "or_go_on": bool,
    }
}

impl Default for QuiesceForm {
    fn default() -> Self {
        QuiesceForm { deadline_ms: 2000, or_resume: false }
    }
}

body! {
    /// Another binary in the daemon's place.
    #[derive(Default)]
    #[serde(default)]
    UpgradeForm {
        /// The binary [default: where the daemon's own was started from].
        binary: Option<PathBuf>,
        /// Seconds that it may take to get ready.
        patience_s: Option<u64>,
    }
}
