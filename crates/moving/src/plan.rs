//! What a table's names mean: offsets, looked up once.

use ioplane_model::verify::verify_direct;
use ioplane_model::{Buffers, DirectModel, Flow, MessageKind, PageRule, Replay, Restore, TailRing};

use crate::error::MovingError;

/// Bytes of a page of registers.
const PAGE: u64 = 4096;

/// A ring, by offsets.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingPlan {
    pub(super) table: &'static TailRing,
    pub(super) base: (u64, u64),
    pub(super) length: u64,
    pub(super) head: u64,
    pub(super) tail: u64,
    pub(super) control: u64,
    pub(super) enable: u32,
    pub(super) buffers: Option<(u64, &'static Buffers)>,
}

impl RingPlan {
    pub(super) fn receives(&self) -> bool {
        self.table.flow == Flow::Receive
    }
}

/// A register whose value is saved: these bits of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SavedRegister {
    pub(super) name: &'static str,
    pub(super) offset: u64,
    pub(super) mask: u32,
}

/// A counter, by offsets.
#[derive(Debug, Clone, Copy)]
pub(super) struct CounterPlan {
    pub(super) low: u64,
    pub(super) high: Option<u64>,
    /// Its bits.
    pub(super) mask: u64,
    /// It lies on a page that the guest maps again after a reset.
    pub(super) mapped: bool,
}

/// A step, by numbers.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    Messages,
    Off,
    /// Those of [`MovePlan::saved`] before this place.
    Registers(usize),
    Ring(usize),
    Counters,
    Tail(usize),
    /// By its place in [`MovePlan::saved`].
    Saved(usize),
    Value(u64, u32),
    Vectors,
}

/// A table, by offsets.
#[derive(Debug)]
pub(super) struct MovePlan {
    pub(super) table: &'static DirectModel,
    pub(super) bar: u8,
    pub(super) rings: Vec<RingPlan>,
    pub(super) counters: Vec<CounterPlan>,
    pub(super) memory: u64,
    pub(super) words: usize,
    pub(super) control: u64,
    pub(super) saved: Vec<SavedRegister>,
    pub(super) steps: Vec<Step>,
    pub(super) halt: Vec<(u64, u32)>,
}

impl MovePlan {
    pub(super) fn new(table: &'static DirectModel) -> Result<Self, MovingError> {
        let model = table.model;
        let fault = |why: String| MovingError::Model { model: model.name, why };
        if let Some(flaw) = verify_direct(table).first() {
            return Err(fault(flaw.to_string()));
        }
        let register = |name: &str| {
            let found = model.registers.iter().find(|register| register.name == name);
            found.ok_or_else(|| fault(format!("there is no register {name:?}")))
        };
        let at = |name: &str| register(name).map(|register| u64::from(register.offset));
        let ring = |ring: &'static TailRing| -> Result<RingPlan, MovingError> {
            Ok(RingPlan {
                table: ring,
                base: (at(ring.base.0)?, at(ring.base.1)?),
                length: at(ring.length)?,
                head: at(ring.head)?,
                tail: at(ring.tail)?,
                control: at(ring.enable.0)?,
                enable: ring.enable.1,
                buffers: match &ring.buffers {
                    Some(buffers) => Some((at(buffers.shape)?, buffers)),
                    None => None,
                },
            })
        };
        let counter = |counter: &ioplane_model::Counter| -> Result<CounterPlan, MovingError> {
            let low = at(counter.low)?;
            let high = counter.high.map(|(name, _)| at(name)).transpose()?;
            let page = usize::try_from(low / PAGE).ok().and_then(|page| table.pages.get(page));
            let mapped = page == Some(&PageRule::MappedUntilMoved);
            Ok(CounterPlan { low, high, mask: counter.mask(), mapped })
        };
        let mut saved = Vec::new();
        for step in model.restore {
            match *step {
                Restore::Saved(name, mask) => saved.push(SavedRegister { name, offset: at(name)?, mask }),
                Restore::Lost(..) => {}
                _ => return Err(fault(format!("{step:?} is not for a device that guests drive themselves"))),
            }
        }
        let restored = saved.len();
        let place = |name: &str| {
            let found = table.rings.iter().position(|ring| ring.name == name);
            found.ok_or_else(|| fault(format!("there is no ring {name:?}")))
        };
        let mut steps = Vec::new();
        for step in table.replay {
            steps.push(match *step {
                Replay::Messages => Step::Messages,
                Replay::Off => Step::Off,
                Replay::Registers => Step::Registers(restored),
                Replay::Ring(name) => Step::Ring(place(name)?),
                Replay::Counters => Step::Counters,
                Replay::Tail(name) => Step::Tail(place(name)?),
                Replay::Saved(name, mask) => {
                    saved.push(SavedRegister { name, offset: at(name)?, mask });
                    Step::Saved(saved.len() - 1)
                }
                Replay::Value(name, value) => Step::Value(at(name)?, value),
                Replay::Vectors => Step::Vectors,
            });
        }
        let mut halt = Vec::new();
        for step in model.halt {
            if let Restore::Value(name, value) = *step {
                halt.push((at(name)?, value));
            }
        }
        Ok(MovePlan {
            table,
            bar: model.bar,
            rings: table.rings.iter().map(ring).collect::<Result<_, _>>()?,
            counters: table.counters.iter().map(counter).collect::<Result<_, _>>()?,
            memory: at(table.mailbox.memory)?,
            words: usize::from(register(table.mailbox.memory)?.width) / 4,
            control: at(table.mailbox.control)?,
            saved,
            steps,
            halt,
        })
    }

    /// Where a register is.
    pub(super) fn offset(&self, name: &str) -> Result<u64, MovingError> {
        let model = self.table.model;
        let found = model.registers.iter().find(|register| register.name == name);
        let no = || MovingError::Model { model: model.name, why: format!("there is no register {name:?}") };
        found.map(|register| u64::from(register.offset)).ok_or_else(no)
    }

    /// The kind of a message.
    pub(super) fn message(&self, first: u32) -> Option<(usize, &'static MessageKind)> {
        let kind = first & self.table.mailbox.kind;
        self.table.mailbox.messages.iter().enumerate().find(|(_, message)| message.kind == kind)
    }
}
