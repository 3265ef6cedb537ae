//! Imports: disks of other hosts, over NBD, as backings.
//!
//! ```text
//!   control plane   Import -- one keeper for each channel: connect, handshake, watch, connect again
//!                                | Link: mail, losses, counters; no lock
//!   I/O core        ImportChannel  submit -> sendmsg        guest memory <--> socket
//!                                  reap   <- recvmsg
//! ```
//!
//! A network failure is told from a device failure. A lost or silent connection is a network failure: requests wait, and are sent again on the
//! next one, each in effect once (docs/decisions/0044-remote-requests-once.md). An error that the server reports is a device failure:
//! the guest gets it at once. So is a server that breaks the protocol again and again.
//!
//! Must not know: rings, leases, who the guest is.

#![expect(clippy::disallowed_types, reason = "the first connection waits for its channel: control plane")]

use std::collections::TryReserveError;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use arc_swap::{ArcSwap, ArcSwapOption};
use ioplane_storage::{Backing, BackingInfo, IoChannel, StorageError};
use tokio::runtime::Handle;
use tokio::sync::Notify;

mod accepted;
mod address;
mod channel;
mod claim;
mod closing;
mod connect;
mod coverage;
mod facts;
mod failure;
mod keeper;
mod link;
mod locker;
mod operation;
mod options;
mod overlap;
mod places;
mod quiet;
mod reserve;
mod rest;
mod retained;
mod seat;
mod session;
mod shelf;
mod size;
mod socket;
mod status;
mod told;
mod turnover;
mod writes;

use accepted::AcceptedDisk;
use channel::ImportChannel;
use claim::{HeldClaim, ImportClaim};
use connect::{Reached, image_of, reach};
use facts::Facts;
use failure::Failure;
use keeper::Keeper;
use link::Link;
use locker::Locker;
use quiet::{Leave, Quiet};
use reserve::Reservation;
use seat::Seat;
use shelf::Shelf;
use size::ExportSize;
use socket::Socket;
use turnover::{Talk, Trouble};
use writes::Writes;

pub use address::{Address, ServerAddress};
pub use connect::{EPOCH, INSTANCE, lets_in};
pub use options::{
    AtStart, ClaimKeeper, ClaimOptions, ClaimTime, ClaimWish, Confirmed, Fence, ImportOptions,
    RememberedClaim, ReserveOptions, Unfenced,
};
pub use reserve::LentReservation;
pub use session::open_session;
pub use status::{ClaimStanding, ConnectionState, ConnectionStatus, ImportStatus, Loss};
pub use told::{ExporterState, Told};

use crate::claim::{CLAIM, ClaimReply};
use crate::error::NbdError;

/// Most channels of one import. More queues than any guest has processors here.
const MOST_CHANNELS: usize = 256;

/// A disk of another host.
#[derive(Debug)]
pub struct Import {
    shared: Arc<Shared>,
    /// Itself, for tasks that it need not wait for.
    me: Weak<Import>,
    runtime: Handle,
    /// The connection by which the export was looked at, for the first channel.
    spare: Mutex<Option<Reached>>,
    /// See [`Import::keep_claim`].
    keeps_claim: AtomicBool,
}

/// What the keepers of an import share.
#[derive(Debug)]
struct Shared {
    options: ImportOptions,
    facts: Facts,
    /// Its size by now.
    size: Arc<ExportSize>,
    /// The exporter has sessions.
    has_sessions: bool,
    /// See [`Told`].
    told: ArcSwap<Told>,
    /// What the exporter keeps for it.
    reservation: Reservation,
    instance: ArcSwapOption<String>,
    /// What tells this use of the export from earlier ones by the same holder, and the number of the next channel.
    session: AtomicU64,
    next: AtomicU32,
    /// The exporter confirms epochs ([`EPOCH`]).
    fenced: bool,
    /// The claim to write.
    claim: ImportClaim,
    writes: Arc<Writes>,
    /// Whether copies of writes are kept, and those of channels that are gone.
    shelf: Option<Shelf>,
    /// A channel has been made: the predecessor of this process is done with the export.
    used: AtomicBool,
    /// Held from looking which instance the exporter is until a connection to it is delivered.
    turnover: Arc<tokio::sync::Mutex<()>>,
    /// Writes that were written again to another instance.
    rewritten: AtomicU64,
    /// What a person has said of the disk. Changed only by who holds `turnover`.
    accepted: AcceptedDisk,
    /// See [`Import::doubts`].
    doubts: AtomicU64,
    quiet: Arc<Quiet>,
    channels: Arc<AtomicUsize>,
    links: ArcSwap<Vec<Weak<Link>>>,
    /// A person has decided that what has stopped may go on.
    retry: Notify,
    /// [`ImportOptions::give_up_after`] in ms, as it is now; [`u64::MAX`] for never.
    give_up_ms: AtomicU64,
    /// It has changed.
    give_up_changed: Notify,
}

