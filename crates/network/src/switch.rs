//! The switch: who is plugged in, what it has learned.

// CONTROL: plugging, unplugging and capturing take a lock; no poller does.
#![expect(
    clippy::disallowed_types,
    reason = "the list of ports is changed by threads of the control plane only"
)]

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use crossbeam_queue::ArrayQueue;

use crate::capture::{Capture, CaptureOptions, Ring};
use crate::error::NetworkError;
use crate::plan::{Face, Plan};
use crate::port::{Port, PortOptions, PortReading};
use crate::station::Station;
use crate::table::{Place, Table, Tick};
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
    /// Trays of each receiving queue, of [`crate::TRAY`] bytes.
    pub trays: u16,
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
            trays: 64,
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

/// How an outlet gets a new plan.
pub(crate) type PlanMail = ArrayQueue<Arc<Plan>>;

#[derive(Debug)]
struct Control {
    plan: Arc<Plan>,
    /// Plans that some outlet may still go by: dropped here, so that no poller frees memory.
    old: Vec<Arc<Plan>>,
    outlets: Vec<Weak<PlanMail>>,
    generation: u16,
}

/// A switch of Ethernet frames. Lives as long as somebody holds it, its ports among them.
pub struct Switch {
    name: String,
    settings: SwitchSettings,
    // CONTROL: threads of the control plane.
    control: Mutex<Control>,
    /// Counts plans.
    version: AtomicU64,
    /// Counts links that came up.
    raised: AtomicU64,
    table: Table,
    began: Instant,
}

impl Switch {
    /// A switch without ports.
    pub fn new(name: &str, settings: SwitchSettings) -> Arc<Switch> {
        // Unknown to guests: who knows it can choose addresses that share a set of the table.
        let seed = RandomState::new().hash_one(name);
        let control =
            Control { plan: Arc::new(Plan::empty()), old: Vec::new(), outlets: Vec::new(), generation: 0 };
        Arc::new(Switch {
            name: name.to_owned(),
            table: Table::new(settings.addresses, settings.ageing, settings.hold, seed),
            settings,
            control: Mutex::new(control),
            version: AtomicU64::new(0),
            raised: AtomicU64::new(0),
            began: Instant::now(),
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
        let mut control = self.control();
        let mut faces = control.plan.faces();
        if faces.iter().flatten().any(|face| face.station.name == options.name) {
            return Err(NetworkError::NameTaken { switch: self.name.clone(), port: options.name });
        }
        let Some(slot) = (0..MOST_PORTS).find(|slot| faces[usize::from(*slot)].is_none()) else {
            return Err(NetworkError::NoSlot { switch: self.name.clone() });
        };
        control.generation = control.generation.wrapping_add(1);
        let place = Place { slot, generation: control.generation };
        let station = Arc::new(options.station(place, &self.settings)?);
        faces[usize::from(slot)] = Some(Face { station: station.clone(), ring: None });
        self.follow(&mut control, faces);
        Ok(Port::new(self.clone(), station, options.vlan))
    }

    /// Takes a port out: nobody finds it any more, and what it has been learned for is forgotten.
    pub(crate) fn unplug(&self, station: &Station) {
        let mut control = self.control();
        let mut faces = control.plan.faces();
        faces[usize::from(station.place.slot)] = None;
        self.follow(&mut control, faces);
        self.table.forget(station.place);
    }

    /// Each port, by slot.
    pub fn ports(&self) -> Vec<PortReading> {
        let plan = self.control().plan.clone();
        plan.taken
            .iter()
            .filter_map(|slot| plan.face(*slot))
            .map(|face| PortReading::of(&face.station, self))
            .collect()
    }

    /// What it has learned. (Configured addresses are not learned; they are their ports'.)
    pub fn table(&self) -> Vec<Learned> {
        let plan = self.control().plan.clone();
        let now = self.tick();
        let known = self.table.each(now).filter_map(|(mac, vlan, place, age, held)| {
            let station = &plan.face(place.slot)?.station;
            (station.place == place).then(|| Learned { mac, vlan, port: station.name.clone(), age, held })
        });
        known.collect()
    }

    /// Begins to copy the frames of a port.
    pub fn capture(self: &Arc<Self>, port: &str, options: CaptureOptions) -> Result<Capture, NetworkError> {
        let mut control = self.control();
        let mut faces = control.plan.faces();
        let Some(face) = faces.iter_mut().flatten().find(|face| face.station.name == port) else {
            return Err(NetworkError::NoSuchPort { switch: self.name.clone(), port: port.to_owned() });
        };
        if face.ring.is_some() {
            return Err(NetworkError::Captured { port: port.to_owned() });
        }
        let ring = Arc::new(Ring::new(options)?);
        face.ring = Some(ring.clone());
        self.follow(&mut control, faces);
        Ok(Capture { switch: self.clone(), port: port.to_owned(), ring })
    }

    pub(crate) fn end_capture(&self, ring: &Arc<Ring>) {
        let mut control = self.control();
        let mut faces = control.plan.faces();
        for face in faces.iter_mut().flatten() {
            face.ring.take_if(|other| Arc::ptr_eq(other, ring));
        }
        self.follow(&mut control, faces);
    }

    /// Makes a plan of `faces` the one that everybody goes by: outlets from their next poll on.
    fn follow(&self, control: &mut Control, faces: Vec<Option<Face>>) {
        let plan = Arc::new(Plan::new(faces));
        let old = std::mem::replace(&mut control.plan, plan.clone());
        control.old.push(old);
        control.outlets.retain(|mail| match mail.upgrade() {
            Some(mail) => {
                drop(mail.force_push(plan.clone()));
                true
            }
            None => false,
        });
        self.version.fetch_add(1, Ordering::Release);
        control.old.retain(|plan| Arc::strong_count(plan) > 1);
    }

    /// Enters an outlet: the plan now, and where it gets the next ones.
    pub(crate) fn enter(&self) -> (u64, Arc<Plan>, Arc<PlanMail>) {
        let mut control = self.control();
        let mail = Arc::new(PlanMail::new(1));
        control.outlets.push(Arc::downgrade(&mail));
        (self.version(), control.plan.clone(), mail)
    }

    /// Counts plans. A poller looks at it once a batch.
    #[inline]
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    pub(crate) fn learned(&self) -> &Table {
        &self.table
    }

    #[inline]
    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    fn tick(&self) -> Tick {
        Tick::of(self.elapsed())
    }

    /// The next number of a link that comes up.
    pub(crate) fn raise(&self) -> u64 {
        self.raised.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Links that come up later have higher numbers than `raised`.
    pub(crate) fn raised_at_least(&self, raised: u64) {
        self.raised.fetch_max(raised.min(u64::MAX / 2), Ordering::Relaxed);
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch").field("name", &self.name).finish_non_exhaustive()
    }
}
