//! What hosts publish for each other: this daemon's session with the directory, and the directory itself where this daemon has it.
//!
//! ```text
//!   exports --every 2 s: all of them--> session task --DirectorySession--> the directory, here or elsewhere, or etcd
//!   API, opening of disks --Ask-------->  |  connects again by itself
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ioplane_api::report::{DeviceReport, DevicesReport, ExportReport, HostWord, ServedState, TakenReport};
use ioplane_api::size::Size;
use ioplane_api::spec::NbdUri;
use ioplane_identity::IdentityDirectory;
use ioplane_netbus::{
    DeviceRate, DeviceRecord, DirectoryAddress, DirectoryServer, DirectorySession, EtcdEndpoint, Forgotten,
    HostPresence, ListedDevice, NetbusError, Security, ServerSecurity, Taken,
};
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, oneshot};
use tokio::time::MissedTickBehavior;

use super::Daemon;
use crate::config::{DirectoryPlace, DirectorySpec};
use crate::listen;
use crate::refusal::Refusal;

/// Between two reports: a fifth of a lease.
const REPORTS: Duration = Duration::from_secs(2);
/// How long a daemon that ends waits for the directory.
const LEAVE: Duration = Duration::from_secs(1);
/// Questions that wait at a time.
const ASKS: usize = 64;
/// The kind of device that this daemon knows: disks, whose size is in bytes.
pub const DISK: &str = "disk";
/// The units of its rates.
const REQUESTS: &str = "requests";
const BYTES: &str = "bytes";

enum Ask {
    List(oneshot::Sender<Result<Listed, NetbusError>>),
    Forget(String, oneshot::Sender<Result<Forgotten, NetbusError>>),
    Leave(oneshot::Sender<()>),
}

/// What the directory has.
struct Listed {
    host: String,
    entries: Vec<ListedDevice>,
    taken: Vec<Taken>,
}

/// The daemon's hold on the directory.
#[derive(Debug)]
pub struct DirectoryClient {
    spec: Option<DirectorySpec>,
    identity: IdentityDirectory,
    /// Where this daemon keeps the directory, if it has it and nothing is said.
    usual_file: PathBuf,
    /// Tells daemons of one host from each other.
    daemon: String,
    asks: mpsc::Sender<Ask>,
    /// Until the task takes it.
    inbox: Mutex<Option<mpsc::Receiver<Ask>>>,
}

impl DirectoryClient {
    /// `run_dir` is what tells this daemon from others of this host; `state_dir` has what outlives the host's run.
    pub fn new(
        spec: Option<DirectorySpec>,
        identity: IdentityDirectory,
        run_dir: &Path,
        state_dir: &Path,
    ) -> DirectoryClient {
        let (asks, inbox) = mpsc::channel(ASKS);
        let digest = Sha256::digest(run_dir.as_os_str().as_encoded_bytes());
        let daemon = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let usual_file = state_dir.join("directory.redb");
        DirectoryClient { spec, identity, usual_file, daemon, asks, inbox: Mutex::new(Some(inbox)) }
    }

    /// Where the identity of this host is.
    pub fn identity(&self) -> &IdentityDirectory {
        &self.identity
    }

    /// What all hosts publish.
    pub async fn list(&self) -> Result<DevicesReport, Refusal> {
        let spec = self.spec()?;
        let listed = self.ask(Ask::List).await?;
        Ok(DevicesReport {
            directory: place(spec),
            host: listed.host,
            taken: listed.taken.into_iter().map(|Taken { name, by }| TakenReport { name, by }).collect(),
            devices: listed.entries.into_iter().map(report).collect(),
        })
    }

    /// Frees the name of a device whose host does not come back.
    pub async fn forget(&self, name: &str) -> Result<(), Refusal> {
        self.spec()?;
        match self.ask(|answer| Ask::Forget(name.to_owned(), answer)).await? {
            Forgotten::Done => Ok(()),
            Forgotten::Unknown => Err(unknown(name)),
            Forgotten::Present(host) => Err(Refusal::conflict(
                format!("{host} publishes {name} and is there"),
                "take it away there: `ioplane publish remove`",
            )),
        }
    }

