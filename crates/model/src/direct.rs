//! What a model says beside its states of hardware whose rings the guest drives itself: the guest maps the pages of the rings, nobody
//! sees its accesses there, and no descriptor is copied.
//!
//! ```text
//!   StateModel   registers; regions over what is trapped; `halt`, and `restore`: the registers that are written back
//!   DirectModel  which pages are trapped; rings with head and tail; the mailbox and which messages are kept; counters; the order of
//!                bringing all of it back on another function
//! ```

use crate::{Flow, StateModel};

/// Hardware that a guest drives past the monitor, to be moved.
#[derive(Debug, Clone)]
pub struct DirectModel {
    /// Registers and states. It has no rings of its own: those are copied by a monitor.
    pub model: &'static StateModel,
    /// What is done with each page of 4 KiB of the registers, from the first.
    pub pages: &'static [PageRule],
    /// The rings.
    pub rings: &'static [TailRing],
    /// How it talks to the function that has the port.
    pub mailbox: MailboxTable,
    /// Counters that only the hardware writes and that wrap. A guest sees them go on where they were.
    pub counters: &'static [Counter],
    /// How it is brought back, in this order.
    pub replay: &'static [Replay],
}

/// Who answers accesses to a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageRule {
    /// The monitor, always.
    Trapped,
    /// The hardware, always.
    Mapped,
    /// The hardware, and the monitor while the device is being moved: what it writes tells which memory the device may write.
    MappedAtRest,
    /// The same, and the monitor after a move as well, until the driver has reset the device: counters lie on the page, and the
    /// hardware's own are not those that the driver has seen.
    MappedUntilMoved,
}

/// A counter of 32 bits, or of more in two registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counter {
    /// The register, or the one of the low half.
    pub low: &'static str,
    /// The register of the high half and the bits that it has.
    pub high: Option<(&'static str, u32)>,
}

impl Counter {
    /// One of 32 bits.
    pub const fn word(register: &'static str) -> Counter {
        Counter { low: register, high: None }
    }

    /// One whose high half has these bits.
    pub const fn wide(low: &'static str, high: &'static str, bits: u32) -> Counter {
        Counter { low, high: Some((high, bits)) }
    }

    /// All bits of it.
    pub const fn mask(&self) -> u64 {
        match self.high {
            Some((_, bits)) => (bits as u64) << 32 | 0xffff_ffff,
            None => 0xffff_ffff,
        }
    }
}

/// A ring that the hardware follows from its head to a tail that the driver writes. The head is only ever written as zero, while
/// the ring is off.
#[derive(Debug, Clone, Copy)]
pub struct TailRing {
    /// Its name.
    pub name: &'static str,
    /// Registers with its base address: low and high half.
    pub base: (&'static str, &'static str),
    /// The register with its length in bytes.
    pub length: &'static str,
    /// The head.
    pub head: &'static str,
    /// The tail.
    pub tail: &'static str,
    /// The register that switches it on, and its bit. The bit reads as one until the hardware has done with what it has in hand.
    pub enable: (&'static str, u32),
    /// Who fills the buffers.
    pub flow: Flow,
    /// Bytes of a descriptor.
    pub size: u16,
    /// Most descriptors.
    pub most: u32,
    /// Most descriptors that the hardware has taken and not yet written back.
    pub in_hand: u32,
    /// Where the hardware says that it has done with a descriptor: the word's offset, and the bit.
    pub done: (u16, u32),
    /// Its buffers; none where the hardware only reads.
    pub buffers: Option<Buffers>,
    /// How its head is moved without a guest's frame.
    pub dummy: Dummy,
}

/// Where the hardware writes for a descriptor of a receive ring.
#[derive(Debug, Clone, Copy)]
pub struct Buffers {
    /// The register with the sizes.
    pub shape: &'static str,
    /// Offsets of the buffers' addresses in a descriptor: 64 bits, little-endian.
    pub addresses: &'static [u16],
    /// How long each buffer is, by that register; zero: it is not used.
    pub sizes: fn(u32) -> [u32; 2],
}

/// What moves a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dummy {
    /// A descriptor that sends nothing and interrupts nobody, as it stands in memory.
    Descriptor([u32; 4]),
    /// A frame from outside, taken into a buffer that is nobody's. The descriptor has the buffer's address first. Hardware that shares
    /// frames out to several rings keeps those of a flow together: flows are tried until one comes to this ring.
    Frame,
}

