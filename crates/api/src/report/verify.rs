//! Comparisons of a disk with another copy.

use serde::{Deserialize, Serialize};

use crate::size::Size;

/// How far a comparison is, or what came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum VerifyWord {
    /// Both are being read.
    Comparing,
    /// Nothing differs, but for what was written meanwhile.
    Equal,
    /// Something differs that was not written meanwhile, or the sizes do.
    Different,
    /// One of both could not be read.
    Failed,
    /// Somebody has ended it.
    Cancelled,
}

impl VerifyWord {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            VerifyWord::Comparing => "comparing",
            VerifyWord::Equal => "equal",
            VerifyWord::Different => "different",
            VerifyWord::Failed => "failed",
            VerifyWord::Cancelled => "cancelled",
        }
    }

    /// Whether the comparison is under way.
    pub fn is_under_way(self) -> bool {
        self == VerifyWord::Comparing
    }
}

/// Bytes that differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RangeReport {
    /// Where they begin.
    pub offset: u64,
    /// How many they are.
    pub len: u64,
}

/// A comparison that is under way, or the last one since the daemon was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct VerifyReport {
    /// The other copy.
    pub with: String,
    /// How far it is, or what came of it.
    pub state: VerifyWord,
    /// Size of the disk.
    pub bytes: u64,
    /// Size of the other copy.
    pub other_bytes: u64,
    /// Bytes compared so far.
    pub compared: u64,
    /// Bytes that differ and were not written meanwhile, in whole sectors of 512 bytes.
    pub different: u64,
    /// How many ranges of neighbouring sectors those are.
    pub ranges: u64,
    /// The first 64 of them.
    pub first: Vec<RangeReport>,
    /// Bytes of blocks that the guest wrote meanwhile and that differed at the last look: nothing can be said of them.
    pub written: u64,
    /// Bytes of each copy compared per second, on average.
    pub bytes_per_s: u64,
    /// Bytes per second at most, if somebody has said so.
    pub rate: Option<u64>,
    /// Milliseconds since it was begun, or that it took.
    pub for_ms: u64,
    /// Why it failed.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
}

impl VerifyReport {
    /// For people, in a line.
    pub fn words(&self) -> String {
        let VerifyReport { with, state, bytes, other_bytes, compared, different, ranges, .. } = self;
        let time = format!("{:.1} s", self.for_ms as f64 / 1000.0);
        let written = match self.written {
            0 => String::new(),
            written => format!(", written meanwhile: {}", Size(written)),
        };
        match state {
            VerifyWord::Comparing => format!(
                "comparing with {with}: {} of {}, {}/s",
                Size(*compared),
                Size(*bytes),
                Size(self.bytes_per_s)
            ),
            VerifyWord::Equal => format!("equal to {with}: {} compared in {time}{written}", Size(*compared)),
            VerifyWord::Different => {
                let size = match bytes == other_bytes {
                    true => String::new(),
                    false => format!(", size {} and {}", Size(*bytes), Size(*other_bytes)),
                };
                let content = match ranges {
                    0 => "no difference in the content".to_owned(),
                    1 => format!("{} in 1 range", Size(*different)),
                    ranges => format!("{} in {ranges} ranges", Size(*different)),
                };
                format!(
                    "different from {with}: {content}{size}, {} compared in {time}{written}",
                    Size(*compared)
                )
            }
            VerifyWord::Failed => {
                format!("comparing with {with} failed: {}", self.error.as_deref().unwrap_or("no reason"))
            }
            VerifyWord::Cancelled => format!("comparing with {with} was cancelled after {time}"),
        }
    }
}
