//! A device that stands still, as bytes: for another process or host. What is loaded is hostile: all of it is held against the model
//! before anything is touched.

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{DeviceError, SavedState, StateError};
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::{ModelStateV1, Register, RegisterId, Transfer, Way};
use ioplane_pci::spec::CONFIG_SIZE;
use serde::{Deserialize, Serialize};

use super::derive::ReplayInput;
use super::guest::{BlockState, Virtual};
use super::quiescence::QuiescentState;
use super::rings::RingV1;
use super::rings::queue::QueueV1;
use super::words::{Tables, Unread};
use super::{Monitor, bus};

const VERSION: u32 = 1;

/// A saved monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MonitorStateV1 {
    /// Where the model was, and what the guest wrote.
    pub machine: ModelStateV1,
    /// Register and value, for the model's list of restoring.
    pub registers: Vec<(String, u32)>,
    /// Virtual interrupt status.
    pub status: u32,
    /// Virtual interrupt mask.
    pub mask: u32,
    rings: Vec<RingV1>,
    /// Address registers of blocks, low and high half as the guest wrote them, and whether the device was writing it.
    pub blocks: Vec<(u32, u32, bool)>,
    /// Card memory, if it has to be brought back.
    pub card: CardV1,
    /// The configuration space.
    pub config: Vec<u8>,
    /// The policy `stop` had struck.
    pub stopped: bool,
}

/// What is saved of a card's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CardV1 {
    /// All that a guest can write, after a forced stop.
    pub bytes: Option<Vec<u8>>,
    /// A transfer that was cut off.
    pub transfer: Option<TransferV1>,
}

/// A transfer through the data port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferV1 {
    /// The guest reads.
    pub read: bool,
    /// Address of the next byte on the card.
    pub address: u16,
    /// Bytes left.
    pub left: u16,
}

fn impossible(why: impl Into<String>) -> DeviceError {
    StateError::Impossible(why.into()).into()
}

/// What follows for models whose rings are followed to their tails: the lists of the first part that it replaces are empty there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct FollowedV1 {
    /// In the order of the model's list of restoring.
    registers: Vec<u32>,
    queues: Vec<QueueV1>,
    /// Words that are not zero, by the offset of their registers.
    tables: Vec<(u16, u32)>,
    unread: Vec<(u16, u64)>,
}

impl<H: Hardware> Monitor<H> {
    /// Takes what can be told in fewer bytes out of a state.
    fn shorten(&self, saved: &mut MonitorStateV1, parked: &QuiescentState) -> FollowedV1 {
        saved.registers.clear();
        // The list of restoring says them again.
        saved.machine.values.clear();
        let used = saved.config.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        saved.config.truncate(used);
        FollowedV1 {
            registers: parked.registers.iter().map(|(_, value)| *value).collect(),
            queues: parked.queues.clone(),
            tables: parked
                .tables
                .iter()
                .filter(|(_, word)| **word != 0)
                .map(|(at, word)| (*at, *word))
                .collect(),
            unread: parked.unread.iter().map(|(at, count)| (*at, *count)).collect(),
        }
    }

    /// Takes the second part of a state, and puts back what was taken out of the first.
    fn lengthen(&self, saved: &mut MonitorStateV1, more: &FollowedV1) -> Result<(), DeviceError> {
        let wanted: Vec<RegisterId> = self.card.plan.saved().collect();
        if wanted.len() != more.registers.len() || more.queues.len() != self.guest.rings.len() {
            return Err(impossible("registers or rings that the model does not have"));
        }
        let name = |id| self.guest.machine.register(id).name.to_owned();
        saved.registers = wanted.iter().zip(&more.registers).map(|(id, value)| (name(*id), *value)).collect();
        if saved.config.len() < CONFIG_SIZE {
            saved.config.resize(CONFIG_SIZE, 0);
        }
        for (ring, queue) in self.guest.rings.iter().zip(&more.queues) {
            if ring.queue.as_ref().is_none_or(|own| !own.fits(queue)) {
                return Err(impossible(format!("ring {} goes on from what is no context", ring.table.name)));
            }
        }
        let tables: Vec<_> = self.card.plan.tables().map(|id| self.guest.machine.register(id)).collect();
        let inside = |at: &u16| {
            let of = |register: &&&Register| {
                register.offset <= *at
                    && u32::from(*at) + 4 <= u32::from(register.offset) + u32::from(register.width)
            };
            at.is_multiple_of(4) && tables.iter().any(|register| of(&register))
        };
        if let Some((at, _)) = more.tables.iter().find(|(at, _)| !inside(at)) {
            return Err(impossible(format!("a word at {at:#x}, where no table is")));
        }
        let counters = self.card.plan.counters.map_or(0, |(id, _)| self.guest.machine.register(id).width);
        if more.unread.iter().any(|(at, _)| *at >= counters || !at.is_multiple_of(4)) {
            return Err(impossible("counters that the model does not have"));
        }
        Ok(())
    }

