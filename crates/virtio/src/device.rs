//! What a virtio device is, whatever transport drives it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{BlockDevice, DeviceError, Interrupt, Meter, Parked, Poller, QuiescenceProof, Share};
use ioplane_scheduler::LimitSet;

use crate::ring::{InFlightRequest, Ring, RingFault};

/// What is fixed about a virtio device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtioInfo {
    /// Name that its owner gave it.
    pub name: String,
    /// Kind, in the field's words: `virtio-blk`.
    pub kind: &'static str,
    /// Device ID (virtio 1.3, section 5).
    pub device_id: u32,
    /// Queues it can have.
    pub queues: u16,
    /// Largest queue, in entries: a power of two.
    pub queue_size: u16,
}

/// Everything a queue needs to be polled.
#[derive(Debug)]
pub struct QueueStart {
    /// Which queue.
    pub index: u16,
    /// Its ring, opened; what is to be replayed is inside.
    pub ring: Ring,
    /// The driver's kick, an eventfd.
    pub kick: Option<Arc<OwnedFd>>,
    /// How to interrupt the driver.
    pub call: Option<Arc<dyn Interrupt>>,
    /// How to say that the queue has stopped with a fault.
    pub error: Option<Arc<dyn Interrupt>>,
    /// Where its counts go.
    pub meter: Arc<Meter>,
}

/// What is left of a queue when its poller is parked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RingState {
    /// Where to go on, see [`Ring::base`]; `None`: at the ring's beginning.
    pub base: Option<u32>,
    /// What was taken and not returned, in order: empty if the queue was drained.
    pub in_flight: Vec<InFlightRequest>,
    /// The fault that stopped it.
    pub fault: Option<RingFault>,
}

/// The model of a virtio device. Transports host it; [`crate::Vdev`] keeps its queues.
pub trait VirtioDevice: Send + 'static {
    /// What is fixed about it.
    fn info(&self) -> &VirtioInfo;

    /// Feature bits that it offers: its own, and those of the ring that it cares for ([`crate::Vdev::offers`] adds the format).
    fn features(&self) -> u64;

    /// The driver accepted these, a subset of what was offered. Called before any queue starts.
    fn accept(&mut self, features: u64);

    /// Device-specific configuration from `offset` on; what lies beyond its end reads as zero.
    fn read_config(&self, offset: u32, out: &mut [u8]);

    /// The driver writes configuration; what is not writable stays.
    fn write_config(&mut self, offset: u32, bytes: &[u8]);

    /// There is a network behind it, so that it wants to hear [`VirtioDevice::announce`] and [`VirtioDevice::set_mtu`].
    fn has_network(&self) -> bool {
        false
    }

    /// The guest with the address `mac` has just come here (the end of a migration) and cannot say so itself: the network is
    /// to learn where it is now. Control plane.
    fn announce(&mut self, mac: [u8; 6]) {
        let _ = mac;
    }

    /// The largest payload of a frame that the front end has told its guest. Control plane.
    fn set_mtu(&mut self, mtu: u16) {
        let _ = mtu;
    }

    /// The limits of a queue.
    fn queue_limits(&self, queue: u16) -> LimitSet {
        let _ = queue;
        LimitSet::default()
    }

    /// The group of its queues.
    fn share(&self) -> Share {
        Share::default()
    }

    /// The block device of the host that its backing lies on, if it has one and that is known.
    fn block_device(&self) -> Option<BlockDevice> {
        None
    }

    /// Makes the poller of a queue.
    fn start_queue(&mut self, start: QueueStart) -> Result<Box<dyn Poller>, DeviceError>;

    /// Takes a parked poller of this device apart.
    fn stop_queue(&mut self, parked: Parked) -> RingState;

    /// The front end has stopped all queues; it may start them again. `migrates`: its guest may go on elsewhere. Control plane.
    fn rest(&mut self, migrates: bool) {
        let _ = migrates;
    }

    /// Requests in flight will not end before long. Control plane.
    fn is_stalled(&self) -> bool {
        false
    }

    /// The front end has left, and its guest with it. Control plane.
    fn forget_guest(&mut self) {}

    /// What of the device's own (not the queues') must be saved, in an encoding of its own.
    fn save_own(&self, proof: &QuiescenceProof) -> Vec<u8>;

    /// Takes [`VirtioDevice::save_own`]'s bytes over, all or nothing. Hostile input; says what is wrong with it.
    fn load_own(&mut self, proof: &QuiescenceProof, bytes: &[u8]) -> Result<(), String>;

    /// As at power-on.
    fn reset_own(&mut self);
}
