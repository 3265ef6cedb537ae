//! A NIC on a switch with one neighbour, for the targets of virtio-net.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use ioplane_network::{Mac, Offload, Port, PortOptions, RxOffloads, Switch, SwitchSettings, Vlan};
use ioplane_virtio::net::{Net, NetOptions};

/// The NIC's address.
pub const OWN: Mac = [2, 0, 0, 0, 0, 1];
/// Its neighbour's.
pub const NEIGHBOUR: Mac = [2, 0, 0, 0, 0, 2];
/// MTU of both.
pub const MTU: u16 = 1500;

/// A NIC with `pairs` pairs that serves its control queue, its port, and its neighbour's, which takes some offloads or none.
pub fn nic(input: &mut Unstructured<'_>, pairs: u16) -> Result<(Net, Arc<Port>, Port)> {
    let settings = SwitchSettings { addresses: 64, buffers: 4, ..SwitchSettings::default() };
    let switch = Switch::new("fuzz", settings);
    let vlan = |input: &mut Unstructured<'_>| {
        Ok(match input.int_in_range(0..=7u8)? {
            0 => Vlan::Access(5),
            1 => Vlan::Trunk(vec![5, 6]),
            _ => Vlan::All,
        })
    };
    let port = |name: &str, mac, vlan| {
        let options = PortOptions { mac: Some(mac), pairs, mtu: MTU, vlan, ..PortOptions::new(name) };
        switch.plug(options).expect("room for a port")
    };
    let own = Arc::new(port("own", OWN, vlan(input)?));
    let neighbour = port("neighbour", NEIGHBOUR, vlan(input)?);
    let takes: [bool; 6] = input.arbitrary()?;
    let [checksum, tso4, tso6, ecn, uso4, uso6] = takes;
    neighbour.takes(RxOffloads { checksum, tso4, tso6, ecn, uso4, uso6 });
    neighbour.set_up(true);
    let options = NetOptions { name: "own".into(), mac: OWN, pairs, queue_size: 64, mtu: MTU, control: true };
    Ok((Net::new(options, own.clone()), own, neighbour))
}

/// A frame, nearly right, from one to the other, with an offload header that nearly fits.
pub fn frame(input: &mut Unstructured<'_>, to: Mac, from: Mac) -> Result<(Offload, Vec<u8>)> {
    let to = if input.ratio(1, 8)? { input.arbitrary()? } else { to };
    let from = if input.ratio(1, 16)? { input.arbitrary()? } else { from };
    let mut bytes = [to, from].concat();
    if input.ratio(1, 8)? {
        let vlan = if input.arbitrary()? { 5 } else { input.arbitrary::<u16>()? };
        bytes.extend([0x81, 0, (vlan >> 8) as u8, vlan as u8]);
    }
    let (six, udp): (bool, bool) = (input.arbitrary()?, input.ratio(1, 4)?);
    let payload =
        if input.ratio(1, 4)? { input.int_in_range(0..=9000)? } else { input.int_in_range(0..=1500u16)? };
    let transport: u16 = if udp { 8 } else { 20 };
    let protocol = if udp { 17 } else { 6 };
    if six {
        bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        bytes.extend((transport + payload).to_be_bytes());
        bytes.extend([protocol, 64]);
        bytes.extend([0xfd; 32]);
    } else {
        bytes.extend([8, 0, 0x45, 0]);
        bytes.extend((20 + transport + payload).to_be_bytes());
        bytes.extend([0, 1, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    }
    let start = bytes.len() as u16;
    let mut segment = vec![0x11; usize::from(transport + payload)];
    if udp {
        segment[4..6].copy_from_slice(&(8 + payload).to_be_bytes());
    } else {
        segment[12] = if input.ratio(1, 12)? { input.arbitrary()? } else { 0x50 };
    }
    bytes.extend(segment);
    let mut offload = Offload::NONE;
    if input.arbitrary()? {
        offload.flags = 1;
        offload.csum_start = start;
        offload.csum_offset = if udp { 6 } else { 16 };
        if input.arbitrary()? {
            offload.gso = if udp {
                5
            } else if six {
                4
            } else {
                1
            };
            offload.gso |= if input.ratio(1, 8)? { 0x80 } else { 0 };
            offload.gso_size = if input.ratio(1, 8)? { input.arbitrary()? } else { 1400 };
            offload.hdr_len = start + transport;
        }
    }
    if input.ratio(1, 4)? {
        // One mistake, in the frame or in its header.
        match input.int_in_range(0..=6u8)? {
            0 => offload.flags = input.arbitrary()?,
            1 => offload.gso = input.arbitrary()?,
            2 => offload.csum_start = input.arbitrary()?,
            3 => offload.csum_offset = input.arbitrary()?,
            4 => offload.hdr_len = input.arbitrary()?,
            5 => bytes.truncate(input.int_in_range(0..=bytes.len())?),
            _ => {
                let at = input.choose_index(bytes.len().min(100))?;
                bytes[at] = input.arbitrary()?;
            }
        }
    }
    Ok((offload, bytes))
}
