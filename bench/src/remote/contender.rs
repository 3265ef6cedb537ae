//! Who serves the disk: one daemon with a disk of its own, or an importer and an exporter with NBD between them.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::Result;

use ioplane_figures::cable::FAR;

use crate::daemon::Configuration;
use crate::exitless::backend::{Backend, Backing};
use crate::exitless::qsd::Aio;
use crate::mode::Mode;
use crate::served::{Place, Served, ioplane};

/// What every exporter calls its disk.
pub const EXPORT: &str = "data";
/// Requests per second of the limited disk.
pub const LIMIT: u32 = 50_000;
/// Of these may pass at once: a frozen disk saves no more of them than take 10 ms.
const BURST: u32 = LIMIT / 100;

/// What is between importer and exporter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    Unix,
    /// Over loopback.
    Tcp,
    /// The same with TLS 1.3 and certificates on both sides.
    Tls,
    /// The exporter is in the namespace at the far end of a cable.
    Cable {
        tls: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Importer {
    Ioplane,
    /// qemu-storage-daemon.
    Qsd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exporter {
    Ioplane,
    /// qemu-nbd on a file of a tmpfs.
    QemuNbd(Aio),
    /// nbdkit with its plugin `memory`.
    Nbdkit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Local,
    Remote(Importer, Wire, Exporter),
}

/// A way to serve the disk, with every I/O core of ioplane in one mode.
#[derive(Debug, Clone)]
pub struct Contender {
    pub name: &'static str,
    pub way: Way,
    pub mode: Mode,
    /// Whether the disk takes only [`LIMIT`] requests per second.
    pub limited: bool,
    /// Another build of ioplane.
    pub binary: Option<PathBuf>,
    /// The identity of `localhost`, for TLS.
    pub identity: PathBuf,
    /// The namespace at the far end of the cable, if there is one.
    pub space: Option<String>,
}

/// Where an exporter at the far end listens: nobody else does there. Each start has another one, as the last one's may still be closing.
fn far() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(10_809);
    SocketAddr::new(FAR.into(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Where an exporter listens.
pub enum Listener {
    Unix(PathBuf),
    Tcp(SocketAddr),
    Tls(SocketAddr),
}

impl Listener {
    fn choose(wire: Wire, directory: &Path) -> Result<Self> {
        Ok(match wire {
            Wire::Unix => Listener::Unix(directory.join("nbd.sock")),
            Wire::Tcp => Listener::tcp()?,
            Wire::Tls => Listener::Tls(TcpListener::bind("127.0.0.1:0")?.local_addr()?),
            Wire::Cable { tls: false } => Listener::Tcp(far()),
            Wire::Cable { tls: true } => Listener::Tls(far()),
        })
    }

    /// At a port of loopback that nobody uses.
    pub fn tcp() -> Result<Self> {
        Ok(Listener::Tcp(TcpListener::bind("127.0.0.1:0")?.local_addr()?))
    }

    /// Where it is, if that is an address.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Unix(_) => None,
            Listener::Tcp(address) | Listener::Tls(address) => Some(*address),
        }
    }

    /// What an importer calls it.
    pub fn uri(&self) -> String {
        match self {
            Listener::Unix(path) => format!("nbd+unix:///{EXPORT}?socket={}", path.display()),
            Listener::Tcp(address) => format!("nbd://{address}/{EXPORT}"),
            Listener::Tls(address) => format!("nbds://{address}/{EXPORT}?tls-hostname=localhost"),
        }
    }

    /// Tells a server of others where to listen, by what it calls a path and an address; a port all call the same.
    fn told(&self, command: &mut Command, path: &str, address: &str) {
        match self {
            Listener::Unix(socket) => command.arg(path).arg(socket),
            Listener::Tcp(at) | Listener::Tls(at) => {
                command.arg(address).arg(at.ip().to_string()).arg("--port").arg(at.port().to_string())
            }
        };
    }

    /// Until `served` accepts connections there.
    pub fn wait(&self, served: &mut Served) -> Result<()> {
        match self {
            Listener::Unix(path) => served.await_socket(path),
            Listener::Tcp(address) | Listener::Tls(address) => served.await_tcp(*address),
        }
    }
}

impl Contender {
    fn configuration(&self) -> Configuration {
        Configuration::new(self.mode).identity(&self.identity)
    }

    fn binary(&self) -> Result<PathBuf> {
        self.binary.clone().map_or_else(ioplane, Ok)
    }

    /// The keys of the guest's disk that limit it, if they do.
    fn limit(&self) -> String {
        match self.limited {
            true => format!("\niops_limit = {LIMIT}\niops_burst = {BURST}"),
            false => String::new(),
        }
    }

    fn export(
        &self,
        exporter: Exporter,
        at: &Listener,
        backing: &Backing,
        directory: &Path,
        place: &Place,
    ) -> Result<Served> {
        match exporter {
            Exporter::Ioplane => {
                let (socket, listen) = match at {
                    Listener::Unix(path) => (path.clone(), String::new()),
                    Listener::Tcp(address) => {
                        (directory.join("nbd.sock"), format!("\nlisten = \"{address}\"\nplain = true"))
                    }
                    Listener::Tls(address) => {
                        (directory.join("nbd.sock"), format!("\nlisten = \"{address}\"\ntls = true"))
                    }
                };
                let keys = format!("memory = \"{}\"{listen}", backing.len());
                let configuration = self.configuration().within(self.space.as_deref());
                configuration.export(EXPORT, &socket, &keys).start(&self.binary()?, directory, place)
            }
            Exporter::Nbdkit => {
                let mut command = Command::new("nbdkit");
                command.args(["--foreground", "--exit-with-parent"]);
                at.told(&mut command, "--unix", "--ipaddr");
                command.arg("memory").arg(backing.len().to_string());
                place.spawn(&command, &directory.join("log"))
            }
            Exporter::QemuNbd(aio) => {
                let mut command = Command::new("qemu-nbd");
                command.args(["--persistent", "--shared=0", "--export-name", EXPORT]);
                at.told(&mut command, "--socket", "--bind");
                let (Backing::Memory { file, .. } | Backing::File { file, .. }) = backing;
                let node = format!("driver=file,filename={},{}", file.display(), aio.options());
                command.arg("--image-opts").arg(node);
                place.spawn(&command, &directory.join("log"))
            }
        }
    }

    /// Starts what the disk is exported by, and says where it listens.
    pub fn start_exporter(
        &self,
        exporter: Exporter,
        wire: Wire,
        backing: &Backing,
        directory: &Path,
        place: &Place,
    ) -> Result<(Listener, Served)> {
        std::fs::create_dir_all(directory)?;
        let listener = Listener::choose(wire, directory)?;
        let mut server = self.export(exporter, &listener, backing, directory, place)?;
        listener.wait(&mut server)?;
        Ok((listener, server))
    }

    fn import(
        &self,
        importer: Importer,
        from: &Listener,
        socket: &Path,
        directory: &Path,
        place: &Place,
    ) -> Result<Served> {
        match importer {
            Importer::Ioplane => {
                let keys = format!("queue_size = 256\nremote = \"{}\"{}", from.uri(), self.limit());
                let configuration = self.configuration().disk("bench", socket, &keys);
                configuration.start(&self.binary()?, directory, place)
            }
            Importer::Qsd => {
                let server = match from {
                    Listener::Unix(path) => format!("server.type=unix,server.path={}", path.display()),
                    Listener::Tcp(at) | Listener::Tls(at) => {
                        format!("server.type=inet,server.host={},server.port={}", at.ip(), at.port())
                    }
                };
                let mut command = Command::new("qemu-storage-daemon");
                command
                    .arg("--blockdev")
                    .arg(format!("driver=nbd,node-name=disk,export={EXPORT},{server}"))
                    .args(["--object", "iothread,id=io"])
                    .arg("--export")
                    .arg(format!(
                        "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={},writable=on,\
                         num-queues=1,iothread=io",
                        socket.display()
                    ));
                place.spawn(&command, &directory.join("log"))
            }
        }
    }
}

impl Backend for Contender {
    fn name(&self) -> &'static str {
        self.name
    }

    fn start(&self, backing: &Backing, socket: &Path, directory: &Path, place: &Place) -> Result<Served> {
        match self.way {
            Way::Local => {
                let keys = format!("queue_size = 256\nmemory = \"{}\"{}", backing.len(), self.limit());
                self.configuration().disk("bench", socket, &keys).start(&self.binary()?, directory, place)
            }
            Way::Remote(importer, wire, exporter) => {
                let of_exporter = directory.join("exporter");
                let (listener, server) = self.start_exporter(exporter, wire, backing, &of_exporter, place)?;
                Ok(self.import(importer, &listener, socket, directory, place)?.of(server))
            }
        }
    }

    fn describe(&self, _: &Backing) -> String {
        let core = format!("one {} core", self.mode.word());
        let limit = if self.limited { format!(", {LIMIT} requests per second") } else { String::new() };
        match self.way {
            Way::Local => format!("memory (memfd), {core}{limit}"),
            Way::Remote(importer, wire, exporter) => {
                let importer = match importer {
                    Importer::Ioplane => format!("ioplane, {core}"),
                    Importer::Qsd => "qemu-storage-daemon, one iothread".into(),
                };
                let wire = match wire {
                    Wire::Unix => "Unix socket",
                    Wire::Tcp => "TCP over loopback",
                    Wire::Tls => "TLS 1.3 over TCP over loopback",
                    Wire::Cable { tls: false } => "TCP over a veth pair",
                    Wire::Cable { tls: true } => "TLS 1.3 over TCP over a veth pair",
                };
                let exporter = match exporter {
                    Exporter::Ioplane => format!("ioplane, memory (memfd), {core}"),
                    Exporter::QemuNbd(aio) => format!("qemu-nbd, file on tmpfs, {}", aio.options()),
                    Exporter::Nbdkit => "nbdkit, memory".into(),
                };
                format!("{importer} <- {wire} <- {exporter}{limit}")
            }
        }
    }
}
