//! `identity`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// Who this host is to other hosts.
#[derive(Debug, Args)]
pub struct IdentityArgs {
    /// Where the identity is [default: /etc/ioplane/identity]
    #[arg(long, global = true, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// What to do
    #[command(subcommand)]
    pub command: IdentityCommand,
}

/// What can be done with identities.
#[derive(Debug, Subcommand)]
pub enum IdentityCommand {
    /// Make an authority, and the identity of this host: on one host
    Create {
        /// The name of this host, as others write it in nbds://NAME/EXPORT
        name: String,
        /// Days for which it is valid
        #[arg(long, value_name = "N", default_value = "365", value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
    /// Show whose identity is here, its fingerprints, and until when it is valid; exit code 1 if it cannot be used
    Show,
    /// Make the identity of another host, with its private key, for that host to import: where the authority is
    Issue {
        /// The name of that host
        host: String,
        /// The file to write
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
        /// Days for which it is valid
        #[arg(long, value_name = "N", default_value = "365", value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
    /// Make what `issue` has written the identity of this host
    Import {
        /// The file
        file: PathBuf,
        /// Also if this host has another name or another authority now
        #[arg(long)]
        replace: bool,
    },
    /// Make a new key and certificate for this host: where the authority is
    Renew {
        /// Days for which it is valid
        #[arg(long, value_name = "N", default_value = "365", value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
    /// Write copies by the names that other programs want (qemu's tls-creds-x509, libnbd's tls-certificates)
    Export {
        /// The directory to write
        to: PathBuf,
    },
}