    /// Where a disk is, by its name.
    pub async fn locate(&self, name: &str) -> Result<NbdUri, Refusal> {
        let spec = self.spec()?;
        let listed = self.ask(Ask::List).await?;
        let entry = listed.entries.into_iter().find(|entry| entry.device.name == name);
        let ListedDevice { host, device, .. } = entry.ok_or_else(|| unknown(name).at("remote"))?;
        if device.kind != DISK {
            let error = format!("{name} is a {}, not a disk", device.kind);
            return Err(Refusal::conflict(error, "see `ioplane devices`").at("remote"));
        }
        checked(&device.location, &host, spec.plain.is_none()).map_err(|why| {
            let error = format!("{name} is said to be at {}: {why}", device.location);
            let remedy =
                format!("see `ioplane publish show {name}` on {host}; or write its URI in place of its name");
            Refusal::failed(error, remedy).at("remote")
        })
    }

    /// Says that this daemon ends.
    pub async fn leave(&self) {
        if self.spec.is_none() {
            return;
        }
        let (answer, left) = oneshot::channel();
        let leave = async {
            if self.asks.send(Ask::Leave(answer)).await.is_ok() {
                let _ = left.await;
            }
        };
        let _ = tokio::time::timeout(LEAVE, leave).await;
    }

    fn spec(&self) -> Result<&DirectorySpec, Refusal> {
        self.spec.as_ref().ok_or_else(|| {
            Refusal::conflict(
                "this host has no directory of devices",
                "write [directory] with listen, at or etcd into the configuration, and restart the daemon",
            )
        })
    }

    async fn ask<T>(
        &self,
        ask: impl FnOnce(oneshot::Sender<Result<T, NetbusError>>) -> Ask,
    ) -> Result<T, Refusal> {
        let gone = || Refusal::busy("the daemon is ending", "try again");
        let (answer, answered) = oneshot::channel();
        self.asks.send(ask(answer)).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?.map_err(|error| {
            let etcd = self.spec.as_ref().is_some_and(|spec| matches!(spec.place, DirectoryPlace::Etcd(_)));
            let remedy = match &error {
                NetbusError::Identity(_) => "make or import one: ioplane identity",
                NetbusError::Tls(_) => "compare both hosts: ioplane identity show",
                NetbusError::Busy(_) => "give one of both daemons no [directory], or another identity",
                NetbusError::EtcdValue { .. } => "look at it with `etcdctl get KEY`; what no host wrote can be deleted with `etcdctl del KEY`",
                _ if etcd => "do most members of etcd run? `etcdctl endpoint health` says so",
                _ => "does the daemon of that host run, with `listen` under [directory]?",
            };
            let at = self.spec.as_ref().map(place).unwrap_or_default();
            Refusal::failed(format!("the directory at {at}: {error}"), remedy)
        })
    }
}

fn unknown(name: &str) -> Refusal {
    Refusal::missing(format!("no host publishes {name}"), "see `ioplane devices`")
}

/// Where the directory is, for people.
fn place(spec: &DirectorySpec) -> String {
    match &spec.place {
        DirectoryPlace::Own { listen, .. } => format!("{listen} (this host)"),
        DirectoryPlace::At(address) => address.to_string(),
        DirectoryPlace::Etcd(members) => {
            members.iter().map(EtcdEndpoint::to_string).collect::<Vec<_>>().join(", ")
        }
    }
}

/// A location that may be followed. Whoever has the directory must not lead this host to sockets of its own, to another host than the one that
/// publishes the device, or from TLS to plain text.
fn checked(location: &str, host: &str, tls: bool) -> Result<NbdUri, String> {
    let uri: NbdUri = location.parse().map_err(|_| "that is no NBD URI".to_owned())?;
    // The certificate is what counts, at whichever of its places the server is.
    let export = uri.export();
    let named = |rest: &str| rest.split_once("?tls-hostname=").is_some_and(|(_, name)| name == host);
    match (export.strip_prefix("nbds://"), export.strip_prefix("nbd://"), tls) {
        (Some(rest), _, _) if named(rest) => Ok(uri),
        (Some(_), _, _) => Err(format!("that is not {host}")),
        (None, Some(_), true) => Err("that is in plain text, and the directory is asked with TLS".to_owned()),
        (None, Some(_), false) => Ok(uri),
        (None, None, _) => Err("that is not on another machine".to_owned()),
    }
}