impl Import {
    /// Connects, and learns what the export is. Must be called in a tokio runtime, which from then on has a task for each channel.
    pub async fn open(options: ImportOptions) -> Result<Arc<Import>, NbdError> {
        let writes = Arc::new(Writes::open(options.mark.as_deref())?);
        let reached = loop {
            // Nobody is fenced off before this is used: an earlier session may have to end first.
            match reach(&options, EPOCH.to_owned()).await {
                Ok(reached) => break reached,
                Err(error) if options.at_start == AtStart::Refuse => return Err(error),
                Err(error) => {
                    tracing::info!(address = %options.address, %error, "waiting for an NBD export");
                    tokio::time::sleep(options.retry.0).await;
                }
            }
        };
        let reservation = Reservation::begin(&options, &reached)?;
        let claim = match claim::begin(&options, &reached).await {
            Ok(claim) => claim,
            Err(error) => {
                reservation.undo(&options).await;
                return Err(error);
            }
        };
        let replays = reached.fenced
            || (options.fence.is_some() && reached.instance.is_some())
            || options.unfenced == Unfenced::Replay;
        let facts = &reached.facts;
        // Where connections do not share a cache nobody could write again what another had sent.
        let retains = replays
            && options.retain > 0
            && reached.instance.is_some()
            && facts.can_flush()
            && facts.can_multi_conn()
            && !facts.read_only();
        let shared = Shared {
            facts: reached.facts,
            size: ExportSize::new(reached.facts.bytes, options.news.clone()),
            has_sessions: reached.has_sessions,
            told: ArcSwap::default(),
            reservation,
            shelf: retains.then(|| Shelf::new(options.retain)),
            used: AtomicBool::new(false),
            turnover: Arc::default(),
            rewritten: AtomicU64::new(0),
            accepted: AcceptedDisk::default(),
            doubts: AtomicU64::new(0),
            instance: ArcSwapOption::from_pointee(reached.instance.clone()),
            session: AtomicU64::new(since_1970()),
            next: AtomicU32::new(0),
            fenced: reached.fenced,
            claim,
            writes,
            quiet: Arc::default(),
            channels: Arc::default(),
            links: ArcSwap::default(),
            retry: Notify::new(),
            give_up_ms: AtomicU64::new(millis(options.give_up_after)),
            give_up_changed: Notify::new(),
            options,
        };
        // A connection that has claimed no epoch is none for a channel where epochs are claimed.
        let spare = Mutex::new((!shared.fenced).then_some(reached));
        let (shared, runtime) = (Arc::new(shared), Handle::current());
        let import = Arc::new_cyclic(|me| Import {
            shared,
            me: me.clone(),
            runtime,
            spare,
            keeps_claim: AtomicBool::new(false),
        });
        import.catch_up_release();
        Ok(import)
    }

    /// How it stands. Takes no lock.
    pub fn status(&self) -> ImportStatus {
        let shared = &self.shared;
        let links = shared.links.load();
        let reserved = shared.reservation.standing();
        ImportStatus {
            address: shared.options.address.to_string(),
            instance: shared.instance.load().as_deref().cloned(),
            claim: shared.claim.standing(),
            generation: shared.claim.held().map(|claim| claim.generation),
            reserved: reserved.rates,
            reserved_why: reserved.why.clone(),
            claim_lost: shared.claim.lost().as_deref().cloned(),
            dirty: shared.writes.dirty(),
            retained: !shared.writes.incomplete(),
            rewritten: shared.rewritten.load(Ordering::Relaxed),
            connections: links.iter().filter_map(Weak::upgrade).map(|link| link.status()).collect(),
            closing: !shared.quiet.now(),
            starts: shared.claim.starts(),
            told: Told::clone(&shared.told.load()),
        }
    }

    /// See [`ImportOptions::dead_after`].
    pub fn dead_after(&self) -> Duration {
        self.shared.options.dead_after
    }

    /// See [`ImportOptions::retain`].
    pub fn retain(&self) -> usize {
        self.shared.options.retain
    }

