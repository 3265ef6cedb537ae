//! Virtio devices under test: the guest's program on their queues, which is the same on every host.
//!
//! ```text
//!   Subject: what is particular to a device --Program--> requests --Driver--> Ring (testkit's driver side)
//!      | Fixture: what outlives its instances                  ^ Asker: a vCPU     ^ RequestProbe: single requests
//!      v
//!   mmio::Mmio(Subject): Kit     vhost_user::OverSocket(Subject): Kit
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_memory::{GuestView, PAGE};
use ioplane_virtio::VirtioDevice;
use ioplane_virtio::spec::feature::*;

use super::{Bus, Dice, Plan, Probe, Ran, Valve, Vcpu};
use crate::driver::{DriverRing, GuestMemory, Part, RingMode, RingPlace};

/// Queues of a device under test: one for each vCPU, and so for each core.
pub const QUEUES: u16 = 2;
/// Descriptors of one queue.
pub(super) const SIZE: u16 = 256;
/// What the driver accepts: the features that the subject chooses, and those of the ring.
pub(super) fn features(subject: &impl DeviceUnderTest) -> u64 {
    let ring = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC;
    subject.features() | ring | if subject.packed() { VIRTIO_F_RING_PACKED } else { 0 }
}

/// A subject whose driver's rings are packed.
#[derive(Debug, Clone, Copy)]
pub struct PackedRings<S>(pub S);

impl<S: DeviceUnderTest> DeviceUnderTest for PackedRings<S> {
    type Model = S::Model;

    fn fixture(&self) -> Fixture<S::Model> {
        self.0.fixture()
    }

    fn features(&self) -> u64 {
        self.0.features()
    }

    fn packed(&self) -> bool {
        true
    }

    fn bursts(&self, plan: &Plan) -> u32 {
        self.0.bursts(plan)
    }

    fn touch(&self) -> ConfigTouch {
        self.0.touch()
    }
}

/// Requests in flight at most.
pub(super) const SLOTS: u16 = 16;
/// Most bytes that a request reads or writes; an indirect table lies behind what it reads.
const SLOT: u64 = PAGE;
/// Bytes of guest memory.
const MEMORY: u64 = 1 << 20;

/// A virtio device to put under test.
pub trait DeviceUnderTest: Sync {
    type Model: VirtioDevice;
    /// What it stands on.
    fn fixture(&self) -> Fixture<Self::Model>;
    /// Features of the device itself (not of the ring) that the driver accepts.
    fn features(&self) -> u64;
    /// Whether its driver's rings are packed.
    fn packed(&self) -> bool {
        false
    }
    /// How many bursts of requests each vCPU puts.
    fn bursts(&self, plan: &Plan) -> u32 {
        plan.rounds / 2
    }
    /// Something that a vCPU does to the configuration space now and then; what it saw. Not used over a socket.
    fn touch(&self) -> ConfigTouch;
}

/// See [`DeviceUnderTest::touch`]: the bus, which vCPU, its dice.
pub type ConfigTouch = fn(&Bus, usize, &mut Dice) -> Result<u64, String>;

/// Makes the program of a queue. Several are made for each; one is used in a machine.
pub type Programs = Box<dyn Fn(u16) -> Box<dyn Program>>;

/// What outlives every instance of a device.
pub struct Fixture<V> {
    /// Makes an instance at power-on.
    pub model: Box<dyn Fn() -> V + Send + Sync>,
    /// Stalls it, if it can be stalled.
    pub valve: Option<Arc<dyn Valve>>,
    /// Makes what a driver asks of it on a queue.
    pub program: Programs,
}

/// A request, without where it lies.
#[derive(Debug, Default)]
pub struct Request {
    /// What the device reads.
    pub bytes: Vec<u8>,
    /// Lengths of the buffers that hold it.
    pub readable: Vec<u32>,
    /// Lengths of the buffers that the device writes.
    pub writable: Vec<u32>,
}

/// Makes requests and judges their answers.
pub trait Program: Send {
    /// The next request. `slot` is unique among those in flight.
    fn ask(&mut self, slot: u16, dice: &mut Dice) -> Result<Request, String>;
    /// What the guest makes of the bytes that came back, of which the device says that it wrote `written`.
    fn answer(&mut self, bytes: &[u8], written: u32) -> Result<u64, String>;
}

