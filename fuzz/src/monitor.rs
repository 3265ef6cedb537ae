//! `monitor`: a driver that may touch every register of a watched card with every width, in every state, with any descriptors, while
//! the card is stopped, saved, exchanged, and fails.
//!
//! Oracles: the hardware never touches what is not mapped for it, and what is mapped is the guest's or the monitor's own; memory
//! between the guest's regions stays as it is; reset by its host, the card serves a decent driver.

use std::sync::Arc;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use ioplane_device::{Access, RegisterAddress, SavedState};
use ioplane_embed::SharedDevice;
use ioplane_memory::{GuestMap, GuestView, Mapping, MemoryRegion, RegionSpec};
use ioplane_model::StateModel;
use ioplane_network::Mac;
use ioplane_nic::ne2000::{Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};
use ioplane_passthrough::monitor::{EVENTS, Monitor, MonitorOptions, OWN, Policies, Policy, WINDOW};
use ioplane_pci::Function;
use ioplane_testkit::hand::HandCore;
use ioplane_testkit::nic::{Cp, Cut, Lan, Ne2k, Reach, frame};
use ioplane_testkit::simulated::{Bench, Simulated, Trouble};

use crate::Signature;

const STATION: Mac = [0x52, 0x54, 0, 0, 0, 1];
const OTHER: Mac = [0x52, 0x54, 0, 0, 0, 2];
/// The guest's memory: from 0, then a hole with somebody else's, then more.
const LOW: u64 = 0x4_0000;
const HOLE: u64 = 0x1000;
const HIGH: u64 = 0x2_0000;
/// Most steps of one run.
const STEPS: usize = 400;
/// Longer than any run can take.
const ENDLESS: Duration = Duration::from_secs(15);

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let began = Instant::now();
    let _ = choose(&mut Unstructured::new(data), &mut signature);
    assert!(began.elapsed() < ENDLESS, "an access has no end");
    signature.value()
}

fn choose(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    if input.ratio(2, 3)? { play::<Rtl8139>(input, signature) } else { play::<Ne2000>(input, signature) }
}

/// A kind of card.
trait Chip: Function + Sized {
    const MODEL: &'static StateModel;
    /// Registers that matter most.
    const HOT: &'static [u64];
    /// Values that they live by.
    const WARM: &'static [u64];
    /// The register that makes it send.
    const DOORBELL: u64;
    fn make(lan: &Lan) -> Self;
    /// DMA that it tried beyond what is mapped.
    fn strayed(&self) -> u64;
    /// A stock driver finds the card and opens it.
    fn open<R: Reach>(reach: R, view: &GuestView) -> (R, std::result::Result<(), String>);
    /// A stock driver sends.
    fn serve<R: Reach>(reach: R, view: &GuestView, sent: &[u8]) -> std::result::Result<(), String>;
}

impl Chip for Rtl8139 {
    const MODEL: &'static StateModel = &ioplane_passthrough::rtl8139::MODEL;
    const HOT: &'static [u64] =
        &[0x10, 0x14, 0x20, 0x24, 0x28, 0x2c, 0x37, 0x3c, 0x3e, 0x40, 0x44, 0x50, 0xd9, 0xe0, 0xe4, 0xe8];
    const WARM: &'static [u64] =
        &[0, 3, 4, 8, 0xc, 0x10, 0x40, 0x80, 0xc0, 0x88, 0x8e, 0x100, 0x400, LOW - 0x100, LOW, 0xffff];
    const DOORBELL: u64 = 0xd9;

    fn make(lan: &Lan) -> Self {
        let options = Rtl8139Options { name: "card".into(), mac: STATION };
        Rtl8139::new(options, Arc::new(GuestMap::default()), lan.port.clone()).expect("a card")
    }

    fn strayed(&self) -> u64 {
        self.counts().faults
    }

    fn open<R: Reach>(reach: R, view: &GuestView) -> (R, std::result::Result<(), String>) {
        let mut driver = Cp::new(reach, view.clone(), 0);
        let opened = driver.open(STATION);
        (driver.reach, opened)
    }

