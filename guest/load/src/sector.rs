//! What a written sector looks like, and how to tell what is wrong with one.
//!
//! Each 512-byte sector stands for itself, so that a block torn between sectors is seen as such:
//!
//! ```text
//!   word 0      1..2         3             4         5      6..62                        63
//!   magic  | device name | sector number | sequence | nonce | pseudo-random from 3, 4, 5 | checksum of 0..62
//! ```
//!
//! All words are 64-bit little-endian.

use std::fmt;

/// Bytes of a sector.
pub const SECTOR: usize = 512;
const WORDS: usize = SECTOR / 8;
const MAGIC: u64 = u64::from_le_bytes(*b"ioplane1");
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Who writes: a disk's name and a number that tells one load from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    device: [u8; 16],
    nonce: u64,
}

/// What a block must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// Nothing is known.
    Anything,
    /// The write with this sequence number.
    Content(u32),
    /// Zeroes.
    Zero,
    /// Zeroes, or any write of this load up to this sequence number, sector by sector: what a discard leaves.
    Discarded(u32),
}

/// What is wrong with a block. Sector numbers are absolute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// An earlier write: the later one was lost.
    Stale {
        /// Where.
        sector: u64,
        /// What must be there.
        expected: u32,
        /// What is.
        found: u32,
    },
    /// A write that the ledger does not know yet to be there (found a later one).
    Newer {
        /// Where.
        sector: u64,
        /// What must be there.
        expected: u32,
        /// What is.
        found: u32,
    },
    /// Sectors of one block come from different writes.
    Torn {
        /// The first sector that differs from the ones before it.
        sector: u64,
        /// The sequence number before it; 0 for zeroes.
        before: u32,
        /// The one from there on; 0 for zeroes.
        after: u32,
    },
    /// A well-formed sector of another place.
    Misplaced {
        /// Where it was found.
        sector: u64,
        /// Where it belongs.
        belongs: u64,
    },
    /// A well-formed sector of another disk or another load.
    Foreign {
        /// Where it was found.
        sector: u64,
        /// The disk it names.
        device: [u8; 16],
        /// The load's number it names.
        nonce: u64,
    },
    /// Zeroes where data must be.
    Lost {
        /// Where.
        sector: u64,
        /// What must be there.
        expected: u32,
    },
    /// Data where zeroes must be.
    NotZero {
        /// Where.
        sector: u64,
    },
    /// The checksum is wrong: bytes were changed.
    Corrupt {
        /// Where.
        sector: u64,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Mismatch::Stale { sector, expected, found } => {
                write!(f, "sector {sector}: stale, holds write {found}, must hold {expected}")
            }
            Mismatch::Newer { sector, expected, found } => {
                write!(f, "sector {sector}: holds write {found}, newer than {expected}")
            }
            Mismatch::Torn { sector, before, after } => {
                write!(f, "sector {sector}: torn, write {before} before it, {after} from it on")
            }
            Mismatch::Misplaced { sector, belongs } => {
                write!(f, "sector {sector}: misplaced, belongs to sector {belongs}")
            }
            Mismatch::Foreign { sector, device, nonce } => {
                let name = String::from_utf8_lossy(&device).trim_end_matches('\0').to_string();
                write!(f, "sector {sector}: foreign, belongs to disk {name:?}, load {nonce:#x}")
            }
            Mismatch::Lost { sector, expected } => {
                write!(f, "sector {sector}: zeroes, must hold write {expected}")
            }
            Mismatch::NotZero { sector } => write!(f, "sector {sector}: data, must be zeroes"),
            Mismatch::Corrupt { sector } => write!(f, "sector {sector}: corrupt, checksum does not fit"),
        }
    }
}

enum Found {
    Zero,
    Write(u32),
}

impl Stamp {
    /// Names the writer; of `device` the first 16 bytes count.
    pub fn new(device: &str, nonce: u64) -> Self {
        let mut name = [0; 16];
        for (to, from) in name.iter_mut().zip(device.bytes()) {
            *to = from;
        }
        Stamp { device: name, nonce }
    }

    /// Fills whole sectors of `buffer`, the first of which is number `sector` of the disk, as write `sequence` (from 1).
    pub fn fill(&self, buffer: &mut [u8], sector: u64, sequence: u32) {
        for (number, bytes) in (sector..).zip(buffer.chunks_exact_mut(SECTOR)) {
            self.fill_one(bytes, number, sequence);
        }
    }

