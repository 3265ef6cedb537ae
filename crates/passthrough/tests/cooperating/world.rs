//! A guest's machine, the wire, and whoever moves its function: before any of the driver's accesses a move may begin.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use ioplane_device::{Access, Device, Quiescent, RegisterAddress};
use ioplane_memory::{GuestMap, GuestView};
use ioplane_moving::PAGE;
use ioplane_nic::silicon::SiliconViolation;
use ioplane_nic::vf82576::spec::*;
use ioplane_nic::vf82576::{Chip82576, Vf82576};
use ioplane_passthrough::{Carry, Cooperating, Motion, Passthrough, Prepared};
use ioplane_pci::{Function, Irq, Wire, spec as pci};

use crate::silicon::{Around, Vector, vf};

pub type Silicon = crate::silicon::Silicon<Chip82576>;

pub const MEMORY: u64 = 1 << 20;

/// When the function goes to another one, by the count of points, and where that is.
#[derive(Clone, Default)]
pub struct Plan {
    pub at: BTreeSet<u64>,
    /// To another host, with another copy of the memory.
    pub elsewhere: bool,
    /// The guest stands still from when its function does.
    pub stands: bool,
    /// The guest's accesses to registers go past whoever moves the function, but for the first page.
    pub mapped: bool,
    /// Its VMM does not wait for what it writes to registers: that arrives before the next access that it waits for, and else when nothing is moved.
    pub posts: bool,
}

/// What is under way.
enum Moving {
    Here(Prepared<Silicon>, Arc<Mutex<Vf82576>>),
    /// Memory as it was when copying began, and the pages that the guest has stored to since.
    There(Vec<u8>, BTreeSet<u64>),
}

pub struct World {
    pub device: Passthrough<Cooperating<Silicon>>,
    pub vf: Arc<Mutex<Vf82576>>,
    pub view: GuestView,
    vectors: [Arc<Vector>; 3],
    seen: [u64; 3],
    plan: Plan,
    pub points: u64,
    moving: Option<Moving>,
    /// Writes that have not arrived.
    posted: Vec<(u64, u32)>,
    pub moves: u64,
    /// Looks at a driver that had the lock.
    pub waited: u64,
    pub injecting: bool,
    next: u32,
    pub accepted: Vec<u32>,
    /// Taken in and not seen by the driver when its memory went to another host.
    pub missed: BTreeSet<u32>,
    pub sent: Vec<u32>,
    violations: Vec<SiliconViolation>,
    pub largest_state: usize,
    pub accesses: BTreeMap<&'static str, u64>,
    pub mac: [u8; 6],
}

pub fn frame(to: [u8; 6], number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![0; len];
    frame[..6].copy_from_slice(&to);
    frame[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 0x88, 0xb5]);
    frame[14..18].copy_from_slice(&number.to_le_bytes());
    for (at, byte) in frame.iter_mut().enumerate().skip(18) {
        *byte = (number as u8).wrapping_mul(31).wrapping_add(at as u8);
    }
    frame
}

/// Its number, if it is whole.
pub fn number(seen: &[u8]) -> Option<u32> {
    let number = u32::from_le_bytes(seen.get(14..18)?.try_into().ok()?);
    let to = seen[..6].try_into().ok()?;
    (frame(to, number, seen.len()) == seen).then_some(number)
}

pub fn admitted(hardware: Silicon, map: &Arc<GuestMap>, mapped: bool) -> Passthrough<Cooperating<Silicon>> {
    let cooperating = Cooperating::new(hardware, mapped).expect("room for the capability");
    let device = Passthrough::new("nic0", cooperating, None).expect("hardware that works");
    let mut quiescent = Quiescent::new(device);
    quiescent.with(|device, proof| {
        device.admit(proof).expect("it is reset");
        device.replace_memory(proof, map.clone()).expect("mapped");
    });
    quiescent.into_device()
}

impl World {
    pub fn new(plan: Plan) -> World {
        let (vf, hardware) = Silicon::new([2, 0, 0, 0, 1, 0], 1000, BAR_SIZE);
        let map = Arc::new(GuestMap::anonymous(MEMORY).expect("memory"));
        let (device, view) = (admitted(hardware, &map, plan.mapped), GuestView::new(map));
        let mut world = World {
            device,
            vf,
            view,
            vectors: Default::default(),
            seen: [0; 3],
            plan,
            points: 0,
            moving: None,
            posted: Vec::new(),
            moves: 0,
            waited: 0,
            injecting: false,
            next: 0,
            accepted: Vec::new(),
            missed: BTreeSet::new(),
            sent: Vec::new(),
            violations: Vec::new(),
            largest_state: 0,
            accesses: BTreeMap::new(),
            mac: [0; 6],
        };
        world.set_up();
        world
    }

