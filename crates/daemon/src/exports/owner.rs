//! The task that owns an export.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ioplane_api::report::{Counts, RemoteWord, ReservationReport};
use ioplane_api::spec::LimitsSpec;
use ioplane_device::{Change, QueueSet, Running};
use ioplane_nbd::Protection;
use ioplane_nbd::claim::{
    ClaimBook, ClaimDenial, ClaimQuery, ClaimRecord, ClaimRefusal, ClaimReply, ClaimVerb,
};
use ioplane_nbd::export::{ClientSocket, ConnectionEnd, EndedConnections, Export};
use ioplane_nbd::handshake::server::Negotiated;
use ioplane_nbd::import::{EPOCH, INSTANCE};
use ioplane_nbd::mutation::{Rule, removed};
use ioplane_nbd::reserve::{ReserveQuery, ReserveReply, ReservedRates};
use ioplane_storage::StorageError;
use tokio::sync::{mpsc, oneshot};

use super::capacity::ExportCapacity;
use super::image_watch::ImageWatch;
use super::instance::ExportInstance;
use super::told::{ToldState, TroubleWatch};
use crate::cores::CorePlacement;
use crate::disk::Shown;
use crate::readings;

/// Questions that wait.
const ASKED: usize = 64;
/// How long requests in flight have to end when an export is stopped. Then its I/O is left to the core.
const STOP: Duration = Duration::from_secs(10);

/// One connection of an import of ours: whose, since when the export is used by it, which of its channels, and how often that was connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelEpoch {
    holder: String,
    session: u64,
    channel: u32,
    epoch: u32,
    /// Of its claim to write, if it has one.
    generation: Option<u64>,
}

impl ChannelEpoch {
    /// Of a query `ioplane:epoch=HOLDER/SESSION/CHANNEL/EPOCH`, with `/GENERATION` behind that from whoever has a claim.
    pub fn of(query: &str) -> Option<ChannelEpoch> {
        let mut parts = query.strip_prefix(EPOCH)?.strip_prefix('=')?.split('/');
        let (holder, numbers) = (parts.next()?.to_owned(), [parts.next()?, parts.next()?, parts.next()?]);
        let [session, channel, epoch] = numbers;
        let client = ChannelEpoch {
            holder,
            session: session.parse().ok()?,
            channel: channel.parse().ok()?,
            epoch: epoch.parse().ok()?,
            generation: parts.next().map(str::parse).transpose().ok()?,
        };
        (parts.next().is_none() && (1..=LONGEST_HOLDER).contains(&client.holder.len())).then_some(client)
    }
}

impl ChannelEpoch {
    /// The same, of that host and nobody else: no holder has a slash in its own name.
    pub fn of_host(self, host: &str) -> ChannelEpoch {
        ChannelEpoch { holder: joined(host, &self.holder), ..self }
    }

    /// Whether it comes with a claim.
    pub fn has_claim(&self) -> bool {
        self.generation.is_some()
    }

    /// What the client has a claim by.
    fn claim(&self) -> Option<(&str, u64)> {
        self.generation.map(|generation| (self.holder.as_str(), generation))
    }
}

/// A holder of that host.
pub fn joined(host: &str, holder: &str) -> String {
    format!("{host}/{holder}")
}

/// What came of asking for a fence.
#[derive(Debug, PartialEq, Eq)]
pub enum Fenced {
    /// This epoch is the newest, and nothing older is under way.
    Newest,
    /// It is not, or not yet so.
    No,
    /// Its claim does not hold.
    Refused(ClaimRefusal),
}

/// Who may write an export, for those who only want to know.
pub type ShownClaim = Arc<Mutex<Option<ClaimRecord>>>;

/// Dropped with the owner of an export.
pub type Alive = oneshot::Sender<Infallible>;

