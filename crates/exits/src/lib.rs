//! Which exits a KVM VM takes, who causes them, and what to do about it. For any VMM and any guest on the host.
//!
//! ```text
//!   /proc --> Vm --Watch--> perf rings of its vCPU threads --Decoder--> Event --> Profile --+--> Report --> text, JSON, HTML, SVG
//!              |                (formats from tracefs)                                      |     |  ^
//!              |--> Totals (kvmstat): the kernel's own count -------------------------------|     v  | findings
//!              `--> Qmp (the VM's PCI layout) --> Devices: typed places --------------------'    advise
//! ```
//!
//! Everything that is read is hostile input: a profile has a bounded number of sites, files have a bounded size, and what cannot be
//! understood is left out and said.
//!
//! Must not know: I/O cores, devices of ours, the daemon.

mod advice;
mod claim;
mod count;
mod devices;
mod error;
mod event;
mod examine;
mod format;
mod host;
mod perf;
mod profile;
mod queues;
mod reason;
mod record;
mod report;
mod runs;
mod seen;
mod slices;
mod times;
mod trace;
mod tracefs;
mod vmm;
mod watch;

pub use advice::{action_of, advise};
pub use claim::instances;
pub use devices::{DeviceModel, DevicePlace, Devices, GuestRegions, Layout, RegisterRole};
pub use error::{ExitsError, Result};
pub use event::{Decoder, Detail, Event, FaultCause};
pub use format::{Field, Format};
pub use host::HostFacts;
pub use profile::{Profile, SITES, Site, SiteCounts, Thread};
pub use queues::QueuePorts;
pub use reason::{Isa, Kind, Reason};
pub use record::{ExitRecording, RecordedMachine};
pub use report::{
    Action, Certainty, ExitRow, Finding, HostParts, Names, Report, RunRow, RunStart, SiteRow, Subject,
};
pub use runs::{LONGEST, Run, RunCounts, Runs};
pub use seen::WatchCounts;
pub use times::SiteTimes;
pub use trace::{Ending, Losses, Page, Traced};
pub use tracefs::Tracefs;
pub use vmm::{VmmRow, VmmTime};
pub use watch::{Source, Watch, WatchOptions};
