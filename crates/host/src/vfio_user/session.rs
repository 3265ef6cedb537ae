//! What a client says, done to the device: one command after another, on the service's thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use ioplane_device::mutation::{Law, removed};
use ioplane_device::{Access, At};
use ioplane_embed::{Front, FrontError};
use ioplane_memory::Account;
use ioplane_pci::{BarMap, Function, Irq, Irqs, NotReady, Touch, Wire};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use vfio_bindings::bindings::vfio;

use super::connection::{Connection, Message, Reply};
use super::fault::ClientFault;
use super::irqs::Wires;
use super::memory::Dma;
use super::server::Options;
use super::spec;
use super::status::{Board, Status};
use super::version::{self, Agreed};

/// How long a client waits for the files of the one before it, whose process may be ending just now; and how often that is looked at.
const KEPT: Duration = Duration::from_secs(1);
const AGAIN: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };

/// What is fixed about a function, asked once a client.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub bars: BarMap,
    pub config_size: u64,
    pub irqs: Irqs,
}

/// A function and its client.
pub struct Session<F: Function> {
    pub(super) front: Arc<Front<F>>,
    pub(super) patience: Duration,
    pub(super) board: Arc<Board>,
    pub(super) dma: Dma,
    /// What its clients may map, and have mapped.
    pub(super) account: Account,
    pub(super) wires: Wires,
    pub(super) facts: Option<Facts>,
    pub(super) agreed: Option<Agreed>,
    /// Written when the device's stage changes.
    moved: Arc<OwnedFd>,
    /// Readable for good when the service is to end.
    stop: Arc<OwnedFd>,
    /// The device is held: what it asks attention for has to wait until it moves.
    blocked: bool,
    /// The last quiescent point was forced, and the guest has not reached the device since.
    pub(super) forced: bool,
}

impl<F: Function> Session<F> {
    /// A session without a client yet. `patience` is how long the device may take to become quiescent by itself when memory goes away.
    pub fn new(front: Arc<Front<F>>, patience: Duration) -> std::io::Result<Self> {
        let options = Options { patience, ..Options::new("") };
        Self::told(front, &options, Arc::default(), crate::eventfd::fresh()?)
    }