/// What an owner is asked.
pub enum Ask {
    /// Serve a client.
    Connect { socket: ClientSocket, negotiated: Negotiated, ahead: Vec<u8>, client: Option<ChannelEpoch> },
    /// End what older connections of this client have begun. The answer comes when nothing of them is under way.
    Fence { client: ChannelEpoch, answer: oneshot::Sender<Fenced> },
    /// What a client asks for about the claim to write.
    Claim { query: ClaimQuery, answer: oneshot::Sender<ClaimReply> },
    /// Nobody has a claim any more, whatever its holder thinks; `force`: also while it is connected.
    Release { force: bool, answer: oneshot::Sender<Result<(), Unreleased>> },
    /// What all clients may do together from now on.
    Limit { declared: LimitsSpec, answer: oneshot::Sender<Result<(), String>> },
    /// What a client asks for of that.
    Reserve { query: ReserveQuery, order: u64, answer: oneshot::Sender<ReserveReply> },
    /// What is reserved by clients that are not connected is for others; `force`: also by those that are. Says by how many it was.
    Unreserve { force: bool, answer: oneshot::Sender<Result<usize, String>> },
    /// It is to have so many bytes.
    Resize { bytes: u64, answer: oneshot::Sender<Result<(), Unresized>> },
    /// End all connections: nobody may use it for now.
    EndAll,
    /// How it is.
    Look(oneshot::Sender<Look>),
    /// End all.
    Stop(oneshot::Sender<()>),
}

/// Why a claim was not released.
#[derive(Debug)]
pub enum Unreleased {
    /// Nobody has one.
    Free,
    /// Its holder has so many connections.
    InUse(usize),
    /// That could not be made durable, or I/O does not end.
    Failed(String),
}

/// Why an export keeps its size.
#[derive(Debug)]
pub enum Unresized {
    /// Somebody counts on it, as is said.
    Attached(String),
    /// What is below it refuses.
    Refused(StorageError),
}

/// What an owner says of its export.
pub struct Look {
    pub connections: u64,
    /// Of these, those with sums.
    pub summed: u64,
    pub ends: BTreeMap<String, u64>,
    pub totals: Counts,
    /// How much of its capacity is reserved, and by whom.
    pub taken: ReservedRates,
    pub reservations: Vec<ReservationReport>,
}

/// An import of ours that has been here.
#[derive(Debug, Default)]
struct Holder {
    session: u64,
    channels: HashMap<u32, Known>,
    /// Of older sessions and epochs: what they have begun has not ended yet.
    older: QueueSet,
}

/// One of its channels.
#[derive(Debug)]
struct Known {
    epoch: u32,
    queue: Option<u16>,
}

impl Holder {
    fn queues(&self) -> impl Iterator<Item = u16> {
        self.channels.values().filter_map(|known| known.queue).chain(self.older.iter().copied())
    }
}

struct Owner {
    running: Running<Export>,
    capacity: ExportCapacity,
    placement: CorePlacement,
    holders: HashMap<String, Holder>,
    /// Who may write; none for an export that nobody may write.
    book: Option<ClaimBook>,
    shown: ShownClaim,
    told: ToldState,
    trouble: TroubleWatch,
    image: ImageWatch,
    /// What was wrong with the image, and whether requests failed, at the last look.
    logged: (Option<String>, bool),
    /// The disk below.
    below: Arc<Mutex<Shown>>,
    instance: ExportInstance,
    /// Goes with it, which tells others.
    _alive: Alive,
    /// Of clients without a claim.
    unclaimed: QueueSet,
    /// Of those that were there before the claim changed hands: what they have begun may not have ended yet.
    former: QueueSet,
}

/// Holders, and channels of each, that are remembered; beyond that those without a connection are forgotten.
const MOST_KNOWN: usize = 256;
/// Longest name of a holder.
const LONGEST_HOLDER: usize = 64;
/// How often it is looked whether requests below fail.
const LOOKS: Duration = Duration::from_millis(500);
/// How long a client waits for what older connections have begun. It asks again; others are served meanwhile.
const FENCE: Duration = Duration::from_secs(3);