fn report(entry: ListedDevice) -> DeviceReport {
    let ListedDevice { host, seen, device } = entry;
    let (state, lost_ms) = match seen {
        HostPresence::Now => (HostWord::Present, None),
        HostPresence::Lost(ms) => (HostWord::Lost, Some(ms)),
        HostPresence::Gone => (HostWord::Lost, None),
        HostPresence::Never => (HostWord::Unseen, None),
    };
    let DeviceRecord { name, kind, size, location, read_only, users, holder, trouble, rates } = device;
    let rate = |unit: &str| rates.iter().find(|rate| rate.unit == unit);
    let (requests, bytes) = (rate(REQUESTS), rate(BYTES));
    DeviceReport {
        name,
        kind,
        size,
        read_only,
        host,
        state,
        lost_ms,
        location,
        users,
        holder,
        trouble,
        iops_limit: requests.map(|rate| rate.capacity),
        reserved_iops: requests.map_or(0, |rate| rate.reserved),
        bandwidth_limit: bytes.map(|rate| Size(rate.capacity)),
        reserved_bandwidth: Size(bytes.map_or(0, |rate| rate.reserved)),
    }
}

/// Where others reach an export: at one of `addresses` if it listens at every address of this host.
fn location(export: &ExportReport, host: &str, addresses: &[IpAddr]) -> Option<String> {
    let listen: SocketAddr = export.listen.as_ref()?.parse().ok()?;
    let own = [listen.ip()];
    let ips = if listen.ip().is_unspecified() { addresses } else { &own };
    let places = ips.iter().map(|ip| SocketAddr::new(*ip, listen.port()).to_string());
    let uri = NbdUri::of_export(&export.name, places, export.tls.then_some(host))?;
    uri.ok().map(|uri| uri.to_string())
}

/// What of an export other hosts are told; nothing if they cannot reach it.
fn device(export: ExportReport, host: &str, addresses: &[IpAddr]) -> Option<DeviceRecord> {
    let location = location(&export, host, addresses)?;
    let served = export.state == ServedState::Served;
    // What is reserved is known, like the size, once it is served.
    let rate = |unit: &str, capacity: Option<u64>, reserved| {
        capacity.filter(|_| served).map(|capacity| DeviceRate { unit: unit.to_owned(), capacity, reserved })
    };
    let requests = rate(REQUESTS, export.iops_limit, export.reserved_iops);
    let bytes = rate(BYTES, export.bandwidth_limit.map(|size| size.0), export.reserved_bandwidth.0);
    let printable = |text: String| text.chars().filter(|c| !c.is_control()).take(150).collect();
    Some(DeviceRecord {
        name: export.name,
        kind: DISK.to_owned(),
        size: served.then_some(export.size),
        location,
        read_only: export.read_only,
        users: u32::try_from(export.connections).unwrap_or(u32::MAX),
        holder: export.claim.filter(|claim| claim.held).map(|claim| printable(claim.holder)),
        trouble: export.error.or(export.trouble).map(printable),
        rates: requests.into_iter().chain(bytes).collect(),
    })
}

/// The task's side.
struct SessionTask {
    daemon: Arc<Daemon>,
    spec: DirectorySpec,
    server: Option<DirectoryServer>,
    session: Option<DirectorySession>,
    taken: Vec<Taken>,
    /// What was logged last, so that it is logged once.
    logged: String,
}

impl Daemon {
    /// This daemon's hold on the directory.
    pub(super) fn devices(&self) -> &Arc<DirectoryClient> {
        self.disks.context().devices()
    }

