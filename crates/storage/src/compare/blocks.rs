//! The blocks by which it is noted what was written.

/// Blocks that are told apart: at most so many, unless they would be larger than [`LARGEST`].
const BLOCKS: u64 = 16 << 20;
/// The smallest block, in bytes, and the largest one.
const SMALLEST: u64 = 4 << 10;
const LARGEST: u64 = 64 << 10;

/// How large the blocks of a disk are: 4 KiB up to 64 GiB.
pub(super) fn unit(bytes: u64) -> u64 {
    (bytes / BLOCKS).next_power_of_two().clamp(SMALLEST, LARGEST)
}
