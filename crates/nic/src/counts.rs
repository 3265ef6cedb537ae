//! What a NIC counts for its owner.

/// Counts since the instance was made. Not part of the saved state: what the guest may see of them is, in the chip's own counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct ChipCounts {
    /// Reads of registers that were trapped.
    pub reads: u64,
    /// Writes of registers.
    pub writes: u64,
    /// Accesses to the configuration space.
    pub config: u64,
    /// Frames that the guest sent: given to the switch, or looped back.
    pub sent: u64,
    /// Bytes of these.
    pub sent_bytes: u64,
    /// Frames that the guest has received.
    pub received: u64,
    /// Bytes of these.
    pub received_bytes: u64,
    /// Frames that came to nothing.
    pub drops: Drops,
    /// DMA to where the guest has no memory, of a ring, a buffer or card memory.
    pub faults: u64,
    /// Interrupts signalled.
    pub interrupts: u64,
    /// Resets by the guest.
    pub resets: u64,
}

/// Why frames came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct Drops {
    /// Received while the receiver was off, or not allowed to use memory.
    pub disabled: u64,
    /// Received, and for somebody else.
    pub filtered: u64,
    /// Received, and longer than any room there can be, or lost because there was none.
    pub no_room: u64,
    /// Received or to be sent, and its ring or buffer is outside the guest's memory.
    pub fault: u64,
    /// To be sent, and not described as a frame: too long, without a beginning or an end.
    pub malformed: u64,
    /// To be sent, and refused by the switch: its port says why.
    pub refused: u64,
}