    pub(super) fn save_state(&self) -> Result<SavedState, DeviceError> {
        let Some(parked) = &self.card.parked else {
            let function = self.card.info.name.clone();
            let why = HardwareError::Gone { function };
            return Err(DeviceError::Below(Box::new(why)));
        };
        let name = |id| self.guest.machine.register(id).name.to_owned();
        // The states in which it will be when it was brought back, which whoever loads it derives as well.
        let derived = self.derive(parked.grounds(), false);
        let machine = derived
            .map_or_else(|_| parked.machine.save(), |derived| self.corrected(&parked.machine, &derived));
        let mut saved = MonitorStateV1 {
            machine,
            registers: parked.registers.iter().map(|(id, value)| (name(*id), *value)).collect(),
            status: parked.interrupts.status,
            mask: parked.interrupts.mask,
            rings: parked.rings.clone(),
            blocks: parked.blocks.iter().map(|block| (block.low, block.high, block.busy.is_some())).collect(),
            card: CardV1 {
                bytes: parked.memory.clone(),
                transfer: parked.transfer.map(|transfer| TransferV1 {
                    read: transfer.way == Way::Read,
                    address: transfer.address as u16,
                    left: transfer.left.min(0xffff) as u16,
                }),
            },
            config: self.guest.config.save(),
            stopped: self.guest.stopped,
        };
        let damaged = |error: postcard::Error| StateError::Damaged(error.to_string());
        let more = self.card.plan.follows_tails().then(|| self.shorten(&mut saved, parked));
        let mut body = postcard::to_stdvec(&saved).map_err(damaged)?;
        if let Some(more) = &more {
            body.extend(postcard::to_stdvec(more).map_err(damaged)?);
        }
        if body.len() > SavedState::MAX_BODY {
            return Err(StateError::TooLarge(body.len()).into());
        }
        Ok(SavedState { kind: self.card.model.name.to_owned(), version: VERSION, body })
    }

    pub(super) fn load_state(&mut self, state: &SavedState) -> Result<(), DeviceError> {
        let body = state.expect(self.card.model.name, VERSION)?;
        let damaged = |error: postcard::Error| StateError::Damaged(error.to_string());
        let (mut saved, mut rest): (MonitorStateV1, _) = postcard::take_from_bytes(body).map_err(damaged)?;
        let mut more = None;
        if self.card.plan.follows_tails() {
            let (followed, left): (FollowedV1, _) = postcard::take_from_bytes(rest).map_err(damaged)?;
            self.lengthen(&mut saved, &followed)?;
            (more, rest) = (Some(followed), left);
        }
        if !rest.is_empty() {
            return Err(StateError::Damaged(format!("{} bytes too many", rest.len())).into());
        }
        let mut remembered = self.understand(&saved)?;
        if let Some(more) = more {
            remembered.queues = more.queues;
            remembered.tables = more.tables.into_iter().collect();
            remembered.unread = more.unread.into_iter().collect();
        }
        let mut config = self.guest.config.clone();
        if !config.load(&saved.config) {
            return Err(impossible(format!("a configuration space of {} bytes", saved.config.len())));
        }
        // All of it is good. What this device was doing ends here.
        self.force();
        self.guest.config = config;
        self.guest.line.disable(self.guest.config.intx_disabled());
        self.guest.stopped = saved.stopped;
        self.card.parked = Some(Box::new(remembered));
        Ok(())
    }

