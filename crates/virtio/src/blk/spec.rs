//! Virtio-blk constants (virtio 1.3, section 5.2), by their names there.

/// Unit of every sector number, in bytes.
pub const SECTOR: u64 = 512;
/// Device ID (section 5).
pub const VIRTIO_ID_BLOCK: u32 = 2;

/// `seg_max` is in the configuration.
pub const VIRTIO_BLK_F_SEG_MAX: u64 = 1 << 2;
/// Geometry is in the configuration.
pub const VIRTIO_BLK_F_GEOMETRY: u64 = 1 << 4;
/// Read-only.
pub const VIRTIO_BLK_F_RO: u64 = 1 << 5;
/// `blk_size` is in the configuration.
pub const VIRTIO_BLK_F_BLK_SIZE: u64 = 1 << 6;
/// Flush requests.
pub const VIRTIO_BLK_F_FLUSH: u64 = 1 << 9;
/// Topology is in the configuration.
pub const VIRTIO_BLK_F_TOPOLOGY: u64 = 1 << 10;
/// The driver may switch between write-back and write-through.
pub const VIRTIO_BLK_F_CONFIG_WCE: u64 = 1 << 11;
/// Several queues.
pub const VIRTIO_BLK_F_MQ: u64 = 1 << 12;
/// Discard requests.
pub const VIRTIO_BLK_F_DISCARD: u64 = 1 << 13;
/// Write-zeroes requests.
pub const VIRTIO_BLK_F_WRITE_ZEROES: u64 = 1 << 14;

/// Read.
pub const VIRTIO_BLK_T_IN: u32 = 0;
/// Write.
pub const VIRTIO_BLK_T_OUT: u32 = 1;
/// Make what was written durable.
pub const VIRTIO_BLK_T_FLUSH: u32 = 4;
/// Tell the device's name.
pub const VIRTIO_BLK_T_GET_ID: u32 = 8;
/// The content of ranges does not matter any more.
pub const VIRTIO_BLK_T_DISCARD: u32 = 11;
/// Ranges read as zeros from now on.
pub const VIRTIO_BLK_T_WRITE_ZEROES: u32 = 13;

/// Bytes of a GET_ID answer.
pub const VIRTIO_BLK_ID_BYTES: usize = 20;
/// Bytes of the header of every request.
pub const HEADER_BYTES: u64 = 16;
/// Bytes of one discard or write-zeroes segment.
pub const SEGMENT_BYTES: u64 = 16;
/// Write zeroes: the space may be freed.
pub const VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP: u32 = 1;

/// Done.
pub const VIRTIO_BLK_S_OK: u8 = 0;
/// Failed.
pub const VIRTIO_BLK_S_IOERR: u8 = 1;
/// Not known here.
pub const VIRTIO_BLK_S_UNSUPP: u8 = 2;

/// Most data buffers of one request that we promise to take.
pub const SEG_MAX: u32 = 126;
/// Largest discard or write-zeroes request, in sectors: 1 GiB, so that one request does not hold a queue for long.
pub const MAX_DISCARD_SECTORS: u32 = 1 << 21;

/// Offsets in the configuration (5.2.4).
#[allow(missing_docs)]
pub mod config {
    pub const CAPACITY: usize = 0;
    pub const SEG_MAX: usize = 12;
    pub const GEOMETRY_CYLINDERS: usize = 16;
    pub const GEOMETRY_HEADS: usize = 18;
    pub const GEOMETRY_SECTORS: usize = 19;
    pub const BLK_SIZE: usize = 20;
    pub const PHYSICAL_BLOCK_EXP: usize = 24;
    pub const MIN_IO_SIZE: usize = 26;
    pub const OPT_IO_SIZE: usize = 28;
    pub const WRITEBACK: usize = 32;
    pub const NUM_QUEUES: usize = 34;
    pub const MAX_DISCARD_SECTORS: usize = 36;
    pub const MAX_DISCARD_SEG: usize = 40;
    pub const DISCARD_SECTOR_ALIGNMENT: usize = 44;
    pub const MAX_WRITE_ZEROES_SECTORS: usize = 48;
    pub const MAX_WRITE_ZEROES_SEG: usize = 52;
    pub const WRITE_ZEROES_MAY_UNMAP: usize = 56;
    /// Bytes of the part that we fill.
    pub const BYTES: usize = 60;
}
