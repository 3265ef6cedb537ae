//! `blk_request`: a disk whose driver may put anything into its chains, while it is polled, drained, suspended, saved.
//!
//! The oracles are those of [`crate::serve`].

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use ioplane_storage::{Backing, MemoryBacking};
use ioplane_virtio::blk::{Blk, BlkOptions};
use ioplane_virtio::spec::split::*;

use crate::Signature;
use crate::guest;
use crate::late::Late;
use crate::serve::{Serve, split};

/// Bytes of the disk.
const DISK: u64 = 64 << 10;
/// Where request headers are put, as a rule.
const HEADERS: u64 = 0x5000;

thread_local! {
    static MEMORY_DISK: Arc<MemoryBacking> = MemoryBacking::new(DISK).expect("a memory disk");
}

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = serve(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

/// A disk out of the input.
pub fn disk(input: &mut Unstructured<'_>) -> Result<Blk> {
    let backing: Arc<dyn Backing> = if input.arbitrary()? {
        Late::new(DISK as usize, input.arbitrary()?)
    } else {
        let disk = MEMORY_DISK.with(Clone::clone);
        disk.resize(512).and_then(|()| disk.resize(DISK)).expect("resizing");
        disk
    };
    let options = BlkOptions {
        name: "fuzz".into(),
        serial: "serial".into(),
        queues: input.int_in_range(1..=2)?,
        queue_size: 64,
        read_only: input.ratio(1, 8)?,
        logical_block: None,
    };
    Ok(Blk::new(options, backing))
}

fn serve(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let blk = disk(input)?;
    crate::serve::serve(input, signature, blk, 0, &mut offer)
}

/// The driver makes one request available: nearly right.
fn offer(serve: &mut Serve, input: &mut Unstructured<'_>) -> Result<()> {
    let size = serve.layout.size.max(1);
    let slot = u64::from(serve.avail) & u64::from(size - 1);
    let at = HEADERS + 32 * (slot & 63);
    let kind = [0u32, 1, 4, 8, 11, 13, 0, 1][input.int_in_range(0..=7usize)?];
    let kind = if input.ratio(1, 16)? { input.arbitrary()? } else { kind };
    let sector =
        if input.ratio(1, 12)? { input.arbitrary()? } else { u64::from(input.arbitrary::<u8>()? & 0x7f) };
    serve.guest.poke(at, &kind.to_le_bytes());
    serve.guest.poke(at + 8, &sector.to_le_bytes());
    let mut buffers = Vec::new();
    split(input, &mut buffers, at, 16, 0)?;
    let flag = if matches!(kind, 0 | 8) { VIRTQ_DESC_F_WRITE } else { 0 };
    let flag = if input.ratio(1, 24)? { flag ^ VIRTQ_DESC_F_WRITE } else { flag };
    if matches!(kind, 11 | 13) && input.ratio(7, 8)? {
        let segment = guest::address(input)?;
        let sectors = if input.ratio(1, 8)? { input.arbitrary()? } else { input.int_in_range(0..=128u32)? };
        serve.guest.poke(segment, &u64::from(input.arbitrary::<u8>()?).to_le_bytes());
        serve.guest.poke(segment.saturating_add(8), &sectors.to_le_bytes());
        serve.guest.poke(segment.saturating_add(12), &input.int_in_range(0..=2u32)?.to_le_bytes());
        split(input, &mut buffers, segment, 16, flag)?;
    } else {
        for _ in 0..input.int_in_range(0..=4u8)? {
            let len =
                if input.ratio(1, 8)? { input.arbitrary()? } else { 512 * input.int_in_range(0..=8u32)? };
            let addr = guest::address(input)?;
            split(input, &mut buffers, addr, len, flag)?;
        }
    }
    buffers.push((guest::address(input)?, if input.ratio(1, 16)? { 0 } else { 1 }, VIRTQ_DESC_F_WRITE));
    serve.describe(input, &buffers, size)?;
    serve.guest.poke(serve.layout.avail.saturating_add(2), &serve.avail.to_le_bytes());
    Ok(())
}
