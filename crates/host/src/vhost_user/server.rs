//! One task for each device: accepts its front end, obeys it, and obeys the daemon between two messages.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ioplane_device::{Histogram, Meter, MeterReading, Placement, QuiescenceProof};
use ioplane_memory::Limits;
use ioplane_virtio::VirtioDevice;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};

use super::connection::Connection;
use super::fault::PeerFault;
use super::handle_error::HandleError;
use super::handover::offer::{Held, Offer};
use super::lease::RingLease;
pub use super::session::PATIENCE as STOP_PATIENCE;
use super::session::Session;
use crate::socket::{self, SocketPath};

/// How long the daemon's own requests (replace, move) may wait for a quiescent point before the device is given back.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Where and how a device is served.
#[derive(Clone)]
pub struct ServerOptions {
    /// Path of the vhost-user socket. Made with mode 0600; what was there before is replaced if nobody listens.
    pub socket: PathBuf,
    /// Where its queues sit.
    pub pool: Arc<dyn Placement>,
    /// Offer the dirty log, so that a VMM may migrate its VM while we serve it.
    pub dirty_log: bool,
    /// What front ends may take of memory.
    pub limits: Limits,
}

impl ServerOptions {
    /// Without a dirty log, with the usual limits.
    pub fn new(socket: impl Into<PathBuf>, pool: Arc<dyn Placement>) -> Self {
        ServerOptions { socket: socket.into(), pool, dirty_log: false, limits: Limits::default() }
    }
}

/// What a queue looks like from outside.
#[derive(Debug, Clone)]
pub struct QueueStatus {
    /// Which queue.
    pub index: u16,
    /// Entries; zero if the driver has not set it up.
    pub size: u16,
    /// The core that its poller is on, if it runs.
    pub core: Option<u32>,
    /// Why it stopped for good: name and text.
    pub fault: Option<(&'static str, String)>,
    /// Counts since the device was added.
    pub counts: MeterReading,
    /// Histogram of device times: [`Meter::latency`].
    pub latency: Vec<u64>,
    /// Histogram of waiting times: [`Meter::wait`].
    pub wait: Vec<u64>,
    /// Histogram of times to the interrupt: [`Meter::interrupt`].
    pub interrupt: Vec<u64>,
}

/// What a device looks like from outside.
#[derive(Debug, Clone)]
pub struct Status {
    /// A front end is connected.
    pub connected: bool,
    /// Its rings run; those of another socket of the same device cannot.
    pub owner: bool,
    /// Its rings are to run, and wait for those of another socket of the same device to stop.
    pub waiting: bool,
    /// Features that its driver accepted.
    pub features: u64,
    /// The process that it is in, if the system knows.
    pub peer: Option<u32>,
    /// Front ends that have come so far.
    pub connections: u64,
    /// Their faults, by name.
    pub faults: BTreeMap<Cow<'static, str>, u64>,
    /// The last fault's text.
    pub last_fault: Option<String>,
    /// Memory mappings that its front end has taken.
    pub mappings: u64,
    /// Its queues.
    pub queues: Vec<QueueStatus>,
}

type Change<V> = Box<dyn FnOnce(&mut V) -> bool + Send>;
type ChangeQueues<V> = Box<dyn FnOnce(&mut V) -> Option<ioplane_device::Change> + Send>;
type ChangeLimits<V> = Box<dyn FnOnce(&mut V) + Send>;
type ChangeStill<V> = Box<dyn FnOnce(&mut V, &QuiescenceProof) -> bool + Send>;

pub(super) enum Command<V: VirtioDevice> {
    Status(oneshot::Sender<Status>),
    Change(Change<V>),
    Limits(ChangeLimits<V>, oneshot::Sender<()>),
    Queues(ChangeQueues<V>, oneshot::Sender<()>),
    AtQuiescence(ChangeStill<V>, Duration, oneshot::Sender<Result<(), HandleError>>),
    Move(u16, Arc<dyn Placement>, Duration, oneshot::Sender<Result<(), HandleError>>),
    HandOver(Offer),
    Stop(bool, oneshot::Sender<Result<(), HandleError>>),
}

/// The daemon's hold on one device that is being served.
pub struct Handle<V: VirtioDevice> {
    commands: mpsc::Sender<Command<V>>,
    socket: PathBuf,
    patience: Duration,
}

impl<V: VirtioDevice> Clone for Handle<V> {
    fn clone(&self) -> Self {
        Handle { commands: self.commands.clone(), socket: self.socket.clone(), patience: self.patience }
    }
}

impl<V: VirtioDevice> Handle<V> {
    pub(super) fn of(commands: mpsc::Sender<Command<V>>, socket: PathBuf) -> Self {
        Handle { commands, socket, patience: PATIENCE }
    }