/// Owns `running` until it is stopped, or nobody can ask any more.
pub fn start(
    running: Running<Export>,
    ended: EndedConnections,
    placement: CorePlacement,
    book: Option<ClaimBook>,
    capacity: ExportCapacity,
    (told, below, instance, alive, image): (ToldState, Arc<Mutex<Shown>>, ExportInstance, Alive, ImageWatch),
) -> (mpsc::Sender<Ask>, ShownClaim) {
    let (asks, asked) = mpsc::channel(ASKED);
    let shown = ShownClaim::default();
    let (unclaimed, former) = (QueueSet::new(), QueueSet::new());
    let (holders, shown_too) = (HashMap::new(), shown.clone());
    let (shown_too, trouble) = (shown_too, TroubleWatch::default());
    let owner = Owner {
        running,
        capacity,
        placement,
        holders,
        book,
        shown: shown_too,
        told,
        trouble,
        image,
        logged: (None, false),
        below,
        instance,
        _alive: alive,
        unclaimed,
        former,
    };
    owner.show();
    tokio::spawn(owner.run(ended, asked));
    (asks, shown)
}

/// In seconds.
fn since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

impl Owner {
    async fn run(mut self, ended: EndedConnections, mut asked: mpsc::Receiver<Ask>) {
        let mut looks = tokio::time::interval(LOOKS);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let stopped = loop {
            tokio::select! {
                _ = looks.tick() => self.look_for_trouble(),
                ended = ended.next() => {
                    let name = &self.running.info().name;
                    match ended.end {
                        ConnectionEnd::Violation(why) => {
                            tracing::warn!(export = name, queue = ended.queue, %why, "a client's connection was ended");
                        }
                        end => {
                            tracing::info!(export = name, queue = ended.queue, ?end, "a client's connection has ended");
                        }
                    }
                    self.forget(ended.queue);
                    self.drain(&QueueSet::from([ended.queue])).await;
                }
                ask = asked.recv() => match ask {
                    None => break None,
                    Some(Ask::Stop(answer)) => break Some(answer),
                    Some(Ask::Look(answer)) => {
                        let _ = answer.send(self.look());
                    }
                    // Who has given up meanwhile asks anew.
                    Some(Ask::Fence { answer, .. }) if answer.is_closed() => {}
                    Some(Ask::Fence { client, answer }) => {
                        let fenced = self.fence(client).await;
                        let _ = answer.send(fenced);
                    }
                    Some(Ask::Claim { query, answer }) => {
                        let reply = self.claim(&query).await;
                        let _ = answer.send(reply);
                    }
                    Some(Ask::Release { force, answer }) => {
                        let outcome = self.release(force).await;
                        let _ = answer.send(outcome);
                    }
                    Some(Ask::Limit { declared, answer }) => {
                        let changed = self.capacity.change(&declared);
                        self.limit_again().await;
                        let _ = answer.send(changed);
                    }
                    Some(Ask::Reserve { answer, .. }) if answer.is_closed() => {}
                    Some(Ask::Reserve { query, order, answer }) => {
                        let reply = self.reserve(&query, order).await;
                        let _ = answer.send(reply);
                    }
                    Some(Ask::Unreserve { force, answer }) => {
                        let outcome = self.unreserve(force).await;
                        let _ = answer.send(outcome);
                    }
                    Some(Ask::EndAll) => {
                        self.end_all().await;
                    }
                    Some(Ask::Resize { bytes, answer }) => {
                        let _ = answer.send(self.resize(bytes));
                    }
                    Some(Ask::Connect { socket, negotiated, ahead, client }) => {
                        self.connect(socket, &negotiated, &ahead, client);
                    }
                },
            }
        };
        self.stop().await;
        // The image is closed, and its lock given back, before anybody hears of it. That may wait for its last I/O.
        tokio::task::block_in_place(|| drop(self));
        if let Some(answer) = stopped {
            let _ = answer.send(());
        }
    }

