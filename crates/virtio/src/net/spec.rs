//! Constants of virtio-net (virtio 1.3, section 5.1), by their names there.

/// Device ID (5.1.1).
pub const VIRTIO_ID_NET: u32 = 1;

/// The device takes frames whose checksum is to be completed (5.1.3).
pub const VIRTIO_NET_F_CSUM: u64 = 1 << 0;
/// The driver takes such frames.
pub const VIRTIO_NET_F_GUEST_CSUM: u64 = 1 << 1;
/// What the driver takes can be changed by the control queue.
pub const VIRTIO_NET_F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
/// The configuration has the MTU.
pub const VIRTIO_NET_F_MTU: u64 = 1 << 3;
/// The configuration has a MAC address.
pub const VIRTIO_NET_F_MAC: u64 = 1 << 5;
/// The driver takes large TCP frames over IPv4.
pub const VIRTIO_NET_F_GUEST_TSO4: u64 = 1 << 7;
/// The driver takes large TCP frames over IPv6.
pub const VIRTIO_NET_F_GUEST_TSO6: u64 = 1 << 8;
/// The driver takes large TCP frames with ECN.
pub const VIRTIO_NET_F_GUEST_ECN: u64 = 1 << 9;
/// The device takes large TCP frames over IPv4.
pub const VIRTIO_NET_F_HOST_TSO4: u64 = 1 << 11;
/// The device takes large TCP frames over IPv6.
pub const VIRTIO_NET_F_HOST_TSO6: u64 = 1 << 12;
/// The device takes large TCP frames with ECN.
pub const VIRTIO_NET_F_HOST_ECN: u64 = 1 << 13;
/// A frame may lie in several receive buffers.
pub const VIRTIO_NET_F_MRG_RXBUF: u64 = 1 << 15;
/// The configuration has the link's status.
pub const VIRTIO_NET_F_STATUS: u64 = 1 << 16;
/// There is a control queue.
pub const VIRTIO_NET_F_CTRL_VQ: u64 = 1 << 17;
/// Receive modes and the table of addresses.
pub const VIRTIO_NET_F_CTRL_RX: u64 = 1 << 18;
/// The VLAN filter.
pub const VIRTIO_NET_F_CTRL_VLAN: u64 = 1 << 19;
/// More receive modes.
pub const VIRTIO_NET_F_CTRL_RX_EXTRA: u64 = 1 << 20;
/// The driver announces its address when it is asked to.
pub const VIRTIO_NET_F_GUEST_ANNOUNCE: u64 = 1 << 21;
/// Several queue pairs.
pub const VIRTIO_NET_F_MQ: u64 = 1 << 22;
/// The MAC address can be set by the control queue.
pub const VIRTIO_NET_F_CTRL_MAC_ADDR: u64 = 1 << 23;
/// The driver takes large UDP datagrams over IPv4.
pub const VIRTIO_NET_F_GUEST_USO4: u64 = 1 << 54;
/// The driver takes large UDP datagrams over IPv6.
pub const VIRTIO_NET_F_GUEST_USO6: u64 = 1 << 55;
/// The device takes large UDP datagrams.
pub const VIRTIO_NET_F_HOST_USO: u64 = 1 << 56;

/// Features that a driver can switch by VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET: they stand at the same bits there (5.1.6.5.6).
pub const GUEST_OFFLOADS: u64 = VIRTIO_NET_F_GUEST_CSUM
    | VIRTIO_NET_F_GUEST_TSO4
    | VIRTIO_NET_F_GUEST_TSO6
    | VIRTIO_NET_F_GUEST_ECN
    | VIRTIO_NET_F_GUEST_USO4
    | VIRTIO_NET_F_GUEST_USO6;

/// Features that mean nothing without a control queue (5.1.3.1).
pub const NEED_CTRL_VQ: u64 = VIRTIO_NET_F_CTRL_RX
    | VIRTIO_NET_F_CTRL_VLAN
    | VIRTIO_NET_F_CTRL_RX_EXTRA
    | VIRTIO_NET_F_CTRL_MAC_ADDR
    | VIRTIO_NET_F_CTRL_GUEST_OFFLOADS;

