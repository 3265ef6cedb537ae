//! `segmentation`: large frames with headers that are nearly right, segmented for a receiver that takes nothing.
//!
//! Oracles: what comes out is the payload, in order, and nothing else; every segment's sums are right by a second, slower
//! reckoning; no segment is longer than was asked for; there are no more of them than are allowed; a header that lies is refused,
//! and refused whether the receiver takes large frames or not.

use arbitrary::{Result, Unstructured};
use ioplane_network::gso::{Large, MOST_SEGMENTS, Segments};
use ioplane_network::spec::*;
use ioplane_network::{DropReason, Offload};

use crate::Signature;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = segment(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

/// A frame that is nearly right, and the header that goes with it.
pub fn large(input: &mut Unstructured<'_>) -> Result<(Vec<u8>, Offload)> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
    for _ in 0..[0, 0, 0, 1, 2, 3][input.int_in_range(0..=5usize)?] {
        frame.extend([0x81, 0, 0, input.int_in_range(0..=7)?]);
    }
    let (v6, tcp) = (input.arbitrary()?, input.ratio(3, 4)?);
    let protocol = if tcp { IPPROTO_TCP } else { IPPROTO_UDP };
    if v6 {
        frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0]);
        let extensions = input.int_in_range(0..=9u8)?.saturating_sub(6);
        frame.extend([if extensions > 0 { IPPROTO_DSTOPTS } else { protocol }, 64]);
        frame.extend([0xfd; 31]);
        frame.push(9);
        for at in 0..extensions {
            let units = input.int_in_range(0..=2u8)?;
            frame.extend([if at + 1 < extensions { IPPROTO_DSTOPTS } else { protocol }, units]);
            frame.extend(vec![0; 6 + 8 * usize::from(units)]);
        }
    } else {
        let words = 5 + input.int_in_range(0..=20u8)?.saturating_sub(10);
        frame.extend([8, 0, 0x40 | (words & 0xf), 0, 0, 0]);
        frame.extend(input.arbitrary::<[u8; 2]>()?);
        frame.extend([0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend(vec![1; 4 * usize::from(words) - 20]);
    }
    let start = frame.len();
    frame.extend([0x13, 0x89, 0, 80]);
    if tcp {
        let words = 5 + input.int_in_range(0..=20u8)?.saturating_sub(10);
        frame.extend(input.arbitrary::<[u8; 4]>()?);
        frame.extend([0, 0, 0, 7, (words & 0xf) << 4, input.arbitrary()?, 16, 0, 0xde, 0xad, 0, 0]);
        frame.extend(vec![1; 4 * usize::from(words) - 20]);
    } else {
        frame.extend([0, 0, 0xde, 0xad]);
    }
    let hdr_len = frame.len() as u16;
    let payload = if input.ratio(1, 8)? {
        input.int_in_range(0..=60_000)?
    } else {
        input.int_in_range(0..=6000usize)?
    };
    frame.extend((0..payload).map(|at| (at * 31 + at / 256) as u8));
    let gso = match (tcp, v6) {
        (false, _) => VIRTIO_NET_HDR_GSO_UDP_L4,
        (true, false) => VIRTIO_NET_HDR_GSO_TCPV4,
        (true, true) => VIRTIO_NET_HDR_GSO_TCPV6,
    };
    let mut offload = Offload {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso,
        hdr_len,
        gso_size: if input.ratio(1, 8)? { input.arbitrary()? } else { input.int_in_range(64..=1460)? },
        csum_start: start as u16,
        csum_offset: if tcp { 16 } else { 6 },
    };
    // Now and then a lie, in the frame or about it.
    if input.ratio(1, 3)? {
        match input.int_in_range(0..=7u8)? {
            0 => offload.gso = input.arbitrary()?,
            1 => offload.csum_start = input.arbitrary()?,
            2 => offload.csum_offset = input.arbitrary()?,
            3 => offload.flags = input.arbitrary()?,
            4 => offload.hdr_len = input.arbitrary()?,
            5 => frame.truncate(input.int_in_range(0..=frame.len())?),
            _ => {
                let at = input.int_in_range(0..=frame.len().min(140) - 1)?;
                frame[at] = input.arbitrary()?;
            }
        }
    }
    Ok((frame, offload))
}

fn segment(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let (frame, offload) = large(input)?;
    let large = match Large::check(&frame, &offload) {
        Ok(large) => large,
        Err(cause) => {
            assert_eq!(cause, DropReason::Offload);
            signature.saw("refused");
            signature.count(offload.gso.into());
            return Ok(());
        }
    };
    let (headers, size) = (large.headers(), usize::from(offload.gso_size));
    let (start, payload) = (usize::from(offload.csum_start), &frame[headers..]);
    let mut segments = Segments::new(&frame, large);
    let expected = payload.len().div_ceil(size);
    assert!((1..=MOST_SEGMENTS).contains(&expected) && segments.left() == expected);
    let (mut count, mut gone) = (0, 0);
    let mut out = vec![0; headers + size];
    while let Some(len) = segments.next_len() {
        let out = &mut out[..len];
        segments.write(out);
        assert!(len <= headers + size && len <= large.longest(frame.len()));
        assert_eq!(out[headers..], payload[gone..][..len - headers], "another payload");
        check(out, start, offload.gso);
        gone += len - headers;
        count += 1;
    }
    assert_eq!((count, gone, segments.left()), (expected, payload.len(), 0));
    signature.saw(if offload.gso == VIRTIO_NET_HDR_GSO_TCPV6 { "six" } else { "other" });
    signature.count(count as u64);
    signature.count(headers as u64);
    Ok(())
}

/// The sums of a segment, reckoned word by word from what it says itself.
fn check(segment: &[u8], start: usize, gso: u8) {
    let transport = &segment[start..];
    let tcp = gso != VIRTIO_NET_HDR_GSO_UDP_L4;
    // The IP header ends where the transport header starts, or (version 6) some extensions before.
    let tags =
        segment[12..].chunks(4).take_while(|tag| tag[..2] == [0x81, 0] || tag[..2] == [0x88, 0xa8]).count();
    let ip = 14 + 4 * tags;
    let mut pseudo = vec![0, if tcp { IPPROTO_TCP } else { IPPROTO_UDP }];
    pseudo.extend((transport.len() as u16).to_be_bytes());
    if segment[ip] >> 4 == 4 {
        assert_eq!(sum(&segment[ip..start]), 0xffff, "the IP header's sum");
        assert_eq!(usize::from(u16::from_be_bytes([segment[ip + 2], segment[ip + 3]])), segment.len() - ip);
        pseudo.extend(&segment[ip + 12..ip + 20]);
    } else {
        assert_eq!(
            usize::from(u16::from_be_bytes([segment[ip + 4], segment[ip + 5]])),
            segment.len() - ip - 40
        );
        pseudo.extend(&segment[ip + 8..ip + 40]);
    }
    pseudo.extend(transport);
    assert_eq!(sum(&pseudo), 0xffff, "the transport's sum");
    if !tcp {
        assert_eq!(usize::from(u16::from_be_bytes([transport[4], transport[5]])), transport.len());
        assert_ne!(transport[6..8], [0, 0], "a sum of zero says that there is none");
    }
}

fn sum(bytes: &[u8]) -> u32 {
    let mut sum = 0;
    for word in bytes.chunks(2) {
        sum += u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0));
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}
