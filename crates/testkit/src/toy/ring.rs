//! A toy with two rings that its pollers serve: the control half, and the driver's end of a ring.
//!
//! A ring is two pages of guest memory. The driver's: how many requests it has published, whether it wants interrupts,
//! and the requests. The device's: how many it has answered, when it wants to be kicked, and the answers. A request is a
//! number; its answer mixes it with all requests before it, so that one lost, repeated or overtaken shows in every answer
//! that follows.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{
    Access, Activation, AfterStop, Change, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet,
    QuiescenceProof, RegisterAddress, SavedState, StateError,
};
use ioplane_memory::{GuestMap, GuestView, PAGE, Window};

use super::ring_poller::RingPoller;
pub use super::wires::{Counted, DEPTH, QUEUES, RING_BYTES, Wires};
use super::wires::{QueueV1, layout, passes};
use super::{Word, decode, encode, word};

/// Registers in `RegisterAddress::Bar(0, ..)`, 64 bits each.
pub mod registers {
    /// Guest address of the rings, one after the other. Ignored while any runs.
    pub const RINGS: u64 = 0x00;
    /// Bit `n`: queue `n` runs.
    pub const ENABLE: u64 = 0x08;
    /// Any write resets.
    pub const RESET: u64 = 0x10;
    /// Interrupts sent so far, of both queues; only for the guest to have something to read.
    pub const ALIVE: u64 = 0x18;
    /// As in the toy DMA engine.
    pub const ADDER: [u64; 2] = [0x20, 0x28];
}
use registers::*;

const KIND: &str = "toy-ring";
const VERSION: u32 = 1;

/// The control half.
pub struct ToyRing {
    info: DeviceInfo,
    memory: GuestView,
    wires: Arc<Wires>,
    rings: u64,
    enabled: QueueSet,
    queues: [QueueV1; QUEUES as usize],
    adders: [u64; 2],
}

impl ToyRing {
    /// A device at power-on, on `memory`.
    pub fn new(memory: Arc<GuestMap>, wires: Arc<Wires>) -> Self {
        ToyRing {
            info: DeviceInfo { name: "ring0".into(), kind: KIND, queues: QUEUES },
            memory: GuestView::new(memory),
            wires,
            rings: 0,
            enabled: QueueSet::new(),
            queues: Default::default(),
            adders: [0; 2],
        }
    }

    fn windows(&self, rings: u64, queue: u16) -> Result<[Window; 2], DeviceError> {
        let guest = |why: String| DeviceError::Guest { queue, why };
        let at = rings.checked_add(u64::from(queue) * RING_BYTES).ok_or_else(|| guest("wraps".into()))?;
        let window = |gpa| self.memory.window(gpa, PAGE, PAGE).map_err(|e| guest(e.to_string()));
        let device = at.checked_add(PAGE).ok_or_else(|| guest("wraps".into()))?;
        Ok([window(at)?, window(device)?])
    }

    fn enable(&mut self, bits: u64) -> Effect {
        let wanted: QueueSet = (0..QUEUES).filter(|q| bits & (1 << q) != 0).collect();
        let stopped: QueueSet = self.enabled.difference(&wanted).copied().collect();
        self.enabled = wanted.clone();
        if stopped.is_empty() {
            Effect::Activate(wanted)
        } else {
            Effect::Deactivate(stopped, AfterStop::Nothing)
        }
    }
}

impl Device for ToyRing {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        let RegisterAddress::Bar(0, offset) = at else { return Effect::None };
        let adder = ADDER.iter().position(|a| *a == offset);
        match word(op) {
            Word::Read(bytes) => {
                let value = match (offset, adder) {
                    (RINGS, _) => self.rings,
                    (ENABLE, _) => self.enabled.iter().map(|q| 1 << q).sum(),
                    (ALIVE, _) => self.wires.calls.iter().map(|c| c.count()).sum(),
                    (_, Some(which)) => self.adders[which],
                    _ => u64::MAX,
                };
                bytes.copy_from_slice(&value.to_le_bytes());
            }
            Word::Write(value) => match (offset, adder) {
                (RINGS, _) if self.enabled.is_empty() => self.rings = value,
                (ENABLE, _) => return self.enable(value),
                (RESET, _) => return Effect::Deactivate((0..QUEUES).collect(), AfterStop::Reset),
                (_, Some(which)) => self.adders[which] = self.adders[which].wrapping_add(value),
                _ => {}
            },
            Word::Bad => {}
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        self.enabled.clone()
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        for queue in activation.queues().clone() {
            if queue >= QUEUES {
                return Err(DeviceError::NoSuchQueue(queue));
            }
            let [driver, device] = self.windows(self.rings, queue)?;
            let start = self.queues[usize::from(queue)];
            let wires = self.wires.clone();
            let poller = RingPoller::new(self.memory.clone(), driver, device, queue, start, wires);
            activation.add(queue, Box::new(poller));
        }
        Ok(())
    }

