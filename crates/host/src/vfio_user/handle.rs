//! What others have of a service: a handle, and the commands that its thread obeys between two messages of the client.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ioplane_device::{
    DeviceError, Lifecycle, LoadError, Placement, Presence, QuiesceError, QuiescePolicy, Quiesced, Quiescent,
    SavedState,
};
use ioplane_pci::Function;
use tokio::sync::oneshot;

use super::dma_write::{DmaOrder, DmaRead, DmaWrite, DmaWriteError, DmaWrites, DmaWritten};
use super::status::{Status, StatusBoard};
use super::write_log::WriteLogError;

/// Why a service does not do what it is asked; it goes on as it was.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// A client is connected.
    #[error("a VMM is connected: shut the VM down or unplug the device first, or use --force")]
    Connected,
    /// The service has ended.
    #[error("the device is gone")]
    Gone,
}

type Step<F> = Box<dyn FnOnce(&mut Lifecycle<F>) + Send>;

/// What the thread of a service is asked.
pub(super) enum Command<F: Function> {
    /// Something that needs no quiescent point, or that does nothing without one.
    With(Step<F>),
    /// Something that needs one.
    Quiesce(Request<F>),
    /// The device goes on.
    Resume(oneshot::Sender<Result<bool, DeviceError>>),
    /// The client is to write to its memory, or to read it.
    Dma(DmaOrder),
    /// What the device writes is logged from here on, or no longer.
    Log(bool, oneshot::Sender<Result<bool, WriteLogError>>),
    /// Which pages it has written.
    Written(oneshot::Sender<Option<Vec<u64>>>),
}

/// A quiescent point that somebody asks for, by a policy.
pub(super) struct Request<F: Function> {
    pub policy: QuiescePolicy,
    pub purpose: Purpose<F>,
}

pub(super) enum Purpose<F: Function> {
    /// To be held there, until it is resumed or for that long.
    Hold(Duration, oneshot::Sender<Result<Quiesced, QuiesceError>>),
    Work(Box<dyn Work<F>>),
}

impl<F: Function> Request<F> {
    /// Whether nobody waits for it any more. If somebody does, `context` is woken when that ends.
    pub fn is_given_up(&mut self, context: &mut Context<'_>) -> bool {
        match &mut self.purpose {
            Purpose::Hold(_, reply) => reply.poll_closed(context).is_ready(),
            Purpose::Work(work) => work.is_given_up(context),
        }
    }

    pub fn refuse(self, error: QuiesceError) {
        match self.purpose {
            Purpose::Hold(_, reply) => drop(reply.send(Err(error))),
            Purpose::Work(work) => work.done(Err(error)),
        }
    }
}

/// What is to be done at a quiescent point, and who waits for its outcome.
pub(super) trait Work<F: Function>: Send {
    fn is_given_up(&mut self, context: &mut Context<'_>) -> bool;
    fn work(&mut self, device: &mut Lifecycle<F>, placement: &dyn Placement);
    fn done(self: Box<Self>, outcome: Result<(), QuiesceError>);
}

struct Job<W, R> {
    work: Option<W>,
    outcome: Option<R>,
    reply: oneshot::Sender<Result<R, QuiesceError>>,
}

impl<F, W, R> Work<F> for Job<W, R>
where
    F: Function,
    W: FnOnce(&mut Lifecycle<F>, &dyn Placement) -> Option<R> + Send,
    R: Send,
{
    fn is_given_up(&mut self, context: &mut Context<'_>) -> bool {
        self.reply.poll_closed(context).is_ready()
    }

    fn work(&mut self, device: &mut Lifecycle<F>, placement: &dyn Placement) {
        self.outcome = self.work.take().and_then(|work| work(device, placement));
    }

    fn done(self: Box<Self>, outcome: Result<(), QuiesceError>) {
        let Job { outcome: done, reply, .. } = *self;
        let _ = reply.send(outcome.and_then(|()| done.ok_or(QuiesceError::NotHere("not quiescent"))));
    }
}

/// An answer of the service's. A task awaits it, a thread waits for it. Dropped before it has come, a quiescent point that was asked for
/// is given up, and the device goes on.
#[derive(Debug)]
pub struct PendingReply<T>(oneshot::Receiver<T>);

impl<T> PendingReply<T> {
    /// Blocks until it has come. Not within an asynchronous task.
    pub fn wait(self) -> Result<T, HandleError> {
        self.0.blocking_recv().map_err(|_| HandleError::Gone)
    }
}

impl<T> Future for PendingReply<T> {
    type Output = Result<T, HandleError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(|_| HandleError::Gone)
    }
}

