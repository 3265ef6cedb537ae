//! Handing a device to another process while its guest runs: everything that a server task knows, as bytes and descriptors.
//!
//! ```text
//!   old process                                            new process
//!   Running --quiesce--> Quiescent --pack--> Parcel -----> adopt --> Adopted (checked, nothing started)
//!      ^                     | Held                            |
//!      +------ take back ----+--- give away: never touched again    '--start--> Running, on the same sockets and memory
//! ```
//!
//! The front end sees nothing: its connection, and a message that it has sent half of, go along. A parcel comes from an older
//! build of our own, and is checked like any saved state.

pub(super) mod offer;
mod parcel;
mod session;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use ioplane_device::{Device, Lifecycle, Loaded, Quiescent, Stop};
use ioplane_virtio::{Vdev, VirtioDevice};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

pub use offer::Held;
use offer::Offer;
use parcel::{FileV1, Inbox, Outbox};
pub use parcel::{HandOverError, Parcel};
use session::SessionV1;

use super::connection::Connection;
use super::fault::PeerFault;
use super::handle_error::HandleError;
use super::lease::RingLease;
use super::message::MAX_FILES;
use super::server::{Handle, Server, ServerOptions};
use super::session::Session;
use crate::socket::SocketPath;

/// Names of faults that are taken over from an older self.
const MAX_FAULTS: usize = 64;

/// A connected front end, and what has come of its next message.
#[derive(Debug, Serialize, Deserialize)]
struct ConnectionV1 {
    socket: FileV1,
    process: Option<u32>,
    half: Vec<u8>,
    files: Vec<FileV1>,
}

/// A server task.
#[derive(Debug, Serialize, Deserialize)]
struct ServerV1 {
    /// Since when the guest's new requests wait: ns of CLOCK_MONOTONIC, which is the same for every process of the host.
    parked: u64,
    listener: FileV1,
    connection: Option<ConnectionV1>,
    connections: u64,
    faults: Vec<(String, u64)>,
    last_fault: Option<String>,
    session: SessionV1,
}

/// The moment now, ns of CLOCK_MONOTONIC.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(now.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0)
}

impl ConnectionV1 {
    fn pack(
        connection: &Connection,
        process: Option<u32>,
        outbox: &mut Outbox,
    ) -> Result<Self, HandOverError> {
        let (half, files) = connection.half();
        Ok(ConnectionV1 {
            socket: outbox.put(connection.socket())?,
            process,
            half: half.to_vec(),
            files: files.iter().map(|file| outbox.put(file)).collect::<Result<_, _>>()?,
        })
    }

    fn unpack(self, inbox: &mut Inbox) -> Result<Connection, HandOverError> {
        let stream = inbox.take_stream(self.socket)?;
        if self.files.len() > MAX_FILES {
            return Err(HandOverError::Damaged("a half message with too many descriptors".to_owned()));
        }
        let files = self.files.into_iter().map(|file| inbox.take(file)).collect::<Result<_, _>>()?;
        Connection::halfway(stream, self.half, files).ok_or_else(|| {
            HandOverError::Damaged("a half message that is longer than a whole one".to_owned())
        })
    }
}

/// Whether requests of a device are recorded in flight.
fn is_suspended<V: VirtioDevice>(quiescent: &Quiescent<Vdev<V>>) -> bool {
    let vdev = quiescent.device();
    let left = |index| vdev.queue(index).is_some_and(|setup| !setup.in_flight.is_empty());
    quiescent.stop() == Stop::Suspended || (0..vdev.info().queues).any(left)
}

impl<V: VirtioDevice> Server<V> {
    /// Brings the device to a quiescent point, offers it, and holds it there until the verdict. Nothing is read from the front
    /// end meanwhile: what it sends waits in the socket, for whoever has it then.
    pub(super) async fn hand_over(&mut self, offer: Offer) {
        let Offer { patience, reply, verdict, resumed } = offer;
        let refused = |why: String| Err(HandleError::Refused(why));
        if self.session.is_passing_on() {
            let why = "a migration is under way: its rings wait for those of the other side; try again when it has ended";
            return drop(reply.send(refused(why.to_owned())));
        }
        let parked = now();
        if let Err(fault) = self.session.quiesce(patience).await {
            return drop(reply.send(refused(fault.to_string())));
        }
        match self.pack(parked) {
            Ok((parcel, suspended)) => {
                if reply.send(Ok((parcel, suspended))).is_ok() {
                    // Either way it is dropped, never used: if the device is given away we do not come back from here.
                    let _ = verdict.await;
                }
            }
            Err(error) => drop(reply.send(refused(error.to_string()))),
        }
        if let Err(fault) = self.session.resume() {
            self.disconnect(fault).await;
        }
        let _ = resumed.send(());
    }