    /// Serves the directory if this daemon has it, and reports to it, for as long as the daemon lives.
    pub(super) async fn run_devices(self: Arc<Self>) {
        let devices = self.devices().clone();
        let inbox = devices.inbox.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (Some(spec), Some(mut inbox)) = (devices.spec.clone(), inbox) else { return };
        let mut task = SessionTask {
            daemon: self,
            spec,
            server: None,
            session: None,
            taken: Vec::new(),
            logged: String::new(),
        };
        let mut ticks = tokio::time::interval(REPORTS);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => {
                    let reported = task.report().await;
                    task.log(reported.err());
                }
                ask = inbox.recv() => match ask {
                    Some(Ask::List(answer)) => {
                        let _ = answer.send(task.list().await);
                    }
                    Some(Ask::Forget(name, answer)) => {
                        let _ = answer.send(task.forget(&name).await);
                    }
                    Some(Ask::Leave(answer)) => {
                        if let Some(session) = task.session.take() {
                            let _ = session.leave().await;
                        }
                        let _ = answer.send(());
                        return;
                    }
                    None => return,
                },
            }
        }
    }
}

impl SessionTask {
    /// One that is connected, and that has said all that this host publishes.
    async fn session(&mut self) -> Result<&mut DirectorySession, NetbusError> {
        if self.session.is_none() {
            let devices = self.daemon.devices().clone();
            self.session = Some(self.connect(&devices).await?);
            self.say_all().await?;
        }
        self.session.as_mut().ok_or(NetbusError::Closed)
    }

    /// Connects, whoever has the directory. Starts it if it is here and not there yet.
    async fn connect(&mut self, devices: &DirectoryClient) -> Result<DirectorySession, NetbusError> {
        let security = match &self.spec.plain {
            Some(host) => Security::Plain { host: host.clone() },
            None => Security::Tls(devices.identity.clone()),
        };
        match &self.spec.place {
            DirectoryPlace::At(address) => {
                DirectorySession::connect(address, &security, &devices.daemon).await
            }
            DirectoryPlace::Etcd(members) => {
                DirectorySession::connect_etcd(members, &security, &devices.daemon).await
            }
            DirectoryPlace::Own { listen, file } => {
                let (listen, file) = (*listen, file.clone().unwrap_or_else(|| devices.usual_file.clone()));
                let address = self.own(listen, file, &devices.identity).await?;
                DirectorySession::connect(&address, &security, &devices.daemon).await
            }
        }
    }

