//! What can be typed.

mod clamp;
mod configuration;
mod devices;
mod duration;
mod exits;
mod identity;
mod move_vm;
mod pci;
mod publish;
mod run;
mod swap;
mod verify;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use ioplane_api::LOG_VARIABLE;
use ioplane_api::size::Size;
use ioplane_api::spec::{
    BackingForm, CoreChangeForm, CoreForm, DiskForm, DiskLimitsForm, GroupChangeForm, GroupForm,
    NicChangeForm, NicForm, NotifyWord, SwitchForm,
};

use duration::duration;

pub use clamp::{ClampAction, ClampArgs};
pub use configuration::ConfigCommand;
pub use devices::{DevicesArgs, DevicesCommand};
pub use exits::{
    ApplyArgs, CallersArgs, ClusterArgs, ClusterWord, DiffArgs, ExitsArgs, ExitsCommand, ExitsTopArgs,
    LearnArgs, ReachArgs, RecordArgs, VmArgs, WatchArgs,
};
pub use identity::{IdentityArgs, IdentityCommand};
pub use move_vm::{
    Destination, MIGRATION_PORT, MoveAttend, MoveCommand, MoveExpect, MovePrepare, MoveRecover, MoveVm, There,
};
pub use pci::{ModelCommand, PciAdd, PciCommand, PciMove, PciWatch};
pub use publish::{PublishCommand, PublishDisk};
pub use run::RunArgs;
pub use swap::{SwapArgs, SwapTarget};
pub use verify::{VerifyArgs, VerifyTarget};

/// Serves virtual machines' disks and NICs by polling, on I/O cores of their own.
#[derive(Debug, Parser)]
#[command(name = "ioplane", version, propagate_version = true, arg_required_else_help = true)]
pub struct Cli {
    /// The daemon's control socket
    #[arg(long, global = true, value_name = "PATH", env = "IOPLANE_SOCKET")]
    pub socket: Option<PathBuf>,
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub json: bool,
    /// Print answers and errors only: no hints, no progress, nothing after a change that works; a daemon logs warnings
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print each request to the daemon as well; a daemon logs debug messages, with -vv traces
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Level of a daemon's log, in place of -q and -v: error, warn, info, debug, trace, or a filter such as ioplane_host=debug
    /// [default: info]
    #[arg(long, global = true, value_name = "LEVEL", env = LOG_VARIABLE)]
    pub log: Option<String>,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Below zero with `-q`, above with each `-v`.
    pub fn verbosity(&self) -> i8 {
        if self.quiet { -1 } else { self.verbose.min(3) as i8 }
    }

