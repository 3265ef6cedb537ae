//! Writing a pattern and reading it back, and digests of ranges.

use crate::blockdev::{Aligned, Disk, failed, range};
use crate::load::hex;
use crate::protocol::CopyCheck;
use crate::sector::{SECTOR, Stamp};
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::time::Instant;

const STEP: u64 = 256 << 10;

/// Writes a pattern that `seed` chooses, syncs, reads it back past the page cache and compares digests.
pub fn copy_check(device: &str, offset: u64, bytes: u64, seed: u64) -> Result<CopyCheck> {
    let disk = Disk::open(device, true)?;
    if bytes == 0 {
        bail!("bytes is 0; give a multiple of 4096");
    }
    range(&disk, offset, bytes)?;
    let stamp = Stamp::new(&disk.name, seed);
    let mut buffer = Aligned::new(STEP as usize);
    let mut written = Sha256::new();
    let begun = Instant::now();
    for (at, step) in steps(offset, bytes) {
        let part = buffer.first(step);
        stamp.fill(part, at / SECTOR as u64, 1);
        written.update(&*part);
        disk.write(part, at, true).map_err(|e| failed("write", at, step, &e))?;
    }
    disk.sync().context("sync")?;
    let write_seconds = begun.elapsed().as_secs_f64();
    let begun = Instant::now();
    let read_sha256 = digest(&disk, offset, bytes)?;
    let written_sha256 = hex(&written.finalize());
    Ok(CopyCheck {
        bytes,
        same: written_sha256 == read_sha256,
        written_sha256,
        read_sha256,
        write_seconds,
        read_seconds: begun.elapsed().as_secs_f64(),
    })
}

/// SHA-256 of a range, read past the page cache.
pub fn sha256(device: &str, offset: u64, bytes: u64) -> Result<String> {
    let disk = Disk::open(device, false)?;
    let bytes = range(&disk, offset, bytes)?;
    digest(&disk, offset, bytes)
}

fn digest(disk: &Disk, offset: u64, bytes: u64) -> Result<String> {
    let mut buffer = Aligned::new(STEP as usize);
    let mut sum = Sha256::new();
    for (at, step) in steps(offset, bytes) {
        let part = buffer.first(step);
        disk.read(part, at, true).map_err(|e| failed("read", at, step, &e))?;
        sum.update(&*part);
    }
    Ok(hex(&sum.finalize()))
}

fn steps(offset: u64, bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    let end = offset + bytes;
    (offset..end).step_by(STEP as usize).map(move |at| (at, STEP.min(end - at) as usize))
}
