//! `frames`: a switch with ports of every kind, whose guests send anything, come, go and change their minds.
//!
//! Oracles: nobody hears a VLAN that its port is not in, an isolated neighbour, or itself; nobody is given
//! an offload that it did not ask for, or one that lies; what a sender writes after it was judged changes no address and no
//! tag; every frame that was offered is counted once, as sent or as dropped.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use ioplane_network::gso::Large;
use ioplane_network::spec::*;
use ioplane_network::{
    Capture, CaptureOptions, HEAD, Mac, Offload, Port, PortOptions, PortRx, PortTx, RxFilter, RxOffloads,
    Sent, Switch, SwitchSettings, Vlan,
};

use crate::Signature;
use crate::segmentation::large;

/// What a guest is, and both halves of its port's first pair.
struct Guest {
    port: Port,
    port_txs: Vec<PortTx>,
    port_rxs: Vec<PortRx>,
    number: u8,
    vlan: Vlan,
    isolated: bool,
    takes: RxOffloads,
    offered: u64,
}

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let settings =
        SwitchSettings { buffers: 4, addresses: 16, addresses_per_port: 6, ..SwitchSettings::default() };
    let switch = Switch::new("fuzz", settings);
    let mut guests: Vec<Guest> = Vec::new();
    let mut capture = None;
    let input = &mut Unstructured::new(data);
    for _ in 0..200 {
        if step(input, &switch, &mut guests, &mut capture, &mut signature).is_err() {
            break;
        }
    }
    for guest in &mut guests {
        hear(guest, &mut signature);
        let sent = guest.port.reading().sent;
        assert_eq!(sent.frames + sent.dropped_in_all(), guest.offered, "frames are missing: {sent:?}");
        sent.drops.iter().for_each(|(cause, _)| signature.saw(cause.name()));
    }
    signature.value()
}

/// The address of guest `number`; configured for those below 4.
fn mac(number: u8) -> Mac {
    [2, 0, 0, 0, 0, number]
}

fn vlan(input: &mut Unstructured<'_>) -> Result<Vlan> {
    Ok(match input.int_in_range(0..=5u8)? {
        0..=2 => Vlan::All,
        3 => Vlan::Access(5),
        4 => Vlan::Access(6),
        _ => Vlan::Trunk(vec![0, 5]),
    })
}

fn takes(input: &mut Unstructured<'_>) -> Result<RxOffloads> {
    let [checksum, tso4, tso6, ecn, uso4, uso6] = input.arbitrary()?;
    Ok(RxOffloads { checksum, tso4, tso6, ecn, uso4, uso6 })
}

fn plug(input: &mut Unstructured<'_>, switch: &Arc<Switch>, number: u8) -> Result<Guest> {
    let (vlan, isolated, pairs) = (vlan(input)?, input.ratio(1, 4)?, input.int_in_range(1..=3u16)?);
    let options = PortOptions {
        name: format!("guest{number}"),
        mac: (number < 4).then(|| mac(number)),
        isolated,
        vlan: vlan.clone(),
        pairs,
        uplink: number == 7,
        mtu: if input.ratio(1, 4)? { 9000 } else { 1500 },
    };
    let port = switch.plug(options).expect("a name of its own");
    port.set_up(input.ratio(7, 8)?);
    let takes = takes(input)?;
    port.takes(takes);
    let port_txs = (0..pairs).map(|pair| port.tx(pair)).collect();
    let port_rxs = (0..pairs).map(|pair| port.rx(pair)).collect();
    Ok(Guest { port, port_txs, port_rxs, number, vlan, isolated, takes, offered: 0 })
}

