//! A directory that other hosts ask.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ioplane_identity::IdentityDirectory;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;

use crate::device::ListedDevice;
use crate::directory::{Directory, Forgotten, NameChange, Taken};
use crate::error::NetbusError;
use crate::limits::{LEASE, MOST_HOSTS};
use crate::names::{is_host, is_name, shown};
use crate::store::DirectoryStore;
use crate::stream::{Stream, accept};
use crate::wire::{OLDEST, PART, RATES, Reply, Request, VERSION, receive, send};

/// How long a host may take to say who it is, and for each message once it has begun.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a host may say nothing: several leases, since a host that is slow would only connect again.
const SILENCE: Duration = Duration::from_secs(3 * LEASE.as_secs());
/// Connections at a time whose hosts are not known yet.
const HANDSHAKES: usize = 64;
/// After an error of `accept`, which most often is a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Whom a directory lets in.
#[derive(Debug, Clone)]
pub enum ServerSecurity {
    /// Anybody, under the name that it gives itself.
    Plain,
    /// Hosts with a certificate of this host's authority, under the name in it.
    Tls(IdentityDirectory),
}

/// A directory that is served. Dropped, it ends: its sessions are closed.
#[derive(Debug)]
pub struct DirectoryServer {
    shared: Arc<Shared>,
    address: SocketAddr,
    task: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    state: Arc<tokio::sync::Mutex<State>>,
    store: Arc<DirectoryStore>,
    security: ServerSecurity,
    epoch: Instant,
    /// Who has a session: by host.
    sessions: Mutex<BTreeMap<String, SessionPlace>>,
    /// Ends all sessions.
    end: Notify,
}

#[derive(Debug)]
struct State {
    directory: Directory,
    /// A change could not be made durable and what is could not be read: nobody is answered any more.
    broken: Option<String>,
}

/// The session of a host.
#[derive(Debug, Clone)]
struct SessionPlace {
    daemon: String,
    /// Tells it that another one has its place.
    replaced: Arc<Notify>,
}

