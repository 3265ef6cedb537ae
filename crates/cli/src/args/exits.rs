//! `exits`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::ClampArgs;
use super::duration;

/// Which VM's exits, and what of them.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct ExitsArgs {
    /// Say or do something about them
    #[command(subcommand)]
    pub command: Option<ExitsCommand>,
    /// What is watched
    #[command(flatten)]
    pub watch: WatchArgs,
    /// How to reach the guest, whose own counters then tell the exits per unit of its work
    #[command(flatten)]
    pub reach: ReachArgs,
    /// Show the profile as it grows, until Ctrl-C
    #[arg(long, conflicts_with = "reach")]
    pub live: bool,
    /// Write a page that works offline
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write a picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// List the VMs of this host instead
    #[arg(long)]
    pub list: bool,
}

/// What to do about exits.
#[derive(Debug, Subcommand)]
pub enum ExitsCommand {
    /// Say what could be better: evidence, expected gain, remedy, and how sure that is
    Advise(WatchArgs),
    /// Do in the guest what findings suggest, measure again and show before and after. What can be done is safe and can be undone
    Apply(ApplyArgs),
    /// Say who in the guest calls the functions that cause most exits: the guest's own kernel counts that, by kprobes or breakpoints
    /// that are removed again
    Callers(CallersArgs),
    /// Bring the names of the guest's functions and of its devices' ports and addresses, for --symbols
    Learn(LearnArgs),
    /// Show what all VMs of this host do, as rates of KVM's own counters: that costs the VMs nothing
    Top(ExitsTopArgs),
    /// Write the report to a file, to compare it with a later one by `ioplane exits diff`
    Record(RecordArgs),
    /// Compare two recordings: what has changed, most first. Exit code 1 if a limit is exceeded
    Diff(DiffArgs),
    /// Say what clustering does in a VM that `ioplane run` has started, or switch it on or off
    Cluster(ClusterArgs),
    /// Say how fast a guest's timer ticks, or have it tick at most so often: the PIT of a VM that `ioplane run` has started, or all
    /// periodic timers of this host
    Clamp(ClampArgs),
}

/// How often.
#[derive(Debug, Args)]
pub struct ExitsTopArgs {
    /// One look instead of a live view: the rates of one interval (as a table, or with --json as an object)
    #[arg(long)]
    pub once: bool,
    /// Print KVM's counters of all VMs once in the text format of OpenMetrics, for Prometheus, in place of rates
    #[arg(long, conflicts_with_all = ["once", "interval"])]
    pub openmetrics: bool,
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub interval: Duration,
}

/// Where to, and what is watched.
#[derive(Debug, Args)]
pub struct RecordArgs {
    /// The file. One that is there is replaced
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    /// What is watched
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// Two recordings, and what must not be.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// A file of `ioplane exits record`
    #[arg(value_name = "BEFORE")]
    pub before: PathBuf,
    /// A later one
    #[arg(value_name = "AFTER")]
    pub after: PathBuf,
    /// Exit with code 1 if this is so. Such as "exits/s>+10%", "exits/s[HLT]>2000", "us/exit[MSR]>+5": exits/s, user/s or us/exit;
    /// optionally a reason, function, register or device in brackets; one of > >= < <=; a number, or with a sign the change since
    /// BEFORE. Can be given repeatedly
    #[arg(long, value_name = "LIMIT", allow_hyphen_values = true)]
    pub fail_if: Vec<String>,
}

/// Clustering of one VM.
#[derive(Debug, Args)]
pub struct ClusterArgs {
    /// What to do
    #[arg(value_enum, default_value = "status")]
    pub action: ClusterWord,
    /// The VM, by its VMM's name for it or by process number; digits alone are a number, name:7 and pid:7 say which [default: the
    /// only one]
    #[arg(long, value_name = "NAME|PID")]
    pub vm: Option<String>,
    /// Show so many places of the guest's code
    #[arg(long, value_name = "N", default_value = "20")]
    pub sites: usize,
}

/// What to do with clustering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ClusterWord {
    /// Say what it has done so far
    Status,
    /// Switch it on
    On,
    /// Switch it off: every exit is the kernel's again
    Off,
    /// Answer batches, and switch clustering off
    BatchOnly,
}

