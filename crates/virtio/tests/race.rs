//! A guest that races: its threads rewrite descriptors, tables, flags, indexes and headers while the core reads them.
//!
//! ```text
//!   buffer k:  [ named writable at times | named readable at times | named by nobody ]
//!               0                    512                     1024               2048
//! ```
//!
//! A buffer's address stays; length and flags, one word, change between two versions: 512 bytes to be written, 1024 bytes to be read.
//! So whatever mixture of versions a core believes, as long as it reads each word once, it writes to the first part of a buffer
//! only, and never reads the last one. Both are looked for in shadows: what the guest's memory and the disk were filled with.
//! Neighbours on the same core check every byte of theirs meanwhile.

mod lan;
mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::mutation::read_twice;
use ioplane_device::{Budget, QueueSet, Quiescent, Running};
use ioplane_memory::Window;
use ioplane_network::{PortOptions, Switch, SwitchSettings};
use ioplane_storage::{Backing, MemoryBacking};
use ioplane_testkit::driver::net::NetHeader;
use ioplane_testkit::driver::{DiskPlan, GuestMemory, Shape};
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::blk::Blk;
use ioplane_virtio::net::{Net, NetOptions};
use ioplane_virtio::spec::feature::VIRTIO_F_RING_PACKED;
use ioplane_virtio::{RingLayout, Vdev, VirtioDevice};
use lan::packet::plain;
use lan::{Lan, Nic, mac};
use rig::{Rig, options};

/// Entries of the ring that is raced over.
const SIZE: usize = 64;
/// Entries from here on are tables.
const TABLES: usize = 48;
/// Entries of a table.
const ENTRIES: usize = 8;
const BUFFERS: usize = TABLES + (SIZE - TABLES) * ENTRIES;
/// Bytes from one buffer to the next.
const STRIDE: usize = 2048;
/// Bytes that are ever named writable.
const WRITABLE: usize = 512;
/// Bytes that are ever named readable.
const READABLE: usize = 1024;
/// What is only to be read.
const READ: u8 = 0xa5;
/// What is not to be touched.
const NOBODYS: u8 = 0x5a;
/// Bytes of the disk that is raced over.
const DISK: u64 = 64 << 10;

const NEXT: u64 = 1;
const WRITE: u64 = 2;
const INDIRECT: u64 = 4;
const AVAIL: u64 = 1 << 7;
const USED: u64 = 1 << 15;

/// How long each race takes: long where the environment says so.
fn duration() -> Duration {
    let seconds = std::env::var("IOPLANE_RACE_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs_f32(seconds.unwrap_or(1.0))
}

/// Numbers that are the same for the same seed.
#[derive(Clone)]
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 16) as usize % limit
    }

    fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }
}

/// What the device is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Disk,
    Receive,
    Transmit,
}

/// The guest's memory. Its windows may be written by any thread at any time.
#[derive(Clone)]
struct Field {
    packed: bool,
    kind: Kind,
    layout: RingLayout,
    desc: Window,
    avail: Window,
    used: Window,
    tables: Window,
    buffers: Window,
    before: Window,
    behind: Window,
}

impl Field {
    fn new(memory: &mut GuestMemory, packed: bool, kind: Kind) -> Self {
        let mut carve = |len: usize| memory.carve(len as u64, 4096).unwrap();
        let (desc, avail, used) = (carve(16 * SIZE), carve(4096), carve(4096));
        let tables = carve((SIZE - TABLES) * ENTRIES * 16);
        let (before, buffers, behind) = (carve(4096), carve(BUFFERS * STRIDE), carve(4096));
        let layout = RingLayout { size: SIZE as u16, desc: desc.gpa(), avail: avail.gpa(), used: used.gpa() };
        let field = Field { packed, kind, layout, desc, avail, used, tables, buffers, before, behind };
        for window in [&field.before, &field.behind] {
            (0..window.len()).for_each(|at| window.put_u8(at, NOBODYS));
        }
        for at in 0..field.buffers.len() {
            let value = if at % STRIDE < READABLE { READ } else { NOBODYS };
            field.buffers.put_u8(at, value);
        }
        field.begin();
        field
    }