/// The driver's end of one queue. What the guest writes and what the device writes lie on pages of their own.
pub(super) struct Driver {
    pub(super) ring: DriverRing,
    view: GuestView,
    program: Box<dyn Program>,
    guest: u64,
    device: u64,
    free: Vec<u16>,
    /// Of each head: its slot, and how many bytes the device may write.
    owner: Vec<(u16, usize)>,
    /// Answers in the order of the requests: devices may end them in another.
    answers: VecDeque<(u16, Option<u64>)>,
}

/// Where one queue and its requests lie.
#[derive(Clone, Copy)]
struct Pages {
    place: RingPlace,
    guest: u64,
    device: u64,
}

impl Pages {
    fn of(memory: &mut GuestMemory) -> Self {
        let mut pages = |count: u64| memory.alloc(count * PAGE, PAGE).expect("room in guest memory");
        let (desc, avail, used) = (pages(RingPlace::desc_bytes(SIZE).div_ceil(PAGE)), pages(1), pages(1));
        let place = RingPlace { size: SIZE, desc, avail, used };
        Pages { place, guest: pages(2 * u64::from(SLOTS)), device: pages(SLOTS.into()) }
    }
}

impl Driver {
    fn new(view: &GuestView, pages: Pages, mode: RingMode, program: Box<dyn Program>) -> Self {
        let Pages { place, guest, device } = pages;
        Driver {
            ring: DriverRing::new(view, place, mode).expect("a ring in guest memory"),
            view: view.clone(),
            program,
            guest,
            device,
            free: (0..SLOTS).rev().collect(),
            owner: vec![(0, 0); SIZE.into()],
            answers: VecDeque::new(),
        }
    }

    /// Where the device stores and the guest does not. The descriptors of a packed ring are one page, to which both do, and
    /// the device with every answer.
    fn device_pages(&self) -> [Range<u64>; 3] {
        let RingPlace { desc, used, .. } = self.ring.place();
        let descs = if matches!(self.ring, DriverRing::Packed(_)) { RingPlace::desc_bytes(SIZE) } else { 0 };
        [desc..desc + descs, used..used + PAGE, self.device..self.device + u64::from(SLOTS) * SLOT]
    }

    pub(super) fn idle(&self) -> bool {
        self.answers.is_empty()
    }

    /// Makes one request available. Those of many buffers go by an indirect table.
    pub(super) fn submit(&mut self, dice: &mut Dice) -> Result<(), String> {
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let slot = self.free.pop().ok_or("the program has more in flight than it has slots")?;
        let Request { bytes, readable, writable } = self.program.ask(slot, dice)?;
        let guest = self.guest + u64::from(slot) * 2 * SLOT;
        self.view.write(guest, &bytes).map_err(|e| said(&e))?;
        let mut parts = Vec::new();
        for (write, lens, mut gpa) in
            [(false, &readable, guest), (true, &writable, self.device + u64::from(slot) * SLOT)]
        {
            for len in lens {
                parts.push(Part { gpa, len: *len, write });
                gpa += u64::from(*len);
            }
        }
        let head = if parts.len() > 4 {
            let table = self.view.window(guest + SLOT, 16 * parts.len() as u64, 16).map_err(|e| said(&e))?;
            self.ring.chain_indirect(&parts, &table)
        } else {
            self.ring.chain(&parts)
        };
        let head = head.ok_or("the ring is full")?;
        self.owner[usize::from(head)] = (slot, writable.iter().sum::<u32>() as usize);
        self.answers.push_back((slot, None));
        self.ring.push(head);
        Ok(())
    }

    /// Takes in what the device has used, and gives the next answer in the order of the requests.
    pub(super) fn answer(&mut self) -> Result<Option<u64>, String> {
        while let Some(used) = self.ring.pop().map_err(|e| format!("transcript: {e}"))? {
            let (slot, len) = self.owner[usize::from(used.head)];
            let mut bytes = vec![0; len];
            let gpa = self.device + u64::from(slot) * SLOT;
            self.view.read(gpa, &mut bytes).map_err(|e| e.to_string())?;
            let answer = self.program.answer(&bytes, used.len)?;
            self.ring.free(used.head);
            let open = self.answers.iter_mut().find(|(s, answer)| *s == slot && answer.is_none());
            open.ok_or("transcript: an answer to no request")?.1 = Some(answer);
        }
        match self.answers.front() {
            Some((slot, Some(answer))) => {
                let (slot, answer) = (*slot, *answer);
                self.free.push(slot);
                self.answers.pop_front();
                Ok(Some(answer))
            }
            _ => Ok(None),
        }
    }
}

