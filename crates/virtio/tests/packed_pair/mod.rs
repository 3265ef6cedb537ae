//! A packed ring and its driver, without a device.

#![allow(dead_code, reason = "each test file uses its own part")]

use ioplane_memory::Window;
use ioplane_testkit::driver::{DriverRing, GuestMemory, Part, RingMode, RingPlace};
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::spec::feature::*;
use ioplane_virtio::{Ring, RingFault, RingLayout};

pub const FEATURES: u64 = VIRTIO_F_RING_PACKED | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC;

/// A driver and the place of its packed ring, which any number of device sides open one after the other.
pub struct Pair {
    pub memory: GuestMemory,
    pub place: RingPlace,
    pub journal: Window,
    pub driver: DriverRing,
    pub buffers: u64,
}

impl Pair {
    pub fn new(size: u16) -> Self {
        let mut memory = GuestMemory::new(1 << 20).unwrap();
        let place = RingPlace::carve(&mut memory, size).unwrap();
        let journal = memory.carve(region_bytes(size, FEATURES) as u64, 64).unwrap();
        let driver = DriverRing::new(memory.view(), place, RingMode::of(FEATURES)).unwrap();
        let buffers = memory.alloc(4096, 4096).unwrap();
        Pair { memory, place, journal, driver, buffers }
    }

    pub fn open(&self, base: Option<u32>, journal: bool) -> Result<Ring, RingFault> {
        let RingPlace { size, desc, avail, used } = self.place;
        let layout = RingLayout { size, desc, avail, used };
        let journal = journal.then(|| self.journal.clone());
        Ring::open(self.memory.view().clone(), &layout, FEATURES, base, journal, &[])
    }

    /// Makes a chain of `count` buffers to write available; its buffer ID.
    pub fn push(&mut self, count: usize) -> u16 {
        let parts = vec![Part { gpa: self.buffers, len: 8, write: true }; count];
        let id = self.driver.chain(&parts).unwrap();
        self.driver.push(id);
        id
    }

    /// What the driver finds used.
    pub fn used(&mut self) -> Vec<u16> {
        self.used_bytes().into_iter().map(|(id, _)| id).collect()
    }

    /// What the driver finds used, and how many bytes of each are written.
    pub fn used_bytes(&mut self) -> Vec<(u16, u32)> {
        let mut all = Vec::new();
        while let Some(used) = self.driver.pop().expect("a device that keeps to the protocol") {
            self.driver.free(used.head);
            all.push((used.head, used.len));
        }
        all
    }
}
