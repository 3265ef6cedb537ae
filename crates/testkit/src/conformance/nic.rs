//! Commodity NICs under test: any function that has the registers of an RTL8139C+ or of an NE2000, in process or over vfio-user.
//!
//! ```text
//!   vCPU 0: driver (nic::Cp, nic::Ne2k) --registers--> Function --port--> switch <--> neighbour, which answers
//!              ^---- INTA#, unmasked by hand ------------'  ^
//!   vCPU 1: configuration space, plain registers           pump, or service: attend() whenever attention() is readable
//! ```
//!
//! The guest looks at its card after an interrupt only, and has begun nothing new before all that it sent has arrived, has been
//! acknowledged, and has been answered: so an interrupt that is lost stops it for ever, and a frame that is lost, doubled or
//! overtaken is seen. The neighbour answers when it has everything, in one batch: what the guest sees does not depend on timing.
//!
//! All instances of a card share one port: frames that were not received wait there.

use std::sync::{Arc, Weak};
use std::time::Duration;

use ioplane_device::{RegisterAddress, SavedState};
use ioplane_memory::{GuestMap, GuestView};
use ioplane_network::{Mac, Port};
use ioplane_nic::ne2000::{self, Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{self, Rtl8139, Rtl8139Options};
use ioplane_pci::{Function, Irq, Wire};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::in_process::InProcess;
use super::line::Line;
use super::vfio_user::VfioUser;
use super::{Bus, DeviceHost, Dice, Kit, Plan, Ran, TestMachine, Valve, Vcpu};
use crate::nic::{Cp, Cut, Lan, LanPeer, Ne2k, Reach, frame};
use crate::toy::mix;
use crate::toy::ring::Counted;

/// The card's address, and its neighbour's.
pub const OWN: Mac = [2, 0, 0, 0, 0, 1];
/// See [`OWN`].
pub const OTHER: Mac = [2, 0, 0, 0, 0, 2];

/// How a card is made. What is behind it (an emulation, watched hardware) is the card's own affair.
pub trait CardUnderTest: Clone + Send + Sync + 'static {
    type F: Function;
    /// What stalls the instances of a machine; `()` if nothing can.
    type Stall: Default + Send + Sync + 'static;

    /// An instance at power-on with the address [`OWN`], in front of `memory`, on `port`. Called again for each instance that takes over
    /// from another: with the same memory, port and stall.
    fn make(&self, memory: &Arc<GuestMap>, port: &Arc<Port>, stall: &Arc<Self::Stall>) -> Self::F;

    /// The valve that the stall is, if it is one.
    fn valve(_stall: Arc<Self::Stall>) -> Option<Arc<dyn Valve>> {
        None
    }

    /// See [`Kit::hostile`].
    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)>;
}

/// Who stands between the guest and the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    /// Nobody: the vCPUs' threads call it.
    Process,
    /// A vfio-user server and its client.
    VfioUser,
}

/// The kit of an RTL8139C+, driven as by 8139cp.
pub struct Rtl8139s<C>(pub C, pub Behind);

/// The kit of an NE2000, driven as by ne2k-pci.
pub struct Ne2000s<C>(pub C, pub Behind);

const MEMORY: u64 = 0x10_0000;
const BASE: u64 = 0x4_0000;

impl<C: CardUnderTest> Kit for Rtl8139s<C> {
    fn boot(&self, plan: &Plan) -> TestMachine {
        let boot = Boot::new(&self.0, self.1, plan);
        let driver = Cp::new(boot.bus(), GuestView::new(boot.memory.clone()), BASE);
        let stored = Cp::<Arc<Bus>>::RX_BUFFERS;
        let pages = std::iter::once(BASE + stored.start..BASE + stored.end).collect();
        boot.machine(driver, Some((rtl8139::spec::BAR_MEMORY, rtl8139::spec::MULINT)), pages)
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        self.0.hostile(good)
    }
}

impl<C: CardUnderTest> Kit for Ne2000s<C> {
    fn boot(&self, plan: &Plan) -> TestMachine {
        let boot = Boot::new(&self.0, self.1, plan);
        let driver = Ne2k::new(boot.bus());
        // It never uses guest memory.
        boot.machine(driver, None, Vec::new())
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        self.0.hostile(good)
    }
}

