//! Constants of the virtio specification, version 1.3, by their names there.

/// Section 6: ring and transport feature bits.
pub mod feature {
    /// Descriptors may refer to a table of descriptors (2.7.5.3).
    pub const VIRTIO_F_INDIRECT_DESC: u64 = 1 << 28;
    /// Event indexes instead of flags (2.7.7, 2.7.10).
    pub const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
    /// The device conforms to version 1.
    pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;
    /// Packed virtqueues (2.8) instead of split ones.
    pub const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
    /// vhost-user: protocol features can be negotiated.
    pub const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
    /// vhost: every write is logged.
    pub const VHOST_F_LOG_ALL: u64 = 1 << 26;
}

/// Section 2.7: split virtqueues.
pub mod split {
    /// Bytes of one descriptor.
    pub const DESC_SIZE: u64 = 16;
    /// Another descriptor follows.
    pub const VIRTQ_DESC_F_NEXT: u16 = 1;
    /// The device may write the buffer.
    pub const VIRTQ_DESC_F_WRITE: u16 = 2;
    /// The buffer is a table of descriptors.
    pub const VIRTQ_DESC_F_INDIRECT: u16 = 4;
    /// The driver wants no interrupts.
    pub const VIRTQ_AVAIL_F_NO_INTERRUPT: u16 = 1;
    /// The device wants no kicks.
    pub const VIRTQ_USED_F_NO_NOTIFY: u16 = 1;
    /// Largest queue (2.7).
    pub const MAX_SIZE: u16 = 32768;

    /// Bytes of the available ring of `size` entries, with its event field.
    pub const fn avail_bytes(size: u16) -> u64 {
        6 + 2 * size as u64
    }

    /// Bytes of the used ring of `size` entries, with its event field.
    pub const fn used_bytes(size: u16) -> u64 {
        6 + 8 * size as u64
    }

    /// Section 2.7.7.2 and 2.7.10: whether moving an index from `old` to `new` passes `event`.
    #[inline]
    pub const fn passes(event: u16, new: u16, old: u16) -> bool {
        new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
    }
}

/// Section 2.8: packed virtqueues. The flags of a descriptor are those of [`split`], and two more.
pub mod packed {
    /// Matches the driver's wrap counter when the descriptor is available (2.8.1).
    pub const VIRTQ_DESC_F_AVAIL: u16 = 1 << 7;
    /// Matches the device's wrap counter when the descriptor is used (2.8.1).
    pub const VIRTQ_DESC_F_USED: u16 = 1 << 15;
    /// Tell of every descriptor (2.8.10).
    pub const RING_EVENT_FLAGS_ENABLE: u16 = 0;
    /// Tell of none.
    pub const RING_EVENT_FLAGS_DISABLE: u16 = 1;
    /// Tell of one descriptor: only with EVENT_IDX.
    pub const RING_EVENT_FLAGS_DESC: u16 = 2;
    /// The two bits of the flags that mean something.
    pub const RING_EVENT_FLAGS_MASK: u16 = 3;
    /// Bytes of an event suppression structure (2.8.14).
    pub const EVENT_SIZE: u64 = 4;
}

/// Section 4.2: virtio over MMIO, version 2, and section 2.1: the status field.
pub mod mmio {
    /// "virt".
    pub const MAGIC: u32 = 0x7472_6976;
    #[allow(missing_docs)]
    mod registers {
        pub const MAGIC_VALUE: u64 = 0x000;
        pub const VERSION: u64 = 0x004;
        pub const DEVICE_ID: u64 = 0x008;
        pub const VENDOR_ID: u64 = 0x00c;
        pub const DEVICE_FEATURES: u64 = 0x010;
        pub const DEVICE_FEATURES_SEL: u64 = 0x014;
        pub const DRIVER_FEATURES: u64 = 0x020;
        pub const DRIVER_FEATURES_SEL: u64 = 0x024;
        pub const QUEUE_SEL: u64 = 0x030;
        pub const QUEUE_NUM_MAX: u64 = 0x034;
        pub const QUEUE_NUM: u64 = 0x038;
        pub const QUEUE_READY: u64 = 0x044;
        pub const QUEUE_NOTIFY: u64 = 0x050;
        pub const INTERRUPT_STATUS: u64 = 0x060;
        pub const INTERRUPT_ACK: u64 = 0x064;
        pub const STATUS: u64 = 0x070;
        pub const QUEUE_DESC_LOW: u64 = 0x080;
        pub const QUEUE_DESC_HIGH: u64 = 0x084;
        pub const QUEUE_DRIVER_LOW: u64 = 0x090;
        pub const QUEUE_DRIVER_HIGH: u64 = 0x094;
        pub const QUEUE_DEVICE_LOW: u64 = 0x0a0;
        pub const QUEUE_DEVICE_HIGH: u64 = 0x0a4;
        pub const CONFIG_GENERATION: u64 = 0x0fc;
        pub const CONFIG: u64 = 0x100;
    }
    pub use registers::*;
    #[allow(missing_docs)]
    mod status {
        pub const ACKNOWLEDGE: u32 = 1;
        pub const DRIVER: u32 = 2;
        pub const DRIVER_OK: u32 = 4;
        pub const FEATURES_OK: u32 = 8;
        pub const DEVICE_NEEDS_RESET: u32 = 64;
        pub const FAILED: u32 = 128;
    }
    pub use status::*;
    /// Interrupt status: a queue was used.
    pub const INTERRUPT_USED: u32 = 1;
    /// Interrupt status: the configuration changed.
    pub const INTERRUPT_CONFIG: u32 = 2;
}