    fn serve<R: Reach>(reach: R, view: &GuestView, sent: &[u8]) -> std::result::Result<(), String> {
        let mut driver = Cp::new(reach, view.clone(), 0);
        driver.open(STATION)?;
        driver.xmit(sent, Cut::default())
    }
}

impl Chip for Ne2000 {
    const MODEL: &'static StateModel = &ioplane_passthrough::ne2000::MODEL;
    const HOT: &'static [u64] =
        &[0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0x10, 0x10, 0x1f];
    const WARM: &'static [u64] =
        &[0, 1, 2, 0x0a, 0x12, 0x20, 0x21, 0x22, 0x26, 0x40, 0x49, 0x4c, 0x61, 0x62, 0x7f, 0x80, 0xff, 0xe2];
    const DOORBELL: u64 = 0;

    fn make(lan: &Lan) -> Self {
        let options = Ne2000Options { name: "card".into(), mac: STATION };
        Ne2000::new(options, lan.port.clone()).expect("a card")
    }

    fn strayed(&self) -> u64 {
        // It reaches its own memory only.
        0
    }

    fn open<R: Reach>(reach: R, _view: &GuestView) -> (R, std::result::Result<(), String>) {
        let mut driver = Ne2k::new(reach);
        let opened = driver.probe().and_then(|mac| driver.open(mac));
        (driver.reach, opened)
    }

    fn serve<R: Reach>(reach: R, _view: &GuestView, sent: &[u8]) -> std::result::Result<(), String> {
        let mut driver = Ne2k::new(reach);
        let mac = driver.probe()?;
        driver.open(mac)?;
        driver.xmit(sent)
    }
}

struct Watched<F: Function> {
    front: SharedDevice<Monitor<Simulated<F>>>,
    bench: Bench<F>,
    /// It did not do what it was told: then only the IOMMU knows what it does.
    failed: bool,
}

impl<F: Function> Reach for &Watched<F> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> std::result::Result<(), String> {
        self.front.access(at, op).map_err(|error| error.to_string())
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(2)
}

impl<F: Chip> Watched<F> {
    fn monitor(lan: &Lan, map: &Arc<GuestMap>, policies: Policies) -> (Monitor<Simulated<F>>, Bench<F>) {
        let (hardware, bench) = Simulated::new("0000:00:05.0", F::make(lan)).expect("an eventfd");
        let options = MonitorOptions { policies, ..MonitorOptions::new("nic1") };
        let mut monitor = Monitor::new(hardware, F::MODEL, options).expect("hardware that works");
        monitor.grow_memory(map.clone()).expect("an IOMMU with room");
        (monitor, bench)
    }

    fn hold(&self) {
        if let Err(late) = self.front.quiesce(Instant::now()).expect("it runs") {
            late.suspend(soon()).expect("it stops");
        }
    }
}

fn play<F: Chip>(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let mapping = Mapping::anonymous("guest", LOW + HOLE + HIGH).expect("memory");
    let region = |gpa, len| {
        let file = mapping.file().try_clone_to_owned().expect("a descriptor");
        MemoryRegion::map(RegionSpec { gpa, len, user: 0, offset: gpa, file }).expect("maps")
    };
    let map = Arc::new(GuestMap::new(vec![region(0, LOW), region(LOW + HOLE, HIGH)]).expect("apart"));
    let view = GuestView::new(map.clone());
    let canary = GuestView::new(Arc::new(GuestMap::new(vec![region(LOW, HOLE)]).expect("one")));
    canary.write(LOW, &[0xc5; HOLE as usize]).expect("memory");
    let mut lan = Lan::new(STATION, OTHER);
    let policies = Policies {
        register: *input.choose(&[Policy::Ignore, Policy::Error, Policy::Stop])?,
        dma: *input.choose(&[Policy::Ignore, Policy::Error, Policy::Stop])?,
    };
    let (monitor, bench) = Watched::monitor(&lan, &map, policies);
    let front = SharedDevice::new(monitor, Arc::new(HandCore::default())).expect("it starts");
    let mut watched = Watched::<F> { front, bench, failed: false };
    if input.ratio(3, 4)? {
        let (_, opened) = F::open(&watched, &view);
        opened.expect("a fresh card opens");
    }
    let mut outcome = Ok(());
    for _ in 0..STEPS {
        if input.is_empty() {
            break;
        }
        outcome = step(input, signature, &mut watched, &mut lan, &map, &view);
        if outcome.is_err() {
            break;
        }
    }
    let strayed = watched.bench.with(|card| card.strayed());
    assert!(strayed == 0 || watched.failed, "the hardware touched what is not mapped");
    let mut bytes = [0; HOLE as usize];
    canary.read(LOW, &mut bytes).expect("memory");
    assert!(bytes.iter().all(|byte| *byte == 0xc5), "memory that is not the guest's has changed");
    for (at, len) in watched.bench.mapped() {
        let own = at == OWN && len <= 1 << 20;
        let guests = at == WINDOW && len == LOW || at == WINDOW + LOW + HOLE && len == HIGH;
        assert!(own || guests, "{at:#x}+{len:#x} is mapped");
    }
    tell(signature, &watched);
    recover(&watched, &mut lan, &view);
    outcome
}

