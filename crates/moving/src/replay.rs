//! A device is brought to where it was: on another function, or on the same one when a move was called off.
//!
//! No head is ever written but as zero. A transmit ring's head is moved by descriptors that send nothing, a receive ring's by frames into
//! a buffer that is nobody's. For that the guest's own ring is used while its processors stand still, and its bytes are put back.

use ioplane_hardware::Hardware;
use ioplane_memory::{GuestMap, GuestView, MemoryRegion, RegionSpec};
use ioplane_model::{Dummy, KeepRule, Machine, MessageKind, ModelInput};
use ioplane_pci::{Irq, Wire};

use crate::error::{DirectStateError, MovingError};
use crate::mailbox::{GuestMailbox, Latched, Sending};
use crate::movable::{Movable, Phase};
use crate::plan::Step;
use crate::state::{DirectStateV2, inside};

/// Where dummy frames go: 64 KiB above all guest memory, and above 60 GiB.
const DUMMY_FROM: u64 = 60 << 30;
const DUMMY_LEN: u64 = 64 << 10;
/// How often the end of a reset is looked for, a tenth of a millisecond apart: for twice as long as Linux's drivers of both cards do. VFIO has waited for it
/// already, as PCI Express wants it (100 ms after FLR).
const RESET_LOOKS: u32 = 20;
/// Flows that are tried for a ring.
const FLOWS: u32 = 64;
/// Bytes of the ring that are changed at a time.
const CHUNK: usize = 4096;

/// What happens around a device while it is brought back.
pub trait Surroundings {
    /// Lets some time pass. `false`: the deadline has passed.
    fn wait(&mut self) -> bool;

    /// Sends frames from the physical function, and is asked again until enough have come. `false`: none were sent, since those of
    /// before may still come.
    fn fill(&mut self, frames: &FillFrames) -> std::io::Result<bool>;
}

/// Frames that move the head of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FillFrames {
    /// Whom they are sent to.
    pub address: [u8; 6],
    /// Hardware that shares frames out to several queues keeps a flow together, and another flow apart from it.
    pub flow: u32,
    /// How many are still missing.
    pub missing: u32,
    /// How many of them are to be sent now.
    pub count: u32,
    /// No frames were sent for this ring yet.
    pub first: bool,
}

/// The bytes of a guest's ring, put back when they are no longer needed: whatever went wrong in between.
struct Borrowed<'a> {
    view: &'a GuestView,
    gpa: u64,
    bytes: Vec<u8>,
}

impl<'a> Borrowed<'a> {
    fn new(view: &'a GuestView, gpa: u64, len: usize) -> Result<Self, MovingError> {
        let mut bytes = vec![0; len];
        view.read(gpa, &mut bytes)?;
        Ok(Borrowed { view, gpa, bytes })
    }

    fn fill(&self, descriptor: &[u8]) -> Result<(), MovingError> {
        let mut at = self.gpa;
        for chunk in descriptor.repeat(self.bytes.len() / descriptor.len()).chunks(CHUNK) {
            self.view.write(at, chunk)?;
            at += chunk.len() as u64;
        }
        Ok(())
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        // It was there a moment ago; memory that has gone is gone for the guest as well.
        let _ = self.view.write(self.gpa, &self.bytes);
    }
}

impl<H: Hardware> Movable<H> {
    /// Brings the device to the state that was loaded or that it was stopped in, and lets it run. The guest's processors stand still.
    /// An error leaves it stopped with that state: it may be tried again, here or elsewhere.
    pub fn replay(&mut self, view: &GuestView, around: &mut dyn Surroundings) -> Result<(), MovingError> {
        let Phase::Stopped(state) = &self.phase else { return Err(MovingError::Running) };
        let state = state.clone();
        let outcome = self.bring(&state, view, around);
        if outcome.is_ok() {
            self.phase = Phase::Running;
            self.copying = None;
        }
        outcome
    }

