//! What can be wrong with a ring, by name.

use ioplane_memory::GuestFault;

use crate::journal::JournalFault;

/// What a driver did wrong with a ring. The queue stops; the name is what is counted and shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// The size is not a power of two, or too large.
    #[error("a queue of {0} entries: not a power of two, or more than the device takes")]
    BadSize(u16),
    /// Addresses outside memory, misaligned, or memory that went away.
    #[error(transparent)]
    Memory(#[from] GuestFault),
    /// The available index ran ahead of what the queue can hold.
    #[error("the available index jumped to {index}, {ahead} ahead: more than the queue's {size}")]
    IndexJump {
        /// The index found.
        index: u16,
        /// How far ahead of us it is.
        ahead: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A descriptor number beyond the table.
    #[error("descriptor {0} is beyond the table")]
    BadDescriptor(u16),
    /// A chain longer than its table: a loop.
    #[error("descriptor chain from {0} does not end: a loop")]
    Loop(u16),
    /// The same head made available twice.
    #[error("head {0} was made available while it is in flight")]
    HeadInFlight(u16),
    /// An indirect table that is empty, ragged, too long, nested, or not negotiated.
    #[error("the indirect table of descriptor {0} is malformed")]
    BadIndirect(u16),
    /// A device-readable buffer after a device-writable one (2.7.4.2).
    #[error("a readable buffer follows a writable one in the chain of {0}")]
    ReadableAfterWritable(u16),
    /// The lengths of one chain add up to more than 4 GiB (2.7.5).
    #[error("the chain of {0} is longer than 4 GiB")]
    TooLong(u16),
    /// A request that has no place for its answer.
    #[error("the request at {0} has no room for a header or a status")]
    NoStatus(u16),
    /// The ring's indexes contradict each other at the start.
    #[error("the ring starts with available index {avail} and used index {used}: more than {size} in flight")]
    BadStart {
        /// Where the device is to go on.
        avail: u16,
        /// What the used ring shows.
        used: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A packed ring is to begin where rings begin, and has been used further: the front end has lost its place.
    #[error(
        "the packed ring has been used beyond the place that the front end names, its beginning: nobody knows where to go \
         on until the guest's driver sets the queue up again"
    )]
    LostPlace,
    /// The journal of a crash cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalFault),
}

impl RingFault {
    /// A short name, for counters.
    pub fn name(&self) -> &'static str {
        match self {
            RingFault::BadSize(_) => "bad_size",
            RingFault::Memory(GuestFault::OutsideMemory { .. }) => "outside_memory",
            RingFault::Memory(GuestFault::ReadOnly { .. }) => "read_only_memory",
            RingFault::Memory(GuestFault::Misaligned { .. }) => "misaligned",
            RingFault::Memory(GuestFault::MemoryShrank) => "memory_shrank",
            RingFault::IndexJump { .. } => "index_jump",
            RingFault::BadDescriptor(_) => "bad_descriptor",
            RingFault::Loop(_) => "descriptor_loop",
            RingFault::HeadInFlight(_) => "head_in_flight",
            RingFault::BadIndirect(_) => "bad_indirect",
            RingFault::ReadableAfterWritable(_) => "readable_after_writable",
            RingFault::TooLong(_) => "chain_too_long",
            RingFault::NoStatus(_) => "no_status",
            RingFault::BadStart { .. } => "bad_start",
            RingFault::LostPlace => "lost_place",
            RingFault::Journal(JournalFault::Deadly(_)) => "deadly_request",
            RingFault::Journal(_) => "bad_journal",
        }
    }
}