impl DirectoryServer {
    /// Serves the directory in the file `path`. Must be called in a runtime; blocks while the file is read.
    ///
    /// # Errors
    /// The file cannot be used, or the listener cannot.
    pub fn start(
        listener: std::net::TcpListener,
        path: &Path,
        security: ServerSecurity,
    ) -> Result<DirectoryServer, NetbusError> {
        let failed = NetbusError::stream("listening");
        listener.set_nonblocking(true).map_err(&failed)?;
        let listener = TcpListener::from_std(listener).map_err(&failed)?;
        let address = listener.local_addr().map_err(&failed)?;
        let store = DirectoryStore::open(path)?;
        let directory = Directory::new(store.load()?);
        let shared = Arc::new(Shared {
            state: Arc::new(tokio::sync::Mutex::new(State { directory, broken: None })),
            store: Arc::new(store),
            security,
            epoch: Instant::now(),
            sessions: Mutex::default(),
            end: Notify::new(),
        });
        let task = tokio::spawn(listen(listener, shared.clone())).abort_handle();
        Ok(DirectoryServer { shared, address, task })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for DirectoryServer {
    fn drop(&mut self) {
        self.task.abort();
        self.shared.end.notify_waiters();
    }
}

async fn listen(listener: TcpListener, shared: Arc<Shared>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                // Who finds no place is closed at once, and comes again.
                let Ok(place) = handshakes.clone().try_acquire_owned() else { continue };
                let shared = shared.clone();
                tokio::spawn(async move {
                    let end = shared.end.notified();
                    tokio::select! {
                        served = serve(stream, &shared, place) => match served {
                            Ok(()) => {}
                            Err(error) => tracing::warn!(%peer, %error, "a session with the directory ended"),
                        },
                        () = end => {}
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a host could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// From the first byte of one connection to its end.
async fn serve(
    stream: TcpStream,
    shared: &Arc<Shared>,
    handshake: tokio::sync::OwnedSemaphorePermit,
) -> Result<(), NetbusError> {
    let identity = match &shared.security {
        ServerSecurity::Plain => None,
        ServerSecurity::Tls(identity) => Some(identity),
    };
    let accepted = tokio::time::timeout(PATIENCE, accept(stream, identity)).await;
    let (mut stream, known) = accepted.map_err(|_| NetbusError::Slow(PATIENCE))??;
    let Some(hello) = receive(&mut stream, PATIENCE, PATIENCE).await? else { return Ok(()) };
    let entered = enter(hello, known, shared);
    let Entered { host, version, replaced } = match entered {
        Ok(entered) => entered,
        Err(error) => {
            send(&mut stream, &Reply::Refused { why: error.to_string() }, PATIENCE).await?;
            return Err(error);
        }
    };
    drop(handshake);
    let welcome = Reply::Welcome { version, host: host.clone() };
    let outcome = async {
        send(&mut stream, &welcome, PATIENCE).await?;
        tokio::select! {
            ended = answer_all(&mut stream, (&host, version), shared) => ended,
            () = replaced.notified() => Ok(()),
        }
    }
    .await;
    let mut sessions = shared.sessions.lock().unwrap_or_else(PoisonError::into_inner);
    if sessions.get(&host).is_some_and(|place| Arc::ptr_eq(&place.replaced, &replaced)) {
        sessions.remove(&host);
    }
    outcome
}

/// A host that has a session.
struct Entered {
    host: String,
    /// What is spoken with it.
    version: u32,
    /// Tells it that another one has its place.
    replaced: Arc<Notify>,
}

/// Takes the place of a host's session.
fn enter(hello: Request, known: Option<String>, shared: &Shared) -> Result<Entered, NetbusError> {
    let Request::Hello { version, host, daemon } = hello else {
        return Err(NetbusError::Malformed("it does not say who it is first".to_owned()));
    };
    if version < OLDEST {
        return Err(NetbusError::Version(version));
    }
    let host = known.unwrap_or(host);
    if !is_host(&host) {
        return Err(NetbusError::Host(shown(&host)));
    }
    if !is_name(&daemon) {
        return Err(NetbusError::Malformed(format!("{:?} is no name of a daemon", shown(&daemon))));
    }
    let mut sessions = shared.sessions.lock().unwrap_or_else(PoisonError::into_inner);
    match sessions.get(&host) {
        // It has been started again, or has lost its connection before this side has noticed.
        Some(old) if old.daemon == daemon => old.replaced.notify_one(),
        // Each would withdraw what the other publishes.
        Some(_) => return Err(NetbusError::Busy(host)),
        None if sessions.len() >= MOST_HOSTS => return Err(NetbusError::Hosts),
        None => {}
    }
    let replaced = Arc::new(Notify::new());
    sessions.insert(host.clone(), SessionPlace { daemon, replaced: replaced.clone() });
    Ok(Entered { host, version: version.min(VERSION), replaced })
}

async fn answer_all(
    stream: &mut Box<dyn Stream>,
    (host, version): (&str, u32),
    shared: &Arc<Shared>,
) -> Result<(), NetbusError> {
    while let Some(request) = receive(stream, SILENCE, PATIENCE).await? {
        let reply = match request {
            Request::Hello { .. } => Err(NetbusError::Malformed("it says who it is again".to_owned())),
            Request::Report { devices } => shared
                .change(|directory, now| directory.report(host, devices, now))
                .await
                .map(|taken: Vec<Taken>| Reply::Reported { taken }),
            Request::List => match shared.list().await {
                Ok(mut entries) => {
                    if version < RATES {
                        entries.iter_mut().for_each(|entry| entry.device.rates.clear());
                    }
                    list(stream, entries).await?;
                    continue;
                }
                Err(error) => Err(error),
            },
            Request::Forget { name } => {
                let forget = |directory: &mut Directory, now| {
                    let (outcome, change) = directory.forget(&name, now);
                    Ok((outcome, change.into_iter().collect()))
                };
                shared.change(forget).await.map(|outcome: Forgotten| Reply::Forgotten { outcome })
            }
            Request::Leave => {
                shared.state.lock().await.directory.leave(host);
                Ok(Reply::Left)
            }
        };
        let reply = reply.unwrap_or_else(|error| {
            tracing::warn!(host, %error, "the directory refuses what a host asks for");
            Reply::Refused { why: error.to_string() }
        });
        send(stream, &reply, PATIENCE).await?;
    }
    Ok(())
}

async fn list(stream: &mut Box<dyn Stream>, mut entries: Vec<ListedDevice>) -> Result<(), NetbusError> {
    loop {
        let rest = entries.split_off(entries.len().min(PART));
        let more = !rest.is_empty();
        send(stream, &Reply::Listed { entries, more }, PATIENCE).await?;
        if !more {
            return Ok(());
        }
        entries = rest;
    }
}

impl Shared {
    async fn list(&self) -> Result<Vec<ListedDevice>, NetbusError> {
        let state = self.state.lock().await;
        state.usable()?;
        Ok(state.directory.list(self.epoch.elapsed()))
    }

    /// Changes the directory, and answers when that is durable. What could not be made durable has not happened. Runs to its end even if the
    /// session is dropped meanwhile.
    async fn change<T: Send + 'static>(
        self: &Arc<Self>,
        change: impl FnOnce(&mut Directory, Duration) -> Result<(T, Vec<NameChange>), NetbusError>,
    ) -> Result<T, NetbusError> {
        let mut state = self.state.clone().lock_owned().await;
        state.usable()?;
        let (answer, changes) = change(&mut state.directory, self.epoch.elapsed())?;
        if changes.is_empty() {
            return Ok(answer);
        }
        let store = self.store.clone();
        let durable = tokio::task::spawn_blocking(move || {
            let applied = store.apply(&changes);
            if applied.is_err() {
                match store.load() {
                    Ok(kept) => state.directory = Directory::new(kept),
                    Err(error) => state.broken = Some(error.to_string()),
                }
            }
            applied
        });
        let gone = |error: tokio::task::JoinError| NetbusError::Os {
            doing: "keeping a change",
            source: error.into(),
        };
        durable.await.map_err(gone)??;
        Ok(answer)
    }
}

impl State {
    fn usable(&self) -> Result<(), NetbusError> {
        match &self.broken {
            None => Ok(()),
            Some(why) => Err(NetbusError::Refused(format!("its file cannot be used any more: {why}"))),
        }
    }
}
