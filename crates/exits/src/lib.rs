//! Which exits a KVM VM takes, who causes them, and what to do about it. For any VMM and any guest on the host.
//!
//! ```text
//!   /proc --> Vm --Watch--> perf rings of its vCPU threads --Decoder--> Event --> Profile --+--> Report --> text, JSON, HTML, SVG
//!              |                (formats from tracefs)                                      |
//!              `--> Totals (debugfs, statistics descriptors): the kernel's own count -------'
//! ```
//!
//! Everything that is read is hostile input: a profile has a bounded number of sites, files have a bounded size, and what cannot be
//! understood is left out and said.
//!
//! Must not know: I/O cores, devices of ours, the daemon.

mod advice;
mod bounded;
mod claim;
mod devices;
mod error;
mod event;
mod format;
mod perf;
mod profile;
mod reason;
mod report;
mod runs;
mod slices;
mod socket;
mod symbols;
mod totals;
mod trace;
mod tracefs;
mod vm;
mod watch;

pub use advice::{Action, Certainty, Finding, HostFacts, action_of, advise};
pub use bounded::{excerpt, plain};
pub use claim::instances;
pub use devices::{Devices, Layout, Place};
pub use error::{ExitsError, Result};
pub use event::{Decoder, Detail, Event};
pub use format::{Field, Format};
pub use profile::{Profile, SITES, Site, Tally, Thread};
pub use reason::{Isa, Kind, Reason};
pub use report::{Names, Report, Row, RunRow, SiteRow, Subject};
pub use runs::{LONGEST, Run, Runs, Step};
pub use socket::{Chardev, Endpoint, Lines, part, values};
pub use symbols::{Confidence, Fit, Symbols};
pub use totals::Totals;
pub use trace::{Ending, Losses, Page, Traced};
pub use tracefs::Tracefs;
pub use vm::Vm;
pub use watch::{Options, Seen, Source, Watch};
