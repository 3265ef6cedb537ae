//! VMs that other hosts may move here: who, which one, until when, and what of this daemon they reach meanwhile
//! (docs/decisions/0083-moving-over-tls.md).
//!
//! ```text
//!   the other host --TLS--> listener --ChannelRequest: host, VM, part--> ExpectedVm
//!                                                                          |-- api      steps of the functions that the VM's QEMU here uses
//!                                                                          `-- monitor  the commands of IncomingCommand, to that QEMU
//! ```
//!
//! Nothing listens while no VM is expected.

mod api;
mod monitor;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ioplane_api::refusal::Code;
use ioplane_api::report::{ArrivalWord, ExpectedReport};
use ioplane_api::request::ExpectForm;
use ioplane_identity::{HostName, IdentityDirectory};
use ioplane_netbus::NetbusError;
use ioplane_netbus::channel::{CHANNEL_PORT, ChannelRequest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::Daemon;
use crate::functions::are_held;
use crate::listen;
use crate::refusal::Refusal;

/// The parts of a channel.
pub const API: &str = "api";
pub const MONITOR: &str = "monitor";
/// VMs that are expected at a time, and connections about one.
const MOST: usize = 64;
const CONNECTIONS: usize = 8;
/// Connections at a time of which it is not known what they are about.
const HANDSHAKES: usize = 64;
/// After an error of `accept`, which most often is a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// For how long a VM is expected, if nobody says; and at most.
const USUAL: u64 = 3600;
const LONGEST: u64 = 10 * 24 * 3600;
/// Of a move that has begun: how long it may take, and how long it may be brought to its end after its monitor connection was lost.
const MOVE: Duration = Duration::from_secs(24 * 3600);
const RECOVERY: Duration = Duration::from_secs(3600);
/// To take back what functions have sent in advance, [`PAUSE`] apart, while they do something else.
const TRIES: u32 = 50;

/// What is expected, and where it is listened.
pub struct Arrivals {
    identity: IdentityDirectory,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    expected: BTreeMap<String, Arc<ExpectedVm>>,
    listeners: BTreeMap<SocketAddr, AbortHandle>,
}

/// One VM that is expected.
pub struct ExpectedVm {
    vm: String,
    from: HostName,
    qmp: PathBuf,
    /// Its QEMU is started only when another program migrates it.
    libvirt: bool,
    listen: SocketAddr,
    progress: Mutex<Progress>,
    /// When it ends has changed.
    moved: Notify,
    /// It has ended.
    ended: watch::Sender<bool>,
    places: Arc<Semaphore>,
    /// Whoever speaks with the monitor, which serves one client at a time.
    monitor: Arc<tokio::sync::Mutex<()>>,
    /// Functions that may have sent messages in advance for it.
    ahead: Mutex<BTreeSet<String>>,
}

/// How far it is.
#[derive(Debug, Clone, Copy)]
struct Progress {
    state: ArrivalWord,
    /// The process whose monitor it is, and whose functions they are therefore. `None`: there is none yet.
    pid: Option<u32>,
    /// Until when it may begin.
    valid: Instant,
    /// Until when it goes on, if it has begun.
    grace: Option<Instant>,
}

impl ExpectedVm {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ahead(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When it ends.
    fn until(&self) -> Instant {
        let Progress { valid, grace, .. } = *self.progress();
        grace.map_or(valid, |grace| grace.max(valid))
    }

    fn state(&self) -> ArrivalWord {
        self.progress().state
    }

    /// The process of its QEMU, if that is there.
    fn pid(&self) -> Option<u32> {
        self.progress().pid
    }

    /// Nobody serves its monitor.
    fn is_absent(&self) {
        self.progress().pid = None;
    }

    /// The other host does what changes something: a deadline does not break that off.
    fn begin(&self) {
        let mut progress = self.progress();
        if progress.state == ArrivalWord::Expected {
            progress.state = ArrivalWord::UnderWay;
            progress.grace = Some(Instant::now() + MOVE);
            tracing::info!(vm = self.vm, from = %self.from, "its move here has begun");
        }
        drop(progress);
        self.moved.notify_one();
    }

    /// The guest runs: it is this host's.
    fn arrived(&self) {
        let mut progress = self.progress();
        if progress.state != ArrivalWord::Arrived {
            progress.state = ArrivalWord::Arrived;
            tracing::info!(vm = self.vm, from = %self.from, "it has arrived");
        }
    }

    /// What its monitor said when it was connected to.
    fn seen(&self, seen: &monitor::SeenVm) {
        let mut progress = self.progress();
        progress.pid = Some(seen.pid);
        match seen.state.as_str() {
            // Whoever drives the migration may have said that it is to run: it does not while its vCPUs are held.
            "running" if !are_held(seen.pid) => progress.state = ArrivalWord::Arrived,
            // One that was started again, for another try.
            "inmigrate" => (progress.state, progress.grace) = (ArrivalWord::Expected, None),
            _ if progress.state == ArrivalWord::Expected => {
                (progress.state, progress.grace) = (ArrivalWord::UnderWay, Some(Instant::now() + RECOVERY));
            }
            _ => {}
        }
        drop(progress);
        self.moved.notify_one();
    }

    /// The other host's connection to the monitor is gone.
    fn left(&self) {
        let mut progress = self.progress();
        if progress.state != ArrivalWord::Expected {
            progress.grace = Some(Instant::now() + RECOVERY);
        }
        drop(progress);
        self.moved.notify_one();
    }

    fn report(&self) -> ExpectedReport {
        let Progress { state, pid, .. } = *self.progress();
        let open = CONNECTIONS - self.places.available_permits().min(CONNECTIONS);
        ExpectedReport {
            vm: self.vm.clone(),
            from: self.from.to_string(),
            qmp: self.qmp.clone(),
            libvirt: self.libvirt,
            pid,
            listen: self.listen.to_string(),
            state,
            left_s: self.until().saturating_duration_since(Instant::now()).as_secs(),
            connections: open as u64,
        }
    }
}

fn missing(vm: &str) -> Refusal {
    Refusal::missing(
        format!("no VM {vm} is expected here"),
        "`ioplane move expected` shows which are; it may have arrived, or its time was over",
    )
}

impl Arrivals {
    /// Nothing is expected yet.
    pub fn new(identity: IdentityDirectory) -> Arrivals {
        Arrivals { identity, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that is expected.
    pub fn report(&self) -> Vec<ExpectedReport> {
        self.state().expected.values().map(|one| one.report()).collect()
    }

    /// Ends one, and its connections.
    pub fn end(&self, vm: &str) -> Result<(), Refusal> {
        let one = self.state().expected.get(vm).cloned().ok_or_else(|| missing(vm))?;
        self.remove(&one);
        Ok(())
    }

    fn remove(&self, one: &Arc<ExpectedVm>) {
        let mut state = self.state();
        if state.expected.get(&one.vm).is_some_and(|now| Arc::ptr_eq(now, one)) {
            state.expected.remove(&one.vm);
        }
        one.ended.send_replace(true);
        let listens = state.expected.values().any(|other| other.listen == one.listen);
        if !listens && let Some(task) = state.listeners.remove(&one.listen) {
            task.abort();
        }
    }

    fn find(&self, vm: &str, host: &str) -> Option<Arc<ExpectedVm>> {
        let state = self.state();
        state.expected.get(vm).filter(|one| one.from.to_string() == host).cloned()
    }
}

impl Daemon {
    /// Expects a VM. Says whether that is new.
    pub(crate) async fn expect(
        self: &Arc<Self>,
        vm: &str,
        form: ExpectForm,
    ) -> Result<(bool, ExpectedReport), Refusal> {
        let ExpectForm { from, qmp, libvirt, listen, valid_s } = form;
        let from: HostName = from.parse().map_err(|error: ioplane_identity::IdentityError| {
            Refusal::invalid(error.to_string(), "give the name in the certificate of that host").at("from")
        })?;
        let listen = listen.map_or((Ipv6Addr::UNSPECIFIED, CHANNEL_PORT).into(), |listen| listen.address());
        let valid_s = valid_s.unwrap_or(USUAL);
        if !(1..=LONGEST).contains(&valid_s) {
            let error = format!("{valid_s} s is no time for which a VM can be expected");
            return Err(Refusal::invalid(error, format!("give 1 to {LONGEST} seconds")).at("valid_s"));
        }
        if !qmp.is_absolute() {
            return Err(Refusal::invalid("the monitor's path is relative", "give it from / on").at("qmp"));
        }
        // What keeps this host from being known to others is said now, and not to them.
        let identity = self.arrivals.identity.clone();
        let own = tokio::task::spawn_blocking(move || identity.load()).await;
        own.map_err(|error| Refusal::bug(error.to_string()))?.map_err(|error| {
            let remedy = "see docs/guide/tls.md: `ioplane identity join` with a token of the authority";
            Refusal::failed(format!("TLS needs an identity of this host: {error}"), remedy)
        })?;
        let valid = Instant::now() + Duration::from_secs(valid_s);
        let known = self.arrivals.state().expected.get(vm).cloned();
        if let Some(known) = known {
            let ExpectedVm { from: now, qmp: at, libvirt: late, listen: listens, .. } = &*known;
            if (now, at, *late, *listens) != (&from, &qmp, libvirt, listen) {
                let error = format!("VM {vm} is expected already, from {} or otherwise", known.from);
                return Err(
                    Refusal::conflict(error, format!("ioplane move unexpect {vm}")).coded(Code::Exists)
                );
            }
            known.progress().valid = valid;
            known.moved.notify_one();
            return Ok((false, known.report()));
        }
        let one = Arc::new(ExpectedVm {
            vm: vm.to_owned(),
            from,
            qmp,
            libvirt,
            listen,
            progress: Mutex::new(Progress { state: ArrivalWord::Expected, pid: None, valid, grace: None }),
            moved: Notify::new(),
            ended: watch::Sender::new(false),
            places: Arc::new(Semaphore::new(CONNECTIONS)),
            monitor: Arc::default(),
            ahead: Mutex::default(),
        });
        monitor::may_come(self, &one).await.map_err(|why| {
            let remedy = "give the socket of -qmp of the QEMU that waits here with -incoming, and -name; --libvirt, if libvirt is to start it";
            Refusal::conflict(why, remedy).at("qmp")
        })?;
        let mut state = self.arrivals.state();
        if state.expected.len() >= MOST {
            return Err(Refusal::conflict(format!("{MOST} VMs are expected"), "wait for some of them"));
        }
        if state.expected.contains_key(vm) {
            return Err(Refusal::busy(
                format!("VM {vm} has just been expected"),
                "see `ioplane move expected`",
            ));
        }
        if let Entry::Vacant(place) = state.listeners.entry(listen) {
            place.insert(tokio::spawn(attend(bound(listen)?, self.clone())).abort_handle());
        }
        state.expected.insert(vm.to_owned(), one.clone());
        drop(state);
        tracing::info!(vm, from = %one.from, %listen, valid_s, "a VM is expected");
        tokio::spawn(expire(self.clone(), one.clone()));
        Ok((true, one.report()))
    }

    /// Functions are reset that have sent messages in advance for a guest that has not come by this expectation: whoever moved it may not be able to say so
    /// any more. A function that its guest drives has none.
    async fn forgets(&self, one: &ExpectedVm) {
        // Requests that are under way come to their end first.
        let _ = tokio::time::timeout(api::LAST + PAUSE, one.places.acquire_many(CONNECTIONS as u32)).await;
        let names = std::mem::take(&mut *one.ahead());
        for name in names {
            for tries in 1.. {
                let Ok(served) = self.functions.served(&name) else { break };
                match served.forget_ahead().await {
                    Err(refusal) if refusal.code == Code::Busy && tries < TRIES => {
                        tokio::time::sleep(PAUSE).await
                    }
                    Err(refusal) => {
                        // Without a VMM there is nothing of it any more.
                        tracing::info!(
                            function = name,
                            why = refusal.error,
                            "what it has sent in advance is not taken back"
                        );
                        break;
                    }
                    Ok(_) => break,
                }
            }
        }
    }
}

fn bound(address: SocketAddr) -> Result<TcpListener, Refusal> {
    let refused = |error: std::io::Error| {
        let remedy =
            "is it an address of this host, and the port free? Give another one: --listen ADDRESS:PORT";
        Refusal::failed(format!("listening on {address}: {error}"), remedy).at("listen")
    };
    let listener = listen::tcp(address).map_err(refused)?;
    listener.set_nonblocking(true).map_err(refused)?;
    TcpListener::from_std(listener).map_err(refused)
}

/// Ends it when its time is over; then, and if somebody ends it before, a guest that has not come leaves nothing here.
async fn expire(daemon: Arc<Daemon>, one: Arc<ExpectedVm>) {
    is_over(&daemon, &one).await;
    daemon.forgets(&one).await;
}

async fn is_over(daemon: &Daemon, one: &Arc<ExpectedVm>) {
    let mut ended = one.ended.subscribe();
    loop {
        let until = one.until();
        if Instant::now() >= until {
            tracing::info!(vm = one.vm, from = %one.from, "it is expected no longer: its time is over");
            return daemon.arrivals.remove(one);
        }
        tokio::select! {
            () = tokio::time::sleep_until(until) => {}
            () = one.moved.notified() => {}
            _ = ended.wait_for(|ended| *ended) => return,
        }
    }
}

async fn attend(listener: TcpListener, daemon: Arc<Daemon>) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                // Who finds no place is closed at once, and comes again.
                let Ok(place) = handshakes.clone().try_acquire_owned() else { continue };
                let daemon = daemon.clone();
                tokio::spawn(async move {
                    if let Err(error) = admit(stream, &daemon, place).await {
                        tracing::warn!(%peer, %error, "a connection about a VM that moves here came to nothing");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "another host could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// From the first byte of one connection to its end.
async fn admit(
    stream: TcpStream,
    daemon: &Arc<Daemon>,
    handshake: OwnedSemaphorePermit,
) -> Result<(), NetbusError> {
    let arrival = ChannelRequest::receive(stream, &daemon.arrivals.identity).await?;
    let Some(one) = daemon.arrivals.find(arrival.subject(), arrival.host()) else {
        tracing::warn!(
            host = arrival.host(),
            asked = arrival.shown(),
            "a host is refused: nobody expects that from it"
        );
        let (host, vm) = (arrival.host().to_owned(), arrival.subject().to_owned());
        // The same words whether it is expected from another host, is expected no longer, or is not known.
        return arrival.refuse(&format!("it does not expect VM {vm} from {host}")).await;
    };
    let Ok(_place) = one.places.clone().try_acquire_owned() else {
        return arrival.refuse(&format!("{CONNECTIONS} connections about VM {} are open", one.vm)).await;
    };
    drop(handshake);
    let mut ended = one.ended.subscribe();
    match arrival.part() {
        API => api::attend(arrival, daemon, &one, &mut ended).await,
        MONITOR => monitor::attend(arrival, daemon, &one, &mut ended).await,
        _ => arrival.refuse("it has no such part").await,
    }
}