    /// The same hold with another patience than [`PATIENCE`] for its own requests: replacing and moving.
    pub fn with_patience(self, patience: Duration) -> Self {
        Handle { patience, ..self }
    }

    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command<V>) -> Result<T, HandleError> {
        let (sender, receiver) = oneshot::channel();
        self.commands.send(command(sender)).await.map_err(|_| HandleError::Gone)?;
        receiver.await.map_err(|_| HandleError::Gone)
    }

    /// How it is.
    pub async fn status(&self) -> Result<Status, HandleError> {
        self.ask(Command::Status).await
    }

    /// Changes the model while it runs. `change` says whether its configuration space is another now; then the driver is
    /// told.
    pub async fn change<R: Send + 'static>(
        &self,
        change: impl FnOnce(&mut V) -> (R, bool) + Send + 'static,
    ) -> Result<R, HandleError> {
        self.ask(|reply| {
            Command::Change(Box::new(move |model| {
                let (outcome, told) = change(model);
                let _ = reply.send(outcome);
                told
            }))
        })
        .await
    }

    /// Changes the limits and the group of the model, and tells the queues that run: when this returns, all go by them.
    pub async fn change_limits(
        &self,
        change: impl FnOnce(&mut V) + Send + 'static,
    ) -> Result<(), HandleError> {
        self.ask(|reply| Command::Limits(Box::new(change), reply)).await
    }

    /// Changes the model while it runs, and tells the queues that run what follows for them, and which block device its backing lies on: when this
    /// returns, all have heard it. A device that does not run is not changed: [`HandleError::Refused`].
    pub async fn change_queues<R: Send + 'static>(
        &self,
        change: impl FnOnce(&mut V) -> (R, Option<ioplane_device::Change>) + Send + 'static,
    ) -> Result<R, HandleError> {
        let (sender, receiver) = oneshot::channel();
        let change: ChangeQueues<V> = Box::new(move |model| {
            let (outcome, told) = change(model);
            let _ = sender.send(outcome);
            told
        });
        let refused = |_| HandleError::Refused("it does not run".to_owned());
        let (reply, told) = oneshot::channel();
        self.commands.send(Command::Queues(change, reply)).await.map_err(|_| HandleError::Gone)?;
        let told = told.await;
        let outcome = receiver.await.map_err(refused)?;
        told.map_err(|_| HandleError::Gone).map(|()| outcome)
    }

    /// Changes the model at a quiescent point. Gives the device back as it was if that takes longer than its
    /// patience.
    pub async fn at_quiescence<R: Send + 'static>(
        &self,
        change: impl FnOnce(&mut V, &QuiescenceProof) -> (R, bool) + Send + 'static,
    ) -> Result<R, HandleError> {
        let (sender, receiver) = oneshot::channel();
        let change: ChangeStill<V> = Box::new(move |model, proof| {
            let (outcome, told) = change(model, proof);
            let _ = sender.send(outcome);
            told
        });
        self.ask(|reply| Command::AtQuiescence(change, self.patience, reply)).await??;
        receiver.await.map_err(|_| HandleError::Gone)
    }

    /// Moves a queue to where `placement` says.
    pub async fn move_queue(&self, queue: u16, placement: Arc<dyn Placement>) -> Result<(), HandleError> {
        self.ask(|reply| Command::Move(queue, placement, self.patience, reply)).await?
    }

    /// Brings the device to a quiescent point, drained if that takes no longer than `patience`, and holds it there for another
    /// process to take over.
    pub async fn hand_over(&self, patience: Duration) -> Result<Held, HandleError> {
        let (reply, answer) = oneshot::channel();
        let (offer, held) = Offer::new(patience, reply);
        self.commands.send(Command::HandOver(offer)).await.map_err(|_| HandleError::Gone)?;
        answer.await.map_err(|_| HandleError::Gone)?.map(held)
    }

    /// Ends the service: refuses while a front end is connected, unless forced. When it returns, the model and its backing
    /// are gone.
    pub async fn stop(&self, force: bool) -> Result<(), HandleError> {
        self.ask(|reply| Command::Stop(force, reply)).await??;
        self.commands.closed().await;
        Ok(())
    }
}

