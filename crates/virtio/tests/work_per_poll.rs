//! What one poll of a disk's queue moves, counted; and what becomes of a request that takes several polls.

mod rig;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ioplane_device::{Budget, CoreContext, QueueSet, Quiescent};
use ioplane_memory::GuestView;
use ioplane_scheduler::LARGEST_SLICE;
use ioplane_storage::{
    Backing, BackingInfo, Direct, EngineChoice, FileBacking, FileOptions, IoChannel, MemoryBacking, Op,
    Outcome, StorageError, Submitted, Tag,
};
use ioplane_testkit::driver::{DiskOp, DiskPlan, Shape, Token};
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::Vdev;
use ioplane_virtio::blk::Blk;
use rig::{PACKED, Rig, SPLIT, options};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// One request, in bytes: what a driver that minds no limit asks for.
const HUGE: u32 = 16 << 20;
/// Most that one poll of a queue may move, in bytes.
const MOST: u64 = 512 * KIB;

fn pattern(page: u64) -> u8 {
    (page % 251) as u8 + 1
}

/// A memory disk, and a driver with room for `slots` huge requests.
struct Huge {
    rig: Rig,
    backing: Arc<MemoryBacking>,
}

impl Huge {
    fn new(features: u64) -> Self {
        let plan = DiskPlan { slots: 4, max_bytes: HUGE, segments: 8, shape: Shape::Direct };
        Self::planned(plan, features, &HandCore::polling())
    }

    fn planned(plan: DiskPlan, features: u64, core: &HandCore) -> Self {
        let backing = MemoryBacking::new(u64::from(HUGE)).unwrap();
        let rig = Rig::planned(options("disk"), backing.clone(), plan, features, core);
        Huge { rig, backing }
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.backing.file().unwrap()
    }

    /// Fills the disk with something different in each page.
    fn fill(&self) {
        for page in 0..u64::from(HUGE) / PAGE {
            rustix::io::pwrite(self.file(), &[pattern(page); PAGE as usize], page * PAGE).unwrap();
        }
    }

    /// Pages of the buffer of `token` that hold what the disk has there.
    fn read(&self, token: Token) -> u64 {
        let (gpa, view) = (self.rig.disk.data_gpa(token), self.rig.memory.view());
        let holds = |page: &u64| {
            let [first] = view.bytes::<1>(gpa + page * PAGE).unwrap();
            let [last] = view.bytes::<1>(gpa + page * PAGE + PAGE - 1).unwrap();
            first == last && first == pattern(*page)
        };
        (0..u64::from(HUGE) / PAGE).filter(holds).count() as u64
    }

    /// Bytes of the disk that have ever been written.
    fn written(&self) -> u64 {
        rustix::fs::fstat(self.file()).unwrap().st_blocks as u64 * 512
    }

    /// A huge read, of which some slices are done and some are not.
    fn half_read(&mut self) -> Token {
        self.fill();
        let token = self.rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap();
        for _ in 0..8 {
            self.rig.core.turn();
        }
        let pages = self.read(token);
        assert!(pages > 0 && pages < u64::from(HUGE) / PAGE, "{pages} pages after 8 polls");
        assert!(self.rig.disk.reap().unwrap().is_none());
        token
    }

    fn suspend(&mut self) -> QueueSet {
        let queues = QueueSet::from([0]);
        self.rig.running().suspend(&queues);
        self.rig.core.turn();
        assert!(self.rig.running().wait_stopped(&queues, Instant::now()));
        queues
    }

    fn in_flight(&mut self) -> usize {
        self.rig.running().device().queue(0).unwrap().in_flight.len()
    }

    /// Ends what was begun, and checks all of it.
    fn ends_whole(&mut self, token: Token) {
        assert_eq!(self.rig.finish(), Some(0));
        assert_eq!(self.read(token), u64::from(HUGE) / PAGE, "a slice is missing");
    }
}

fn both_rings(test: impl Fn(Huge)) {
    [SPLIT, PACKED].into_iter().for_each(|features| test(Huge::new(features)));
}