/// INTA# of a card in process.
struct Called<F: Function> {
    host: Arc<InProcess<F>>,
    line: Arc<Counted>,
}

impl<F: Function> Line for Called<F> {
    fn count(&self) -> u64 {
        self.line.count()
    }

    fn unmask(&self) -> bool {
        let unmask = |function: &mut F| function.wire(Irq::Intx, 0, Wire::Unmask).is_ok();
        self.host.front().event(|function| assert!(unmask(function), "INTA# is gone"))
    }
}

/// A machine that is being put together.
struct Boot {
    host: Arc<dyn DeviceHost>,
    memory: Arc<GuestMap>,
    line: Box<dyn Line>,
    lan: LanPeer,
    buses: Vec<Arc<Bus>>,
    gate: Option<Arc<dyn Valve>>,
    /// Rounds of the guest on the LAN.
    left: u32,
    plan: Plan,
}

/// A host with the NIC on it: its interrupt line and the buses of its vCPUs.
type Wired = (Arc<dyn DeviceHost>, Box<dyn Line>, Vec<Arc<Bus>>);

impl Boot {
    fn new<C: CardUnderTest>(card: &C, behind: Behind, plan: &Plan) -> Self {
        let memory = Arc::new(GuestMap::anonymous(MEMORY).expect("guest memory"));
        let Lan { port, neighbour } = Lan::new(OWN, OTHER);
        let stall = Arc::new(C::Stall::default());
        let gate = C::valve(stall.clone());
        let (card, map) = (card.clone(), memory.clone());
        let (host, line, buses): Wired = match behind {
            Behind::Process => {
                let line = Arc::new(Counted::default());
                let call = line.clone();
                let host = InProcess::start(plan, move || {
                    let mut function = card.make(&map, &port, &stall);
                    function.wire(Irq::Intx, 0, Wire::Call(Some(call.clone()))).expect("a NIC has INTA#");
                    function
                });
                pump(Arc::downgrade(&host));
                let buses = vec![Bus::new(host.clone()), Bus::new(host.clone())];
                (host.clone(), Box::new(Called { host, line }), buses)
            }
            Behind::VfioUser => {
                let fresh = move || card.make(&Arc::default(), &port, &stall);
                let host = VfioUser::start(plan, map, fresh).expect("a function that is served");
                let buses = vec![Bus::new(host.clone()), Bus::new(host.clone())];
                (host.clone(), Box::new(host), buses)
            }
        };
        // Over a socket each word of a frame may be a message.
        let left = plan.rounds / if behind == Behind::Process { 3 } else { 8 };
        Boot { host, memory, line, lan: neighbour, buses, gate, left, plan: *plan }
    }

    fn bus(&self) -> Arc<Bus> {
        self.buses[0].clone()
    }

    /// With the driver's interface up. `plain`: a register of 12 bits that only remembers, of which BAR.
    fn machine(
        self,
        mut driver: impl Driver + 'static,
        plain: Option<(u8, u64)>,
        device_pages: Vec<std::ops::Range<u64>>,
    ) -> TestMachine {
        let Boot { host, memory, line, lan, buses, gate, left, plan } = self;
        driver.open().expect("a card that opens");
        let meddler = Meddler {
            bus: buses[1].clone(),
            plain,
            dice: Dice::new(!plan.seed),
            left: plan.rounds,
            seen: Vec::new(),
        };
        let guest = LanGuest {
            driver,
            heard: 0,
            line,
            unmask: false,
            lan,
            dice: Dice::new(plan.seed),
            left,
            round: None,
            seen: Vec::new(),
        };
        TestMachine {
            host,
            vcpus: vec![Box::new(guest), Box::new(meddler)],
            buses,
            probes: Vec::new(),
            gate,
            memory,
            device_pages,
        }
    }
}

