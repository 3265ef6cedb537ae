//! The control side of a switch: who is plugged in, who looks on, what it has learned. Each change is a new snapshot for the cores
//! ([`crate::fabric`]).

mod capture;
mod port;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

pub use capture::Capture;
pub use port::{Port, PortOptions, PortReading};

use crate::error::NetworkError;
use crate::fabric::capture::{CaptureOptions, Ring};
use crate::fabric::{Fabric, Place, PortEntry, PortShared};
use crate::{MOST_PORTS, Mac};

/// What can be chosen about a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwitchSettings {
    /// Addresses that it can learn, about (16 bytes each).
    pub addresses: usize,
    /// Addresses that it learns from one port; from an uplink it is all of them.
    pub addresses_per_port: u32,
    /// How long an address is remembered after its last frame.
    pub ageing: Duration,
    /// How long an address that moves too often is kept where it was last.
    pub hold: Duration,
    /// What each port may have flooded, in bytes a second of copies made. A copy of a small frame counts as 256 bytes.
    pub flood_rate: u64,
    /// The same, at once after a pause.
    pub flood_burst: u64,
    /// Buffers of each receiving queue, of [`crate::BUFFER_BYTES`] bytes.
    pub buffers: u16,
}

impl Default for SwitchSettings {
    fn default() -> Self {
        SwitchSettings {
            addresses: 8192,
            addresses_per_port: 512,
            ageing: Duration::from_secs(300),
            hold: Duration::from_secs(10),
            flood_rate: 256 << 20,
            flood_burst: 16 << 20,
            buffers: 64,
        }
    }
}

/// An address that a switch has learned.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Learned {
    /// The address.
    pub mac: Mac,
    /// Its VLAN, zero for none.
    pub vlan: u16,
    /// The port where it was last seen.
    pub port: String,
    /// How long ago, in steps of a quarter of a second.
    pub age: Duration,
    /// It moved too often and is kept where it is.
    pub held: bool,
}

/// A switch of Ethernet frames. Lives as long as somebody holds it, its ports among them.
pub struct Switch {
    name: String,
    settings: SwitchSettings,
    fabric: Arc<Fabric>,
    /// Of the port that was plugged in last; changed while a change of ports is under way.
    generation: AtomicU16,
}

impl Switch {
    /// A switch without ports.
    pub fn new(name: &str, settings: SwitchSettings) -> Arc<Switch> {
        let fabric = Fabric::new(name, settings.addresses, settings.ageing, settings.hold);
        Arc::new(Switch {
            name: name.to_owned(),
            settings,
            fabric: Arc::new(fabric),
            generation: AtomicU16::new(0),
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What was chosen.
    pub fn settings(&self) -> &SwitchSettings {
        &self.settings
    }

    /// Adds a port. Its link is down until [`Port::set_up`].
    pub fn plug(self: &Arc<Self>, options: PortOptions) -> Result<Port, NetworkError> {
        let mut change = self.fabric.snapshots.change();
        if change.entries.iter().flatten().any(|entry| entry.shared.name == options.name) {
            return Err(NetworkError::NameTaken { switch: self.name.clone(), port: options.name });
        }
        let Some(slot) = (0..MOST_PORTS).find(|slot| change.entries[usize::from(*slot)].is_none()) else {
            return Err(NetworkError::NoSlot { switch: self.name.clone() });
        };
        let generation = self.generation.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let shared = Arc::new(options.shared(Place { slot, generation }, &self.settings)?);
        change.entries[usize::from(slot)] = Some(PortEntry { shared: shared.clone(), ring: None });
        change.publish();
        Ok(Port::new(self.clone(), shared, options.vlan))
    }

    /// Takes a port out: nobody finds it any more, and what it has been learned for is forgotten.
    fn unplug(&self, shared: &PortShared) {
        let mut change = self.fabric.snapshots.change();
        change.entries[usize::from(shared.place.slot)] = None;
        // The slot is nobody else's before its addresses are forgotten.
        let _exclusive = change.publish();
        self.fabric.table.forget(shared.place);
    }

    /// Each port, by slot.
    pub fn ports(&self) -> Vec<PortReading> {
        let snapshot = self.fabric.snapshots.current();
        snapshot
            .taken
            .iter()
            .filter_map(|slot| snapshot.entry(*slot))
            .map(|entry| PortReading::of(&entry.shared, &self.fabric.table))
            .collect()
    }

    /// What it has learned. (Configured addresses are not learned; they are their ports'.)
    pub fn table(&self) -> Vec<Learned> {
        let snapshot = self.fabric.snapshots.current();
        let known = self.fabric.table.each(self.fabric.tick());
        let known = known.filter_map(|(mac, vlan, place, age, held)| {
            let shared = &snapshot.entry(place.slot)?.shared;
            (shared.place == place).then(|| Learned { mac, vlan, port: shared.name.clone(), age, held })
        });
        known.collect()
    }

    /// Begins to copy the frames of a port.
    pub fn capture(self: &Arc<Self>, port: &str, options: CaptureOptions) -> Result<Capture, NetworkError> {
        let mut change = self.fabric.snapshots.change();
        let Some(entry) = change.entries.iter_mut().flatten().find(|entry| entry.shared.name == port) else {
            return Err(NetworkError::NoSuchPort { switch: self.name.clone(), port: port.to_owned() });
        };
        if entry.ring.is_some() {
            return Err(NetworkError::Captured { port: port.to_owned() });
        }
        let ring = Arc::new(Ring::new(options)?);
        entry.ring = Some(ring.clone());
        change.publish();
        Ok(Capture { switch: self.clone(), port: port.to_owned(), ring })
    }

    fn end_capture(&self, ring: &Arc<Ring>) {
        let mut change = self.fabric.snapshots.change();
        for entry in change.entries.iter_mut().flatten() {
            entry.ring.take_if(|other| Arc::ptr_eq(other, ring));
        }
        change.publish();
    }
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch").field("name", &self.name).finish_non_exhaustive()
    }
}