    fn bring(
        &mut self,
        state: &DirectStateV2,
        view: &GuestView,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        self.built_upon = 0;
        let said = self.say_difference(state, around)?;
        if !said {
            self.reset_alone(around)?;
        }
        self.hardware.master(true)?;
        let mut flows = Vec::new();
        for at in 0..self.plan.steps.len() {
            match self.plan.steps[at] {
                Step::Messages if said => {}
                Step::Messages => self.say_all(state, around)?,
                Step::Off => self.switch_off(around)?,
                Step::Registers(count) => {
                    for (at, value) in state.registers.iter().enumerate().take(count) {
                        self.put(self.plan.saved[at].offset, *value)?;
                    }
                }
                Step::Ring(ring) => self.bring_ring(ring, state, view, &mut flows, around)?,
                Step::Counters => {
                    for at in 0..self.offsets.len() {
                        let now = self.hardware_counter(at)?;
                        self.offsets[at] = state.counters[at].wrapping_sub(now) & self.plan.counters[at].mask;
                    }
                }
                Step::Tail(ring) if state.rings[ring].on => {
                    self.put(self.plan.rings[ring].tail, state.rings[ring].tail)?;
                }
                Step::Tail(_) => {}
                Step::Saved(at) => self.put(self.plan.saved[at].offset, state.registers[at])?,
                Step::Value(offset, value) => self.put(offset, value)?,
                Step::Vectors => {
                    for vector in 0..self.hardware.irqs().msix {
                        self.hardware.wire(Irq::Msix, vector, Wire::Trigger)?;
                    }
                }
            }
        }
        self.latched = Latched { ready: false, ..self.latched };
        self.adopt(state);
        Ok(())
    }

    /// Resets it, and it reaches no memory.
    pub(crate) fn reset_alone(&mut self, around: &mut dyn Surroundings) -> Result<(), MovingError> {
        self.hardware.master(false)?;
        self.hardware.reset()?;
        self.latched = Latched::default();
        // Not every function says so: the first message tells whether it is there.
        for _ in 0..RESET_LOOKS {
            self.line().look()?;
            if self.latched.ready {
                break;
            }
            wait(around, || "the function resets".to_owned())?;
        }
        Ok(())
    }

    /// The guest's view is as it was; the states of the model are derived from it.
    fn adopt(&mut self, state: &DirectStateV2) {
        self.kept = state.kept.clone();
        self.mailbox = GuestMailbox { ..state.mailbox.clone() };
        self.sending = Sending::Nothing;
        (self.half, self.unread) = (state.half, false);
        self.machine.reset();
        let table = &self.plan.table.mailbox;
        let Some(register) = self.machine.find(table.control) else { return };
        let tell = |machine: &mut Machine, seen| {
            let pending = machine.ask(seen);
            machine.commit(pending);
        };
        tell(&mut self.machine, ModelInput::Became { register, value: table.ready });
        if state.mailbox.unread {
            tell(&mut self.machine, ModelInput::Write { register, value: table.request });
            tell(&mut self.machine, ModelInput::Became { register, value: table.message });
        } else if state.mailbox.bits & table.hold != 0 {
            tell(&mut self.machine, ModelInput::Write { register, value: table.hold });
        }
    }

    /// Says the kept messages through the function's own mailbox.
    fn say_all(&mut self, state: &DirectStateV2, around: &mut dyn Surroundings) -> Result<(), MovingError> {
        let table = &self.plan.table.mailbox;
        if !state.kept.begun {
            return Ok(());
        }
        if self.say_begin(around)? != state.kept.address
            && let Some((message, words)) = state.kept.address_message(table)
        {
            self.say(message, &words, around)?;
        }
        for (message, words) in state.kept.messages(table) {
            self.say(message, &words, around)?;
        }
        Ok(())
    }

