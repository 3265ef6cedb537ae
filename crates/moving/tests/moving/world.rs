//! A guest's machine, the wire, and whoever moves it: between any two accesses of the driver the device may go to another host.

use std::collections::BTreeSet;

use ioplane_moving::{MOST, PAGE, PageSet, Unsent};
use ioplane_nic::silicon::spec::{CTRL_RST, ENABLE};
use ioplane_nic::silicon::{Chip, PfState, QueueRegister, SiliconViolation, VirtualFunction};

use crate::card::Card;
use crate::hardware::{Host, LOST, MEMORY, frame, number};

/// When what the driver has said goes ahead of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ahead {
    Never,
    /// When copying begins.
    Once,
    /// Then, and at each pass.
    Passes,
}

/// When the device is moved, by the count of points: each access, each tick is one.
pub struct Plan {
    /// Before these points.
    pub at: BTreeSet<u64>,
    /// So many points before each of them copying begins.
    pub copied_before: u64,
    /// The device's pages are sent. Off: the test shows that it would notice.
    pub marking: bool,
    /// Frames that were not sent stay for the other host.
    pub unsent: Unsent,
    /// The newest version of messages that physical functions know.
    pub newest_api: Option<u32>,
    pub ahead: Ahead,
}

impl Plan {
    pub fn at(points: impl IntoIterator<Item = u64>) -> Plan {
        Plan {
            at: points.into_iter().collect(),
            copied_before: 30,
            marking: true,
            unsent: Unsent::Wait,
            newest_api: None,
            ahead: Ahead::Never,
        }
    }
}

/// Memory of the other host while it is copied, and the guest's own stores since.
struct Copying<C: Card> {
    there: Host<C>,
    stored: PageSet,
}

pub struct World<C: Card> {
    pub host: Host<C>,
    pub plan: Plan,
    /// Points so far.
    pub points: u64,
    /// Numbers of frames that were taken in while the guest had the device, and the next one to send.
    pub accepted: Vec<u64>,
    next: u64,
    /// Whether the wire sends to the guest.
    pub injecting: bool,
    /// Numbers of frames that left.
    pub sent: Vec<u64>,
    pub violations: Vec<SiliconViolation>,
    pub moves: u64,
    /// Pages that were not what they were on the source before anything was replayed.
    pub missed: u64,
    pub largest_state: usize,
    /// Most register accesses of a stop and of a replay.
    pub accesses: (u64, u64),
    /// Most messages and frames of a replay.
    pub said: (u64, u64),
    /// Messages of all replays, those that they built upon, and register accesses of all replays.
    pub stops: (u64, u64, u64),
    /// Pages that were marked while memory was copied, and that the device wrote meanwhile: of each pass, added up.
    pub marked: (u64, u64),
    copying: Option<Copying<C>>,
    /// The address that the guest believes to have.
    pub mac: [u8; 6],
}

/// A function of some host: another address, counters anywhere.
fn function<C: Chip>(number: u64, newest_api: Option<u32>) -> VirtualFunction<C> {
    let counted = 0xffff_ff00u32.wrapping_add((number as u32).wrapping_mul(0x1234_5677));
    let mut vf = VirtualFunction::new([2, 0x11, 0, 0, 1, number as u8], counted);
    newest_api.into_iter().for_each(|newest| vf.set_newest_api(newest));
    vf
}

impl<C: Card> World<C> {
    pub fn new(plan: Plan) -> Self {
        World {
            host: Host::new(function(0, plan.newest_api)),
            plan,
            points: 0,
            accepted: Vec::new(),
            next: 0,
            injecting: false,
            sent: Vec::new(),
            violations: Vec::new(),
            moves: 0,
            missed: 0,
            largest_state: 0,
            accesses: (0, 0),
            said: (0, 0),
            stops: (0, 0, 0),
            marked: (0, 0),
            copying: None,
            mac: [0; 6],
        }
    }

    /// The driver is between two of its accesses.
    fn point(&mut self) {
        self.points += 1;
        let due = self.plan.at.range(self.points..).next().copied();
        if let Some(due) = due
            && due.saturating_sub(self.plan.copied_before) <= self.points
            && self.copying.is_none()
        {
            self.begin_copy();
        }
        if self.copying.is_some() && self.points.is_multiple_of(9) && due != Some(self.points) {
            self.round();
        }
        if due == Some(self.points) {
            self.switch_over();
        }
    }

    fn begin_copy(&mut self) {
        let there = Host::new(function(self.moves + 1, self.plan.newest_api));
        self.host.movable.begin_copy(self.host.view.clone()).expect("it runs");
        self.host.silicon.vf().take_written();
        there.view.write(0, &self.host.memory()).expect("memory");
        self.copying = Some(Copying { there, stored: PageSet::new() });
        self.go_ahead(Ahead::Once);
    }