/// One VM of this host.
#[derive(Debug, Default, Args)]
pub struct VmArgs {
    /// The VM, by its VMM's name for it or by process number; digits alone are a number, name:7 and pid:7 say which [default: the
    /// only one]
    #[arg(long, value_name = "NAME|PID")]
    pub vm: Option<String>,
    /// The VM, by libvirt's name, UUID or number of the domain: virsh tells its process and its PCI devices
    #[arg(long, value_name = "DOMAIN", conflicts_with = "vm")]
    pub libvirt: Option<String>,
}

/// What is watched, how long, and what names are made of.
#[derive(Debug, Args)]
pub struct WatchArgs {
    /// Which VM
    #[command(flatten)]
    pub which: VmArgs,
    /// How long to watch
    #[arg(long = "for", value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub time: Duration,
    /// Record one part of the time in so many, in slices of 2 ms at random: costs less; counts and times are estimates
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub sample: u64,
    /// Where events come from
    #[arg(long, value_name = "SOURCE", default_value = "any", value_parser = ["any", "bpf", "perf", "tracefs"])]
    pub source: String,
    /// Names for guest functions: the guest's /proc/kallsyms (read as root there), or its System.map or unstripped vmlinux; or a
    /// directory of `ioplane exits learn`, which names devices too
    #[arg(long, value_name = "FILE|DIR")]
    pub symbols: Option<PathBuf>,
    /// The VM's PCI devices: what QMP's query-pci answers [default: QEMU is asked by its own monitor, if that is free]
    #[arg(long, value_name = "FILE")]
    pub devices: Option<PathBuf>,
}

/// Which findings, and how to reach the guest.
#[derive(Debug, Args)]
#[command(group = one_way())]
pub struct ApplyArgs {
    /// Findings, as `ioplane exits advise` calls them
    #[arg(required = true, value_name = "FINDING")]
    pub findings: Vec<String>,
    /// Put back what was before
    #[arg(long)]
    pub undo: bool,
    /// How to reach the guest
    #[command(flatten)]
    pub reach: ReachArgs,
    /// What is watched
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// Whose callers, and how to reach the guest.
#[derive(Debug, Args)]
#[command(group = one_way())]
pub struct CallersArgs {
    /// Functions of the guest's kernel [default: those that cause most exits, for which --symbols is needed]
    #[arg(value_name = "FUNCTION")]
    pub functions: Vec<String>,
    /// How to reach the guest
    #[command(flatten)]
    pub reach: ReachArgs,
    /// What is watched, and for how long the guest looks
    #[command(flatten)]
    pub watch: WatchArgs,
}

/// Where names go, and how to reach the guest.
#[derive(Debug, Args)]
#[command(group = one_way())]
pub struct LearnArgs {
    /// The directory: it is made, or its files are replaced
    #[arg(value_name = "NAMES")]
    pub names: PathBuf,
    /// Which VM: only --agent without a socket asks
    #[command(flatten)]
    pub which: VmArgs,
    /// How to reach the guest
    #[command(flatten)]
    pub reach: ReachArgs,
}

/// The ways of [`ReachArgs`], one of which must be given.
fn one_way() -> clap::ArgGroup {
    clap::ArgGroup::new("way").required(true).args(["ssh", "agent", "directory", "via"])
}

/// One way into the guest.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("reach"))]
pub struct ReachArgs {
    /// Reach the guest by ssh, as root
    #[arg(long, value_name = "DESTINATION", group = "reach")]
    pub ssh: Option<String>,
    /// ssh's configuration file: port, key, known hosts
    #[arg(long, value_name = "FILE", requires = "ssh")]
    pub ssh_config: Option<PathBuf>,
    /// Reach the guest by its QEMU guest agent; `auto`, or no more words: by the socket on QEMU's command line
    #[arg(long, value_name = "SOCKET", group = "reach", num_args = 0..=1, default_missing_value = "auto")]
    pub agent: Option<PathBuf>,
    /// Reach the guest by a directory that it shares with this host, where `sh folder.sh` of guest/tune runs
    #[arg(long, alias = "folder", value_name = "DIR", group = "reach")]
    pub directory: Option<PathBuf>,
    /// Reach the guest by a command that runs its further arguments there and passes its standard input on, such as
    /// "kubectl exec -i pod --"
    #[arg(long, value_name = "COMMAND", group = "reach")]
    pub via: Option<String>,
}