    /// Says the message that begins anew: which address the function has, in words of a message.
    pub(crate) fn say_begin(&mut self, around: &mut dyn Surroundings) -> Result<[u32; 2], MovingError> {
        for message in self.plan.table.mailbox.messages {
            let KeepRule::Begins { address } = message.keep else { continue };
            let mut words = vec![0; message.words.into()];
            words[0] = message.kind;
            // One that is refused has begun without an address: the other side has given it none.
            let answer = match self.say(message, &words, around) {
                Err(MovingError::Refused { .. }) => [0; 16],
                answer => answer?,
            };
            let at = usize::from(address);
            return Ok([answer[at], answer[at + 1]]);
        }
        Ok([0; 2])
    }

    /// Says one and waits for its answer. What the other side says by itself meanwhile was not meant for this guest.
    pub(crate) fn say(
        &mut self,
        message: &'static MessageKind,
        words: &[u32],
        around: &mut dyn Surroundings,
    ) -> Result<[u32; 16], MovingError> {
        let table = &self.plan.table.mailbox;
        let doing = || format!("message {} is answered", message.name);
        while !self.line().send(words)? {
            wait(around, doing)?;
        }
        self.messages += 1;
        loop {
            self.line().look()?;
            if self.latched.message
                && let Some(answer) = self.line().take()?
                && answer[0] & table.kind == message.kind
                && self.latched.taken
            {
                let fine = answer[0] & table.accepted != 0;
                return if fine { Ok(answer) } else { Err(MovingError::Refused { message: message.name }) };
            }
            wait(around, doing)?;
        }
    }

