//! What a monitor tells a model, and what a model waits for.

use crate::layout::RegisterId;

/// What has happened, as the monitor tells it to the model. Writes and reads of the guest are told *before* the hardware hears of
/// them, all others after they were seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelInput {
    /// The guest writes a register: the whole value ([`Machine::merged`](crate::Machine::merged) makes it of a part).
    Write {
        /// The register.
        register: RegisterId,
        /// The value.
        value: u32,
    },
    /// The guest reads a register.
    Read {
        /// The register.
        register: RegisterId,
    },
    /// These bits have come up in the interrupt status, masked or not.
    Interrupt {
        /// The bits.
        bits: u32,
    },
    /// A ring, by its place in [`StateModel::rings`](crate::StateModel::rings), has no descriptor left that belongs to the hardware.
    Drained {
        /// The ring.
        ring: u8,
    },
    /// A register that [`Machine::awaits`](crate::Machine::awaits) named was read from the hardware.
    Became {
        /// The register.
        register: RegisterId,
        /// What the hardware says.
        value: u32,
    },
    /// The data port has moved as many bytes as were asked for.
    Moved,
    /// A condition that [`Machine::awaits_conditions`](crate::Machine::awaits_conditions) named holds.
    Holds {
        /// The condition, by its place in [`Machine::conditions`](crate::Machine::conditions).
        condition: u8,
    },
}

/// A register of the hardware that a state waits for: once `value & mask == is`, tell [`ModelInput::Became`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Await {
    /// The register.
    pub register: RegisterId,
    /// Bits that are looked at.
    pub mask: u32,
    /// What they must be.
    pub is: u32,
}