#[test]
fn hole_05_one_poll_moves_a_bounded_part_of_a_huge_request() {
    both_rings(|mut huge| {
        huge.fill();
        let token = huge.rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap();
        let mut before = 0;
        while huge.rig.disk.reap().unwrap().is_none() {
            huge.rig.core.turn();
            let now = huge.read(token) * PAGE;
            assert!(now > before && now - before <= MOST, "one poll moved {} bytes", now - before);
            before = now;
        }
        assert_eq!(before, u64::from(HUGE));
        let counts = huge.rig.counts();
        assert_eq!((counts.requests, counts.bytes_read), (1, HUGE.into()));
    });
    both_rings(|mut huge| {
        let token = huge.rig.disk.next().unwrap();
        huge.rig.disk.write_data(token, &vec![7; HUGE as usize]).unwrap();
        huge.rig.disk.submit(DiskOp::Write, 0, HUGE).unwrap();
        let mut before = 0;
        while huge.rig.disk.reap().unwrap().is_none() {
            huge.rig.core.turn();
            let now = huge.written();
            assert!(now - before <= MOST, "one poll moved {} bytes", now - before);
            before = now;
        }
        assert_eq!(before, u64::from(HUGE));
    });
}

#[test]
fn hole_05_one_poll_of_many_requests_moves_no_more() {
    let plan = DiskPlan { slots: 20, max_bytes: 512 << 10, segments: 1, shape: Shape::Direct };
    for features in [SPLIT, PACKED] {
        let mut many = Huge::planned(plan, features, &HandCore::polling());
        for at in 0..20 {
            let token = many.rig.disk.next().unwrap();
            many.rig.disk.write_data(token, &[7; 512 << 10]).unwrap();
            many.rig.disk.submit(DiskOp::Write, at * 1024, 512 << 10).unwrap();
        }
        let (mut before, mut answered) = (0, 0);
        while answered < 20 {
            many.rig.core.turn();
            let now = many.written();
            assert!(now - before <= MOST, "one poll moved {} bytes", now - before);
            before = now;
            answered += std::iter::from_fn(|| many.rig.disk.reap().unwrap()).filter(|done| done.ok()).count();
        }
    }
}

#[test]
fn hole_05_one_poll_discards_a_bounded_part() {
    let plan = DiskPlan { slots: 16, max_bytes: 1 << 20, segments: 1, shape: Shape::Direct };
    let mut disk = Huge::planned(plan, SPLIT, &HandCore::polling());
    disk.fill();
    for at in 0..16 {
        disk.rig.disk.submit(DiskOp::WriteZeroes { unmap: true }, at * 2048, 1 << 20).unwrap();
    }
    let mut before = disk.written();
    while before > 0 {
        disk.rig.core.turn();
        let now = disk.written();
        assert!(now < before && before - now <= 2 * MIB, "one poll freed {} bytes", before - now);
        before = now;
    }
    // Small ones are system calls all the same.
    let plan = DiskPlan { slots: 20, max_bytes: 4096, segments: 1, shape: Shape::Indirect };
    let mut disk = Huge::planned(plan, SPLIT, &HandCore::polling());
    let mut most = 0;
    for _ in 0..4 {
        while disk.rig.disk.submit(DiskOp::Discard, 0, 512).is_some() {}
        disk.rig.core.turn();
        most = most.max(std::iter::from_fn(|| disk.rig.disk.reap().unwrap()).count());
    }
    assert!((1..=32).contains(&most), "{most} system calls in one poll");
}

#[test]
fn hole_05_others_are_served_between_the_slices_of_a_huge_request() {
    for features in [SPLIT, PACKED] {
        let core = HandCore::polling();
        let plan = DiskPlan { slots: 4, max_bytes: HUGE, segments: 8, shape: Shape::Direct };
        let mut huge = Huge::planned(plan, features, &core);
        let small = DiskPlan { slots: 4, max_bytes: 4096, segments: 1, shape: Shape::Direct };
        let mut other = Huge::planned(small, features, &core);
        huge.fill();
        // Two huge ones, so that neither keeps the other waiting.
        let tokens = [(); 2].map(|()| huge.rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap());
        let mut before = [0; 2];
        let mut turns = 0;
        loop {
            other.rig.disk.submit(DiskOp::Read, 0, 4096).unwrap();
            core.turn();
            assert!(
                other.rig.disk.reap().unwrap().is_some(),
                "a neighbour on the core waited for the slices"
            );
            let now = tokens.map(|token| huge.read(token) * PAGE);
            assert!(now[0] + now[1] - before[0] - before[1] <= MOST);
            assert!(now[0].abs_diff(now[1]) <= MOST, "one of two huge requests runs ahead: {now:?}");
            before = now;
            turns += 1;
            if turns == 8 {
                break;
            }
        }
        // And so are small ones of the same queue.
        let quick = huge.rig.disk.submit(DiskOp::Read, 0, 4096).unwrap();
        core.turn();
        assert_eq!(huge.rig.disk.reap().unwrap().map(|done| done.token), Some(quick));
        let ended = [huge.rig.finish(), huge.rig.finish()];
        assert_eq!(ended, [Some(0); 2]);
        assert!(tokens.iter().all(|token| huge.read(*token) == u64::from(HUGE) / PAGE));
    }
}

