//! What can be typed.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::size::Size;
use crate::spec::{DirectWord, EngineWord, MannersWord, NotifyWord};

/// Serves virtual machines' disks by polling, on I/O cores of their own.
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
    /// Run the daemon: serve the disks of a configuration until SIGTERM; SIGHUP reads it again
    Serve {
        /// The configuration
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// How disks, queues and cores are
    Status,
    /// Add, remove, list and change disks while the daemon runs
    #[command(subcommand)]
    Disk(DiskCommand),
    /// List, add, retire and set I/O cores, and move queues between them
    #[command(subcommand)]
    Core(CoreCommand),
    /// Print the arguments that give a disk to a QEMU: paste and boot
    QemuArgs(QemuArgs),
    /// Say what this host lacks, what follows, and what to do
    Doctor,
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
    /// What is behind it
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// What the guest reads as its serial number [default: the name]
    #[arg(long)]
    pub serial: Option<String>,
    /// Number of queues [default: 1]
    #[arg(long, value_name = "N")]
    pub queues: Option<u64>,
    /// Entries of a queue [default: 128]
    #[arg(long, value_name = "N")]
    pub queue_size: Option<u64>,
    /// Logical block shown to the guest: 512 to 4096 bytes [default: the backing's]
    #[arg(long, value_name = "BYTES")]
    pub block_size: Option<u64>,
    /// The I/O core that its queues prefer [default: whichever has time]
    #[arg(long, value_name = "ID")]
    pub core: Option<u32>,
    /// Its vhost-user socket [default: NAME.sock in the run directory]
    #[arg(long = "vhost-socket", value_name = "PATH")]
    pub vhost_socket: Option<PathBuf>,
}

/// What can be done with I/O cores.
#[derive(Debug, Subcommand)]
pub enum CoreCommand {
    /// List the I/O cores
    List,
    /// Start one core more
    Add {
        /// The processor to pin it to [default: not pinned]
        #[arg(long, value_name = "CPU")]
        cpu: Option<u32>,
        /// How it starts [default: polled]
        #[arg(long, value_name = "HOW")]
        notify: Option<NotifyWord>,
        /// Microseconds without work before it sleeps
        #[arg(long, value_name = "N")]
        spin_us: Option<u64>,
        /// How it treats others on its processor
        #[arg(long, value_name = "HOW")]
        manners: Option<MannersWord>,
    },
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
        /// Name of the disk
        disk: String,
        /// Number of the queue, from 0
        queue: u16,
        /// Number of the core
        core: u32,
    },
}

/// A QEMU to be.
#[derive(Debug, Args)]
pub struct QemuArgs {
    /// Name of the disk
    pub name: String,
    /// Memory of the guest: vhost-user needs it shared
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    pub memory: Size,
    /// Only the disk: for the second and further disks of a guest
    #[arg(long)]
    pub disk_only: bool,
    /// Version of the QEMU, such as 7.2 [default: that of --qemu]
    #[arg(long, value_name = "VERSION")]
    pub qemu_version: Option<String>,
    /// The QEMU whose version is asked
    #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-x86_64")]
    pub qemu: String,
    /// Place in the boot order
    #[arg(long, value_name = "N")]
    pub bootindex: Option<u32>,
}
