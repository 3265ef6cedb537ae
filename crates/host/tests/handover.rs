//! A device goes from one server to another: whole, back again, or not at all. Both are in this process here, on one backing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_host::vhost_user::{
    Adopted, HandOverError, Handle, Parcel, RingLease, STOP_PATIENCE, ServerOptions, adopt, serve,
};
use ioplane_storage::filter::Stall;
use ioplane_storage::{Backing, MemoryBacking};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_virtio::blk::{Blk, BlkOptions};

const MIB: u64 = 1 << 20;
const QUEUES: u16 = 2;
const SIZE: u16 = 64;
/// Longer than a memory disk takes to drain on a loaded machine, shorter than anybody waits for a stalled one.
const DRAIN: Duration = Duration::from_millis(200);

struct Rig {
    runtime: tokio::runtime::Runtime,
    pool: Arc<Pool>,
    folder: tempfile::TempDir,
    stall: Arc<Stall>,
    backing: Arc<dyn Backing>,
}

impl Rig {
    fn new() -> Rig {
        let settings = CoreSettings {
            notify: Notify::Polled,
            spin: Duration::from_millis(1),
            ..CoreSettings::default()
        };
        let stall = Stall::new(MemoryBacking::new(MIB).unwrap());
        Rig {
            runtime: tokio::runtime::Builder::new_multi_thread()
                .worker_threads(2)
                .enable_all()
                .build()
                .unwrap(),
            pool: Arc::new(Pool::with([settings]).unwrap()),
            folder: tempfile::tempdir().unwrap(),
            backing: stall.clone(),
            stall,
        }
    }

    fn model(&self, queues: u16) -> Blk {
        let options = BlkOptions {
            name: "disk".to_owned(),
            serial: "serial".to_owned(),
            queues,
            queue_size: 256,
            read_only: false,
            logical_block: None,
        };
        Blk::new(options, self.backing.clone())
    }

    fn options(&self) -> ServerOptions {
        ServerOptions::new(self.folder.path().join("disk.sock"), self.pool.clone())
    }

    fn serve(&self) -> Handle<Blk> {
        let _inside = self.runtime.enter();
        serve(self.model(QUEUES), self.options()).unwrap()
    }

    fn adopt(&self, queues: u16, parcel: Parcel) -> Result<Adopted<Blk>, HandOverError> {
        adopt(self.model(queues), self.options(), STOP_PATIENCE, RingLease::default(), parcel)
    }

    /// Goes on with what `parcel` says.
    fn succeed(&self, parcel: Parcel) -> (Handle<Blk>, Duration) {
        let _inside = self.runtime.enter();
        let (handle, waited) = self.adopt(QUEUES, parcel).unwrap().start();
        (handle, self.runtime.block_on(waited).unwrap())
    }
}

struct Guest {
    front: FrontEnd,
    disks: Vec<Disk>,
    _memory: GuestMemory,
}

impl Guest {
    fn boot(handle: &Handle<Blk>) -> Guest {
        let mut front = FrontEnd::connect(handle.socket(), Wants::default()).unwrap();
        let mut memory = GuestMemory::of(&[(0, 8 * MIB), (1 << 32, 8 * MIB)]).unwrap();
        front.track_inflight(QUEUES, SIZE).unwrap();
        front.share(&memory).unwrap();
        let mode = RingMode::of(front.features());
        let plan = DiskPlan::new(8, 4096, Shape::Indirect);
        let disks: Vec<_> = (0..QUEUES).map(|_| Disk::new(&mut memory, SIZE, mode, plan).unwrap()).collect();
        for (index, disk) in (0..).zip(&disks) {
            front.start(index, &memory, disk.place(), 0).unwrap();
        }
        Guest { front, disks, _memory: memory }
    }

    fn submit(&mut self, queue: u16, op: DiskOp, sector: u64, fill: u8) {
        let disk = &mut self.disks[usize::from(queue)];
        if op == DiskOp::Write {
            disk.write_data(disk.next().unwrap(), &[fill; 4096]).unwrap();
        }
        disk.submit(op, sector, 4096).unwrap();
        self.front.kick(queue);
    }

    /// The next answer: its status and the first byte read.
    fn answer(&mut self, queue: u16) -> (u8, u8) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let disk = &mut self.disks[usize::from(queue)];
            if let Some(done) = disk.reap().unwrap() {
                let mut data = [0; 4096];
                disk.read_data(done.token, &mut data).unwrap();
                return (done.status, data[0]);
            }
            assert!(Instant::now() < end, "no answer on queue {queue}");
            std::thread::yield_now();
        }
    }

    fn works(&mut self, fill: u8) {
        for queue in 0..QUEUES {
            self.submit(queue, DiskOp::Write, 8, fill);
            assert_eq!(self.answer(queue).0, 0);
            self.submit(queue, DiskOp::Read, 8, 0);
            assert_eq!(self.answer(queue), (0, fill));
        }
    }
}

