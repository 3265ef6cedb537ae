//! Why memory could not be mapped, or a map not be made.

use crate::filesystem::FileSystem;
use crate::quota::{CLIENTS, MAX_MAPPINGS, MAX_REGIONS};

/// Why a mapping could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MappingError {
    /// The peer promised more bytes than the file has.
    #[error(
        "the file behind the region has {file} bytes, but the region reaches to byte {end}: refuse the region"
    )]
    BeyondFile {
        /// Size of the file, bytes.
        file: u64,
        /// Where the region ends in it, bytes.
        end: u64,
    },
    /// Empty, not page-aligned, or larger than the address space.
    #[error(
        "a region of {len} bytes at file offset {offset} cannot be mapped: both must be page-aligned and not zero"
    )]
    Shape {
        /// Offset in the file, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
    },
    /// Not a file in memory, and no other was allowed.
    #[error(
        "memory from {0}: a page fault on it can wait for a disk, a network or another process, and all guests of an I/O core with it; \
         share memory from a memfd (libvirt: <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>; QEMU: \
         -object memory-backend-memfd,share=on), tmpfs or hugetlbfs, or allow it on this socket with guest_memory = \"any\""
    )]
    Slow(FileSystem),
    /// A device, a pipe, a socket.
    #[error("memory from a descriptor that is not a regular file: share it from a memfd")]
    NotAFile,
    /// One client has taken all that it may.
    #[error("this client has {most} mappings, the most that one may have: let it use fewer memory regions")]
    OverQuota {
        /// How many.
        most: usize,
    },
    /// Clients have taken all that is there beyond what is each one's own.
    #[error(
        "this client has the {own} mappings that are its own, and other clients have taken all that there are beyond: use fewer memory \
         regions (`mappings` in `ioplane status --json` says whose they are), or start a second daemon"
    )]
    PoolEmpty {
        /// How many are each client's own.
        own: usize,
    },
    /// More sockets than there are accounts.
    #[error("one process serves {CLIENTS} sockets at most: start a second daemon")]
    TooManyClients,
    /// More would be pinned for hardware than this client may.
    #[error(
        "{more} bytes more would be pinned for hardware, {now} are, and this client may have {most}: give its guest less memory, or \
         raise pinned_memory on this socket"
    )]
    TooMuchPinned {
        /// Pinned already.
        now: u64,
        /// Asked for.
        more: u64,
        /// Allowed.
        most: u64,
    },
    /// All of [`MAX_MAPPINGS`] are taken.
    #[error("more than {MAX_MAPPINGS} mappings: detach VMs, or start a second daemon")]
    TooMany,
    /// The kernel said no.
    #[error("mapping shared memory: {0} (is the memory limit of the service too low?)")]
    Os(#[from] rustix::io::Errno),
}

impl MappingError {
    /// A short name, for counters.
    pub fn name(&self) -> &'static str {
        match self {
            MappingError::Slow(_) => "slow_memory",
            MappingError::OverQuota { .. }
            | MappingError::PoolEmpty { .. }
            | MappingError::TooMany
            | MappingError::TooManyClients => "too_many_mappings",
            MappingError::TooMuchPinned { .. } => "too_much_pinned",
            _ => "bad_memory",
        }
    }
}

/// Why a map could not be made or changed.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Two regions share addresses.
    #[error("guest region {at:#x}+{len:#x} overlaps one at {other:#x}: the front end must not send it")]
    Overlap {
        /// Start of the region refused.
        at: u64,
        /// Its length.
        len: u64,
        /// Start of the region that is there.
        other: u64,
    },
    /// The region runs past the end of the address space.
    #[error("guest region {at:#x}+{len:#x} runs past the end of the address space")]
    Wraps {
        /// Start of the region refused.
        at: u64,
        /// Its length.
        len: u64,
    },
    /// More than [`MAX_REGIONS`].
    #[error("more than {MAX_REGIONS} guest regions")]
    TooMany,
    /// Asked to remove what is not there.
    #[error("no guest region {at:#x}+{len:#x} to remove")]
    NoSuchRegion {
        /// Start asked for.
        at: u64,
        /// Length asked for.
        len: u64,
    },
    /// The bytes could not be mapped.
    #[error(transparent)]
    Mapping(#[from] MappingError),
}

impl MapError {
    /// A short name, for counters.
    pub fn name(&self) -> &'static str {
        match self {
            MapError::Mapping(error) => error.name(),
            _ => "bad_memory",
        }
    }
}
