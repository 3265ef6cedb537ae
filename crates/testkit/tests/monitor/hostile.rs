//! Drivers that mean harm: what they ask for is denied, counted, named, and answered as the policy says.

use ioplane_device::{Access, RegisterAddress};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion, RegionSpec};
use ioplane_nic::ne2000::Ne2000;
use ioplane_nic::rtl8139::Rtl8139;
use ioplane_passthrough::monitor::{Cause, Policies, Policy};
use ioplane_pci::Function;
use ioplane_testkit::nic::{Cp, Cut, Lan, Ne2k, Reach, frame};

use crate::rig::*;

const BASE: u64 = 0x1_0000;
/// Where the driver's transmit ring is.
const TX_RING: u64 = BASE + 0x400;
const OWNED: u32 = 1 << 31;
const END: u32 = 1 << 30;
const WHOLE: u32 = 3 << 28;
const SERR: u32 = 0x8000;
const TDU: u32 = 0x80;
const EVERY: [Policy; 3] = [Policy::Ignore, Policy::Error, Policy::Stop];

fn describe(view: &GuestView, at: u64, opts1: u32, address: u64) {
    view.write(at + 4, &[0; 4]).expect("memory");
    view.write(at + 8, &address.to_le_bytes()).expect("memory");
    view.write(at, &opts1.to_le_bytes()).expect("memory");
}