#[test]
fn a_poll_that_is_worth_less_than_a_slice_serves_slices_and_small_requests_in_turn() {
    both_rings(|mut huge| {
        huge.fill();
        let token = huge.rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap();
        let budget = Budget { bytes: 32 << 10, ..Budget::of(64) };
        huge.rig.core.turn_with(budget);
        for _ in 0..8 {
            let before = huge.read(token);
            let quick = huge.rig.disk.submit(DiskOp::Read, 0, 4096).unwrap();
            huge.rig.core.turn_with(budget);
            huge.rig.core.turn_with(budget);
            let done = huge.rig.disk.reap().unwrap().expect("a small request waits for all of a long one");
            assert_eq!(done.token, quick);
            assert!(huge.read(token) > before, "the long one stands still");
        }
        huge.ends_whole(token);
    });
}

/// Whoever has one quantum less than a slice would get slices for the price of quanta, and a multiple of its part.
#[test]
fn what_a_poll_moves_beyond_what_it_may_cost_is_counted() {
    both_rings(|mut huge| {
        huge.fill();
        huge.rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap();
        let before = huge.rig.core.cost();
        while huge.rig.disk.reap().unwrap().is_none() {
            assert!(huge.rig.core.turn_with(Budget { bytes: 32 << 10, ..Budget::of(64) }) > 0);
        }
        let cost = huge.rig.core.cost() - before;
        // Each slice has some buffers besides.
        assert!((u64::from(HUGE)..u64::from(HUGE) * 11 / 10).contains(&cost), "{cost} for {HUGE} bytes");
    });
}

#[test]
fn hole_05_draining_finishes_a_sliced_request() {
    both_rings(|mut huge| {
        let token = huge.half_read();
        huge.rig.quiesce();
        assert_eq!(huge.in_flight(), 0);
        let done = huge.rig.disk.reap().unwrap().expect("drained, and not answered");
        assert!(done.ok() && done.token == token);
        assert_eq!(huge.read(token), u64::from(HUGE) / PAGE);
    });
}

#[test]
fn hole_05_the_core_does_not_sleep_on_a_sliced_request() {
    let mut huge = Huge::new(SPLIT);
    let token = huge.half_read();
    assert!(!huge.rig.core.arm(), "nobody would wake it");
    huge.rig.core.disarm();
    huge.ends_whole(token);
    assert!(huge.rig.core.arm());
}

#[test]
fn hole_05_suspending_redoes_a_sliced_request_whole() {
    both_rings(|mut huge| {
        let token = huge.half_read();
        let queues = huge.suspend();
        assert_eq!(huge.in_flight(), 1);
        // Nothing of it is moved any more; and whoever takes it up again does not know what had been.
        huge.rig.disk.write_data(token, &vec![0; HUGE as usize]).unwrap();
        huge.rig.core.turn_until_idle(100);
        assert_eq!(huge.read(token), 0);
        let core = huge.rig.core.clone();
        huge.rig.running().start(&queues, &core).unwrap();
        huge.ends_whole(token);
        assert_eq!(huge.rig.counts().replayed, 1);
    });
}

#[test]
fn hole_05_a_sliced_request_survives_a_crash() {
    both_rings(|mut huge| {
        let token = huge.half_read();
        let setup = huge.rig.running().device().queue(0).unwrap();
        let (layout, journal) = (setup.layout, setup.journal.clone());
        let features = huge.rig.running().device().features();
        // The process is gone, with everything that was not in shared memory: the core with its slots, nothing parked.
        huge.rig.core = HandCore::polling();
        std::mem::forget(huge.rig.running.take());
        huge.rig.disk.write_data(token, &vec![0; HUGE as usize]).unwrap();
        let mut vdev =
            Vdev::new(Blk::new(options("disk"), huge.backing.clone()), huge.rig.memory.view().map().clone());
        assert!(vdev.accept(features, 0));
        let setup = vdev.queue_mut(0).unwrap();
        (setup.layout, setup.journal, setup.enabled) = (layout, journal, true);
        huge.rig.running = Some(Quiescent::new(vdev).resume(&huge.rig.core).unwrap());
        huge.ends_whole(token);
        assert_eq!(huge.rig.counts().replayed, 1);
        assert_eq!(huge.rig.fault(), None);
    });
}

