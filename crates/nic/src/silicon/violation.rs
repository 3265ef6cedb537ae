//! What a driver, or whoever stands in for it, did that the silicon does not allow.

/// One broken rule of the data sheet. Tests fail on any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SiliconViolation {
    /// An access that is not of 32 aligned bits, or beyond the BAR.
    Access {
        /// Its offset.
        offset: u64,
        /// Its bytes.
        bytes: usize,
    },
    /// A write to a register that does not exist or is read-only, such as a counter.
    ReadOnly {
        /// Its offset.
        offset: u64,
    },
    /// A head was written other than zero.
    Head {
        /// The register.
        offset: u64,
        /// What was written.
        value: u32,
    },
    /// A head, a base, a length or a buffer size was written while the queue was on.
    QueueOn {
        /// The register.
        offset: u64,
    },
    /// A tail other than zero was written while the queue was off.
    TailWhileOff {
        /// The register.
        offset: u64,
        /// What was written.
        value: u32,
    },
    /// A tail beyond the ring.
    TailOutside {
        /// The register.
        offset: u64,
        /// What was written.
        value: u32,
    },
    /// A queue was switched on with a head that is not zero, without a length, or before it was off.
    NotInitialised {
        /// Its control register.
        offset: u64,
    },
    /// A write to the mailbox by a driver that does not hold it.
    MailboxNotHeld {
        /// The register.
        offset: u64,
    },
    /// A message was announced before the PF had taken the last one.
    RequestOnRequest,
    /// A write while the function resets.
    DuringReset {
        /// The register.
        offset: u64,
    },
    /// DMA to an address that the IOMMU does not translate.
    Dma {
        /// The address.
        iova: u64,
    },
    /// A descriptor that is not of the advanced formats.
    Descriptor {
        /// The address of the descriptor.
        iova: u64,
    },
    /// A frame whose context does not fit it, or asks for what is not modelled.
    Offload {
        /// The address of its last descriptor.
        iova: u64,
    },
}