    fn fill_one(&self, bytes: &mut [u8], number: u64, sequence: u32) {
        let mut words = [0u64; WORDS];
        words[0] = MAGIC;
        words[1] = word(&self.device[..8]);
        words[2] = word(&self.device[8..]);
        words[3] = number;
        words[4] = u64::from(sequence);
        words[5] = self.nonce;
        let mut seed = mix(number ^ self.nonce.rotate_left(17)) ^ mix(u64::from(sequence));
        for slot in &mut words[6..WORDS - 1] {
            seed = seed.wrapping_add(STEP);
            *slot = seed ^ (seed >> 29);
        }
        words[WORDS - 1] = checksum(&words[..WORDS - 1]);
        for (to, from) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&from.to_le_bytes());
        }
    }

    /// Checks one block (whole sectors, the first is number `sector`) against what it must hold.
    pub fn check(&self, block: &[u8], sector: u64, expect: Expect) -> Result<(), Mismatch> {
        if expect == Expect::Anything {
            return Ok(());
        }
        let mut before: Option<u32> = None;
        let mut first = Ok(());
        for (number, bytes) in (sector..).zip(block.chunks_exact(SECTOR)) {
            let sequence = match self.read(bytes, number)? {
                Found::Zero => 0,
                Found::Write(sequence) => sequence,
            };
            if let (Some(before), false) = (before, matches!(expect, Expect::Discarded(_)))
                && before != sequence
            {
                return Err(Mismatch::Torn { sector: number, before, after: sequence });
            }
            before = Some(sequence);
            if first.is_ok() {
                first = judge(number, sequence, expect);
            }
        }
        first
    }

    /// The sequence number a block holds throughout; 0 for zeroes.
    pub fn sequence(&self, block: &[u8], sector: u64) -> Result<u32, Mismatch> {
        let mut before = None;
        for (number, bytes) in (sector..).zip(block.chunks_exact(SECTOR)) {
            let sequence = match self.read(bytes, number)? {
                Found::Zero => 0,
                Found::Write(sequence) => sequence,
            };
            match before {
                Some(before) if before != sequence => {
                    return Err(Mismatch::Torn { sector: number, before, after: sequence });
                }
                _ => before = Some(sequence),
            }
        }
        Ok(before.unwrap_or(0))
    }

    fn read(&self, bytes: &[u8], number: u64) -> Result<Found, Mismatch> {
        let mut words = [0u64; WORDS];
        for (to, from) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *to = word(from);
        }
        if words.iter().all(|w| *w == 0) {
            return Ok(Found::Zero);
        }
        if words[0] != MAGIC || words[WORDS - 1] != checksum(&words[..WORDS - 1]) {
            return Err(Mismatch::Corrupt { sector: number });
        }
        let mut device = [0; 16];
        device.copy_from_slice(&bytes[8..24]);
        if device != self.device || words[5] != self.nonce {
            return Err(Mismatch::Foreign { sector: number, device, nonce: words[5] });
        }
        if words[3] != number {
            return Err(Mismatch::Misplaced { sector: number, belongs: words[3] });
        }
        u32::try_from(words[4]).map(Found::Write).map_err(|_| Mismatch::Corrupt { sector: number })
    }
}

fn judge(sector: u64, found: u32, expect: Expect) -> Result<(), Mismatch> {
    match expect {
        Expect::Anything => Ok(()),
        Expect::Zero if found == 0 => Ok(()),
        Expect::Zero => Err(Mismatch::NotZero { sector }),
        Expect::Discarded(last) if found <= last => Ok(()),
        Expect::Discarded(last) => Err(Mismatch::Newer { sector, expected: last, found }),
        Expect::Content(expected) if found == expected => Ok(()),
        Expect::Content(expected) if found == 0 => Err(Mismatch::Lost { sector, expected }),
        Expect::Content(expected) if found < expected => Err(Mismatch::Stale { sector, expected, found }),
        Expect::Content(expected) => Err(Mismatch::Newer { sector, expected, found }),
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
}

fn checksum(words: &[u64]) -> u64 {
    words.iter().fold(STEP, |sum, w| (sum ^ w).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(23))
}

/// Spreads the bits of a number (the finalizer of splitmix64).
pub(crate) fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(STEP);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
#[path = "sector_tests.rs"]
mod tests;
