//! A guest that reads.

use std::time::{Duration, Instant};

use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};

use super::{LIMIT, TestDaemon};

/// A guest that reads from one ring.
pub struct Reader {
    disk: Disk,
    /// Rings that are set up and not used.
    idle: Vec<Disk>,
    front: FrontEnd,
    /// Of one request.
    bytes: u32,
    _memory: GuestMemory,
}

impl Reader {
    pub fn connect(daemon: &TestDaemon, name: &str) -> Self {
        Self::connect_with(daemon, name, Wants::default())
    }

    pub fn connect_with(daemon: &TestDaemon, name: &str, wants: Wants) -> Self {
        Self::connect_to_read(daemon, name, wants, 4096, 1)
    }

    /// One whose requests are of so many bytes.
    pub fn of(daemon: &TestDaemon, name: &str, bytes: u32) -> Self {
        Self::connect_to_read(daemon, name, Wants::default(), bytes, 1)
    }

    /// The same of a disk with several queues, all set up, of which it uses the first.
    pub fn of_queues(daemon: &TestDaemon, name: &str, bytes: u32, queues: u16) -> Self {
        Self::connect_to_read(daemon, name, Wants::default(), bytes, queues)
    }

    fn connect_to_read(daemon: &TestDaemon, name: &str, wants: Wants, bytes: u32, queues: u16) -> Self {
        let mut memory = GuestMemory::new((u64::from(queues) << 20) + 64 * u64::from(bytes)).unwrap();
        let plan = DiskPlan::new(64, bytes, Shape::Indirect);
        let disk = Disk::new(&mut memory, 64, RingMode::of(wants.features), plan).unwrap();
        let idle = DiskPlan::new(64, 512, Shape::Indirect);
        let idle: Vec<Disk> = (1..queues)
            .map(|_| Disk::new(&mut memory, 64, RingMode::of(wants.features), idle).unwrap())
            .collect();
        let mut front = FrontEnd::connect(&daemon.path(&format!("{name}.sock")), wants).unwrap();
        front.track_inflight(queues, 64).unwrap();
        front.share(&memory).unwrap();
        for (index, disk) in (0..).zip(std::iter::once(&disk).chain(&idle)) {
            front.start(index, &memory, disk.place(), 0).unwrap();
        }
        Reader { disk, idle, front, bytes, _memory: memory }
    }

    /// Stops all its rings, as a VMM does that pauses, resets or moves its guest.
    pub fn stop(&mut self) {
        for index in 0..=self.idle.len() as u16 {
            self.front.stop(index).unwrap();
        }
    }

    /// Makes as many requests available as there are slots, at most `most`.
    pub fn submit(&mut self, most: usize) {
        for _ in 0..most {
            if self.disk.submit(DiskOp::Read, 0, self.bytes).is_none() {
                break;
            }
        }
        self.front.kick(0);
    }

    /// Makes one write from that sector on available, if there is a slot.
    pub fn write(&mut self, sector: u64) -> bool {
        let submitted = self.disk.submit(DiskOp::Write, sector, self.bytes).is_some();
        self.front.kick(0);
        submitted
    }

    /// Answers that have come, without waiting.
    pub fn reap(&mut self) -> usize {
        let mut count = 0;
        while let Some(done) = self.disk.reap().unwrap() {
            assert!(done.ok(), "status {}", done.status);
            count += 1;
        }
        count
    }

    /// What one request ends with; none may be in flight.
    pub fn status_of(&mut self, op: DiskOp) -> u8 {
        self.status_at(op, 0)
    }

    fn status_at(&mut self, op: DiskOp, sector: u64) -> u8 {
        self.disk.submit(op, sector, self.bytes).unwrap();
        self.front.kick(0);
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(done) = self.disk.reap().unwrap() {
                return done.status;
            }
            assert!(Instant::now() < end, "it is not answered");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The same of the last block of a disk of so many bytes.
    pub fn status_at_end(&mut self, op: DiskOp, bytes: u64) -> u8 {
        self.status_at(op, (bytes - u64::from(self.bytes)) / 512)
    }

    /// Waits until the daemon says that the configuration has changed, and says how large the disk is by that, in bytes.
    pub fn new_size(&self) -> u64 {
        assert!(self.front.config_changed(LIMIT).unwrap(), "the guest is told nothing");
        self.front.capacity().unwrap() * 512
    }

    /// Waits for so many answers.
    pub fn wait(&mut self, count: usize) {
        let (mut left, end) = (count, Instant::now() + LIMIT);
        while left > 0 {
            left = left.saturating_sub(self.reap());
            assert!(Instant::now() < end, "{left} of {count} are not answered");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
