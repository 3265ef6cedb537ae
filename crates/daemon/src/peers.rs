//! The daemons of other hosts to which VMs move, as sockets of this one: what connects there is relayed over TLS, and nothing is looked at.
//!
//! ```text
//!   ioplane move vm --run_dir/move-N.sock, move-N.qmp--> relay --channel: api, monitor--> the daemon there
//! ```

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use ioplane_api::report::MovePeerReport;
use ioplane_api::request::MovePeerForm;
use ioplane_host::socket::{self, SocketPath};
use ioplane_identity::IdentityDirectory;
use ioplane_netbus::channel::{self, CHANNEL_PORT};
use ioplane_netbus::{DirectoryAddress, NetbusError};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::arrivals::{API, MONITOR};
use crate::refusal::Refusal;

/// Moves that have one at a time, and connections of one.
const MOST: usize = 64;
const CONNECTIONS: usize = 16;
/// For a client to hear why it is not connected.
const HEARS: Duration = Duration::from_secs(5);
/// After an error of `accept`.
const PAUSE: Duration = Duration::from_millis(100);

/// Those that there are, by VM.
pub struct Peers {
    identity: IdentityDirectory,
    run_dir: PathBuf,
    all: Mutex<BTreeMap<String, Peer>>,
}

/// One. Dropped, its sockets go; connections that are there stay until one of both sides closes them.
struct Peer {
    number: usize,
    address: DirectoryAddress,
    report: MovePeerReport,
    tasks: Vec<AbortHandle>,
    places: Vec<SocketPath>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
        self.places.iter().for_each(SocketPath::clear);
    }
}

/// Where a relay goes.
struct Way {
    vm: String,
    part: &'static str,
    address: DirectoryAddress,
    identity: IdentityDirectory,
    places: Semaphore,
}

/// Where the other daemon is.
fn address(form: MovePeerForm) -> Result<DirectoryAddress, Refusal> {
    let MovePeerForm { host, port, tls_hostname } = form;
    let wrong =
        |error: NetbusError| Refusal::invalid(error.to_string(), "give a name or an address").at("host");
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let number = bare.parse::<IpAddr>();
    if tls_hostname.is_none() && number.is_ok() {
        return Err(Refusal::invalid(
            format!("{host} is an address, and the other host is known by the name in its certificate"),
            "say that name as well: --tls-hostname HOST",
        )
        .at("tls_hostname"));
    }
    let text =
        if matches!(number, Ok(IpAddr::V6(_))) { format!("[{bare}]") } else { host.to_ascii_lowercase() };
    let address: DirectoryAddress = text.parse().map_err(wrong)?;
    Ok(DirectoryAddress { port: port.unwrap_or(CHANNEL_PORT), tls_hostname, ..address })
}

fn refusal(address: &DirectoryAddress, vm: &str, error: &NetbusError) -> Refusal {
    let text = format!("the daemon at {address}: {error}");
    match error {
        NetbusError::TurnedAway(_) => Refusal::conflict(
            text,
            format!("say there that it is expected: ioplane move expect {vm} --from THIS-HOST --qmp SOCKET"),
        ),
        NetbusError::OtherVersion { .. } => {
            Refusal::conflict(text, "use the same version of ioplane on both hosts")
        }
        NetbusError::Identity(_) => Refusal::conflict(
            text,
            "give this host an identity (`ioplane identity join`), or reach the other one by sockets: --there SOCKET --qmp-there SOCKET",
        ),
        NetbusError::Tls(_) => {
            Refusal::conflict(text, "see docs/guide/tls.md, and the log of the daemon there")
        }
        _ => Refusal::busy(
            text,
            format!(
                "it listens there only while a VM is expected: ioplane move expect {vm} there; or see whether the port can be reached"
            ),
        ),
    }
}

