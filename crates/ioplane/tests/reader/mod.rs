//! A guest that reads from one ring of a disk.

#![allow(dead_code)]

use std::time::{Duration, Instant};

use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};

use crate::daemon::TestDaemon;

/// Within which an answer comes.
const LIMIT: Duration = Duration::from_secs(20);

/// A guest that reads from one ring.
pub struct Reader {
    disk: Disk,
    front: FrontEnd,
    /// Of one request.
    bytes: u32,
    _memory: GuestMemory,
}

impl Reader {
    /// Connects, with room for 64 requests of 4 KiB.
    pub fn connect(daemon: &TestDaemon, name: &str) -> Self {
        Reader::of(daemon, name, 4096)
    }

    /// The same, with room for 64 of so many bytes.
    pub fn of(daemon: &TestDaemon, name: &str, bytes: u32) -> Self {
        let mut memory = GuestMemory::new((1 << 20) + 64 * u64::from(bytes)).unwrap();
        let plan = DiskPlan::new(64, bytes, Shape::Indirect);
        let disk = Disk::new(&mut memory, 64, RingMode::of(Wants::default().features), plan).unwrap();
        let mut front = FrontEnd::connect(&daemon.path(&format!("{name}.sock")), Wants::default()).unwrap();
        front.track_inflight(1, 64).unwrap();
        front.share(&memory).unwrap();
        front.start(0, &memory, disk.place(), 0).unwrap();
        Reader { disk, front, bytes, _memory: memory }
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

    /// Answers that have come, without waiting.
    pub fn reap(&mut self) -> usize {
        let mut count = 0;
        while let Some(done) = self.disk.reap().unwrap() {
            assert!(done.ok(), "status {}", done.status);
            count += 1;
        }
        count
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