struct Ends<F: Function> {
    socket: PathBuf,
    board: Arc<StatusBoard>,
    commands: mpsc::Sender<Command<F>>,
    /// Written for the thread to read its commands.
    event: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

fn signal(file: &OwnedFd) {
    // A full counter is readable too.
    let _ = rustix::io::write(file, &1u64.to_ne_bytes());
}

impl<F: Function> Drop for Ends<F> {
    fn drop(&mut self) {
        signal(&self.stop);
    }
}

/// The daemon's hold on one device that is being served. The service's thread owns the device; whatever is asked of it here happens there,
/// between two messages of the client. When the last copy is dropped the service ends, by force if need be.
pub struct Handle<F: Function>(Arc<Ends<F>>);

impl<F: Function> Clone for Handle<F> {
    fn clone(&self) -> Self {
        Handle(self.0.clone())
    }
}

impl<F: Function> std::fmt::Debug for Handle<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("socket", &self.0.socket).finish_non_exhaustive()
    }
}

/// The thread's ends of what a [`Handle`] has.
pub(super) struct Mailbox<F: Function> {
    pub commands: mpsc::Receiver<Command<F>>,
    pub event: Arc<OwnedFd>,
    pub stop: Arc<OwnedFd>,
    pub board: Arc<StatusBoard>,
}

impl<F: Function> Mailbox<F> {
    /// A mailbox, and what makes a handle of its thread.
    pub fn new(socket: PathBuf) -> std::io::Result<(Self, impl FnOnce(JoinHandle<()>) -> Handle<F>)> {
        let (sender, commands) = mpsc::channel();
        let (event, stop) = (crate::eventfd::fresh()?, crate::eventfd::fresh()?);
        let board: Arc<StatusBoard> = Arc::default();
        let mailbox = Mailbox { commands, event: event.clone(), stop: stop.clone(), board: board.clone() };
        let handle = |thread| {
            let thread = Mutex::new(Some(thread));
            Handle(Arc::new(Ends { socket, board, commands: sender, event, stop, thread }))
        };
        Ok((mailbox, handle))
    }
}

impl<F: Function> Handle<F> {
    /// Path of its socket.
    pub fn socket(&self) -> &Path {
        &self.0.socket
    }

    /// How it is. Never waits for the service.
    pub fn status(&self) -> Status {
        self.0.board.read()
    }

    /// Which part of its life the device was in when the thread last looked. Never waits for the service.
    pub fn presence(&self) -> Presence {
        self.0.board.presence()
    }

    /// How long the device is held yet, if somebody holds it; [`Duration::MAX`] until it is told to go on.
    pub fn held(&self) -> Option<Duration> {
        self.0.board.held()
    }

    fn send(&self, command: Command<F>) {
        // To a thread that has ended: dropped here, whoever waits for the answer hears that.
        let _ = self.0.commands.send(command);
        signal(&self.0.event);
    }

