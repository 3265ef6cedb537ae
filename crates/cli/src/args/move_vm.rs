//! What can be typed of `move`.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};
use ioplane_api::spec::{HostList, ListenAddress};

use super::duration::duration;

/// Where the other QEMU waits if nobody says: the port of the examples in QEMU's documentation.
pub const MIGRATION_PORT: u16 = 4444;
/// With a port or a path behind them these mean something else to QEMU than a host.
const NO_HOSTS: [&str; 7] = ["exec", "fd", "file", "rdma", "tcp", "unix", "vsock"];

#[derive(Debug, Subcommand)]
pub enum MoveCommand {
    /// Move a VM to a QEMU on another host that waits for it (-incoming), with its disks of other machines and its PCI functions; Ctrl-C cancels
    Vm(MoveVm),
    /// Let somebody else move a VM with PCI functions, once: bring its functions along with the next migration of its QEMU, whoever begins it. Stays until that has ended; Ctrl-C ends it
    Attend(MoveAttend),
    /// Bring the move of a VM with PCI functions to its end after the command that moved it was killed: the host that has it by what is written down
    /// lets it go on, and the other one does not
    Recover(MoveRecover),
    /// Add the disks and NICs that a VM uses here on the other host, as far as they are not there: before its QEMU is started there
    Prepare(MovePrepare),
    /// Let a VM be moved here by another host, once: that host reaches its PCI functions and its QEMU by its certificate
    Expect(MoveExpect),
    /// The VMs that are expected here
    Expected,
    /// Expect a VM no longer
    Unexpect {
        /// Name of the VM
        name: String,
    },
}

/// A VM that another host may move here.
#[derive(Debug, Args)]
pub struct MoveExpect {
    /// Name of the VM: -name of its QEMU
    pub name: String,
    /// The host from which it comes, by the name in its certificate
    #[arg(long, value_name = "HOST")]
    pub from: String,
    /// The monitor of the QEMU that waits here (-qmp unix:SOCKET,server=on,wait=off)
    #[arg(long, value_name = "SOCKET")]
    pub qmp: PathBuf,
    /// libvirt starts that QEMU only within virsh migrate: its monitor need not be there yet
    #[arg(long)]
    pub libvirt: bool,
    /// How long it may take until the move begins, such as 10m [default: 1h]
    #[arg(long = "for", value_name = "TIME", value_parser = duration)]
    pub valid: Option<Duration>,
    /// Where this daemon listens for the other host, as long as a VM is expected [default: [::]:10806, all addresses]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<ListenAddress>,
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
    pub to: Destination,
    /// The other host's daemon, whose disks and PCI functions are compared before anything stops: HOST or HOST:PORT, where it expects the VM (`move expect`)
    /// [default port: 10806]; or the path of its control socket, such as one that ssh -L forwards [default, if the VM has PCI functions: the host of --to]
    #[arg(long, value_name = "HOST|SOCKET", value_parser = place)]
    pub there: Option<There>,
    /// The name in the certificate of the other host, if --there (or --to) has an address in its place
    #[arg(long, value_name = "HOST")]
    pub tls_hostname: Option<String>,
    /// The monitor of the QEMU that waits there, such as one that ssh -L forwards. A VM with PCI functions needs it where --there is a socket
    #[arg(long, value_name = "SOCKET", conflicts_with = "tls_hostname")]
    pub qmp_there: Option<PathBuf>,
}

/// A VM that somebody else moves.
#[derive(Debug, Clone, Args)]
pub struct MoveAttend {
    /// Name of the VM, as `ioplane status` shows it
    pub name: String,
    /// A monitor of its QEMU that nobody else uses meanwhile (-qmp unix:SOCKET,server=on,wait=off) [default: as for `move vm`]
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<PathBuf>,
    /// The other host's daemon: HOST or HOST:PORT, where it expects the VM (`move expect`) [default port: 10806]; or the path of its control socket, such as one
    /// that ssh -L forwards
    #[arg(long, value_name = "HOST|SOCKET", value_parser = place)]
    pub there: There,
    /// The name in the certificate of the other host, if --there has an address in its place
    #[arg(long, value_name = "HOST")]
    pub tls_hostname: Option<String>,
    /// A monitor of the QEMU that waits there, which nobody else uses meanwhile, where --there is a socket
    #[arg(long, value_name = "SOCKET", conflicts_with = "tls_hostname")]
    pub qmp_there: Option<PathBuf>,
    /// Whoever migrates it starts the QEMU there only then, and goes on with the switch-over and has the guest run there by himself: virsh migrate. Both QEMUs
    /// need the library of `ioplane run`
    #[arg(long)]
    pub libvirt: bool,
}