#[test]
fn hole_05_a_reset_ends_a_sliced_request() {
    both_rings(|mut huge| {
        let token = huge.half_read();
        let core = huge.rig.core.clone();
        huge.suspend();
        let mut quiescing = huge.rig.running.take().unwrap().begin_quiesce();
        core.turn();
        assert!(quiescing.is_settled());
        let mut quiescent = quiescing.finish().unwrap();
        quiescent.reset();
        let before = huge.read(token);
        huge.rig.running = Some(quiescent.resume(&core).unwrap());
        core.turn_until_idle(100);
        assert_eq!(huge.read(token), before, "memory of a guest that has reset the device was written to");
        assert!(huge.rig.disk.reap().unwrap().is_none());
    });
}

#[test]
fn hole_05_memory_that_goes_away_ends_a_sliced_request() {
    both_rings(|mut huge| {
        huge.half_read();
        rustix::fs::ftruncate(huge.rig.memory.regions()[0].file(), 0).unwrap();
        huge.rig.core.turn();
        assert_eq!(huge.rig.core.turn(), 0, "a queue that has stopped goes on moving slices");
        assert!(huge.rig.core.arm(), "and keeps the core awake");
        assert_eq!(huge.rig.fault(), Some("memory_shrank"));
    });
}

#[test]
fn hole_05_a_huge_request_that_names_nothing_moves_nothing() {
    let mut huge = Huge::new(SPLIT);
    huge.fill();
    let token = huge.rig.disk.stage(DiskOp::Read, 0, HUGE).unwrap();
    let head = huge.rig.disk.head(token);
    let raw = huge.rig.disk.ring().raw();
    let mut at = raw.desc(head).next;
    for _ in 0..7 {
        at = raw.desc(at).next;
    }
    let mut last = raw.desc(at);
    last.addr = 0x66_0000_0000;
    raw.set_desc(at, last);
    huge.rig.disk.push(token);
    assert_eq!(huge.rig.finish(), Some(1));
    assert_eq!(huge.read(token), 0, "it was checked by slices");
    assert_eq!(huge.rig.counts().errors_request, 1);
}

/// What the poller has handed down since it was last asked.
#[derive(Debug, Default)]
struct Handed {
    bytes: AtomicU64,
    largest: AtomicU64,
}

/// A backing that counts.
#[derive(Debug)]
struct Counted {
    below: Arc<dyn Backing>,
    handed: Arc<Handed>,
}

struct CountedLane {
    below: Box<dyn IoChannel>,
    handed: Arc<Handed>,
}

impl Backing for Counted {
    fn info(&self) -> BackingInfo {
        self.below.info()
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        Ok(Box::new(CountedLane { below: self.below.channel(depth)?, handed: self.handed.clone() }))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.below.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.below.wait_quiet(deadline)
    }
}

impl IoChannel for CountedLane {
    fn slice(&self) -> u32 {
        self.below.slice()
    }

    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        if let Op::Read { into: ranges, .. } | Op::Write { from: ranges, .. } = op {
            let bytes = ranges.iter().map(|range| u64::from(range.len)).sum();
            self.handed.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.handed.largest.fetch_max(bytes, Ordering::Relaxed);
        }
        self.below.submit(context, view, op, tag)
    }

    fn push(&mut self, context: &mut CoreContext) {
        self.below.push(context);
    }

    fn held_back(&self) -> bool {
        self.below.held_back()
    }

    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        self.below.reap(context, done)
    }

    fn in_flight(&self) -> usize {
        self.below.in_flight()
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        self.below.waker()
    }

    fn detach(&mut self, context: &mut CoreContext) {
        self.below.detach(context);
    }
}