/// A thread that does what a host does for a function: attends to it when it asks for that. Ends with the machine.
fn pump<F: Function>(host: Weak<InProcess<F>>) {
    const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
    let attention = |function: &F| function.attention().cloned();
    std::thread::spawn(move || {
        // Not held while it waits: the machine ends when its own reference goes.
        while let Some(front) = host.upgrade() {
            let fd = front.front().look(attention).flatten();
            drop(front);
            let readable = fd.is_some_and(|fd| {
                poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&LOOK)).is_ok_and(|ready| ready > 0)
            });
            let attended = readable
                && host.upgrade().is_some_and(|host| host.front().event(|function| function.attend()));
            if !attended {
                // Held, or away, or nothing to do: whoever has something to report does so again.
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    });
}

/// What both drivers can do.
trait Driver: Send {
    /// Finds the card and brings the interface up.
    fn open(&mut self) -> Result<(), String>;
    /// Most frames that it sends before it has heard of the first.
    fn most(&self) -> u64;
    fn send(&mut self, frames: &[Vec<u8>], dice: &mut Dice) -> Result<(), String>;
    /// The interrupt handler: frames received, and how many have been sent.
    fn interrupt(&mut self) -> Result<(Vec<Vec<u8>>, usize), String>;
    /// An access without effect.
    fn linger(&mut self) -> Result<(), String>;
}

impl Driver for Cp<Arc<Bus>> {
    fn open(&mut self) -> Result<(), String> {
        Cp::open(self, OWN)
    }

    fn most(&self) -> u64 {
        6
    }

    fn send(&mut self, frames: &[Vec<u8>], dice: &mut Dice) -> Result<(), String> {
        for frame in frames {
            let mut cuts: Vec<usize> =
                (0..dice.below(4)).map(|_| 1 + dice.below(frame.len() as u64 - 1) as usize).collect();
            cuts.sort_unstable();
            cuts.dedup();
            self.queue(frame, Cut { at: &cuts, ..Cut::default() })?;
            // Now and then it rings once for several.
            if dice.below(2) == 0 {
                self.kick()?;
            }
        }
        self.kick()
    }

    fn interrupt(&mut self) -> Result<(Vec<Vec<u8>>, usize), String> {
        let Some(status) = Cp::interrupt(self)? else { return Ok((Vec::new(), 0)) };
        let received = if status & 0x53 != 0 { self.poll()? } else { Vec::new() };
        let done = self.reclaim()?;
        if let Some(wrong) = done.iter().find(|opts1| **opts1 & 0x0fff_0000 != 0) {
            return Err(format!("transcript: a frame was sent with status {wrong:#x}"));
        }
        Ok((received.into_iter().map(|received| received.bytes).collect(), done.len()))
    }

    fn linger(&mut self) -> Result<(), String> {
        match self.get(rtl8139::spec::IDR0, 4)? {
            0x0000_0002 => Ok(()),
            other => Err(format!("transcript: a station address of {other:#x}")),
        }
    }
}

impl Driver for Ne2k<Arc<Bus>> {
    fn open(&mut self) -> Result<(), String> {
        let mac = self.probe()?;
        if mac != OWN {
            return Err(format!("the PROM has the address {mac:02x?}"));
        }
        Ne2k::open(self, OWN)
    }

    fn most(&self) -> u64 {
        1
    }

    fn send(&mut self, frames: &[Vec<u8>], _dice: &mut Dice) -> Result<(), String> {
        frames.iter().try_for_each(|frame| self.xmit(frame))
    }

    fn interrupt(&mut self) -> Result<(Vec<Vec<u8>>, usize), String> {
        let (frames, sent) = Ne2k::interrupt(self)?;
        if sent.iter().any(|status| *status & 1 == 0) {
            return Err(format!("transcript: frames were sent with status {sent:x?}"));
        }
        Ok((frames, sent.len()))
    }

    fn linger(&mut self) -> Result<(), String> {
        match self.get(ne2000::spec::CR)? {
            0xff => Err("transcript: the card is gone".into()),
            _ => Ok(()),
        }
    }
}

/// What was begun and has not ended.
#[derive(Default)]
struct Round {
    sent: Vec<Vec<u8>>,
    arrived: usize,
    done: usize,
    answers: Vec<Vec<u8>>,
    answered: bool,
    received: usize,
}

