//! Device state models: tables that say when hardware driven by a guest may change hands, what has to be seen for that, and what
//! is checked before the hardware hears of it.
//!
//! ```text
//!   StateModel (a table, readable beside the data sheet; a few functions for what a table cannot say)
//!      |-- verify()   at start and in tests: holes, unreachable states, names that mean nothing
//!      |-- draw       the diagram of docs/guide, from the same table
//!      '-- Machine    init(), update(event) -> Verdict, hooked(access), reusable(), deinit(): what runs
//! ```
//!
//! The interface is that of the paper (VPIO, section 3): `init`, `update`, `check`, `deinit`, hooking and unhooking of
//! ports by state, access to the ports through the monitor. A model is written as a few small regions side by side; the
//! device is reusable when each of them is in a reusable state.
//!
//! Must not know: hardware, guests, who carries a check out, any device.
#![forbid(unsafe_code)]

mod compile;
mod descriptors;
mod direct;
pub mod draw;
mod fault;
mod functions;
mod input;
mod layout;
mod limits;
mod machine;
mod rows;
mod saved;
#[cfg(test)]
mod tests;
pub mod verify;
pub mod words;

pub use descriptors::{BufferLength, CounterBlock, DescriptorBuffer, DescriptorFormat, FORMATS, TailQueue};
pub use direct::{
    Buffers, Counter, DirectModel, Dummy, FurtherAddresses, KeepRule, MailboxTable, MessageKind, PageRule,
    Replay, TailRing,
};
pub use fault::{ModelFault, TableFlaw};
pub use functions::{Condition, DataPort, PortStep, Transfer};
pub use input::{Await, ModelInput};
pub use layout::{AccessPieces, Piece, RegisterId};
pub use limits::VALUES;
pub use machine::{Machine, Moves, Pending, Verdict};
pub use saved::ModelStateV1;

/// The model of one kind of device.
#[derive(Debug, Clone)]
pub struct StateModel {
    /// Its name, on the command line: `rtl8139`.
    pub name: &'static str,
    /// What it is, for people.
    pub title: &'static str,
    /// The functions that it fits.
    pub ids: &'static [Id],
    /// The BAR whose registers it knows; others that show the same registers.
    pub bar: u8,
    /// BARs through which the same registers are reached.
    pub aliases: &'static [u8],
    /// Bytes of registers that it knows; what lies beyond is denied.
    pub size: u16,
    /// How banks of registers are chosen, if there are any.
    pub banks: Option<Banks>,
    /// Every register, by offset.
    pub registers: &'static [Register],
    /// Its interrupts.
    pub interrupts: Interrupts,
    /// The regions, side by side.
    pub regions: &'static [Region],
    /// Descriptor rings in guest memory; none for a device that never is a bus master.
    pub rings: &'static [DescriptorRing],
    /// Other places of guest memory that it writes or reads.
    pub blocks: &'static [Block],
    /// Counters that reading clears.
    pub counters: Option<CounterBlock>,
    /// Memory of its own that guests reach through one of its registers.
    pub port: Option<DataPort>,
    /// How to reset it by its registers.
    pub reset: Reset,
    /// What keeps it from starting anything by itself (receiving): written before a last look, when it is about to change hands.
    /// Not written on behalf of the guest: the model does not hear of it.
    pub halt: &'static [Restore],
    /// What is written to bring a saved one back, in this order.
    pub restore: &'static [Restore],
    /// Regions whose states those writes do not tell: frames on the card, a ring that drains. What a saved device says of them is
    /// believed, so their states may only decide whether it changes hands: every state makes the checks of the first. The states of
    /// all other regions are derived.
    pub told: &'static [&'static str],
}

/// A function that a model fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id {
    /// Vendor.
    pub vendor: u16,
    /// Device.
    pub device: u16,
    /// Revisions, if not all.
    pub revisions: Option<(u8, u8)>,
}

impl Id {
    /// Whether it is that of such a function.
    pub fn fits(&self, vendor: u16, device: u16, revision: u8) -> bool {
        let revisions = self.revisions.is_none_or(|(first, last)| (first..=last).contains(&revision));
        self.vendor == vendor && self.device == device && revisions
    }
}

/// Which way an access goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Way {
    /// The guest reads.
    Read,
    /// The guest writes.
    Write,
}

/// Banks: the same offset is another register by what a field of one register says.
#[derive(Debug, Clone, Copy)]
pub struct Banks {
    /// The register with the field; it is in every bank.
    pub register: &'static str,
    /// The field.
    pub mask: u8,
    /// How far to shift it down to have the bank's number.
    pub shift: u8,
    /// Bits of the register that are written as they were last when the monitor chooses a bank for itself.
    pub keep: u8,
    /// Bits that it sets then, so that nothing starts. It does so only while no region is busy that could mind
    /// ([`Machine::awaits`]).
    pub set: u8,
}

/// What reading a register does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reads {
    /// Gives what was written last; no effect.
    Plain,
    /// The device changes it by itself; no effect.
    Alive,
    /// Has an effect on the device, such as the next word of a data port.
    Effect,
    /// Cannot be read, or reads as another register: what was written is kept by the monitor.
    Never,
}

