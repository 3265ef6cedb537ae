//! Swaps: a disk on its way from one backing to another.

use serde::{Deserialize, Serialize};

use crate::size::Size;

/// How far a swap is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum SwapWord {
    /// The content is being copied; the guest writes to the old backing, and what it writes is copied again.
    Copying,
    /// The guest writes to both backings, and what is left is copied.
    Mirroring,
    /// Both are equal; the disk is brought to a quiescent point and goes on with the new one.
    Switching,
    /// The disk is on the new backing. The old one is superseded.
    Done,
    /// The disk is on the old backing, as before. The new one is no copy.
    Failed,
    /// The same, because somebody wanted it.
    Cancelled,
}

impl SwapWord {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            SwapWord::Copying => "copying",
            SwapWord::Mirroring => "mirroring",
            SwapWord::Switching => "switching",
            SwapWord::Done => "done",
            SwapWord::Failed => "failed",
            SwapWord::Cancelled => "cancelled",
        }
    }

    /// Whether the swap is under way.
    pub fn is_under_way(self) -> bool {
        matches!(self, SwapWord::Copying | SwapWord::Mirroring | SwapWord::Switching)
    }
}

/// A swap that is under way, or the last one since the daemon was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SwapReport {
    /// The backing before.
    pub from: String,
    /// The backing to be.
    pub to: String,
    /// How far it is.
    pub state: SwapWord,
    /// Size of the disk.
    pub bytes: u64,
    /// Bytes copied so far; what the guest has changed since it was copied counts again.
    pub copied: u64,
    /// Bytes still to be copied.
    pub left: u64,
    /// Bytes copied per second, on average.
    pub bytes_per_s: u64,
    /// Bytes per second at most, if somebody has said so.
    pub rate: Option<u64>,
    /// Bytes per second that the guest's writes may make to be copied again while the copy does not get ahead of them, if somebody has said so.
    #[serde(default)]
    pub hold: Option<u64>,
    /// The guest's writes are held to that now.
    #[serde(default)]
    pub holding: bool,
    /// Milliseconds since it was begun, or that it took.
    pub for_ms: u64,
    /// Microseconds for which no request was begun at the switch, once it is done. 0: the disk did not have to come to rest for it.
    #[serde(default)]
    pub pause_us: Option<u64>,
    /// Why it failed.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
}

impl SwapReport {
    /// For people.
    pub fn words(&self) -> String {
        let SwapReport { to, state, bytes, left, bytes_per_s, for_ms, .. } = self;
        let time = format!("{:.1} s", *for_ms as f64 / 1000.0);
        match state {
            SwapWord::Done => {
                let pause = match self.pause_us {
                    None => String::new(),
                    Some(0) => ", without a pause".to_owned(),
                    Some(us) => format!(", paused for {us} us"),
                };
                format!("done: on {to} after {time}{pause}")
            }
            SwapWord::Failed => format!("to {to} failed: {}", self.error.as_deref().unwrap_or("no reason")),
            SwapWord::Cancelled => format!("to {to} was cancelled after {time}"),
            _ => format!(
                "{} to {to}: {} of {}, {} left, {}/s{}",
                state.words(),
                Size(bytes.saturating_sub(*left)),
                Size(*bytes),
                Size(*left),
                Size(*bytes_per_s),
                self.hold_words().map_or(String::new(), |words| format!(", {words}"))
            ),
        }
    }

    /// That the guest is held, if it is.
    pub fn hold_words(&self) -> Option<String> {
        let hold = self.hold.filter(|_| self.holding)?;
        Some(format!("writes of the guest held to {}/s", Size(hold)))
    }
}
