//! Virtio devices under test: the guest's program on their queues, which is the same on every host, and the kit of those
//! whose registers are in process.
//!
//! ```text
//!   Subject: what is particular to a device --Program--> requests --Driver--> SplitRing (testkit's driver side)
//!      | Ground: what outlives its instances                  ^ Asker: a vCPU     ^ RequestProbe: single requests
//!      v
//!   Mmio(Subject): Kit     vhost_user::OverSocket(Subject): Kit
//! ```

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{Access, At, State};
use ioplane_memory::{GuestView, PAGE};
use ioplane_virtio::spec::feature::{VIRTIO_F_EVENT_IDX, VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1};
use ioplane_virtio::spec::mmio::*;
use ioplane_virtio::{Vdev, VirtioDevice, VirtioMmio};

use super::in_process::InProcess;
use super::{Bus, Dice, Kit, Machine, Plan, Probe, Ran, Valve, Vcpu};
use crate::driver::{GuestMemory, Part, RingMode, RingPlace, SplitRing};
use crate::toy::ring::Counted;

/// Queues of a device under test: one for each vCPU, and so for each core.
pub const QUEUES: u16 = 2;
/// Descriptors of one queue.
pub(super) const SIZE: u16 = 256;
/// What the driver accepts of the ring's features; the device's own are the subject's to choose.
pub(super) const RING_FEATURES: u64 = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX | VIRTIO_F_INDIRECT_DESC;

/// Requests in flight at most.
pub(super) const SLOTS: u16 = 16;
/// Most bytes that a request reads or writes; an indirect table lies behind what it reads.
const SLOT: u64 = PAGE;
/// Guest memory.
const MEMORY: u64 = 1 << 20;

/// A virtio device to put under test.
pub trait Subject: Sync {
    /// Its model.
    type Model: VirtioDevice;
    /// What it stands on.
    fn ground(&self) -> Ground<Self::Model>;
    /// What a driver asks of it on `queue`.
    fn program(&self, queue: u16) -> Box<dyn Program>;
    /// Features of the device itself (not of the ring) that the driver accepts.
    fn features(&self) -> u64;
    /// Something that a vCPU does to the configuration space now and then; what it saw. Not used over a socket.
    fn touch(&self) -> Touch;
}

/// See [`Subject::touch`]: the bus, which vCPU, its dice.
pub type Touch = fn(&Bus, usize, &mut Dice) -> Result<u64, String>;

/// What outlives every instance of a device.
pub struct Ground<V> {
    /// Makes an instance at power-on.
    pub model: Box<dyn Fn() -> V + Send + Sync>,
    /// Stalls it.
    pub valve: Arc<dyn Valve>,
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
    fn ask(&mut self, slot: u16, dice: &mut Dice) -> Request;
    /// What the guest makes of the bytes that came back, of which the device says that it wrote `written`.
    fn answer(&mut self, bytes: &[u8], written: u32) -> Result<u64, String>;
}

/// The driver's end of one queue. What the guest writes and what the device writes lie on pages of their own.
pub(super) struct Driver {
    pub(super) ring: SplitRing,
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
    fn new(view: &GuestView, pages: Pages, program: Box<dyn Program>) -> Self {
        let Pages { place, guest, device } = pages;
        Driver {
            ring: SplitRing::new(view, place, RingMode::of(RING_FEATURES)).expect("a ring in guest memory"),
            view: view.clone(),
            program,
            guest,
            device,
            free: (0..SLOTS).rev().collect(),
            owner: vec![(0, 0); SIZE.into()],
            answers: VecDeque::new(),
        }
    }

    /// Where the device stores and the guest does not.
    fn device_pages(&self) -> [Range<u64>; 2] {
        let used = self.ring.place().used;
        [used..used + PAGE, self.device..self.device + u64::from(SLOTS) * SLOT]
    }

    pub(super) fn idle(&self) -> bool {
        self.answers.is_empty()
    }

