//! What a core says of one poller, published for the control plane: the time that it takes, its group, how its core learns of its requests.

use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ioplane_scheduler::{BackingUse, BlockDevice, ChoiceMeter};

use crate::device::DeviceInfo;
use crate::parked::PollerId;
use crate::share::{GroupId, Share};

/// The time of its core that one poller has used, and its group there. One writer, the core that has the poller; any number of readers. A queue that moves
/// gets a new poller, and with it a new meter, which begins at zero.
#[derive(Debug)]
pub struct SlotMeter {
    device: String,
    kind: &'static str,
    queue: u16,
    poller: PollerId,
    busy_ns: AtomicU64,
    empty_polls: AtomicU64,
    /// The group, and below it the weight.
    share: AtomicU64,
    wants_more: AtomicBool,
    /// [`NO_DEVICE`] for none.
    block_device: AtomicU64,
    in_flight: AtomicU64,
    /// The most that was in flight, twice, and 1 if more would have been.
    backing: AtomicU64,
    choices: ChoiceMeter,
}

/// In place of the number of a block device.
const NO_DEVICE: u64 = u64::MAX;

fn number(device: Option<BlockDevice>) -> u64 {
    device.map_or(NO_DEVICE, |device| device.0)
}

fn packed(share: Share) -> u64 {
    u64::from(share.group.0) << 32 | u64::from(share.weight.get())
}

impl SlotMeter {
    pub(crate) fn new(
        info: &DeviceInfo,
        queue: u16,
        poller: PollerId,
        share: Share,
        block_device: Option<BlockDevice>,
    ) -> Self {
        SlotMeter {
            device: info.name.clone(),
            kind: info.kind,
            queue,
            poller,
            busy_ns: AtomicU64::new(0),
            empty_polls: AtomicU64::new(0),
            share: AtomicU64::new(packed(share)),
            wants_more: AtomicBool::new(false),
            block_device: AtomicU64::new(number(block_device)),
            in_flight: AtomicU64::new(0),
            backing: AtomicU64::new(0),
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

    /// Polls that found nothing to do. At most some 10 ms old.
    pub fn empty_polls(&self) -> u64 {
        self.empty_polls.load(Ordering::Relaxed)
    }

    /// The core's side: see [`SlotMeter::empty_polls`].
    pub fn publish_empty_polls(&self, polls: u64) {
        self.empty_polls.store(polls, Ordering::Relaxed);
    }

    /// The group that the poller is in on its core.
    pub fn share(&self) -> Share {
        let packed = self.share.load(Ordering::Relaxed);
        let weight = NonZeroU32::new(packed as u32).unwrap_or(NonZeroU32::MIN);
        Share { group: GroupId((packed >> 32) as u32), weight }
    }

    /// Whether its group would have used more of the core, or had more in flight, than it might beside others. Of the last 10 ms in which the
    /// poller was polled.
    pub fn wants_more(&self) -> bool {
        self.wants_more.load(Ordering::Relaxed)
    }

    /// The core's side: see [`SlotMeter::wants_more`].
    pub fn publish_wants_more(&self, wants_more: bool) {
        self.wants_more.store(wants_more, Ordering::Relaxed);
    }

    /// The block device of the host that the queue's backing lies on, if that is known.
    pub fn block_device(&self) -> Option<BlockDevice> {
        let number = self.block_device.load(Ordering::Relaxed);
        (number != NO_DEVICE).then_some(BlockDevice(number))
    }

    pub(crate) fn moved_to(&self, device: Option<BlockDevice>) {
        self.block_device.store(number(device), Ordering::Relaxed);
    }

    /// What the queue has in flight at its backing, bytes. As of the last 10 ms in which the poller was polled.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// What the queues of its group have had in flight on the same device from the same core. Of the last 10 to 20 ms in which the poller was polled.
    pub fn backing_use(&self) -> BackingUse {
        let packed = self.backing.load(Ordering::Relaxed);
        BackingUse { peak: packed >> 1, lacks: packed & 1 == 1 }
    }

    /// The core's side: see [`SlotMeter::in_flight`] and [`SlotMeter::backing_use`].
    pub fn publish_backing(&self, in_flight: u64, used: BackingUse) {
        self.in_flight.store(in_flight, Ordering::Relaxed);
        self.backing.store(used.peak << 1 | u64::from(used.lacks), Ordering::Relaxed);
    }

    pub(crate) fn join(&self, share: Share) {
        self.share.store(packed(share), Ordering::Relaxed);
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
