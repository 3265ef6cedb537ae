//! What a table cannot say: the few functions of a model, as the paper's models have them (VPIO, 4.1).
//!
//! A function is given the values of the registers that it names, and nothing else: no hardware, no guest, no state of its own. So
//! [`verify`](crate::verify) can call it, and its tests can try all values. It stands in a row of the table as a pointer; the
//! monitor calls it where the table says so, and does all accesses itself.

use crate::Way;

/// A condition on registers that takes arithmetic: a check ([`Check::Holds`](crate::Check)) or an event
/// ([`On::Holds`](crate::Event)) of a model's own. Each is a static: two are the same if they lie at the same place.
#[derive(Debug, Clone, Copy)]
pub struct Condition {
    /// Its name. A check that fails is counted under it, as a fault of the memory that the guest asked for.
    pub name: &'static str,
    /// What holds then, for people.
    pub words: &'static str,
    /// The registers that it looks at, at most [`VALUES`](crate::VALUES), of up to 4 bytes each.
    pub registers: &'static [&'static str],
    /// Whether it holds, by the values of these registers in this order.
    pub holds: fn(&[u32]) -> bool,
    /// What is wrong where it does not, with the values, for people.
    pub refusal: fn(&[u32]) -> String,
}

impl PartialEq for Condition {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Condition {}

/// A data port: memory of the device, reached through one register. The guest says where it begins, how many bytes, and which way;
/// then it reads or writes the port. The monitor counts what goes through, and moves no byte beyond what was checked.
#[derive(Debug, Clone, Copy)]
pub struct DataPort {
    /// The register that data goes through, of 1, 2 or 4 bytes.
    pub register: &'static str,
    /// Address registers, low byte first.
    pub address: (&'static str, &'static str),
    /// Count registers, low byte first.
    pub count: (&'static str, &'static str),
    /// Registers that show which address a transfer has come to, low byte first. A command without a new address goes on there.
    pub reached: (&'static str, &'static str),
    /// The command register. It is written last.
    pub command: &'static str,
    /// Bits of the command that choose, and their values for reading and for writing.
    pub direction: (u32, u32, u32),
    /// What may be read, by first address and end.
    pub readable: &'static [(u32, u32)],
    /// What may be written: all that a guest can leave there. It is saved where that must be, and wiped between two guests.
    pub writable: &'static [(u32, u32)],
    /// The registers by which [`DataPort::step`] decides, at most [`VALUES`](crate::VALUES).
    pub registers: &'static [&'static str],
    /// The next access of a transfer that has bytes left, of which `wanted` are left of an access of the guest's of `width`.
    /// `None`: nothing more is moved for that access.
    pub step: fn(transfer: Transfer, registers: &[u32], wanted: usize, width: usize) -> Option<PortStep>,
    /// What must hold of the values that [`StateModel::restore`](crate::StateModel) writes before [`Restore::Memory`](crate::Restore),
    /// so that a transfer reaches every byte.
    pub fills: &'static [&'static Condition],
}

/// A transfer through a data port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// The guest reads or writes.
    pub way: Way,
    /// Address of the next byte on the device.
    pub address: u32,
    /// Bytes that are left.
    pub left: u32,
}

/// One access to a data port, as the device takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortStep {
    /// Bytes of the access; no more than were wanted.
    pub width: usize,
    /// Bytes that the device moves for it, which may be more.
    pub moved: u32,
    /// The transfer after it.
    pub after: Transfer,
}