    /// As before anything was made available.
    fn begin(&self) {
        for window in [&self.avail, &self.used] {
            (0..window.len() / 8).for_each(|at| window.put_u64(8 * at, 0));
        }
        for at in 0..SIZE {
            let addr = if at < TABLES { self.buffer(at) } else { self.table(at) };
            self.desc.put_u64(16 * at, addr);
            self.desc.put_u64(16 * at + 8, 0);
        }
        for at in 0..(SIZE - TABLES) * ENTRIES {
            self.tables.put_u64(16 * at, self.buffer(TABLES + at));
            self.tables.put_u64(16 * at + 8, self.entry(at % ENTRIES, false));
        }
    }

    fn buffer(&self, at: usize) -> u64 {
        self.buffers.gpa() + (at * STRIDE) as u64
    }

    fn table(&self, at: usize) -> u64 {
        self.tables.gpa() + ((at - TABLES) * ENTRIES * 16) as u64
    }

    /// Length, flags and successor of the descriptor `nth` of a chain of `count`, in one of two versions.
    fn word(&self, nth: usize, count: usize, next: usize, write: bool) -> u64 {
        let (len, flags) = match (self.kind, nth) {
            (Kind::Disk, 0) => (16, 0),
            (Kind::Disk, _) if nth + 1 == count => (1, WRITE),
            _ if write => (WRITABLE as u64, WRITE),
            _ => (READABLE as u64, 0),
        };
        let flags = flags | if nth + 1 < count { NEXT } else { 0 };
        len | flags << 32 | (next as u64) << 48
    }

    /// Length and flags of entry `nth` of a table.
    fn entry(&self, nth: usize, write: bool) -> u64 {
        let word = self.word(nth, ENTRIES, nth + 1, write);
        if self.packed { word & 0xffff_ffff | (word >> 32 & 0xffff) << 48 } else { word }
    }

    /// [`Field::word`] for a packed ring, where `id` takes the place of the successor and the flags say whose it is.
    fn packed_word(word: u64, id: usize, wrap: bool) -> u64 {
        let flags = word >> 32 & 0xffff | if wrap { AVAIL } else { USED };
        word & 0xffff_ffff | (id as u64) << 32 | flags << 48
    }

    /// One change, by a thread that knows nothing of what the device is doing.
    fn flip(&self, dice: &mut Dice) {
        let at = dice.below(SIZE);
        match dice.below(1000) {
            0..850 => self.turn_over(dice, at),
            850..930 => self.header(dice, at.min(TABLES - 1)),
            930..960 => {
                // Kick suppression: flags, and used_event behind the available ring; of a packed ring both in one word.
                self.avail.put_u32(0, if self.packed { dice.next() as u32 } else { self.avail.load_u32(0) });
                self.avail.put_u16(4 + 2 * SIZE, dice.next() as u16);
            }
            960..980 if !self.packed => self.avail.put_u16(4 + 2 * at, dice.below(SIZE + 1) as u16),
            980..995 => {
                // Any flags but a table where there is a buffer, and any successor.
                let len = [0, 1, 16, WRITABLE as u64][dice.below(4)];
                let flags = if at < TABLES { dice.next() & 3 } else { INDIRECT };
                let len = if at < TABLES { len } else { 16 * dice.below(ENTRIES + 1) as u64 };
                let word = len | flags << 32 | (dice.below(SIZE + 1) as u64) << 48;
                let word = if self.packed { Self::packed_word(word, at, dice.once_in(2)) } else { word };
                self.desc.put_u64(16 * at + 8, word);
            }
            995 if !self.packed => {
                self.avail.put_u16(2, self.avail.load_u16(2).wrapping_add(dice.next() as u16 & 3))
            }
            996 => self.used.put_u32(0, dice.next() as u32),
            _ => {}
        }
    }