    /// What was saved, by numbers.
    fn understand(&self, saved: &MonitorStateV1) -> Result<QuiescentState, DeviceError> {
        let mut machine = self.guest.machine.clone();
        machine.load(&saved.machine).map_err(|fault| impossible(fault.to_string()))?;
        let wanted: Vec<_> = self.card.plan.saved().collect();
        let mut registers = Vec::with_capacity(wanted.len());
        for id in wanted {
            let register = self.guest.machine.register(id);
            let Some((_, value)) = saved.registers.iter().find(|(name, _)| name == register.name) else {
                return Err(impossible(format!("register {} is missing", register.name)));
            };
            registers.push((id, *value));
        }
        let transfer = saved.card.transfer.map(|TransferV1 { read, address, left }| Transfer {
            way: if read { Way::Read } else { Way::Write },
            address: address.into(),
            left: left.into(),
        });
        let block = |(table, (low, high, busy)): (&ioplane_model::Block, &(u32, u32, bool))| {
            let gpa = u64::from(low & !table.flags) | u64::from(*high) << 32;
            BlockState { low: *low, high: *high, busy: busy.then_some(gpa) }
        };
        let blocks: Vec<_> = self.card.model.blocks.iter().zip(&saved.blocks).map(block).collect();
        // Invariant 4: whoever wrote this may want what no guest could have done.
        if !removed(Invariant::DistrustsLoaded) {
            self.doubt(saved, &registers)?;
            if transfer.is_some() && self.card.model.port.is_none() {
                return Err(impossible("a transfer of a card without memory"));
            }
            let grounds = ReplayInput { registers: &registers, transfer, blocks: &blocks };
            let derived = self.derive(grounds, true).map_err(impossible)?;
            self.compare(&machine, &derived).map_err(impossible)?;
            let corrected = self.corrected(&machine, &derived);
            machine.load(&corrected).map_err(|fault| impossible(fault.to_string()))?;
        }
        Ok(QuiescentState {
            machine,
            registers,
            interrupts: Virtual { status: saved.status, mask: saved.mask, live: 0 },
            rings: saved.rings.clone(),
            queues: vec![QueueV1::default(); saved.rings.len()],
            tables: Tables::new(),
            unread: Unread::new(),
            blocks,
            transfer,
            memory: saved.card.bytes.clone(),
            foreign: true,
            wipe: saved.card.bytes.is_none(),
        })
    }

    fn doubt(&self, saved: &MonitorStateV1, registers: &[(RegisterId, u32)]) -> Result<(), DeviceError> {
        for (id, value) in registers {
            let register = self.guest.machine.register(*id);
            if value & !bus::full(register) != 0 {
                return Err(impossible(format!("register {} cannot hold {value:#x}", register.name)));
            }
        }
        let status = self.guest.machine.register(self.card.plan.status);
        let mask = self.guest.machine.register(self.card.plan.mask);
        if saved.status & !bus::full(status) != 0 || saved.mask & !bus::full(mask) != 0 {
            return Err(impossible("interrupt status or mask with more bits than there are"));
        }
        if saved.rings.len() != self.guest.rings.len()
            || !self.guest.rings.iter().zip(&saved.rings).all(|(ring, saved)| ring.fits(saved))
        {
            return Err(impossible("rings that the model does not have"));
        }
        // What the hardware would run on is what the guest has enabled.
        for (at, (saved, (enable, bits))) in saved.rings.iter().zip(&self.card.plan.enables).enumerate() {
            // One that is followed to its tail is there always.
            if self.guest.rings[at].queue.is_some() {
                if !saved.running {
                    return Err(impossible("a ring that is not there"));
                }
                continue;
            }
            let on = registers.iter().any(|(id, value)| id == enable && value & bits != 0);
            if on != saved.running {
                return Err(impossible("a ring that is enabled here and not there"));
            }
        }
        if saved.blocks.len() != self.guest.blocks.len() {
            return Err(impossible("blocks that the model does not have"));
        }
        if saved
            .card
            .bytes
            .as_ref()
            .is_some_and(|bytes| bytes.len() != self.memory_size() || bytes.is_empty())
        {
            return Err(impossible("memory that the card does not have"));
        }
        Ok(())
    }
}