    /// Whether writes without an answer are sent again after a connection is lost: since nothing of the old one can come later, or since that was said
    /// ([`Unfenced`]).
    pub fn resends(&self) -> bool {
        self.shared.replays()
    }

    /// A person has looked at what was wrong: connections that have stopped are made again. What may have been lost is given up if it was that.
    pub fn retry(&self) {
        self.shared.claim.forget_guest();
        self.shared.retry.notify_waiters();
    }

    /// How often the export may have lost something behind its back that this import had written or read: a connection was lost to a server that cannot say
    /// whether it is another instance, or a person has accepted what another one has lost. Counted before anything is read from it again.
    pub fn doubts(&self) -> u64 {
        self.shared.doubts.load(Ordering::Acquire)
    }

    /// Another [`ImportOptions::give_up_after`], for the connection that is lost now, too.
    pub fn set_give_up_after(&self, after: Option<Duration>) {
        self.shared.give_up_ms.store(millis(after), Ordering::Release);
        self.shared.give_up_changed.notify_waiters();
    }

    /// Whether the claim stays when the guest stops all queues, since it is to start them again.
    pub fn keep_claim(&self, keeps: bool) {
        self.keeps_claim.store(keeps, Ordering::Release);
    }

    /// Whether the exporter can be reached and serves the same disk, by a connection that asks for nothing and ends with that: for a disk whose channels are gone
    /// and whose guest waits. Takes [`ImportOptions::connect_timeout`] at most.
    pub async fn probe(&self) -> Result<(), NbdError> {
        let shared = &self.shared;
        let reached = reach(&shared.options, CLAIM.to_owned()).await?;
        let known = shared.instance.load_full();
        match (known.as_deref(), &reached.instance) {
            (Some(known), Some(now)) if image_of(known) != image_of(now) => {
                return Err(NbdError::Unsuitable("the exporter has another disk under this name".into()));
            }
            (Some(_), None) => {
                return Err(NbdError::Unsuitable("the server does not say which instance it is".into()));
            }
            _ => {}
        }
        shared.fits(&reached).map_err(NbdError::Unsuitable)
    }

    /// Makes durable what the exporter has acknowledged, by a connection of its own.
    async fn flush(&self) -> Result<(), NbdError> {
        let shared = &self.shared;
        if !shared.writes.dirty() || !shared.facts.can_multi_conn() {
            return Ok(());
        }
        let _turnover = shared.turnover.lock().await;
        let channel = shared.next.fetch_add(1, Ordering::Relaxed);
        let epoch =
            shared.epoch(channel, 1).ok_or_else(|| NbdError::Unsuitable("it is not claimed".into()))?;
        let reached = reach(&shared.options, epoch).await?;
        if let Some(ClaimReply::Refused(refusal)) = reached.claim {
            shared.lose_claim(&refusal);
            return Err(NbdError::Claim(refusal));
        }
        if (shared.fenced && !reached.fenced)
            || reached.instance.as_ref() != shared.instance.load().as_deref()
        {
            return Err(NbdError::Unsuitable("it is not as it was when it was written to".into()));
        }
        let mark = shared.writes.mark();
        let flushed = match Talk::new(&reached.socket, reached.structured, shared.options.dead_after) {
            Ok(mut talk) => talk.flush().await,
            Err(trouble) => Err(trouble),
        };
        match flushed {
            Ok(()) => shared.writes.flushed(mark),
            Err(Trouble::Network(Failure { violation: Some(violation), .. })) => return Err(violation.into()),
            Err(Trouble::Network(Failure { why, .. })) => return Err(NbdError::Unsuitable(why)),
            Err(Trouble::Device(error)) => {
                shared.writes.flush_has_failed();
                return Err(NbdError::Unsuitable(format!("its disk failed (NBD error {error})")));
            }
        }
        shared.see_out(reached.socket, true, None).await;
        Ok(())
    }

    /// Nobody uses it any more. Makes durable what the exporter has acknowledged, and removes the mark file if nothing is left to be known of. Without that
    /// the next import finds out what was left.
    pub async fn finish(&self) -> Result<(), NbdError> {
        self.flush().await?;
        if let Some(mark) = self.shared.options.mark.as_deref().filter(|_| !self.shared.writes.dirty()) {
            let _ = std::fs::remove_file(mark);
        }
        Ok(())
    }

    /// After [`Import::finish`]: gives the claim back, so that others may write. If that fails this import's holder still has it, and comes back
    /// with it.
    pub async fn release(&self) -> Result<(), NbdError> {
        let _turn = self.shared.claim.turn.lock().await;
        self.shared.release().await?;
        self.shared.forget_claim();
        Ok(())
    }

