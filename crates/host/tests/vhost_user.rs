//! The vhost-user host against a front end without a VM: what QEMU does, and what it never would.

mod vhost_user_holes;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_device::CoreId;
use ioplane_host::vhost_user::{Handle, HandleError, ServerOptions, Status, serve};
use ioplane_memory::{Files, Limits};
use ioplane_storage::filter::Stall;
use ioplane_storage::{
    Backing, BackingInfo, EngineChoice, FileBacking, FileOptions, IoChannel, MemoryBacking, Raw, StorageError,
};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{FrontEnd, FrontEndRequest, InFlight, Wants, protocol};
use ioplane_virtio::blk::{Blk, BlkOptions};

const MIB: u64 = 1 << 20;
const SIZE: u16 = 128;

/// A disk of four queues served on two cores.
struct Served {
    runtime: tokio::runtime::Runtime,
    handle: Handle<Blk>,
    pool: Arc<Pool>,
    directory: tempfile::TempDir,
}

impl Served {
    fn new(backing: Arc<dyn Backing>) -> Self {
        Self::limited(backing, Limits::default())
    }

    fn limited(backing: Arc<dyn Backing>, limits: Limits) -> Self {
        let settings = CoreSettings {
            notify: Notify::Polled,
            spin: Duration::from_millis(1),
            ..CoreSettings::default()
        };
        let pool = Arc::new(Pool::with([settings.clone(), settings]).unwrap());
        let directory = tempfile::tempdir().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let options = BlkOptions {
            name: "disk".to_owned(),
            serial: "serial".to_owned(),
            queues: 4,
            queue_size: 256,
            read_only: false,
            logical_block: None,
        };
        let server =
            ServerOptions { limits, ..ServerOptions::new(directory.path().join("disk.sock"), pool.clone()) };
        let handle = {
            let _inside = runtime.enter();
            serve(Blk::new(options, backing), server).unwrap()
        };
        Served { runtime, handle, pool, directory }
    }

    fn front(&self) -> FrontEnd {
        FrontEnd::connect(self.handle.socket(), Wants::default()).unwrap()
    }

    fn status(&self) -> Status {
        self.runtime.block_on(self.handle.status()).unwrap()
    }

