//! `publish`.

use clap::{Args, Subcommand};
use ioplane_api::size::Size;
use ioplane_api::spec::{ExportChangeForm, ExportForm};

/// What can be done with disks that other machines use.
#[derive(Debug, Subcommand)]
pub enum PublishCommand {
    /// Let other machines use a disk of this host; a restarted daemon still has it, until the host reboots
    Disk(Box<PublishDisk>),
    /// Change what all clients of one may do together, while they use it
    Set {
        /// Its name
        name: String,
        /// What to change
        #[command(flatten)]
        form: ExportChangeForm,
    },
    /// Change the size of one while clients use it; disks of other ioplane hosts follow, and their guests see it
    Resize {
        /// Its name
        name: String,
        /// The new size, such as 20G
        size: Size,
        /// Allow the new size to be smaller, if nobody has it attached; what lies beyond is lost
        #[arg(long)]
        shrink: bool,
    },
    /// Take one away; refused while clients use it
    Remove {
        /// Its name
        name: String,
        /// Even while clients use it: their requests then fail, or wait
        #[arg(long)]
        force: bool,
    },
    /// End the claim of the host that holds one, which may not use it any more: for a host that is gone. Others may use it from then on
    Release {
        /// Its name
        name: String,
        /// Even while that host is connected: its requests then fail, and what it has not flushed may be lost
        #[arg(long)]
        force: bool,
        /// Not the claim, but what hosts have reserved that are not connected; with --force, also what others have
        #[arg(long)]
        reservations: bool,
    },
    /// List what is published
    List,
    /// Show one: what is behind it, who may use it, what its clients did
    Show {
        /// Its name
        name: String,
    },
}

/// A disk to publish.
#[derive(Debug, Args)]
pub struct PublishDisk {
    /// Its name, by which clients ask for it: letters, digits, '-', '_', '.'
    pub name: String,
    /// What it is to be
    #[command(flatten)]
    pub form: ExportForm,
}