    /// Switches every ring off that a reset has left on.
    fn switch_off(&mut self, around: &mut dyn Surroundings) -> Result<(), MovingError> {
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            let control = self.get(ring.control)?;
            if control & ring.enable != 0 {
                self.put(ring.control, control & !ring.enable)?;
            }
            while self.get(ring.control)? & ring.enable != 0 {
                wait(around, || format!("ring {} is switched off", ring.table.name))?;
            }
        }
        Ok(())
    }

    /// Switches a ring on and brings its head to where it was.
    fn bring_ring(
        &mut self,
        at: usize,
        state: &DirectStateV2,
        view: &GuestView,
        flows: &mut Vec<u32>,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        let (ring, saved) = (self.plan.rings[at], state.rings[at]);
        if !saved.on {
            return Ok(());
        }
        let geometry = self.geometry(at)?;
        if geometry != state.geometry(&self.plan, at) {
            return Err(MovingError::NoRing { ring: ring.table.name });
        }
        let bytes = saved.head as usize * usize::from(geometry.size);
        if !inside(view.map(), geometry.base, geometry.length.into()) || saved.head >= geometry.count() {
            let why = format!("ring {} lies outside of the guest's memory", ring.table.name);
            return Err(DirectStateError::Impossible(why).into());
        }
        let control = self.get(ring.control)?;
        self.put(ring.head, 0)?;
        self.put(ring.tail, 0)?;
        self.put(ring.control, control | ring.enable)?;
        while self.get(ring.control)? & ring.enable == 0 {
            wait(around, || format!("ring {} is switched on", ring.table.name))?;
        }
        if saved.head == 0 {
            return Ok(());
        }
        let borrowed = Borrowed::new(view, geometry.base, bytes)?;
        match ring.table.dummy {
            Dummy::Descriptor(words) => {
                borrowed.fill(&words.map(u32::to_le_bytes).concat())?;
                let moved = self.put(ring.tail, saved.head);
                let moved = moved.and_then(|()| self.until_head(at, saved.head, around));
                self.given_up(moved)
            }
            Dummy::Frame => {
                let iova = view.map().limit().next_multiple_of(DUMMY_LEN).max(DUMMY_FROM);
                let region = dummy_memory(iova)?;
                let mut descriptor = vec![0; geometry.size.into()];
                let addresses = ring.buffers.map_or(&[][..], |(_, buffers)| buffers.addresses);
                for (at, offset) in addresses.iter().zip([0, DUMMY_LEN / 2]) {
                    let at = usize::from(*at);
                    descriptor[at..at + 8].copy_from_slice(&(iova + offset).to_le_bytes());
                }
                borrowed.fill(&descriptor)?;
                self.hardware.map(iova, &region)?;
                let [a, b, ..] = state.kept.address.map(u32::to_le_bytes);
                let address = [a[0], a[1], a[2], a[3], b[0], b[1]];
                let filled = self.fill(at, saved.head, address, flows, around);
                let filled =
                    filled.and_then(|()| self.until_done(at, geometry.at(saved.head - 1), view, around));
                let filled = self.given_up(filled);
                self.hardware.unmap(iova, DUMMY_LEN)?;
                filled
            }
        }
    }

    /// A ring that did not get there is taken from the hardware before the guest's bytes are put back: it would follow them.
    fn given_up(&mut self, outcome: Result<(), MovingError>) -> Result<(), MovingError> {
        if outcome.is_err() {
            self.hardware.master(false)?;
            self.hardware.reset()?;
        }
        outcome
    }

    /// Lets frames come until the head is where it was. `flows` are those that other rings get.
    fn fill(
        &mut self,
        at: usize,
        head: u32,
        address: [u8; 6],
        flows: &mut Vec<u32>,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        let ring = self.plan.rings[at];
        // More frames than are needed find no buffer.
        self.put(ring.tail, head)?;
        let mut flow = 0;
        let mut stood = None;
        loop {
            let now = self.get(ring.head)?;
            if now == head {
                flows.push(flow);
                return Ok(());
            }
            // One frame tells whether its flow comes to this ring. If nothing came of those that were sent, another is tried.
            let comes = stood.is_some_and(|before| before != now);
            let mut next = if stood == Some(now) { flow + 1 } else { flow } % FLOWS;
            while !comes && flows.contains(&next) && flows.len() < FLOWS as usize {
                next = (next + 1) % FLOWS;
            }
            let missing = head.saturating_sub(now);
            let count = if comes { missing } else { 1 };
            let frames = FillFrames { address, flow: next, missing, count, first: stood.is_none() };
            if around.fill(&frames).map_err(MovingError::Fill)? {
                (flow, stood) = (next, Some(now));
            }
            wait(around, || format!("the head of ring {} comes to {head}", ring.table.name))?;
        }
    }

    /// Waits until a descriptor was written back.
    fn until_done(
        &mut self,
        at: usize,
        descriptor: u64,
        view: &GuestView,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        let table = self.plan.rings[at].table;
        let (word, bit) = table.done;
        loop {
            let last: [u8; 4] = view.bytes(descriptor + u64::from(word))?;
            if u32::from_le_bytes(last) & bit != 0 {
                return Ok(());
            }
            wait(around, || format!("dummy frames of ring {} are written", table.name))?;
        }
    }

    /// Waits until a head is there.
    fn until_head(&mut self, at: usize, head: u32, around: &mut dyn Surroundings) -> Result<(), MovingError> {
        let ring = self.plan.rings[at];
        while self.get(ring.head)? != head {
            wait(around, || format!("the head of ring {} comes to {head}", ring.table.name))?;
        }
        Ok(())
    }
}

pub(crate) fn wait(around: &mut dyn Surroundings, doing: impl FnOnce() -> String) -> Result<(), MovingError> {
    if around.wait() { Ok(()) } else { Err(MovingError::Deadline { doing: doing() }) }
}

/// Memory that frames are thrown into.
fn dummy_memory(iova: u64) -> Result<MemoryRegion, MovingError> {
    let map = GuestMap::anonymous(DUMMY_LEN)?;
    let spec = map.regions()[0].spec().map_err(MovingError::DummyFile)?;
    Ok(MemoryRegion::map(RegionSpec { gpa: iova, ..spec })?)
}