    /// Waits until the status is as `wanted`, for at most ten seconds.
    fn until(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "{what}: {status:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A front end with all four queues running.
struct Guest {
    front: FrontEnd,
    memory: GuestMemory,
    disks: Vec<Disk>,
}

impl Guest {
    fn boot(served: &Served) -> Self {
        Self::boot_with(served.front())
    }

    fn boot_with(mut front: FrontEnd) -> Self {
        front.track_inflight(4, SIZE).unwrap();
        Self::boot_at(front, 0)
    }

    /// Every ring begins at `base`, as the front end spells it.
    fn boot_at(mut front: FrontEnd, base: u32) -> Self {
        let mut memory = GuestMemory::new(16 * MIB).unwrap();
        assert_eq!(front.queue_count().unwrap(), 4);
        front.share(&memory).unwrap();
        let plan = DiskPlan::new(32, 4096, Shape::Indirect);
        let mode = RingMode::of(front.features());
        let disks: Vec<_> = (0..4).map(|_| Disk::new(&mut memory, SIZE, mode, plan).unwrap()).collect();
        for (index, disk) in (0..).zip(&disks) {
            front.start(index, &memory, disk.place(), base).unwrap();
        }
        Guest { front, memory, disks }
    }

    /// One request on a queue, to its end: its status and data.
    fn request(&mut self, queue: u16, op: DiskOp, sector: u64, data: u8) -> (u8, u8) {
        let disk = &mut self.disks[usize::from(queue)];
        let token = disk.next().unwrap();
        if op == DiskOp::Write {
            disk.write_data(token, &[data; 4096]).unwrap();
        }
        disk.submit(op, sector, if op == DiskOp::Flush { 0 } else { 4096 }).unwrap();
        if disk.ring().kick_needed() {
            self.front.kick(queue);
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(done) = self.disks[usize::from(queue)].reap().unwrap() {
                let mut byte = [0];
                self.disks[usize::from(queue)].read_data(done.token, &mut byte).unwrap();
                return (done.status, byte[0]);
            }
            assert!(Instant::now() < deadline, "queue {queue}: no answer");
            std::thread::yield_now();
        }
    }

    /// Writes and reads back on every queue.
    fn works(&mut self, seed: u8) {
        for queue in 0..4 {
            let sector = u64::from(queue) * 64 + u64::from(seed) % 32;
            assert_eq!(self.request(queue, DiskOp::Write, sector, seed ^ queue as u8).0, 0);
            assert_eq!(self.request(queue, DiskOp::Flush, 0, 0).0, 0);
            assert_eq!(self.request(queue, DiskOp::Read, sector, 0), (0, seed ^ queue as u8));
        }
    }
}

fn memory() -> Arc<dyn Backing> {
    MemoryBacking::new(MIB).unwrap()
}

#[test]
fn a_front_end_comes_works_leaves_and_comes_again() {
    let served = Served::new(memory());
    for round in 1..4u8 {
        let mut guest = Guest::boot(&served);
        guest.works(round);
        assert_eq!(guest.front.capacity().unwrap(), MIB / 512);
        let status = served.status();
        assert!(
            status.connected && status.queues.iter().all(|queue| queue.core.is_some() && queue.size == SIZE)
        );
        drop(guest);
        served.until("left", |status| {
            !status.connected && status.queues.iter().all(|queue| queue.core.is_none())
        });
    }
    let status = served.status();
    assert_eq!((status.connections, status.faults.len()), (3, 0), "{status:?}");
}

/// OVMF drives QEMU's transitional device so.
#[test]
fn a_legacy_driver_is_served() {
    let served = Served::new(memory());
    let wants = Wants { features: Wants::default().features & !(1 << 32), ..Wants::default() };
    let front = FrontEnd::connect(served.handle.socket(), wants).unwrap();
    assert_eq!(front.features() & (1 << 32), 0);
    Guest::boot_with(front).works(3);
}

#[test]
fn single_rings_stop_and_start_again_where_they_were() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    guest.works(1);
    for queue in [2u16, 0] {
        let base = guest.front.stop(queue).unwrap();
        assert_eq!(base, 3, "three requests were taken");
        assert_eq!(served.status().queues[usize::from(queue)].core, None);
        // Made available while the ring is stopped: not lost.
        guest.disks[usize::from(queue)].submit(DiskOp::Read, 0, 4096).unwrap();
        let place = guest.disks[usize::from(queue)].place();
        guest.front.start(queue, &guest.memory, place, base).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while guest.disks[usize::from(queue)].reap().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the request made while stopped was lost");
        }
    }
    guest.works(2);
    guest.front.enable(1, false).unwrap();
    guest.disks[1].submit(DiskOp::Read, 0, 4096).unwrap();
    assert_eq!(served.status().queues[1].core, None);
    guest.front.enable(1, true).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while guest.disks[1].reap().unwrap().is_none() {
        assert!(Instant::now() < deadline);
    }
    guest.works(3);
}

#[test]
fn memory_comes_and_goes_while_rings_run() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    assert!(guest.front.memory_slots().unwrap() >= 32);
    for round in 0..5u8 {
        let index = guest.memory.add(0x8_0000_0000, MIB).unwrap();
        guest.front.plug(&guest.memory.regions()[index]).unwrap();
        guest.works(round);
        let region = guest.memory.remove(index).unwrap();
        guest.front.unplug(&region).unwrap();
        guest.works(round + 100);
    }
    guest.front.share_table(&guest.memory).unwrap();
    guest.works(9);
    guest.front.reset().unwrap();
    assert!(served.status().queues.iter().all(|queue| queue.core.is_none()));
}