/// A mailbox of words: messages go to the function that has the port, and it answers each.
#[derive(Debug, Clone, Copy)]
pub struct MailboxTable {
    /// The register of all words.
    pub memory: &'static str,
    /// The control register.
    pub control: &'static str,
    /// A message waits to be taken; written by who sends it.
    pub request: u32,
    /// The message that came is taken.
    pub acknowledge: u32,
    /// The mailbox is ours while this reads as one.
    pub hold: u32,
    /// It is the other side's.
    pub held: u32,
    /// A message has come.
    pub message: u32,
    /// Ours was taken.
    pub taken: u32,
    /// The reset has ended.
    pub ready: u32,
    /// Of those: bits that reading clears.
    pub latched: u32,
    /// Of the first word of a message: its kind.
    pub kind: u32,
    /// Of an answer: it was accepted.
    pub accepted: u32,
    /// Bits of an answer that refuses. The monitor gives it itself to messages that are of no kind of these, or of which no more can be
    /// kept: what the other side accepts has to be said again on another function.
    pub refused: u32,
    /// The kinds.
    pub messages: &'static [MessageKind],
}

/// A kind of message.
#[derive(Debug, Clone, Copy)]
pub struct MessageKind {
    /// Its name.
    pub name: &'static str,
    /// Its number.
    pub kind: u32,
    /// Words of it that mean something.
    pub words: u8,
    /// What is kept of it.
    pub keep: KeepRule,
}

/// What is kept of accepted messages of a kind, to be said again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepRule {
    /// Nothing.
    Nothing,
    /// It begins anew: everything else that was kept is forgotten. It is said first. Its answer has the function's address from
    /// this word on, as the address message has.
    Begins {
        /// First word of the address.
        address: u8,
    },
    /// The function's address: the last one. Said only where the function has another.
    Address {
        /// First word of the address.
        word: u8,
        /// Messages of the same kind that are about further addresses.
        further: Option<FurtherAddresses>,
    },
    /// The last one.
    Last,
    /// One of each value of a field, as long as bits of the first word say so.
    Each {
        /// Word with the field.
        word: u8,
        /// The field.
        field: u32,
        /// Bits of the first word that add it. None of them: it is taken away.
        adds: u32,
        /// Most that are kept.
        most: u8,
    },
    /// A list of addresses, one in a message from its second word on, in their order. A number in bits of the first word says where it
    /// begins anew.
    List {
        /// The number: zero empties the list, one begins it anew with this element, others add theirs.
        number: u32,
        /// Most that are kept.
        most: u8,
    },
}

/// How a message with an address says that it is about a further one, by all bits of either.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FurtherAddresses {
    /// Of the first word: all of them are taken away.
    pub clear: u32,
    /// Of the first word: this one is added.
    pub add: u32,
    /// Most that are kept.
    pub most: u8,
}

/// A step of bringing it back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Replay {
    /// Say the kept messages.
    Messages,
    /// Switch every ring off and wait until it is: where a reset leaves them as they were.
    Off,
    /// Write [`StateModel::restore`].
    Registers,
    /// Switch a ring on, if it was, and bring its head to where it was.
    Ring(&'static str),
    /// From here on counters go on from where they were: what dummies have counted is left out.
    Counters,
    /// Write the tail of a ring that is on.
    Tail(&'static str),
    /// Write these bits of what was saved of a register.
    Saved(&'static str, u32),
    /// Write a value.
    Value(&'static str, u32),
    /// Signal each vector once: one that was signalled on the source and not taken, or masked, may not have come along.
    Vectors,
}
