//! The mailbox, as a guest sees it: its words and bits are ours, and a message goes to the function's own mailbox when all of it is
//! there. So a guest may be stopped between any two of its accesses, and goes on with the mailbox of another function.

use ioplane_hardware::{Hardware, HardwareError};
use serde::{Deserialize, Serialize};

use crate::plan::MovePlan;

/// Words of the longest mailbox.
const WORDS: usize = 16;

/// The guest's view. Hostile when it was loaded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GuestMailbox {
    pub(super) words: [u32; WORDS],
    /// Hold, message, taken, ready.
    pub(super) bits: u32,
    /// A message has come that the guest has not taken.
    pub(super) unread: bool,
}

/// A message of the guest on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sending {
    Nothing,
    /// To be written to the function's mailbox.
    Waits([u32; WORDS]),
    /// There; the answer is to come.
    Asked([u32; WORDS]),
}

/// What the function's own mailbox has told us.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Latched {
    pub(super) taken: bool,
    pub(super) ready: bool,
    /// A message waits to be taken.
    pub(super) message: bool,
}

/// A function's own mailbox.
pub(super) struct Line<'a, H> {
    pub(super) hardware: &'a mut H,
    pub(super) plan: &'a MovePlan,
    pub(super) latched: &'a mut Latched,
}

impl<H: Hardware> Line<'_, H> {
    fn get(&mut self, offset: u64) -> Result<u32, HardwareError> {
        let mut bytes = [0; 4];
        self.hardware.read(self.plan.bar, offset, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn put(&mut self, offset: u64, value: u32) -> Result<(), HardwareError> {
        self.hardware.write(self.plan.bar, offset, &value.to_le_bytes())
    }

    /// Looks at the control register, and keeps what reading it clears.
    pub(super) fn look(&mut self) -> Result<u32, HardwareError> {
        let value = self.get(self.plan.control)?;
        let table = &self.plan.table.mailbox;
        self.latched.taken |= value & table.taken != 0;
        self.latched.ready |= value & table.ready != 0;
        self.latched.message |= value & table.message != 0;
        Ok(value)
    }

    /// Whether the mailbox is ours now.
    fn hold(&mut self) -> Result<bool, HardwareError> {
        let hold = self.plan.table.mailbox.hold;
        self.put(self.plan.control, hold)?;
        Ok(self.look()? & hold != 0)
    }

    /// Sends a message. `false`: the mailbox is the other side's just now.
    pub(super) fn send(&mut self, words: &[u32]) -> Result<bool, HardwareError> {
        if !self.hold()? {
            return Ok(false);
        }
        for (at, word) in (0..).zip(words) {
            self.put(self.plan.memory + 4 * at, *word)?;
        }
        self.latched.taken = false;
        self.put(self.plan.control, self.plan.table.mailbox.request)?;
        Ok(true)
    }

    /// Takes the message that waits. `None`: the mailbox is the other side's just now.
    pub(super) fn take(&mut self) -> Result<Option<[u32; WORDS]>, HardwareError> {
        if !self.hold()? {
            return Ok(None);
        }
        let mut words = [0; WORDS];
        for (at, word) in (0..).zip(&mut words).take(self.plan.words) {
            *word = self.get(self.plan.memory + 4 * at)?;
        }
        self.latched.message = false;
        self.put(self.plan.control, self.plan.table.mailbox.acknowledge)?;
        Ok(Some(words))
    }
}
