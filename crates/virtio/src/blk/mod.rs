//! Virtio-blk (virtio 1.3, section 5.2): the model.
//!
//! ```text
//!   Blk: VirtioDevice -- configuration space, features, backing
//!     |  shares capacity, read-only and write cache mode (atomics only)
//!   BlkPoller (one per queue) -- Queue + Channels: chain -> BlkRequest -> Op -> status
//! ```

mod channels;
mod lists;
mod poller;
mod request;
mod scratch;
pub mod spec;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use ioplane_device::{BlockDevice, DeviceError, Parked, Poller, QuiescenceProof, Share};
use ioplane_scheduler::LimitSet;
use ioplane_storage::{Backing, BackingInfo, Fault, StorageError};
use serde::{Deserialize, Serialize};

pub use channels::{ChannelExchange, FreshChannel, LeftChannel};
pub use poller::BlkPoller;
pub use request::{BlkRequest, Parser};
use spec::*;

use crate::device::{QueueStart, RingState, VirtioDevice, VirtioInfo};
use crate::limits::DeviceLimits;
use crate::ring::RingFault;
use crate::spec::feature::*;

/// How long to wait, before requests are replayed, for I/O that an earlier poller left behind.
const REPLAY_PATIENCE: Duration = Duration::from_secs(30);

/// What the queues of a disk share with its models: plain atomics, read on I/O cores.
#[derive(Debug)]
pub struct Shared {
    /// Size in bytes.
    bytes: AtomicU64,
    /// The guest has switched its write cache off: every write is flushed before it is answered.
    cache_off: AtomicBool,
    /// Models so far; each is known by its number.
    models: AtomicU32,
    /// The model that started a queue last: the switch is its guest's.
    user: AtomicU32,
    read_only: bool,
    id: [u8; VIRTIO_BLK_ID_BYTES],
}

impl Shared {
    /// Whether a transfer may go there.
    #[inline]
    fn allows(&self, offset: u64, len: u64, write: bool) -> Result<(), Fault> {
        if write && self.read_only {
            return Err(Fault::ReadOnly);
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.bytes.load(Ordering::Relaxed) => Ok(()),
            _ => Err(Fault::BeyondEnd),
        }
    }

    #[inline]
    fn cache_off(&self) -> bool {
        self.cache_off.load(Ordering::Relaxed)
    }
}

/// How a disk is to look to its guest.
#[derive(Debug, Clone)]
pub struct BlkOptions {
    /// Name that its owner gave it.
    pub name: String,
    /// What GET_ID answers: at most 20 bytes.
    pub serial: String,
    /// Queues, 1 to 256.
    pub queues: u16,
    /// Largest queue: a power of two, 2 to 1024.
    pub queue_size: u16,
    /// Refuse writes, whatever the backing allows.
    pub read_only: bool,
    /// Logical block size to show, instead of the backing's: a power of two, 512 to 4096, at least the backing's.
    pub logical_block: Option<u32>,
}

/// A virtual disk.
#[derive(Debug)]
pub struct Blk {
    info: VirtioInfo,
    backing: Arc<dyn Backing>,
    /// Those before it, of which something may be under way.
    before: Vec<Weak<dyn Backing>>,
    shared: Arc<Shared>,
    logical_block: Option<u32>,
    accepted: u64,
    /// The driver cannot flush: every write is flushed before it is answered (5.2.5.2).
    flushless: bool,
    /// This model's number.
    number: u32,
    /// Queues that run, with their sizes.
    running: BTreeMap<u16, u16>,
    limits: DeviceLimits,
    share: Share,
}

/// What of a disk is saved: what its guest was promised, and the switch it can turn.
#[derive(Debug, Serialize, Deserialize)]
struct BlkV1 {
    bytes: u64,
    read_only: bool,
    write_through: bool,
    accepted: u64,
}

impl Blk {
    /// A disk with `backing` behind it.
    pub fn new(options: BlkOptions, backing: Arc<dyn Backing>) -> Self {
        let below = backing.info();
        let mut id = [0; VIRTIO_BLK_ID_BYTES];
        let serial = options.serial.as_bytes();
        let len = serial.len().min(id.len());
        id[..len].copy_from_slice(&serial[..len]);
        let shared = Shared {
            bytes: AtomicU64::new(below.bytes),
            cache_off: AtomicBool::new(false),
            models: AtomicU32::new(1),
            user: AtomicU32::new(0),
            read_only: options.read_only || below.read_only,
            id,
        };
        Blk {
            info: VirtioInfo {
                name: options.name,
                kind: "virtio-blk",
                device_id: VIRTIO_ID_BLOCK,
                queues: options.queues,
                queue_size: options.queue_size,
            },
            backing,
            before: Vec::new(),
            shared: Arc::new(shared),
            logical_block: options.logical_block,
            accepted: 0,
            flushless: false,
            number: 0,
            running: BTreeMap::new(),
            limits: DeviceLimits::default(),
            share: Share::default(),
        }
    }