    fn connect(
        &mut self,
        socket: ClientSocket,
        negotiated: &Negotiated,
        ahead: &[u8],
        client: Option<ChannelEpoch>,
    ) {
        let name = self.running.info().name.clone();
        // A client that has connected once more since is served by that connection.
        let stale = client.as_ref().is_some_and(|client| self.known(client).is_none());
        let claim = client.as_ref().and_then(ChannelEpoch::claim);
        let unclaimed = claim.is_none();
        // The claim may have changed hands since it was told that it may come in.
        let refused = self.admits(claim).err();
        // It may have become smaller since the handshake.
        let (told, bytes) = (negotiated.info.bytes, self.running.device().published().bytes());
        // A flush may have failed since, of which the next process would not know.
        let unrecorded = self.instance.unrecorded();
        // Or one that makes it another instance than the client was told.
        let (instance, failures) = self.instance.counted();
        let instance_told = negotiated
            .contexts
            .iter()
            .find_map(|context| context.name.strip_prefix(INSTANCE)?.strip_prefix('='));
        let connected = match (stale, refused) {
            _ if unrecorded.is_some() => Err(unrecorded.unwrap_or_default()),
            _ if instance_told.is_some_and(|told| told != instance) => {
                Err("a flush has failed since it was told which instance this is".to_owned())
            }
            (true, _) => Err("a newer connection of the same client has come".to_owned()),
            (false, Some(refusal)) => Err(refusal.to_string()),
            (false, None) if told > bytes => {
                Err(format!("it was told of {told} bytes, and the export has {bytes} by now"))
            }
            (false, None) => self
                .running
                .device_mut()
                .connect(socket, negotiated, ahead)
                .map_err(|error| error.to_string()),
        };
        let limits = self.capacity.limits(client.as_ref().map(|client| client.holder.as_str()));
        let started = connected.and_then(|queue| {
            if instance_told.is_some() {
                self.running.device_mut().bind(queue, failures);
            }
            self.running.device_mut().set_limits(queue, limits);
            // Waits for I/O that an earlier use of the backing has left behind.
            let start = || self.running.start(&QueueSet::from([queue]), &self.placement);
            let started = tokio::task::block_in_place(start);
            if started.is_err() {
                self.running.device_mut().close(queue);
            }
            started.map(|()| queue).map_err(|error| error.to_string())
        });
        match started {
            Ok(queue) => {
                tracing::info!(export = name, queue, "a client has connected");
                // Who had it before is gone.
                self.forget(queue);
                if unclaimed {
                    self.unclaimed.insert(queue);
                }
                if let Some(known) = client.and_then(|client| self.known(&client)) {
                    known.queue = Some(queue);
                }
            }
            Err(error) => tracing::warn!(export = name, error, "a client could not be served"),
        }
    }

    /// Whose connection has this queue, if it is known.
    fn holder_of(&self, queue: u16) -> Option<&str> {
        let mut holders = self.holders.iter();
        holders.find(|(_, holder)| holder.queues().any(|one| one == queue)).map(|(name, _)| name.as_str())
    }

    /// See [`Ask::Reserve`].
    async fn reserve(&mut self, query: &ReserveQuery, order: u64) -> ReserveReply {
        let before = self.capacity.reserved_for(&query.holder);
        let reply = tokio::task::block_in_place(|| self.capacity.reserve(query, order, since_1970()));
        let (export, by) = (&self.running.info().name, &query.name);
        match &reply {
            // Asked for anew after each start of the client.
            ReserveReply::Granted(rates) if *rates == before => {}
            ReserveReply::Granted(rates) => {
                tracing::info!(export, by, iops = rates.requests, bandwidth = rates.bytes, "reserved");
                self.limit_again().await;
            }
            ReserveReply::Refused(why) => tracing::warn!(export, by, why, "a reservation was refused"),
        }
        reply
    }