    /// Makes one request available. Those of many buffers go by an indirect table.
    pub(super) fn submit(&mut self, dice: &mut Dice) -> Result<(), String> {
        let said = |error: &dyn std::fmt::Display| error.to_string();
        let slot = self.free.pop().ok_or("the program has more in flight than it has slots")?;
        let Request { bytes, readable, writable } = self.program.ask(slot, dice);
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
    /// Kicks.
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
    pub(super) fn of<S: Subject>(subject: &S) -> Self {
        let mut memory = GuestMemory::new(MEMORY).expect("guest memory");
        let mut drivers = Vec::new();
        for queue in 0..QUEUES {
            let pages = Pages::of(&mut memory);
            drivers.push([0, 1].map(|_| Driver::new(memory.view(), pages, subject.program(queue))));
        }
        let device_pages = drivers.iter().flat_map(|[driver, _]| driver.device_pages()).collect();
        let kicks = (0..QUEUES).map(|_| ioplane_host::eventfd::fresh().expect("an eventfd")).collect();
        Layout { memory, drivers, kicks, device_pages }
    }
}

/// The kit of a subject whose registers are in process.
pub struct Mmio<S>(pub S);

impl<S: Subject> Kit for Mmio<S> {
    fn boot(&self, plan: &Plan) -> Machine {
        let Layout { memory, drivers, kicks, device_pages } = Layout::of(&self.0);
        let Ground { model, valve } = self.0.ground();
        let map = memory.view().map().clone();
        let line = Arc::new(Counted::default());
        let (wires, to, here) = (kicks.clone(), line.clone(), map.clone());
        let host = InProcess::start(plan, move || {
            let mut vdev = Vdev::new(model(), here.clone());
            for (queue, kick) in (0..).zip(&wires) {
                vdev.queue_mut(queue).expect("a queue for each vCPU").kick = Some(kick.clone());
            }
            VirtioMmio::new(vdev, to.clone())
        });
        let buses: Vec<_> = (0..QUEUES).map(|_| Bus::new(host.clone())).collect();
        let places: Vec<_> = drivers.iter().map(|[driver, _]| driver.ring.place()).collect();
        set_up(&buses[0], self.0.features() | RING_FEATURES, &places).expect("a device that runs");
        let (mut vcpus, mut probes): (Vec<Box<dyn Vcpu>>, Vec<Box<dyn Probe>>) = Default::default();
        for (vcpu, [driver, probe]) in drivers.into_iter().enumerate() {
            let (bus, kick) = (buses[vcpu].clone(), kicks[vcpu].clone());
            let reach = Wired { bus, kick: kick.clone(), touch: self.0.touch(), vcpu, kicks: 0 };
            let dice = Dice::new(plan.seed << 8 | vcpu as u64);
            let left = plan.rounds / 2;
            vcpus.push(Box::new(Asker { driver, reach, dice, left, seen: Vec::new() }));
            let (line, front) = (line.clone(), host.clone());
            probes.push(Box::new(RequestProbe {
                driver: probe,
                dice: Dice::new(plan.seed),
                kick,
                interrupts: Box::new(move || line.count()),
                kicks: Box::new(move || front.front().look(|mmio| mmio.vdev().meters()[vcpu].read().kicks)),
                // Registers in process have one line for all queues.
                signals: u64::from(QUEUES),
            }));
        }
        Machine { host, vcpus, buses, probes, gate: Some(valve), memory: map, device_pages }
    }

    fn hostile(&self, good: &State) -> Vec<(String, State)> {
        super::spoilt::of_mmio(good)
    }
}

fn put(bus: &Bus, register: u64, value: u32) -> Result<(), String> {
    bus.access(At::Bar(0, register), Access::Write(&value.to_le_bytes()))
}

fn take(bus: &Bus, register: u64) -> Result<u32, String> {
    let mut bytes = [0; 4];
    bus.access(At::Bar(0, register), Access::Read(&mut bytes))?;
    Ok(u32::from_le_bytes(bytes))
}

/// What a driver does first (4.2.3.1, 3.1.1).
fn set_up(bus: &Bus, features: u64, places: &[RingPlace]) -> Result<(), String> {
    put(bus, STATUS, ACKNOWLEDGE | DRIVER)?;
    for half in [0, 1] {
        put(bus, DEVICE_FEATURES_SEL, half)?;
        let offered = take(bus, DEVICE_FEATURES)?;
        put(bus, DRIVER_FEATURES_SEL, half)?;
        put(bus, DRIVER_FEATURES, (features >> (32 * half)) as u32 & offered)?;
    }
    put(bus, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK)?;
    if take(bus, STATUS)? & FEATURES_OK == 0 {
        return Err("the device does not accept what it offered".into());
    }
    for (queue, place) in (0..).zip(places) {
        put(bus, QUEUE_SEL, queue)?;
        put(bus, QUEUE_NUM, place.size.into())?;
        for (register, gpa) in
            [(QUEUE_DESC_LOW, place.desc), (QUEUE_DRIVER_LOW, place.avail), (QUEUE_DEVICE_LOW, place.used)]
        {
            put(bus, register, gpa as u32)?;
            put(bus, register + 4, (gpa >> 32) as u32)?;
        }
        put(bus, QUEUE_READY, 1)?;
    }
    put(bus, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)
}

/// A vCPU's registers. Every other kick is one of KVM's ioeventfds, the rest are register writes.
struct Wired {
    bus: Arc<Bus>,
    kick: Arc<OwnedFd>,
    touch: Touch,
    vcpu: usize,
    kicks: u32,
}

impl Reach for Wired {
    fn kick(&mut self) -> Result<(), String> {
        self.kicks += 1;
        if self.kicks.is_multiple_of(2) {
            ring(&self.kick);
            return Ok(());
        }
        put(&self.bus, QUEUE_NOTIFY, self.vcpu as u32)
    }

    fn linger(&mut self) -> Result<(), String> {
        match take(&self.bus, MAGIC_VALUE)? {
            MAGIC => Ok(()),
            other => Err(format!("transcript: a magic value of {other:#x}")),
        }
    }

    fn touch(&mut self, dice: &mut Dice) -> Result<u64, String> {
        (self.touch)(&self.bus, self.vcpu, dice)
    }
}
