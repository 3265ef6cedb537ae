//! A device is brought to where it was: on another function, or on the same one when a move was called off.
//!
//! No head is ever written but as zero. A transmit ring's head is moved by descriptors that send nothing, a receive ring's by frames into
//! a buffer that is nobody's. For that the guest's own ring is used while its processors stand still, and its bytes are put back.

use ioplane_hardware::Hardware;
use ioplane_memory::{GuestMap, GuestView, MemoryRegion, RegionSpec};
use ioplane_model::{Dummy, Machine, MessageKind, ModelInput};
use ioplane_pci::{Irq, Wire};

use crate::error::{DirectStateError, MovingError};
use crate::mailbox::{GuestMailbox, Latched, Sending};
use crate::movable::{Movable, Phase};
use crate::plan::Step;
use crate::state::{DirectStateV1, Geometry, inside};

/// Where dummy frames go: 64 KiB above all guest memory, and above 60 GiB.
const DUMMY_FROM: u64 = 60 << 30;
const DUMMY_LEN: u64 = 64 << 10;
/// How often the end of a reset is looked for. VFIO has waited for it already, as PCI Express wants it (100 ms after FLR).
const RESET_LOOKS: u32 = 200;
/// Bytes of the ring that are changed at a time.
const CHUNK: usize = 4096;

/// What happens around a device while it is brought back.
pub trait Surroundings {
    /// Lets some time pass. `false`: the deadline has passed.
    fn wait(&mut self) -> bool;

    /// Sends frames from the physical function to this address; up to `count` are needed, and it is asked again until they came.
    fn fill(&mut self, address: [u8; 6], count: u32) -> std::io::Result<()>;
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
        state: &DirectStateV1,
        view: &GuestView,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
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
        self.hardware.master(true)?;
        for at in 0..self.plan.steps.len() {
            match self.plan.steps[at] {
                Step::Messages => self.say_all(state, around)?,
                Step::Registers(count) => {
                    for (at, value) in state.registers.iter().enumerate().take(count) {
                        self.put(self.plan.saved[at].offset, *value)?;
                    }
                }
                Step::Ring(ring) => self.bring_ring(ring, state, view, around)?,
                Step::Counters => {
                    for at in 0..self.offsets.len() {
                        let now = self.get(self.plan.counters[at])?;
                        self.offsets[at] = state.counters[at].wrapping_sub(now);
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

    /// The guest's view is as it was; the states of the model are derived from it.
    fn adopt(&mut self, state: &DirectStateV1) {
        self.kept = state.kept.clone();
        self.mailbox = GuestMailbox { ..state.mailbox.clone() };
        self.sending = Sending::Nothing;
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
    fn say_all(&mut self, state: &DirectStateV1, around: &mut dyn Surroundings) -> Result<(), MovingError> {
        let table = &self.plan.table.mailbox;
        if !state.kept.begun {
            return Ok(());
        }
        for message in table.messages {
            let ioplane_model::KeepRule::Begins { address } = message.keep else { continue };
            let mut words = vec![0; message.words.into()];
            words[0] = message.kind;
            // One that is refused has begun without an address: the other side has given it none.
            let answer = match self.say(message, &words, around) {
                Err(MovingError::Refused { .. }) => [0; 16],
                answer => answer?,
            };
            let at = usize::from(address);
            if answer[at..at + 2] != state.kept.address
                && let Some((message, words)) = state.kept.address_message(table)
            {
                self.say(message, &words, around)?;
            }
        }
        for (message, words) in state.kept.messages(table) {
            self.say(message, &words, around)?;
        }
        Ok(())
    }

    /// Says one and waits for its answer. What the other side says by itself meanwhile was not meant for this guest.
    fn say(
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

    /// Switches a ring on and brings its head to where it was.
    fn bring_ring(
        &mut self,
        at: usize,
        state: &DirectStateV1,
        view: &GuestView,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        let (ring, saved) = (self.plan.rings[at], state.rings[at]);
        if !saved.on {
            return Ok(());
        }
        let geometry = self.geometry(at)?;
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
                let moved = moved.and_then(|()| self.until_head(at, saved.head, None, around));
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
                let filled = self.fill(at, geometry, &saved, state.kept.address, view, around);
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

    /// Lets frames come until the head is where it was and the last one was written back.
    fn fill(
        &mut self,
        at: usize,
        geometry: Geometry,
        saved: &crate::state::RingStateV1,
        address: [u32; 2],
        view: &GuestView,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        let ring = self.plan.rings[at];
        let [a, b, c, d] = address[0].to_le_bytes();
        let [e, f, ..] = address[1].to_le_bytes();
        self.put(ring.tail, saved.head)?;
        // More frames than are needed find no buffer.
        self.until_head(at, saved.head, Some([a, b, c, d, e, f]), around)?;
        let (word, bit) = ring.table.done;
        loop {
            let last: [u8; 4] = view.bytes(geometry.at(saved.head - 1) + u64::from(word))?;
            if u32::from_le_bytes(last) & bit != 0 {
                return Ok(());
            }
            wait(around, || format!("dummy frames of ring {} are written", ring.table.name))?;
        }
    }

    /// Waits until a head is there, with frames to this address for what is left.
    fn until_head(
        &mut self,
        at: usize,
        head: u32,
        frames: Option<[u8; 6]>,
        around: &mut dyn Surroundings,
    ) -> Result<(), MovingError> {
        let ring = self.plan.rings[at];
        loop {
            let now = self.get(ring.head)?;
            if now == head {
                return Ok(());
            }
            if let Some(address) = frames {
                around.fill(address, head.saturating_sub(now)).map_err(MovingError::Fill)?;
            }
            wait(around, || format!("the head of ring {} comes to {head}", ring.table.name))?;
        }
    }
}

fn wait(around: &mut dyn Surroundings, doing: impl FnOnce() -> String) -> Result<(), MovingError> {
    if around.wait() { Ok(()) } else { Err(MovingError::Deadline { doing: doing() }) }
}

/// Memory that frames are thrown into.
fn dummy_memory(iova: u64) -> Result<MemoryRegion, MovingError> {
    let map = GuestMap::anonymous(DUMMY_LEN)?;
    let spec = map.regions()[0].spec().map_err(MovingError::DummyFile)?;
    Ok(MemoryRegion::map(RegionSpec { gpa: iova, ..spec })?)
}
