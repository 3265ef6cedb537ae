//! What dm-log-writes has written down: every write that a flush made durable, in order, with marks between them. Of a device with
//! a volatile cache the power takes everything else.
//!
//! ```text
//!   block 0: super { magic, version, entries, block size }      then for each entry: { sector, count, flags, bytes } | its data
//! ```
//!
//! Linux, `drivers/md/dm-log-writes.c`. A write without FUA comes into the log with the flush after it, and in front of that.

use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// WRITE_LOG_MAGIC.
const MAGIC: u64 = 0x006a_7366_7773_6872;
const DISCARD: u64 = 1 << 2;
const MARK: u64 = 1 << 3;
/// Most bytes of one entry: no bio is larger by far.
const MOST: u64 = 64 << 20;

/// Reads a log from its beginning.
#[derive(Debug)]
pub struct Log {
    file: File,
    block: u64,
    /// Entries that are left, and the block of the next.
    left: u64,
    at: u64,
    /// Flushes that have been applied.
    pub flushes: u64,
}

impl Log {
    /// A log device whose table has been removed: only then is all of it there.
    pub fn open(device: &str) -> Result<Log> {
        let file = File::open(device).with_context(|| format!("open {device}"))?;
        let mut head = [0; 28];
        file.read_exact_at(&mut head, 0)?;
        let magic = long(&head, 0);
        ensure!(magic == MAGIC, "{device} is no log of writes: {magic:#x}");
        ensure!(long(&head, 8) == 1, "{device}: version {}", long(&head, 8));
        let block = long(&head, 24) & 0xffff_ffff;
        ensure!(matches!(block, 512..=4096) && block.is_power_of_two(), "{device}: blocks of {block}");
        Ok(Log { file, block, left: long(&head, 16), at: 1, flushes: 0 })
    }

    /// Applies what comes up to the next mark to `image`; the mark's name. `None` at the end.
    pub fn replay(&mut self, image: &mut [u8]) -> Result<Option<String>> {
        while self.left > 0 {
            self.left -= 1;
            let mut entry = [0; 32];
            self.file.read_exact_at(&mut entry, self.at * self.block)?;
            let [sector, count, flags, bytes] = [0, 8, 16, 24].map(|at| long(&entry, at));
            if flags & MARK != 0 {
                ensure!(bytes <= self.block - 32, "a mark of {bytes} bytes");
                let mut name = vec![0; bytes as usize];
                self.file.read_exact_at(&mut name, self.at * self.block + 32)?;
                self.at += 1;
                return Ok(Some(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned()));
            }
            self.flushes += flags & 1;
            let (from, length) = (sector * self.block, count * self.block);
            ensure!(length <= MOST, "an entry of {length} bytes");
            let Some(place) = image.get_mut(from as usize..(from + length) as usize) else {
                bail!("bytes {from} to {} are not on the disk", from + length)
            };
            self.at += 1;
            if flags & DISCARD != 0 {
                place.fill(0);
                continue;
            }
            self.file.read_exact_at(place, self.at * self.block)?;
            self.at += count;
        }
        Ok(None)
    }
}

fn long(bytes: &[u8], at: usize) -> u64 {
    let mut long = [0; 8];
    let end = bytes.len().min(at + 8);
    long[..end - at].copy_from_slice(&bytes[at..end]);
    u64::from_le_bytes(long)
}
