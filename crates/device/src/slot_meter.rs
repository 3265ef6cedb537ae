//! The time that a core spends on one poller, and how it learns of its requests, published for the control plane.

use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_scheduler::ChoiceMeter;

use crate::device::DeviceInfo;
use crate::parked::PollerId;

/// The time of its core that one poller has used. One writer, the core that has the poller; any number of readers. A queue that moves
/// gets a new poller, and with it a new meter, which begins at zero.
#[derive(Debug)]
pub struct SlotMeter {
    device: String,
    kind: &'static str,
    queue: u16,
    poller: PollerId,
    busy_ns: AtomicU64,
    choices: ChoiceMeter,
}

impl SlotMeter {
    pub(crate) fn new(info: &DeviceInfo, queue: u16, poller: PollerId) -> Self {
        SlotMeter {
            device: info.name.clone(),
            kind: info.kind,
            queue,
            poller,
            busy_ns: AtomicU64::new(0),
            choices: ChoiceMeter::default(),
        }
    }

    /// [`DeviceInfo::name`] of the poller's device.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// [`DeviceInfo::kind`] of the poller's device.
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// The queue that the poller serves.
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// The poller. A later poller of the same queue has a larger number.
    pub fn poller(&self) -> PollerId {
        self.poller
    }

    /// Time of the core that the poller has used, ns, as of the core's last look at its clock.
    pub fn busy_ns(&self) -> u64 {
        self.busy_ns.load(Ordering::Relaxed)
    }

    /// How its core learns of the queue's requests, and why. Times are ns since the core was started; only the core writes.
    pub fn choices(&self) -> &ChoiceMeter {
        &self.choices
    }

    /// The core's side: the poller has used so much. One relaxed store.
    #[inline]
    pub fn publish(&self, busy_ns: u64) {
        self.busy_ns.store(busy_ns, Ordering::Relaxed);
    }
}