/// What a vCPU has besides its ring.
pub(super) trait Reach: Send {
    fn kick(&mut self) -> Result<(), String>;
    /// While it waits.
    fn linger(&mut self) -> Result<(), String>;
    /// Between two bursts.
    fn touch(&mut self, dice: &mut Dice) -> Result<u64, String>;
}

/// A vCPU that puts bursts of requests.
pub(super) struct Asker<R> {
    pub(super) driver: Driver,
    pub(super) reach: R,
    pub(super) dice: Dice,
    pub(super) left: u32,
    pub(super) seen: Vec<u64>,
}

impl<R: Reach> Vcpu for Asker<R> {
    fn step(&mut self) -> Result<Ran, String> {
        if let Some(answer) = self.driver.answer()? {
            self.seen.push(answer);
            return Ok(Ran::Going);
        }
        if !self.driver.idle() {
            self.reach.linger()?;
            return Ok(Ran::Waiting);
        }
        if self.left == 0 {
            return Ok(Ran::Done);
        }
        self.left -= 1;
        self.seen.push(self.reach.touch(&mut self.dice)?);
        for _ in 0..1 + self.dice.below(SLOTS.into()) {
            self.driver.submit(&mut self.dice)?;
            if self.driver.ring.kick_needed() {
                self.reach.kick()?;
            }
        }
        Ok(Ran::Going)
    }

    fn seen(&self) -> Vec<u64> {
        self.seen.clone()
    }
}

/// Counts of an eventfd, a line, a meter.
pub(super) type Count<T> = Box<dyn Fn() -> T + Send>;

/// Puts single requests on one queue.
pub(super) struct RequestProbe {
    pub(super) driver: Driver,
    pub(super) dice: Dice,
    pub(super) kick: Arc<OwnedFd>,
    pub(super) interrupts: Count<u64>,
    pub(super) kicks: Count<Option<u64>>,
    pub(super) signals: u64,
}

/// Raises an eventfd by one.
pub(super) fn ring(kick: &OwnedFd) {
    let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
}

impl Probe for RequestProbe {
    fn publish(&mut self) -> bool {
        self.driver.submit(&mut self.dice).expect("room for a single request");
        self.driver.ring.kick_needed()
    }

    fn kick(&mut self) {
        ring(&self.kick);
    }

    fn answered(&mut self) -> Result<bool, String> {
        while self.driver.answer()?.is_some() {}
        Ok(self.driver.idle())
    }

    fn want_interrupts(&mut self, wanted: bool) {
        if wanted {
            self.driver.ring.enable_interrupts();
        } else {
            self.driver.ring.disable_interrupts();
        }
    }

    fn interrupts(&self) -> u64 {
        (self.interrupts)()
    }

    fn signals(&self) -> u64 {
        self.signals
    }

    fn kicks_taken(&self) -> Option<u64> {
        (self.kicks)()
    }
}

/// What the kits of a subject begin with.
pub(super) struct Layout {
    pub(super) memory: GuestMemory,
    /// For vCPUs, and for probes. They are never used in the same machine, and lie on the same rings.
    pub(super) drivers: Vec<[Driver; 2]>,
    pub(super) kicks: Vec<Arc<OwnedFd>>,
    pub(super) device_pages: Vec<Range<u64>>,
}

impl Layout {
    pub(super) fn of<S: DeviceUnderTest>(subject: &S, fixture: &Fixture<S::Model>) -> Self {
        let mut memory = GuestMemory::new(MEMORY).expect("guest memory");
        let mode = RingMode::of(features(subject));
        let mut drivers = Vec::new();
        for queue in 0..QUEUES {
            let pages = Pages::of(&mut memory);
            drivers.push([0, 1].map(|_| Driver::new(memory.view(), pages, mode, (fixture.program)(queue))));
        }
        let device_pages = drivers.iter().flat_map(|[driver, _]| driver.device_pages()).collect();
        let kicks = (0..QUEUES).map(|_| ioplane_host::eventfd::fresh().expect("an eventfd")).collect();
        Layout { memory, drivers, kicks, device_pages }
    }
}
