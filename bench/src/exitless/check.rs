//! Is it a disk? Blocks are stamped with their number and read back through queue 0, all of them before anything is timed and
//! some after.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ioplane_testkit::driver::DiskOp;

use super::load::{BLOCK, SECTORS};
use crate::guest::Guest;

/// Stamps `count` of `blocks` blocks, evenly spread, and reads them all back in another order. With another `salt` the
/// stamps are others.
pub fn stamp_and_read(guest: &mut Guest, blocks: u64, count: u64, salt: u64) -> Result<()> {
    let stride = (blocks / count).max(1);
    guest.queues[0].ring().disable_interrupts();
    pass(guest, DiskOp::Write, (0..count).map(|turn| turn * stride), salt)?;
    read(guest, blocks, count, salt)
}

/// Reads `count` of `blocks` blocks, evenly spread, and not in their order; they hold stamps with this `salt`.
pub fn read(guest: &mut Guest, blocks: u64, count: u64, salt: u64) -> Result<()> {
    let stride = (blocks / count).max(1);
    // A step that has no factor in common with the count visits each block once.
    let step = (count / 2 + 1..).find(|step| gcd(*step, count) == 1).unwrap_or(1);
    guest.queues[0].ring().disable_interrupts();
    pass(guest, DiskOp::Read, (0..count).map(|turn| turn * step % count * stride), salt)
}

/// Stamps every block of a file, as [`stamp_and_read`] does through a disk.
pub fn fill(file: &Path, salt: u64) -> Result<()> {
    let blocks = std::fs::metadata(file)?.len() / u64::from(BLOCK);
    let mut out = BufWriter::new(File::options().write(true).open(file)?);
    let mut bytes = [0u8; BLOCK as usize];
    for block in 0..blocks {
        stamp(block, salt, &mut bytes);
        out.write_all(&bytes)?;
    }
    Ok(out.flush()?)
}

fn pass(guest: &mut Guest, op: DiskOp, mut blocks: impl Iterator<Item = u64>, salt: u64) -> Result<()> {
    let mut block_of = vec![0u64; usize::from(u16::MAX)];
    let mut bytes = [0u8; BLOCK as usize];
    let mut progress = Instant::now();
    let mut left = true;
    while left || guest.queues[0].in_flight() > 0 {
        let disk = &mut guest.queues[0];
        while left && let Some(token) = disk.next() {
            let Some(block) = blocks.next() else {
                left = false;
                break;
            };
            if op == DiskOp::Write {
                stamp(block, salt, &mut bytes);
            } else {
                // So that data which was never copied cannot be right by accident.
                bytes.fill(0x5a);
            }
            disk.write_data(token, &bytes)?;
            disk.submit(op, block * SECTORS, BLOCK);
            block_of[token.slot()] = block;
        }
        guest.kick_if_needed(0);
        let disk = &mut guest.queues[0];
        while let Some(done) = disk.reap()? {
            progress = Instant::now();
            let block = block_of[done.token.slot()];
            if !done.ok() {
                bail!("checking: the {op:?} of block {block} ended with status {:#x}", done.status);
            }
            if op == DiskOp::Read {
                let mut expected = [0u8; BLOCK as usize];
                stamp(block, salt, &mut expected);
                disk.read_data(done.token, &mut bytes)?;
                if bytes != expected || done.len != BLOCK + 1 {
                    bail!("checking: block {block} does not hold what was written ({} bytes used)", done.len);
                }
            }
        }
        if progress.elapsed() > Duration::from_secs(20) {
            bail!("checking: {} requests were never completed", disk.in_flight());
        }
    }
    Ok(())
}

/// What block `block` holds: every word differs from every other word of every block.
fn stamp(block: u64, salt: u64, bytes: &mut [u8; BLOCK as usize]) {
    for (index, word) in bytes.chunks_exact_mut(8).enumerate() {
        let number = (block * 512 + index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt;
        word.copy_from_slice(&number.to_le_bytes());
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
