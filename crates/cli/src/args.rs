//! What can be typed.

mod exits;
mod pci;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use ioplane_api::size::Size;
use ioplane_api::spec::{
    CoreForm, DirectWord, DiskForm, EngineWord, FormatWord, LinkWord, NicForm, NotifyWord, SwitchForm,
};

pub use exits::{ApplyArgs, CallersArgs, ExitsArgs, ExitsCommand, ReachArgs, WatchArgs};
pub use pci::{ModelCommand, PciAdd, PciCommand, PciWatch};

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
    /// What the log says: error, warn, info, debug, trace, or a filter such as ioplane_host=debug
    #[arg(long, global = true, value_name = "LEVEL", env = "IOPLANE_LOG", default_value = "info")]
    pub log: String,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon: serve what a configuration names until SIGTERM; SIGHUP reads it again
    Serve {
        /// The configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// Take over from the daemon that has started this process
        #[arg(long, hide = true)]
        inherit: bool,
    },
    /// Put another binary in the daemon's place while guests run: no front end sees a disconnect
    Upgrade {
        /// The new binary [default: what is now where the daemon's was started from]
        #[arg(long, value_name = "PATH")]
        binary: Option<PathBuf>,
        /// How long it may take to get ready; guests go on meanwhile [default: 20]
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=600))]
        patience: Option<u64>,
    },
    /// How disks, NICs, PCI functions, switches, queues and cores are
    Status,
    /// The same, live: rates, kicks taken and avoided, interrupts, latency
    Top(TopArgs),
    /// Add, remove, list and change disks while the daemon runs
    #[command(subcommand)]
    Disk(DiskCommand),
    /// Add, remove, list and set NICs while the daemon runs
    #[command(subcommand)]
    Nic(NicCommand),
    /// Add, remove, list and show the switches that NICs are plugged into
    #[command(subcommand)]
    Switch(SwitchCommand),
    /// Hand PCI functions of this host, or emulated NICs, to guests; watch them, stop, save and load them
    #[command(subcommand)]
    Pci(PciCommand),
    /// List, show and draw the device state models that watch PCI functions
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
    Add(DiskAdd),
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
    /// Give a disk a second socket, for the destination of a migration on this host; the image is opened and locked once, and
    /// the disk goes over when the destination's guest runs
    Twin {
        /// Its name
        name: String,
        /// Where [default: NAME.twin.sock in the run directory]
        #[arg(long = "vhost-socket", value_name = "PATH", conflicts_with = "remove")]
        vhost_socket: Option<PathBuf>,
        /// Take the second socket away; refused while a VM is connected there
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
        backing: BackingArgs,
    },
}

/// What is behind a disk.
#[derive(Debug, Args)]
pub struct BackingArgs {
    /// A raw image or a block device
    #[arg(long, value_name = "FILE", required_unless_present = "memory", conflicts_with = "memory")]
    pub path: Option<PathBuf>,
    /// Memory of the daemon, of this size; its content goes with the daemon
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<Size>,
    /// Say that the image is raw whatever it looks like: one with the bytes of another format is refused otherwise
    #[arg(long, value_name = "FORMAT", conflicts_with = "memory")]
    pub format: Option<FormatWord>,
    /// Whether the image's I/O goes past the host's page cache
    #[arg(long, value_name = "WHEN", conflicts_with = "memory")]
    pub direct: Option<DirectWord>,
    /// Who does the image's I/O
    #[arg(long, value_name = "WHO", conflicts_with = "memory")]
    pub engine: Option<EngineWord>,
}

/// A disk to add.
#[derive(Debug, Args)]
pub struct DiskAdd {
    /// Its name: letters, digits, '-', '_', '.'
    pub name: String,
    /// What it is to be
    #[command(flatten)]
    pub form: DiskForm,
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
    /// Switch between polling and notification while guests run
    Mode {
        /// Which of the two
        mode: NotifyWord,
        /// Only this core [default: all]
        #[arg(long, value_name = "ID")]
        core: Option<u32>,
    },
    /// Move a queue to another core while its guest runs
    Move {
        /// Name of the disk or the NIC, or of the switch whose uplink it is
        #[arg(value_name = "DEVICE")]
        disk: String,
        /// Number of the queue, from 0; a NIC's are receive, transmit, receive, ...
        queue: u16,
        /// Number of the core
        core: u32,
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
    /// Only the device: for the second and further ones of a guest
    #[arg(long, alias = "device-only")]
    pub disk_only: bool,
    /// For the destination of a migration: the disk's second socket
    #[arg(long)]
    pub twin: bool,
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
    /// Change a NIC while a guest uses it
    Set {
        /// Its name
        name: String,
        /// Plug its cable in, or pull it
        #[arg(long)]
        link: LinkWord,
    },
}

/// A NIC to add.
#[derive(Debug, Args)]
pub struct NicAdd {
    /// Its name: letters, digits, '-', '_', '.'
    pub name: String,
    /// What it is to be
    #[command(flatten)]
    pub form: NicForm,
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

/// A capture.
#[derive(Debug, Args)]
pub struct CaptureArgs {
    /// Name of the NIC or of the uplink's interface
    pub name: String,
    /// Where to write to; - for standard output
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// End after this many seconds
    #[arg(long = "for", value_name = "SECONDS", value_parser = seconds)]
    pub limit: Option<std::time::Duration>,
    /// End after this many frames
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// First bytes of each frame that are kept
    #[arg(long, value_name = "BYTES", default_value_t = 2048)]
    pub snaplen: u32,
}

/// `10s`, `500ms`, `2m`, or seconds.
fn time(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match &text[digits.len()..] {
        "ms" => 0.001,
        "s" | "" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err("a time is a number and ms, s, m or h, such as 10s".into()),
    };
    let number: f64 = digits.parse().map_err(|_| "a time is a number and ms, s, m or h, such as 10s")?;
    let seconds = number * scale;
    if !(0.001..=864_000.0).contains(&seconds) {
        return Err("from a millisecond to ten days".into());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// `10`, `10s` or `0.5`.
fn seconds(text: &str) -> Result<std::time::Duration, String> {
    let number: Result<f64, _> = text.strip_suffix('s').unwrap_or(text).parse();
    let limit = number.ok().and_then(|number| std::time::Duration::try_from_secs_f64(number).ok());
    limit.ok_or_else(|| "write seconds, as in 10 or 10s".to_owned())
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
    /// The QEMU whose version is asked
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub qemu: String,
}

/// How to look on.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// One look instead of a live view: the rates of one interval (as a table, or with --json as an object)
    #[arg(long)]
    pub once: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub interval: std::time::Duration,
}