/// What writing a register does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writes {
    /// Sets it; no other effect.
    Plain,
    /// Clears the bits that are one.
    Clears,
    /// Starts or stops something.
    Trigger,
    /// Sets the bits that are one.
    Sets,
    /// Nothing.
    Never,
}

/// One register.
#[derive(Debug, Clone, Copy)]
pub struct Register {
    /// Its name in the data sheet.
    pub name: &'static str,
    /// First byte.
    pub offset: u16,
    /// Bytes. Of registers above 4 bytes (patterns, tables) no value is kept and no event can name them.
    pub width: u16,
    /// The bank that it is in; `None`: in all. Two registers may share an offset if one is only read and the other only written.
    pub bank: Option<u8>,
    /// Reading it.
    pub reads: Reads,
    /// Writing it.
    pub writes: Writes,
    /// When the monitor has to see an access, beyond what the states say.
    pub hook: Hook,
    /// Names of bits and fields, for people; wider fields before their parts.
    pub bits: &'static [(&'static str, u32)],
    /// Bits that the hardware never hears of. The guest reads them as it wrote them; they are zero after a reset.
    pub kept: u32,
}

/// When accesses to a register are hooked: seen by the monitor's model. What is not hooked goes straight to the hardware (or is
/// answered from a shadow) and costs no update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// Where a state's list names it.
    ByState,
    /// Writes, always (its value is needed later, or it carries an address).
    Writes,
    /// Reads and writes, always (virtual: interrupt status and mask).
    Both,
}

/// The interrupt status and mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupts {
    /// Status register, write one to clear.
    pub status: &'static str,
    /// Mask register, one enables.
    pub mask: &'static str,
    /// Bits of the status that interrupt.
    pub bits: u32,
    /// Bits that show a condition and are not cleared by writing (read from the hardware each time).
    pub live: u32,
    /// Bits that speak of frames and of nothing else: no register but the status and mask changes with them. They come often, so
    /// that nothing else is read from the hardware for a shadow page.
    pub traffic: u32,
    /// The bit with which the device says that a bus access failed: what policy `error` raises.
    pub error: u32,
    /// The mask is set by one register and cleared by another.
    pub split: Option<SplitMask>,
}

/// Interrupts whose mask is set by writing ones to [`Interrupts::mask`] and cleared by writing ones to another register. Reading the status
/// clears it if the mask is empty or an interrupt is asserted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SplitMask {
    /// Ones written here clear the mask.
    pub clear: &'static str,
    /// Ones written here set the status.
    pub cause: &'static str,
    /// Bits of the mask that an access to the status clears while an interrupt is asserted.
    pub auto: &'static str,
    /// The register and the bit that switch that on.
    pub auto_on: (&'static str, u32),
    /// Of the status: an interrupt is asserted.
    pub asserted: u32,
}

impl Interrupts {
    /// Its interrupts are messages that reach the guest past the monitor.
    pub const PAST_THE_MONITOR: Interrupts =
        Interrupts { status: "", mask: "", bits: 0, live: 0, traffic: 0, error: 0, split: None };
}

/// States that exclude each other, and what leads from one to another.
#[derive(Debug, Clone, Copy)]
pub struct Region {
    /// Its name.
    pub name: &'static str,
    /// Its states; the first is where it begins after a reset.
    pub states: &'static [State],
    /// What leads where. The first that fits is taken; none: the state stays.
    pub transitions: &'static [Transition],
}

/// One state.
#[derive(Debug, Clone, Copy)]
pub struct State {
    /// Its name.
    pub name: &'static str,
    /// Whether the device may change hands here, as far as this region goes.
    pub reusable: bool,
    /// Registers of [`Hook::ByState`] that are hooked here, and which way.
    pub hooks: &'static [(&'static str, Way)],
    /// Once for people: what the device does here.
    pub note: &'static str,
}

/// One edge.
#[derive(Debug, Clone, Copy)]
pub struct Transition {
    /// From this state; `"*"`: from any.
    pub from: &'static str,
    /// On this event.
    pub on: On,
    /// Only if a register that was written earlier says so.
    pub given: Option<Given>,
    /// To this state; [`STAY`]; [`RESET`].
    pub to: &'static str,
    /// What is checked before the hardware hears of the event. A failed check is a fault: the event does not happen.
    pub checks: &'static [Check],
}

/// [`Transition::from`]: any state of the region.
pub const ANY: &str = "*";
/// [`Transition::to`]: the state stays.
pub const STAY: &str = "=";
/// [`Transition::to`]: the device resets. Every region begins again with its first state, and what was written is forgotten.
pub const RESET: &str = "!";

/// A condition on what was last written to a register (by the very write that is the event, too): `value & mask == is`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Given {
    /// The register; its writes are always hooked.
    pub register: &'static str,
    /// Bits that are looked at.
    pub mask: u32,
    /// What they must be.
    pub is: u32,
}

