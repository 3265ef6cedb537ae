//! The vfio-user host over real sockets: every command, everything malformed, and the device at its quiescent points.

mod commands;
mod dma_write;
mod interop;
mod interrupts;
mod malformed;
mod memory;
mod quiescence;
mod regions;
mod stream;

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::{
    CoreEnded, CoreId, CoreMessage, CoreSender, OnMiss, Placement, QuiesceError, QuiescePolicy, Quiesced,
    Quiescent, Running,
};
use ioplane_host::vfio_user::{Handle, Options, PendingReply, serve};
use ioplane_memory::Mapping;
use ioplane_pci::AnyFunction;
use ioplane_testkit::toy::ToyCard;
use ioplane_testkit::toy::card::Seen;
use ioplane_testkit::vfio_user::VfioUserClient;

/// The card has no pollers: nobody is ever placed.
#[derive(Debug)]
struct Nowhere;

impl Placement for Nowhere {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        Arc::new(Nowhere)
    }
}

impl CoreSender for Nowhere {
    fn send(&self, order: CoreMessage) -> Result<(), CoreEnded> {
        Err(CoreEnded(order))
    }

    fn core(&self) -> CoreId {
        CoreId(0)
    }
}

/// A card that is served, and what is seen of it from below.
struct Served {
    handle: Handle<AnyFunction>,
    seen: Arc<Seen>,
    event: Arc<OwnedFd>,
    mapped: Arc<OwnedFd>,
    shadow: Arc<OwnedFd>,
    folder: tempfile::TempDir,
}

/// Long enough for a card that becomes still, short enough to wait for where it does not.
const CARD_PATIENCE: Duration = Duration::from_millis(300);

fn served() -> Served {
    served_as("card.sock")
}

fn served_as(name: &str) -> Served {
    let folder = tempfile::tempdir().expect("a folder");
    let card = ToyCard::default();
    let (seen, event) = (card.seen(), card.event());
    let (mapped, shadow) = (card.file(ioplane_pci::Touch::Mapped), card.file(ioplane_pci::Touch::Shadow));
    let options = Options { patience: CARD_PATIENCE, ..Options::new(folder.path().join(name)) };
    let handle = serve(running(card), Arc::new(Nowhere), options).expect("served");
    Served { handle, seen, event, mapped, shadow, folder }
}

fn running(card: ToyCard) -> Running<AnyFunction> {
    Quiescent::new(Box::new(card) as AnyFunction).resume(&Nowhere).expect("it runs")
}

/// Longer than any test.
const LEASE: Duration = Duration::from_secs(600);

fn policy(patience: Duration, on_miss: OnMiss) -> QuiescePolicy {
    QuiescePolicy { deadline: Instant::now() + patience, on_miss }
}

impl Served {
    fn socket(&self) -> PathBuf {
        self.handle.socket().to_owned()
    }

    fn client(&self) -> VfioUserClient {
        VfioUserClient::greet(&self.socket()).expect("a client")
    }

    /// Asks for the device to be held.
    fn holding(&self, patience: Duration, on_miss: OnMiss) -> PendingReply<Result<Quiesced, QuiesceError>> {
        self.handle.hold(policy(patience, on_miss), LEASE)
    }

    fn resume(&self) {
        assert!(self.handle.resume().wait().expect("served").expect("it goes on"), "it was not held");
    }

    fn ring(&self) {
        rustix::io::write(&*self.event, &1u64.to_ne_bytes()).expect("written");
    }
}

/// Waits for something that must come.
#[track_caller]
fn eventually(what: &str, mut come: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !come() {
        assert!(Instant::now() < deadline, "{what} has not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn eventfd() -> OwnedFd {
    use rustix::event::{EventfdFlags, eventfd};
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}

/// How often an eventfd was signalled since it was last asked.
fn count(file: impl AsFd) -> u64 {
    let mut bytes = [0; 8];
    rustix::io::read(file, &mut bytes).map_or(0, |_| u64::from_ne_bytes(bytes))
}

/// A file of guest memory.
fn memory(bytes: u64) -> OwnedFd {
    let mapping = Mapping::anonymous("guest", bytes).expect("a memfd");
    mapping.file().try_clone_to_owned().expect("dup")
}

#[track_caller]
fn errno<T: std::fmt::Debug>(outcome: std::io::Result<T>) -> rustix::io::Errno {
    let error = outcome.expect_err("refused");
    rustix::io::Errno::from_io_error(&error).unwrap_or_else(|| panic!("not an answer: {error}"))
}
