//! Exports: disks of this host that others use over NBD.
//!
//! ```text
//!   control side   listener -> Handshakes::accept(stream, &Exports) -> Export::connect -> queue -> Running::start
//!                                                                          ^                          |
//!                  Running::drain <- EndedConnections::next() <--+         | Device::deactivate       v
//!   I/O core                                                     +---- ExportPoller: one connection, one IoChannel
//! ```
//!
//! An [`Export`] is a device whose guests are the clients: one queue for each connection in its transmission phase. It is run as any
//! other device: at a quiescent point all connections rest, with what was received in part and what could not be sent yet, and go on
//! when it is resumed. A fault of one client ends that one's connection only. `tests/support/listener.rs` is an owner in some eighty lines.

mod accept;
mod bell;
mod check;
mod connection;
mod ended;
mod failures;
mod memory;
mod poller;
mod published;
mod readiness;
mod socket;
mod status;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::{
    Access, Activation, Device, DeviceError, DeviceInfo, Effect, Meter, Parked, QueueSet, QuiescenceProof,
    RegisterAddress, SavedState, Share, StateError,
};
use ioplane_scheduler::{BlockDevice, LimitSet};
use ioplane_storage::{Backing, StorageError};

pub use accept::{AcceptedClient, Arrival, Exports, Handshakes};
use bell::Bell;
use check::Terms;
use connection::{Connection, Setup};
use ended::EndedQueue;
pub use ended::{ConnectionEnd, Ended, EndedConnections, WRONG_SUM};
pub use failures::{FailedFlushes, FlushRecorder};
use poller::{ExportPoller, Provided};
pub use published::PublishedExport;
use readiness::Readiness;
pub use socket::ClientSocket;
use status::{StatusPlace, StatusThread};

use crate::error::NbdError;
use crate::handshake::server::Negotiated;
use crate::handshake::{BlockSizes, is_string};
use crate::protection::Protection;
use crate::spec::BASE_ALLOCATION;

/// How long an export waits for I/O that an earlier use of its backing has left behind.
const REPLAY_PATIENCE: Duration = Duration::from_secs(30);

/// How a disk is to be exported.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// For people, in lists.
    pub description: String,
    /// Refuse writes, whatever the backing allows.
    pub read_only: bool,
    /// Most connections at a time, 1 to 1024.
    pub connections: u16,
    /// Most requests at a time of each connection, 1 to 1024.
    pub depth: u16,
    /// Most data at a time of each connection, in bytes. Taken as they are used.
    pub memory: u32,
    /// Most data of one request, in bytes: 4096 to 2 MiB, and not more than the memory.
    pub largest: u32,
    /// Whether clients are told where the disk has holes, which takes a thread once one may ask. Without, all counts as data.
    pub holes: bool,
    /// A TCP peer that neither sends nor acknowledges anything for this long is gone.
    pub silence: Duration,
}

impl Default for ExportOptions {
    fn default() -> Self {
        ExportOptions {
            description: String::new(),
            read_only: false,
            connections: 16,
            depth: 64,
            memory: 8 << 20,
            largest: 2 << 20,
            holes: true,
            silence: Duration::from_secs(30),
        }
    }
}

impl ExportOptions {
    fn check(&self) -> Result<(), NbdError> {
        let wrong = match self {
            ExportOptions { connections: 0 | 1025.., .. } => "connections other than 1 to 1024",
            ExportOptions { depth: 0 | 1025.., .. } => "a depth other than 1 to 1024",
            ExportOptions { largest: 0..4096, .. } => "requests of less than 4096 bytes",
            ExportOptions { largest, .. } if *largest > memory::LARGEST => "requests of more than 2 MiB",
            ExportOptions { largest, memory, .. } if largest > memory => "requests of more than its memory",
            _ => return Ok(()),
        };
        Err(NbdError::Options(wrong))
    }
}

/// Where the connection of a queue is.
#[derive(Debug)]
enum Place {
    Free,
    /// Here, at rest.
    Here(Box<Connection>),
    /// With its poller.
    Running,
    /// With its poller, and wanted back to be dropped.
    Closing,
}