    /// Nobody will use it any more: a question to the exporter about what it keeps is given up, whoever waits for it.
    pub fn stop_reserving(&self) {
        self.shared.reservation.stop_asking();
    }

    /// Nobody will use it any more, but another import of the same holder may: nothing is asked for from now on, and no question is under way.
    pub async fn end_reservation(&self) {
        self.shared.reservation.end().await;
    }

    /// Nobody will use it any more: what the exporter keeps for it of its capacity is for others. If that fails it is kept until a person takes it back there.
    pub async fn give_back_reservation(&self) {
        self.shared.reservation.give_back(&self.shared.options).await;
    }

    /// A channel and its link. `claims`: it sees to it that there is a claim, which otherwise its maker has.
    fn open_channel(&self, depth: u16, claims: bool) -> Result<(ImportChannel, Arc<Link>), StorageError> {
        let shared = &self.shared;
        let most = if shared.facts.can_multi_conn() { MOST_CHANNELS } else { 1 };
        let seat = Seat::take(&shared.channels, most).ok_or_else(|| {
            self.unsuitable(
                "the server does not say that its connections share a cache (NBD_FLAG_CAN_MULTI_CONN), so a flush on one would \
                 not cover writes on another: give the disk one queue (queues = 1)",
            )
        })?;
        let os = |source| StorageError::Os {
            image: shared.options.address.to_string(),
            doing: "making the events of a connection",
            source,
        };
        let out_of_memory = |error: &TryReserveError| StorageError::Os {
            image: shared.options.address.to_string(),
            doing: "making room for the writes that are kept (retain)",
            source: std::io::Error::new(std::io::ErrorKind::OutOfMemory, error.to_string()),
        };
        shared.take_over();
        // So that whoever looks for copies finds those of this channel.
        let shelf = shared.shelf.as_ref().map(Shelf::open);
        let retained = shelf.map(|mut shelf| shelf.take(&shared.writes).map(|retained| (retained, shelf)));
        let (retained, _shelf) = retained.transpose().map_err(|error| out_of_memory(&error))?.unzip();
        let link = Link::new(
            shared.facts,
            shared.size.clone(),
            shared.replays(),
            shared.writes.clone(),
            retained.map(Locker::new),
            shared.quiet.clone(),
        )
        .map_err(os)?;
        let _runtime = self.runtime.enter();
        // What an earlier channel has left to the server must not land behind what this one asks for: all that is older is fenced off.
        if shared.writes.take_unanswered() {
            shared.begin_session();
        }
        let number = shared.next.fetch_add(1, Ordering::Relaxed);
        let keeper = Keeper::new(link.clone(), shared.clone(), number, claims).map_err(os)?;
        // Nor is one to another instance than the one that a predecessor used.
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).take();
        let spare = spare.filter(|spare| spare.instance.as_ref() == shared.instance.load().as_deref());
        self.runtime.spawn(keeper.run(spare));
        shared.links.rcu(|links| {
            let living = links.iter().filter(|link| link.strong_count() > 0);
            living.cloned().chain([Arc::downgrade(&link)]).collect::<Vec<_>>()
        });
        Ok((ImportChannel::new(link.clone(), depth, seat), link))
    }

    fn unsuitable(&self, why: &str) -> StorageError {
        StorageError::Unsuitable { image: self.shared.options.address.to_string(), why: why.into() }
    }
}