/// An act against a watched RTL8139 that has been opened, and the name of the fault that it is.
type Act = fn(&mut Cp<Watched<Rtl8139>>, &GuestView);
const ACTS: &[(&str, Cause, Act)] = &[
    ("buffer-outside", Cause::Dma, |cp, view| {
        describe(view, TX_RING, OWNED | WHOLE | 100, MEMORY);
        cp.kick().expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |cp, view| {
        // Begins inside, ends outside.
        describe(view, TX_RING, OWNED | WHOLE | 2, MEMORY - 1);
        cp.kick().expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |cp, view| {
        describe(view, TX_RING, OWNED | WHOLE | 100, u64::MAX - 10);
        cp.kick().expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |cp, view| {
        // Where the hardware has the monitor's rings, and where it has this very memory.
        describe(view, TX_RING, OWNED | WHOLE | 100, 60 << 30);
        cp.kick().expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |cp, view| {
        describe(view, TX_RING, OWNED | WHOLE | 100, 64 << 30);
        cp.kick().expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |cp, view| {
        // To receive into.
        describe(view, BASE, OWNED | 1536, MEMORY - 100);
        cp.put(0x37, 1, 0x0c).expect("denied, not failed");
    }),
    ("ring-endless", Cause::Dma, |cp, view| {
        for n in 0..64 {
            describe(view, TX_RING + n * 16, OWNED | WHOLE | 60, BASE);
        }
        cp.kick().expect("denied, not failed");
    }),
    ("ring-outside", Cause::Dma, |cp, _| {
        cp.put(0x20, 4, MEMORY as u32).expect("kept");
        cp.kick().expect("denied, not failed");
    }),
    ("ring-outside", Cause::Dma, |cp, _| {
        cp.put(0xe4, 4, 0xf000_0000).expect("kept");
        cp.put(0x37, 1, 0x0c).expect("denied, not failed");
    }),
    ("ring-outside", Cause::Dma, |cp, _| {
        cp.put(0xe8, 4, 0xffff_ffff).expect("kept");
        cp.put(0x37, 1, 0x08).expect("denied, not failed");
    }),
    ("ring-misaligned", Cause::Dma, |cp, _| {
        cp.put(0x20, 4, TX_RING as u32 + 16).expect("kept");
        cp.put(0x37, 1, 0x04).expect("denied, not failed");
    }),
    ("block-outside", Cause::Dma, |cp, _| {
        cp.put(0x14, 4, 1).expect("kept");
        cp.put(0x10, 4, 0x08).expect("denied, not failed");
    }),
    ("denied", Cause::Register, |cp, _| {
        // C mode: receiver on without C+.
        cp.put(0xe0, 2, 0).expect("denied, not failed");
    }),
    ("denied", Cause::Register, |cp, _| {
        cp.put(0x37, 1, 0).expect("works");
        cp.put(0xe0, 2, 0).expect("works");
        cp.put(0x37, 1, 0x0c).expect("denied, not failed");
    }),
    ("denied", Cause::Register, |cp, _| {
        cp.put(0x18, 4, 100).expect("denied, not failed");
    }),
    ("denied", Cause::Register, |cp, _| {
        // To write the EEPROM: start bit, 0, 1.
        for pins in [0x80, 0x88, 0x8a, 0x8e, 0x88, 0x8c] {
            cp.put(0x50, 1, pins).expect("denied, not failed");
        }
    }),
    ("unknown-register", Cause::Register, |cp, _| {
        cp.reach.write(RegisterAddress::Bar(1, 0xfff), 1, 1).expect("denied, not failed");
    }),
    ("unknown-register", Cause::Register, |cp, _| {
        assert_eq!(cp.reach.read(RegisterAddress::Bar(5, 0), 4), Ok(0));
    }),
    ("unknown-register", Cause::Register, |cp, _| {
        let mut bytes = [1; 9];
        cp.reach
            .access(RegisterAddress::Bar(1, u64::MAX - 3), Access::Read(&mut bytes[..8]))
            .expect("denied");
        assert_eq!(bytes, [0, 0, 0, 0, 0, 0, 0, 0, 1]);
        cp.reach.access(RegisterAddress::Bar(1, 0), Access::Write(&[])).expect("denied");
    }),
];

#[test]
fn every_act_is_denied_under_every_policy() {
    for (number, (name, cause, act)) in ACTS.iter().enumerate() {
        for policy in EVERY {
            let what = format!("act {number}, {name}, {policy:?}");
            let (watched, map, mut lan) = rtl8139(Policies::all(policy));
            let view = view(&map);
            let mut driver = Cp::new(watched, view.clone(), BASE);
            driver.open(OWN).expect("opens");
            driver.reach.interrupts();
            act(&mut driver, &view);
            let reading = driver.reach.reading();
            let fault = reading.faults.iter().find(|fault| fault.name == *name);
            let fault = fault.unwrap_or_else(|| panic!("{what}: only {:?}", reading.faults));
            assert_eq!((fault.count > 0, fault.cause), (true, *cause), "{what}");
            assert!(!fault.last.is_empty() && reading.totals.denied > 0, "{what}");
            assert_eq!(lan.neighbour.take(), None, "{what}: nothing was sent");
            assert_eq!(
                driver.reach.bench.with(|card| card.counts().faults),
                0,
                "{what}: the hardware knows nothing"
            );
            let (told, stopped) = (driver.reach.interrupts() > 0, driver.reach.error.count());
            let status = driver.get(0x3e, 2).expect("answers");
            match policy {
                // The chip was rung for a ring with nothing to send in it, and says so.
                Policy::Ignore => {
                    assert_eq!((told, stopped, status & SERR), (status & TDU != 0, 0, 0), "{what}")
                }
                Policy::Error => assert_eq!((told, stopped, status & SERR), (true, 0, SERR), "{what}"),
                Policy::Stop => assert_eq!((told, stopped, status), (false, 1, 0), "{what}"),
            }
            assert_eq!(reading.stopped, policy == Policy::Stop, "{what}");
            recovers(driver, &mut lan, &what);
        }
    }
}

/// What the client of vfio-user maps for reading alone: sent from, not received into.
#[test]
fn memory_that_may_only_be_read_is_only_read() {
    const ROM: u64 = MEMORY << 4;
    let (watched, map, mut lan) = rtl8139(Policies::all(Policy::Ignore));
    let view = view(&map);
    let bytes = ioplane_memory::Mapping::anonymous("rom", 4096).expect("memory");
    let file = || bytes.file().try_clone_to_owned().expect("a descriptor");
    let spec = |file| RegionSpec { gpa: ROM, len: 4096, user: ROM, offset: 0, file };
    let sent = frame(OTHER, OWN, &[7; 100]);
    let rom = GuestMap::new(vec![MemoryRegion::map(spec(file())).expect("maps")]).expect("alone");
    GuestView::new(rom.into()).write(ROM, &sent).expect("memory");
    let more = map.with(MemoryRegion::map_read_only(spec(file())).expect("maps")).expect("room");
    watched.front.with(|monitor| monitor.grow_memory(more.into())).expect("it is here").expect("room");
    let mut driver = Cp::new(watched, view.clone(), BASE);
    driver.open(OWN).expect("opens");
    describe(&view, TX_RING, OWNED | WHOLE | sent.len() as u32, ROM);
    driver.kick().expect("works");
    assert_eq!(lan.neighbour.take(), Some(sent));
    assert_eq!(driver.reach.faults("buffer-outside"), 0);
    describe(&view, BASE, OWNED | 1536, ROM);
    driver.put(0x37, 1, 0x0c).expect("denied, not failed");
    assert_eq!(driver.reach.faults("buffer-outside"), 1);
}

/// After a reset by the host everything works again.
fn recovers(mut driver: Cp<Watched<Rtl8139>>, lan: &mut Lan, what: &str) {
    driver.reach.reset();
    driver.open(OWN).unwrap_or_else(|error| panic!("{what}: {error}"));
    let sent = frame(OTHER, OWN, &[7; 100]);
    driver.xmit(&sent, Cut::default()).expect("room");
    assert_eq!(lan.neighbour.take(), Some(sent), "{what}");
}

#[test]
fn a_stopped_guest_reaches_nothing() {
    let (watched, map, mut lan) = rtl8139("dma=stop".parse().expect("policies"));
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    describe(&view(&map), TX_RING, OWNED | WHOLE | 100, MEMORY);
    driver.kick().expect("denied, not failed");
    let before = driver.reach.bench.touches();
    driver.put(0x3c, 2, 0xffff).expect("denied");
    assert_eq!(driver.get(0x00, 4), Ok(0));
    lan.neighbour.send(&frame(OWN, OTHER, &[1; 100]));
    assert_eq!(driver.reach.interrupts(), 0);
    let after = driver.reach.bench.touches();
    assert_eq!((after.reads, after.writes), (before.reads, before.writes), "but for its own interrupts");
    assert_eq!(driver.reach.faults("stopped"), 2);
    assert_eq!(driver.reach.error.count(), 1, "once");
}

#[test]
fn what_was_checked_is_what_is_sent() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let view = view(&map);
    let mut driver = Cp::new(watched, view.clone(), BASE);
    driver.open(OWN).expect("opens");
    view.write(0x8_0000, b"secret").expect("memory");
    let honest = frame(OTHER, OWN, &[7; 100]);
    driver.reach.bench.hold(0xd9);
    driver.xmit(&honest, Cut::default()).expect("room");
    // The check has passed, the hardware has not looked: now another address, another length, another ring.
    for (opts1, address) in
        [(OWNED | WHOLE | 114, u64::MAX), (OWNED | WHOLE | 0xffff, 0x8_0000), (OWNED | END | WHOLE, 0)]
    {
        describe(&view, TX_RING, opts1, address);
    }
    driver.put(0x20, 4, 0xdead_0000).expect("kept");
    assert_eq!(driver.reach.bench.release(), 1);
    assert_eq!(lan.neighbour.take(), Some(honest), "as it was when it was checked");
    assert_eq!(driver.reach.bench.with(|card| card.counts().faults), 0);
    // The status goes to where the descriptor was.
    driver.reach.turn();
    let status = u32::from_le_bytes(view.bytes(TX_RING).expect("memory"));
    assert_eq!(status & OWNED, 0);
}

#[test]
fn a_descriptor_that_just_lies_there_is_counted_once() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let view = view(&map);
    let mut driver = Cp::new(watched, view.clone(), BASE);
    driver.open(OWN).expect("opens");
    // The driver gives the third buffer back as what it is not.
    describe(&view, BASE + 32, OWNED | 1536, MEMORY);
    driver.put(0x37, 1, 0x0c).expect("works");
    for _ in 0..10 {
        driver.put(0x3e, 2, 0).expect("works");
    }
    assert_eq!(driver.reach.faults("buffer-outside"), 1);
    // Those around it are good. What comes into this one nobody sees, and it comes back in its turn.
    let before: [u8; 4096] =
        view.bytes(BASE + Cp::<Watched<Rtl8139>>::RX_BUFFERS.start + 2 * 2048).expect("memory");
    for n in 0..6u8 {
        let sent = frame(OWN, OTHER, &[n; 100]);
        lan.neighbour.send(&sent);
        assert!(driver.reach.interrupts() > 0, "frame {n}");
        driver.interrupt().expect("works");
        let came = driver.poll().expect("works");
        assert_eq!((came.len(), n != 2 && came[0].bytes != sent), (1, false), "frame {n}");
        if n == 2 {
            let after =
                view.bytes(BASE + Cp::<Watched<Rtl8139>>::RX_BUFFERS.start + 2 * 2048).expect("memory");
            assert_eq!(before, after, "not in the driver's own buffer either");
        }
    }
}

type CardAct = fn(&mut Ne2k<Watched<Ne2000>>);

fn put(driver: &mut Ne2k<Watched<Ne2000>>, writes: &[(u64, u8)]) {
    for (register, value) in writes {
        driver.put(*register, *value).expect("denied, not failed");
    }
}

const CARD_ACTS: &[(&str, Cause, CardAct)] = &[
    // Reading behind the packet memory, before it, over the end of the PROM; writing the PROM.
    ("card-outside", Cause::Dma, |d| put(d, &[(0, 0x22), (8, 0), (9, 0x90), (10, 4), (11, 0), (0, 0x0a)])),
    ("card-outside", Cause::Dma, |d| put(d, &[(0, 0x22), (8, 0), (9, 0x20), (10, 4), (11, 0), (0, 0x0a)])),
    ("card-outside", Cause::Dma, |d| put(d, &[(0, 0x22), (8, 0x1f), (9, 0), (10, 2), (11, 0), (0, 0x0a)])),
    ("card-outside", Cause::Dma, |d| put(d, &[(0, 0x22), (8, 0), (9, 0), (10, 2), (11, 0), (0, 0x12)])),
    ("card-outside", Cause::Dma, |d| {
        put(d, &[(0, 0x22), (8, 0), (9, 0x40), (10, 0xff), (11, 0xff), (0, 0x12)])
    }),
    // Sending what is not packet memory, or over its end.
    ("card-page-outside", Cause::Dma, |d| put(d, &[(4, 0x00), (5, 60), (6, 0), (0, 0x26)])),
    ("card-page-outside", Cause::Dma, |d| put(d, &[(4, 0x7f), (5, 0), (6, 2), (0, 0x26)])),
    ("card-page-outside", Cause::Dma, |d| put(d, &[(4, 0xff), (5, 0xff), (6, 0xff), (0, 0x26)])),
    // A receive ring that is none, or elsewhere; a page outside of it.
    ("card-ring", Cause::Dma, |d| put(d, &[(0, 0x21), (1, 0x80), (2, 0x40), (0, 0x22)])),
    ("card-ring", Cause::Dma, |d| put(d, &[(0, 0x21), (1, 0x00), (2, 0x80), (0, 0x22)])),
    ("card-ring", Cause::Dma, |d| put(d, &[(0, 0x21), (1, 0x4c), (2, 0xff), (0, 0x22)])),
    ("card-page", Cause::Dma, |d| put(d, &[(0, 0x61), (7, 0x90), (0, 0x22)])),
    // A ring that moves while it is in use; 'send packet'; the port the wrong way; the EEPROM.
    ("denied", Cause::Register, |d| put(d, &[(1, 0x50)])),
    ("denied", Cause::Register, |d| put(d, &[(0, 0x1a)])),
    ("denied", Cause::Register, |d| {
        put(d, &[(0, 0x22), (8, 0), (9, 0x50), (10, 4), (11, 0), (0, 0x0a), (0x10, 1)]);
    }),
    ("denied", Cause::Register, |d| put(d, &[(0, 0xe2), (1, 0x88)])),
    ("unknown-register", Cause::Register, |d| put(d, &[(0x20, 1)])),
    ("unknown-register", Cause::Register, |d| put(d, &[(0x18, 1)])),
];

#[test]
fn every_act_on_card_memory_is_denied_under_every_policy() {
    for (number, (name, cause, act)) in CARD_ACTS.iter().enumerate() {
        for policy in EVERY {
            let what = format!("act {number}, {name}, {policy:?}");
            let (watched, mut lan) = ne2000(Policies::all(policy));
            let mut driver = Ne2k::new(watched);
            driver.probe().expect("finds it");
            driver.open(OWN).expect("opens");
            driver.reach.interrupts();
            act(&mut driver);
            let reading = driver.reach.reading();
            let fault = reading.faults.iter().find(|fault| fault.name == *name);
            let fault = fault.unwrap_or_else(|| panic!("{what}: only {:?}", reading.faults));
            assert_eq!(fault.cause, *cause, "{what}");
            assert_eq!(lan.neighbour.take(), None, "{what}: nothing was sent");
            assert_eq!(driver.reach.bench.with(|card| card.counts().faults), 0, "{what}");
            let (told, stopped) = (driver.reach.interrupts() > 0, driver.reach.error.count());
            match policy {
                Policy::Ignore => assert_eq!((told, stopped), (false, 0), "{what}"),
                Policy::Error => assert_eq!((told, stopped), (true, 0), "{what}"),
                Policy::Stop => assert_eq!((told, stopped), (false, 1), "{what}"),
            }
            driver.reach.reset();
            driver.probe().unwrap_or_else(|error| panic!("{what}: {error}"));
            driver.open(OWN).unwrap_or_else(|error| panic!("{what}: {error}"));
            let sent = frame(OTHER, OWN, &[7; 100]);
            driver.xmit(&sent).expect("works");
            assert_eq!(lan.neighbour.take(), Some(sent), "{what}");
        }
    }
}