/// A VMM that splits a region takes it away and adds its parts while the guest goes on: rings in it wait, and lose nothing.
#[test]
fn rings_wait_while_their_memory_is_away() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    guest.works(1);
    for round in 0..3u8 {
        guest.front.unplug(&guest.memory.regions()[0]).unwrap();
        assert!(served.status().queues.iter().all(|queue| queue.core.is_none() && queue.fault.is_none()));
        guest.disks[0].submit(DiskOp::Read, 0, 4096).unwrap();
        guest.front.plug(&guest.memory.regions()[0]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while guest.disks[0].reap().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the request made meanwhile was lost");
        }
        guest.works(round + 2);
    }
    assert!(served.status().queues.iter().all(|queue| queue.counts.faults == 0));
}

#[test]
fn queues_move_disks_are_resized_and_replaced_while_a_guest_works() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stop = done.clone();
    let worker = std::thread::spawn(move || {
        let mut rounds = 0u32;
        while !stop.load(std::sync::atomic::Ordering::Relaxed) || rounds < 20 {
            // The backing is replaced under us, so what is read back may be gone; every request must succeed.
            for queue in 0..4 {
                assert_eq!(guest.request(queue, DiskOp::Write, 8, rounds as u8).0, 0);
                assert_eq!(guest.request(queue, DiskOp::Read, 8, 0).0, 0);
            }
            rounds += 1;
        }
        guest
    });
    for round in 0..40u32 {
        let core = CoreId(round % 2);
        let queue = (round % 4) as u16;
        let to = Arc::new(served.pool.on(core).unwrap());
        served.runtime.block_on(served.handle.move_queue(queue, to)).unwrap();
        assert_eq!(served.status().queues[usize::from(queue)].core, Some(core.0));
        let bytes = MIB + u64::from(round % 3) * MIB;
        served
            .runtime
            .block_on(served.handle.change(move |disk| (disk.resize(bytes), true)))
            .unwrap()
            .unwrap();
        if round % 5 == 0 {
            let new = MemoryBacking::new(bytes).unwrap();
            let replaced = served.runtime.block_on(served.handle.at_quiescence(move |disk, proof| {
                let outcome = disk.replace_backing(proof, new).map(|_| ());
                (outcome, true)
            }));
            replaced.unwrap().unwrap();
        }
    }
    done.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut guest = worker.join().unwrap();
    assert!(guest.front.config_changed(Duration::from_secs(5)).unwrap(), "the driver is told of a resize");
    guest.works(1);
    assert_eq!(served.status().faults.len(), 0);
}

/// A backing that counts the channels that were made of it.
#[derive(Debug)]
struct Counted {
    below: Arc<dyn Backing>,
    channels: AtomicU32,
}

impl Backing for Counted {
    fn info(&self) -> BackingInfo {
        self.below.info()
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        self.channels.fetch_add(1, Ordering::Relaxed);
        self.below.channel(depth)
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.below.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.below.wait_quiet(deadline)
    }
}

#[test]
fn a_queue_that_moves_takes_what_it_has_along() {
    for engine in [EngineChoice::Auto, EngineChoice::Threads] {
        let image = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        image.as_file().set_len(MIB).unwrap();
        let options = FileOptions { engine, raw: Raw::Stated, ..FileOptions::new(image.path()) };
        let below = FileBacking::open(options).unwrap();
        let counted = Arc::new(Counted { below, channels: AtomicU32::new(0) });
        let served = Served::new(counted.clone());
        let mut guest = Guest::boot(&served);
        guest.works(1);
        let made = counted.channels.load(Ordering::Relaxed);
        for round in 0..40u32 {
            let core = CoreId(round % 2);
            for queue in 0..4 {
                let to = Arc::new(served.pool.on(core).unwrap());
                served.runtime.block_on(served.handle.move_queue(queue, to)).unwrap();
                assert_eq!(served.status().queues[usize::from(queue)].core, Some(core.0));
            }
            guest.works(1);
        }
        assert_eq!(counted.channels.load(Ordering::Relaxed), made, "a move has made another channel");
    }
}