/// Sends, and waits until all has arrived, has been acknowledged and answered.
struct LanGuest<D> {
    driver: D,
    line: Box<dyn Line>,
    /// Interrupts that it has looked after.
    heard: u64,
    /// The host is to be told that the last one is done with.
    unmask: bool,
    lan: LanPeer,
    dice: Dice,
    left: u32,
    round: Option<Round>,
    seen: Vec<u64>,
}

fn some_frame(to: Mac, from: Mac, dice: &mut Dice) -> Vec<u8> {
    let payload: Vec<u8> = (0..46 + dice.below(1455)).map(|_| dice.roll() as u8).collect();
    frame(to, from, &payload)
}

fn same(what: &str, came: &[u8], expected: Option<&Vec<u8>>) -> Result<(), String> {
    match expected {
        Some(expected) if came == *expected => Ok(()),
        Some(expected) => {
            Err(format!("transcript: {what} has {} bytes, not the {} sent", came.len(), expected.len()))
        }
        None => Err(format!("transcript: {what} of {} bytes that nobody has sent", came.len())),
    }
}

impl<D: Driver> LanGuest<D> {
    fn begin(&mut self) -> Result<Round, String> {
        let (sends, answers) = (1 + self.dice.below(self.driver.most()), self.dice.below(4));
        let sent: Vec<_> = (0..sends).map(|_| some_frame(OTHER, OWN, &mut self.dice)).collect();
        let answers = (0..answers).map(|_| some_frame(OWN, OTHER, &mut self.dice)).collect();
        self.driver.send(&sent, &mut self.dice)?;
        Ok(Round { sent, answers, ..Round::default() })
    }

    /// Looks at everything once. Says whether anything has come.
    fn look(&mut self, round: &mut Round) -> Result<bool, String> {
        let mut came = false;
        while let Some(frame) = self.lan.take() {
            same("a frame sent", &frame, round.sent.get(round.arrived))?;
            round.arrived += 1;
            came = true;
        }
        if !round.answered && round.arrived == round.sent.len() {
            let delivered = self.lan.send_all(&round.answers);
            assert_eq!(delivered, round.answers.len(), "the switch lost a frame");
            (round.answered, came) = (true, true);
        }
        if self.unmask {
            // Not while the device is held: later, then.
            self.unmask = !self.line.unmask();
        }
        let interrupts = self.line.count();
        if interrupts > self.heard {
            self.heard = interrupts;
            let (frames, done) = self.driver.interrupt()?;
            for frame in &frames {
                same("a frame received", frame, round.answers.get(round.received))?;
                round.received += 1;
            }
            round.done += done;
            (self.unmask, came) = (true, true);
        }
        Ok(came)
    }
}

impl<D: Driver> Vcpu for LanGuest<D> {
    fn step(&mut self) -> Result<Ran, String> {
        let Some(mut round) = self.round.take() else {
            if self.left == 0 {
                return Ok(Ran::Done);
            }
            self.round = Some(self.begin()?);
            return Ok(Ran::Going);
        };
        let came = self.look(&mut round)?;
        if round.done > round.sent.len() {
            return Err("transcript: more was sent than there was".into());
        }
        let ended = round.answered && round.done == round.sent.len() && round.received == round.answers.len();
        if ended && !self.unmask {
            let sum =
                |frames: &[Vec<u8>]| frames.iter().flatten().fold(0, |sum, byte| mix(sum, (*byte).into()));
            self.seen.extend([sum(&round.sent), sum(&round.answers), round.received as u64]);
            self.left -= 1;
            return Ok(Ran::Going);
        }
        self.round = Some(round);
        if came {
            return Ok(Ran::Going);
        }
        self.driver.linger()?;
        Ok(Ran::Waiting)
    }

    /// What has been received is read by the guest; a card that is watched is still when it has been.
    fn may_pause(&self) -> bool {
        self.round.is_none()
    }

    fn seen(&self) -> Vec<u64> {
        self.seen.clone()
    }
}

