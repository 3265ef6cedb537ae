//! The conformance suite: one device with its guest on one host, stopped and started in every way while the guest runs.
//!
//! ```text
//!   Kit --boot(Plan)--> Machine { host: Host, vcpus: [Vcpu], buses, probe, gate, device_pages }
//!                         |             |
//!     control thread -----+             +--- one thread each; what they have *seen* is compared with a run without interruptions
//!     quiesce, save, transplant, move, suspend, undrain, drop the future, turn the log on
//! ```
//!
//! A kit is a device, a guest program for it, and a host. [`in_process::InProcess`] is the host of any
//! [`ioplane_device::Device`], [`vhost_user::VhostUser`] that of any [`ioplane_virtio::VirtioDevice`],
//! [`vfio_user::VfioUser`] that of any [`ioplane_pci::Function`].
//!
//! [`declared::KITS`] is the list of all kits with what each of them offers, [`declared::CHECKS`] that of all checks with what each
//! needs. From these two come the tests that are run (`tests/conformance.rs`), the failures that a removed invariant must cause
//! (`tests/mutations.rs`), and the tables of `docs/guide/conformance.md`. A new device needs a [`Kit`] and an entry.
//!
//! [`virtio::PackedRings`] around a subject is the same device with packed rings.
//!
//! Every check has a name. A finding that is about an invariant begins with `invariant N:`, so that taking the invariant out can be seen to
//! fail for that reason (`tests/mutations.rs`). A check that has asserted nothing fails ([`proof`]).

pub mod adder;
pub mod blk;
mod checks;
pub mod declared;
pub mod dma;
pub mod document;
mod guests;
pub mod in_process;
mod invariants;
mod line;
pub mod mediated;
pub mod mmio;
pub mod net;
pub mod nic;
pub mod proof;
mod queues;
pub mod ring;
mod spoilt;
pub mod vfio_user;
pub mod vhost_user;
pub mod virtio;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ioplane_device::{Access, RegisterAddress, SavedState};
use ioplane_memory::{DirtyLog, GuestMap};

/// What the suite does to a device while its guest runs. Called from one control thread; an error is a message.
///
/// The life of a device as in `ioplane-device`: running, quiescing, held. Only `save`, `transplant` and `resume` need it held.
pub trait DeviceHost: Send + Sync {
    /// Brings it to a quiescent point and holds it. `Err`: the deadline passed; it still drains, or has been given back
    /// already (then [`DeviceHost::undrain`] has nothing left to do).
    fn quiesce(&self, deadline: Instant) -> Result<(), String>;
    /// Begins a quiesce, looks at the future that waits for it once, and drops that. Whether it still waited then.
    fn begin_and_drop(&self) -> Result<bool, String>;
    /// After a miss, or a dropped future: back to running.
    fn undrain(&self) -> Result<(), String>;
    /// After a miss: held by force.
    fn suspend(&self, deadline: Instant) -> Result<(), String>;
    /// Goes on after a pause.
    fn resume(&self) -> Result<(), String>;
    /// The state of the held device.
    fn save(&self) -> Result<SavedState, String>;
    /// Puts a fresh instance with `state` in the place of the held device and starts it. Refused: the old one stays held.
    fn transplant(&self, state: &SavedState) -> Result<(), String>;
    /// The queues that have pollers.
    fn queues(&self) -> Vec<u16>;
    /// Moves a running queue to core `core` (0 or 1).
    fn move_queue(&self, queue: u16, core: usize, deadline: Instant) -> Result<(), String>;
    /// Turns a dirty log on that is long enough for all of `memory`; `Ok` when every poller has acknowledged it.
    fn log(&self, memory: &GuestMap, deadline: Instant) -> Result<Arc<DirtyLog>, String>;
    /// Lets go of every vCPU that waits in an access; the machine is of no more use.
    fn close(&self);
}

/// Where a vCPU's register accesses go. Waits while the device is held. `Err`: closed.
pub trait Registers: Send + Sync {
    fn access(&self, at: RegisterAddress, op: Access<'_>) -> Result<(), String>;
}

/// The registers as one vCPU sees them; counts, so that the suite can tell whether an access waits.
pub struct Bus {
    registers: Arc<dyn Registers>,
    entered: AtomicU64,
    left: AtomicU64,
}

impl Bus {
    /// A bus of its own for a vCPU.
    pub fn new(registers: Arc<dyn Registers>) -> Arc<Self> {
        Arc::new(Bus { registers, entered: AtomicU64::new(0), left: AtomicU64::new(0) })
    }