    /// See [`Ask::Unreserve`].
    async fn unreserve(&mut self, force: bool) -> Result<usize, String> {
        let connected =
            |holder: &str| self.holders.get(holder).is_some_and(|one| one.queues().next().is_some());
        let released =
            tokio::task::block_in_place(|| self.capacity.release(|holder| force || !connected(holder)));
        self.limit_again().await;
        released
    }

    /// Connections that are there go by their limits as these are now.
    async fn limit_again(&mut self) {
        for queue in self.running.queues() {
            let limits = self.capacity.limits(self.holder_of(queue));
            self.running.device_mut().set_limits(queue, limits.clone());
            self.running.apply(&QueueSet::from([queue]), &Change::Limits(limits)).done().await;
        }
    }

    /// What is known of a client's channel, if nobody has taken its place since.
    fn known(&mut self, client: &ChannelEpoch) -> Option<&mut Known> {
        let holder =
            self.holders.get_mut(&client.holder).filter(|holder| holder.session == client.session)?;
        holder.channels.get_mut(&client.channel).filter(|known| known.epoch == client.epoch)
    }

    /// See [`Ask::Fence`].
    async fn fence(&mut self, client: ChannelEpoch) -> Fenced {
        if let Err(refusal) = self.admits(client.claim()) {
            return Fenced::Refused(refusal);
        }
        let ChannelEpoch { holder: name, session, channel, epoch, .. } = client;
        if self.holders.len() >= MOST_KNOWN {
            self.holders.retain(|_, holder| holder.queues().next().is_some());
        }
        let holder = self.holders.entry(name.clone()).or_default();
        match session.cmp(&holder.session) {
            Ordering::Less if !removed(Rule::NewestOnly) => return Fenced::No,
            Ordering::Greater => {
                let older = holder.queues().collect();
                *holder = Holder { session, channels: HashMap::new(), older };
            }
            Ordering::Less | Ordering::Equal => match holder.channels.get_mut(&channel) {
                Some(known) if known.epoch >= epoch && !removed(Rule::NewestOnly) => return Fenced::No,
                Some(known) => holder.older.extend(known.queue.take()),
                None => {}
            },
        }
        if holder.channels.len() >= MOST_KNOWN {
            holder.channels.retain(|_, known| known.queue.is_some());
        }
        holder.channels.insert(channel, Known { epoch, queue: None });
        let mut older = holder.older.clone();
        older.extend(&self.former);
        // A disk that does not answer keeps this client out, and nobody else.
        let ended = self.end(&older).await;
        if let (true, Some(holder)) = (ended, self.holders.get_mut(&name)) {
            holder.older = QueueSet::new();
        }
        match ended {
            true => Fenced::Newest,
            false => Fenced::No,
        }
    }

    /// Whether somebody with that claim, or without one, may write; always where nobody may.
    fn admits(&self, claim: Option<(&str, u64)>) -> Result<(), ClaimRefusal> {
        self.book.as_ref().map_or(Ok(()), |book| book.admits(claim))
    }

