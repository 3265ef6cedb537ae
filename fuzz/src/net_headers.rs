//! `net_headers`: a NIC whose driver may put anything into its frames, their headers and its receive buffers.
//!
//! Oracles beside those of [`crate::serve`]: whatever reaches the neighbour is a whole Ethernet frame, no longer than its MTU
//! unless it takes large ones, and nothing is left to do for it that it does not take.

use arbitrary::{Result, Unstructured};
use ioplane_network::{HEAD, LONGEST, PortRx, PortTx, RxOffloads};
use ioplane_virtio::net::header::{covers, emit};
use ioplane_virtio::spec::split::*;

use crate::Signature;
use crate::guest;
use crate::nic::{MTU, NEIGHBOUR, OWN, frame, nic};
use crate::serve::{Serve, serve, split};

/// Where headers are put, as a rule.
const HEADERS: u64 = 0x5000;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let (net, own, neighbour) = nic(input, 1)?;
    own.set_up(true);
    let outcome = if input.arbitrary()? {
        let (mut port_rx, takes) = (neighbour.rx(0), neighbour.reading().takes);
        serve(input, signature, net, 1, &mut |serve, input| {
            look(&mut port_rx, &takes);
            send(serve, input)
        })
    } else {
        let mut port_tx = neighbour.tx(0);
        serve(input, signature, net, 0, &mut |serve, input| receive(serve, input, &mut port_tx))
    };
    for reading in [own.reading().sent, own.reading().received, neighbour.reading().received] {
        signature.count(reading.frames);
        reading.drops.iter().for_each(|(cause, _)| signature.saw(cause.name()));
    }
    outcome
}

/// RxOffloads what has come to the neighbour.
fn look(port_rx: &mut PortRx, takes: &RxOffloads) {
    while let Some(frame) = port_rx.front() {
        let (offload, len) = (frame.offload(), frame.bytes().len());
        assert!((14..=LONGEST).contains(&len), "a frame of {len} bytes");
        assert!(offload.is_large() || len <= usize::from(MTU) + 14 + 8, "a small frame of {len} bytes");
        assert!(covers(takes, &offload), "{offload:?} for who takes {takes:?}");
        if offload.needs_csum() {
            let end = usize::from(offload.csum_start) + usize::from(offload.csum_offset) + 2;
            assert!(end <= len, "{offload:?} in {len} bytes");
        }
        port_rx.pop();
    }
}

/// The driver sends a frame: nearly right.
fn send(serve: &mut Serve, input: &mut Unstructured<'_>) -> Result<()> {
    let size = serve.layout.size.max(1);
    let (offload, bytes) = frame(input, NEIGHBOUR, OWN)?;
    let at = HEADERS + 16 * u64::from(serve.avail & 63);
    serve.guest.poke(at, &emit(&offload, 0));
    let data = guest::address(input)?;
    serve.guest.poke(data, &bytes);
    let mut buffers = Vec::new();
    let header = if input.ratio(1, 12)? { input.int_in_range(0..=12)? } else { 12 };
    split(input, &mut buffers, at, header, 0)?;
    let len = if input.ratio(1, 12)? { input.arbitrary()? } else { bytes.len() as u32 };
    let flags = if input.ratio(1, 24)? { VIRTQ_DESC_F_WRITE } else { 0 };
    split(input, &mut buffers, data, len, flags)?;
    if input.ratio(1, 24)? {
        let (from, pieces) = (guest::address(input)?, input.int_in_range(0..=40u64)?);
        buffers.extend((0..pieces).map(|nth| (from.wrapping_add(nth), 1, 0)));
    }
    serve.describe(input, &buffers, size)?;
    serve.guest.poke(serve.layout.avail.saturating_add(2), &serve.avail.to_le_bytes());
    Ok(())
}

/// The neighbour sends, and the driver makes room: nearly enough.
fn receive(serve: &mut Serve, input: &mut Unstructured<'_>, port_tx: &mut PortTx) -> Result<()> {
    if input.ratio(3, 4)? {
        let (offload, bytes) = frame(input, OWN, NEIGHBOUR)?;
        port_tx.send(&bytes[..bytes.len().min(HEAD)], bytes.len(), offload, &mut |out| {
            out.copy_from_slice(&bytes);
            true
        });
        port_tx.flush();
    }
    let size = serve.layout.size.max(1);
    let mut buffers = Vec::new();
    for _ in 0..input.int_in_range(1..=3u8)? {
        let len = if input.ratio(1, 8)? { input.arbitrary()? } else { input.int_in_range(0..=2048u32)? };
        let flags = if input.ratio(1, 24)? { 0 } else { VIRTQ_DESC_F_WRITE };
        let addr = guest::address(input)?;
        split(input, &mut buffers, addr, len, flags)?;
    }
    serve.describe(input, &buffers, size)?;
    serve.guest.poke(serve.layout.avail.saturating_add(2), &serve.avail.to_le_bytes());
    Ok(())
}