/// Serves `model` on its socket until stopped. Must be called within a tokio runtime of several threads.
pub fn serve<V: VirtioDevice>(model: V, options: ServerOptions) -> std::io::Result<Handle<V>> {
    serve_within(model, options, STOP_PATIENCE)
}

/// As [`serve`], with another patience for requests that do not end when the front end wants a ring to stop; then they
/// are suspended, and stay in the in-flight region.
pub fn serve_within<V: VirtioDevice>(
    model: V,
    options: ServerOptions,
    patience: Duration,
) -> std::io::Result<Handle<V>> {
    serve_leased(model, options, patience, RingLease::default())
}

/// As [`serve_within`], for one of several sockets of the same device: rings run behind the one that holds `lease`, which
/// passes to another when that one's rings start and the holder's have stopped. The models must be of one device (as
/// `Blk::second_instance` makes them).
pub fn serve_leased<V: VirtioDevice>(
    model: V,
    options: ServerOptions,
    patience: Duration,
    lease: RingLease,
) -> std::io::Result<Handle<V>> {
    let listener = UnixListener::from_std(socket::bind(&options.socket)?)?;
    let session = Session::new(model, options.pool, options.limits)
        .map_err(std::io::Error::other)?
        .with_patience(patience)
        .with_lease(lease)
        .with_dirty_log(options.dirty_log);
    let (commands, receiver) = mpsc::channel(16);
    let server = Server {
        session,
        listener,
        connection: None,
        peer: None,
        connections: 0,
        faults: BTreeMap::new(),
        last_fault: None,
        place: SocketPath::of(&options.socket),
    };
    tokio::spawn(server.run(receiver));
    Ok(Handle::of(commands, options.socket))
}

pub(super) struct Server<V: VirtioDevice> {
    pub(super) session: Session<V>,
    pub(super) listener: UnixListener,
    pub(super) connection: Option<Connection>,
    pub(super) peer: Option<u32>,
    pub(super) connections: u64,
    pub(super) faults: BTreeMap<Cow<'static, str>, u64>,
    pub(super) last_fault: Option<String>,
    pub(super) place: SocketPath,
}