    /// What its VMM and its firmware do.
    fn set_up(&mut self) {
        for (at, vector) in (0..).zip(self.vectors.clone()) {
            self.device.wire(Irq::Msix, at, Wire::Call(Some(vector))).expect("a vector");
        }
        self.config(pci::BAR0, &0xfe00_0000_u32.to_le_bytes());
        self.config(pci::COMMAND, &(pci::COMMAND_MEMORY | pci::COMMAND_MASTER).to_le_bytes());
    }

    pub fn config(&mut self, offset: usize, bytes: &[u8]) {
        self.arrives();
        self.device.access(RegisterAddress::Config(offset as u64), Access::Write(bytes));
    }

    pub fn read_config(&mut self, offset: usize) -> u32 {
        self.arrives();
        let mut bytes = [0; 4];
        self.device.access(RegisterAddress::Config(offset as u64), Access::Read(&mut bytes));
        u32::from_le_bytes(bytes)
    }

    pub fn read(&mut self, offset: u64) -> u32 {
        self.point();
        self.arrives();
        let mut bytes = [0; 4];
        match self.goes_past(offset) {
            true => vf(&self.vf).read(offset, &mut bytes),
            false => drop(self.device.access(RegisterAddress::Bar(0, offset), Access::Read(&mut bytes))),
        }
        u32::from_le_bytes(bytes)
    }

    pub fn write(&mut self, offset: u64, value: u32) {
        self.point();
        match self.goes_past(offset) {
            true => vf(&self.vf).write(offset, &value.to_le_bytes()),
            false => self.posted.push((offset, value)),
        }
        if !self.plan.posts {
            self.arrives();
        }
    }

    /// What was posted.
    fn arrives(&mut self) {
        for (offset, value) in std::mem::take(&mut self.posted) {
            let bytes = value.to_le_bytes();
            self.device.access(RegisterAddress::Bar(0, offset), Access::Write(&bytes));
        }
    }

    fn goes_past(&self, offset: u64) -> bool {
        self.plan.mapped && offset >= PAGE
    }

    pub fn store(&mut self, gpa: u64, bytes: &[u8]) {
        self.view.write(gpa, bytes).expect("memory");
        if let Some(Moving::There(_, stored)) = &mut self.moving {
            stored.extend(gpa / PAGE..=(gpa + bytes.len() as u64 - 1) / PAGE);
        }
    }

    pub fn load<const N: usize>(&self, gpa: u64) -> [u8; N] {
        self.view.bytes(gpa).expect("memory")
    }

    pub fn bytes(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.view.read(gpa, &mut bytes).expect("memory");
        bytes
    }

    /// FLR, as its guest asks for it.
    pub fn reset(&mut self) {
        let hardware = Silicon::new([0; 6], 0, BAR_SIZE).1;
        let map = self.view.map().clone();
        let device = std::mem::replace(&mut self.device, admitted(hardware, &map, self.plan.mapped));
        let mut quiescent = Quiescent::new(device);
        quiescent.with(|device, proof| device.reset(proof));
        self.device = quiescent.into_device();
    }

    /// Which vectors came since it was asked last.
    pub fn vectors(&mut self) -> [bool; 3] {
        let now = self.vectors.each_ref().map(|vector| vector.count());
        let before = std::mem::replace(&mut self.seen, now);
        [0, 1, 2].map(|at| now[at] != before[at])
    }

    /// Time passes.
    pub fn tick(&mut self) {
        self.point();
        if self.moving.is_none() {
            self.arrives();
        }
        if self.injecting {
            self.inject();
        }
        vf(&self.vf).step();
        self.collect();
    }

    fn inject(&mut self) {
        let to = if self.next.is_multiple_of(5) { [0xff; 6] } else { self.mac };
        let len = 60 + (self.next % 7) as usize * 100;
        if vf(&self.vf).receive(&frame(to, self.next, len)) {
            self.accepted.push(self.next);
        }
        self.next += 1;
    }

    fn collect(&mut self) {
        for frame in vf(&self.vf).take_sent() {
            self.sent.push(number(&frame).expect("a frame as the driver made it"));
        }
    }