/// What was seen: which states, which faults.
fn tell<F: Chip>(signature: &mut Signature, watched: &Watched<F>) {
    let reading = watched.front.look(Monitor::reading).expect("it is here");
    for (region, state) in &reading.states {
        signature.saw(region);
        signature.saw(state);
    }
    for fault in &reading.faults {
        signature.saw(fault.name);
        signature.count(fault.count);
    }
    signature.count(reading.totals.descriptors);
    signature.count(reading.totals.hooked);
    let events = watched.front.look(|monitor| monitor.events(0).len()).expect("it is here");
    assert!(events <= EVENTS, "{events} events are kept");
}

/// Reset by its host, a card that is well serves a decent driver.
fn recover<F: Chip>(watched: &Watched<F>, lan: &mut Lan, view: &GuestView) {
    watched.bench.forget();
    let gone = watched.front.look(|monitor| monitor.reading().gone).expect("it is here");
    watched.bench.trouble(Trouble::None);
    watched.hold();
    let mut quiescent = watched.front.take().expect("held");
    quiescent.reset();
    watched.front.hold(quiescent).expect("away");
    watched.front.resume().expect("it goes on");
    if gone {
        return;
    }
    while lan.neighbour.take().is_some() {}
    view.write(0, &[0; 0x1_0000]).expect("memory");
    let sent = frame(OTHER, STATION, &[7; 100]);
    F::serve(watched, view, &sent).expect("a decent driver is served");
    assert_eq!(lan.neighbour.take(), Some(sent), "a decent driver sends");
}

fn step<F: Chip>(
    input: &mut Unstructured<'_>,
    signature: &mut Signature,
    watched: &mut Watched<F>,
    lan: &mut Lan,
    map: &Arc<GuestMap>,
    view: &GuestView,
) -> Result<()> {
    match input.int_in_range(0..=31u8)? {
        0..=3 => {
            let mut bytes = [0; 8];
            let (at, width) = (place::<F>(input)?, width(input)?);
            let _ = watched.front.access(at, Access::Read(&mut bytes[..width]));
        }
        4..=17 => {
            let (at, width) = (place::<F>(input)?, width(input)?);
            let value = match input.int_in_range(0..=3u8)? {
                0 => address(input)?,
                1 => input.arbitrary()?,
                _ => *input.choose(F::WARM)?,
            };
            let _ = watched.front.access(at, Access::Write(&value.to_le_bytes()[..width]));
        }
        18..=23 => {
            let at = input.int_in_range(0..=0xffu64)? * 16;
            let opts1: u32 = input.arbitrary()?;
            let opts1 = if input.ratio(7, 8)? { opts1 | 1 << 31 } else { opts1 };
            view.write(at + 8, &address(input)?.to_le_bytes()).expect("memory");
            view.write(at, &opts1.to_le_bytes()).expect("memory");
        }
        24 | 25 => {
            let len = input.int_in_range(0..=1500usize)?;
            lan.neighbour.send(&frame(STATION, OTHER, &vec![0x5a; len]));
        }
        26 | 27 => {
            watched.bench.tick();
            watched.front.event(|monitor| monitor.attend());
        }
        28 => {
            if let Ok(Err(late)) = watched.front.quiesce(Instant::now()) {
                signature.saw(&late.reason);
                late.undrain().expect("it goes on");
            } else {
                signature.saw("held");
                watched.front.resume().expect("it goes on");
            }
        }
        29 => exchange(input, signature, watched, lan, map)?,
        30 => {
            watched.bench.hold(F::DOORBELL);
        }
        _ => match input.int_in_range(0..=15u8)? {
            n @ 0..=3 => {
                watched
                    .bench
                    .trouble([Trouble::Gone, Trouble::Deaf, Trouble::Broken, Trouble::Mad][usize::from(n)]);
                watched.failed |= n < 3;
            }
            4..=8 => watched.bench.trouble(Trouble::None),
            _ => {
                watched.bench.release();
            }
        },
    }
    Ok(())
}