    /// The device at its quiescent point, and whether requests of it are recorded in flight.
    fn pack(&self, parked: u64) -> Result<(Parcel, bool), HandOverError> {
        let Lifecycle::Quiescent(quiescent) = &self.session.device else {
            let now = self.session.device.presence().name();
            return Err(PeerFault::NotQuiescent(format!("the device is {now}")).into());
        };
        let mut outbox = Outbox::default();
        let connection = self.connection.as_ref();
        let packed = ServerV1 {
            parked,
            listener: outbox.put(&self.listener)?,
            connection: connection.map(|it| ConnectionV1::pack(it, self.peer, &mut outbox)).transpose()?,
            connections: self.connections,
            faults: self.faults.iter().map(|(name, count)| (name.to_string(), *count)).collect(),
            last_fault: self.last_fault.clone(),
            session: self.session.pack(quiescent, &mut outbox)?,
        };
        let bytes =
            postcard::to_stdvec(&packed).map_err(|error| HandOverError::Damaged(error.to_string()))?;
        Ok((Parcel { bytes, files: outbox.into_files() }, is_suspended(quiescent)))
    }
}

/// A device that has come from another process, checked and whole. Dropped before it is started, it has touched nothing.
pub struct Adopted<V: VirtioDevice> {
    server: Server<V>,
    loaded: Loaded<Vdev<V>>,
    parked: u64,
}

/// Takes `parcel` over, for a `model` that is made as the other process's was; `patience` and `lease` as for
/// [`super::serve_leased`]. Within a tokio runtime of several threads.
pub fn adopt<V: VirtioDevice>(
    model: V,
    options: ServerOptions,
    patience: Duration,
    lease: RingLease,
    parcel: Parcel,
) -> Result<Adopted<V>, HandOverError> {
    let (packed, rest) = postcard::take_from_bytes::<ServerV1>(&parcel.bytes)
        .map_err(|error| HandOverError::Damaged(format!("a device: {error}")))?;
    if !rest.is_empty() {
        return Err(HandOverError::Damaged(format!("a device with {} bytes too many", rest.len())));
    }
    let mut inbox = Inbox::new(parcel.files);
    let listener = inbox.take_listener(packed.listener)?;
    let process = packed.connection.as_ref().and_then(|connection| connection.process);
    let connection = packed.connection.map(|connection| connection.unpack(&mut inbox)).transpose()?;
    let fresh = Session::new(model, options.pool, options.limits)?
        .with_patience(patience)
        .with_lease(lease)
        .with_dirty_log(options.dirty_log);
    let (session, loaded) = fresh.unpack(packed.session, &mut inbox)?;
    inbox.finish()?;
    let faults: BTreeMap<_, _> =
        packed.faults.into_iter().take(MAX_FAULTS).map(|(name, count)| (Cow::Owned(name), count)).collect();
    let server = Server {
        session,
        listener,
        connection,
        peer: process,
        connections: packed.connections,
        faults,
        last_fault: packed.last_fault,
        place: SocketPath::of(&options.socket),
    };
    Ok(Adopted { server, loaded, parked: packed.parked })
}

impl<V: VirtioDevice> Adopted<V> {
    /// Serves it from now on. The second is told how long its guest's requests have waited, when they do no longer.
    pub fn start(self) -> (Handle<V>, oneshot::Receiver<Duration>) {
        let Adopted { mut server, loaded, parked } = self;
        let (commands, receiver) = mpsc::channel(16);
        let (resumed, hear) = oneshot::channel();
        let handle = Handle::of(commands, server.place.path().to_owned());
        tokio::spawn(async move {
            match server.session.begin(loaded) {
                Ok(()) => {
                    let _ = resumed.send(Duration::from_nanos(now().saturating_sub(parked)));
                }
                Err(fault) => server.disconnect(fault).await,
            }
            server.run(receiver).await;
        });
        (handle, hear)
    }
}
