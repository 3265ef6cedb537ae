//! One disk behind two sockets: whose rings run, and when that changes. The front ends share one guest memory, as if each page
//! had been copied.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_host::vhost_user::{Handle, RingLease, ServerOptions, Status, serve_leased};
use ioplane_storage::filter::Stall;
use ioplane_storage::{Backing, MemoryBacking};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_virtio::blk::{Blk, BlkOptions};

const MIB: u64 = 1 << 20;
const SIZE: u16 = 64;
/// Longer than anything takes that is to come at all.
const LIMIT: Duration = Duration::from_secs(20);

/// Serves a disk of two queues on two sockets.
struct Served {
    runtime: tokio::runtime::Runtime,
    sockets: [Handle<Blk>; 2],
    _directory: tempfile::TempDir,
}

impl Served {
    /// Whoever wants the lease waits for `patience`; requests that hang are suspended soon.
    fn new(backing: Arc<dyn Backing>, patience: Duration) -> Self {
        let pool = Arc::new(
            Pool::with([CoreSettings { notify: Notify::Polled, ..CoreSettings::default() }]).unwrap(),
        );
        let directory = tempfile::tempdir().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let options = BlkOptions {
            name: "disk".to_owned(),
            serial: "serial".to_owned(),
            queues: 2,
            queue_size: 128,
            read_only: false,
            logical_block: None,
        };
        let lease = RingLease::default().with_patience(patience);
        let first = Blk::new(options, backing);
        let second = first.second_instance();
        let serve = |model: Blk, name: &str| {
            let _inside = runtime.enter();
            let socket = directory.path().join(name);
            let options = ServerOptions { dirty_log: true, ..ServerOptions::new(socket, pool.clone()) };
            serve_leased(model, options, Duration::from_millis(100), lease.clone()).unwrap()
        };
        let sockets = [serve(first, "first.sock"), serve(second, "second.sock")];
        Served { runtime, sockets, _directory: directory }
    }

    fn status(&self, socket: usize) -> Status {
        self.runtime.block_on(self.sockets[socket].status()).unwrap()
    }

    fn until(&self, socket: usize, what: &str, wanted: impl Fn(&Status) -> bool) {
        let deadline = Instant::now() + LIMIT;
        loop {
            let status = self.status(socket);
            if wanted(&status) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {status:?}");
            std::thread::yield_now();
        }
    }

    /// A front end that knows the guest's memory, with an in-flight region of its own.
    fn connect(&self, socket: usize, memory: &GuestMemory) -> FrontEnd {
        let mut front = FrontEnd::connect(self.sockets[socket].socket(), Wants::default()).unwrap();
        front.track_inflight(2, SIZE).unwrap();
        front.share(memory).unwrap();
        front
    }
}

/// A guest: it goes from front end to front end and does not know.
struct Guest {
    memory: GuestMemory,
    disks: Vec<Disk>,
    bases: [u32; 2],
}

impl Guest {
    fn new() -> Self {
        let mut memory = GuestMemory::new(4 * MIB).unwrap();
        let plan = DiskPlan::new(32, 4096, Shape::Indirect);
        let mode = RingMode::of(Wants::default().features);
        let disks = (0..2).map(|_| Disk::new(&mut memory, SIZE, mode, plan).unwrap()).collect();
        Guest { memory, disks, bases: [0; 2] }
    }

    fn start(&self, front: &mut FrontEnd) {
        for (index, disk) in (0..).zip(&self.disks) {
            front.start(index, &self.memory, disk.place(), self.bases[usize::from(index)]).unwrap();
        }
    }

    fn stop(&mut self, front: &FrontEnd) {
        self.bases = [front.stop(0).unwrap(), front.stop(1).unwrap()];
    }

    /// Makes a request available and kicks.
    fn submit(&mut self, front: &mut FrontEnd, queue: u16, op: DiskOp, sector: u64, data: u8) {
        let disk = &mut self.disks[usize::from(queue)];
        let token = disk.next().unwrap();
        if op == DiskOp::Write {
            disk.write_data(token, &[data; 4096]).unwrap();
        }
        disk.submit(op, sector, if op == DiskOp::Flush { 0 } else { 4096 }).unwrap();
        front.kick(queue);
    }

    /// The answer of the next request that ends: its first byte of data.
    fn answer(&mut self, queue: u16) -> u8 {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(done) = self.disks[usize::from(queue)].reap().unwrap() {
                assert!(done.ok(), "status {}", done.status);
                let mut byte = [0];
                self.disks[usize::from(queue)].read_data(done.token, &mut byte).unwrap();
                return byte[0];
            }
            assert!(Instant::now() < deadline, "queue {queue}: no answer");
            std::thread::yield_now();
        }
    }

    /// Writes on both queues and reads it back.
    fn works(&mut self, front: &mut FrontEnd, seed: u8) {
        for queue in 0..2 {
            let (sector, data) = (u64::from(queue) * 8, seed ^ queue as u8);
            self.submit(front, queue, DiskOp::Write, sector, data);
            self.answer(queue);
            self.submit(front, queue, DiskOp::Read, sector, 0);
            assert_eq!(self.answer(queue), data);
        }
    }

    /// What was written last, as another front end finds it.
    fn finds(&mut self, front: &mut FrontEnd, seed: u8) {
        for queue in 0..2 {
            self.submit(front, queue, DiskOp::Read, u64::from(queue) * 8, 0);
            assert_eq!(self.answer(queue), seed ^ queue as u8);
        }
    }
}

