//! Rings that the hardware follows from a head to a tail, descriptors of several formats in one ring, and counters that reading clears.

use crate::Given;

/// Most formats of the descriptors of one ring.
pub const FORMATS: usize = 4;

/// How a ring is driven whose descriptors are the hardware's from the head on to before the tail.
#[derive(Debug, Clone, Copy)]
pub struct TailQueue {
    /// The register with the length of the ring in bytes.
    pub length: &'static str,
    /// The length is a multiple of this, in bytes.
    pub unit: u32,
    /// The head: the next descriptor of the hardware.
    pub head: &'static str,
    /// The tail: the first that is the driver's again. Writing it rings.
    pub tail: &'static str,
    /// The formats of its descriptors, at most [`FORMATS`]. The first that fits is a descriptor's.
    pub formats: &'static [DescriptorFormat],
}

/// One format of descriptors: words of 32 bits, little-endian.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorFormat {
    /// Its name.
    pub name: &'static str,
    /// Descriptors are of it whose word has these bits so: word, mask, value.
    pub tag: (u8, u32, u32),
    /// And only if a register says so.
    pub given: Option<Given>,
    /// Its buffer, if it has one.
    pub buffer: Option<DescriptorBuffer>,
    /// The hardware says here that it has done with it: word and bit.
    pub done: (u8, u32),
    /// It says so only if asked to by this bit: word and bit. `None`: always.
    pub report: Option<(u8, u32)>,
    /// The last descriptor of a frame: word and bit. `None`: outside of a frame it stands for itself.
    pub last: Option<(u8, u32)>,
    /// Words that the hardware writes, one bit each.
    pub written: u8,
    /// It sets what later descriptors refer to. There are two such sets, chosen by this bit of it: word and bit.
    pub context: Option<(u8, u32)>,
}

/// The buffer of a descriptor.
#[derive(Debug, Clone, Copy)]
pub struct DescriptorBuffer {
    /// First of the two words with its address.
    pub address: u8,
    /// Its length.
    pub length: BufferLength,
}

/// Where the length of a buffer is.
#[derive(Debug, Clone, Copy)]
pub enum BufferLength {
    /// Bits of a word of the descriptor, in bytes.
    Field(u8, u32),
    /// The same for all descriptors, by the value of a register, in bytes.
    By(&'static str, fn(u32) -> u32),
}

/// Counters in adjacent words, each of which reading clears. A guest that goes on elsewhere finds what it had not yet read.
#[derive(Debug, Clone, Copy)]
pub struct CounterBlock {
    /// The register that they are, of more than 4 bytes.
    pub register: &'static str,
    /// Offsets in it of counters of 64 bits: the low half is read first, and reading the high half clears both.
    pub wide: &'static [u16],
}