    fn deactivate(&mut self, parked: Parked) {
        let queue = usize::from(parked.queue());
        if let Ok(poller) = parked.into_poller::<RingPoller>() {
            self.queues[queue] = poller.state();
        }
    }

    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        let enabled = self.enabled.iter().map(|q| 1 << q).sum();
        let mut words = vec![self.rings, enabled, self.adders[0], self.adders[1]];
        for queue in &self.queues {
            words.extend([u64::from(queue.answered), u64::from(queue.in_flight), queue.sum]);
        }
        Ok(SavedState { kind: KIND.into(), version: VERSION, body: encode(&words) })
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        let words = decode(state.expect(KIND, VERSION)?)?;
        let &[rings, enabled, a, b, answered0, flight0, sum0, answered1, flight1, sum1] = words.as_slice()
        else {
            return Err(StateError::Damaged(format!("{} numbers instead of 10", words.len())).into());
        };
        let queue = |answered: u64, in_flight: u64, sum| {
            let queue = QueueV1 { answered: answered as u16, in_flight: in_flight as u16, sum };
            // Invariant 4, here and below.
            if !removed(Invariant::DistrustsLoaded) {
                if answered > u64::from(u16::MAX) || in_flight > u64::from(u16::MAX) {
                    return Err(StateError::Impossible("an index of more than 16 bits".into()));
                }
                queue.check()?;
            }
            Ok(queue)
        };
        let queues = [queue(answered0, flight0, sum0)?, queue(answered1, flight1, sum1)?];
        let enabled_set: QueueSet = (0..QUEUES).filter(|q| enabled & (1 << q) != 0).collect();
        if !removed(Invariant::DistrustsLoaded) {
            if enabled >> QUEUES != 0 {
                return Err(StateError::Impossible("more queues than there are".into()).into());
            }
            for queue in &enabled_set {
                self.windows(rings, *queue)?;
            }
        }
        (self.rings, self.enabled, self.adders, self.queues) = (rings, enabled_set, [a, b], queues);
        Ok(())
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {
        self.rings = 0;
        self.enabled.clear();
        self.queues = Default::default();
        self.adders = [0; 2];
    }

    fn apply(&mut self, _queues: &QueueSet, change: &Change) {
        match change {
            Change::Log(log) => self.memory.set_log(log.clone()),
            Change::Memory(map) => self.memory.set_map(map.clone()),
            _ => {}
        }
    }
}

/// The driver's end of one ring: one thread's.
#[derive(Debug)]
pub struct RingDriver {
    driver: Window,
    device: Window,
    kick: Arc<OwnedFd>,
    published: u16,
    taken: u16,
}

impl RingDriver {
    /// The driver of `queue`, of rings at guest address `rings`.
    pub fn new(memory: &Arc<GuestMap>, wires: &Wires, rings: u64, queue: u16) -> Self {
        let view = GuestView::new(memory.clone());
        let at = rings + u64::from(queue) * RING_BYTES;
        let window = |gpa| view.window(gpa, PAGE, PAGE).expect("rings in guest memory");
        RingDriver {
            driver: window(at),
            device: window(at + PAGE),
            kick: wires.kicks[usize::from(queue)].clone(),
            published: 0,
            taken: 0,
        }
    }

    /// Requests published and not answered.
    pub fn outstanding(&self) -> u16 {
        self.published.wrapping_sub(self.taken)
    }

    /// Publishes a request; true if the device asked to be kicked for it. The caller then kicks.
    pub fn publish(&mut self, request: u64) -> bool {
        assert!(self.outstanding() < DEPTH, "the ring is full");
        self.driver.put_u64(layout::slot(self.published), request);
        let old = self.published;
        self.published = old.wrapping_add(1);
        self.driver.put_u16(layout::INDEX, self.published);
        fence(Ordering::SeqCst);
        passes(self.device.load_u16(layout::EVENT), self.published, old)
    }

    pub fn kick(&self) {
        let _ = rustix::io::write(&*self.kick, &1u64.to_ne_bytes());
    }

    /// Takes the next answer, if there is one.
    pub fn answer(&mut self) -> Option<u64> {
        if self.device.load_u16(layout::INDEX) == self.taken {
            return None;
        }
        let answer = self.device.load_u64(layout::slot(self.taken));
        self.taken = self.taken.wrapping_add(1);
        Some(answer)
    }

    /// Asks for an interrupt when the next answer comes, or for none for a long time.
    pub fn want_interrupts(&self, wanted: bool) {
        let event = if wanted { self.taken } else { self.taken.wrapping_sub(1).wrapping_add(1 << 15) };
        self.driver.put_u16(layout::EVENT, event);
    }
}