#[test]
fn a_stalled_disk_can_be_left_and_given_back() {
    let stalled = Stall::new(memory());
    let served = Served::new(stalled.clone());
    let mut guest = Guest::boot(&served);
    stalled.stall();
    guest.disks[0].submit(DiskOp::Read, 0, 4096).unwrap();
    guest.front.kick(0);
    // The quiescent point misses its deadline, and the device is given back as it was. (It is reached as long as the
    // request has not been taken.)
    let mut begun = Instant::now();
    while served.runtime.block_on(served.handle.at_quiescence(|_, _| ((), false))).is_ok() {
        begun = Instant::now();
    }
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert_eq!(guest.request(1, DiskOp::Id, 0, 0).0, 0, "the other queues run again");
    stalled.release();
    let deadline = Instant::now() + Duration::from_secs(60);
    while guest.disks[0].reap().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the stalled request was lost");
    }
    guest.works(5);
}

#[test]
fn stopping_refuses_while_somebody_is_connected() {
    let served = Served::new(memory());
    let guest = Guest::boot(&served);
    assert!(matches!(served.runtime.block_on(served.handle.stop(false)), Err(HandleError::Connected)));
    served.runtime.block_on(served.handle.stop(true)).unwrap();
    assert!(!served.handle.socket().exists());
    assert!(matches!(served.runtime.block_on(served.handle.status()), Err(HandleError::Gone)));
    drop(guest);
    assert!(served.directory.path().exists());
}

fn memfd(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("peer", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, bytes).unwrap();
    file
}

/// Does something hostile on a connection of its own; it must end that connection with the fault named, and nothing else.
fn hostile(served: &Served, name: &str, act: impl FnOnce(&mut FrontEnd)) {
    let before = served.status().faults.values().sum::<u64>();
    let mut front = served.front();
    act(&mut front);
    let status = served.until(name, |status| status.faults.values().sum::<u64>() > before);
    assert!(status.faults.contains_key(name), "{name}: {:?}", status.faults);
    assert!(front.wire().closed_within(Duration::from_secs(10)), "{name}: the connection lives");
    served.until("left", |status| !status.connected);
}

#[test]
fn hostile_messages_end_their_connection_and_nothing_else() {
    let served = Served::new(memory());
    let u64_of = |value: u64| value.to_ne_bytes();
    hostile(&served, "bad_flags", |front| front.wire().send_raw(1, 7, 0, &[], &[]).unwrap());
    hostile(&served, "unknown_request", |front| front.wire().send_raw(4711, 1, 0, &[], &[]).unwrap());
    hostile(&served, "huge_message", |front| front.wire().send_raw(2, 1, u32::MAX, &[], &[]).unwrap());
    hostile(&served, "bad_size", |front| front.wire().send_raw(2, 1, 3, &[0; 3], &[]).unwrap());
    hostile(&served, "bad_features", |front| {
        let _ = front.tell(FrontEndRequest::SET_FEATURES, &u64_of(u64::MAX), &[]);
    });
    hostile(&served, "bad_features", |front| {
        let _ = front.tell(FrontEndRequest::SET_PROTOCOL_FEATURES, &u64_of(u64::MAX), &[]);
    });
    hostile(&served, "no_such_queue", |front| {
        let _ = front.enable(200, true);
    });
    hostile(&served, "bad_value", |front| {
        let _ = front.tell(FrontEndRequest::SET_VRING_NUM, &[0, 0, 0, 0, 3, 0, 0, 0], &[]);
    });
    hostile(&served, "not_an_eventfd", |front| {
        let file = memfd(4096);
        let _ = front.tell(FrontEndRequest::SET_VRING_KICK, &u64_of(0), &[file.as_fd()]);
    });
    hostile(&served, "bad_descriptors", |front| {
        let _ = front.tell(FrontEndRequest::SET_VRING_KICK, &u64_of(0), &[]);
    });
    hostile(&served, "bad_descriptors", |front| {
        let files: Vec<_> = (0..3).map(|_| memfd(4096)).collect();
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let _ = front.tell(FrontEndRequest::SET_VRING_CALL, &u64_of(0), &files);
    });
    // A VMM whose guest has no memory that can be shared sends no region.
    hostile(&served, "no_shared_memory", |front| {
        let kick = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let _ = front.tell(FrontEndRequest::SET_VRING_KICK, &u64_of(0), &[kick.as_fd()]);
        let _ = front.enable(0, true);
    });
    let told = served.status().last_fault.unwrap();
    assert!(told.contains("memory-backend-memfd,id=mem,size=SIZE,share=on"), "{told}");
    // Memory that is not there, overlaps, or wraps.
    let region = |gpa: u64, size: u64, user: u64, offset: u64| {
        let mut body = vec![0; 8];
        for field in [gpa, size, user, offset] {
            body.extend_from_slice(&field.to_ne_bytes());
        }
        body
    };
    for body in [
        region(0, 1 << 40, 0, 0),
        region(u64::MAX - 4096, 8192, 0, 0),
        region(0, 0, 0, 0),
        region(0, 4096, u64::MAX, 0),
        region(0, 4096, 0, u64::MAX - 4096),
    ] {
        hostile(&served, "bad_memory", |front| {
            let file = memfd(8192);
            let _ = front.tell(FrontEndRequest::ADD_MEM_REG, &body, &[file.as_fd()]);
        });
    }
    hostile(&served, "bad_memory", |front| {
        let file = memfd(8192);
        let _ = front.tell(FrontEndRequest::ADD_MEM_REG, &region(0, 8192, 0, 0), &[file.as_fd()]);
        let _ = front.tell(FrontEndRequest::ADD_MEM_REG, &region(4096, 4096, 0, 0), &[file.as_fd()]);
    });
    hostile(&served, "bad_value", |front| {
        let mut body = u32::MAX.to_ne_bytes().to_vec();
        body.extend_from_slice(&[0; 12]);
        let _ = front.tell(FrontEndRequest::SET_MEM_TABLE, &body, &[]);
    });
    hostile(&served, "bad_value", |front| {
        let mut body = vec![0; 20];
        body[16..18].copy_from_slice(&u16::MAX.to_ne_bytes());
        body[18..20].copy_from_slice(&u16::MAX.to_ne_bytes());
        body.extend_from_slice(&[0; 4]);
        let _ = front.tell(FrontEndRequest::GET_INFLIGHT_FD, &body, &[]);
    });
    hostile(&served, "bad_value", |front| {
        let _ = front.config(4000, 4000);
    });
    // After all that, an honest guest.
    Guest::boot(&served).works(7);
}