    /// Does something to the device where it is: looks at it, changes what needs no quiescent point. Its client waits meanwhile.
    pub fn with<R: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Lifecycle<F>) -> R + Send + 'static,
    ) -> PendingReply<R> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::With(Box::new(move |device| drop(reply.send(work(device))))));
        PendingReply(answer)
    }

    /// Brings the device to a quiescent point and holds it there, until [`Handle::resume`] or for `lease`; with [`Duration::MAX`] until its client has left
    /// instead. Its guest is served until then, and its accesses wait from then on.
    pub fn hold(
        &self,
        policy: QuiescePolicy,
        lease: Duration,
    ) -> PendingReply<Result<Quiesced, QuiesceError>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Quiesce(Request { policy, purpose: Purpose::Hold(lease, reply) }));
        PendingReply(answer)
    }

    /// The device that is held goes on. False: nobody holds it, and it runs. One that does not go on stays held, and is tried again.
    pub fn resume(&self) -> PendingReply<Result<bool, DeviceError>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Resume(reply));
        PendingReply(answer)
    }

    /// Has the client write to its own memory, by VFIO_USER_DMA_WRITE, and waits for its answers until `deadline`: QEMU marks such a page as
    /// dirty, also one that it is about to send to another host; and it reaches what is no memory that the device has. Between two messages of
    /// the client, in order; the first write that fails ends it. What the client writes is what memory has when the command is sent, so a device
    /// that is to be told nothing else is at rest.
    pub fn write(
        &self,
        writes: Vec<DmaWrite>,
        deadline: Instant,
    ) -> PendingReply<Result<DmaWritten, DmaWriteError>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Dma(DmaOrder::Write(DmaWrites { writes, deadline, reply })));
        PendingReply(answer)
    }

    /// Has the client read `len` bytes for the device by VFIO_USER_DMA_READ, and waits for its answer until `deadline`: also what is no memory that the
    /// device has, such as the MSI-X table that the client emulates.
    pub fn read(
        &self,
        address: u64,
        len: usize,
        deadline: Instant,
    ) -> PendingReply<Result<Vec<u8>, DmaWriteError>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Dma(DmaOrder::Read(DmaRead { address, len, deadline, reply })));
        PendingReply(answer)
    }

    /// Logs from here on which pages of the client's memory the device writes, by [`ioplane_device::Change::Log`], which devices that let hardware do
    /// so do not know; `false` ends it. Says whether there was a log: what was in it is lost. It ends with the client.
    pub fn log(&self, yes: bool) -> PendingReply<Result<bool, WriteLogError>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Log(yes, reply));
        PendingReply(answer)
    }

    /// Guest addresses of the pages that the device has written since this was asked last, ascending; `None` without a log. All of them once
    /// it is held.
    pub fn written(&self) -> PendingReply<Option<Vec<u64>>> {
        let (reply, answer) = oneshot::channel();
        self.send(Command::Written(reply));
        PendingReply(answer)
    }

    /// Does `work` at a quiescent point. A device that somebody holds stays held, others go on.
    pub fn at_quiescence<R: Send + 'static>(
        &self,
        policy: QuiescePolicy,
        work: impl FnOnce(&mut Quiescent<F>) -> R + Send + 'static,
    ) -> PendingReply<Result<R, QuiesceError>> {
        self.quiesce_for(policy, move |device, _| device.quiescent().ok().map(work))
    }

    /// Loads a state at a quiescent point; the device goes on from there, and nobody holds it any more.
    pub fn load(
        &self,
        policy: QuiescePolicy,
        state: SavedState,
    ) -> PendingReply<Result<Result<(), LoadError>, QuiesceError>> {
        self.quiesce_for(policy, move |device, placement| Some(device.load(&state, placement)))
    }

    fn quiesce_for<R: Send + 'static>(
        &self,
        policy: QuiescePolicy,
        work: impl FnOnce(&mut Lifecycle<F>, &dyn Placement) -> Option<R> + Send + 'static,
    ) -> PendingReply<Result<R, QuiesceError>> {
        let (reply, answer) = oneshot::channel();
        let job = Job { work: Some(work), outcome: None, reply };
        self.send(Command::Quiesce(Request { policy, purpose: Purpose::Work(Box::new(job)) }));
        PendingReply(answer)
    }

    /// Ends the service: refuses while a client is connected, unless forced. When it returns, the client's memory is gone from the
    /// device, the socket is gone, and so is the device. Waits for the device to stop: at most a few times the patience of its options.
    pub fn stop(&self, force: bool) -> Result<(), HandleError> {
        if self.0.board.connected.load(Relaxed) && !force {
            return Err(HandleError::Connected);
        }
        signal(&self.0.stop);
        // Whoever comes second waits for the first.
        let mut thread = self.0.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = thread.take()
            && thread.join().is_err()
        {
            tracing::error!(socket = %self.0.socket.display(), "the service's thread had panicked");
        }
        Ok(())
    }
}