fn step(
    input: &mut Unstructured<'_>,
    switch: &Arc<Switch>,
    guests: &mut Vec<Guest>,
    capture: &mut Option<Capture>,
    signature: &mut Signature,
) -> Result<()> {
    if input.is_empty() {
        return Err(arbitrary::Error::NotEnoughData);
    }
    let number = input.int_in_range(0..=7u8)?;
    let Some(at) = guests.iter().position(|guest| guest.number == number) else {
        guests.push(plug(input, switch, number)?);
        return Ok(());
    };
    let guest = &mut guests[at];
    match input.int_in_range(0..=23u8)? {
        0..=13 => offer(input, guest, signature)?,
        14..=16 => hear(guest, signature),
        17 => guest.port.set_up(input.ratio(3, 4)?),
        18 => {
            // What was on its way was made for what it took before.
            hear(guest, signature);
            guest.takes = takes(input)?;
            guest.port.takes(guest.takes);
        }
        19 => {
            let mut filter = RxFilter::NOTHING;
            (filter.promiscuous, filter.no_broadcast, filter.vlan_filtering) = input.arbitrary()?;
            filter.add(mac(number));
            filter.add_vlan(5);
            guest.port.filter(&filter);
        }
        20 => guest.port.set_active_pairs(input.arbitrary()?),
        21 => {
            let pair = input.int_in_range(0..=guest.port_rxs.len() - 1)?;
            guest.port_rxs[pair] = guest.port.rx(pair as u16);
        }
        22 => {
            *capture = None;
            let options = CaptureOptions { snaplen: 32, frames: 4 };
            *capture = switch.capture(&format!("guest{number}"), options).ok();
            assert!(capture.iter_mut().flatten().all(|captured| captured.bytes.len() <= 32));
        }
        _ => {
            hear(guest, signature);
            drop(guests.swap_remove(at));
            switch.table().iter().for_each(|learned| assert_ne!(learned.port, format!("guest{number}")));
        }
    }
    Ok(())
}

/// A guest sends a batch.
fn offer(input: &mut Unstructured<'_>, guest: &mut Guest, signature: &mut Signature) -> Result<()> {
    let pair = input.int_in_range(0..=guest.port_txs.len() - 1)?;
    for _ in 0..input.int_in_range(1..=6u8)? {
        let (bytes, offload) = frame(input, guest)?;
        let fault = input.ratio(1, 32)?;
        let changes = input.ratio(1, 8)?;
        let sent =
            guest.port_txs[pair].send(&bytes[..bytes.len().min(HEAD)], bytes.len(), offload, &mut |to| {
                to.copy_from_slice(&bytes);
                if changes {
                    // Another name and another VLAN, after it was judged.
                    for (place, byte) in to
                        .iter_mut()
                        .zip([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 3, 0x81, 0, 0, 6])
                    {
                        *place = byte;
                    }
                }
                !fault
            });
        guest.offered += u64::from(sent != Sent::Fault);
        match sent {
            Sent::Delivered(copies) => signature.count(copies.into()),
            Sent::Dropped(cause) => signature.saw(cause.name()),
            Sent::Fault => assert!(fault),
            Sent::Begun => panic!("nothing limits what a frame may cost here"),
        }
    }
    guest.port_txs[pair].flush();
    Ok(())
}

