//! `config`.

use clap::Subcommand;

/// What can be done with the daemon's configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Append what was added at run time to the configuration file, so that it is there after a reboot of the host. What is in the file
    /// stays as it is; what the file would not say by then is refused, and nothing is written
    Save {
        /// Print what would be appended, and write nothing
        #[arg(long)]
        print: bool,
    },
}