#[test]
fn rings_are_not_moved_while_in_use() {
    let served = Served::new(memory());
    let guest = Guest::boot(&served);
    let moved = guest.disks[1].place();
    assert!(guest.front.describe(0, &guest.memory, moved, 0).is_err());
    served.until("ring_in_use", |status| status.faults.contains_key("ring_in_use") && !status.connected);
    Guest::boot(&served).works(7);
}

#[test]
fn a_message_in_pieces_is_a_message_and_half_of_one_harms_nobody() {
    let served = Served::new(memory());
    let front = FrontEnd::connect(served.handle.socket(), Wants::default()).unwrap();
    for byte in [1u32, 1, 0].iter().flat_map(|word| word.to_ne_bytes()) {
        front.wire().send_bytes(&[byte], &[]).unwrap();
    }
    assert!(front.wire().reply(FrontEndRequest::GET_FEATURES).unwrap().u64().unwrap() != 0);
    front.wire().send_bytes(&[2, 0, 0], &[]).unwrap();
    // The daemon is heard although a message is half said.
    assert!(served.status().connected);
    served.runtime.block_on(served.handle.change(|disk| (disk.resize(2 * MIB), true))).unwrap().unwrap();
    drop(front);
    Guest::boot(&served).works(1);
    assert!(Guest::boot_protocol(&served) & protocol::CONFIG != 0);
}

impl Guest {
    fn boot_protocol(served: &Served) -> u64 {
        served.until("left", |status| !status.connected);
        served.front().protocol()
    }
}

/// Waits until queue 0 has stopped; its fault, named at the next quiescent point, must be memory that went away.
fn shrank(served: &Served, faults: u64) {
    let status = served.until("a fault", |status| status.queues[0].counts.faults >= faults);
    assert!(status.connected, "the front end is heard, as after any fault of a ring");
    served.runtime.block_on(served.handle.at_quiescence(|_, _| ((), false))).unwrap();
    let fault = served.status().queues[0].fault.clone();
    assert_eq!(fault.map(|(name, _)| name), Some("memory_shrank"));
}

