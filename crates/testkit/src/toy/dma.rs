//! A toy DMA engine without pollers: the guest drives it by its registers.
//!
//! ```text
//!   idle --START--> busy --a chunk at each read of STATUS, and at each tick--> done
//!    ^               | \-- an address outside memory --> failed
//!    |               v suspend(): the half-done copy is recorded, the engine stands still
//!    +--- RESET    halted --activate()--> busy
//! ```

use std::sync::Arc;

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{
    Access, Activation, AfterStop, Change, Device, DeviceError, DeviceInfo, Effect, Parked, QueueSet,
    Quiescence, QuiescenceProof, RegisterAddress, SavedState, StateError,
};
use ioplane_memory::{GuestMap, GuestView};

use super::{Gate, Word, decode, encode, mix, word};

/// Registers in `RegisterAddress::Bar(0, ..)`, 64 bits each.
pub mod registers {
    /// Guest address to copy from. Ignored while busy, like the next two.
    pub const SOURCE: u64 = 0x00;
    /// Guest address to copy to.
    pub const TARGET: u64 = 0x08;
    /// Bytes to copy: a multiple of [`super::CHUNK`], at most [`super::MAX_LENGTH`].
    pub const LENGTH: u64 = 0x10;
    /// 1 starts, 2 resets.
    pub const COMMAND: u64 = 0x18;
    /// One of the `STATUS_` values; reading it lets the engine take a step.
    pub const STATUS: u64 = 0x20;
    /// Checksum of what was copied, when done.
    pub const SUM: u64 = 0x28;
    /// Two adders, one for each vCPU: a write adds, a read gives the sum.
    pub const ADDER: [u64; 2] = [0x30, 0x38];

    /// Nothing has been started.
    pub const STATUS_IDLE: u64 = 0;
    /// A copy is under way.
    pub const STATUS_BUSY: u64 = 1;
    /// It has ended well.
    pub const STATUS_DONE: u64 = 2;
    /// It met an address outside memory.
    pub const STATUS_FAILED: u64 = 3;
}
use registers::*;

/// Bytes copied in one step.
pub const CHUNK: u64 = 64;
/// Longest copy, in bytes.
pub const MAX_LENGTH: u64 = 1 << 16;

const KIND: &str = "toy-dma";
const VERSION: u32 = 1;

/// What is saved, in this order. `position` is how far a copy has come that is under way.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct EngineV1 {
    source: u64,
    target: u64,
    length: u64,
    status: u64,
    position: u64,
    sum: u64,
    adders: [u64; 2],
}

impl EngineV1 {
    fn words(&self) -> [u64; 8] {
        let EngineV1 { source, target, length, status, position, sum, adders: [a, b] } = *self;
        [source, target, length, status, position, sum, a, b]
    }

    fn of_words(words: &[u64]) -> Result<Self, StateError> {
        let &[source, target, length, status, position, sum, a, b] = words else {
            return Err(StateError::Damaged(format!("{} numbers instead of 8", words.len())));
        };
        Ok(EngineV1 { source, target, length, status, position, sum, adders: [a, b] })
    }

    /// Whether an engine can be in this state, with that memory.
    fn check(&self, memory: &GuestView) -> Result<(), StateError> {
        let impossible = |what: &str| Err(StateError::Impossible(what.to_owned()));
        if self.status > STATUS_FAILED {
            return impossible("a status that is none");
        }
        if self.status != STATUS_BUSY {
            return if self.position == 0 { Ok(()) } else { impossible("a position without a copy") };
        }
        if !valid(self.length) || !self.position.is_multiple_of(CHUNK) || self.position >= self.length {
            return impossible("a copy that is further than its end");
        }
        for gpa in [self.source, self.target] {
            if memory.window(gpa, self.length, 1).is_err() {
                return impossible("a copy outside the guest's memory");
            }
        }
        Ok(())
    }
}

fn valid(length: u64) -> bool {
    length > 0 && length <= MAX_LENGTH && length.is_multiple_of(CHUNK)
}

pub struct ToyDma {
    info: DeviceInfo,
    engine: EngineV1,
    /// A suspended copy does not go on until the device runs again.
    halted: bool,
    memory: GuestView,
    gate: Arc<Gate>,
}

