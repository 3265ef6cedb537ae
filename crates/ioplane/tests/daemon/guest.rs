//! A guest that can go from host to host, and knows what it has written.

use std::time::{Duration, Instant};

use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape, Token};
use ioplane_testkit::front::{FrontEnd, Wants};

use super::{LIMIT, TestDaemon};

/// A guest of a disk `data` with one ring.
pub struct Guest {
    pub memory: GuestMemory,
    disk: Disk,
    base: u32,
    /// What is in each block of 4 KiB.
    pub written: Vec<u8>,
    next: u8,
}

/// Blocks that it writes.
pub const BLOCKS: usize = 64;

impl Guest {
    pub fn new() -> Self {
        let mut memory = GuestMemory::new(1 << 20).unwrap();
        let plan = DiskPlan::new(8, 4096, Shape::Indirect);
        let disk = Disk::new(&mut memory, 64, RingMode::of(Wants::default().features), plan).unwrap();
        Guest { memory, disk, base: 0, written: vec![0; BLOCKS], next: 0 }
    }

    pub fn connect(&self, host: &TestDaemon) -> FrontEnd {
        let mut front = FrontEnd::connect(&host.path("data.sock"), Wants::default()).unwrap();
        front.track_inflight(1, 64).unwrap();
        front.share(&self.memory).unwrap();
        front
    }

    pub fn start(&self, front: &mut FrontEnd) {
        front.start(0, &self.memory, self.disk.place(), self.base).unwrap();
    }

    pub fn start_on(&self, host: &TestDaemon) -> FrontEnd {
        let mut front = self.connect(host);
        self.start(&mut front);
        front
    }

    pub fn stop(&mut self, front: &FrontEnd) {
        self.base = front.stop(0).unwrap();
    }

    /// Another VM that knows the same of the disk.
    pub fn fork(&self) -> Guest {
        Guest { written: self.written.clone(), ..Guest::new() }
    }

    /// Asks for one thing, and does not wait.
    pub fn submit(&mut self, front: &mut FrontEnd, op: DiskOp, block: usize, data: u8) -> Token {
        let token = self.disk.next().unwrap();
        if op == DiskOp::Write {
            self.disk.write_data(token, &[data; 4096]).unwrap();
        }
        self.disk.submit(op, block as u64 * 8, 4096).unwrap();
        front.kick(0);
        token
    }

    /// The status of the one request, and the first byte of its data.
    pub fn answer(&mut self, token: Token) -> (u8, u8) {
        let end = Instant::now() + LIMIT;
        loop {
            if let Some(done) = self.disk.reap().unwrap() {
                let mut byte = [0];
                self.disk.read_data(token, &mut byte).unwrap();
                return (done.status, byte[0]);
            }
            assert!(Instant::now() < end, "no answer");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn request(&mut self, front: &mut FrontEnd, op: DiskOp, block: usize, data: u8) -> (u8, u8) {
        let token = self.submit(front, op, block, data);
        self.answer(token)
    }

    pub fn write(&mut self, front: &mut FrontEnd, block: usize) {
        self.next = self.next.wrapping_add(1).max(1);
        let data = self.next;
        assert_eq!(self.request(front, DiskOp::Write, block, data).0, 0);
        self.written[block] = data;
    }

    /// Reads all that it has written, and writes some of it anew, without a flush.
    pub fn work(&mut self, front: &mut FrontEnd, round: usize) {
        for block in 0..BLOCKS {
            let (status, byte) = self.request(front, DiskOp::Read, block, 0);
            assert_eq!((status, byte), (0, self.written[block]), "block {block} in round {round}");
        }
        for block in (round % 3..BLOCKS).step_by(3) {
            self.write(front, block);
        }
    }
}