    /// Where the directory of this daemon is. Starts it if it is not there yet.
    async fn own(
        &mut self,
        listen: SocketAddr,
        file: PathBuf,
        identity: &IdentityDirectory,
    ) -> Result<DirectoryAddress, NetbusError> {
        let identity = identity.clone();
        let tls = self.spec.plain.is_none();
        let started = self.server.is_some();
        // Both read files. What serves another daemon yet, as in an upgrade, is tried again.
        let runtime = tokio::runtime::Handle::current();
        let opened = tokio::task::spawn_blocking(move || {
            let own = if tls { Some(identity.load()?.name().to_string()) } else { None };
            let server = match started {
                true => None,
                false => Some(serve(listen, &file, tls.then_some(identity), &runtime)?),
            };
            Ok::<_, NetbusError>((own, server))
        });
        let gone = |error: tokio::task::JoinError| NetbusError::Os {
            doing: "starting the directory",
            source: error.into(),
        };
        let (own, server) = opened.await.map_err(gone)??;
        if let Some(server) = server {
            tracing::info!(address = %server.address(), "serving the directory of devices");
            self.server = Some(server);
        }
        let ip = match listen.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
            ip => ip,
        };
        Ok(DirectoryAddress { host: ip.to_string(), port: listen.port(), tls_hostname: own })
    }

    /// Says all that this host publishes.
    async fn say_all(&mut self) -> Result<(), NetbusError> {
        let exports = self.daemon.exports.report().await;
        let Some(session) = &mut self.session else { return Err(NetbusError::Closed) };
        let local = [session.local()];
        let addresses = if self.spec.addresses.is_empty() { &local } else { &self.spec.addresses[..] };
        let host = session.host().to_owned();
        let devices: Vec<DeviceRecord> =
            exports.into_iter().filter_map(|export| device(export, &host, addresses)).collect();
        let taken = session.report(devices).await?;
        for Taken { name, by } in taken.iter().filter(|one| !self.taken.contains(one)) {
            tracing::warn!(name, by, "not in the directory: another host publishes that name");
        }
        self.taken = taken;
        Ok(())
    }

    async fn report(&mut self) -> Result<(), NetbusError> {
        let reported = match self.session.is_some() {
            true => self.say_all().await,
            false => self.session().await.map(drop),
        };
        self.keep(reported)
    }

    async fn list(&mut self) -> Result<Listed, NetbusError> {
        let asked = async {
            let session = self.current().await?;
            let entries = session.list().await?;
            Ok((session.host().to_owned(), entries))
        };
        let asked = asked.await;
        let (host, entries) = self.keep(asked)?;
        Ok(Listed { host, entries, taken: self.taken.clone() })
    }

    async fn forget(&mut self, name: &str) -> Result<Forgotten, NetbusError> {
        let asked = async { self.current().await?.forget(name).await };
        let asked = asked.await;
        self.keep(asked)
    }

    /// A session that is there, and that has just said what this host publishes: one that was used before may have ended since.
    async fn current(&mut self) -> Result<&mut DirectorySession, NetbusError> {
        if self.session.is_some() {
            match self.say_all().await {
                Err(NetbusError::Closed | NetbusError::Lost) => self.session = None,
                said => said?,
            }
        }
        self.session().await
    }

    /// After an error the session is of no use, unless the directory has only refused something.
    fn keep<T>(&mut self, outcome: Result<T, NetbusError>) -> Result<T, NetbusError> {
        if outcome.as_ref().is_err_and(|error| !matches!(error, NetbusError::Refused(_))) {
            self.session = None;
        }
        outcome
    }

    fn log(&mut self, error: Option<NetbusError>) {
        let text = error.map(|error| error.to_string()).unwrap_or_default();
        if text != self.logged {
            match text.is_empty() {
                true => tracing::info!(directory = place(&self.spec), "reporting to the directory"),
                false => tracing::warn!(directory = place(&self.spec), error = text, "the directory"),
            }
            self.logged = text;
        }
    }
}

/// Serves the directory. Blocks.
fn serve(
    listen: SocketAddr,
    file: &Path,
    identity: Option<IdentityDirectory>,
    runtime: &tokio::runtime::Handle,
) -> Result<DirectoryServer, NetbusError> {
    let failed = |doing| move |source| NetbusError::Os { doing, source };
    if let Some(parent) = file.parent() {
        std::fs::create_dir_all(parent).map_err(failed("making the place of its file"))?;
    }
    let listener = listen::tcp(listen).map_err(failed("listening"))?;
    let security = identity.map_or(ServerSecurity::Plain, ServerSecurity::Tls);
    let _entered = runtime.enter();
    DirectoryServer::start(listener, file, security)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_cannot_lead_anywhere() {
        for (location, tls) in [
            ("nbds://10.0.0.1:10809/data?tls-hostname=host-a", true),
            ("nbds://10.0.0.1:10809/data?tls-hostname=host-a", false),
            ("nbds://10.0.0.1/data?tls-hostname=host-a&also=10.1.0.1:10809", true),
            ("nbds://10.0.0.1/data?also=10.1.0.1&tls-hostname=host-a&also=[::1]", true),
            ("nbd://10.0.0.1:10809/data", false),
        ] {
            assert!(checked(location, "host-a", tls).is_ok(), "{location}");
        }
        for (location, tls) in [
            ("nbds://10.0.0.1/data", true),
            ("nbds://10.0.0.1/data?also=10.1.0.1", true),
            ("nbds://10.0.0.1/data?also=10.1.0.1?tls-hostname=host-a", true),
            ("nbds://10.0.0.1/data?tls-hostname=host-b", true),
            ("nbds://10.0.0.1/data?tls-hostname=host-a&tls-hostname=host-b", true),
            ("nbd://10.0.0.1/data", true),
            ("nbd://10.0.0.1/data?tls-hostname=host-a", true),
            ("nbd+unix:///data?socket=/run/secret.sock", false),
            ("data", false),
            ("/dev/sda", false),
        ] {
            assert!(checked(location, "host-a", tls).is_err(), "{location}");
        }
    }
}