#[test]
fn hole_02_memory_that_goes_away_under_an_idle_ring_stops_it_by_name() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    guest.works(1);
    rustix::fs::ftruncate(guest.memory.regions()[0].file(), 0).unwrap();
    // On a slow machine the queue rests by now, and looks again when it is kicked.
    guest.front.kick(0);
    shrank(&served, 1);
    // Starting it again on the same memory finds the same.
    guest.front.stop(0).unwrap();
    let _ = guest.front.start(0, &guest.memory, guest.disks[0].place(), 0);
    guest.front.kick(0);
    shrank(&served, 2);
    drop(guest);
    served.until("left", |status| !status.connected);
    Guest::boot(&served).works(2);
}

#[test]
fn hole_02_an_in_flight_region_that_goes_away_stops_its_queue_by_name() {
    let served = Served::new(memory());
    let mut front = served.front();
    let mut memory = GuestMemory::new(MIB).unwrap();
    let file = memfd(MIB);
    let region = InFlight { file: file.try_clone().unwrap(), len: MIB, offset: 0, queues: 4, size: SIZE };
    front.give_inflight(region).unwrap();
    front.share(&memory).unwrap();
    let plan = DiskPlan::new(8, 4096, Shape::Direct);
    let mode = RingMode::of(front.features());
    let disk = Disk::new(&mut memory, SIZE, mode, plan).unwrap();
    front.start(0, &memory, disk.place(), 0).unwrap();
    served.until("it runs", |status| status.queues[0].core.is_some());
    rustix::fs::ftruncate(&file, 0).unwrap();
    let mut guest = Guest { front, memory, disks: vec![disk] };
    let disk = &mut guest.disks[0];
    disk.submit(DiskOp::Id, 0, 0).unwrap();
    guest.front.kick(0);
    shrank(&served, 1);
    drop(guest);
    served.until("left", |status| !status.connected);
    Guest::boot(&served).works(2);
}

/// A file whose pages come from a disk.
fn slow_file(bytes: u64) -> OwnedFd {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(bytes).unwrap();
    file.into()
}

/// The body of a message about a region at `gpa`, which the front end has at the same address.
fn region_body(gpa: u64, bytes: u64) -> Vec<u8> {
    [0, gpa, bytes, gpa, 0].iter().flat_map(|field: &u64| field.to_ne_bytes()).collect()
}

/// ADD_MEM_REG of `file`, whole, at guest address `gpa`.
fn add_region(front: &FrontEnd, gpa: u64, bytes: u64, file: &OwnedFd) -> bool {
    front.tell(FrontEndRequest::ADD_MEM_REG, &region_body(gpa, bytes), &[file.as_fd()]).is_ok()
}

/// QEMU before 8.0 tells each queue pair's vhost device of each region, and takes it back for each.
#[test]
fn a_region_may_be_told_of_and_taken_back_more_than_once() {
    let served = Served::new(memory());
    let front = served.front();
    let file = memfd(MIB);
    for _ in 0..3 {
        assert!(add_region(&front, 0, MIB, &file));
        assert_eq!(served.status().mappings, 1, "it is mapped once");
    }
    assert!(add_region(&front, MIB, MIB, &file));
    for _ in 0..3 {
        front.tell(FrontEndRequest::REM_MEM_REG, &region_body(0, MIB), &[]).unwrap();
        assert_eq!(served.status().mappings, 1);
    }
    drop(front);
    served.until("left", |status| !status.connected);
    assert!(served.status().faults.is_empty());
    // The same place for other bytes is no repetition.
    hostile(&served, "bad_memory", |front| {
        assert!(add_region(front, 0, MIB, &file));
        assert!(!add_region(front, 0, MIB, &memfd(MIB)));
    });
    Guest::boot(&served).works(7);
}

