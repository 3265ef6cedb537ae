//! A disk on a core of its own: what the core does while a request is with the storage, and what a request costs it then.
//!
//! ```text
//! cargo test -p ioplane-testkit --test waiting_disk -- --nocapture     prints the second
//! ```

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{Core, CoreReading, CoreSettings, Notify};
use ioplane_device::{CoreId, Quiescent, Running};
use ioplane_storage::filter::{Delay, Stall};
use ioplane_storage::{Backing, EngineChoice, FileBacking, FileOptions, MemoryBacking};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_virtio::blk::{Blk, BlkOptions};
use ioplane_virtio::{RingLayout, Vdev};
use rustix::event::{EventfdFlags, eventfd};

const MIB: u64 = 1 << 20;
const SLOTS: u16 = 16;
const BLOCK: u32 = 4096;
const PATIENCE: Duration = Duration::from_secs(120);

fn eventually(what: &str, mut come: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !come() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// A guest's driver, its disk, and the core that serves it.
struct Rig {
    core: Core,
    running: Running<Vdev<Blk>>,
    disk: Disk,
    kick: Arc<OwnedFd>,
    kicks: u64,
    _memory: GuestMemory,
}

impl Rig {
    fn new(backing: Arc<dyn Backing>, settings: CoreSettings) -> Self {
        let core = Core::start(CoreId(0), settings).unwrap();
        let options = BlkOptions {
            name: "disk".into(),
            serial: "waits".into(),
            queues: 1,
            queue_size: 64,
            read_only: false,
            logical_block: None,
        };
        let mut memory = GuestMemory::new(4 * MIB).unwrap();
        let mut vdev = Vdev::new(Blk::new(options, backing), memory.view().map().clone());
        let features = vdev.offers();
        let plan = DiskPlan::new(SLOTS, BLOCK, Shape::Indirect);
        let disk = Disk::new(&mut memory, 64, RingMode::of(features), plan).unwrap();
        assert!(vdev.accept(features, 0));
        let kick = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let (place, queue) = (disk.place(), vdev.queue_mut(0).unwrap());
        queue.layout =
            RingLayout { size: place.size, desc: place.desc, avail: place.avail, used: place.used };
        queue.enabled = true;
        queue.kick = Some(kick.clone());
        let running = Quiescent::new(vdev).resume(&core).unwrap();
        Rig { core, running, disk, kick, kicks: 0, _memory: memory }
    }

    fn submit(&mut self, block: u32) {
        self.disk.submit(DiskOp::Read, u64::from(block * BLOCK / 512), BLOCK).expect("a free slot");
        if self.disk.ring().kick_needed() {
            self.kicks += 1;
            rustix::io::write(&*self.kick, &1u64.to_ne_bytes()).unwrap();
        }
    }

    fn answered(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(done) = self.disk.reap().unwrap() {
                return assert!(done.ok(), "{done:?}");
            }
            assert!(Instant::now() < deadline, "no answer");
            std::thread::yield_now();
        }
    }

    /// What the core has published last, whole.
    fn published(&self) -> CoreReading {
        loop {
            let (first, second) = (self.core.read(), self.core.read());
            if (first.turns, first.steps, first.waits) == (second.turns, second.steps, second.waits) {
                return second;
            }
        }
    }

    fn end(self) {
        self.running.quiesce(Instant::now() + PATIENCE).unwrap();
    }
}

/// An image on a file system that reads from a disk.
fn image(engine: EngineChoice) -> (tempfile::TempDir, Arc<dyn Backing>) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = directory.path().join("image.raw");
    std::fs::write(&path, vec![0x5a; MIB as usize]).unwrap();
    let backing: Arc<dyn Backing> =
        FileBacking::open(FileOptions { engine, ..FileOptions::new(path) }).unwrap();
    (directory, backing)
}

#[test]
fn while_the_storage_holds_a_request_the_core_sleeps_and_takes_what_is_added() {
    let (_uring, by_io_uring) = image(EngineChoice::IoUring);
    let (_threads, by_threads) = image(EngineChoice::Threads);
    for below in [MemoryBacking::new(MIB).unwrap() as Arc<dyn Backing>, by_io_uring, by_threads] {
        let name = below.info().name;
        let stall = Stall::new(below);
        // No queue rests while this runs.
        let settings = CoreSettings {
            notify: Notify::Polled,
            spin: Duration::from_secs(3600),
            ..CoreSettings::default()
        };
        let mut rig = Rig::new(stall.clone(), settings);
        rig.submit(0);
        rig.answered();
        stall.stall();
        rig.submit(1);
        // The core publishes every 10 ms, and sleeps no longer: after some sleeps all of that is of after the request.
        let waits = rig.core.read().waits;
        eventually("does not sleep", || rig.core.read().waits > waits + 3);
        let first = rig.published();
        eventually("does not sleep", || rig.core.read().waits > first.waits + 20);
        let last = rig.published();
        let (steps, waits) = (last.steps - first.steps, last.waits - first.waits);
        // One before the sleep, one after it has asked to be kicked, and one until it is clear that the wait goes on.
        assert!(steps <= 3 * (waits + 1), "{name}: {steps} looks in {waits} sleeps");
        // Requests that are added meanwhile are taken: their guest is told to kick, and need not wait for a timer.
        for block in 2..10 {
            rig.submit(block);
            std::thread::sleep(Duration::from_micros(200));
        }
        stall.release();
        (1..10).for_each(|_| rig.answered());
        rig.end();
    }
}

/// Prints what a request costs the core: one way to wait a line.
#[test]
fn what_a_request_costs_that_waits_for_a_disk() {
    const REQUESTS: u32 = 1000;
    let waits = CoreSettings { notify: Notify::Polled, ..CoreSettings::default() };
    let spins = CoreSettings { completion_wait: Duration::ZERO, ..waits.clone() };
    let notified = CoreSettings { notify: Notify::Notified, ..CoreSettings::default() };
    let ways = [("polls", spins), ("waits", waits), ("notified", notified)];
    let loads = [(0, 1), (300, 1), (0, 4), (300, 4)];
    for ((delay_us, depth), (way, settings)) in
        loads.iter().flat_map(|load| ways.iter().map(move |way| (load, way)))
    {
        let (_directory, image) = image(EngineChoice::Auto);
        let backing: Arc<dyn Backing> = match delay_us {
            0 => image,
            us => Delay::new(image, Duration::from_micros(*us)),
        };
        let mut rig = Rig::new(backing, settings.clone());
        rig.submit(0);
        rig.answered();
        let (first, kicks, began) = (rig.core.read(), rig.kicks, Instant::now());
        (0..*depth).for_each(|n| rig.submit(n));
        for n in *depth..REQUESTS + depth {
            rig.answered();
            if n < REQUESTS {
                rig.submit(n * 7 % 256);
            }
        }
        let (took, last) = (began.elapsed(), rig.core.read());
        let each = |count: u64| count as f64 / f64::from(REQUESTS);
        println!(
            "disk of {delay_us:>3} us and more, depth {depth}, {way:<8} per request: {:8.2} looks {:5.2} sleeps {:5.2} kicks \
             {:6.2} us of processor, one every {:7.2} us",
            each(last.steps - first.steps),
            each(last.waits + last.sleeps - first.waits - first.sleeps),
            each(rig.kicks - kicks),
            each(last.cpu_ns - first.cpu_ns) / 1000.0,
            each(took.as_nanos() as u64) / 1000.0,
        );
        assert!(*way == "waits" || last.waits == 0, "{way}: {} waits", last.waits);
        rig.end();
    }
}