    /// The same disk for one front end more, the destination of a migration: size, backing, limits, group and the write cache's switch are
    /// one. Only one of them may have queues at a time, which is its host's business; a replaced backing is told to each.
    pub fn second_instance(&self) -> Self {
        Blk {
            info: self.info.clone(),
            backing: self.backing.clone(),
            before: self.before.clone(),
            shared: self.shared.clone(),
            logical_block: self.logical_block,
            accepted: 0,
            flushless: false,
            number: self.shared.models.fetch_add(1, Ordering::Relaxed),
            running: BTreeMap::new(),
            limits: self.limits.clone(),
            share: self.share,
        }
    }

    /// What limits its guest.
    pub fn limits(&self) -> &DeviceLimits {
        &self.limits
    }

    /// Another group. Queues that run have the one of before until they are told ([`ioplane_device::Change::Share`]).
    pub fn set_share(&mut self, share: Share) {
        self.share = share;
    }

    /// Other limits. Queues that run have those of before until they are told ([`ioplane_device::Change::Limits`]).
    pub fn set_limits(&mut self, limits: DeviceLimits) {
        self.limits = limits;
    }

    /// What is behind it.
    pub fn backing(&self) -> &Arc<dyn Backing> {
        &self.backing
    }

    /// Size in bytes, as the guest sees it.
    pub fn bytes(&self) -> u64 {
        self.shared.bytes.load(Ordering::Acquire)
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.shared.read_only
    }

    /// Changes the size while the guest uses the disk; the caller then sends a configuration interrupt. Growing is told
    /// to the backing first, shrinking to the guest first.
    pub fn resize(&mut self, bytes: u64) -> Result<(), StorageError> {
        let name = self.backing.info().name;
        if bytes == 0 || !bytes.is_multiple_of(u64::from(self.block_size())) {
            let why = format!("it must be a multiple of {} and not zero", self.block_size());
            return Err(StorageError::Size { image: name, bytes, why });
        }
        if bytes < self.bytes() {
            self.shared.bytes.store(bytes, Ordering::Release);
        }
        let outcome = self.backing.resize(bytes);
        self.shared.bytes.store(self.backing.info().bytes, Ordering::Release);
        outcome
    }

    /// Puts another backing behind the disk; its content is the caller's business. The size may differ (the caller sends a
    /// configuration interrupt), what the guest was promised when it started may not.
    pub fn replace_backing(
        &mut self,
        _proof: &QuiescenceProof,
        backing: Arc<dyn Backing>,
    ) -> Result<Arc<dyn Backing>, String> {
        let new = backing.info();
        self.suits(&new)?;
        if !backing.wait_quiet(Instant::now() + REPLAY_PATIENCE) {
            return Err(format!("{} still has I/O under way from an earlier use", new.name));
        }
        self.shared.bytes.store(new.bytes, Ordering::Release);
        Ok(self.go_on_with(backing))
    }

    /// The queues that run, with their sizes: what [`Blk::exchange_backing`] needs channels for.
    pub fn running_queues(&self) -> Vec<(u16, u16)> {
        self.running.iter().map(|(queue, size)| (*queue, *size)).collect()
    }

    /// Whether [`Blk::exchange_backing`] may be called with these: a backing of the same size that keeps what the guest was promised, and channels of
    /// it for all queues that run.
    pub fn may_exchange(&self, backing: &dyn Backing, fresh: &[FreshChannel]) -> Result<(), String> {
        let new = backing.info();
        self.suits(&new)?;
        if new.bytes != self.bytes() {
            return Err(format!("{} has another size", new.name));
        }
        match self.running.iter().all(|(queue, size)| ChannelExchange::has(fresh, *queue, *size)) {
            true => Ok(()),
            false => Err("its queues are others by now".to_owned()),
        }
    }

    /// Puts another backing behind the disk while requests are under way; its content is the caller's business. The caller has asked
    /// [`Blk::may_exchange`], tells the queues what [`ChannelExchange::change`] says, and waits until that is over: until then the backing before is
    /// used, too.
    pub fn exchange_backing(
        &mut self,
        backing: Arc<dyn Backing>,
        fresh: Vec<FreshChannel>,
    ) -> (Arc<dyn Backing>, Arc<ChannelExchange>) {
        (self.go_on_with(backing), ChannelExchange::new(fresh))
    }

