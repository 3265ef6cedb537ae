//! What can be typed of `move`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use ioplane_api::spec::{HostList, ListenAddress};

/// Where the other QEMU waits if nobody says: the port of the examples in QEMU's documentation.
pub const MIGRATION_PORT: u16 = 4444;
/// With a port or a path behind them these mean something else to QEMU than a host.
const NO_HOSTS: [&str; 7] = ["exec", "fd", "file", "rdma", "tcp", "unix", "vsock"];

#[derive(Debug, Subcommand)]
pub enum MoveCommand {
    /// Move a VM to a QEMU on another host that waits for it (-incoming), with its disks of other machines and its PCI functions; Ctrl-C cancels
    Vm(MoveVm),
    /// Bring the move of a VM with PCI functions to its end after the command that moved it was killed: the host that has it by what is written down
    /// lets it go on, and the other one does not
    Recover(MoveRecover),
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
    /// A host name or address by which the other host reaches this one: for disks that this host publishes at all its addresses. With TLS the name in the
    /// certificate of this host
    #[arg(long, value_name = "HOST")]
    pub via: Option<String>,
    /// First publish the images of this host that the VM uses as disks, at this address, so that they can go along: each as VM-DISK, with TLS. Without
    /// =ADDRESS:PORT at [::]:10809, all addresses
    #[arg(long, value_name = "ADDRESS:PORT", num_args = 0..=1, require_equals = true, default_missing_value = "[::]:10809")]
    pub publish: Option<ListenAddress>,
    /// With --publish: which hosts may connect, such as host-b,host-c [default: all with a certificate of this host's authority]
    #[arg(long, value_name = "HOSTS", requires = "publish", conflicts_with = "plain")]
    pub allow: Option<HostList>,
    /// With --publish: accept that whoever can reach the address is let in unasked, and that nothing is encrypted
    #[arg(long, requires = "publish")]
    pub plain: bool,
}

/// A VM that is to move.
#[derive(Debug, Args)]
pub struct MoveVm {
    /// Name of the VM, as `ioplane status` shows it
    pub name: String,
    /// The monitor of its QEMU (-qmp unix:SOCKET,server=on,wait=off) [default: what its disks name, --qmp of `disk add`; else that of its QEMU's command line]
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// Where the other QEMU waits: HOST or HOST:PORT, where it listens by -incoming tcp:0.0.0.0:PORT [default port: 4444]; or as its -incoming says: tcp:HOST:PORT,
    /// unix:PATH
    #[arg(long, value_name = "HOST|URI", value_parser = incoming)]
    pub to: String,
    /// The control socket of the other host's daemon, such as one that ssh -L forwards: its disks and PCI functions are compared before anything stops
    #[arg(long, value_name = "SOCKET")]
    pub there: Option<PathBuf>,
    /// The monitor of the QEMU that waits there, such as one that ssh -L forwards. A VM with PCI functions needs it, and --there
    #[arg(long, value_name = "SOCKET")]
    pub qmp_there: Option<PathBuf>,
}

/// A VM whose move was broken off.
#[derive(Debug, Args)]
pub struct MoveRecover {
    /// Name of the VM
    pub name: String,
    /// The monitor of its QEMU here [default: the one of the move]
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// The control socket of the other host's daemon [default: the one of the move]
    #[arg(long, value_name = "SOCKET")]
    pub there: Option<PathBuf>,
    /// The monitor of the QEMU there [default: the one of the move]
    #[arg(long, value_name = "SOCKET")]
    pub qmp_there: Option<PathBuf>,
    /// You have seen that the QEMU there has ended, where its monitor cannot be asked
    #[arg(long)]
    pub ended_there: bool,
}

/// What QEMU is told.
fn incoming(text: &str) -> Result<String, String> {
    if let Some(place) = text.strip_prefix("tcp:").or_else(|| text.strip_prefix("unix:")) {
        return if place.is_empty() { Err(wrong()) } else { Ok(text.to_owned()) };
    }
    // A port is none of `SocketAddr` only if it is left out.
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(format!("tcp:{}", SocketAddr::new(address, MIGRATION_PORT)));
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return if address.port() == 0 { Err(wrong()) } else { Ok(format!("tcp:{address}")) };
    }
    let (host, port) = match text.split_once(':') {
        Some((host, _)) if NO_HOSTS.contains(&host) => return Err(wrong()),
        Some((host, port)) => (host, port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong)?),
        None => (text, MIGRATION_PORT),
    };
    let is_host = !host.contains(',') && host.parse::<HostList>().is_ok();
    if is_host { Ok(format!("tcp:{host}:{port}")) } else { Err(wrong()) }
}

fn wrong() -> String {
    "write HOST, HOST:PORT, or as in the -incoming of the other QEMU tcp:HOST:PORT or unix:PATH".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_enough() {
        for (text, uri) in [
            ("host-c", "tcp:host-c:4444"),
            ("host-c.example:5000", "tcp:host-c.example:5000"),
            ("10.0.0.3", "tcp:10.0.0.3:4444"),
            ("10.0.0.3:5000", "tcp:10.0.0.3:5000"),
            ("fd00::3", "tcp:[fd00::3]:4444"),
            ("[fd00::3]", "tcp:[fd00::3]:4444"),
            ("[fd00::3]:5000", "tcp:[fd00::3]:5000"),
            ("tcp:host_c:4444", "tcp:host_c:4444"),
            ("unix:/run/in", "unix:/run/in"),
        ] {
            assert_eq!(incoming(text).as_deref(), Ok(uri));
        }
        for bad in [
            "",
            ":",
            ":4444",
            "host-c:",
            "host-c:0",
            "host-c:99999",
            "host-c:5000,to=6000",
            "10.0.0.3:0",
            "a,b",
            "tcp:",
            "unix:",
            "exec:rm",
            "fd:7",
            "rdma:h:1",
            "-h",
            "/run/in",
            "h:1:2",
            "[fd00::3]:",
            "ho st",
        ] {
            assert!(incoming(bad).is_err(), "{bad}");
        }
    }
}