    /// Turns a buffer from one to be read into one to be written, or back.
    fn turn_over(&self, dice: &mut Dice, at: usize) {
        if at >= TABLES {
            let entry = (at - TABLES) * ENTRIES + dice.below(ENTRIES);
            self.tables.put_u64(16 * entry + 8, self.entry(entry % ENTRIES, dice.once_in(2)));
            return;
        }
        let old = self.desc.load_u64(16 * at + 8);
        let shift = if self.packed { 48 } else { 32 };
        let mask = 0xffff_ffff | WRITE << shift;
        // Only what is of a size that has two versions.
        if matches!(old as u32 as usize, WRITABLE | READABLE) {
            let new = if dice.once_in(2) { WRITABLE as u64 | WRITE << shift } else { READABLE as u64 };
            self.desc.put_u64(16 * at + 8, old & !mask | new);
        }
    }

    /// What a request or a frame begins with.
    fn header(&self, dice: &mut Dice, at: usize) {
        let at = at * STRIDE;
        if self.kind == Kind::Disk {
            let kind = [0, 0, 1, 1, 4, 8, 11, 13, 99][dice.below(9)];
            self.buffers.put_u32(at, kind);
            self.buffers.put_u64(at + 8, dice.below(130) as u64);
        } else {
            // The header of an offload, mostly empty, and Ethernet addresses.
            let offload = if dice.once_in(4) { dice.next() & 0x0303_0303_0303_0303 } else { 0 };
            self.buffers.put_u64(at, offload);
            let to = [mac(2), [0xff; 6]][dice.below(2)];
            (12..18).zip(to).for_each(|(n, byte)| self.buffers.put_u8(at + n, byte));
            (18..24).zip(mac(1)).for_each(|(n, byte)| self.buffers.put_u8(at + n, byte));
            self.buffers.put_u16(at + 24, 0xb588);
        }
    }

    /// What is wrong with the guest's memory, if anything is.
    fn wronged(&self) -> Option<String> {
        for (name, window) in [("before the buffers", &self.before), ("behind the buffers", &self.behind)] {
            if let Some(at) = (0..window.len()).find(|at| window.load_u8(*at) != NOBODYS) {
                return Some(format!("byte {at} {name} was written"));
            }
        }
        let expected = [READ, NOBODYS].map(|byte| u64::from_ne_bytes([byte; 8]));
        for at in (0..self.buffers.len()).step_by(8) {
            let wanted = match at % STRIDE {
                0..WRITABLE => continue,
                WRITABLE..READABLE => expected[0],
                _ => expected[1],
            };
            if self.buffers.load_u64(at) != wanted {
                return Some(format!(
                    "buffer {} was written at {}, which no version of it names writable",
                    at / STRIDE,
                    at % STRIDE
                ));
            }
        }
        let moved = |at: &usize| {
            let addr = if *at < TABLES { self.buffer(*at) } else { self.table(*at) };
            self.desc.load_u64(16 * at) != addr
        };
        if let Some(at) = (0..SIZE).find(moved) {
            return Some(format!("the address of descriptor {at} was written"));
        }
        let entries = 0..(SIZE - TABLES) * ENTRIES;
        let moved = |at: &usize| self.tables.load_u64(16 * at) != self.buffer(TABLES + at);
        entries
            .into_iter()
            .find(moved)
            .map(|at| format!("the address of entry {at} of the tables was written"))
    }
}

/// The driver's part that keeps the ring moving.
struct Driver {
    field: Field,
    dice: Dice,
    next: usize,
    wrap: bool,
}

impl Driver {
    fn begin(&mut self) {
        self.field.begin();
        (self.next, self.wrap) = (0, true);
    }

    /// Makes a few chains available.
    fn offer(&mut self) {
        for _ in 0..4 {
            if self.field.packed { self.offer_packed() } else { self.offer_split() }
        }
    }

