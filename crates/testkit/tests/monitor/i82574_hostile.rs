//! Guests that mean harm to an 82574L: rings, tails, descriptors and saved states that are none.

use ioplane_memory::GuestView;
use ioplane_nic::i82574::{I82574, spec};
use ioplane_passthrough::monitor::{Cause, Policies, Policy};
use ioplane_testkit::nic::{E1000e, Lan, Sending, frame};

use crate::rig::*;

const BASE: u64 = 0x1_0000;
/// Buffers that the card has at first.
const BUFFERS: u64 = Driver::RING - 4;
const DEXT: u32 = 1 << 29;
const DATA: u32 = 1 << 20;
const EOP: u32 = 1 << 24;
const RS: u32 = 1 << 27;
type Driver = E1000e<Watched<I82574>>;

/// One to be sent, with the address of its buffer.
fn data(address: u64, len: u32) -> [u32; 4] {
    [address as u32, (address >> 32) as u32, DEXT | DATA | EOP | RS | len, 0]
}

/// Writes a ring's registers anew, as after a reset: base, length, head, tail.
fn place(driver: &mut Driver, low: u64, base: u64, length: u32) {
    for (at, value) in [(0, base as u32), (4, (base >> 32) as u32), (8, length), (0x10, 0)] {
        driver.put(low + at, value).expect("kept");
    }
}