impl<V: VirtioDevice> Server<V> {
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command<V>>) {
        loop {
            tokio::select! {
                biased;
                command = commands.recv() => {
                    let Some(command) = command else { break };
                    if self.obey(command).await {
                        break;
                    }
                }
                granted = self.session.granted() => {
                    let started = match granted {
                        Ok(()) => self.session.start_granted().await,
                        Err(fault) => Err(fault),
                    };
                    if let Err(fault) = started {
                        self.disconnect(fault).await;
                    }
                }
                message = receive(&mut self.connection) => {
                    let outcome = match (message, &self.connection) {
                        (Ok(message), Some(connection)) => self.session.handle(message, connection).await,
                        (Ok(_), None) => Ok(()),
                        (Err(fault), _) => Err(fault),
                    };
                    if let Err(fault) = outcome {
                        self.disconnect(fault).await;
                    }
                }
                // Last: a front end that has left is heard before the one that comes after it.
                accepted = self.listener.accept() => {
                    if !self.accept(accepted).await {
                        break;
                    }
                }
            }
        }
        self.place.clear();
        if let Err(fault) = self.session.forget_peer().await {
            tracing::error!(%fault, "the device did not stop cleanly");
        }
        // Dropped before the channel closes: whoever waits for that finds the backing free.
        drop(self);
        drop(commands);
    }

    /// Takes a front end in, or turns it away; says whether there is any use in waiting for another.
    async fn accept(
        &mut self,
        accepted: std::io::Result<(tokio::net::UnixStream, tokio::net::unix::SocketAddr)>,
    ) -> bool {
        match accepted {
            Ok((stream, _)) if self.connection.is_none() => {
                self.connections += 1;
                self.peer = stream.peer_cred().ok().and_then(|peer| u32::try_from(peer.pid()?).ok());
                self.connection = Some(Connection::new(stream));
            }
            Ok(_) => {
                tracing::warn!(socket = %self.place.path().display(), "a second front end was turned away")
            }
            // Without a number of the system's the runtime is going down, and so are we.
            Err(error) if error.raw_os_error().is_none() => return false,
            Err(error) => {
                tracing::warn!(%error, "accepting a front end");
                // Out of descriptors, most likely: it will be as bad at once.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        true
    }

    pub(super) async fn disconnect(&mut self, fault: PeerFault) {
        self.connection = None;
        match &fault {
            PeerFault::Closed => {
                tracing::info!(socket = %self.place.path().display(), "the front end has left")
            }
            fault => {
                tracing::warn!(socket = %self.place.path().display(), %fault, "the front end was disconnected");
                *self.faults.entry(fault.name().into()).or_default() += 1;
                self.last_fault = Some(fault.to_string());
            }
        }
        if let Err(fault) = self.session.forget_peer().await {
            *self.faults.entry(fault.name().into()).or_default() += 1;
            tracing::error!(%fault, "the device did not stop cleanly");
        }
    }

    /// Carries out a command; says whether it was the last.
    async fn obey(&mut self, command: Command<V>) -> bool {
        match command {
            Command::Status(reply) => {
                let _ = reply.send(self.status());
            }
            Command::Change(change) => {
                let Some(running) = self.session.device_mut() else { return false };
                if change(running.device_mut().model_mut()) {
                    self.tell_driver().await;
                }
            }
            Command::Limits(change, reply) => {
                if self.session.change_limits(change).await.is_ok() {
                    let _ = reply.send(());
                }
            }
            Command::Queues(change, reply) => {
                if self.session.change_queues(change).await.is_ok() {
                    let _ = reply.send(());
                }
            }
            Command::AtQuiescence(change, patience, reply) => {
                let work = |quiescent: &mut ioplane_device::Quiescent<_>| {
                    quiescent
                        .with(|vdev: &mut ioplane_virtio::Vdev<V>, proof| change(vdev.model_mut(), proof))
                };
                let outcome = self.session.at_quiescence_within(patience, work).await;
                if let Ok(true) = outcome {
                    self.tell_driver().await;
                }
                let _ =
                    reply.send(outcome.map(|_| ()).map_err(|fault| HandleError::Refused(fault.to_string())));
            }
            Command::Move(queue, placement, patience, reply) => {
                let outcome = self.session.move_queue(queue, placement, patience).await;
                let _ = reply.send(outcome.map_err(|fault| HandleError::Refused(fault.to_string())));
            }
            Command::HandOver(offer) => self.hand_over(offer).await,
            Command::Stop(force, reply) => {
                let refused = self.connection.is_some() && !force;
                let _ = reply.send(if refused { Err(HandleError::Connected) } else { Ok(()) });
                return !refused;
            }
        }
        false
    }

    async fn tell_driver(&mut self) {
        if let Err(fault) = self.session.config_changed().await {
            tracing::warn!(%fault, "telling the driver of its new configuration");
        }
    }

    fn status(&self) -> Status {
        let device = self.session.device();
        let queue = |(index, meter): (u16, &Arc<Meter>)| {
            let setup = device.and_then(|device| device.device().queue(index));
            QueueStatus {
                index,
                size: setup.map_or(0, |setup| setup.layout.size),
                core: device.and_then(|device| device.core_of(index)).map(|core| core.0),
                fault: setup.and_then(|setup| setup.fault).map(|fault| (fault.name(), fault.to_string())),
                counts: meter.read(),
                latency: meter.latency.snapshot(),
                wait: meter.wait.snapshot(),
                interrupt: meter.interrupt.snapshot(),
            }
        };
        let meters = device.map_or(&[][..], |device| device.device().meters());
        let (owner, waiting) = self.session.ownership();
        Status {
            connected: self.connection.is_some(),
            peer: self.peer.filter(|_| self.connection.is_some()),
            owner,
            waiting,
            features: device.map_or(0, |device| device.device().features()),
            connections: self.connections,
            faults: self.faults.clone(),
            last_fault: self.last_fault.clone(),
            mappings: self.session.account.mappings() as u64,
            queues: (0..).zip(meters).map(queue).collect(),
        }
    }
}

async fn receive(connection: &mut Option<Connection>) -> Result<super::message::Message, PeerFault> {
    match connection {
        Some(connection) => connection.receive().await,
        None => std::future::pending().await,
    }
}

impl QueueStatus {
    /// The time below which `part` of the requests lie, in ns.
    pub fn quantile(&self, part: f64) -> u64 {
        Histogram::quantile(&self.latency, part)
    }
}