/// In ms, [`u64::MAX`] for never.
fn millis(time: Option<Duration>) -> u64 {
    time.map_or(u64::MAX, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
}

/// In ns, so that whoever comes later has a greater number.
fn since_1970() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl Shared {
    /// The first channel is made. From now on nobody else acknowledges or flushes what the mark file counts.
    fn take_over(&self) {
        if self.used.swap(true, Ordering::AcqRel) {
            return;
        }
        self.writes.inherit();
        match (self.writes.dirty(), self.writes.instance()) {
            // Its writes are with that one: the keepers find out whether it is still there.
            (true, Some(before)) => self.instance.store(Some(Arc::new(before))),
            (true, None) => {}
            (false, _) => {
                self.writes.set_instance(self.instance.load().as_deref().map_or("", String::as_str))
            }
        }
    }

    /// Whether a connection is to the export as it was. One of ours may have grown since, which is taken with that.
    fn fits(&self, reached: &Reached) -> Result<(), String> {
        let known = self.instance.load_full();
        let grows = match (known.as_deref(), &reached.instance) {
            (Some(known), Some(now)) => told::is_same_disk(known, now),
            _ => false,
        };
        match self.facts.misfit(&reached.facts, self.size.now(), grows) {
            Some(misfit) => Err(misfit),
            None => {
                self.grow(reached.facts.bytes);
                Ok(())
            }
        }
    }

    /// The export has so many bytes by now; fewer than it had count for nothing.
    fn grow(&self, bytes: u64) {
        if let Some(before) = self.size.grow(bytes) {
            tracing::info!(address = %self.options.address, before, bytes, "an export has grown");
        }
    }

    /// The exporter is that one from now on.
    fn set_instance(&self, now: &str) {
        self.writes.set_instance(now);
        self.instance.store(Some(Arc::new(now.to_owned())));
    }

    /// What the exporter is asked to confirm for a connection: that nothing older is under way. `None` while there is no claim where there has to be one.
    fn epoch(&self, channel: u32, attempt: u32) -> Option<String> {
        let session = self.session.load(Ordering::Acquire);
        match self.claim.held().as_deref() {
            Some(HeldClaim { holder, generation, .. }) => {
                Some(format!("{EPOCH}={holder}/{session}/{channel}/{attempt}/{generation}"))
            }
            None if self.claim.is_kept() => None,
            None => Some(format!("{EPOCH}={}/{session}/{channel}/{attempt}", self.options.holder)),
        }
    }

    /// See [`Import::doubts`].
    fn count_doubt(&self) {
        self.doubts.fetch_add(1, Ordering::AcqRel);
    }

    /// When requests fail, if they do.
    fn give_up_after(&self) -> Option<Duration> {
        let ms = self.give_up_ms.load(Ordering::Acquire);
        (ms < u64::MAX).then(|| Duration::from_millis(ms))
    }

    /// From now on this is a later use of the export than before.
    fn begin_session(&self) {
        let now = since_1970();
        let later = |before: u64| Some(now.max(before + 1));
        let _ = self.session.fetch_update(Ordering::AcqRel, Ordering::Acquire, later);
    }

    /// Whether requests that may have been carried out are sent again.
    fn replays(&self) -> bool {
        let fenced = self.options.fence.is_some() && self.instance.load().is_some();
        self.fenced || fenced || self.options.unfenced == Unfenced::Replay
    }

    /// Ends a connection that its channel has left; until the server has, [`Backing::wait_quiet`] says no.
    fn see_out(
        &self,
        socket: Arc<Socket>,
        idle: bool,
        leave: Option<Leave>,
    ) -> impl Future<Output = ()> + use<> {
        closing::see_out(socket, idle, self.options.closing_limit(self.fenced), leave)
    }
}

impl Backing for Import {
    fn info(&self) -> BackingInfo {
        let facts = &self.shared.facts;
        BackingInfo {
            name: self.shared.options.address.to_string(),
            bytes: self.bytes(),
            logical_block: facts.logical_block(),
            physical_block: facts.preferred_block.max(facts.logical_block()),
            read_only: facts.read_only(),
            // A server that cannot be asked to flush does not say whether it has a cache. As Linux's client does, it is taken to have none.
            volatile_cache: facts.can_flush() && !facts.read_only(),
            discards: facts.can_trim(),
            block_device: None,
        }
    }

    /// Each channel has a connection of its own. It need not be there yet: requests wait for it, and for the claim to write.
    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        self.shared.claim.count_start();
        Ok(Box::new(self.open_channel(depth, true)?.0))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        if bytes == self.bytes() {
            return Ok(());
        }
        let why =
            "its size is that of the export: change it there (ioplane publish resize), and the disk follows"
                .into();
        Err(StorageError::Size { image: self.shared.options.address.to_string(), bytes, why })
    }

    /// Until the servers have closed the connections of channels that are gone, or [`ImportOptions::closes_within`] is over. A server that closes first and works on afterwards is not seen through.
    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.shared.quiet.wait(deadline)
    }

    /// What was written is flushed, and the claim given back.
    fn rest(&self, migrates: bool) {
        self.begin_rest(migrates);
    }

    fn forget_guest(&self) {
        self.shared.claim.forget_guest();
    }

    /// While a connection is made again, but not while a guest waits for its claim.
    fn is_stalled(&self) -> bool {
        let links = self.shared.links.load();
        links
            .iter()
            .filter_map(Weak::upgrade)
            .any(|link| matches!(link.status().state, ConnectionState::Reconnecting { gave_up: false, .. }))
    }
}