    fn go_ahead(&mut self, moment: Ahead) {
        let Some(copying) = &mut self.copying else { return };
        if self.plan.ahead == Ahead::Passes || self.plan.ahead == moment && moment != Ahead::Never {
            let said = self.host.movable.said().expect("it runs");
            copying.there.go_ahead(&said).expect("a host like this one");
        }
    }

    /// One pass of copying: what the guest stored, and what the device wrote.
    fn round(&mut self) {
        let written = self.host.movable.pages();
        self.marked.0 += written.len() as u64;
        self.marked.1 += self.host.silicon.vf().take_written().len() as u64;
        if !self.host.movable.is_stopped() {
            self.go_ahead(Ahead::Passes);
        }
        let Some(copying) = &mut self.copying else { return };
        let mut pages = std::mem::take(&mut copying.stored);
        if self.plan.marking {
            pages.extend(written);
        }
        for page in pages {
            let bytes: [u8; PAGE as usize] = self.host.view.bytes(page * PAGE).expect("memory");
            copying.there.view.write(page * PAGE, &bytes).expect("memory");
        }
    }

    /// The guest goes on there.
    pub fn go_on(&mut self, there: Host<C>) {
        self.collect();
        self.violations.extend(self.host.silicon.vf().violations());
        self.host = there;
    }

    /// Registers that read as they were written, and that a move may not change.
    fn plain(&mut self) -> Vec<u32> {
        use QueueRegister::*;
        let mut values: Vec<u32> = C::PLAIN.iter().map(|offset| self.get(*offset)).collect();
        for queues in [C::Chip::LAYOUT.receive, C::Chip::LAYOUT.transmit] {
            for queue in 0..C::QUEUES as u64 {
                let on = self.get(queues.at(Control) + queue * queues.stride) & ENABLE != 0;
                for register in [BaseLow, Length, Tail, Control] {
                    // The tail of a queue that is off means nothing.
                    let means = on || register != Tail;
                    let value = self.get(queues.at(register) + queue * queues.stride);
                    values.push(if means { value } else { 0 });
                }
            }
        }
        values
    }

