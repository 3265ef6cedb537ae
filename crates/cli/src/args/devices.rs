//! `devices`.

use clap::{Args, Subcommand};

/// What can be done with the devices that hosts publish for each other.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// What to do; without it they are listed
    #[command(subcommand)]
    pub command: Option<DevicesCommand>,
}

/// More than listing them.
#[derive(Debug, Subcommand)]
pub enum DevicesCommand {
    /// List them: name, kind, size, host, who uses them, how they are
    List,
    /// Free the name of a device whose host does not come back; refused while that host is there
    Forget {
        /// Its name
        name: String,
    },
}
