//! A disk is compared with another copy of it while its guest uses it.
//!
//! ```text
//!   guest's queues -> WatchedChannel --> disk          marks what a write touches, before the write begins
//!                          |  map of what was written since the comparison began
//!                     Comparer (a thread of the control side): reads both, then looks at the map
//! ```
//!
//! A block that was written since the beginning is never called different: it is read again, and if it still differs nobody knows whether it
//! did before. The argument is in docs/decisions/0057-verify.md.

mod blocks;
mod comparer;
mod watched;

use crate::channel::Fault;

pub use comparer::Comparer;
pub use watched::Watched;

/// Most ranges that are told one by one.
pub const MOST_RANGES: usize = 64;
/// What is told apart, in bytes.
pub const SECTOR: u64 = 512;

/// A part of both copies, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub len: u64,
}

/// What a comparison has found so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// Bytes that both copies have, all of which are compared.
    pub bytes: u64,
    /// How many of them have been, at least once.
    pub compared: u64,
    /// Bytes of sectors that differ although nobody has written there since the beginning.
    pub different: u64,
    /// How many ranges of neighbouring sectors those are.
    pub ranges: u64,
    /// The first [`MOST_RANGES`] of them.
    pub first: Vec<Range>,
    /// Bytes that differ, or did so at the last look, and were written since the beginning.
    pub written: u64,
    /// How often such places have been compared again.
    pub passes: u64,
}

impl Findings {
    /// Notes sectors that differ. They come in the order of the disk.
    fn differs(&mut self, offset: u64, len: u64) {
        self.different += len;
        match self.first.last_mut() {
            // The last one told is the last one there is, as long as not all are told.
            Some(last) if self.ranges <= MOST_RANGES as u64 && last.offset + last.len == offset => {
                last.len += len;
            }
            _ => {
                self.ranges += 1;
                if self.first.len() < MOST_RANGES {
                    self.first.push(Range { offset, len });
                }
            }
        }
    }
}

/// Why a comparison has ended without a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CompareFault {
    /// The disk could not be read.
    #[error("the disk could not be read at {offset}: {fault}")]
    Disk {
        /// Where, in bytes.
        offset: u64,
        /// What was wrong.
        fault: Fault,
    },
    /// The other copy could not be read.
    #[error("the other copy could not be read at {offset}: {fault}")]
    Other {
        /// Where, in bytes.
        offset: u64,
        /// What was wrong.
        fault: Fault,
    },
    /// It is not wanted any more.
    #[error("it was cancelled")]
    Cancelled,
}