/// What can happen to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// A write to the register with `value & mask == is`. A mask of zero: any write.
    Write {
        /// The register.
        register: &'static str,
        /// Bits that are looked at.
        mask: u32,
        /// What they must be.
        is: u32,
    },
    /// A write that sets any of these bits.
    Sets {
        /// The register.
        register: &'static str,
        /// The bits.
        any: u32,
    },
    /// A read of the register.
    Read {
        /// The register.
        register: &'static str,
    },
    /// The interrupt status has any of these bits (virtual status, whether masked or not).
    Interrupt {
        /// The bits.
        any: u32,
    },
    /// A ring has no descriptor left that belongs to the hardware.
    Drained {
        /// The ring.
        ring: &'static str,
    },
    /// A field of a register (asked of the hardware by the monitor while a state waits for it) has become this.
    Became {
        /// The register.
        register: &'static str,
        /// Bits that are looked at.
        mask: u32,
        /// What they must be.
        is: u32,
    },
    /// The data port has moved as many bytes as were asked for (counted by the monitor).
    Moved,
    /// A condition of the model's own has come to hold (asked of the hardware by the monitor while a state waits for it; of a register
    /// that cannot be read, what was written counts).
    Holds(&'static Condition),
}

/// What is looked at before the hardware hears of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Every descriptor that belongs to the hardware lies, with its buffer, in guest memory; the ring ends within its limit. The
    /// hardware gets copies.
    Descriptors(&'static str),
    /// The base address of a ring is aligned and the ring lies in guest memory.
    Base(&'static str),
    /// The block lies in guest memory.
    Block(&'static str),
    /// A condition of the model's own holds, the write done. Registers that a data port has moved are asked of the hardware before.
    Holds(&'static Condition),
    /// Never allowed; says why. A fault.
    Deny(&'static str),
    /// Without a meaning here: the hardware does not hear of it, a read gives zero. No fault. Says why.
    Ignore(&'static str),
}

/// A ring of descriptors in guest memory. The monitor owns the one that the hardware sees.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorRing {
    /// Its name.
    pub name: &'static str,
    /// Registers with its base address: low and high half.
    pub base: (&'static str, &'static str),
    /// Alignment of the base, in bytes.
    pub align: u64,
    /// Most descriptors.
    pub most: u16,
    /// Who fills the buffers.
    pub flow: Flow,
    /// Its descriptors.
    pub descriptor: DescriptorLayout,
    /// For transmit: the register and bit that make the hardware look. Receive rings are looked at by the hardware at all times.
    pub doorbell: Option<(&'static str, u32)>,
    /// The register and bit that let the hardware run on this ring. Whenever it is written set, the hardware begins again at the
    /// first descriptor, unless it follows a tail.
    pub enable: (&'static str, u32),
    /// Which descriptors are the hardware's is said by registers, not by a bit of each: `descriptor` has the size, the other fields
    /// but the length mean nothing. `doorbell` is not used.
    pub queue: Option<TailQueue>,
}

/// Which way data flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Out of guest memory.
    Transmit,
    /// Into guest memory.
    Receive,
}

/// The layout of a descriptor: offsets in bytes, words little-endian of 32 bits.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorLayout {
    /// Bytes.
    pub size: u16,
    /// The word with ownership and length.
    pub status: u16,
    /// Set: the hardware's.
    pub own: u32,
    /// Set: the last of the ring.
    pub end: u32,
    /// Bytes of the buffer.
    pub length: u32,
    /// Low and high half of the buffer's address.
    pub address: (u16, u16),
}

/// A place in guest memory that the device writes when a bit of a register says so.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    /// Its name.
    pub name: &'static str,
    /// Registers with its address: low half (with flags in the low bits), high half.
    pub base: (&'static str, &'static str),
    /// Bits of the low half that are flags, not address.
    pub flags: u32,
    /// The flag that starts it; the device clears it at the end.
    pub start: u32,
    /// Bytes.
    pub size: u32,
}

/// How to reset a device by its registers.
#[derive(Debug, Clone, Copy)]
pub struct Reset {
    /// Written or, for a port whose reading resets, read.
    pub by: (&'static str, Way, u32),
    /// Done when these bits of that register are so.
    pub done: (&'static str, u32, u32),
    /// Milliseconds after the write in which the device is left alone.
    pub settle: u8,
}

/// One step of bringing a saved device back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restore {
    /// Write the saved value of the register, these bits of it only.
    Saved(&'static str, u32),
    /// Write these bits of the saved value, with those bits set.
    With(&'static str, u32, u32),
    /// Write a value.
    Value(&'static str, u32),
    /// The register is not brought back; says why.
    Lost(&'static str, &'static str),
    /// Point a ring at the monitor's descriptors.
    Ring(&'static str),
    /// Put back what was saved of the memory behind the data port, or fill it with zeros.
    Memory,
    /// The register, which only the card sets, is shown to the guest as it was, until one of these bits of the interrupt status comes
    /// up: then the card has set it anew. Without bits: until the guest writes it.
    Shown(&'static str, u32),
    /// Write a table of words (a register of more than 4 bytes) as the guest wrote it; words that it never wrote are zero, but for this
    /// many at its beginning, which a reset of the card sets.
    Table(&'static str, u16),
}
