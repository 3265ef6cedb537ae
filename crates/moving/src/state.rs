//! A device that stands still, as bytes: a header with version, length and checksum, then what was read of it. At most 1 KiB.
//! What is loaded is a stranger's: all of it is held against the table and the guest's memory before any hardware is touched.

use ioplane_memory::GuestMap;
use ioplane_model::DirectModel;
use serde::{Deserialize, Serialize};

use crate::error::{DirectStateError, MOST, MovingError, VERSION};
use crate::kept::Kept;
use crate::mailbox::GuestMailbox;
use crate::plan::MovePlan;

const MAGIC: [u8; 4] = *b"ioMV";
/// Magic, version, length of what follows the header, checksum of version, length and that.
const HEADER: usize = 12;

/// A ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RingStateV2 {
    pub(super) on: bool,
    pub(super) head: u32,
    pub(super) tail: u32,
}

/// All of a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DirectStateV2 {
    pub(super) model: String,
    /// Values in the order of the plan.
    pub(super) registers: Vec<u32>,
    pub(super) rings: Vec<RingStateV2>,
    /// What the guest sees.
    pub(super) counters: Vec<u64>,
    /// The guest has read the low half of this counter, and is to find this high half.
    pub(super) half: Option<(u8, u32)>,
    pub(super) mailbox: GuestMailbox,
    pub(super) kept: Kept,
}

fn checksum(version: u16, body: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&version.to_le_bytes());
    hasher.update(&(body.len() as u32).to_le_bytes());
    hasher.update(body);
    hasher.finalize()
}

/// A state's bytes behind the header that fits them.
pub fn seal(body: &[u8]) -> Vec<u8> {
    sealed(MAGIC, body)
}