impl ToyDma {
    /// An engine at power-on, on `memory`. While `gate` is shut it takes no steps.
    pub fn new(memory: Arc<GuestMap>, gate: Arc<Gate>) -> Self {
        ToyDma {
            info: DeviceInfo { name: "dma0".into(), kind: KIND, queues: 0 },
            engine: EngineV1::default(),
            halted: false,
            memory: GuestView::new(memory),
            gate,
        }
    }

    /// One step by itself, as hardware does.
    pub fn tick(&mut self) {
        if self.engine.status != STATUS_BUSY || self.halted || self.gate.is_shut() {
            return;
        }
        let engine = &mut self.engine;
        let mut chunk = [0; CHUNK as usize];
        let copied = self
            .memory
            .read(engine.source + engine.position, &mut chunk)
            .and_then(|()| self.memory.write(engine.target + engine.position, &chunk));
        if copied.is_err() {
            (engine.status, engine.position) = (STATUS_FAILED, 0);
            return;
        }
        for word in chunk.as_chunks::<8>().0 {
            engine.sum = mix(engine.sum, u64::from_le_bytes(*word));
        }
        engine.position += CHUNK;
        if engine.position >= engine.length {
            (engine.status, engine.position) = (STATUS_DONE, 0);
        }
    }

    fn start(&mut self) {
        let engine = &mut self.engine;
        if engine.status == STATUS_BUSY {
            return;
        }
        (engine.position, engine.sum) = (0, 0);
        let reaches = |gpa: u64| gpa.checked_add(engine.length).is_some();
        engine.status = if valid(engine.length) && reaches(engine.source) && reaches(engine.target) {
            STATUS_BUSY
        } else {
            STATUS_FAILED
        };
    }

    fn read(&mut self, offset: u64) -> u64 {
        match offset {
            SOURCE => self.engine.source,
            TARGET => self.engine.target,
            LENGTH => self.engine.length,
            STATUS => {
                self.tick();
                self.engine.status
            }
            SUM => self.engine.sum,
            _ => match ADDER.iter().position(|a| *a == offset) {
                Some(which) => self.engine.adders[which],
                None => u64::MAX,
            },
        }
    }

    fn write(&mut self, offset: u64, value: u64) -> Effect {
        let busy = self.engine.status == STATUS_BUSY;
        match offset {
            SOURCE if !busy => self.engine.source = value,
            TARGET if !busy => self.engine.target = value,
            LENGTH if !busy => self.engine.length = value,
            COMMAND if value == 1 => self.start(),
            COMMAND if value == 2 => return Effect::Deactivate(QueueSet::new(), AfterStop::Reset),
            _ => {
                if let Some(which) = ADDER.iter().position(|a| *a == offset) {
                    self.engine.adders[which] = self.engine.adders[which].wrapping_add(value);
                }
            }
        }
        Effect::None
    }
}

impl Device for ToyDma {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        let RegisterAddress::Bar(0, offset) = at else { return Effect::None };
        match word(op) {
            Word::Read(bytes) => bytes.copy_from_slice(&self.read(offset).to_le_bytes()),
            Word::Write(value) => return self.write(offset, value),
            Word::Bad => {}
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        QueueSet::new()
    }

    fn activate(&mut self, _seating: &mut Activation<'_>) -> Result<(), DeviceError> {
        self.halted = false;
        Ok(())
    }

    fn deactivate(&mut self, parked: Parked) {
        unreachable!("{parked:?} of a device without pollers");
    }

    fn quiescence(&mut self) -> Quiescence {
        if self.engine.status == STATUS_BUSY && !self.halted {
            Quiescence::Busy("a copy is under way")
        } else {
            Quiescence::Quiescent
        }
    }

    fn suspend(&mut self) -> Result<(), DeviceError> {
        self.halted = true;
        Ok(())
    }

    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Ok(SavedState { kind: KIND.into(), version: VERSION, body: encode(&self.engine.words()) })
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        let engine = EngineV1::of_words(&decode(state.expect(KIND, VERSION)?)?)?;
        // Invariant 4: whoever wrote this may want the engine to write where it must not.
        if !removed(Invariant::DistrustsLoaded) {
            engine.check(&self.memory)?;
        }
        self.halted = engine.status == STATUS_BUSY;
        self.engine = engine;
        Ok(())
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {
        self.engine = EngineV1::default();
        self.halted = false;
    }

    fn apply(&mut self, _queues: &QueueSet, change: &Change) {
        match change {
            Change::Log(log) => self.memory.set_log(log.clone()),
            Change::Memory(map) => self.memory.set_map(map.clone()),
            _ => {}
        }
    }
}