#[test]
fn hole_03_every_file_that_a_front_end_shares_is_one_that_cannot_block() {
    let served = Served::new(memory());
    let refused = |act: &dyn Fn(&mut FrontEnd)| {
        hostile(&served, "slow_memory", |front| act(front));
        let said = served.status().last_fault.unwrap();
        assert!(said.contains("<source type='memfd'/>"), "{said}");
    };
    refused(&|front| assert!(!add_region(front, 0, MIB, &slow_file(MIB))));
    refused(&|front| {
        let region = InFlight { file: slow_file(MIB), len: MIB, offset: 0, queues: 4, size: SIZE };
        let _ = front.give_inflight(region);
    });
    Guest::boot(&served).works(7);
    served.until("left", |status| !status.connected);

    let limits = Limits { files: Files::Any, ..Limits::default() };
    let trusting = Served::limited(memory(), limits);
    let mut front = trusting.front();
    let region = InFlight { file: slow_file(MIB), len: MIB, offset: 0, queues: 4, size: SIZE };
    front.give_inflight(region).unwrap();
    assert!(add_region(&front, 1 << 40, MIB, &slow_file(MIB)));
    drop(front);
    trusting.until("left", |status| !status.connected);
    assert!(trusting.status().faults.is_empty());
}

/// Nine front ends with all the regions of one used to leave nobody else any.
#[test]
fn hole_04_front_ends_that_map_all_they_can_leave_others_enough() {
    let greedy: Vec<_> = (0..10).map(|_| Served::new(memory())).collect();
    let file = memfd(4096);
    let fronts: Vec<_> = greedy.iter().map(|served| served.front()).collect();
    let mut regions = 0;
    for (served, front) in greedy.iter().zip(&fronts) {
        let slots = front.memory_slots().unwrap();
        let added = (0..slots).take_while(|n| add_region(front, n * 4096, 4096, &file)).count();
        regions += added;
        assert_eq!(served.status().mappings, added as u64);
    }
    assert!(regions > 4096, "{regions}: the limit on descriptors is too low for this test");
    let served = Served::new(memory());
    Guest::boot(&served).works(1);
    // One more than it may have ends its connection, and gives all of them back.
    assert!(!add_region(&fronts[0], 1 << 40, 4096, &file));
    greedy[0].until("too many regions", |status| !status.connected && status.mappings == 0);
    assert!(greedy[1].status().connected, "nobody else notices");
    Guest::boot(&greedy[0]).works(1);
}

/// SPDK's front end enables a ring by its size.
#[test]
fn hole_22_any_number_but_zero_enables_a_ring() {
    let served = Served::new(memory());
    let mut guest = Guest::boot(&served);
    for size in [u32::from(SIZE), 2, u32::MAX] {
        let state = |num: u32| [1u32.to_ne_bytes(), num.to_ne_bytes()].concat();
        guest.front.tell(FrontEndRequest::SET_VRING_ENABLE, &state(0), &[]).unwrap();
        assert_eq!(served.status().queues[1].core, None, "0 is off");
        guest.front.tell(FrontEndRequest::SET_VRING_ENABLE, &state(size), &[]).unwrap();
        guest.works(1);
    }
}

/// DPDK's front end has no in-flight region and names the available position alone, here and whenever it starts a ring anew.
#[test]
fn hole_23_a_packed_base_without_its_used_half_starts_where_the_available_half_says() {
    let served = Served::new(memory());
    let wants = Wants { features: Wants::default().features | 1 << 34, ..Wants::default() };
    let front = FrontEnd::connect(served.handle.socket(), wants).unwrap();
    assert_ne!(front.features() & (1 << 34), 0, "packed rings are offered");
    let mut guest = Guest::boot_at(front, 0x8000);
    guest.works(1);
    let base = guest.front.stop(1).unwrap();
    assert_eq!(base & 0xffff, base >> 16, "drained: both positions are the same");
    let place = guest.disks[1].place();
    guest.front.start(1, &guest.memory, place, base & 0xffff).unwrap();
    guest.works(2);
    // What was returned is taken back as it is.
    let base = guest.front.stop(1).unwrap();
    guest.front.start(1, &guest.memory, place, base).unwrap();
    guest.works(3);
}