impl Peers {
    /// None yet.
    pub fn new(identity: IdentityDirectory, run_dir: &Path) -> Peers {
        Peers { identity, run_dir: run_dir.to_owned(), all: Mutex::default() }
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Peer>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reaches the other daemon once, then makes it two sockets, unless there are such.
    pub async fn put(&self, vm: &str, form: MovePeerForm) -> Result<MovePeerReport, Refusal> {
        let address = address(form)?;
        let opened = channel::open(&address, &self.identity, vm, API).await;
        opened.map_err(|error| refusal(&address, vm, &error))?;
        let mut all = self.all();
        if let Some(known) = all.get(vm).filter(|known| known.address == address) {
            return Ok(known.report.clone());
        }
        all.remove(vm);
        let taken = |number: &usize| all.values().any(|peer| peer.number == *number);
        let Some(number) = (0..MOST).find(|number| !taken(number)) else {
            return Err(Refusal::conflict(format!("{MOST} VMs are on their way"), "wait for some of them"));
        };
        let report = MovePeerReport {
            there: self.run_dir.join(format!("move-{number}.sock")),
            qmp_there: self.run_dir.join(format!("move-{number}.qmp")),
        };
        let mut peer = Peer {
            number,
            address: address.clone(),
            report: report.clone(),
            tasks: Vec::new(),
            places: Vec::new(),
        };
        for (path, part) in [(&report.there, API), (&report.qmp_there, MONITOR)] {
            let listener = socket::bind(path).and_then(UnixListener::from_std).map_err(|error| {
                Refusal::failed(
                    format!("the socket {}: {error}", path.display()),
                    "see the log of the daemon",
                )
            })?;
            peer.places.push(SocketPath::of(path));
            let way = Way {
                vm: vm.to_owned(),
                part,
                address: address.clone(),
                identity: self.identity.clone(),
                places: Semaphore::new(CONNECTIONS),
            };
            peer.tasks.push(tokio::spawn(listen(listener, Arc::new(way))).abort_handle());
        }
        all.insert(vm.to_owned(), peer);
        Ok(report)
    }

    /// Takes them away. Says whether there were any.
    pub fn remove(&self, vm: &str) -> bool {
        self.all().remove(vm).is_some()
    }

    /// All of them.
    pub fn clear(&self) {
        self.all().clear();
    }
}

async fn listen(listener: UnixListener, way: Arc<Way>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let way = way.clone();
                tokio::spawn(async move { way.relay(stream).await });
            }
            Err(error) => {
                tracing::warn!(%error, "a client of a move could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

impl Way {
    /// One connection of this host, to its end.
    async fn relay(&self, mut stream: UnixStream) {
        let Ok(_place) = self.places.try_acquire() else { return };
        let Way { vm, part, address, identity, .. } = self;
        match channel::open(address, identity, vm, part).await {
            Ok(mut there) => {
                if let Err(error) = tokio::io::copy_bidirectional(&mut stream, &mut there).await {
                    tracing::warn!(vm, part, %address, %error, "a connection with the host to which a VM moves is lost");
                }
            }
            Err(error) => {
                tracing::warn!(vm, part, %address, %error, "the host to which a VM moves is not reached");
                let refused = refusal(address, vm, &error);
                let told = async {
                    match *part {
                        MONITOR => tell_client_of_qmp(stream, &refused).await,
                        _ => tell_client_of_http(stream, refused).await,
                    }
                };
                // It may be gone.
                let _ = tokio::time::timeout(HEARS, told).await;
            }
        }
    }
}

async fn tell_client_of_http(stream: UnixStream, refused: Refusal) {
    let router = Router::new().fallback(async move || refused.clone());
    let mut http = http1::Builder::new();
    let _ =
        http.keep_alive(false).serve_connection(TokioIo::new(stream), TowerToHyperService::new(router)).await;
}

async fn tell_client_of_qmp(stream: UnixStream, refused: &Refusal) {
    let mut stream = BufReader::new(stream);
    let told = async {
        stream.write_all(b"{\"QMP\": {}}\n").await?;
        let mut line = Vec::new();
        (&mut stream).take(4096).read_until(b'\n', &mut line).await?;
        let error = json!({ "error": { "class": "GenericError", "desc": refused.error } });
        stream.write_all(format!("{error}\n").as_bytes()).await?;
        stream.shutdown().await
    };
    let _: std::io::Result<()> = told.await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(host: &str, tls_hostname: Option<&str>) -> MovePeerForm {
        MovePeerForm { host: host.to_owned(), port: None, tls_hostname: tls_hostname.map(str::to_owned) }
    }

    #[test]
    fn a_host_is_known_by_the_name_in_its_certificate() {
        let at = |host: &str, name| address(form(host, name)).map(|address| address.to_string());
        assert_eq!(at("Host-C", None).unwrap(), "host-c:10806");
        assert_eq!(at("10.0.0.3", Some("host-c")).unwrap(), "10.0.0.3:10806");
        assert_eq!(at("fd00::3", Some("host-c")).unwrap(), "[fd00::3]:10806");
        assert!(at("10.0.0.3", None).is_err() && at("[fd00::3]", None).is_err());
        for bad in ["", "a b", "host-c:1:2", "/run/x", "[x]"] {
            assert!(at(bad, Some("host-c")).is_err(), "{bad}");
        }
    }
}
