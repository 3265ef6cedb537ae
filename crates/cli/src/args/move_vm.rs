//! What can be typed of `move`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

#[derive(Debug, Subcommand)]
pub enum MoveCommand {
    /// Move a VM to a QEMU on another host that waits for it (-incoming), with its disks of other machines; Ctrl-C cancels
    Vm(MoveVm),
    /// Add the disks and NICs that a VM uses here on the other host, as far as they are not there: before its QEMU is started there
    Prepare(MovePrepare),
}

/// A VM that is going to move.
#[derive(Debug, Args)]
pub struct MovePrepare {
    /// Name of the VM, as `ioplane status` shows it
    pub name: String,
    /// The control socket of the other host's daemon, such as one that ssh -L forwards
    #[arg(long, value_name = "SOCKET")]
    pub there: PathBuf,
    /// A host name or address by which the other host reaches this one: for disks that this host publishes at all its addresses
    #[arg(long, value_name = "HOST")]
    pub via: Option<String>,
}

/// A VM that is to move.
#[derive(Debug, Args)]
pub struct MoveVm {
    /// Name of the VM, as `ioplane status` shows it
    pub name: String,
    /// The monitor of its QEMU (-qmp unix:SOCKET,server=on,wait=off)
    #[arg(long, value_name = "SOCKET")]
    pub qmp: PathBuf,
    /// Where the other QEMU waits, as its -incoming says: tcp:host-c:4444 or unix:PATH
    #[arg(long, value_name = "URI", value_parser = incoming)]
    pub to: String,
    /// The control socket of the other host's daemon, such as one that ssh -L forwards: its disks are compared before anything stops
    #[arg(long, value_name = "SOCKET")]
    pub there: Option<PathBuf>,
}

fn incoming(text: &str) -> Result<String, String> {
    let place = text.strip_prefix("tcp:").or_else(|| text.strip_prefix("unix:"));
    match place {
        Some(place) if !place.is_empty() => Ok(text.to_owned()),
        _ => Err("write tcp:HOST:PORT or unix:PATH, as in the -incoming of the other QEMU".to_owned()),
    }
}