/// A disk that is exported: the control half.
#[derive(Debug)]
pub struct Export {
    info: DeviceInfo,
    options: ExportOptions,
    backing: Arc<dyn Backing>,
    published: PublishedExport,
    places: Vec<Place>,
    meters: Vec<Arc<Meter>>,
    ended: Arc<EndedQueue>,
    failed: Arc<FailedFlushes>,
    /// Once somebody may ask for holes.
    status: Option<Arc<StatusThread>>,
    /// How many connections have ended, by [`ConnectionEnd::NAMES`].
    ends: [u64; ConnectionEnd::NAMES.len()],
    /// By queue.
    limits: Vec<LimitSet>,
    /// By queue: of the connection that is there, or was last.
    protections: Vec<Protection>,
    share: Share,
}

impl Export {
    /// The disk behind `backing`, called `name` by clients. Nobody can use it before [`Export::connect`].
    pub fn new(
        name: impl Into<String>,
        backing: Arc<dyn Backing>,
        options: ExportOptions,
    ) -> Result<Export, NbdError> {
        options.check()?;
        let name = name.into();
        if !is_string(name.as_bytes()) {
            return Err(NbdError::Name(name.chars().take(64).collect()));
        }
        let queues = options.connections;
        let published = PublishedExport::new(&name, &options, &backing.info());
        Ok(Export {
            info: DeviceInfo { name, kind: "nbd-export", queues },
            places: (0..queues).map(|_| Place::Free).collect(),
            meters: (0..queues).map(|_| Arc::default()).collect(),
            ended: EndedQueue::new(queues),
            failed: Arc::default(),
            status: None,
            ends: [0; ConnectionEnd::NAMES.len()],
            limits: vec![LimitSet::default(); queues.into()],
            protections: vec![Protection::None; queues.into()],
            share: Share::default(),
            published,
            backing,
            options,
        })
    }

    /// What handshakes are told of it, while its owner has it.
    pub fn published(&self) -> PublishedExport {
        self.published.clone()
    }

    /// Where its owner hears of connections that have ended.
    pub fn ended(&self) -> EndedConnections {
        EndedConnections(self.ended.clone())
    }

    /// Its flushes that have failed.
    pub fn failed_flushes(&self) -> &Arc<FailedFlushes> {
        &self.failed
    }

    /// What is behind it.
    pub fn backing(&self) -> &Arc<dyn Backing> {
        &self.backing
    }

    /// Puts another backing behind it; its content is the caller's business. What clients were told must hold for it, too.
    pub fn replace_backing(
        &mut self,
        _proof: &QuiescenceProof,
        backing: Arc<dyn Backing>,
    ) -> Result<Arc<dyn Backing>, String> {
        let new = backing.info();
        let told = self.published.info();
        let blocks = told.blocks.unwrap_or_default();
        if new.read_only && !told.read_only() {
            return Err(format!("{} is read-only, and clients were promised a writable disk", new.name));
        }
        if new.logical_block > blocks.minimum || new.bytes < told.bytes {
            return Err(format!("{} is smaller, or has larger blocks, than clients were promised", new.name));
        }
        if !backing.wait_quiet(Instant::now() + REPLAY_PATIENCE) {
            return Err(format!("{} still has I/O under way from an earlier use", new.name));
        }
        Ok(std::mem::replace(&mut self.backing, backing))
    }

    /// Changes the size while clients use it. They may use what has been added at once, also those that were told of a smaller disk: nobody has to connect
    /// again to do so. Blocks for as long as the backing does.
    ///
    /// # Errors
    /// The backing refuses, or it would be smaller and clients are connected, which count on what they were told.
    pub fn resize(&mut self, bytes: u64) -> Result<(), StorageError> {
        let smaller = bytes < self.published.bytes();
        if smaller && self.connections() > 0 {
            let why = format!("{} connections count on its size", self.connections());
            return Err(StorageError::Size { image: self.backing.info().name, bytes, why });
        }
        if smaller {
            self.published.set_bytes(bytes);
        }
        let outcome = self.backing.resize(bytes);
        self.published.set_bytes(self.backing.info().bytes);
        outcome
    }

