#![allow(dead_code)] // each test file uses its part of the rig
//! A disk, its guest's memory and driver, and a core turned by hand.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::{Interrupt, QueueSet, Quiescent, Running};
use ioplane_storage::Backing;
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::blk::{Blk, BlkOptions};
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::spec::feature::VIRTIO_F_RING_PACKED;
use ioplane_virtio::{RingLayout, Vdev};

/// Counts interrupts.
#[derive(Debug, Default)]
pub struct CountedInterrupt(pub AtomicU64);

impl Interrupt for CountedInterrupt {
    fn signal(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub struct Rig {
    pub memory: GuestMemory,
    pub disk: Disk,
    pub core: HandCore,
    pub running: Option<Running<Vdev<Blk>>>,
    pub interrupt: Arc<CountedInterrupt>,
    pub kick: Arc<OwnedFd>,
}

pub const QUEUE: u16 = 64;

/// All features: packed rings.
pub const PACKED: u64 = u64::MAX;
/// All features but packed rings.
pub const SPLIT: u64 = !VIRTIO_F_RING_PACKED;

pub fn options(name: &str) -> BlkOptions {
    BlkOptions {
        name: name.to_owned(),
        serial: "serial-number".to_owned(),
        queues: 1,
        queue_size: 256,
        read_only: false,
        logical_block: None,
    }
}

impl Rig {
    pub fn new(backing: Arc<dyn Backing>) -> Self {
        Self::with(options("disk"), backing, Shape::Direct, SPLIT)
    }

    /// `features` is what the driver is willing to accept.
    pub fn with(options: BlkOptions, backing: Arc<dyn Backing>, shape: Shape, features: u64) -> Self {
        let plan = DiskPlan { slots: 16, max_bytes: 16384, segments: 2, shape };
        Self::planned(options, backing, plan, features, &HandCore::polling())
    }

    /// As [`Rig::with`], with requests of `plan`, on a core that others may have, too.
    pub fn planned(
        options: BlkOptions,
        backing: Arc<dyn Backing>,
        plan: DiskPlan,
        features: u64,
        core: &HandCore,
    ) -> Self {
        let data = u64::from(plan.slots) * u64::from(plan.max_bytes);
        let mut memory = GuestMemory::new((4 << 20) + data).unwrap();
        let mut vdev = Vdev::new(Blk::new(options, backing), memory.view().map().clone());
        let features = vdev.offers() & features;
        let disk = Disk::new(&mut memory, QUEUE, RingMode::of(features), plan).unwrap();
        assert!(vdev.accept(features, 0));
        let (interrupt, kick) = (Arc::new(CountedInterrupt::default()), ioplane_host_eventfd());
        let place = disk.place();
        let setup = vdev.queue_mut(0).unwrap();
        setup.layout =
            RingLayout { size: place.size, desc: place.desc, avail: place.avail, used: place.used };
        setup.enabled = true;
        setup.call = Some(interrupt.clone());
        setup.kick = Some(kick.clone());
        setup.journal = Some(memory.carve(region_bytes(place.size, features) as u64, 64).unwrap());
        let running = Quiescent::new(vdev).resume(core).unwrap();
        Rig { memory, disk, core: core.clone(), running: Some(running), interrupt, kick }
    }

    /// Puts one request through; its status.
    pub fn request(&mut self, op: DiskOp, sector: u64, bytes: u32) -> u8 {
        self.disk.submit(op, sector, bytes).expect("a free slot");
        self.finish().expect("the request was not answered")
    }

    /// The status of the next request to end, if one does.
    pub fn finish(&mut self) -> Option<u8> {
        // A disk below may take its time, and so may a busy machine.
        let end = Instant::now() + Duration::from_secs(60);
        while Instant::now() < end {
            self.core.turn();
            if let Some(done) = self.disk.reap().expect("the device kept to the protocol") {
                return Some(done.status);
            }
            std::thread::yield_now();
        }
        None
    }

    pub fn write(&mut self, sector: u64, bytes: &[u8]) -> u8 {
        let token = self.disk.next().unwrap();
        self.disk.write_data(token, bytes).unwrap();
        self.request(DiskOp::Write, sector, bytes.len() as u32)
    }

    pub fn read(&mut self, sector: u64, len: usize) -> (u8, Vec<u8>) {
        let token = self.disk.next().unwrap();
        let status = self.request(DiskOp::Read, sector, len as u32);
        let mut bytes = vec![0; len];
        self.disk.read_data(token, &mut bytes).unwrap();
        (status, bytes)
    }

    pub fn running(&mut self) -> &mut Running<Vdev<Blk>> {
        self.running.as_mut().unwrap()
    }

    pub fn counts(&mut self) -> ioplane_device::MeterReading {
        self.core.turn();
        self.running().device().meters()[0].read()
    }

    /// The queue's fault, by name, after it has been stopped.
    pub fn fault(&mut self) -> Option<&'static str> {
        self.quiesce();
        let running = self.running.as_ref().unwrap();
        running.device().queue(0).unwrap().fault.map(|fault| fault.name())
    }

    /// Stops queue 0.
    pub fn quiesce(&mut self) {
        let queues = QueueSet::from([0]);
        let core = self.core.clone();
        self.running().drain(&queues);
        core.turn_until_idle(1000);
        // What a kernel or a thread still has comes back in its own time.
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        loop {
            core.turn();
            let now = std::time::Instant::now();
            if self.running().wait_stopped(&queues, now) {
                return;
            }
            assert!(now < deadline, "the queue did not stop");
            std::thread::yield_now();
        }
    }
}

pub fn ioplane_host_eventfd() -> Arc<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}