/// The checksum from `csum_start` on is to be completed (5.1.6).
pub const VIRTIO_NET_HDR_F_NEEDS_CSUM: u8 = 1;
/// The checksum has been verified.
pub const VIRTIO_NET_HDR_F_DATA_VALID: u8 = 2;

/// One frame, as it is.
pub const VIRTIO_NET_HDR_GSO_NONE: u8 = 0;
/// TCP over IPv4, to be segmented.
pub const VIRTIO_NET_HDR_GSO_TCPV4: u8 = 1;
/// TCP over IPv6, to be segmented.
pub const VIRTIO_NET_HDR_GSO_TCPV6: u8 = 4;
/// UDP, to be segmented into datagrams.
pub const VIRTIO_NET_HDR_GSO_UDP_L4: u8 = 5;
/// Beside a kind of TCP: with ECN.
pub const VIRTIO_NET_HDR_GSO_ECN: u8 = 0x80;

/// Bytes of the header with `num_buffers`, and without it: legacy drivers that do not merge buffers (5.1.6.1).
pub const HEADER_BYTES: usize = ioplane_network::spec::NET_HDR;
/// See [`HEADER_BYTES`].
pub const LEGACY_HEADER_BYTES: usize = 10;

/// Link status (5.1.4).
pub const VIRTIO_NET_S_LINK_UP: u16 = 1;
/// The driver is to announce itself.
pub const VIRTIO_NET_S_ANNOUNCE: u16 = 2;

/// The command was carried out (5.1.6.5).
pub const VIRTIO_NET_OK: u8 = 0;
/// It was not.
pub const VIRTIO_NET_ERR: u8 = 1;

/// Classes of commands, and the commands of each (5.1.6.5).
#[allow(missing_docs)]
pub mod control {
    pub const VIRTIO_NET_CTRL_RX: u8 = 0;
    pub const VIRTIO_NET_CTRL_RX_PROMISC: u8 = 0;
    pub const VIRTIO_NET_CTRL_RX_ALLMULTI: u8 = 1;
    pub const VIRTIO_NET_CTRL_RX_ALLUNI: u8 = 2;
    pub const VIRTIO_NET_CTRL_RX_NOMULTI: u8 = 3;
    pub const VIRTIO_NET_CTRL_RX_NOUNI: u8 = 4;
    pub const VIRTIO_NET_CTRL_RX_NOBCAST: u8 = 5;
    pub const VIRTIO_NET_CTRL_MAC: u8 = 1;
    pub const VIRTIO_NET_CTRL_MAC_TABLE_SET: u8 = 0;
    pub const VIRTIO_NET_CTRL_MAC_ADDR_SET: u8 = 1;
    pub const VIRTIO_NET_CTRL_VLAN: u8 = 2;
    pub const VIRTIO_NET_CTRL_VLAN_ADD: u8 = 0;
    pub const VIRTIO_NET_CTRL_VLAN_DEL: u8 = 1;
    pub const VIRTIO_NET_CTRL_ANNOUNCE: u8 = 3;
    pub const VIRTIO_NET_CTRL_ANNOUNCE_ACK: u8 = 0;
    pub const VIRTIO_NET_CTRL_MQ: u8 = 4;
    pub const VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET: u8 = 0;
    pub const VIRTIO_NET_CTRL_GUEST_OFFLOADS: u8 = 5;
    pub const VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET: u8 = 0;
}

/// Offsets in the configuration (5.1.4).
#[allow(missing_docs)]
pub mod config {
    pub const MAC: usize = 0;
    pub const STATUS: usize = 6;
    pub const MAX_VIRTQUEUE_PAIRS: usize = 8;
    pub const MTU: usize = 10;
    /// Bytes of the part that we fill.
    pub const BYTES: usize = 12;
}
