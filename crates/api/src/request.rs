//! Bodies of requests that change something; those that make something are the forms of [`crate::spec`].

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::size::Size;
use crate::spec::{DirectWord, EngineWord, FormatWord, LinkWord, MannersWord, NotifyWord};

/// A change of a disk: a new size, or another backing.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChangeForm {
    /// New size.
    pub size: Option<Size>,
    /// It may be smaller than the old one.
    pub shrink: bool,
    /// Another image, whose content is the same.
    pub path: Option<PathBuf>,
    /// Other memory: zeros, of this size.
    pub memory: Option<Size>,
    /// Of that image: `raw`, whatever it looks like.
    pub format: Option<FormatWord>,
    /// Past the page cache.
    pub direct: Option<DirectWord>,
    /// Who does the I/O.
    pub engine: Option<EngineWord>,
}

/// A second socket for a disk.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TwinForm {
    /// Where; beside the first, if nobody says.
    pub socket: Option<PathBuf>,
}

/// A change of a NIC.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkForm {
    /// Its link.
    pub link: LinkWord,
}

/// A new core.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CoreForm {
    /// Processor to pin it to.
    pub cpu: Option<u32>,
    /// How it starts.
    pub notify: Option<NotifyWord>,
    /// Microseconds without work before it sleeps.
    pub spin_us: Option<u64>,
    /// Most requests from one queue in a turn.
    pub budget: Option<u32>,
    /// Towards others.
    pub manners: Option<MannersWord>,
}

/// How queues learn of requests.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct NotifyForm {
    /// Polled or notified.
    pub notify: Option<NotifyWord>,
    /// Microseconds without work before a polled core sleeps.
    pub spin_us: Option<u64>,
}

/// A queue that is to move.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveForm {
    /// Whose: a disk's, a NIC's, or that of a switch's uplink.
    #[serde(alias = "device")]
    pub disk: String,
    /// Which.
    pub queue: u16,
    /// Where to.
    pub core: u32,
}

/// How a PCI function is to come to rest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuiesceForm {
    /// How long it may take to come to rest by itself.
    pub deadline_ms: u64,
    /// If it has not by then, it goes on instead of being stopped by force.
    pub or_go_on: bool,
}

impl Default for QuiesceForm {
    fn default() -> Self {
        QuiesceForm { deadline_ms: 2000, or_go_on: false }
    }
}

/// Another binary in the daemon's place.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpgradeForm {
    /// The binary: where the daemon's own was started from, if nobody says.
    pub binary: Option<PathBuf>,
    /// Seconds that it may take to get ready.
    pub patience_s: Option<u64>,
}