    pub(super) fn told(
        front: Arc<Front<F>>,
        options: &Options,
        board: Arc<Board>,
        stop: Arc<OwnedFd>,
    ) -> std::io::Result<Self> {
        let moved = front.watch()?;
        let account = Account::new(options.limits).map_err(std::io::Error::other)?;
        Ok(Session {
            front,
            patience: options.patience,
            board,
            dma: Dma::default(),
            account,
            wires: Wires::default(),
            facts: None,
            agreed: None,
            moved,
            stop,
            blocked: false,
            forced: false,
        })
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

    fn version(&mut self, message: &Message, connection: &Connection) -> Result<Reply, ClientFault> {
        self.admit(connection)?;
        let facts = self.with(Some(connection), |function| Facts {
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
            let mut admitted = Ok(());
            self.at_quiescence(Some(connection), |function, still| {
                admitted = function.admit(still);
                Ok(())
            })??;
            match admitted {
                Ok(()) => return Ok(()),
                Err(NotReady::Kept(_)) if Instant::now() < deadline => self.pause(connection)?,
                Err(why) => return Err(why.into()),
            }
        }
    }

    /// Waits a moment, unless the client leaves or the service is to end.
    fn pause(&self, connection: &Connection) -> Result<(), ClientFault> {
        let mut files = [
            PollFd::new(&*self.stop, PollFlags::IN),
            PollFd::from_borrowed_fd(connection.socket(), PollFlags::empty()),
        ];
        match rustix::event::poll(&mut files, Some(&AGAIN)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(ClientFault::Broken(errno.into())),
        }
        match files.map(|file| !file.revents().is_empty()) {
            [true, _] => Err(ClientFault::Gone),
            [_, true] => Err(ClientFault::Closed),
            _ => Ok(()),
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
            match self.front.reset() {
                Ok(()) => return Ok(()),
                Err(FrontError::Closed) => return Err(ClientFault::Gone),
                Err(FrontError::Not { .. }) => self.until_moved(connection)?,
                Err(FrontError::Device(error)) => return Err(error.into()),
                Err(FrontError::Stuck(reason)) => return Err(ClientFault::NotQuiescent(reason)),
            }
        }
    }

    /// One access of the guest's; waits while the device is held.
    pub(super) fn access(
        &mut self,
        connection: &Connection,
        at: At,
        mut op: Access<'_>,
    ) -> Result<(), ClientFault> {
        self.forced = false;
        loop {
            let again = match &mut op {
                Access::Read(bytes) => Access::Read(bytes),
                Access::Write(bytes) => Access::Write(bytes),
            };
            match self.front.try_access(at, again) {
                Ok(true) => return Ok(()),
                // Law 1: what the guest does while the device is held waits; this answers it without the device.
                Ok(false) if removed(Law::KeepsWhatArrives) => {
                    if let Access::Read(bytes) = op {
                        bytes.fill(0xff);
                    }
                    return Ok(());
                }
                Ok(false) => self.until_moved(Some(connection))?,
                Err(FrontError::Closed) => return Err(ClientFault::Gone),
                // The access itself has been answered; what it asked for has failed, which the guest sees by its registers.
                Err(error) => {
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
            match self.front.with(&mut change) {
                Ok(done) => return Ok(done),
                Err(FrontError::Closed) => return Err(ClientFault::Gone),
                Err(_) => self.until_moved(connection)?,
            }
        }
    }

    /// Waits until the device's stage may have changed, the client has left or the service is to end.
    pub(super) fn until_moved(&mut self, connection: Option<&Connection>) -> Result<(), ClientFault> {
        let quiet = PollFlags::empty();
        let mut files =
            vec![PollFd::new(&*self.moved, PollFlags::IN), PollFd::new(&*self.stop, PollFlags::IN)];
        // A client that has only said its last word still waits for its replies: left means hung up.
        files.extend(connection.map(|connection| PollFd::from_borrowed_fd(connection.socket(), quiet)));
        match rustix::event::poll(&mut files, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(ClientFault::Broken(errno.into())),
        }
        let left = files.get(2).is_some_and(|file| !file.revents().is_empty());
        let ends = !files[1].revents().is_empty();
        if !files[0].revents().is_empty() {
            self.hear_move();
            return Ok(());
        }
        match (ends, left) {
            (true, _) => Err(ClientFault::Gone),
            (_, true) => Err(ClientFault::Closed),
            _ => Ok(()),
        }
    }

    /// Written when the device's stage changes: then call [`Session::hear_move`].
    pub(super) fn moved(&self) -> BorrowedFd<'_> {
        self.moved.as_fd()
    }

    /// Readable when the service is to end.
    pub(super) fn stopping(&self) -> BorrowedFd<'_> {
        self.stop.as_fd()
    }

    /// The device's stage may have changed: what had to wait is tried again.
    pub(super) fn hear_move(&mut self) {
        crate::eventfd::empty(self.moved.as_fd());
        self.blocked = false;
        if self.wires.owed_unmask {
            self.unmask_line();
        }
    }

    /// What the device asks attention by.
    pub(super) fn attention(&self) -> Option<Arc<OwnedFd>> {
        if self.blocked {
            return None;
        }
        self.front.with(|function| function.attention().cloned()).ok().flatten()
    }

    /// Gives it.
    pub(super) fn attend(&mut self) {
        self.blocked = !self.front.event(Function::attend);
    }

    /// The guest has acknowledged INTA#, says the descriptor that the client gave for it.
    pub(super) fn resume_line(&mut self) {
        if let Some(file) = &self.wires.resume {
            crate::eventfd::empty(file.as_fd());
            self.unmask_line();
        }
    }

    fn unmask_line(&mut self) {
        // A device that is away hears it when it comes back.
        let done = self.front.with(|function| function.wire(Irq::Intx, 0, Wire::Unmask));
        self.wires.owed_unmask = done.is_err();
    }

    /// The client is gone: its wires and its memory are taken off the device, which is reset.
    pub fn forget_client(&mut self) -> Result<(), ClientFault> {
        self.agreed = None;
        self.facts = None;
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
        // Also after an error: what cannot be taken back from hardware by asking goes when it is closed.
        self.with(None, Function::dismiss)?;
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
