//! What a front end asks for, what it keeps, why it fails, and how bodies are laid out.

use std::os::fd::OwnedFd;

use super::super::driver::memory::SharedRegion;
use super::protocol;
use super::wire::{FrontEndRequest, FrontSocketError};

/// Why a step did not work.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    #[error("{request:?}: {error}")]
    Wire {
        /// During which request.
        request: FrontEndRequest,
        #[source]
        error: FrontSocketError,
    },
    /// Could not connect.
    #[error("connecting: {0}")]
    Connect(#[source] FrontSocketError),
    /// The back end answered the request with an error (REPLY_ACK).
    #[error("the back end refused {request:?} with {code}")]
    Refused {
        request: FrontEndRequest,
        /// Its code, not zero.
        code: u64,
    },
    /// The feature was not negotiated.
    #[error("the back end does not offer what {0:?} needs")]
    NotOffered(FrontEndRequest),
    /// A ring lies outside the memory that is shared.
    #[error("guest address {0:#x} is in no region")]
    NoSuchAddress(u64),
    /// The kernel said no.
    #[error("eventfd or socket: {0}")]
    Os(#[from] rustix::io::Errno),
}

/// What to ask for. What is negotiated is what the back end offers of it.
#[derive(Debug, Clone, Copy)]
pub struct Wants {
    /// Virtio features; VIRTIO_F_VERSION_1 belongs in it.
    pub features: u64,
    pub protocol: u64,
    /// Ask for an acknowledgement of every message (where REPLY_ACK is negotiated): errors are seen where they happen.
    pub acks: bool,
}

impl Default for Wants {
    /// What QEMU's vhost-user-blk asks for.
    fn default() -> Self {
        use super::super::driver::spec::*;
        Wants {
            features: VIRTIO_F_VERSION_1
                | VIRTIO_F_EVENT_IDX
                | VIRTIO_F_INDIRECT_DESC
                | VIRTIO_BLK_F_SIZE_MAX
                | VIRTIO_BLK_F_SEG_MAX
                | VIRTIO_BLK_F_RO
                | VIRTIO_BLK_F_BLK_SIZE
                | VIRTIO_BLK_F_TOPOLOGY
                | VIRTIO_BLK_F_FLUSH
                | VIRTIO_BLK_F_CONFIG_WCE
                | VIRTIO_BLK_F_MQ
                | VIRTIO_BLK_F_DISCARD
                | VIRTIO_BLK_F_WRITE_ZEROES,
            protocol: protocol::MQ
                | protocol::REPLY_ACK
                | protocol::BACKEND_REQ
                | protocol::CONFIG
                | protocol::INFLIGHT_SHMFD
                | protocol::RESET_DEVICE
                | protocol::CONFIGURE_MEM_SLOTS,
            acks: true,
        }
    }
}

/// The in-flight region: the back end makes it, we keep it and give it to the next back end.
#[derive(Debug)]
pub struct InFlight {
    pub file: OwnedFd,
    /// Length in bytes.
    pub len: u64,
    /// Offset in the file, bytes.
    pub offset: u64,
    pub queues: u16,
    /// Entries of each queue.
    pub size: u16,
}

pub(super) fn wire_error(request: FrontEndRequest, error: FrontSocketError) -> FrontError {
    FrontError::Wire { request, error }
}

/// `struct vhost_vring_state`.
pub fn vring_state(index: u16, number: u32) -> [u8; 8] {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&u32::from(index).to_ne_bytes());
    bytes[4..].copy_from_slice(&number.to_ne_bytes());
    bytes
}

/// A memory region as messages describe it: guest address, size, user address, offset in the file.
pub fn region_bytes(region: &SharedRegion) -> [u8; 32] {
    let mut bytes = [0; 32];
    for (at, number) in [region.gpa, region.len, region.user, region.offset].into_iter().enumerate() {
        bytes[at * 8..at * 8 + 8].copy_from_slice(&number.to_ne_bytes());
    }
    bytes
}

pub(super) fn inflight_bytes(len: u64, offset: u64, queues: u16, size: u16) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&len.to_ne_bytes());
    bytes[8..16].copy_from_slice(&offset.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queues.to_ne_bytes());
    bytes[18..20].copy_from_slice(&size.to_ne_bytes());
    bytes
}

/// Offset, size and flags (writable) of a configuration message.
pub(super) fn config_bytes(offset: u32, len: u32) -> Vec<u8> {
    [offset, len, 1].iter().flat_map(|word: &u32| word.to_ne_bytes()).collect()
}