/// A frame whose payload says who sent it, from where: `sender, isolated, VLAN or 0xff`; at the very end, so that headers may
/// lie before it.
fn frame(input: &mut Unstructured<'_>, guest: &Guest) -> Result<(Vec<u8>, Offload)> {
    let (mut bytes, mut offload) = if input.ratio(1, 4)? {
        let (mut bytes, offload) = large(input)?;
        // Room for the mark behind all headers.
        bytes.extend([0; 8]);
        (bytes, offload)
    } else {
        let mut bytes = vec![2, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0];
        if input.ratio(1, 3)? {
            bytes.extend([
                0x81,
                0,
                input.int_in_range(0..=15u8)? << 4,
                [0, 5, 6, 7][input.int_in_range(0..=3usize)?],
            ]);
        }
        bytes.extend([0x88, 0xb5]);
        bytes.resize(bytes.len() + input.int_in_range(0..=1600usize)?, 0x55);
        let csum_start = if input.ratio(1, 4)? { input.int_in_range(0..=60)? } else { 0 };
        let flags = if csum_start > 0 { VIRTIO_NET_HDR_F_NEEDS_CSUM } else { 0 };
        (bytes, Offload { flags, csum_start, csum_offset: 2, ..Offload::NONE })
    };
    if input.ratio(1, 32)? {
        offload.gso = input.arbitrary()?;
    }
    if bytes.len() >= 12 {
        bytes[..6].copy_from_slice(&match input.int_in_range(0..=9u8)? {
            0 | 1 => [0xff; 6],
            2 => [0x33, 0x33, 0, 0, 0, 1],
            number => mac(number - 2),
        });
        let from = if input.ratio(1, 12)? { input.int_in_range(0..=15)? } else { guest.number };
        bytes[6..12].copy_from_slice(&mac(from));
        if input.ratio(1, 32)? {
            bytes[6] = input.arbitrary()?;
        }
    }
    if input.ratio(1, 24)? {
        // Of a few bytes, now and then: the type of a tag and no room for one.
        let most = if input.arbitrary()? { bytes.len().min(20) } else { bytes.len() };
        bytes.truncate(input.int_in_range(0..=most)?);
    }
    // Stumps stay as they are.
    if bytes.len() >= 64
        && let Some(end) = bytes.last_chunk_mut::<8>()
    {
        let access = if let Vlan::Access(vlan) = guest.vlan { vlan as u8 } else { 0xff };
        // Twice, once inverted: a sum that is completed in the middle of it does not make another mark of it.
        let mark = [0xa5, guest.number, guest.isolated.into(), access];
        end[..4].copy_from_slice(&mark);
        end[4..].copy_from_slice(&mark.map(|byte| !byte));
    }
    Ok((bytes, offload))
}

/// A guest takes what has come, and looks at it.
fn hear(guest: &mut Guest, signature: &mut Signature) {
    for port_rx in &mut guest.port_rxs {
        port_rx.arm();
        port_rx.disarm();
        while let Some(frame) = port_rx.front() {
            let (bytes, offload) = (frame.bytes(), frame.offload());
            assert!(bytes.len() >= ETH_HLEN && bytes[6] & 1 == 0, "no frame at all");
            let tag = (bytes[12..14] == [0x81, 0]).then(|| bytes.get(15)).flatten().copied();
            match &guest.vlan {
                Vlan::Trunk(_) => assert!(tag.is_none_or(|vlan| vlan == 0 || vlan == 5), "a VLAN of others"),
                Vlan::All | Vlan::Access(_) => {}
            }
            // Where a sum was completed is not where the mark is.
            if !offload.is_large()
                && let Some(end) = bytes.last_chunk::<8>()
                && let [0xa5, sender, isolated, access] = [end[0], end[1], end[2], end[3]]
                && end[4..] == [!0xa5, !sender, !isolated, !access]
                && bytes.len() >= 80
                && sender < 8
                && isolated < 2
            {
                assert_ne!(sender, guest.number, "its own frame");
                assert!(isolated == 0 || !guest.isolated, "isolated ports hear each other");
                match (&guest.vlan, access) {
                    (_, 0xff) => {}
                    (Vlan::Access(own), vlan) => assert_eq!(*own, u16::from(vlan), "another VLAN"),
                    (Vlan::All, vlan) => assert_eq!(tag, Some(vlan), "without its VLAN's tag"),
                    (Vlan::Trunk(_), vlan) => assert_eq!((tag, vlan), (Some(5), 5), "not its trunk's"),
                }
            }
            assert!(offload.flags & !(VIRTIO_NET_HDR_F_NEEDS_CSUM | VIRTIO_NET_HDR_F_DATA_VALID) == 0);
            assert!(guest.takes.checksum || offload.flags == 0, "a sum was left to who does not take it");
            assert!(guest.takes.whole(offload.gso), "a large frame for who does not take it");
            if offload.is_large() {
                let large = Large::check(bytes, &offload).expect("a header that lies was delivered");
                assert_eq!(large.headers(), usize::from(offload.hdr_len));
            } else if offload.needs_csum() {
                assert!(
                    usize::from(offload.csum_start) + usize::from(offload.csum_offset) + 2 <= bytes.len()
                );
            }
            signature.count(bytes.len() as u64);
            port_rx.pop();
        }
    }
}