    fn offer_split(&mut self) {
        let Driver { field, dice, .. } = self;
        let head = if dice.once_in(3) {
            let at = TABLES + dice.below(SIZE - TABLES);
            field.header(dice, TABLES + (at - TABLES) * ENTRIES);
            field.desc.put_u64(16 * at + 8, (16 * ENTRIES) as u64 | INDIRECT << 32);
            at
        } else {
            let first = 4 * dice.below(TABLES / 4);
            let write = dice.once_in(2);
            for nth in 0..4 {
                field.desc.put_u64(16 * (first + nth) + 8, field.word(nth, 4, first + nth + 1, write));
            }
            field.header(dice, first);
            first
        };
        let idx = field.avail.load_u16(2);
        field.avail.put_u16(4 + 2 * (usize::from(idx) % SIZE), head as u16);
        field.avail.put_u16(2, idx.wrapping_add(1));
    }

    fn offer_packed(&mut self) {
        let Driver { field, dice, next, wrap } = self;
        let (first, lap) = (*next, *wrap);
        let (count, write) = if first >= TABLES { (1, false) } else { (4, dice.once_in(2)) };
        let word = |nth: usize| match count {
            1 => (16 * ENTRIES) as u64 | INDIRECT << 32,
            _ => field.word(nth, 4, 0, write),
        };
        let header = if count == 1 { TABLES + (first - TABLES) * ENTRIES } else { first };
        field.header(dice, header);
        // The first one last.
        for nth in (0..count).rev() {
            let word = Field::packed_word(word(nth), first, lap);
            field.desc.put_u64(16 * (first + nth) + 8, word);
        }
        *next += count;
        if *next == SIZE {
            (*next, *wrap) = (0, !lap);
        }
    }
}

/// The device that is raced against.
struct Raced<V: VirtioDevice> {
    running: Option<Running<Vdev<V>>>,
    queue: u16,
    field: Field,
    features: u64,
    core: HandCore,
}

impl<V: VirtioDevice> Raced<V> {
    fn new(mut vdev: Vdev<V>, queue: u16, field: Field, core: &HandCore) -> Self {
        let ring = if field.packed { VIRTIO_F_RING_PACKED } else { 0 };
        let features = vdev.offers() & !VIRTIO_F_RING_PACKED | ring;
        Self::set_up(&mut vdev, queue, &field, features);
        let running = Some(Quiescent::new(vdev).resume(core).unwrap());
        Raced { running, queue, field, features, core: core.clone() }
    }

    fn set_up(vdev: &mut Vdev<V>, queue: u16, field: &Field, features: u64) {
        assert!(vdev.accept(features, 0));
        let setup = vdev.queue_mut(queue).unwrap();
        (setup.layout, setup.enabled) = (field.layout, true);
    }

    fn counts(&self) -> ioplane_device::MeterReading {
        self.running.as_ref().unwrap().device().meters()[usize::from(self.queue)].read()
    }

    /// Resets the device and starts its queue again.
    fn restart(&mut self, driver: &mut Driver) {
        let mut running = self.running.take().unwrap();
        let queues = QueueSet::from([self.queue]);
        running.suspend(&queues);
        self.core.turn();
        assert!(running.wait_stopped(&queues, Instant::now()), "a suspended queue does not stop");
        let mut quiescing = running.begin_quiesce();
        self.core.turn();
        assert!(quiescing.is_settled());
        let mut quiescent = quiescing.finish().unwrap();
        quiescent.reset();
        driver.begin();
        let (queue, features) = (self.queue, self.features);
        quiescent.with(|vdev, _| Self::set_up(vdev, queue, &driver.field, features));
        // The flipping goes on: what a queue is opened with may be nonsense already.
        loop {
            match quiescent.resume(&self.core) {
                Ok(running) => return self.running = Some(running),
                Err(refused) => {
                    quiescent = refused.kept;
                    driver.begin();
                    quiescent.reset();
                    quiescent.with(|vdev, _| Self::set_up(vdev, queue, &driver.field, features));
                }
            }
        }
    }
}