    /// Takes a client over whose handshake has ended with this export: gives it a queue, which the owner then starts
    /// (`Running::start`). `ahead` is what it has sent beyond the handshake.
    pub fn connect(
        &mut self,
        socket: impl Into<ClientSocket>,
        negotiated: &Negotiated,
        ahead: &[u8],
    ) -> Result<u16, NbdError> {
        let socket = socket.into();
        let most = self.options.connections;
        let free = self.places.iter().position(|place| matches!(place, Place::Free));
        let queue = free.ok_or(NbdError::Connections(most))? as u16;
        self.prepare(&socket).map_err(|source| NbdError::Os { doing: "setting a socket up", source })?;
        let BlockSizes { minimum, maximum, .. } = negotiated.info.blocks.unwrap_or_default();
        let allocation = negotiated.contexts.iter().find(|context| context.name == BASE_ALLOCATION);
        let allocation = allocation.filter(|_| self.options.holes).map(|context| context.id);
        if allocation.is_some() && self.status.is_none() {
            let thread = StatusThread::start(most);
            self.status = Some(thread.map_err(|source| NbdError::Os { doing: "starting a thread", source })?);
        }
        let setup = Setup {
            queue,
            terms: Terms {
                bytes: negotiated.info.bytes,
                block: minimum,
                largest: maximum.min(self.options.largest),
                read_only: negotiated.info.read_only(),
                structured: negotiated.structured,
                contexts: !negotiated.contexts.is_empty(),
            },
            contexts: negotiated.contexts.iter().map(|context| context.id).collect(),
            allocation,
            depth: self.options.depth,
            memory: self.options.memory,
            ahead,
        };
        let connection = Connection::new(socket, setup)?.ok_or(NbdError::Ahead(ahead.len()))?;
        self.protections[usize::from(queue)] = connection.socket.protection();
        self.places[usize::from(queue)] = Place::Here(Box::new(connection));
        self.published.count(self.connections());
        Ok(queue)
    }

    /// The client of `queue` was told which instance the export is when so many flushes had failed. Called before the queue is started.
    ///
    /// From the next failure on its connection takes no request, answers no flush with success, and ends: its next one is told of another instance. If it went
    /// on, a flush that succeeds later would be taken to cover what the failed one has lost. Without effect on a backing whose flushes all fail from then on
    /// ([`Backing::fails_on`]), where that cannot be.
    pub fn bind(&mut self, queue: u16, failed: u64) {
        if let Some(Place::Here(connection)) = self.places.get_mut(usize::from(queue)) {
            connection.told_failures = Some(failed);
        }
    }

    /// What a connection needs of its socket: it never blocks, sends at once, and notices when its peer is gone.
    fn prepare(&self, socket: &ClientSocket) -> std::io::Result<()> {
        let flags = rustix::fs::fcntl_getfl(socket)?;
        rustix::fs::fcntl_setfl(socket, flags | rustix::fs::OFlags::NONBLOCK)?;
        socket::notice_silence(socket, self.options.silence)
    }

    /// Ends a connection: if its queue runs the owner drains it, and then it is dropped. Requests in flight are answered.
    pub fn close(&mut self, queue: u16) {
        let Some(place) = self.places.get_mut(usize::from(queue)) else { return };
        match place {
            Place::Here(_) => {
                *place = Place::Free;
                self.count_end(ConnectionEnd::ByOwner);
            }
            Place::Running => *place = Place::Closing,
            Place::Free | Place::Closing => {}
        }
        self.published.count(self.connections());
    }

    /// Connections that there are, running or at rest.
    pub fn connections(&self) -> usize {
        self.places.iter().filter(|place| !matches!(place, Place::Free)).count()
    }

    /// How many of them are protected like that.
    pub fn protected(&self, by: Protection) -> usize {
        let there = self.places.iter().zip(&self.protections);
        there.filter(|(place, protection)| !matches!(place, Place::Free) && **protection == by).count()
    }

    /// How many connections have ended, by the name of the [`ConnectionEnd`].
    pub fn ends(&self) -> impl Iterator<Item = (&'static str, u64)> {
        ConnectionEnd::NAMES.into_iter().zip(self.ends)
    }

    fn count_end(&mut self, end: ConnectionEnd) {
        if let Some(at) = ConnectionEnd::NAMES.iter().position(|name| *name == end.name()) {
            self.ends[at] += 1;
        }
    }

    /// The counts of a queue. They go on from one connection to the next.
    pub fn meter(&self, queue: u16) -> Option<&Arc<Meter>> {
        self.meters.get(usize::from(queue))
    }

    /// The limits of a queue, which stay the same from one connection to the next. A queue that runs has those of before until it is told
    /// ([`ioplane_device::Change::Limits`]).
    pub fn set_limits(&mut self, queue: u16, limits: LimitSet) {
        if let Some(place) = self.limits.get_mut(usize::from(queue)) {
            *place = limits;
        }
    }