/// An act against a watched 82574L that has been opened, and the name of the fault that it is.
type Act = fn(&mut Driver);
const ACTS: &[(&str, Cause, Act)] = &[
    ("buffer-outside", Cause::Dma, |d| {
        d.describe(Driver::TX_RING, 0, data(MEMORY, 100)).expect("memory");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        // Begins inside, ends outside.
        d.describe(Driver::TX_RING, 0, data(MEMORY - 1, 2)).expect("memory");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        // The longest that a data descriptor can have.
        d.describe(Driver::TX_RING, 0, data(0, 0xf_ffff)).expect("memory");
        d.describe(Driver::TX_RING, 1, data(1, 0xf_ffff)).expect("memory");
        d.describe(Driver::TX_RING, 2, data(2, 0xf_ffff)).expect("memory");
        d.put(spec::TDT, 3).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        d.describe(Driver::TX_RING, 0, data(u64::MAX - 10, 100)).expect("memory");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        // Where the hardware has the monitor's rings, and where it has this very memory.
        d.describe(Driver::TX_RING, 0, data(60 << 30, 100)).expect("memory");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        d.describe(Driver::TX_RING, 0, data(64 << 30, 100)).expect("memory");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        // The last piece of a frame.
        d.describe(Driver::TX_RING, 0, [BASE as u32, 0, DEXT | DATA | 100, 0]).expect("memory");
        d.describe(Driver::TX_RING, 1, data(MEMORY, 100)).expect("memory");
        d.put(spec::TDT, 2).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        // A legacy descriptor.
        d.describe(Driver::TX_RING, 0, [MEMORY as u32, 0, EOP | RS | 100, 0]).expect("memory");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("buffer-outside", Cause::Dma, |d| {
        // To receive into: its last bytes are outside.
        d.describe(Driver::RX_RING, BUFFERS, [MEMORY as u32 - 100, 0, 0, 0]).expect("memory");
        d.put(spec::RDT, BUFFERS as u32 + 1).expect("denied, not failed");
    }),
    ("descriptor-format", Cause::Dma, |d| {
        d.describe(Driver::TX_RING, 0, [BASE as u32, 0, DEXT | 7 << 20 | EOP | RS | 60, 0]).expect("memory");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("tail-outside", Cause::Dma, |d| {
        d.put(spec::TDT, Driver::RING as u32).expect("denied, not failed");
    }),
    ("tail-outside", Cause::Dma, |d| {
        d.put(spec::TDT, 0xffff).expect("denied, not failed");
    }),
    ("tail-outside", Cause::Dma, |d| {
        d.put(spec::TDH, 0xfff0).expect("kept");
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("tail-outside", Cause::Dma, |d| {
        d.put(spec::RDT, 0x1_0000 - 1).expect("denied, not failed");
    }),
    ("tail-laps", Cause::Dma, |d| {
        // Past what the card has.
        d.put(spec::RDT, 5).expect("denied, not failed");
    }),
    ("ring-outside", Cause::Dma, |d| {
        place(d, spec::TDBAL, MEMORY, 1024);
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("ring-outside", Cause::Dma, |d| {
        // Begins inside, ends outside.
        place(d, spec::TDBAL, MEMORY - 512, 1024);
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("ring-outside", Cause::Dma, |d| {
        place(d, spec::TDBAL, 0xffff_ffff_ffff_fff0, 1024);
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("ring-misaligned", Cause::Dma, |d| {
        place(d, spec::TDBAL, BASE + 8, 1024);
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("ring-length", Cause::Dma, |d| {
        place(d, spec::TDBAL, BASE + Driver::TX_RING, 0);
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("ring-length", Cause::Dma, |d| {
        place(d, spec::TDBAL, BASE + Driver::TX_RING, 130);
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("ring-length", Cause::Dma, |d| {
        place(d, spec::TDBAL, 0, !127);
        d.put(spec::TDT, 1).expect("denied, not failed");
    }),
    ("ring-busy", Cause::Register, |d| {
        // The card has buffers of it.
        d.put(spec::RDBAL, 0).expect("denied, not failed");
    }),
    ("ring-busy", Cause::Register, |d| {
        d.put(spec::RDLEN, 128).expect("denied, not failed");
    }),
    ("ring-busy", Cause::Register, |d| {
        d.put(spec::RDH, 0).expect("denied, not failed");
    }),
    ("ring-busy", Cause::Register, |d| {
        // Buffers of 2 KiB become longer, or the other format.
        d.put(spec::RCTL, spec::EN | spec::RCTL_BSEX | 1 << 16).expect("denied, not failed");
    }),
    ("ring-busy", Cause::Register, |d| {
        d.put(spec::RFCTL, 0).expect("denied, not failed");
    }),
    ("denied", Cause::Register, |d| {
        // Packet split.
        d.put(spec::RCTL, spec::EN | 1 << 10).expect("denied, not failed");
    }),
    ("denied", Cause::Register, |d| {
        d.put(spec::RCTL, spec::EN | spec::RCTL_BSEX).expect("denied, not failed");
    }),
    ("unknown-register", Cause::Register, |d| {
        d.put(0x1_fffc, 1).expect("denied, not failed");
    }),
    ("part-of-a-word", Cause::Register, |d| {
        use ioplane_device::RegisterAddress;
        use ioplane_testkit::nic::Reach;
        d.reach.write(RegisterAddress::Bar(0, spec::MTA + 2), 2, 1).expect("denied, not failed");
    }),
];

fn opened(policies: Policies) -> (Driver, GuestView, Lan) {
    let (watched, map, lan) = i82574(policies);
    let view = view(&map);
    let mut driver = E1000e::new(watched, view.clone(), BASE).with_buffers(BUFFERS);
    driver.open(OWN).expect("opens");
    driver.reach.interrupts();
    (driver, view, lan)
}

fn unharmed(driver: &Driver, what: &str) {
    let (faults, violations) =
        driver.reach.bench.with(|card| (card.counts().faults, card.violations().to_vec()));
    assert_eq!((faults, violations), (0, vec![]), "{what}: the hardware knows nothing");
}

#[test]
fn every_act_is_denied_under_every_policy() {
    for (number, (name, cause, act)) in ACTS.iter().enumerate() {
        for policy in [Policy::Ignore, Policy::Error, Policy::Stop] {
            let what = format!("act {number}, {name}, {policy:?}");
            let (mut driver, _view, mut lan) = opened(Policies::all(policy));
            act(&mut driver);
            let reading = driver.reach.reading();
            let fault = reading.faults.iter().find(|fault| fault.name == *name);
            let fault = fault.unwrap_or_else(|| panic!("{what}: only {:?}", reading.faults));
            assert_eq!((fault.count > 0, fault.cause), (true, *cause), "{what}");
            assert!(!fault.last.is_empty() && reading.totals.denied > 0, "{what}");
            assert_eq!(lan.neighbour.take(), None, "{what}: nothing was sent");
            unharmed(&driver, &what);
            assert_eq!(driver.reach.error.count(), u64::from(policy == Policy::Stop), "{what}");
            assert_eq!(reading.stopped, policy == Policy::Stop, "{what}");
            // After a reset by the host everything works again.
            driver.reach.reset();
            driver.open(OWN).unwrap_or_else(|error| panic!("{what}: {error}"));
            let sent = frame(OTHER, OWN, &[7; 100]);
            driver.xmit(&sent, Sending::default()).expect("room");
            assert_eq!(lan.neighbour.take(), Some(sent), "{what}");
            unharmed(&driver, &what);
        }
    }
}

/// A frame with a piece that is not the guest's is not sent in part, nor does it become a part of the next one.
#[test]
fn a_frame_is_sent_whole_or_not_at_all() {
    let (mut driver, view, mut lan) = opened(Policies::default());
    let inside = BASE + Driver::TX_BUFFERS;
    view.write(inside, &frame(OTHER, OWN, &[1; 136])).expect("memory");
    let piece = [inside as u32, 0, DEXT | DATA | 100, 0];
    driver.describe(Driver::TX_RING, 0, piece).expect("memory");
    driver.describe(Driver::TX_RING, 1, data(MEMORY, 100)).expect("memory");
    driver.describe(Driver::TX_RING, 2, data(inside, 90)).expect("memory");
    driver.put(spec::TDT, 3).expect("works");
    let came = lan.neighbour.take().expect("the second one is good");
    assert_eq!((came.len(), lan.neighbour.take()), (90, None));
    // Both come back, in their turn.
    driver.reach.turn();
    let done = |at: u64| driver.words(Driver::TX_RING, at).map(|words| words[3] & 1);
    assert_eq!([done(1), done(2)], [Ok(1), Ok(1)]);
    assert_eq!(driver.get(spec::TDH), Ok(3));
    // A frame without an end waits for it.
    driver.describe(Driver::TX_RING, 3, piece).expect("memory");
    driver.put(spec::TDT, 4).expect("works");
    assert!(driver.reach.reading().reusable, "nothing of it is the card's");
    driver.describe(Driver::TX_RING, 4, data(inside, 50)).expect("memory");
    driver.put(spec::TDT, 5).expect("works");
    assert_eq!(lan.neighbour.take().map(|frame| frame.len()), Some(150));
    unharmed(&driver, "frames in pieces");
}

#[test]
fn what_was_checked_is_what_is_sent() {
    let (mut driver, view, mut lan) = opened(Policies::default());
    view.write(0x8_0000, b"secret").expect("memory");
    let honest = frame(OTHER, OWN, &[7; 100]);
    driver.reach.bench.hold(spec::TDT);
    driver.xmit(&honest, Sending::default()).expect("room");
    // The check has passed, the hardware has not looked: now another address, another length.
    for words in [data(u64::MAX, 114), data(0x8_0000, 0xffff), data(0, 0)] {
        driver.describe(Driver::TX_RING, 0, words).expect("memory");
    }
    driver.put(spec::TDBAL, 0xdead_0000).expect("denied");
    assert_eq!(driver.reach.faults("ring-busy"), 1);
    assert!(driver.reach.bench.release() > 0);
    assert_eq!(lan.neighbour.take(), Some(honest), "as it was when it was checked");
    unharmed(&driver, "another descriptor");
}

/// What comes into a buffer that is not the guest's nobody sees, and it comes back in its turn.
#[test]
fn a_buffer_that_is_not_the_guests_receives_nothing() {
    let (mut driver, _view, mut lan) = opened(Policies::default());
    let last = BUFFERS;
    driver.describe(Driver::RX_RING, last, [MEMORY as u32, 0, 0, 0]).expect("memory");
    driver.put(spec::RDT, last as u32 + 1).expect("works");
    assert_eq!(driver.reach.faults("buffer-outside"), 1);
    for _ in 0..10 {
        driver.get(spec::STATUS).expect("works");
    }
    assert_eq!(driver.reach.faults("buffer-outside"), 1, "counted once");
    for n in 0..last as u8 {
        lan.neighbour.send(&frame(OWN, OTHER, &[n; 100]));
        driver.reach.turn();
        driver.interrupt().expect("works");
    }
    let words = driver.words(Driver::RX_RING, last - 1).expect("memory");
    assert_eq!(words[2] & 1, 1, "all before it");
    let words = driver.words(Driver::RX_RING, last).expect("memory");
    assert_eq!(words[2] & 1, 0, "not yet");
    lan.neighbour.send(&frame(OWN, OTHER, &[99; 100]));
    driver.reach.turn();
    driver.interrupt().expect("works");
    assert_eq!(driver.words(Driver::RX_RING, last).map(|words| words[2] & 1), Ok(1));
    unharmed(&driver, "a buffer outside");
}

/// A saved state is a stranger's: cut off, with another bit, made up. It is refused, or taken, and the hardware gets nothing that was not
/// checked.
#[test]
fn a_state_that_was_tampered_with_harms_nothing() {
    let (watched, map, mut lan) = i82574(Policies::default());
    let mut driver = E1000e::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    let sent = frame(OTHER, OWN, &[3; 100]);
    driver.xmit(&sent, Sending { sum: Some((14, 20)), ..Sending::default() }).expect("room");
    assert!(lan.neighbour.take().is_some());
    driver.reach.turn();
    driver.reach.hold().expect("reusable");
    let state = driver.reach.save();
    let (hardware, bench) = i82574_card(&lan);
    let mut watched = driver.reach.goes_on_as(&state, hardware, bench, &map);
    let (mut taken, mut refused) = (0, 0);
    let bytes = state.body.len();
    for at in 0..bytes {
        watched.force();
        let mut cut = state.clone();
        cut.body.truncate(at);
        assert!(!watched.loads(&cut), "{at} bytes of {bytes}");
        let mut other = state.clone();
        other.body[at] ^= [0x01, 0x80, 0xff][at % 3];
        if watched.loads(&other) {
            taken += 1;
            watched.resume();
            watched.turn();
        } else {
            refused += 1;
            watched.resume();
        }
        let (faults, violations) =
            watched.bench.with(|card| (card.counts().faults, card.violations().to_vec()));
        assert_eq!((faults, violations), (0, vec![]), "byte {at}");
    }
    println!("{taken} taken, {refused} refused");
    assert!(taken > 0 && refused > 0);
}

/// Whatever a guest writes to whatever register, with whatever in its rings, in whatever order: the hardware is given nothing that is not the guest's.
#[test]
fn no_sequence_of_accesses_reaches_beyond_the_guest() {
    use ioplane_testkit::conformance::Dice;
    const REGISTERS: [u64; 24] = [
        0x2800,
        0x2804,
        0x2808,
        0x2810,
        0x2818,
        0x2818,
        0x3800,
        0x3804,
        0x3808,
        0x3810,
        0x3818,
        0x3818,
        0x3818,
        0x2900,
        0x3918,
        spec::RCTL,
        spec::TCTL,
        spec::RFCTL,
        spec::CTRL_EXT,
        spec::IMS,
        spec::IMC,
        spec::ICR,
        spec::ICS,
        spec::CTRL,
    ];
    let mut taken = 0;
    for seed in 0..40 {
        let mut dice = Dice::new(seed);
        let (mut driver, view, mut lan) = opened(Policies::default());
        for step in 0..300 {
            let what = format!("seed {seed}, step {step}");
            let value = match dice.below(6) {
                0 => dice.roll() as u32,
                1 => 1 << dice.below(32),
                2 => dice.below(64) as u32,
                3 => dice.below(16) as u32 * 128,
                4 => (dice.of(&[BASE, BASE + Driver::TX_RING, MEMORY - 512, 0]) & !0xf) as u32,
                _ => dice.of(&[
                    0,
                    EOP | RS,
                    spec::EN,
                    spec::EN | 1 << 15,
                    spec::RFCTL_EXTEN,
                    spec::RCTL_BSEX | 1 << 16,
                ]),
            };
            match dice.below(8) {
                0 => {
                    // A descriptor somewhere in either ring.
                    let address = dice.of(&[0, BASE, MEMORY - 60, MEMORY, 60 << 30, 64 << 30, u64::MAX - 5]);
                    let third = dice.of(&[0, DEXT, DEXT | DATA, DEXT | 2 << 20])
                        | dice.of(&[0, EOP, EOP | RS])
                        | dice.below(200) as u32;
                    let words = [address as u32, (address >> 32) as u32, third, dice.roll() as u32];
                    let ring = dice.of(&[Driver::TX_RING, Driver::RX_RING]);
                    driver.describe(ring, dice.below(Driver::RING), words).expect("memory");
                }
                1 => drop(lan.neighbour.send(&frame(OWN, OTHER, &[7; 100]))),
                2 => {
                    driver.get(dice.of(&REGISTERS)).expect("answered");
                    driver.reach.turn();
                }
                3 if step % 50 == 0 => {
                    driver.reach.force();
                    driver.reach.resume();
                }
                _ => {
                    let register = dice.of(&REGISTERS);
                    // Seldom a reset: it ends everything else.
                    let value = if register == spec::CTRL && dice.below(20) > 0 {
                        value & !spec::CTRL_RST
                    } else {
                        value
                    };
                    driver.put(register, value).expect("denied, not failed");
                }
            }
            unharmed(&driver, &what);
        }
        taken += driver.reach.reading().totals.descriptors;
        driver.reach.reset();
        driver.open(OWN).expect("opens");
        let sent = frame(OTHER, OWN, &[8; 100]);
        driver.xmit(&sent, Sending::default()).expect("room");
        let mut came = std::iter::from_fn(|| lan.neighbour.take());
        assert!(came.any(|frame| frame == sent), "seed {seed}");
        drop(view);
    }
    println!("{taken} descriptors were the card's");
    // Beside the buffers that each driver gives at first.
    assert!(taken > 40 * BUFFERS + 1000, "{taken}");
}