/// What came of a race.
#[derive(Debug, Default)]
struct Outcome {
    wrong: Option<String>,
    requests: u64,
    faults: u64,
    flips: u64,
}

/// Races for a while: two threads flip, this one offers, turns the core, and calls `check` for what else must hold.
fn race<V: VirtioDevice>(
    raced: &mut Raced<V>,
    long: Duration,
    mut check: impl FnMut() -> Option<String>,
) -> Outcome {
    let (stop, flips) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut outcome = Outcome::default();
    let mut driver = Driver { field: raced.field.clone(), dice: Dice(0x5eed), next: 0, wrap: true };
    std::thread::scope(|scope| {
        for seed in [3, 77] {
            let (field, stop, flips) = (raced.field.clone(), &stop, &flips);
            scope.spawn(move || {
                let mut dice = Dice(seed);
                while !stop.load(Ordering::Relaxed) {
                    (0..1000).for_each(|_| field.flip(&mut dice));
                    flips.fetch_add(1000, Ordering::Relaxed);
                }
            });
        }
        let until = Instant::now() + long;
        let mut round = 0;
        while outcome.wrong.is_none() && Instant::now() < until {
            driver.offer();
            raced.core.turn_with(Budget::of(16));
            outcome.wrong = check();
            round += 1;
            let faults = raced.counts().faults;
            if faults > outcome.faults || round % 64 == 0 {
                outcome.faults = faults;
                raced.restart(&mut driver);
            }
            if round % 256 == 0 && outcome.wrong.is_none() {
                outcome.wrong = raced.field.wronged();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    outcome.wrong = outcome.wrong.or_else(|| raced.field.wronged());
    outcome.requests = raced.counts().requests;
    outcome.flips = flips.into_inner();
    outcome
}

/// An honest disk on the same core: writes, reads back, compares.
struct Neighbour {
    rig: Rig,
    round: u64,
}

impl Neighbour {
    fn new(packed: bool, core: &HandCore) -> Self {
        let features = if packed { rig::PACKED } else { rig::SPLIT };
        let plan = DiskPlan { slots: 4, max_bytes: 4096, segments: 2, shape: Shape::Direct };
        let backing = MemoryBacking::new(1 << 20).unwrap();
        Neighbour { rig: Rig::planned(options("honest"), backing, plan, features, core), round: 0 }
    }

    fn goes_on(&mut self) -> Option<String> {
        self.round += 1;
        let (sector, bytes) = (self.round % 200 * 8, [self.round as u8; 4096]);
        let written = self.rig.write(sector, &bytes);
        let (status, read) = self.rig.read(sector, 4096);
        (written != 0 || status != 0 || read != bytes)
            .then(|| format!("the neighbour's request {} went wrong", self.round))
    }
}

fn race_disk(packed: bool, long: Duration) -> Outcome {
    let core = HandCore::polling();
    let mut memory = GuestMemory::new(1 << 20).unwrap();
    let field = Field::new(&mut memory, packed, Kind::Disk);
    let backing = MemoryBacking::new(DISK).unwrap();
    let vdev = Vdev::new(Blk::new(options("raced"), backing.clone()), memory.view().map().clone());
    let mut raced = Raced::new(vdev, 0, field, &core);
    let mut neighbour = Neighbour::new(packed, &core);
    let mut round = 0u32;
    race(&mut raced, long, || {
        round += 1;
        let mut wrong = if round.is_multiple_of(16) { neighbour.goes_on() } else { None };
        if round.is_multiple_of(256) && wrong.is_none() {
            wrong = stolen(&backing);
        }
        wrong
    })
}

/// Whether the disk has anything that no version named readable.
fn stolen(backing: &Arc<MemoryBacking>) -> Option<String> {
    let mut bytes = vec![0; DISK as usize];
    rustix::io::pread(backing.file().unwrap(), &mut bytes, 0).unwrap();
    let at = bytes.windows(8).position(|bytes| bytes == [NOBODYS; 8])?;
    Some(format!("the disk has at {at} what no version of a descriptor names readable"))
}

fn race_nic(packed: bool, kind: Kind, long: Duration) -> Outcome {
    let mut lan =
        Lan::with(SwitchSettings { flood_rate: 1 << 34, flood_burst: 1 << 34, ..SwitchSettings::default() });
    let mut memory = GuestMemory::new(1 << 20).unwrap();
    let field = Field::new(&mut memory, packed, kind);
    let (mut a, mut b) = (lan.plug(2), lan.plug(3));
    let vdev = Vdev::new(raced_nic(&mut lan.switch), memory.view().map().clone());
    let queue = u16::from(kind == Kind::Transmit);
    let mut raced = Raced::new(vdev, queue, field, &lan.core);
    let mut round = 0u64;
    race(&mut raced, long, || {
        round += 1;
        if kind == Kind::Receive {
            let len = 60 + round as usize * 7 % 1400;
            a.pairs[0].send(NetHeader::default(), &plain(mac(1), mac(2), len)).unwrap();
            a.core.turn();
            a.pairs[0].reap().unwrap();
        }
        if round.is_multiple_of(16) { honest(&mut a, &mut b, round) } else { None }
    })
}

fn raced_nic(switch: &mut Arc<Switch>) -> Net {
    let port = switch.plug(PortOptions { mac: Some(mac(1)), ..PortOptions::new("raced") }).unwrap();
    let options = NetOptions {
        name: "raced".to_owned(),
        mac: mac(1),
        pairs: 1,
        queue_size: 256,
        mtu: 1500,
        control: true,
    };
    Net::new(options, port)
}

/// A frame from one honest NIC to the other; and what has come from the one that races.
fn honest(a: &mut Nic, b: &mut Nic, round: u64) -> Option<String> {
    let frame = plain(mac(3), mac(2), 60 + round as usize % 1000);
    a.pairs[0].send(NetHeader::default(), &frame).unwrap();
    let mut came = false;
    for nic in [b, a] {
        for (_, bytes) in nic.receive() {
            came |= bytes == frame;
            if bytes.windows(8).any(|bytes| bytes == [NOBODYS; 8]) {
                return Some("a frame has what no version of a descriptor names readable".to_owned());
            }
        }
        nic.pairs[0].reap().unwrap();
    }
    (!came).then(|| format!("the neighbours' frame of round {round} is lost or spoilt"))
}

/// Races until enough has happened: how much that is in a second is up to the machine.
fn proves_something(run: impl Fn() -> Outcome, what: &str) {
    let (mut requests, mut faults, mut flips) = (0, 0, 0);
    for _ in 0..20 {
        let outcome = run();
        println!("{what}: {outcome:?}");
        assert_eq!(outcome.wrong, None, "{what}");
        (requests, faults, flips) =
            (requests + outcome.requests, faults + outcome.faults, flips + outcome.flips);
        if requests > 100 && faults > 0 && flips > 1000 {
            return;
        }
    }
    panic!("{what}: {requests} requests, {faults} faults, {flips} flips are too few");
}

/// All in one test: each takes all the processors that there are, and taking a rule out is for the whole process.
#[test]
fn a_guest_that_races_harms_nobody_and_is_believed_once() {
    for packed in [false, true] {
        proves_something(
            || race_disk(packed, duration()),
            if packed { "disk, packed" } else { "disk, split" },
        );
        for kind in [Kind::Receive, Kind::Transmit] {
            proves_something(|| race_nic(packed, kind, duration()), &format!("{kind:?}, packed: {packed}"));
        }
    }
    // The test can fail: with descriptors that are read twice, it does.
    if read_twice(true) {
        for packed in [false, true] {
            let outcome = race_disk(packed, Duration::from_secs(60));
            println!("read twice, packed: {packed}: {outcome:?}");
            assert!(outcome.wrong.is_some(), "descriptors are read twice, and nobody notices: {outcome:?}");
        }
        read_twice(false);
    }
}
