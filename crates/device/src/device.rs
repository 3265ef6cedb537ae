//! The control half of a device, and the words for accessing it.

use std::collections::BTreeSet;

use ioplane_scheduler::LimitSet;

use crate::parked::Parked;
use crate::poller::{Change, Poller};
use crate::quiescence::proof::QuiescenceProof;
use crate::share::{BlockDevice, Share};
use crate::state::{SavedState, StateError};

/// Which register space an access goes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegisterAddress {
    /// Offset in the base address register of that number.
    Bar(u8, u64),
    /// Offset in the configuration space of the device (PCI, or virtio's device-specific part).
    Config(u64),
}

/// One register access by a guest, 1 to 8 bytes, little-endian.
#[derive(Debug)]
pub enum Access<'a> {
    /// The device fills the buffer.
    Read(&'a mut [u8]),
    /// The device takes the bytes.
    Write(&'a [u8]),
}

/// A set of queue numbers.
pub type QueueSet = BTreeSet<u16>;

/// What follows once the pollers of the queues have parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterStop {
    /// Nothing: they were stopped one by one.
    Nothing,
    /// [`Device::reset`].
    Reset,
}

/// What an access asks of the device's owner. The device cannot start or stop its own pollers: it does not have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Put pollers for these queues on cores.
    Activate(QueueSet),
    /// Park the pollers of these queues, then do what follows.
    Deactivate(QueueSet, AfterStop),
}

/// Whether a device can be stopped now, as its registers show.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Quiescence {
    /// A reusable state: nothing that the guest began is under way.
    Quiescent,
    /// Something is under way.
    Busy(&'static str),
}

/// What is fixed about a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name that its owner gave it.
    pub name: String,
    /// Kind, in the field's words: `virtio-blk`, `rtl8139`.
    pub kind: &'static str,
    /// How many queues it can have.
    pub queues: u16,
}

/// What a device could not do.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// A queue that the device does not have or that is not set up.
    #[error("queue {0} is not set up")]
    NoSuchQueue(u16),
    /// The guest set something up wrongly.
    #[error("the guest's set-up of queue {queue} is wrong: {why}")]
    Guest {
        /// Which queue.
        queue: u16,
        /// What is wrong.
        why: String,
    },
    /// What the device stands on failed.
    #[error("{0}")]
    Below(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A saved state was refused.
    #[error(transparent)]
    State(#[from] StateError),
    /// The I/O core that a queue was placed on has ended.
    #[error("I/O core {0} has ended: add one with `ioplane core add`")]
    CoreGone(u32),
}

/// Where a device puts the pollers that it makes. Only a [`crate::Running`] has one, so nobody else can start pollers.
pub struct Activation<'a> {
    pub(crate) queues: &'a QueueSet,
    pub(crate) made: Vec<(u16, Box<dyn Poller>)>,
}

impl Activation<'_> {
    /// The queues that want a poller.
    pub fn queues(&self) -> &QueueSet {
        self.queues
    }

    /// Gives a queue its poller.
    pub fn add(&mut self, queue: u16, poller: Box<dyn Poller>) {
        self.made.push((queue, poller));
    }
}

/// The control half of a device: registers, configuration, state. One owner calls it, on any thread but an I/O core.
pub trait Device: Send + 'static {
    /// What is fixed about it.
    fn info(&self) -> &DeviceInfo;

    /// One register access by the guest.
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect;

    /// Queues that are to have a poller whenever the device runs.
    fn active(&self) -> QueueSet;

    /// Makes a poller for each of [`Activation::queues`]. Those made before an error go nowhere.
    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError>;

    /// The limits of a queue, for a poller that is made now. Those of a poller that runs change by [`Change::Limits`].
    fn queue_limits(&self, queue: u16) -> LimitSet {
        let _ = queue;
        LimitSet::default()
    }

    /// Its group, for pollers that are made now. That of pollers that run changes by [`Change::Share`].
    fn share(&self) -> Share {
        Share::default()
    }

    /// The block device of the host that its backing lies on, for pollers that are made now; `None` if it has none, or if that is not known.
    fn block_device(&self) -> Option<BlockDevice> {
        None
    }

    /// Takes a parked poller back; from here on what it knew is the device's state.
    fn deactivate(&mut self, parked: Parked);

    /// Whether hardware that the guest drives is idle, by its registers. Emulated devices always are once their pollers
    /// have parked.
    fn quiescence(&mut self) -> Quiescence {
        Quiescence::Quiescent
    }

    /// The forced stop of hardware that would not become still by itself: cancels what is under way and records it.
    fn suspend(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// What another process or host needs to go on from here. At most [`SavedState::MAX_BODY`] bytes.
    fn save(&self, proof: &QuiescenceProof) -> Result<SavedState, DeviceError>;

    /// Takes over a saved state, all of it or nothing. The bytes are hostile.
    fn load(&mut self, proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError>;

    /// As at power-on.
    fn reset(&mut self, proof: &QuiescenceProof);

    /// Gets every [`Change`] before the pollers of `queues` do: pollers made later need it, and a device that writes guest
    /// memory itself has to mark the dirty log too (invariant 6).
    fn apply(&mut self, queues: &QueueSet, change: &Change) {
        let _ = (queues, change);
    }

    /// Notifies the driver that a configuration field has changed. Called on the owner's thread.
    fn config_changed(&mut self) {}
}

/// Any device, for who keeps several kinds behind one type.
impl<D: Device + ?Sized> Device for Box<D> {
    fn info(&self) -> &DeviceInfo {
        (**self).info()
    }
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        (**self).access(at, op)
    }
    fn active(&self) -> QueueSet {
        (**self).active()
    }
    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        (**self).activate(activation)
    }
    fn queue_limits(&self, queue: u16) -> LimitSet {
        (**self).queue_limits(queue)
    }
    fn share(&self) -> Share {
        (**self).share()
    }
    fn block_device(&self) -> Option<BlockDevice> {
        (**self).block_device()
    }
    fn deactivate(&mut self, parked: Parked) {
        (**self).deactivate(parked);
    }
    fn quiescence(&mut self) -> Quiescence {
        (**self).quiescence()
    }
    fn suspend(&mut self) -> Result<(), DeviceError> {
        (**self).suspend()
    }
    fn save(&self, proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        (**self).save(proof)
    }
    fn load(&mut self, proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        (**self).load(proof, state)
    }
    fn reset(&mut self, proof: &QuiescenceProof) {
        (**self).reset(proof);
    }
    fn apply(&mut self, queues: &QueueSet, change: &Change) {
        (**self).apply(queues, change);
    }
    fn config_changed(&mut self) {
        (**self).config_changed();
    }
}