#[test]
fn a_device_goes_over_and_its_front_end_does_not_notice() {
    let rig = Rig::new();
    let first = rig.serve();
    let mut guest = Guest::boot(&first);
    guest.works(1);
    let mut handle = first;
    for round in 2..6 {
        let held = rig.runtime.block_on(handle.hand_over(DRAIN)).unwrap();
        assert!(!held.suspended);
        let parcel = Parcel {
            bytes: held.parcel.bytes.clone(),
            files: held.parcel.files.iter().map(|file| file.try_clone().unwrap()).collect(),
        };
        // Asked while nobody serves the rings: the kick and the request wait.
        guest.submit(0, DiskOp::Read, 8, 0);
        let (next, waited) = rig.succeed(parcel);
        println!("waited {waited:?}");
        assert_eq!(guest.answer(0), (0, round - 1));
        held.give_away();
        guest.works(round);
        handle = next;
        let status = rig.runtime.block_on(handle.status()).unwrap();
        assert_eq!((status.connected, status.connections), (true, 1));
    }
    assert_eq!(guest.front.capacity().unwrap(), MIB / 512);
    // The configuration change is heard on the channel that went along.
    rig.runtime.block_on(handle.change(|_| ((), true))).unwrap();
    assert!(guest.front.config_changed(Duration::from_secs(10)).unwrap());
}

#[test]
fn what_is_in_flight_is_done_again_once() {
    let rig = Rig::new();
    let handle = rig.serve();
    let mut guest = Guest::boot(&handle);
    rig.stall.stall();
    guest.submit(0, DiskOp::Write, 16, 7);
    guest.submit(1, DiskOp::Write, 24, 9);
    // Until the core has taken both: a device that has taken nothing is drained.
    let held = loop {
        let held = rig.runtime.block_on(handle.hand_over(Duration::from_millis(20))).unwrap();
        if held.suspended {
            break held;
        }
        rig.runtime.block_on(held.take_back());
    };
    rig.stall.release();
    let parcel = Parcel {
        bytes: held.parcel.bytes.clone(),
        files: held.parcel.files.iter().map(|file| file.try_clone().unwrap()).collect(),
    };
    held.give_away();
    let (next, _) = rig.succeed(parcel);
    assert_eq!((guest.answer(0).0, guest.answer(1).0), (0, 0));
    guest.submit(0, DiskOp::Read, 16, 0);
    assert_eq!(guest.answer(0), (0, 7));
    guest.works(3);
    // Counts are published now and then.
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        let status = rig.runtime.block_on(next.status()).unwrap();
        let replayed: u64 = status.queues.iter().map(|queue| queue.counts.replayed).sum();
        if replayed > 0 {
            assert!(replayed <= 2, "{replayed} requests done again, and 2 were in flight");
            break;
        }
        assert!(Instant::now() < end, "nothing was done again");
    }
}

#[test]
fn a_device_that_is_taken_back_or_forgotten_goes_on_where_it_was() {
    let rig = Rig::new();
    let handle = rig.serve();
    let mut guest = Guest::boot(&handle);
    for round in 1..4 {
        let held = rig.runtime.block_on(handle.hand_over(DRAIN)).unwrap();
        guest.submit(0, DiskOp::Read, 8, 0);
        match round {
            1 => rig.runtime.block_on(held.take_back()),
            _ => drop(held),
        }
        assert_eq!(guest.answer(0).0, 0);
        guest.works(round);
    }
}

#[test]
fn a_parcel_that_is_not_whole_is_refused() {
    let rig = Rig::new();
    let handle = rig.serve();
    let mut guest = Guest::boot(&handle);
    let held = rig.runtime.block_on(handle.hand_over(DRAIN)).unwrap();
    let files = |skip: usize, more: usize| {
        let all = held.parcel.files.iter();
        let all = all.clone().skip(skip).chain(all.take(more));
        all.map(|file| file.try_clone().unwrap()).collect::<Vec<_>>()
    };
    let refused = |queues: u16, bytes: Vec<u8>, files| {
        let _inside = rig.runtime.enter();
        rig.adopt(queues, Parcel { bytes, files }).err().expect("taken").to_string()
    };
    let bytes = &held.parcel.bytes;
    println!("{}", refused(QUEUES, bytes[..bytes.len() / 2].to_vec(), files(0, 0)));
    println!("{}", refused(QUEUES, [bytes, &[0][..]].concat(), files(0, 0)));
    println!("{}", refused(QUEUES, bytes.clone(), Vec::new()));
    println!("{}", refused(QUEUES, bytes.clone(), files(1, 1)));
    assert!(refused(QUEUES, bytes.clone(), files(0, 1)).contains("nothing names"));
    assert!(refused(QUEUES + 1, bytes.clone(), files(0, 0)).contains("rings"));
    // Whatever is in it: a value, never a panic.
    let mut random = 0x5eed_u64;
    for _ in 0..300 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let mut spoilt = bytes.clone();
        let at = (random >> 33) as usize % spoilt.len();
        spoilt[at] ^= (random >> 20) as u8 | 1;
        let _inside = rig.runtime.enter();
        drop(rig.adopt(QUEUES, Parcel { bytes: spoilt, files: files(0, 0) }));
    }
    rig.runtime.block_on(held.take_back());
    guest.works(5);
}
