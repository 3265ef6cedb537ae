//! Numbers of the virtio 1.3 specification as the driver needs them, under the specification's names.

/// 2.7.5: the descriptor goes on in `next`.
pub const VIRTQ_DESC_F_NEXT: u16 = 1;
/// 2.7.5: the device writes this buffer.
pub const VIRTQ_DESC_F_WRITE: u16 = 2;
/// 2.7.5.3: the buffer is a table of descriptors.
pub const VIRTQ_DESC_F_INDIRECT: u16 = 4;
/// 2.7.6: the driver does not want interrupts (without EVENT_IDX).
pub const VIRTQ_AVAIL_F_NO_INTERRUPT: u16 = 1;
/// 2.7.8: the device does not want kicks (without EVENT_IDX).
pub const VIRTQ_USED_F_NO_NOTIFY: u16 = 1;

/// 2.8.1: matches the driver's wrap counter when a packed descriptor is available.
pub const VIRTQ_DESC_F_AVAIL: u16 = 1 << 7;
/// 2.8.1: matches the device's wrap counter when a packed descriptor is used.
pub const VIRTQ_DESC_F_USED: u16 = 1 << 15;
/// 2.8.10: event suppression structures say: tell of everything, of nothing, of one descriptor.
pub const RING_EVENT_FLAGS_ENABLE: u16 = 0;
pub const RING_EVENT_FLAGS_DISABLE: u16 = 1;
pub const RING_EVENT_FLAGS_DESC: u16 = 2;
/// Size of an event suppression structure, bytes.
pub const EVENT_SIZE: u64 = 4;
/// vhost-user, vring base of a packed ring: both indexes 0, both wrap counters 1.
pub const PACKED_START: u32 = 0x8000_8000;

/// Size of a descriptor, bytes.
pub const DESC_SIZE: u64 = 16;
/// Size of an element of the used ring, bytes.
pub const USED_SIZE: u64 = 8;

pub const VIRTIO_F_INDIRECT_DESC: u64 = 1 << 28;
pub const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;
pub const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
pub const VIRTIO_F_RING_RESET: u64 = 1 << 40;

pub const VIRTIO_BLK_F_SIZE_MAX: u64 = 1 << 1;
pub const VIRTIO_BLK_F_SEG_MAX: u64 = 1 << 2;
pub const VIRTIO_BLK_F_RO: u64 = 1 << 5;
pub const VIRTIO_BLK_F_BLK_SIZE: u64 = 1 << 6;
pub const VIRTIO_BLK_F_FLUSH: u64 = 1 << 9;
pub const VIRTIO_BLK_F_TOPOLOGY: u64 = 1 << 10;
pub const VIRTIO_BLK_F_CONFIG_WCE: u64 = 1 << 11;
pub const VIRTIO_BLK_F_MQ: u64 = 1 << 12;
pub const VIRTIO_BLK_F_DISCARD: u64 = 1 << 13;
pub const VIRTIO_BLK_F_WRITE_ZEROES: u64 = 1 << 14;

pub const VIRTIO_BLK_T_IN: u32 = 0;
pub const VIRTIO_BLK_T_OUT: u32 = 1;
pub const VIRTIO_BLK_T_FLUSH: u32 = 4;
pub const VIRTIO_BLK_T_GET_ID: u32 = 8;
pub const VIRTIO_BLK_T_DISCARD: u32 = 11;
pub const VIRTIO_BLK_T_WRITE_ZEROES: u32 = 13;

pub const VIRTIO_BLK_S_OK: u8 = 0;
pub const VIRTIO_BLK_S_IOERR: u8 = 1;
pub const VIRTIO_BLK_S_UNSUPP: u8 = 2;

/// 5.2.6: `sector` counts these, whatever the block size.
pub const SECTOR: u64 = 512;
/// 5.2.6: what GET_ID returns, bytes.
pub const VIRTIO_BLK_ID_BYTES: u32 = 20;
/// 5.2.6: `unmap` in a WRITE_ZEROES range.
pub const VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP: u32 = 1;