    /// The driver is between two of its accesses.
    fn point(&mut self) {
        self.points += 1;
        if self.plan.at.contains(&self.points) && self.moving.is_none() {
            self.begin();
        }
        if self.moving.is_none() {
            return;
        }
        // Something comes in a moment before, which the driver has not seen.
        if self.injecting {
            self.inject();
            vf(&self.vf).step();
            self.collect();
        }
        // A driver that has the lock gives it back sooner or later.
        for look in 0.. {
            if self.device.rest().expect("it comes to rest") {
                break;
            }
            if self.device.motion() == Motion::Runs {
                self.waited += 1;
                return;
            }
            // Its driver looks what it has not seen, if it can.
            if !self.plan.stands && self.device.hardware().is_marking() {
                return;
            }
            assert!(look < 300, "it does not come to rest");
            if self.injecting {
                self.inject();
            }
            vf(&self.vf).step();
            self.collect();
        }
        match self.moving.take() {
            Some(Moving::Here(prepared, other)) => self.exchange(prepared, other),
            Some(Moving::There(copy, stored)) => self.arrive(copy, &stored),
            None => {}
        }
        self.moves += 1;
    }

    fn other(&self) -> (Arc<Mutex<Vf82576>>, Silicon) {
        let number = self.moves as u32 + 1;
        Silicon::new([2, 0, 0, 0, 1, number as u8], number.wrapping_mul(0x1234_5677), BAR_SIZE)
    }

    fn begin(&mut self) {
        let elsewhere = self.plan.elsewhere;
        let begun = if elsewhere {
            self.device.begin_log().map(|()| Moving::There(self.bytes(0, MEMORY as usize), BTreeSet::new()))
        } else {
            let (other, hardware) = self.other();
            let prepared = self.device.prepare(hardware);
            return match prepared {
                Ok(prepared) => self.moving = Some(Moving::Here(prepared, other)),
                // Before the driver has announced its page.
                Err(error) => assert_eq!(self.moves, 0, "{error}"),
            };
        };
        match begun {
            Ok(moving) => self.moving = Some(moving),
            Err(error) => assert_eq!(self.moves, 0, "{error}"),
        }
    }

    fn leave_behind(&mut self, other: Arc<Mutex<Vf82576>>) {
        self.collect();
        let left = std::mem::replace(&mut self.vf, other);
        self.violations.extend(vf(&left).violations());
    }

    fn exchange(&mut self, prepared: Prepared<Silicon>, other: Arc<Mutex<Vf82576>>) {
        let (former, done) = self.device.exchange_at_rest(prepared).expect("it takes its place");
        drop(former);
        self.largest_state = self.largest_state.max(done.state_bytes);
        self.accesses.insert("replay", done.replay_accesses);
        self.leave_behind(other);
    }

    /// Its memory is what was copied: what the guest has stored, and what the daemon names.
    fn arrive(&mut self, mut copy: Vec<u8>, stored: &BTreeSet<u64>) {
        let carried = self.device.carried().expect("it stands still");
        self.largest_state = self.largest_state.max(carried.state.len());
        for page in stored.iter().chain(&self.device.written()) {
            let at = (page * PAGE) as usize;
            copy[at..at + PAGE as usize].copy_from_slice(&self.bytes(page * PAGE, PAGE as usize));
        }
        let (other, hardware) = self.other();
        let map = Arc::new(GuestMap::anonymous(MEMORY).expect("memory"));
        let there = admitted(hardware, &map, self.plan.mapped);
        self.device.leave().expect("left");
        (self.device, self.view) = (there, GuestView::new(map));
        self.view.write(0, &copy).expect("memory");
        self.leave_behind(other.clone());
        // Another VMM.
        self.posted.clear();
        (self.vectors, self.seen) = Default::default();
        self.set_up();
        self.device.load_carried(&carried).expect("taken");
        let mut around = Around { vf: other, left_one: None, sends: false, left: 100 };
        let replayed = self.device.replay(&mut around).expect("it goes on");
        self.accesses.insert("replay", replayed.accesses);
    }

    /// What must hold at the end of any run.
    pub fn finish(&mut self, received: &[u32], sent: u32) {
        self.arrives();
        self.violations.extend(vf(&self.vf).violations());
        assert_eq!(self.violations, [], "rules of the silicon that were broken");
        let accepted: Vec<u32> =
            self.accepted.iter().copied().filter(|number| !self.missed.contains(number)).collect();
        assert_eq!(received, accepted, "frames that were taken in, each once and in order");
        assert_eq!(
            self.sent,
            (0..sent).collect::<Vec<_>>(),
            "frames that the guest sent, each once and in order"
        );
        assert_eq!(self.device.faults(), Default::default(), "accesses that were denied");
    }
}