    fn go_on_with(&mut self, backing: Arc<dyn Backing>) -> Arc<dyn Backing> {
        let old = std::mem::replace(&mut self.backing, backing);
        let fresh = Arc::downgrade(&old);
        self.before.retain(|before| before.strong_count() > 0 && !before.ptr_eq(&fresh));
        self.before.push(fresh);
        old
    }

    /// Whether a backing keeps what the guest was promised.
    fn suits(&self, new: &BackingInfo) -> Result<(), String> {
        if new.read_only && !self.shared.read_only {
            return Err(format!("{} is read-only, and the guest was promised a writable disk", new.name));
        }
        if new.logical_block > self.block_size() {
            return Err(format!(
                "{} has blocks of {} bytes, and the guest was promised {}",
                new.name,
                new.logical_block,
                self.block_size()
            ));
        }
        Ok(())
    }

    fn block_size(&self) -> u32 {
        let below = self.backing.info().logical_block;
        self.logical_block.unwrap_or(below).max(below)
    }

    fn config(&self) -> [u8; config::BYTES] {
        let BackingInfo { logical_block, physical_block, discards, .. } = self.backing.info();
        let block = self.logical_block.unwrap_or(logical_block).max(logical_block);
        let sectors = self.bytes() / SECTOR;
        let mut bytes = [0u8; config::BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(config::CAPACITY, &sectors.to_le_bytes());
        put(config::SEG_MAX, &SEG_MAX.to_le_bytes());
        // The geometry that BIOSes have assumed since disks outgrew theirs.
        let cylinders = u16::try_from(sectors / (16 * 63)).unwrap_or(u16::MAX).clamp(1, 16383);
        put(config::GEOMETRY_CYLINDERS, &cylinders.to_le_bytes());
        put(config::GEOMETRY_HEADS, &[16]);
        put(config::GEOMETRY_SECTORS, &[63]);
        put(config::BLK_SIZE, &block.to_le_bytes());
        let exponent = (physical_block.max(block) / block).trailing_zeros() as u8;
        put(config::PHYSICAL_BLOCK_EXP, &[exponent]);
        put(config::MIN_IO_SIZE, &(1u16 << exponent.min(15)).to_le_bytes());
        put(config::OPT_IO_SIZE, &0u32.to_le_bytes());
        put(config::WRITEBACK, &[u8::from(!self.write_through())]);
        put(config::NUM_QUEUES, &self.info.queues.to_le_bytes());
        put(config::MAX_DISCARD_SECTORS, &MAX_DISCARD_SECTORS.to_le_bytes());
        put(config::MAX_DISCARD_SEG, &1u32.to_le_bytes());
        put(config::DISCARD_SECTOR_ALIGNMENT, &(block / SECTOR as u32).to_le_bytes());
        put(config::MAX_WRITE_ZEROES_SECTORS, &MAX_DISCARD_SECTORS.to_le_bytes());
        put(config::MAX_WRITE_ZEROES_SEG, &1u32.to_le_bytes());
        put(config::WRITE_ZEROES_MAY_UNMAP, &[u8::from(discards)]);
        bytes
    }

    /// Whether every write is flushed before it is answered.
    fn write_through(&self) -> bool {
        self.flushless || self.shared.cache_off()
    }

    fn switch_cache(&self, off: bool) {
        self.shared.cache_off.store(off, Ordering::Release);
    }
}

impl VirtioDevice for Blk {
    fn info(&self) -> &VirtioInfo {
        &self.info
    }

    fn features(&self) -> u64 {
        let mut features = VIRTIO_F_VERSION_1
            | VIRTIO_F_EVENT_IDX
            | VIRTIO_F_INDIRECT_DESC
            | VIRTIO_BLK_F_SEG_MAX
            | VIRTIO_BLK_F_GEOMETRY
            | VIRTIO_BLK_F_BLK_SIZE
            | VIRTIO_BLK_F_FLUSH
            | VIRTIO_BLK_F_TOPOLOGY
            | VIRTIO_BLK_F_CONFIG_WCE;
        if self.info.queues > 1 {
            features |= VIRTIO_BLK_F_MQ;
        }
        if self.shared.read_only {
            features |= VIRTIO_BLK_F_RO;
        } else {
            features |= VIRTIO_BLK_F_DISCARD | VIRTIO_BLK_F_WRITE_ZEROES;
        }
        features
    }

