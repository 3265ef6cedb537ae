//! `ioplane upgrade`: another binary takes everything over, and no front end sees a disconnect.
//!
//! ```text
//!   predecessor                                  successor (its child, the socket between them on its standard input)
//!   greeting            <-------------------->   greeting                    which formats: wire
//!   Daemon, locks, listeners ---------------->   reads configuration and state.json, starts its I/O cores   --> Ready
//!   Prepare, images and memory disks  ------->   opens them a second time                                --> Prepared
//!   all devices quiescent; guests wait from here on
//!   Device, its descriptors  ---------------->   maps, checks, loads                                       --> Loaded
//!   Commit  --------------------------------->                                                               --> Mine
//!   leaves, touching nothing                     starts all devices; guests wait no longer                 --> Report
//! ```
//!
//! Until `Mine` is written everything is the predecessor's: whatever goes wrong, it resumes what it has quiesced and says why.
//! From then on everything is the successor's. What was written into a socket outlives the writer, so the predecessor always
//! learns which of the two it is. See docs/decisions/0011-upgrade.md.

mod disk;
mod handover;
mod kill;
mod nic;
mod predecessor;
mod successor;
mod switch;
#[cfg(test)]
mod tests;
mod wire;
mod words;

use std::time::Duration;

pub use predecessor::HandoverContext;
pub use successor::{HandoverReport, Succession, inherit};

/// How long a successor may take to get ready, if nobody says. Guests do not wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(20);
/// How long a device may take to drain, before what it has in flight is left to the successor to do again. Others wait with it.
const DRAIN: Duration = Duration::from_millis(50);
/// How long guests wait for the successor at most, before they are given back to the predecessor.
const HOLD: Duration = Duration::from_secs(3);
/// How long the report waits for devices with nothing in flight.
const NEWS: Duration = Duration::from_secs(1);
/// How long the status waits for those whose disks are slow, before it says that they do not answer.
const SLOW_NEWS: Duration = Duration::from_secs(60);