    /// Any access.
    pub fn access(&self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        self.entered.fetch_add(1, Ordering::SeqCst);
        let done = self.registers.access(at, op);
        self.left.fetch_add(1, Ordering::SeqCst);
        done
    }

    /// Reads 64 bits of BAR 0.
    pub fn read(&self, offset: u64) -> Result<u64, String> {
        let mut bytes = [0; 8];
        self.access(RegisterAddress::Bar(0, offset), Access::Read(&mut bytes))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes 64 bits of BAR 0.
    pub fn write(&self, offset: u64, value: u64) -> Result<(), String> {
        self.access(RegisterAddress::Bar(0, offset), Access::Write(&value.to_le_bytes()))
    }
}

/// What one step of a vCPU came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ran {
    /// Got on.
    Going,
    /// Waits for the device; ask again.
    Waiting,
    /// The program has ended.
    Done,
}

/// One vCPU with its program, on a thread of its own. Deterministic: what it sees may not depend on timing.
pub trait Vcpu: Send {
    /// A little of the program. Blocks in register accesses only. `Err`: the guest found something wrong.
    fn step(&mut self) -> Result<Ran, String>;
    /// Whether the device can do without it for a while: false while it has begun something that it must itself drive on.
    fn may_pause(&self) -> bool {
        true
    }
    /// Everything that the program has seen, in order.
    fn seen(&self) -> Vec<u64>;
}

/// The driver's end of one queue for checks that put single requests. Not used while the vCPUs run.
pub trait Probe: Send {
    /// Publishes a request without kicking; says whether the device asked to be kicked for it.
    fn publish(&mut self) -> bool;
    fn kick(&mut self);
    /// Whether everything published has been answered; `Err` if wrongly.
    fn answered(&mut self) -> Result<bool, String>;
    /// Asks for interrupts, or for none.
    fn want_interrupts(&mut self, wanted: bool);
    /// How many interrupts came so far.
    fn interrupts(&self) -> u64;
    /// How many of them one resume sends: one for each queue on the same line.
    fn signals(&self) -> u64 {
        1
    }
    /// How many kicks the device says it took; `None` if it does not answer. Asked while it is held.
    fn kicks_taken(&self) -> Option<u64>;
}

/// Stalls what a device stands on. Its requests then stay in flight for as long as one likes.
pub trait Valve: Send + Sync {
    /// From now on nothing that was taken ends.
    fn shut(&self);
    /// What hangs may end, and new requests too.
    fn open(&self);
}

impl Valve for ioplane_storage::filter::Stall {
    fn shut(&self) {
        self.stall();
    }

    fn open(&self) {
        self.release();
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Of everything that the guest does.
    pub seed: u64,
    /// Steps of the guest's program, more or less.
    pub rounds: u32,
    /// How long core 0 polls in vain before it sleeps. Core 1 is notified.
    pub spin: Duration,
    /// How long anything may take before it counts as stuck.
    pub patience: Duration,
}

/// A device that runs in front of its guest.
pub struct TestMachine {
    pub host: Arc<dyn DeviceHost>,
    /// Two of them, hitting the registers from both sides.
    pub vcpus: Vec<Box<dyn Vcpu>>,
    /// The buses of the vCPUs; empty if the guest reaches no registers through this host.
    pub buses: Vec<Arc<Bus>>,
    /// The driver's ends of a queue on core 0, which polls, and of one on core 1, which is notified, if there are queues.
    pub probes: Vec<Box<dyn Probe>>,
    /// Stalls what the device stands on, if it can be stalled.
    pub gate: Option<Arc<dyn Valve>>,
    pub memory: Arc<GuestMap>,
    /// Ranges that the device stores to and the guest never does. None: it does not store to guest memory.
    pub device_pages: Vec<Range<u64>>,
}

/// A device, a guest for it, a host.
pub trait Kit: Sync {
    /// Boots a machine, the device running.
    fn boot(&self, plan: &Plan) -> TestMachine;
    /// States made from a good one that no device may accept, each with what is wrong with it.
    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)>;
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedCheck {
    /// The check's name.
    pub check: &'static str,
    pub what: String,
}

/// What the checks run with by default.
pub const PLAN: Plan = Plan { seed: 1, rounds: 300, spin: Duration::ZERO, patience: Duration::from_secs(20) };

/// Numbers that look random and are the same every time (splitmix64).
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Dice(seed)
    }

    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next below `limit`; 0 counts as 1.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.roll() % limit.max(1)
    }

    /// One of `choices`, which are not none.
    pub fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}
