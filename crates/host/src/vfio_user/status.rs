//! What a service looks like from outside: counters that its thread writes and anybody reads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_device::Presence;

use super::fault::ClientFault;
use super::held::Held;

/// A snapshot of a service. Counts are since it began.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// A client is connected.
    pub connected: bool,
    /// The process that it is in, if the system knows.
    pub peer: Option<u32>,
    /// Clients that have come so far, without those that were turned away.
    pub connections: u64,
    /// The client maps shadow pages.
    pub shadows: bool,
    /// Ranges that the client has mapped for DMA.
    pub dma_maps: u64,
    /// Bytes in them.
    pub dma_bytes: u64,
    /// Those of the ranges that came with a descriptor, so that the device reaches them.
    pub dma_shared: u64,
    /// Bytes in these.
    pub dma_shared_bytes: u64,
    /// Memory mappings that the client has taken.
    pub mappings: u64,
    /// Bytes of its memory that are pinned for hardware.
    pub pinned_bytes: u64,
    /// Reads of registers and configuration space, by message.
    pub region_reads: u64,
    /// Writes, by message.
    pub region_writes: u64,
    /// Interrupts signalled by this process. Those that hardware signals by itself are not known.
    pub irqs: u64,
    /// Quiescent points that had to be forced, because the device was busy for too long.
    pub forced: u64,
    /// Faults of clients, by name, and what went wrong below.
    pub faults: BTreeMap<Cow<'static, str>, u64>,
    /// The last fault's text.
    pub last_fault: Option<String>,
}

#[derive(Debug, Default)]
struct Faults {
    counts: BTreeMap<Cow<'static, str>, u64>,
    last: Option<String>,
}

/// Where the thread keeps it.
#[derive(Debug, Default)]
pub(super) struct StatusBoard {
    pub connected: AtomicBool,
    pub peer: AtomicU32,
    pub connections: AtomicU64,
    pub shadows: AtomicBool,
    pub dma_maps: AtomicU64,
    pub dma_bytes: AtomicU64,
    pub dma_shared: AtomicU64,
    pub dma_shared_bytes: AtomicU64,
    pub mappings: AtomicU64,
    pub pinned_bytes: AtomicU64,
    pub region_reads: AtomicU64,
    pub region_writes: AtomicU64,
    pub irqs: Arc<AtomicU64>,
    pub forced: AtomicU64,
    faults: Mutex<Faults>,
    device: Mutex<Shown>,
}

/// What the thread says of its device.
#[derive(Debug)]
struct Shown {
    presence: Presence,
    held: Option<Held>,
}

impl Default for Shown {
    fn default() -> Self {
        Shown { presence: Presence::Away, held: None }
    }
}

impl StatusBoard {
    fn device(&self) -> MutexGuard<'_, Shown> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn show(&self, presence: Presence, held: Option<Held>) {
        *self.device() = Shown { presence, held };
    }

    pub fn presence(&self) -> Presence {
        self.device().presence
    }

    pub fn held(&self) -> Option<Duration> {
        self.device().held.map(|held| match held.until() {
            Some(until) => until.saturating_duration_since(Instant::now()),
            None => Duration::MAX,
        })
    }

    pub fn fault(&self, fault: &ClientFault) {
        self.note(fault.name(), fault);
    }

    pub fn note(&self, name: &'static str, what: &dyn std::fmt::Display) {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        *faults.counts.entry(name.into()).or_default() += 1;
        faults.last = Some(what.to_string());
    }

    pub fn read(&self) -> Status {
        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let connected = self.connected.load(Relaxed);
        Status {
            connected,
            peer: Some(self.peer.load(Relaxed)).filter(|peer| connected && *peer != 0),
            connections: self.connections.load(Relaxed),
            shadows: self.shadows.load(Relaxed),
            dma_maps: self.dma_maps.load(Relaxed),
            dma_bytes: self.dma_bytes.load(Relaxed),
            dma_shared: self.dma_shared.load(Relaxed),
            dma_shared_bytes: self.dma_shared_bytes.load(Relaxed),
            mappings: self.mappings.load(Relaxed),
            pinned_bytes: self.pinned_bytes.load(Relaxed),
            region_reads: self.region_reads.load(Relaxed),
            region_writes: self.region_writes.load(Relaxed),
            irqs: self.irqs.load(Relaxed),
            forced: self.forced.load(Relaxed),
            faults: faults.counts.clone(),
            last_fault: faults.last.clone(),
        }
    }
}
