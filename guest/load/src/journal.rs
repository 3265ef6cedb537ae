//! Stamped blocks in order, each made durable by a flush before it is told to the host: after a power cut the host
//! compares what was acknowledged with what is there.

use crate::blockdev::{Aligned, Disk, failed, range};
use crate::protocol::{StampProgress, StampSpec, Stamps};
use crate::sector::{SECTOR, Stamp};
use anyhow::{Context, Result, bail};

/// All rounds on a disk carry this number, so that a later guest recognises an earlier one's stamps.
const NONCE: u64 = 0x5354_414d_5053;
const MOST: u64 = 1 << 20;

/// Writes the blocks of one round; calls `flushed` after each acknowledged flush.
pub fn write(spec: &StampSpec, mut flushed: impl FnMut(StampProgress)) -> Result<StampProgress> {
    let disk = open(spec, true)?;
    let stamp = Stamp::new(&disk.name, NONCE);
    let size = spec.block as usize;
    let mut buffer = Aligned::new(size);
    for index in 0..spec.count {
        let at = spec.offset + index * u64::from(spec.block);
        stamp.fill(buffer.all(), at / SECTOR as u64, spec.round);
        disk.write(buffer.all(), at, true).map_err(|e| failed("write", at, size, &e))?;
        let done = index + 1;
        if done.is_multiple_of(spec.flush_every.max(1)) || done == spec.count {
            disk.sync().with_context(|| format!("flush after block {index}"))?;
            flushed(StampProgress { flushed: done });
        }
    }
    Ok(StampProgress { flushed: spec.count })
}

/// Reads the blocks and tells the round that each holds.
pub fn read(spec: &StampSpec) -> Result<Stamps> {
    let disk = open(spec, false)?;
    let stamp = Stamp::new(&disk.name, NONCE);
    let mut buffer = Aligned::new(spec.block as usize);
    let mut found = Stamps::default();
    for index in 0..spec.count {
        let at = spec.offset + index * u64::from(spec.block);
        disk.read(buffer.all(), at, true).map_err(|e| failed("read", at, spec.block as usize, &e))?;
        match stamp.sequence(buffer.all(), at / SECTOR as u64) {
            Ok(round) => found.rounds.push(round),
            Err(mismatch) => {
                found.rounds.push(0);
                if found.broken.len() < 64 {
                    found.broken.push(format!("block {index}: {mismatch}"));
                }
            }
        }
    }
    Ok(found)
}

fn open(spec: &StampSpec, write: bool) -> Result<Disk> {
    if spec.count == 0 || spec.count > MOST || spec.block == 0 || spec.block > 1 << 20 || spec.round == 0 {
        bail!("count must be 1 to {MOST}, block at most 1 MiB, round at least 1");
    }
    let disk = Disk::open(&spec.device, write)?;
    range(&disk, spec.offset, spec.count * u64::from(spec.block))?;
    if !u64::from(spec.block).is_multiple_of(4096) {
        bail!("block {} is not a multiple of 4096", spec.block);
    }
    Ok(disk)
}