fn memory() -> Arc<dyn Backing> {
    MemoryBacking::new(MIB).unwrap()
}

#[test]
fn the_disk_goes_over_with_the_first_ring_start_and_back() {
    let served = Served::new(memory(), LIMIT);
    let mut guest = Guest::new();
    let mut here = 0;
    let mut source = served.connect(here, &guest.memory);
    guest.start(&mut source);
    for round in 1..=4u8 {
        guest.works(&mut source, round);
        // The destination connects and reads the configuration long before: nothing changes by that.
        let there = 1 - here;
        let mut destination = served.connect(there, &guest.memory);
        assert_eq!(destination.capacity().unwrap(), MIB / 512);
        guest.works(&mut source, round + 10);
        assert!(served.status(here).owner && !served.status(there).owner);
        guest.stop(&source);
        assert!(!served.status(here).owner, "let go when the last ring has stopped");
        guest.start(&mut destination);
        assert!(served.status(there).owner);
        guest.finds(&mut destination, round + 10);
        // The source goes only now.
        drop(source);
        served.until(here, "left", |status| !status.connected);
        guest.works(&mut destination, round + 20);
        (source, here) = (destination, there);
    }
    // Counts are published now and then, so they may come after the answers.
    for socket in 0..2 {
        served.until(socket, "counted in one place", |status| status.queues[0].counts.requests == 4 * 7);
    }
}

#[test]
fn a_destination_that_starts_early_waits_for_the_last_ring() {
    let served = Served::new(memory(), LIMIT);
    let mut guest = Guest::new();
    let mut source = served.connect(0, &guest.memory);
    guest.start(&mut source);
    guest.works(&mut source, 1);
    let mut destination = served.connect(1, &guest.memory);
    // A destination that does not wait for its turn has rings of its own, of course.
    let mut early = Guest::new();
    destination.share_table(&early.memory).unwrap();
    early.start(&mut destination);
    assert!(served.status(1).waiting && !served.status(1).owner);
    early.submit(&mut destination, 0, DiskOp::Read, 0, 0);
    guest.works(&mut source, 2);
    let first = source.stop(0).unwrap();
    assert!(served.status(1).waiting, "one ring of the source still runs");
    assert!(early.disks[0].reap().unwrap().is_none(), "served before the source has stopped");
    let second = source.stop(1).unwrap();
    // Its rings start by themselves, and what was asked for meanwhile is answered.
    assert_eq!(early.answer(0), 2);
    assert!(served.status(1).owner);
    early.works(&mut destination, 3);
    // Now the source is the one that waits.
    guest.bases = [first, second];
    guest.start(&mut source);
    assert!(served.status(0).waiting);
    guest.submit(&mut source, 0, DiskOp::Read, 0, 0);
    early.stop(&destination);
    assert_eq!(guest.answer(0), 3);
}

#[test]
fn a_source_that_never_stops_is_not_harmed_and_the_wait_ends() {
    let served = Served::new(memory(), Duration::from_millis(200));
    let mut guest = Guest::new();
    let mut source = served.connect(0, &guest.memory);
    guest.start(&mut source);
    for round in 0..2u8 {
        let early = Guest::new();
        let mut destination = served.connect(1, &early.memory);
        early.start(&mut destination);
        served.until(1, "turned out", |status| {
            !status.connected && status.faults.get("not_owner") == Some(&u64::from(round + 1))
        });
        assert!(destination.wire().closed_within(LIMIT));
        guest.works(&mut source, round);
    }
    assert!(served.status(0).owner && served.status(0).faults.is_empty());
}

#[test]
fn a_failed_migration_gives_the_disk_back() {
    let served = Served::new(memory(), Duration::from_millis(200));
    let mut guest = Guest::new();
    let mut source = served.connect(0, &guest.memory);
    guest.start(&mut source);
    for round in 0..3u8 {
        guest.works(&mut source, round);
        let mut destination = served.connect(1, &guest.memory);
        guest.stop(&source);
        let kept = match round {
            // It dies before it has started anything.
            0 => {
                drop(destination);
                None
            }
            // It is there and does nothing.
            1 => Some(destination),
            // It had started, and is stopped again.
            _ => {
                guest.start(&mut destination);
                guest.works(&mut destination, 77);
                guest.stop(&destination);
                Some(destination)
            }
        };
        guest.start(&mut source);
        assert!(served.status(0).owner);
        guest.works(&mut source, round + 50);
        drop(kept);
        served.until(1, "left", |status| !status.connected);
    }
    // A destination that starts after all is refused.
    let late = Guest::new();
    let mut destination = served.connect(1, &late.memory);
    late.start(&mut destination);
    served.until(1, "turned out", |status| status.faults.contains_key("not_owner"));
    guest.works(&mut source, 99);
}