/// The same of what begins with other bytes.
pub(super) fn sealed(magic: [u8; 4], body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend_from_slice(&magic);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    // Longer ones are refused by their length, whatever this says.
    bytes.extend_from_slice(&(body.len() as u16).to_le_bytes());
    bytes.extend_from_slice(&checksum(VERSION, body).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}

/// What is behind a state's header, which fits it: at most [`MOST`] bytes.
pub fn open(bytes: &[u8]) -> Result<&[u8], DirectStateError> {
    opened(MAGIC, bytes)
}

fn opened(magic: [u8; 4], bytes: &[u8]) -> Result<&[u8], DirectStateError> {
    if bytes.len() > MOST {
        return Err(DirectStateError::TooLarge(bytes.len()));
    }
    let Some((header, body)) = bytes.split_at_checked(HEADER).filter(|(header, _)| header[..4] == magic)
    else {
        return Err(DirectStateError::NotAState);
    };
    let version = u16::from_le_bytes([header[4], header[5]]);
    let says = usize::from(u16::from_le_bytes([header[6], header[7]]));
    let sum = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
    if version != VERSION {
        return Err(DirectStateError::Version(version));
    }
    if says != body.len() {
        return Err(DirectStateError::Length { has: body.len(), says });
    }
    if sum != checksum(version, body) {
        return Err(DirectStateError::Checksum);
    }
    Ok(body)
}

/// Behind a header, at most [`MOST`] bytes.
pub(super) fn encode<S: Serialize>(magic: [u8; 4], what: &S) -> Result<Vec<u8>, DirectStateError> {
    let body = postcard::to_stdvec(what).map_err(|error| DirectStateError::Damaged(error.to_string()))?;
    let bytes = sealed(magic, &body);
    if bytes.len() > MOST { Err(DirectStateError::TooLarge(bytes.len())) } else { Ok(bytes) }
}

/// What a stranger has encoded so, and nothing behind it.
pub(super) fn decode<'b, S: Deserialize<'b>>(magic: [u8; 4], bytes: &'b [u8]) -> Result<S, DirectStateError> {
    match postcard::take_from_bytes(opened(magic, bytes)?) {
        Ok((what, [])) => Ok(what),
        Ok((_, rest)) => Err(DirectStateError::Damaged(format!("{} bytes too many", rest.len()))),
        Err(error) => Err(DirectStateError::Damaged(error.to_string())),
    }
}

/// Whether a stranger speaks of this model.
pub(super) fn is_of(plan: &MovePlan, model: &str) -> Result<(), DirectStateError> {
    match model == plan.table.model.name {
        true => Ok(()),
        false => Err(DirectStateError::OtherModel(model.chars().take(40).collect())),
    }
}

impl DirectStateV2 {
    pub(super) fn encode(&self) -> Result<Vec<u8>, DirectStateError> {
        encode(MAGIC, self)
    }

    /// Reads a stranger's state: whole and possible, or refused.
    pub(super) fn load(plan: &MovePlan, memory: &GuestMap, bytes: &[u8]) -> Result<Self, DirectStateError> {
        let state: Self = decode(MAGIC, bytes)?;
        is_of(plan, &state.model)?;
        state.doubt(plan, memory).map_err(DirectStateError::Impossible)?;
        Ok(state)
    }

    fn doubt(&self, plan: &MovePlan, memory: &GuestMap) -> Result<(), String> {
        if self.registers.len() != plan.saved.len()
            || self.rings.len() != plan.rings.len()
            || self.counters.len() != plan.counters.len()
        {
            return Err("registers, rings or counters that the model does not have".to_owned());
        }
        for (register, value) in plan.saved.iter().zip(&self.registers) {
            if value & !register.mask != 0 {
                return Err(format!("{} holds {value:#x}", register.name));
            }
        }
        for (counter, value) in plan.counters.iter().zip(&self.counters) {
            if value & !counter.mask != 0 {
                return Err(format!("a counter of {value:#x}"));
            }
        }
        if let Some((at, high)) = self.half {
            let counter = plan.counters.get(usize::from(at));
            if counter
                .is_none_or(|counter| counter.high.is_none() || u64::from(high) & !(counter.mask >> 32) != 0)
            {
                return Err(format!("half a counter {at} of {high:#x}"));
            }
        }
        for at in 0..self.rings.len() {
            self.doubt_ring(plan, memory, at)?;
        }
        let mailbox = &plan.table.mailbox;
        if self.mailbox.bits & !(mailbox.hold | mailbox.latched) != 0 {
            return Err(format!("mailbox bits {:#x}", self.mailbox.bits));
        }
        self.kept.doubt(mailbox)
    }

    /// Where a ring is.
    pub(super) fn geometry(&self, plan: &MovePlan, at: usize) -> Geometry {
        let ring = &plan.rings[at];
        let value = |offset: u64| {
            let found = plan.saved.iter().position(|register| register.offset == offset);
            found.map_or(0, |at| self.registers[at])
        };
        Geometry {
            base: u64::from(value(ring.base.0)) | u64::from(value(ring.base.1)) << 32,
            length: value(ring.length),
            size: ring.table.size,
        }
    }

    fn doubt_ring(&self, plan: &MovePlan, memory: &GuestMap, at: usize) -> Result<(), String> {
        let (ring, state) = (&plan.rings[at], &self.rings[at]);
        if !state.on {
            return if (state.head, state.tail) == (0, 0) {
                Ok(())
            } else {
                Err(format!("ring {} is off and has a head", ring.table.name))
            };
        }
        let geometry = self.geometry(plan, at);
        let count = geometry.count();
        if count == 0 || count > ring.table.most || state.head >= count || state.tail >= count {
            return Err(format!(
                "ring {} of {count} with {} and {}",
                ring.table.name, state.head, state.tail
            ));
        }
        if !inside(memory, geometry.base, u64::from(geometry.length)) {
            return Err(format!("ring {} lies outside of the guest's memory", ring.table.name));
        }
        Ok(())
    }
}

/// Whether a range lies in one region of memory that can be written.
pub(super) fn inside(memory: &GuestMap, from: u64, len: u64) -> bool {
    let Some(end) = from.checked_add(len) else { return false };
    memory
        .regions()
        .iter()
        .any(|region| region.writable() && from >= region.gpa() && end - region.gpa() <= region.len())
}

/// Where a ring lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) base: u64,
    /// Bytes.
    pub(super) length: u32,
    pub(super) size: u16,
}

impl Geometry {
    pub(super) fn count(&self) -> u32 {
        self.length / u32::from(self.size.max(1))
    }

    pub(super) fn at(&self, index: u32) -> u64 {
        self.base.wrapping_add(u64::from(index) * u64::from(self.size))
    }
}

/// Whether a stranger's bytes are a state that `table` could take, for a guest with that memory. Touches nothing: what a host asks
/// before anything is stopped, and what the fuzz target calls.
pub fn check(table: &'static DirectModel, memory: &GuestMap, bytes: &[u8]) -> Result<(), MovingError> {
    DirectStateV2::load(&MovePlan::new(table)?, memory, bytes)?;
    Ok(())
}