/// Registers that the driver does not use meanwhile.
struct Meddler {
    bus: Arc<Bus>,
    plain: Option<(u8, u64)>,
    dice: Dice,
    left: u32,
    seen: Vec<u64>,
}

impl Vcpu for Meddler {
    fn step(&mut self) -> Result<Ran, String> {
        if self.left == 0 {
            return Ok(Ran::Done);
        }
        self.left -= 1;
        let at = match self.plain {
            Some((bar, register)) if self.left.is_multiple_of(2) => RegisterAddress::Bar(bar, register),
            _ => RegisterAddress::Config(ioplane_pci::spec::INTERRUPT_LINE as u64),
        };
        let (width, value) = match at {
            RegisterAddress::Bar(..) => (2, self.dice.below(0x1000) as u32),
            RegisterAddress::Config(_) => (1, self.dice.below(0x100) as u32),
        };
        self.bus.write(at, width, value)?;
        let read = self.bus.read(at, width)?;
        if read != value {
            return Err(format!("transcript: {at:?} was written {value:#x} and reads {read:#x}"));
        }
        self.seen.push(read.into());
        Ok(Ran::Going)
    }

    fn seen(&self) -> Vec<u64> {
        self.seen.clone()
    }
}

#[derive(Debug, Clone, Copy)]
pub struct EmulatedRtl8139;

#[derive(Debug, Clone, Copy)]
pub struct EmulatedNe2000;

/// What is done to a good state.
pub(super) type Spoil<T> = (&'static str, fn(&mut T));

pub(super) fn spoilt<T: DeserializeOwned + Serialize>(
    good: &SavedState,
    spoils: &[Spoil<T>],
) -> Vec<(String, SavedState)> {
    let spoil = |(what, spoil): &Spoil<T>| {
        let mut saved = postcard::from_bytes(&good.body).expect("a good state decodes");
        spoil(&mut saved);
        let body = postcard::to_stdvec(&saved).expect("a state encodes");
        ((*what).to_owned(), SavedState { body, ..good.clone() })
    };
    spoils.iter().map(spoil).collect()
}

impl CardUnderTest for EmulatedRtl8139 {
    type F = Rtl8139;
    type Stall = ();

    fn make(&self, memory: &Arc<GuestMap>, port: &Arc<Port>, _stall: &Arc<()>) -> Rtl8139 {
        let options = Rtl8139Options { name: "nic".into(), mac: OWN };
        Rtl8139::new(options, memory.clone(), port.clone()).expect("a NIC")
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        use rtl8139::{StateV1, spec};
        spoilt::<StateV1>(
            good,
            &[
                ("a receive descriptor beyond the ring", |state| state.receive = 64),
                ("a transmit descriptor beyond the ring", |state| state.transmit[0] = 64),
                ("a fifth descriptor of C mode", |state| state.current = 4),
                ("half a configuration space", |state| state.config.truncate(128)),
                ("too few registers", |state| state.registers.truncate(255)),
                ("another chip", |state| state.registers[spec::TCR as usize + 3] ^= 0x40),
                ("a reset that does not end", |state| state.registers[spec::CR as usize] |= spec::CR_RST),
                ("a write pointer beyond the buffer", |state| state.registers[spec::CBR as usize + 1] = 0x20),
            ],
        )
    }
}

impl CardUnderTest for EmulatedNe2000 {
    type F = Ne2000;
    type Stall = ();

    fn make(&self, _memory: &Arc<GuestMap>, port: &Arc<Port>, _stall: &Arc<()>) -> Ne2000 {
        Ne2000::new(Ne2000Options { name: "nic".into(), mac: OWN }, port.clone()).expect("a NIC")
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        use ne2000::{StateV1, spec};
        spoilt::<StateV1>(
            good,
            &[
                ("more memory than the card has", |state| state.memory.push(0)),
                ("less memory", |state| state.memory.clear()),
                ("no configuration space", |state| state.config.clear()),
                ("a transmission under way", |state| state.registers.cr |= spec::CR_TXP),
                ("started and in reset", |state| state.registers.isr |= spec::ISR_RST),
                ("an interrupt mask of eight bits", |state| state.registers.imr |= 0x80),
            ],
        )
    }
}
