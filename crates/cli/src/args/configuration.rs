//! `config`.

use clap::Subcommand;

/// What can be done with the daemon's configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Append what was added at run time to the configuration file: it is served again after a reboot of the host. The rest of the
    /// file stays as it is
    Save {
        /// Print what would be appended, and write nothing
        #[arg(long)]
        print: bool,
    },
}