    /// The filter of a daemon's log.
    pub fn log_filter(&self) -> &str {
        match (&self.log, self.verbosity()) {
            (Some(filter), _) => filter,
            (None, ..0) => "warn",
            (None, 0) => "info",
            // Our crates; what is below them says more than anybody wants to know.
            (None, 1) => "info,ioplane=debug",
            (None, 2..) => "info,ioplane=trace",
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon: serve what a configuration names until SIGTERM; SIGHUP reads it again
    Serve {
        /// The configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Check the configuration and exit, with code 0 if a daemon would start with it, 2 if not
        #[arg(long, conflicts_with = "inherit")]
        check: bool,
        /// Take over from the daemon that has started this process
        #[arg(long, hide = true)]
        inherit: bool,
    },
    /// Put another binary in the daemon's place while guests run: no front end sees a disconnect
    Upgrade {
        /// The new binary [default: what is now where the daemon's was started from]
        #[arg(long, value_name = "PATH")]
        binary: Option<PathBuf>,
        /// How long it may take to get ready, 1 s to 10 min; guests run meanwhile [default: 20s]
        #[arg(long, alias = "patience", value_name = "TIME", value_parser = duration)]
        deadline: Option<Duration>,
    },
    /// How disks, NICs, PCI functions, switches, queues and cores are
    Status,
    /// The same, live: rates, kicks taken and avoided, interrupts, latency
    Top(TopArgs),
    /// Look for a while at a disk, a NIC, a VM or a group, and say in words where the time goes and what would help
    Explain {
        /// Its name
        name: String,
        /// For how long to look, 1 s to 10 min
        #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
        interval: Duration,
    },
    /// Add, remove, list, show and change disks while the daemon runs
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Copy a disk to another backing while its guest uses it, and then go on with that one; Ctrl-C cancels
    Swap(SwapArgs),
    /// Compare a disk with another copy of it while its guest uses it; exits with 0 if they are equal, 1 if not, 2 if that is not known
    Verify(VerifyArgs),
    /// Move a VM to another host
    #[command(subcommand)]
    Move(MoveCommand),
    /// Let other machines use disks of this host
    #[command(subcommand)]
    Publish(PublishCommand),
    /// List the devices that all hosts publish, as the directory has them
    Devices(DevicesArgs),
    /// Make, show, renew and hand out the identities by which hosts know each other (TLS); no daemon needed
    Identity(IdentityArgs),
    /// Add, remove, list, show and set NICs while the daemon runs
    #[command(subcommand)]
    Nic(NicCommand),
    /// Add, remove, list and show the switches that NICs are plugged into
    #[command(subcommand)]
    Switch(SwitchCommand),
    /// Add, remove, list, show and set groups: what the devices of one VM have together, a weight and limits
    #[command(subcommand)]
    Group(GroupCommand),
    /// Hand PCI functions of this host, or emulated NICs, to guests; watch, quiesce, save and load them
    #[command(subcommand)]
    Pci(PciCommand),
    /// List, show and draw the state models by which PCI functions are mediated
    #[command(subcommand)]
    Model(ModelCommand),
    /// Write the frames of a NIC or an uplink to a file (pcapng), until interrupted
    Capture(CaptureArgs),
    /// List, add, retire and set I/O cores, and move queues between them
    #[command(subcommand)]
    Core(CoreCommand),
    /// Print the arguments that give a disk, a NIC or a PCI function to a QEMU: paste and boot
    QemuArgs(QemuArgs),
    /// Print a libvirt domain with these disks, NICs and PCI functions
    LibvirtXml(LibvirtArgs),
    /// Say what this host lacks, what follows, and what to do
    Doctor,
    /// Say which exits a VM takes, who causes them and what they cost: any KVM VM of this host, no daemon needed
    Exits(Box<ExitsArgs>),
    /// Start a VMM so that clusters of its guest's device accesses take one exit: any KVM VMM that is linked dynamically
    Run(RunArgs),
    /// Save what was added at run time in the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Read the configuration again, as SIGHUP does, and say what came of it
    Reload,
    /// Print a completion script for a shell
    Completion {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

/// What can be done with disks.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Add a disk; a restarted daemon still has it, until the host reboots
    Add(Box<DiskAdd>),
    /// Take a disk away; refused while a guest uses it
    Remove {
        /// Its name
        name: String,
        /// Even while a guest uses it: its requests then wait for ever
        #[arg(long)]
        force: bool,
    },
    /// List the disks
    List,
    /// Show one: what is behind it, who uses it, what its queues did
    Show {
        /// Its name
        name: String,
    },
    /// Change the size of a disk while a guest uses it
    Resize {
        /// Its name
        name: String,
        /// The new size, such as 20G
        size: Size,
        /// Allow the new size to be smaller; what lies beyond is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Limit the requests and bytes per second of a disk's guest, or end that, or put the disk into a group, while the guest
    /// uses it
    Set {
        /// Its name
        name: String,
        /// What is to change
        #[command(flatten)]
        limits: DiskLimitsForm,
    },
    /// Go on with a disk of another machine whose requests fail: take it as it is, after you have checked it. Needed when its host lost power and
    /// writes may be lost, or its server broke the protocol again and again; `disk show` says which
    Accept {
        /// Its name
        name: String,
    },
    /// Give a disk a migration socket, for the destination of a migration on this host; the image is opened and locked once, and
    /// the disk goes over when the destination's guest runs
    #[command(alias = "twin")]
    MigrationSocket {
        /// Its name
        name: String,
        /// Where [default: NAME.migration.sock in the run directory]
        #[arg(long = "vhost-socket", value_name = "PATH", conflicts_with = "remove")]
        vhost_socket: Option<PathBuf>,
        /// Take the migration socket away; refused while a VM is connected there
        #[arg(long)]
        remove: bool,
        /// Even while a VM is connected there
        #[arg(long, requires = "remove")]
        force: bool,
    },
    /// Put another backing behind a disk while a guest uses it. The content is not copied: make it equal before, with
    /// the guest's file systems frozen or unmounted, or the disk read-only
    Replace {
        /// Its name
        name: String,
        /// What is to be behind it
        #[command(flatten)]
        backing: BackingForm,
    },
}

#[derive(Debug, Args)]
pub struct DiskAdd {
    /// Its name: letters, digits, '-', '_', '.'
    pub name: String,
    /// What it is to be
    #[command(flatten)]
    pub form: DiskForm,
    /// With --remote: take the disk over from the host that holds it, which is refused from then on. What that host has not flushed is lost
    #[arg(long, requires = "remote")]
    pub takeover: bool,
}

/// What can be done with I/O cores.
#[derive(Debug, Subcommand)]
pub enum CoreCommand {
    /// List the I/O cores
    List,
    /// Start one core more
    Add(CoreForm),
    /// End a core that serves no queue any more
    Retire {
        /// Its number
        id: u32,
    },
    /// Move all queues of a core to others, and place none there
    Drain {
        /// Its number
        id: u32,
    },
    /// Serve only the devices of one group on a core, and these nowhere else
    Reserve {
        /// Its number
        id: u32,
        /// Name of the group
        group: String,
    },
    /// Let a core that was drained or reserved take any queue again
    Open {
        /// Its number
        id: u32,
    },
    /// Switch between polling and notification, or let the core choose, while guests run
    Mode {
        /// Which mode
        mode: NotifyWord,
        /// Only this core [default: all]
        #[arg(long, value_name = "ID")]
        core: Option<u32>,
    },
    /// Change a core while guests run: its mode, and what is asked of it while it is adaptive
    Set {
        /// Its number
        id: u32,
        /// What is to change
        #[command(flatten)]
        change: CoreChangeForm,
    },
    /// Move a queue to another core while its guest runs, and pin it there
    #[command(visible_alias = "pin")]
    Move {
        /// Name of the disk or the NIC, or of the switch whose uplink it is
        #[arg(value_name = "DEVICE")]
        disk: String,
        /// Number of the queue, from 0; a NIC's are receive, transmit, receive, ...
        queue: u16,
        /// Number of the core
        core: u32,
    },
    /// Let a queue that was moved be on any core again
    Unpin {
        /// Name of the disk or the NIC, or of the switch whose uplink it is
        device: String,
        /// Number of the queue, from 0
        queue: u16,
    },
    /// Show how many cores there are to be, and how many there are
    Pool,
    /// Show what was decided about cores and queues, and why
    Decisions {
        /// Number of the first decision
        #[arg(long, value_name = "N", default_value_t = 0)]
        from: u64,
    },
}

/// A QEMU to be.
#[derive(Debug, Args)]
pub struct QemuArgs {
    /// Name of the disk, the NIC or the PCI function
    pub name: String,
    /// Memory of the guest: it has to be shared
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: Size,
    /// Take it from huge pages of this size (2M, 1G), which the host has set aside
    #[arg(long, value_name = "SIZE", conflicts_with = "device_only")]
    pub hugetlb: Option<Size>,
    /// Only the device: for the second and further ones of a guest
    #[arg(long, alias = "disk-only")]
    pub device_only: bool,
    /// Quote for a shell: to paste, or for `eval` [default: only on a terminal; elsewhere each argument is one word, as `$(...)`
    /// needs it]
    #[arg(long)]
    pub quoted: bool,
    /// For the destination of a migration: the disk's migration socket
    #[arg(long, alias = "twin")]
    pub migration_socket: bool,
    /// Version of the QEMU, such as 7.2 [default: that of --qemu]
    #[arg(long, value_name = "VERSION")]
    pub qemu_version: Option<String>,
    /// The QEMU whose version is asked
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub qemu: String,
    /// What runs the VM: without KVM, a NIC gets no MSI-X [default: kvm where it is usable]
    #[arg(long, value_name = "ACCELERATOR")]
    pub accel: Option<Accel>,
    /// Place in the boot order
    #[arg(long, value_name = "N")]
    pub bootindex: Option<u32>,
}

/// What runs the instructions of a VM, as QEMU's `-accel` names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Accel {
    /// The processor's own virtualization.
    Kvm,
    /// QEMU's translator.
    Tcg,
}

impl Accel {
    /// As QEMU's `-accel` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Tcg => "tcg",
        }
    }
}

/// What can be done with NICs.
#[derive(Debug, Subcommand)]
pub enum NicCommand {
    /// Add a NIC; a restarted daemon still has it, until the host reboots
    Add(NicAdd),
    /// Take a NIC away; refused while a guest uses it
    Remove {
        /// Its name
        name: String,
        /// Even while a guest uses it
        #[arg(long)]
        force: bool,
    },
    /// List the NICs
    List,
    /// Show one: its port and addresses, who uses it, what its queues did
    Show {
        /// Its name
        name: String,
    },
    /// Change a NIC while a guest uses it: its link, what limits its guest, and its group
    Set {
        /// Its name
        name: String,
        /// What is to change
        #[command(flatten)]
        change: NicChangeForm,
    },
}

#[derive(Debug, Args)]
pub struct NicAdd {
    /// Its name: letters, digits, '-', '_', '.'
    pub name: String,
    /// What it is to be
    #[command(flatten)]
    pub form: NicForm,
}

/// What can be done with groups.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Add a group; a restarted daemon still has it, until the host reboots
    Add {
        /// Its name
        name: String,
        /// What it is to be
        #[command(flatten)]
        form: GroupForm,
    },
    /// Take a group away in which no device is
    Remove {
        /// Its name
        name: String,
    },
    /// List the groups
    List,
    /// Show one: its weight, its limits, the devices that are in it
    Show {
        /// Its name
        name: String,
    },
    /// Change the weight or the limits of a group while guests use its devices
    Set {
        /// Its name
        name: String,
        /// What is to change
        #[command(flatten)]
        change: GroupChangeForm,
    },
}