    fn accept(&mut self, features: u64) {
        self.accepted = features;
        // 5.2.5.2: a driver that negotiates neither flush nor the switch must be given write-through.
        self.flushless = features & VIRTIO_BLK_F_FLUSH == 0;
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let config = self.config();
        for (at, byte) in (offset as usize..).zip(out) {
            *byte = config.get(at).copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: u32, bytes: &[u8]) {
        // The write cache switch is the only field that a driver may write, if it negotiated that.
        let at = config::WRITEBACK.checked_sub(offset as usize);
        if let Some(byte) = at.and_then(|at| bytes.get(at))
            && self.accepted & VIRTIO_BLK_F_CONFIG_WCE != 0
        {
            self.switch_cache(*byte == 0);
        }
    }

    fn share(&self) -> Share {
        self.share
    }

    fn block_device(&self) -> Option<BlockDevice> {
        self.backing.info().block_device
    }

    fn queue_limits(&self, _queue: u16) -> LimitSet {
        self.limits.set()
    }

    fn start_queue(&mut self, start: QueueStart) -> Result<Box<dyn Poller>, DeviceError> {
        let below = |error: StorageError| DeviceError::Below(Box::new(error));
        // I/O that an earlier poller left behind could land over what is written from now on, or be replayed beside itself.
        let deadline = Instant::now() + REPLAY_PATIENCE;
        let before = self.before.iter().filter_map(Weak::upgrade);
        if let Some(busy) = before.chain([self.backing.clone()]).find(|backing| !backing.wait_quiet(deadline))
        {
            let (image, seconds) = (busy.info().name, REPLAY_PATIENCE.as_secs());
            return Err(below(StorageError::NotQuiet { image, seconds }));
        }
        let channel = self.backing.channel(start.ring.size()).map_err(below)?;
        self.shared.user.store(self.number, Ordering::Relaxed);
        self.running.insert(start.index, start.ring.size());
        Ok(Box::new(BlkPoller::new(start, channel, self.shared.clone(), self.flushless)))
    }

    fn stop_queue(&mut self, parked: Parked) -> RingState {
        self.running.remove(&parked.queue());
        match parked.into_poller::<BlkPoller>() {
            Ok(poller) => poller.into_state(),
            Err(other) => {
                debug_assert!(false, "queue {} was parked with somebody else's poller", other.queue());
                RingState { fault: Some(RingFault::BadSize(0)), ..RingState::default() }
            }
        }
    }

    fn rest(&mut self, migrates: bool) {
        self.backing.rest(migrates);
    }

    fn is_stalled(&self) -> bool {
        self.backing.is_stalled()
            || self.before.iter().filter_map(Weak::upgrade).any(|before| before.is_stalled())
    }

    /// Of two front ends only the one whose rings ran last has a guest.
    fn forget_guest(&mut self) {
        if self.shared.user.load(Ordering::Relaxed) == self.number {
            self.backing.forget_guest();
        }
    }

    fn save_own(&self, _proof: &QuiescenceProof) -> Vec<u8> {
        let saved = BlkV1 {
            bytes: self.bytes(),
            read_only: self.shared.read_only,
            write_through: self.write_through(),
            accepted: self.accepted,
        };
        postcard::to_stdvec(&saved).unwrap_or_default()
    }

    fn load_own(&mut self, _proof: &QuiescenceProof, bytes: &[u8]) -> Result<(), String> {
        let saved: BlkV1 = postcard::from_bytes(bytes).map_err(|error| error.to_string())?;
        if saved.read_only != self.shared.read_only {
            return Err("one of the two disks is read-only, the other is not".to_owned());
        }
        if saved.bytes != self.bytes() {
            return Err(format!("the disk has {} bytes, the one saved had {}", self.bytes(), saved.bytes));
        }
        if saved.accepted & !self.features() != 0 {
            return Err("the guest was promised features that this disk does not have".to_owned());
        }
        self.accepted = saved.accepted;
        self.flushless = saved.write_through && saved.accepted & VIRTIO_BLK_F_FLUSH == 0;
        self.switch_cache(saved.write_through && !self.flushless);
        Ok(())
    }

    fn reset_own(&mut self) {
        self.accepted = 0;
        self.flushless = false;
        // A front end that leaves after its migration takes nothing from the guest that has gone on.
        if self.shared.user.load(Ordering::Relaxed) == self.number {
            self.switch_cache(false);
        }
    }
}