/// Where a VM goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Destination {
    /// What QEMU is told.
    pub uri: String,
    /// The host, if that is what was said.
    pub host: Option<String>,
}

/// Where the other daemon is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum There {
    /// At this socket.
    Socket(PathBuf),
    /// At this host.
    Host {
        /// Its name, or an address.
        host: String,
        /// The port, if one was said.
        port: Option<u16>,
    },
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

/// Where the other daemon is. What is there as a file, or has a '/', is a socket.
fn place(text: &str) -> Result<There, String> {
    if text.contains('/') || Path::new(text).exists() {
        return Ok(There::Socket(text.into()));
    }
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Ok(There::Host { host: address.to_string(), port: None });
    }
    let wrong = || "write HOST, HOST:PORT, or the path of a socket, as ./c.sock".to_owned();
    if let Ok(address) = text.parse::<SocketAddr>() {
        let port = Some(address.port()).filter(|port| *port > 0).ok_or_else(wrong)?;
        return Ok(There::Host { host: address.ip().to_string(), port: Some(port) });
    }
    let (host, port) = match text.split_once(':') {
        Some((host, port)) => (host, Some(port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?)),
        None => (text, None),
    };
    let is_host = !host.contains(',') && host.parse::<HostList>().is_ok();
    if is_host { Ok(There::Host { host: host.to_owned(), port }) } else { Err(wrong()) }
}

/// Where it goes.
fn incoming(text: &str) -> Result<Destination, String> {
    let uri = uri(text)?;
    let host = match uri.as_str() == text {
        true => None,
        false => uri
            .strip_prefix("tcp:")
            .and_then(|place| place.rsplit_once(':'))
            .map(|(host, _)| host.trim_start_matches('[').trim_end_matches(']').to_owned()),
    };
    Ok(Destination { uri, host })
}

/// What QEMU is told.
fn uri(text: &str) -> Result<String, String> {
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
        for (text, wanted) in [
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
            assert_eq!(uri(text).as_deref(), Ok(wanted));
        }
        for (text, host) in [
            ("host-c", Some("host-c")),
            ("host-c:5000", Some("host-c")),
            ("[fd00::3]:5000", Some("fd00::3")),
            ("fd00::3", Some("fd00::3")),
            ("tcp:host-c:4444", None),
            ("unix:/run/in", None),
        ] {
            assert_eq!(incoming(text).unwrap().host.as_deref(), host, "{text}");
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

    #[test]
    fn the_other_daemon_is_at_a_socket_or_at_a_host() {
        let host = |host: &str, port| Ok(There::Host { host: host.to_owned(), port });
        assert_eq!(place("/tmp/c.sock"), Ok(There::Socket("/tmp/c.sock".into())));
        assert_eq!(place("./c.sock"), Ok(There::Socket("./c.sock".into())));
        assert_eq!(place("host-c"), host("host-c", None));
        assert_eq!(place("host-c.example:7"), host("host-c.example", Some(7)));
        assert_eq!(place("10.0.0.3"), host("10.0.0.3", None));
        assert_eq!(place("[fd00::3]:7"), host("fd00::3", Some(7)));
        assert_eq!(place("fd00::3"), host("fd00::3", None));
        for bad in
            ["", ":", ":7", "host-c:", "host-c:0", "host-c:99999", "a,b", "ho st", "10.0.0.3:0", "a:1:2"]
        {
            assert!(place(bad).is_err(), "{bad}");
        }
    }
}