    fn show(&self) {
        let record = self.book.as_ref().and_then(ClaimBook::record).cloned();
        self.told.holder(record.as_ref().filter(|record| record.held).map(|record| record.name.clone()));
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) = record;
    }

    /// Has those who use it told whether requests below it fail, and whether its image is as it was published.
    fn look_for_trouble(&mut self) {
        let export = self.running.device();
        let meters = (0..self.running.info().queues).filter_map(|queue| export.meter(queue));
        let errors = meters.map(|meter| meter.read().errors_io).sum();
        let trouble = self.trouble.look(errors, Instant::now()).map(|trouble| {
            // Of another machine it may be the network that fails, or that one.
            let below = self.below.lock().unwrap_or_else(PoisonError::into_inner).report().remote;
            match below.filter(|remote| remote.state != RemoteWord::Connected) {
                Some(remote) => format!("{trouble}; the server of its disk is {}", remote.state.words()),
                None => trouble,
            }
        });
        let flaw = self.image.look(export.published().bytes());
        let (name, failing) = (&self.running.info().name, trouble.is_some());
        if flaw != self.logged.0 {
            match &flaw {
                Some(why) => tracing::warn!(export = name, why, "its image is not as it was published"),
                None => tracing::warn!(export = name, "its image is again as it was published"),
            }
        }
        match (self.logged.1, &trouble) {
            (false, Some(why)) => tracing::warn!(export = name, why, "it fails"),
            (true, None) => tracing::info!(export = name, "no request below it has failed of late"),
            _ => {}
        }
        let all: Vec<String> =
            self.instance.unrecorded().into_iter().chain(flaw.clone()).chain(trouble).collect();
        self.told.trouble((!all.is_empty()).then(|| all.join("; ")));
        self.logged = (flaw, failing);
    }

    /// See [`Ask::Resize`].
    fn resize(&mut self, bytes: u64) -> Result<(), Unresized> {
        let before = self.running.device().published().bytes();
        if bytes < before
            && let Some(by) = self.attached()
        {
            return Err(Unresized::Attached(by));
        }
        // The file system may take its time.
        let resized = tokio::task::block_in_place(|| self.running.device_mut().resize(bytes));
        let now = self.running.device().published().bytes();
        if now != before {
            tracing::info!(export = self.running.info().name, before, now, "resized");
            self.told.resized(now);
        }
        resized.map_err(Unresized::Refused)
    }

    /// Who counts on its size, in words.
    fn attached(&self) -> Option<String> {
        let connections = self.running.device().connections();
        let held = self.book.as_ref().filter(|book| book.is_held()).and_then(ClaimBook::record);
        let taken = self.capacity.taken();
        if connections > 0 {
            Some(format!("{connections} connections are open"))
        } else if let Some(record) = held {
            Some(format!("{} holds it", record.name))
        } else if taken != ReservedRates::default() {
            Some("a part of its capacity is reserved".to_owned())
        } else {
            self.told.watchers().map(|names| format!("hosts have a disk of it: {names}"))
        }
    }

    /// Ends all connections, and says whether all that was begun for them has ended. What has not is waited for before anybody else is served.
    async fn end_all(&mut self) -> bool {
        let queues = self.running.queues();
        self.holders.clear();
        self.unclaimed = QueueSet::new();
        self.former.extend(&queues);
        let former = self.former.clone();
        let ended = self.end(&former).await;
        if ended {
            self.former = QueueSet::new();
        }
        ended
    }

    /// See [`Ask::Claim`].
    async fn claim(&mut self, query: &ClaimQuery) -> ClaimReply {
        let failed = |name: &str| {
            let (why, generation, since) = (ClaimDenial::Failed, 0, 0);
            ClaimReply::Refused(ClaimRefusal { why, generation, since, name: name.to_owned() })
        };
        if let ClaimVerb::Release(generation) = query.verb {
            if let Err(refusal) = self.admits(Some((&query.holder, generation))) {
                return ClaimReply::Refused(refusal);
            }
            // Whoever comes next finds what this one has written, and nothing of it comes later.
            if !self.end_all().await {
                return failed("requests of its holder have not ended");
            }
        }
        let others = self.unclaimed.len();
        let Some(book) = &mut self.book else { return failed("it cannot be written") };
        let before = book.record().map_or(0, |record| record.generation);
        let reply = tokio::task::block_in_place(|| book.ask(query, others, since_1970()));
        let name = &self.running.info().name;
        match &reply {
            ClaimReply::Granted(generation) if *generation != before => {
                match query.verb {
                    ClaimVerb::TakeOver => {
                        tracing::warn!(export = name, holder = query.name, generation, "taken over")
                    }
                    _ => tracing::info!(export = name, holder = query.name, generation, "claimed"),
                }
                self.end_all().await;
            }
            ClaimReply::Released(generation) => {
                tracing::info!(export = name, holder = query.name, generation, "its claim was given back");
            }
            ClaimReply::Granted(_) | ClaimReply::Refused(_) => {}
        }
        self.show();
        reply
    }

    /// See [`Ask::Release`].
    async fn release(&mut self, force: bool) -> Result<(), Unreleased> {
        if !self.book.as_ref().is_some_and(ClaimBook::is_held) {
            return Err(Unreleased::Free);
        }
        let connected = self.running.device().connections();
        if connected > 0 && !force {
            return Err(Unreleased::InUse(connected));
        }
        if !self.end_all().await {
            return Err(Unreleased::Failed(
                "requests of its holder have not ended: its disk does not answer".into(),
            ));
        }
        let outcome = self
            .book
            .as_mut()
            .map_or(Ok(()), |book| tokio::task::block_in_place(|| book.release(since_1970())));
        self.show();
        outcome.map_err(|refusal| Unreleased::Failed(refusal.name))
    }

    fn forget(&mut self, queue: u16) {
        self.unclaimed.remove(&queue);
        self.former.remove(&queue);
        for holder in self.holders.values_mut() {
            holder.older.remove(&queue);
            let of_it = holder.channels.values_mut().find(|known| known.queue == Some(queue));
            if let Some(known) = of_it {
                known.queue = None;
            }
        }
    }

    /// Reads these queues no more, and says whether all that they had begun has ended within [`FENCE`].
    async fn end(&mut self, queues: &QueueSet) -> bool {
        if removed(Rule::OldEnds) {
            return true;
        }
        queues.iter().for_each(|queue| self.running.device_mut().close(*queue));
        self.running.drain(queues);
        removed(Rule::Landed) || tokio::time::timeout(FENCE, self.running.stopped(queues)).await.is_ok()
    }

    /// Until everything that these queues have begun has ended, and their connections are closed.
    async fn drain(&mut self, queues: &QueueSet) {
        self.running.drain(queues);
        self.running.stopped(queues).await;
    }

    async fn stop(&mut self) {
        let queues = self.running.queues();
        queues.iter().for_each(|queue| self.running.device_mut().close(*queue));
        self.running.drain(&queues);
        if tokio::time::timeout(STOP, self.running.stopped(&queues)).await.is_err() {
            tracing::warn!(
                export = self.running.info().name,
                "stopped with requests in flight: its disk does not answer"
            );
            self.running.suspend(&queues);
            self.running.stopped(&queues).await;
        }
    }

    fn look(&self) -> Look {
        let export = self.running.device();
        let meters = (0..self.running.info().queues).filter_map(|queue| export.meter(queue));
        Look {
            connections: export.connections() as u64,
            summed: export.protected(Protection::Sums) as u64,
            ends: export
                .ends()
                .filter(|(_, count)| *count > 0)
                .map(|(name, count)| (name.to_owned(), count))
                .collect(),
            totals: readings::sum_of_meters(meters),
            taken: self.capacity.taken(),
            reservations: self.capacity.report(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_names_its_session_its_channel_and_its_epoch() {
        let client = ChannelEpoch::of("ioplane:epoch=3f/17/0/7").unwrap();
        assert_eq!((client.holder.as_str(), client.session, client.channel, client.epoch), ("3f", 17, 0, 7));
        assert_eq!(client.claim(), None);
        let client = ChannelEpoch::of("ioplane:epoch=3f/17/0/7/18446744073709551615").unwrap();
        assert_eq!(client.claim(), Some(("3f", u64::MAX)));
        assert_eq!(client.of_host("host-b").claim(), Some(("host-b/3f", u64::MAX)));
        let wrong =
            ["", "=", "=x", "=x/1/2", "=x/1/2/-1", "=x/1/2/3/", "=x/1/2/3/-4", "=x/1/2/3/4/5", "=/1/2/3"];
        let long = format!("=x/1/2/3/{}0", u64::MAX);
        let wrong = wrong.into_iter().chain([long.as_str()]);
        for other in wrong.map(|tail| format!("{EPOCH}{tail}")).chain(["base:allocation".to_owned()]) {
            assert_eq!(ChannelEpoch::of(&other), None, "{other}");
        }
    }
}
