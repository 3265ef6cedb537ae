//! The time that a core spends on one poller, published for the control plane.

use std::sync::atomic::{AtomicU64, Ordering};

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
}

impl SlotMeter {
    pub(crate) fn new(info: &DeviceInfo, queue: u16, poller: PollerId) -> Self {
        SlotMeter { device: info.name.clone(), kind: info.kind, queue, poller, busy_ns: AtomicU64::new(0) }
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

    /// The core's side: the poller has used so much. One relaxed store.
    #[inline]
    pub fn publish(&self, busy_ns: u64) {
        self.busy_ns.store(busy_ns, Ordering::Relaxed);
    }
}