/// Another card and another monitor go on with the state, which may have been changed on the way.
fn exchange<F: Chip>(
    input: &mut Unstructured<'_>,
    signature: &mut Signature,
    watched: &mut Watched<F>,
    lan: &Lan,
    map: &Arc<GuestMap>,
) -> Result<()> {
    watched.hold();
    let Ok(mut state) = watched.front.save() else {
        signature.saw("nothing to save");
        watched.front.resume().expect("it goes on");
        return Ok(());
    };
    if input.arbitrary()? {
        change(input, &mut state)?;
    }
    let policies = watched.front.look(Monitor::policies).expect("it is here");
    let (fresh, bench) = Watched::<F>::monitor(lan, map, policies);
    match watched.front.transplant(fresh, &state) {
        Ok(()) => {
            signature.saw("exchanged");
            (watched.bench, watched.failed) = (bench, false);
        }
        Err(error) => {
            signature.saw("refused");
            assert!(!error.to_string().is_empty());
            watched.front.resume().expect("the old one goes on");
        }
    }
    Ok(())
}

fn change(input: &mut Unstructured<'_>, state: &mut SavedState) -> Result<()> {
    for _ in 0..input.int_in_range(1..=4u8)? {
        let len = state.body.len().saturating_sub(1);
        let at = input.int_in_range(0..=len)?;
        if let Some(byte) = state.body.get_mut(at) {
            *byte = input.arbitrary()?;
        }
    }
    if input.ratio(1, 8)? {
        state.body.truncate(input.int_in_range(0..=state.body.len())?);
    }
    Ok(())
}

fn place<F: Chip>(input: &mut Unstructured<'_>) -> Result<RegisterAddress> {
    if input.ratio(1, 32)? {
        return Ok(RegisterAddress::Config(input.int_in_range(0..=300u64)?));
    }
    let offset = match input.int_in_range(0..=7u8)? {
        0 => input.arbitrary()?,
        1 | 2 => input.int_in_range(0..=0x110u64)?,
        _ => *input.choose(F::HOT)?,
    };
    let bar = if input.ratio(1, 16)? { input.arbitrary()? } else { F::MODEL.bar };
    Ok(RegisterAddress::Bar(bar, offset))
}

fn width(input: &mut Unstructured<'_>) -> Result<usize> {
    Ok(if input.ratio(7, 8)? { *input.choose(&[1, 2, 4])? } else { input.int_in_range(0..=8usize)? })
}

fn address(input: &mut Unstructured<'_>) -> Result<u64> {
    Ok(match input.int_in_range(0..=7u8)? {
        0 => LOW - 32 + input.int_in_range(0..=64u64)?,
        1 => LOW + HOLE + HIGH - 32 + input.int_in_range(0..=64u64)?,
        2 => OWN + input.int_in_range(0..=0x2000u64)?,
        3 => WINDOW + input.int_in_range(0..=0x2000u64)?,
        4 => input.arbitrary()?,
        _ => input.int_in_range(0..=LOW + HOLE + HIGH)?,
    })
}
