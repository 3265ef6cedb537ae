//! The vfio-user protocol, version 0.0, as QEMU's `docs/interop/vfio-user.rst` and `linux/vfio.h` have it. All numbers in the
//! endianness of the machine, all sizes in bytes.
#![allow(missing_docs, reason = "names and values of the specification")]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub const MAJOR: u16 = 0;
pub const MINOR: u16 = 0;

/// Commands of the client.
pub const VERSION: u16 = 1;
pub const DMA_MAP: u16 = 2;
pub const DMA_UNMAP: u16 = 3;
pub const DEVICE_GET_INFO: u16 = 4;
pub const DEVICE_GET_REGION_INFO: u16 = 5;
pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
pub const DEVICE_GET_IRQ_INFO: u16 = 7;
pub const DEVICE_SET_IRQS: u16 = 8;
pub const REGION_READ: u16 = 9;
pub const REGION_WRITE: u16 = 10;
pub const DEVICE_RESET: u16 = 13;
/// Commands of the server.
pub const DMA_READ: u16 = 11;
pub const DMA_WRITE: u16 = 12;
/// Commands of the client that this server refuses: migration, and writes in bundles.
pub const DIRTY_PAGES: u16 = 14;
pub const REGION_WRITE_MULTI: u16 = 15;
pub const DEVICE_FEATURE: u16 = 16;
pub const MIG_DATA_READ: u16 = 17;
pub const MIG_DATA_WRITE: u16 = 18;

/// Bits of [`Header::flags`].
pub const FLAG_TYPE: u32 = 0xf;
pub const TYPE_COMMAND: u32 = 0;
pub const TYPE_REPLY: u32 = 1;
pub const FLAG_NO_REPLY: u32 = 1 << 4;
pub const FLAG_ERROR: u32 = 1 << 5;

/// Our own region capability: pages that the client may map for reading only. Given to those who offered
/// [`SHADOW_CAPABILITY`]. See [`Shadows`].
pub const REGION_CAP_SHADOW: u16 = 0x10f0;
/// Our own boolean in the version's capabilities.
pub const SHADOW_CAPABILITY: &str = "ioplane_shadow_pages";

/// Most bytes of data in one message; told in the version's reply.
pub const MAX_TRANSFER: u32 = 64 << 10;
/// Most descriptors of a message; told in the version's reply. QEMU takes no more than 16.
pub const MAX_FILES: usize = 16;
/// Largest message: a header, [`RegionAccess`] and the data.
pub const MAX_MESSAGE: u32 = (size_of::<Header>() + size_of::<RegionAccess>()) as u32 + MAX_TRANSFER;
/// Longest version data.
pub const MAX_VERSION: usize = 4096;

macro_rules! wire {
    ($(#[$doc:meta])* $name:ident { $($field:ident: $kind:ty),* $(,)? }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        pub struct $name { $(pub $field: $kind),* }
    };
}

wire!(
    /// Before every message. `size` counts the header too.
    Header { id: u16, command: u16, size: u32, flags: u32, error: u32 }
);
wire!(
    /// VERSION; JSON follows.
    Version { major: u16, minor: u16 }
);
wire!(
    /// DMA_MAP.
    DmaMap { argsz: u32, flags: u32, offset: u64, address: u64, size: u64 }
);
wire!(
    /// DMA_UNMAP, and its reply.
    DmaUnmap { argsz: u32, flags: u32, address: u64, size: u64 }
);
wire!(
    /// DEVICE_GET_INFO, and its reply.
    DeviceInfo { argsz: u32, flags: u32, num_regions: u32, num_irqs: u32 }
);
wire!(
    /// DEVICE_GET_REGION_INFO, and its reply; capabilities may follow.
    RegionInfo { argsz: u32, flags: u32, index: u32, cap_offset: u32, size: u64, offset: u64 }
);
wire!(
    /// Begins a capability. `next` counts from the beginning of the [`RegionInfo`].
    CapHeader { id: u16, version: u16, next: u32 }
);
wire!(
    /// After the [`CapHeader`] of the sparse mmap capability; areas follow.
    Sparse { nr_areas: u32, reserved: u32 }
);
wire!(
    /// After the [`CapHeader`] of [`REGION_CAP_SHADOW`]; areas follow. The file is the reply's descriptor of that number, open for
    /// reading only. An area begins in it at `base` plus the area's offset.
    Shadows { nr_areas: u32, descriptor: u32, base: u64 }
);
wire!(
    /// Pages of a region that can be mapped.
    Area { offset: u64, size: u64 }
);
wire!(
    /// DEVICE_GET_REGION_IO_FDS, and its reply.
    RegionIoFds { argsz: u32, flags: u32, index: u32, count: u32 }
);
wire!(
    /// DEVICE_GET_IRQ_INFO, and its reply.
    IrqInfo { argsz: u32, flags: u32, index: u32, count: u32 }
);
wire!(
    /// DEVICE_SET_IRQS; booleans may follow.
    IrqSet { argsz: u32, flags: u32, index: u32, start: u32, count: u32 }
);
wire!(
    /// DMA_READ, DMA_WRITE, and their replies, as the specification has them; data may follow. See [`super::DmaLayout`].
    DmaAccess { address: u64, count: u64 }
);
wire!(
    /// REGION_READ, REGION_WRITE, and their replies; data may follow.
    RegionAccess { offset: u64, region: u32, count: u32 }
);