#[test]
fn a_source_that_dies_leaves_the_disk_to_the_destination() {
    let served = Served::new(memory(), LIMIT);
    let mut guest = Guest::new();
    let mut source = served.connect(0, &guest.memory);
    guest.start(&mut source);
    guest.works(&mut source, 5);
    let mut next = Guest::new();
    let mut destination = served.connect(1, &next.memory);
    next.start(&mut destination);
    assert!(served.status(1).waiting);
    drop(source);
    next.finds(&mut destination, 5);
    next.works(&mut destination, 6);
    assert!(served.status(0).faults.is_empty() && served.status(1).faults.is_empty());
}

#[test]
fn who_waits_and_leaves_keeps_nobody_waiting() {
    let served = Served::new(memory(), LIMIT);
    let mut guest = Guest::new();
    let mut source = served.connect(0, &guest.memory);
    guest.start(&mut source);
    let early = Guest::new();
    let mut destination = served.connect(1, &early.memory);
    early.start(&mut destination);
    assert!(served.status(1).waiting);
    // Stopped again while it waits, then gone.
    destination.stop(0).unwrap();
    assert!(served.status(1).waiting);
    destination.stop(1).unwrap();
    assert!(!served.status(1).waiting);
    early.start(&mut destination);
    drop(destination);
    served.until(1, "left", |status| !status.connected && !status.waiting);
    guest.stop(&source);
    guest.start(&mut source);
    guest.works(&mut source, 1);
}

#[test]
fn both_hear_of_a_new_size_and_of_the_write_caches_switch() {
    const WRITEBACK: u32 = 32;
    let served = Served::new(memory(), LIMIT);
    let mut guest = Guest::new();
    let mut source = served.connect(0, &guest.memory);
    guest.start(&mut source);
    let mut destination = served.connect(1, &guest.memory);
    let [first, second] = &served.sockets;
    served.runtime.block_on(first.change(|disk| (disk.resize(2 * MIB), true))).unwrap().unwrap();
    served.runtime.block_on(second.change(|_| ((), true))).unwrap();
    assert!(source.config_changed(LIMIT).unwrap() && destination.config_changed(LIMIT).unwrap());
    assert_eq!(destination.capacity().unwrap(), 2 * MIB / 512);
    // Switched off behind the one, off behind the other, whoever leaves.
    assert_eq!(destination.config(WRITEBACK, 1).unwrap(), [1]);
    source.set_config(WRITEBACK, &[0]).unwrap();
    assert_eq!(destination.config(WRITEBACK, 1).unwrap(), [0]);
    guest.stop(&source);
    guest.start(&mut destination);
    drop(source);
    served.until(0, "left", |status| !status.connected);
    assert_eq!(destination.config(WRITEBACK, 1).unwrap(), [0]);
    guest.works(&mut destination, 3);
}

/// The disk below hangs, so the source's requests are suspended; the destination does them, once what hangs has ended.
#[test]
fn requests_that_hang_at_the_source_are_done_at_the_destination() {
    let stalled = Stall::new(memory());
    let served = Served::new(stalled.clone(), LIMIT);
    let mut guest = Guest::new();
    let mut source = served.connect(0, &guest.memory);
    guest.start(&mut source);
    guest.works(&mut source, 1);
    stalled.stall();
    for sector in 0..8 {
        guest.submit(&mut source, 0, DiskOp::Write, 64 + sector * 8, 100 + sector as u8);
        guest.submit(&mut source, 0, DiskOp::Read, 0, 0);
    }
    let deadline = Instant::now() + LIMIT;
    while source.marked(0) != Some(16) {
        assert!(Instant::now() < deadline, "not all are in flight: {:?}", source.marked(0));
        std::thread::yield_now();
    }
    guest.stop(&source);
    let mut destination = served.connect(1, &guest.memory);
    // Meanwhile more is asked for, which nobody has seen yet.
    guest.disks[0].submit(DiskOp::Flush, 0, 0).unwrap();
    let release = {
        let stalled = stalled.clone();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            stalled.release();
        })
    };
    guest.start(&mut destination);
    for _ in 0..17 {
        guest.answer(0);
    }
    release.join().unwrap();
    assert_eq!(guest.disks[0].in_flight(), 0, "each once");
    for sector in 0..8 {
        guest.submit(&mut destination, 0, DiskOp::Read, 64 + sector * 8, 0);
        assert_eq!(guest.answer(0), 100 + sector as u8);
    }
    drop(source);
    guest.works(&mut destination, 9);
    let counts = served.status(1).queues[0].counts;
    assert_eq!((counts.replayed, counts.faults), (16, 0));
}