    fn get(&mut self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.host.silicon.vf().read(offset, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn switch_over(&mut self) {
        // While the device comes to rest the wire goes on, and so does what it is told by its PF.
        let before = self.host.silicon.accesses();
        let mut at_rest = false;
        let mut plain = Vec::new();
        for _ in 0..200 {
            if !self.host.movable.is_stopping() {
                plain = self.plain();
            }
            at_rest = self.host.movable.stop(self.plan.unsent).expect("hardware that works");
            if at_rest {
                break;
            }
            self.inject();
            self.host.silicon.vf().step();
        }
        let stopping = self.host.silicon.accesses() - before;
        assert!(at_rest, "busy: {:?}", self.host.movable.busy());
        self.collect();
        self.round();
        let known = self.host.silicon.vf().pf().clone();
        let Some(Copying { mut there, .. }) = self.copying.take() else { panic!("it was copied") };
        let (here, copy) = (self.host.memory(), there.memory());
        let pages = here.chunks(PAGE as usize).zip(copy.chunks(PAGE as usize));
        let other = pages.enumerate().filter(|(_, (here, copy))| here != copy);
        let missed: Vec<usize> = other.map(|(page, _)| page).collect();
        if self.plan.marking && !missed.is_empty() {
            eprintln!("point {}: pages {missed:?}", self.points);
        }
        self.missed += missed.len() as u64;
        // Whatever was missed is made up for, so that the guest goes on and the count is of pages.
        there.view.write(0, &here).expect("memory");
        let state = self.host.movable.save().expect("it stands still");
        self.largest_state = self.largest_state.max(state.len());
        assert!(state.len() <= MOST, "{} bytes", state.len());
        assert!(there.silicon.vf().take_written().is_empty(), "it reaches no memory before the stop");
        let before = there.silicon.accesses();
        there.movable.load(&state, &there.view).expect("what a host saves, another loads");
        there.replay().expect("a host like this one");
        let most = |of: (u64, u64), now: (u64, u64)| (of.0.max(now.0), of.1.max(now.1));
        let replaying = there.silicon.accesses() - before;
        self.accesses = most(self.accesses, (stopping, replaying));
        self.stops.0 += there.movable.messages();
        self.stops.1 += there.movable.built_upon();
        self.stops.2 += replaying;
        self.said = most(self.said, (there.movable.messages(), there.filled));
        assert!(there.memory() == here, "what was borrowed of the guest's memory was put back");
        self.go_on(there);
        self.moves += 1;
        assert_eq!(self.plain(), plain, "the driver's view of the registers");
        let now = self.host.silicon.vf().pf().clone();
        let of = |pf: &PfState| (pf.multicast.clone(), pf.vlans.clone(), pf.promiscuous, pf.clear_to_send);
        assert_eq!(of(&now), of(&known), "what the physical function keeps");
        // What was never asked for, since the driver has not said RESET, is the other host's.
        if known.clear_to_send {
            assert_eq!(now.longest, known.longest, "the longest frame");
            assert_eq!((now.api, now.more, now.delivers), (known.api, known.more, known.delivers));
        }
        if known.mac_is_known {
            assert_eq!(now.mac, known.mac, "the address");
        }
    }

    /// Takes what has left the device and looks that it is whole.
    pub fn collect(&mut self) {
        for frame in self.host.silicon.vf().take_sent() {
            self.sent.push(number(&frame).expect("a frame as the driver made it"));
        }
    }

    fn inject(&mut self) {
        if !self.injecting {
            return;
        }
        let longest = self.host.silicon.vf().pf().longest;
        let len = if self.next.is_multiple_of(3) && longest > 2000 {
            2900
        } else {
            60 + (self.next % 7) as usize * 100
        };
        let to = if self.next.is_multiple_of(5) { [0xff; 6] } else { self.mac };
        let frame = frame(to, self.next, len);
        if self.host.silicon.vf().receive(&frame) {
            self.accepted.push(self.next);
        }
        if let Some(Copying { there, .. }) = &self.copying {
            assert!(!there.silicon.vf().receive(&frame), "nobody drives it");
        }
        self.next += 1;
    }

    /// Time passes.
    pub fn tick(&mut self) {
        self.point();
        self.inject();
        self.host.silicon.vf().step();
        self.collect();
    }

    /// The driver reads a register.
    pub fn read(&mut self, offset: u64) -> u32 {
        self.point();
        if self.host.movable.trapped((offset / PAGE) as usize) {
            return self.host.movable.read(offset).expect("hardware that works");
        }
        self.get(offset)
    }

    /// The driver writes one.
    pub fn write(&mut self, offset: u64, value: u32) {
        self.point();
        if self.host.movable.trapped((offset / PAGE) as usize) {
            self.host.movable.write(offset, value).expect("hardware that works");
            if offset == C::Chip::LAYOUT.control && value & CTRL_RST != 0 {
                self.map_again();
            }
            return;
        }
        self.host.silicon.vf().write(offset, &value.to_le_bytes());
    }

    /// The driver has reset the device: pages that were trapped for their counters are mapped again.
    fn map_again(&mut self) {
        assert!(self.host.movable.counters_anew(), "no counter was read since");
        let relearns = self.copying.is_none() && C::RELEARNS;
        assert!(!relearns || !self.host.movable.trapped(1), "what a reset maps again");
    }

    /// The driver stores to memory.
    pub fn store(&mut self, gpa: u64, bytes: &[u8]) {
        self.host.view.write(gpa, bytes).expect("memory");
        if let Some(copying) = &mut self.copying {
            copying.stored.extend(gpa / PAGE..=(gpa + bytes.len() as u64 - 1) / PAGE);
        }
    }

    pub fn load<const N: usize>(&self, gpa: u64) -> [u8; N] {
        assert!(gpa + N as u64 <= MEMORY);
        self.host.view.bytes(gpa).expect("memory")
    }

    pub fn bytes(&self, gpa: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.host.view.read(gpa, &mut bytes).expect("memory");
        bytes
    }

    /// Which vectors came.
    pub fn vectors(&self) -> [bool; 3] {
        self.host.vectors.each_ref().map(|vector| vector.take())
    }

    /// What must hold at the end of any run.
    pub fn finish(&mut self, received: &[u64], sent: u64) {
        self.violations.extend(self.host.silicon.vf().violations());
        assert_eq!(self.violations, [], "rules of the silicon that were broken");
        assert!(!received.contains(&LOST), "the guest saw a dummy");
        let mut received = received.to_vec();
        received.sort_unstable();
        assert_eq!(received, self.accepted, "frames that were taken in, each once");
        for queue in 0..C::QUEUES as u64 {
            let of_queue = |number: &&u64| **number % C::QUEUES as u64 == queue;
            assert!(self.sent.iter().filter(of_queue).is_sorted(), "frames of a queue leave in order");
        }
        self.sent.sort_unstable();
        assert_eq!(self.sent, (0..sent).collect::<Vec<_>>(), "frames that the guest sent, each once");
    }
}
