//! `identity`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::duration::duration;

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
    /// Make a new key and certificate for this host: by the authority that is here, or over the network
    Renew {
        /// Days for which it is valid [default: 365]; only where the authority is, since it decides
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: Option<u32>,
        /// Where the authority answers [default: where it did when this host joined]
        #[arg(long, value_name = "HOST[:PORT]")]
        from: Vec<String>,
    },
    /// Make a token by which another host joins, once: where the authority is
    Token {
        /// The name of that host [default: the one that it gives itself]
        #[arg(long, value_name = "HOST")]
        name: Option<String>,
        /// How long the token works
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
        valid: Duration,
        /// Where that host finds `identity serve` [default: where it listens]; several for several addresses
        #[arg(long, value_name = "HOST[:PORT]")]
        at: Vec<String>,
        /// Days for which the certificate is valid
        #[arg(long, value_name = "N", default_value = "365", value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
        /// Also if a host of that name has a valid certificate, which stays valid
        #[arg(long)]
        replace: bool,
    },
    /// Answer hosts that join, renew, or fetch the list of revoked certificates, until it is ended: where the authority is
    Serve {
        /// The address on which to listen
        #[arg(long, value_name = "ADDRESS:PORT")]
        listen: SocketAddr,
        /// Days for which a renewed certificate is valid
        #[arg(long, value_name = "N", default_value = "365", value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
        /// What is logged, to standard error
        #[arg(long, value_name = "LEVEL", default_value = "info")]
        log: String,
    },
    /// Make a key here and have it signed by the authority of a token: the identity of this host
    Join {
        /// What `identity token` has printed; - reads it from standard input
        token: String,
        /// The name of this host, if the token is for any
        #[arg(long, value_name = "HOST")]
        name: Option<String>,
        /// Also if this host has another name or another authority now
        #[arg(long)]
        replace: bool,
    },
    /// Revoke certificates of a host, so that no host takes them any more: where the authority is
    Revoke {
        /// The name of that host
        host: String,
        /// Only the certificate of this fingerprint [default: all of that host]
        #[arg(long, value_name = "SHA256", conflicts_with = "serial")]
        fingerprint: Option<String>,
        /// Only the certificate of this serial number: also one that was issued before the authority kept a ledger
        #[arg(long, value_name = "HEX")]
        serial: Option<String>,
    },
    /// Show the list of revoked certificates that counts here
    Revocations {
        /// Fetch the newest one from the authority before
        #[arg(long, conflicts_with = "import")]
        fetch: bool,
        /// Where the authority answers [default: where it did when this host joined]
        #[arg(long, value_name = "HOST[:PORT]", requires = "fetch")]
        from: Vec<String>,
        /// Take the one in this file, a copy of the authority's revoked.pem
        #[arg(long, value_name = "FILE")]
        import: Option<PathBuf>,
    },
    /// Write copies by the names that other programs want (qemu's tls-creds-x509, libnbd's tls-certificates)
    Export {
        /// The directory to write
        to: PathBuf,
    },
}