    /// Another group. Queues that run have the one of before until they are told ([`ioplane_device::Change::Share`]).
    pub fn set_share(&mut self, share: Share) {
        self.share = share;
    }

    /// What a poller of `queue` needs beside its connection.
    fn provide(&self, queue: u16) -> Result<Provided, DeviceError> {
        let Some(Place::Here(connection)) = self.places.get(usize::from(queue)) else {
            return Err(DeviceError::NoSuchQueue(queue));
        };
        let channel = self.backing.channel(connection.depth());
        let channel = channel.map_err(|error| DeviceError::Below(Box::new(error)))?;
        let os = |error: std::io::Error| DeviceError::Below(Box::new(error));
        let bell = Bell::new().map_err(os)?;
        let readiness = Readiness::new([channel.waker(), Some(bell.as_fd())]).map_err(os)?;
        self.failed.tell(&bell);
        let (ended, meter) = (self.ended.clone(), self.meters[usize::from(queue)].clone());
        let (published, failed) = (self.published.clone(), self.failed.clone());
        let status = self.status.clone().filter(|_| connection.tells_holes());
        let status =
            status.map(|thread| StatusPlace::new(thread, &self.backing, bell.clone(), connection.depth()));
        let fails_on = self.backing.fails_on();
        Ok(Provided { channel, readiness, bell, ended, failed, fails_on, status, meter, published })
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.published.withdraw();
    }
}

impl Device for Export {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// It has no registers.
    fn access(&mut self, _at: RegisterAddress, op: Access<'_>) -> Effect {
        if let Access::Read(bytes) = op {
            bytes.fill(0xff);
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        let wanted = |place: &Place| matches!(place, Place::Here(_) | Place::Running);
        (0..).zip(&self.places).filter(|(_, place)| wanted(place)).map(|(queue, _)| queue).collect()
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        // I/O that an earlier poller left behind could land over what is written from now on, or be replayed beside itself.
        if !self.backing.wait_quiet(Instant::now() + REPLAY_PATIENCE) {
            let (image, seconds) = (self.backing.info().name, REPLAY_PATIENCE.as_secs());
            return Err(DeviceError::Below(Box::new(StorageError::NotQuiet { image, seconds })));
        }
        // All or none: a poller that goes nowhere would take its connection along.
        let queues: Vec<u16> = activation.queues().iter().copied().collect();
        let provided = queues.iter().map(|queue| self.provide(*queue)).collect::<Result<Vec<_>, _>>()?;
        for (queue, provided) in queues.into_iter().zip(provided) {
            let place = &mut self.places[usize::from(queue)];
            match std::mem::replace(place, Place::Running) {
                Place::Here(connection) => {
                    activation.add(queue, Box::new(ExportPoller::new(*connection, provided)));
                }
                other => *place = other,
            }
        }
        Ok(())
    }

    fn queue_limits(&self, queue: u16) -> LimitSet {
        self.limits.get(usize::from(queue)).cloned().unwrap_or_default()
    }

    fn share(&self) -> Share {
        self.share
    }

    fn block_device(&self) -> Option<BlockDevice> {
        self.backing.info().block_device
    }

    fn deactivate(&mut self, parked: Parked) {
        let queue = usize::from(parked.queue());
        let Ok(poller) = parked.into_poller::<ExportPoller>() else {
            debug_assert!(false, "queue {queue} was parked with somebody else's poller");
            return;
        };
        let connection = poller.into_connection();
        // The queue may be somebody else's when the owner looks.
        self.ended.forget(queue as u16);
        let closing = matches!(self.places[queue], Place::Closing).then_some(ConnectionEnd::ByOwner);
        self.places[queue] = match connection.end.or(closing) {
            Some(end) => {
                self.count_end(end);
                Place::Free
            }
            None => Place::Here(Box::new(connection)),
        };
        self.published.count(self.connections());
    }

    /// Its connections are this process's: another one is connected to anew.
    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Ok(SavedState { kind: self.info.kind.to_owned(), version: 1, body: Vec::new() })
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        match state.expect(self.info.kind, 1)? {
            [] => Ok(()),
            body => Err(StateError::Damaged(format!("{} bytes where there are none", body.len())).into()),
        }
    }

    /// All connections end.
    fn reset(&mut self, _proof: &QuiescenceProof) {
        for queue in 0..self.info.queues {
            self.close(queue);
        }
    }
}
