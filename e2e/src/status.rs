//! What the daemon says of itself, as far as tests and the demo read it: `ioplane status --json`.

use anyhow::{Context, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    pub disks: Vec<Disk>,
    pub nics: Vec<Nic>,
    /// I/O cores.
    pub cores: Vec<Core>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Disk {
    pub name: String,
    /// `served`, `opening`, `failed`, `busy`.
    pub state: String,
    /// Why it failed.
    pub error: Option<String>,
    /// A VMM is connected.
    pub connected: bool,
    /// Bytes.
    pub size: u64,
    /// Where VMMs connect.
    pub socket: PathBuf,
    /// Behind which of its sockets its guest runs: `socket` or `migration_socket`.
    pub owner: Option<String>,
    pub backing: Backing,
    /// Virtio features that the guest's driver accepted, as bits.
    pub features: u64,
    /// What VMMs did wrong, by name.
    pub front_end_faults: BTreeMap<String, u64>,
    /// All queues together.
    pub totals: Counts,
    pub queues: Vec<Queue>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Nic {
    pub name: String,
    /// `served`, `opening`, `failed`, `busy`.
    pub state: String,
    pub mac: String,
    /// A VMM is connected.
    pub connected: bool,
    /// What VMMs did wrong, by name.
    pub front_end_faults: BTreeMap<String, u64>,
    /// From the guest.
    pub sent: Frames,
    /// To the guest.
    pub received: Frames,
}

/// What some queues of a NIC did.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Frames {
    /// Frames; a large one counts as one.
    pub frames: u64,
    pub bytes: u64,
    pub kicks: u64,
    pub interrupts: u64,
    /// Faults of the guest.
    pub faults: u64,
}

/// What is behind a disk.
#[derive(Clone, Debug, Deserialize)]
pub struct Backing {
    /// `file` or `memory`.
    pub kind: String,
    /// The image.
    pub path: Option<PathBuf>,
    /// `io_uring` or `threads`.
    pub engine: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Queue {
    pub index: u16,
    /// The I/O core it is on.
    pub core: Option<u32>,
    /// Why it has stopped for good.
    pub fault: Option<Fault>,
    #[serde(flatten)]
    pub counts: Counts,
}

/// What a guest did to its queue.
#[derive(Clone, Debug, Deserialize)]
pub struct Fault {
    /// Short name.
    pub name: String,
    /// In words.
    pub text: String,
}

/// What was done so far.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Counts {
    /// Requests answered.
    pub requests: u64,
    /// Kicks, the sum of the eventfds' counters.
    pub kicks: u64,
    pub interrupts: u64,
    /// Requests that failed, by cause.
    pub errors: Errors,
    /// Faults of the guest.
    pub faults: u64,
    /// Requests done again after a crash.
    pub replayed: u64,
}

/// Requests that failed, by cause.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct Errors {
    pub io: u64,
    pub space: u64,
    pub request: u64,
    pub unsupported: u64,
}

/// One I/O core.
#[derive(Clone, Debug, Deserialize)]
pub struct Core {
    pub id: u32,
    /// `polled` or `notified`.
    pub notify: String,
    pub queues: u32,
    /// Processor time so far, microseconds.
    pub cpu_us: u64,
}

impl Status {
    pub fn disk(&self, name: &str) -> Result<Disk> {
        let found = self.disks.iter().find(|disk| disk.name == name).cloned();
        found.with_context(|| format!("the daemon has no disk {name}"))
    }

    pub fn nic(&self, name: &str) -> Result<&Nic> {
        self.nics.iter().find(|nic| nic.name == name).with_context(|| format!("the daemon has no nic {name}"))
    }

    /// Both directions of some NICs together.
    pub fn sum_nics(&self, names: &[&str]) -> Result<Frames> {
        let mut sum = Frames::default();
        for name in names {
            let nic = self.nic(name)?;
            for side in [nic.sent, nic.received] {
                sum.frames += side.frames;
                sum.bytes += side.bytes;
                sum.kicks += side.kicks;
                sum.interrupts += side.interrupts;
            }
        }
        Ok(sum)
    }

    /// Some disks together.
    pub fn sum(&self, names: &[&str]) -> Result<Counts> {
        let mut sum = Counts::default();
        for name in names {
            let one = self.disk(name)?.totals;
            sum.requests += one.requests;
            sum.kicks += one.kicks;
            sum.interrupts += one.interrupts;
        }
        Ok(sum)
    }

    /// Everything that went wrong, in words; nothing in a run in which nobody misbehaves.
    pub fn complaints(&self) -> Vec<String> {
        let mut found = Vec::new();
        for disk in &self.disks {
            let name = &disk.name;
            let Errors { io, space, request, unsupported } = disk.totals.errors;
            let errors = io + space + request + unsupported;
            if errors > 0 {
                found.push(format!("disk {name}: {errors} requests failed: {:?}", disk.totals.errors));
            }
            if disk.totals.faults > 0 {
                let which: Vec<_> = disk.queues.iter().filter_map(|queue| queue.fault.as_ref()).collect();
                found.push(format!("disk {name}: {} faults of its guest, now {which:?}", disk.totals.faults));
            }
            if !disk.front_end_faults.is_empty() {
                found.push(format!("disk {name}: faults of its VMM: {:?}", disk.front_end_faults));
            }
            if disk.state != "served" {
                found.push(format!(
                    "disk {name} is {}: {}",
                    disk.state,
                    disk.error.as_deref().unwrap_or("no reason")
                ));
            }
        }
        for nic in &self.nics {
            let (name, faults) = (&nic.name, nic.sent.faults + nic.received.faults);
            if faults > 0 || !nic.front_end_faults.is_empty() || nic.state != "served" {
                let theirs = &nic.front_end_faults;
                found.push(format!(
                    "nic {name} is {}, faults of its guest: {faults}, of its VMM: {theirs:?}",
                    nic.state
                ));
            }
        }
        found
    }
}
