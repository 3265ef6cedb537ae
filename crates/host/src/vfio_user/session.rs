//! What a client says, done to the device: one command after another, on the service's thread.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, mpsc};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{
    Access, Lifecycle, LifecycleError, Placement, Presence, QuiesceAttempt, RegisterAddress,
};
use ioplane_memory::Account;
use ioplane_pci::{BarMap, Function, Irq, Irqs, NotReady, Touch, Wire};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio;

use super::connection::{Connection, Message, Reply};
use super::dma::Dma;
use super::dma_write::{DmaLayout, DmaOrder};
use super::fault::ClientFault;
use super::handle::{Command, Mailbox, Request};
use super::held::Held;
use super::options::Options;
use super::spec;
use super::status::{Status, StatusBoard};
use super::version::{self, Agreed};
use super::wires::Wires;
use super::write_log::WriteLog;

/// How long a client waits for the files of the one before it, whose process may be ending just now; and how often that is looked at.
const KEPT: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_millis(50);
/// How long a queue that the guest stops may take to drain before it is suspended.
const EFFECTS: Duration = Duration::from_millis(500);

/// Wakes the thread of a service.
struct EventWaker(Arc<OwnedFd>);

impl Wake for EventWaker {
    fn wake(self: Arc<Self>) {
        // A full counter is readable too.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

/// A quiescent point that the daemon has asked for, on its way.
pub(super) struct Underway<F: Function> {
    pub request: Request<F>,
    pub attempt: QuiesceAttempt,
}

/// What is fixed about a function, asked once a client.
#[derive(Debug, Clone)]
pub(super) struct FunctionInfo {
    pub bars: BarMap,
    pub config_size: u64,
    pub irqs: Irqs,
}

/// A function and its client. Owned by one thread.
pub struct Session<F: Function> {
    /// [`Options::name`].
    pub(super) name: String,
    pub(super) device: Lifecycle<F>,
    pub(super) placement: Arc<dyn Placement>,
    pub(super) patience: Duration,
    pub(super) board: Arc<StatusBoard>,
    pub(super) dma: Dma,
    /// What its clients may map, and have mapped.
    pub(super) account: Account,
    pub(super) wires: Wires,
    pub(super) facts: Option<FunctionInfo>,
    pub(super) agreed: Option<Agreed>,
    pub(super) commands: mpsc::Receiver<Command<F>>,
    /// Written when a command has come, and when what an attempt waits for has.
    pub(super) event: Arc<OwnedFd>,
    pub(super) waker: Waker,
    /// Readable for good when the service is to end.
    pub(super) stop: Arc<OwnedFd>,
    /// What the daemon asks for, in its order. One at a time is under way, and none while the client's own is.
    pub(super) requests: VecDeque<Request<F>>,
    pub(super) underway: Option<Underway<F>>,
    pub(super) own_attempt: bool,
    /// Which pages of its memory the device writes, while somebody wants to know.
    pub(super) written: Option<WriteLog>,
    /// What the client is to write to its memory, and to read of it.
    pub(super) writes: VecDeque<DmaOrder>,
    /// Where this client looks for the data, once that is known.
    pub(super) layout: Option<DmaLayout>,
    /// The daemon holds the device; or it has not gone on, and is tried again.
    pub(super) held: Option<Held>,
    /// The last quiescent point was forced, and the guest has not reached the device since.
    pub(super) forced: bool,
}

impl<F: Function> Session<F> {
    /// A session without a client yet, and without a daemon. `patience` is how long the device may take to become quiescent by itself
    /// when memory goes away.
    pub fn new(
        device: impl Into<Lifecycle<F>>,
        placement: Arc<dyn Placement>,
        patience: Duration,
    ) -> std::io::Result<Self> {
        let options = Options { patience, ..Options::new("") };
        let (mailbox, _) = Mailbox::new(options.socket.clone())?;
        Self::told(device.into(), placement, &options, mailbox)
    }

    pub(super) fn told(
        device: Lifecycle<F>,
        placement: Arc<dyn Placement>,
        options: &Options,
        mailbox: Mailbox<F>,
    ) -> std::io::Result<Self> {
        let account = Account::new(options.limits).map_err(std::io::Error::other)?;
        let Mailbox { commands, event, stop, board } = mailbox;
        board.show(device.presence(), None);
        Ok(Session {
            name: options.name.clone(),
            device,
            placement,
            patience: options.patience,
            board,
            dma: Dma::default(),
            account,
            wires: Wires::default(),
            facts: None,
            agreed: None,
            commands,
            waker: Waker::from(Arc::new(EventWaker(event.clone()))),
            event,
            stop,
            requests: VecDeque::new(),
            underway: None,
            own_attempt: false,
            written: None,
            writes: VecDeque::new(),
            layout: None,
            held: None,
            forced: false,
        })
    }

    /// The device, wherever it is.
    pub fn device(&mut self) -> &mut Lifecycle<F> {
        &mut self.device
    }

    /// How it is.
    pub fn status(&self) -> Status {
        self.board.read()
    }

    /// Does what `message` asks and answers it. An error ends the connection: [`Session::forget_client`] comes next.
    pub fn handle(&mut self, mut message: Message, connection: &Connection) -> Result<(), ClientFault> {
        let header = message.header;
        let outcome = self.obey(&mut message, connection);
        // What the command did not take is closed before the reply tells that it is done.
        drop(message);
        let quiet = header.flags & spec::FLAG_NO_REPLY != 0;
        match outcome {
            Ok(_) if quiet => Ok(()),
            Ok(reply) => connection.answer(&header, Ok(reply)),
            Err(fault) => {
                let Some(errno) = fault.errno() else {
                    // The client hears why before it is left, where it is still there to hear.
                    let why = match fault {
                        ClientFault::BadVersion(..) | ClientFault::BadCapabilities(_) => Some(Errno::INVAL),
                        ClientFault::NotReady(NotReady::Kept(_)) => Some(Errno::BUSY),
                        ClientFault::NotReady(NotReady::Unusable(_)) => Some(Errno::IO),
                        _ => None,
                    };
                    if let Some(errno) = why {
                        let _ = connection.answer(&header, Err(errno));
                    }
                    return Err(fault);
                };
                self.board.fault(&fault);
                if quiet { Ok(()) } else { connection.answer(&header, Err(errno)) }
            }
        }
    }

    fn obey(&mut self, message: &mut Message, connection: &Connection) -> Result<Reply, ClientFault> {
        let command = message.header.command;
        if self.agreed.is_none() {
            return match command {
                spec::VERSION => self.version(message, connection),
                _ => Err(ClientFault::NoVersion(command)),
            };
        }
        let most = match command {
            spec::DMA_MAP => 1,
            spec::DEVICE_SET_IRQS => spec::MAX_FILES,
            _ => 0,
        };
        message.check_files(most)?;
        match command {
            spec::VERSION => Err(ClientFault::BadValue("a version has been agreed on already")),
            spec::DMA_MAP => self.dma_map(message, connection),
            spec::DMA_UNMAP => self.dma_unmap(message, connection),
            spec::DEVICE_GET_INFO => device_info(message),
            spec::DEVICE_GET_REGION_INFO => self.region_info(message),
            spec::DEVICE_GET_REGION_IO_FDS => region_io_fds(message),
            spec::DEVICE_GET_IRQ_INFO => self.irq_info(message),
            spec::DEVICE_SET_IRQS => self.set_irqs(message, connection),
            spec::REGION_READ => self.region_read(message, connection),
            spec::REGION_WRITE => self.region_write(message, connection),
            spec::DEVICE_RESET => self.device_reset(message, connection),
            spec::DIRTY_PAGES => Err(ClientFault::NotSupported("logging dirty pages")),
            spec::REGION_WRITE_MULTI => Err(ClientFault::NotSupported("writing in bundles")),
            spec::DEVICE_FEATURE | spec::MIG_DATA_READ | spec::MIG_DATA_WRITE => {
                Err(ClientFault::NotSupported("migration by the client"))
            }
            _ => Err(ClientFault::UnknownCommand(command)),
        }
    }

    /// Has the client write to its memory, or read it. An error ends the connection.
    pub(super) fn write(
        &mut self,
        writes: DmaOrder,
        connection: Option<&mut Connection>,
    ) -> Result<(), ClientFault> {
        let (Some(connection), Some(agreed)) = (connection, self.agreed) else {
            writes.refuse();
            return Ok(());
        };
        writes.carry_out(connection, agreed.transfer, self.dma.map.clone(), &mut self.layout)
    }

    fn version(&mut self, message: &Message, connection: &Connection) -> Result<Reply, ClientFault> {
        self.admit(connection)?;
        let facts = self.with(Some(connection), |function| FunctionInfo {
            bars: function.bars().clone(),
            config_size: function.config_size(),
            irqs: function.irqs(),
        })?;
        let shadows = facts.bars.iter().any(|(_, bar)| bar.pages().iter().any(|p| p.touch == Touch::Shadow));
        let (agreed, reply) = version::negotiate(message, shadows)?;
        if agreed.shadows {
            self.with(Some(connection), |function| function.use_shadows(true))?;
            self.board.shadows.store(true, Relaxed);
        }
        (self.facts, self.agreed) = (Some(facts), Some(agreed));
        Ok(reply)
    }

    /// Makes the device ready for this client.
    fn admit(&mut self, connection: &Connection) -> Result<(), ClientFault> {
        let deadline = Instant::now() + KEPT;
        loop {
            match self.at_quiescence(Some(connection), |function, proof| function.admit(proof))? {
                Ok(()) => return Ok(()),
                Err(NotReady::Kept(_)) if Instant::now() < deadline => {
                    self.wait_until(Some(connection), Some(Instant::now() + AGAIN))?;
                }
                Err(why) => return Err(why.into()),
            }
        }
    }

    fn device_reset(&mut self, message: &Message, connection: &Connection) -> Result<Reply, ClientFault> {
        if !message.body.is_empty() {
            return Err(message.bad_size(0));
        }
        self.reset(Some(connection))?;
        match self.with(Some(connection), |function| function.unusable())? {
            Some(why) => Err(ClientFault::Failed(why)),
            None => Ok(Reply::default()),
        }
    }

    pub(super) fn reset(&mut self, connection: Option<&Connection>) -> Result<(), ClientFault> {
        loop {
            match self.device.presence() {
                Presence::Running | Presence::Held => break,
                // Nobody carries it on: an earlier attempt has left it there.
                Presence::Quiescing if self.underway.is_none() => {
                    self.at_quiescence(connection, |_, _| ())?;
                }
                _ => self.wait_until(connection, None)?,
            }
        }
        let done = self.device.reset(&*self.placement, EFFECTS);
        self.show();
        done.map_err(|error| match error {
            LifecycleError::Device(error) => error.into(),
            error => ClientFault::NotQuiescent(error.to_string()),
        })
    }

    /// One access of the guest's; waits while the device is held.
    pub(super) fn access(
        &mut self,
        connection: &Connection,
        at: RegisterAddress,
        mut op: Access<'_>,
    ) -> Result<(), ClientFault> {
        self.forced = false;
        loop {
            let again = match &mut op {
                Access::Read(bytes) => Access::Read(bytes),
                Access::Write(bytes) => Access::Write(bytes),
            };
            match self.device.access(at, again, &*self.placement, EFFECTS) {
                Some(Ok(())) => return Ok(()),
                // Invariant 1: what the guest does while the device is held waits; this answers it without the device.
                None if removed(Invariant::KeepsWhatArrives) => {
                    if let Access::Read(bytes) = op {
                        bytes.fill(0xff);
                    }
                    return Ok(());
                }
                None => self.wait_until(Some(connection), None)?,
                // The access itself has been answered; what it asked for has failed, which the guest sees by its registers.
                Some(Err(error)) => {
                    self.board.note("effect", &error);
                    return Ok(());
                }
            }
        }
    }

    /// Changes the device where it is; waits while it is away.
    pub(super) fn with<R>(
        &mut self,
        connection: Option<&Connection>,
        mut change: impl FnMut(&mut F) -> R,
    ) -> Result<R, ClientFault> {
        loop {
            match self.device.with(&mut change) {
                Ok(done) => return Ok(done),
                Err(_) => self.wait_until(connection, None)?,
            }
        }
    }

    /// What the device asks attention by. One that is held is not attended to: what it asks waits.
    pub(super) fn attention(&mut self) -> Option<Arc<OwnedFd>> {
        match &mut self.device {
            Lifecycle::Running(running) => running.device().attention().cloned(),
            Lifecycle::Quiescing(quiescing) if !quiescing.is_held() => {
                quiescing.device().attention().cloned()
            }
            _ => None,
        }
    }

    /// Gives it.
    pub fn attend(&mut self) {
        self.device.event(Function::attend);
    }

    /// The guest has acknowledged INTA#, says the descriptor that the client gave for it.
    pub(super) fn resume_line(&mut self) {
        if let Some(file) = &self.wires.resume {
            crate::eventfd::empty(file.as_fd());
            self.unmask_line();
        }
    }

    pub(super) fn unmask_line(&mut self) {
        // A device that is away hears it when it comes back.
        let done = self.device.with(|function| function.wire(Irq::Intx, 0, Wire::Unmask));
        self.wires.owed_unmask = done.is_err();
    }

    /// The client is gone: its wires and its memory are taken off the device, which is reset.
    pub fn forget_client(&mut self) -> Result<(), ClientFault> {
        self.agreed = None;
        self.facts = None;
        self.layout = None;
        self.wires.resume = None;
        self.wires.owed_unmask = false;
        let wired = self.wires.wired.clone();
        let shadows = self.board.shadows.load(Relaxed);
        self.with(None, |function| {
            for (irq, vector) in &wired {
                // There is nobody left to be told that it failed; the next client's wire replaces this one.
                let _ = function.wire(*irq, *vector, Wire::Call(None));
            }
            if shadows {
                function.use_shadows(false);
            }
        })?;
        self.wires.wired.clear();
        self.board.shadows.store(false, Relaxed);
        let reset = self.reset(None);
        let emptied = self.forget_memory();
        // Of memory that is gone nobody asks any more.
        if self.written.take().is_some() {
            let _ = self.log(false);
        }
        // Also after an error: what cannot be taken back from hardware by asking goes when it is closed.
        self.with(None, Function::dismiss)?;
        // What it was held for was the guest's state, which the reset has ended.
        if self.held == Some(Held::UntilTold) {
            let _ = self.let_go();
            self.show();
        }
        reset.and(emptied)
    }
}

fn device_info(message: &Message) -> Result<Reply, ClientFault> {
    let asked: spec::DeviceInfo = message.body()?;
    if (asked.argsz as usize) < size_of::<spec::DeviceInfo>() {
        return Err(ClientFault::BadValue("DEVICE_GET_INFO with an argsz that holds no reply"));
    }
    Ok(Reply::of(&spec::DeviceInfo {
        argsz: size_of::<spec::DeviceInfo>() as u32,
        flags: vfio::VFIO_DEVICE_FLAGS_PCI | vfio::VFIO_DEVICE_FLAGS_RESET,
        num_regions: vfio::VFIO_PCI_NUM_REGIONS,
        num_irqs: vfio::VFIO_PCI_NUM_IRQS,
    }))
}

/// None: every access that is not mapped comes by a message.
fn region_io_fds(message: &Message) -> Result<Reply, ClientFault> {
    let asked: spec::RegionIoFds = message.body()?;
    if asked.index >= vfio::VFIO_PCI_NUM_REGIONS || asked.flags != 0 {
        return Err(ClientFault::BadValue("DEVICE_GET_REGION_IO_FDS of no region, or with flags"));
    }
    Ok(Reply::of(&spec::RegionIoFds {
        argsz: size_of::<spec::RegionIoFds>() as u32,
        flags: 0,
        index: asked.index,
        count: 0,
    }))
}
