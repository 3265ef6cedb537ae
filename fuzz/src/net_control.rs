//! `net_control`: a NIC whose driver may send any command.
//!
//! Oracles beside those of [`crate::serve`]: the address stays that of one station, and the pairs in use are some that there
//! are.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use ioplane_network::Port;
use ioplane_virtio::spec::split::*;

use crate::Signature;
use crate::guest;
use crate::nic::nic;
use crate::serve::{Serve, serve, split};

/// Where commands are put, as a rule.
const COMMANDS: u64 = 0x5000;
const PAIRS: u16 = 2;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = command(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn command(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let (net, own, _neighbour) = nic(input, PAIRS)?;
    let outcome = serve(input, signature, net, 2 * PAIRS, &mut |serve, input| {
        look(&own);
        offer(serve, input)
    });
    look(&own);
    signature.count(own.reading().active_pairs.into());
    outcome
}

fn look(own: &Arc<Port>) {
    let pairs = own.reading().active_pairs;
    assert!((1..=PAIRS).contains(&pairs), "{pairs} pairs in use");
}

/// One command: nearly right.
fn offer(serve: &mut Serve, input: &mut Unstructured<'_>) -> Result<()> {
    let size = serve.layout.size.max(1);
    let at = COMMANDS + 512 * u64::from(serve.avail & 3);
    let (class, command) = (input.int_in_range(0..=6u8)?, input.int_in_range(0..=6u8)?);
    let right = match (class, command) {
        (0, _) => 1,
        (1, 1) => 6,
        (2 | 4, _) => 2,
        (5, _) => 8,
        _ => 0,
    };
    let mut data: Vec<u8> = vec![0; right];
    if class == 1 && command == 0 {
        for _ in 0..2 {
            let count: u8 = input.int_in_range(0..=20)?;
            let said = if input.ratio(1, 12)? { input.arbitrary()? } else { u32::from(count) };
            data.extend(said.to_le_bytes());
            data.extend((0..usize::from(count) * 6).map(|at| (at * 7) as u8));
        }
    } else {
        input.fill_buffer(&mut data)?;
        if input.arbitrary()? {
            data.iter_mut().skip(1).for_each(|byte| *byte = 0);
            data.iter_mut().for_each(|byte| *byte &= 3);
        }
    }
    if input.ratio(1, 8)? {
        data.resize(input.int_in_range(0..=300)?, 0);
    }
    let bytes = [&[class, command], &data[..]].concat();
    serve.guest.poke(at, &bytes);
    let mut buffers = Vec::new();
    split(input, &mut buffers, at, 2, 0)?;
    split(input, &mut buffers, at + 2, data.len() as u32, 0)?;
    if !input.ratio(1, 16)? {
        buffers.push((guest::address(input)?, if input.ratio(1, 16)? { 0 } else { 1 }, VIRTQ_DESC_F_WRITE));
    }
    serve.describe(input, &buffers, size)?;
    serve.guest.poke(serve.layout.avail.saturating_add(2), &serve.avail.to_le_bytes());
    Ok(())
}