/// What can be done with switches.
#[derive(Debug, Subcommand)]
pub enum SwitchCommand {
    /// Add a switch; a restarted daemon still has it, until the host reboots
    Add {
        /// Its name
        name: String,
        /// What it is to be
        #[command(flatten)]
        form: SwitchForm,
    },
    /// Take a switch away; refused while NICs are plugged in
    Remove {
        /// Its name
        name: String,
    },
    /// List the switches
    List,
    /// Show one: its ports, their drops by cause, the addresses it has learned
    Show {
        /// Its name
        name: String,
    },
}

#[derive(Debug, Args)]
pub struct CaptureArgs {
    /// Name of the NIC or of the uplink's interface
    pub name: String,
    /// Where to write to; - for standard output
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// End after this long [default: Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub limit: Option<Duration>,
    /// End after this many frames
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// First bytes of each frame that are kept
    #[arg(long, value_name = "BYTES", default_value_t = 2048)]
    pub snaplen: u32,
}

/// A libvirt domain to be.
#[derive(Debug, Args)]
pub struct LibvirtArgs {
    /// Names of disks, NICs and PCI functions
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Memory of the guest: it has to be shared
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: Size,
    /// Only the devices, for `virsh attach-device` or for a domain that is there and has <memoryBacking> already
    #[arg(long)]
    pub device_only: bool,
    /// Version of the QEMU, for PCI functions [default: that of --qemu]
    #[arg(long, value_name = "VERSION")]
    pub qemu_version: Option<String>,
    /// The domain's QEMU: its <emulator>, and the one whose version is asked [default: libvirt's own; qemu-system-x86_64 is asked]
    #[arg(long, value_name = "PROGRAM")]
    pub qemu: Option<String>,
    /// What runs the VM: without KVM, the domain is of type qemu, and a NIC gets no MSI-X [default: kvm where it is usable]
    #[arg(long, value_name = "ACCELERATOR")]
    pub accel: Option<Accel>,
}

/// How to look on.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// One look instead of a live view: the rates of one interval (as a table, or with --json as an object)
    #[arg(long)]
    pub once: bool,
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub interval: Duration,
}
