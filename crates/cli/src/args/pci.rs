//! `pci` and `model`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use ioplane_api::spec::{FunctionForm, PciAddress};

use super::duration;

/// What can be done with PCI functions.
#[derive(Debug, Subcommand)]
pub enum PciCommand {
    /// List the PCI functions of this host, which of them can be handed to a guest, and those that are served
    List,
    /// Hand a function of this host to a guest, or an emulated NIC; a restarted daemon still has it, until the host reboots
    Add(PciAdd),
    /// Take a function away, and give it back to the host; refused while a guest uses it
    Remove {
        /// Its name
        name: String,
        /// Even while a guest uses it
        #[arg(long)]
        force: bool,
    },
    /// Show one: how it is, and what its guest did so far
    Show {
        /// Its name
        name: String,
    },
    /// The same, live: state, events, hooked accesses, DMA vetted, faults denied
    Watch(PciWatch),
    /// Bring a function to a quiescent point and hold it there: what its guest does to it waits. `pci resume` resumes it; it resumes
    /// by itself after half a minute
    Quiesce {
        /// Its name
        name: String,
        /// How long it may take to become quiescent while its guest runs; then it is suspended
        #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
        deadline: Duration,
        /// If it is not quiescent by then, resume it instead
        #[arg(long, alias = "or-go-on")]
        or_resume: bool,
    },
    /// Resume a function
    Resume {
        /// Its name
        name: String,
    },
    /// Try again to make a function usable that could not be reset, or that somebody kept; refused while a guest uses it
    Reset {
        /// Its name
        name: String,
    },
    /// Put another function of the same kind in its place while a guest uses it, which stands still for a moment
    Move(PciMove),
    /// Write the state of a function to a file. One that runs is quiesced for it, and resumes
    Save {
        /// Its name
        name: String,
        /// Where to
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// How long it may take to become quiescent while its guest runs; then it is suspended
        #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
        deadline: Duration,
    },
    /// Put a saved state into a function, which resumes from there
    Load {
        /// Its name
        name: String,
        /// Where from
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// A function to add.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["host", "emulate"]))]
#[command(group = clap::ArgGroup::new("cable").args(["switch", "tap"]))]
pub struct PciAdd {
    /// Its name: letters, digits, '-', '_', '.'
    pub name: String,
    /// What it is to be
    #[command(flatten)]
    pub form: FunctionForm,
}

/// Another function in the place of one.
#[derive(Debug, Args)]
pub struct PciMove {
    /// Name of the function, which was added with --mode migratable or cooperating
    pub name: String,
    /// The function of this host that takes its place, as `ioplane pci list` has it
    #[arg(long, value_name = "ADDRESS")]
    pub to: PciAddress,
    /// The monitor of its QEMU (-qmp unix:SOCKET,server=on,wait=off), by which its guest is stopped and goes on; needed for --mode migratable,
    /// and not where its driver cooperates
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// How long it may take while the guest stands still: at most 30s
    #[arg(long, value_name = "TIME", default_value = "4s", value_parser = duration)]
    pub deadline: Duration,
    /// Take it although the host uses it
    #[arg(long)]
    pub force: bool,
    /// Take it although this host does not remap interrupts
    #[arg(long)]
    pub unsafe_interrupts: bool,
}

/// How to look on.
#[derive(Debug, Args)]
pub struct PciWatch {
    /// Name of the function
    pub name: String,
    /// Time between two looks
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub interval: Duration,
    /// End after this long [default: Ctrl-C]
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub limit: Option<Duration>,
}

/// What can be done with device state models.
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// List the models that this version has, and the functions that they fit
    List,
    /// Show one: registers, states, what leads from one to another, what is checked
    Show {
        /// Its name
        name: String,
        /// Draw its state diagram, from the table that runs
        #[arg(long, conflicts_with = "dot")]
        svg: bool,
        /// The same for Graphviz
        #[arg(long)]
        dot: bool,
    },
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::Cli;

    #[test]
    fn what_belongs_together_is_asked_for_together() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' ')).map(drop).map_err(|error| error.kind());
        for good in [
            "ioplane pci list --json",
            "ioplane pci add n --host 0000:00:05.0",
            "ioplane pci add n --host 00:05.0 --mode virtual --on-fault dma=stop,register=ignore",
            "ioplane pci add n --emulate rtl8139 --switch lan --mac 02:00:00:00:00:01",
            "ioplane pci add n --emulate ne2000 --tap tap0",
            "ioplane pci add n --host 00:05.0 --unsafe-interrupts",
            "ioplane pci reset n",
            "ioplane pci add n --host 00:05.0 --mode migratable",
            "ioplane pci move n --to 0000:01:10.2 --qmp /run/vm.qmp",
            "ioplane pci add n --host 00:05.0 --mode cooperating",
            "ioplane pci move n --to 0000:01:10.2",
            "ioplane pci quiesce n --deadline 500ms",
            "ioplane pci watch n --json --for 3s",
            "ioplane model show rtl8139 --svg",
        ] {
            assert_eq!(parse(good), Ok(()), "{good}");
        }
        for bad in [
            "ioplane pci add n",
            "ioplane pci move n --to 5 --qmp /run/vm.qmp",
            "ioplane pci add n --host 00:05.0 --emulate rtl8139 --switch lan",
            "ioplane pci add n --host 00:05.0 --switch lan",
            "ioplane pci add n --host 5",
            "ioplane pci add n --host 00:05.0 --on-fault panic",
            "ioplane pci add n --emulate rtl8139",
            "ioplane pci add n --emulate rtl8139 --switch lan --tap tap0",
            "ioplane pci add n --emulate e1000 --switch lan",
            "ioplane model show rtl8139 --svg --dot",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