/// What is handed to the kernel is pinned or copied by it, on the core.
#[test]
fn hole_05_one_poll_hands_a_bounded_part_to_a_file() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    let content: Vec<u8> = (0..u64::from(HUGE)).map(|at| pattern(at / PAGE)).collect();
    std::fs::write(&path, &content).unwrap();
    for engine in [EngineChoice::Auto, EngineChoice::Threads] {
        for direct in [Direct::Auto, Direct::Off] {
            let file = FileBacking::open(FileOptions { engine, direct, ..FileOptions::new(&path) }).unwrap();
            let handed = Arc::new(Handed::default());
            let backing = Arc::new(Counted { below: file, handed: handed.clone() });
            let plan = DiskPlan { slots: 12, max_bytes: HUGE, segments: 8, shape: Shape::Indirect };
            let (features, core) = (SPLIT, HandCore::polling());
            let mut rig = Rig::planned(options("disk"), backing, plan, features, &core);
            let tokens: Vec<_> = (0..3).map(|_| rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap()).collect();
            for at in 0..8 {
                rig.disk.submit(DiskOp::Read, at * 2048, 1 << 20).unwrap();
            }
            let mut answered = 0;
            while answered < 11 {
                core.turn();
                let (bytes, largest) =
                    (handed.bytes.swap(0, Ordering::Relaxed), handed.largest.swap(0, Ordering::Relaxed));
                assert!(largest <= MIB && bytes <= 2 * MIB, "{bytes} bytes in one poll, {largest} at once");
                while let Some(done) = rig.disk.reap().unwrap() {
                    assert!(done.ok());
                    answered += 1;
                }
            }
            let mut came = vec![0; HUGE as usize];
            for token in tokens {
                rig.disk.read_data(token, &mut came).unwrap();
                assert!(came == content, "a slice went elsewhere");
            }
            // Drained, and suspended and resumed, while slices are with the kernel.
            let token = rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap();
            core.turn();
            rig.quiesce();
            assert_eq!(rig.disk.reap().unwrap().map(|done| (done.token, done.ok())), Some((token, true)));
            let queues = QueueSet::from([0]);
            rig.running().start(&queues, &core).unwrap();
            let token = rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap();
            core.turn();
            rig.running().suspend(&queues);
            core.turn();
            assert!(rig.running().wait_stopped(&queues, Instant::now()));
            rig.disk.write_data(token, &vec![0; HUGE as usize]).unwrap();
            rig.running().start(&queues, &core).unwrap();
            assert_eq!(rig.finish(), Some(0));
            rig.disk.read_data(token, &mut came).unwrap();
            assert!(came == content, "suspended, and not redone whole");
        }
    }
}

/// As where groups compete for disks: what does not fit into the room of a poll stays where it is, and nothing of it is lost.
#[test]
fn one_poll_hands_on_what_it_has_room_for() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    let content: Vec<u8> = (0..u64::from(HUGE)).map(|at| pattern(at / PAGE)).collect();
    std::fs::write(&path, &content).unwrap();
    for features in [SPLIT, PACKED] {
        let file = FileBacking::open(FileOptions::new(&path)).unwrap();
        let handed = Arc::new(Handed::default());
        let backing = Arc::new(Counted { below: file, handed: handed.clone() });
        let plan = DiskPlan { slots: 12, max_bytes: HUGE, segments: 8, shape: Shape::Indirect };
        let core = HandCore::polling();
        let mut rig = Rig::planned(options("disk"), backing, plan, features, &core);
        let turn = |room: u64| {
            core.turn_with(Budget { room: room as u32, ..Budget::of(64) });
            (handed.bytes.swap(0, Ordering::Relaxed), handed.largest.swap(0, Ordering::Relaxed))
        };
        let huge = rig.disk.submit(DiskOp::Read, 0, HUGE).unwrap();
        assert_eq!(turn(100 * KIB), (0, 0), "handed on although there was no room");
        assert_eq!(turn(300 * KIB).1, LARGEST_SLICE);
        assert_eq!(turn(0), (0, 0));
        // Shorter ones are not held up by the slice that does not fit; those that do not fit either stay the guest's.
        let small = rig.disk.submit(DiskOp::Read, 0, 4096).unwrap();
        rig.disk.submit(DiskOp::Read, 0, 64 << 10).unwrap();
        let (mut came, mut turns) = (0, 0);
        while came == 0 {
            came = turn(4096).0;
            turns += 1;
            assert!(turns < 4, "a short request waits for the slices of another");
        }
        assert_eq!(came, 4096);
        assert!(!core.arm(), "a core that sleeps on slices without room is woken by nobody");
        core.disarm();
        // A flush moves nothing.
        rig.disk.submit(DiskOp::Flush, 0, 0).unwrap();
        let mut ended = Vec::new();
        while ended.len() < 4 {
            let (bytes, largest) = turn(200 * KIB);
            assert!(bytes <= 200 * KIB && largest <= LARGEST_SLICE, "{bytes} bytes, {largest} at once");
            while let Some(done) = rig.disk.reap().unwrap() {
                assert!(done.ok());
                ended.push(done.token);
            }
        }
        assert!(ended.contains(&small) && ended.contains(&huge));
        let mut read = vec![0; HUGE as usize];
        rig.disk.read_data(huge, &mut read).unwrap();
        assert!(read == content, "a slice went elsewhere");
        assert_eq!(rig.counts().requests, 4);
    }
}
