//! Names and numbers of the specifications: virtio 1.3 section 5.1.6 (the header before a frame), IEEE 802.1Q, IP.

/// The checksum from `csum_start` to the end is to be completed at `csum_offset`.
pub const VIRTIO_NET_HDR_F_NEEDS_CSUM: u8 = 1;
/// The checksum has been found to be right.
pub const VIRTIO_NET_HDR_F_DATA_VALID: u8 = 2;

/// Not to be segmented.
pub const VIRTIO_NET_HDR_GSO_NONE: u8 = 0;
/// TCP over IPv4.
pub const VIRTIO_NET_HDR_GSO_TCPV4: u8 = 1;
/// UDP over IPv4 or IPv6, by IP fragments. Not taken here.
pub const VIRTIO_NET_HDR_GSO_UDP: u8 = 3;
/// TCP over IPv6.
pub const VIRTIO_NET_HDR_GSO_TCPV6: u8 = 4;
/// UDP over IPv4 or IPv6, by datagrams.
pub const VIRTIO_NET_HDR_GSO_UDP_L4: u8 = 5;
/// A bit beside the type: the TCP segment has CWR set.
pub const VIRTIO_NET_HDR_GSO_ECN: u8 = 0x80;

/// `virtio_net_hdr_v1`: before each frame of a driver that has `VIRTIO_F_VERSION_1` or `VIRTIO_NET_F_MRG_RXBUF`.
pub const NET_HDR: usize = 12;

/// Addresses of an Ethernet header.
pub const ETH_ADDRESSES: usize = 12;
/// An Ethernet header.
pub const ETH_HLEN: usize = 14;
/// A VLAN tag.
pub const VLAN_HLEN: usize = 4;
/// A customer VLAN tag follows.
pub const ETH_P_8021Q: u16 = 0x8100;
/// A service VLAN tag follows.
pub const ETH_P_8021AD: u16 = 0x88a8;
/// IPv4.
pub const ETH_P_IP: u16 = 0x0800;
/// IPv6.
pub const ETH_P_IPV6: u16 = 0x86dd;
/// Reverse ARP: what announces an address.
pub const ETH_P_RARP: u16 = 0x8035;
/// The VLAN in a tag.
pub const VLAN_VID_MASK: u16 = 0x0fff;

/// TCP.
pub const IPPROTO_TCP: u8 = 6;
/// UDP.
pub const IPPROTO_UDP: u8 = 17;
/// IPv6: options for every hop.
pub const IPPROTO_HOPOPTS: u8 = 0;
/// IPv6: routing.
pub const IPPROTO_ROUTING: u8 = 43;
/// IPv6: a fragment.
pub const IPPROTO_FRAGMENT: u8 = 44;
/// IPv6: options for the destination.
pub const IPPROTO_DSTOPTS: u8 = 60;
