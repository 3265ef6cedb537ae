//! What a card keeps of one guest, and what a saved state claims, when another guest gets it.

use std::sync::Arc;

use ioplane_device::{Access, Quiescent, RegisterAddress, SavedState};
use ioplane_embed::SharedDevice;
use ioplane_hardware::Hardware;
use ioplane_nic::ne2000::Ne2000;
use ioplane_passthrough::monitor::{Monitor, MonitorOptions, MonitorStateV1, Policies, TransferV1};
use ioplane_passthrough::{Passthrough, ne2000 as ne2000_model, rtl8139 as rtl8139_model};
use ioplane_pci::{Function, NotReady};
use ioplane_testkit::conformance::Dice;
use ioplane_testkit::hand::HandCore;
use ioplane_testkit::nic::{Cp, Lan, Ne2k, Reach};
use ioplane_testkit::qtest::{self, Board, Qemu};
use ioplane_testkit::simulated::{Bench, Simulated, Trouble};

use crate::rig::*;

/// What a predecessor has left.
const SECRET: u8 = 0x5e;

fn put<R: Reach>(driver: &mut Ne2k<R>, writes: &[(u64, u8)]) {
    for (register, value) in writes {
        driver.put(*register, *value).expect("works, or is denied");
    }
}

/// A card whose memory another guest has filled, without anybody in between.
fn used_card(lan: &Lan) -> (Simulated<Ne2000>, Bench<Ne2000>) {
    let (hardware, bench) = ne2000_card(lan);
    let mut before = Ne2k::new(Bare(hardware));
    before.probe().expect("finds it");
    before.block_output(0x4000, &[SECRET; 0x4000]).expect("works");
    assert_eq!(before.block_input(0x7ffc, 4).expect("works"), [SECRET; 4]);
    (before.reach.0, bench)
}

/// All of the card's memory, in pieces that do not go over the end of the ring.
fn all<R: Reach>(driver: &mut Ne2k<R>, stop: u8) -> Vec<u8> {
    let end = u16::from(stop.clamp(0x40, 0x80)) << 8;
    let mut bytes = Vec::new();
    for (from, to) in [(0x4000, end), (end, 0x8000)] {
        if from < to {
            bytes.extend(driver.block_input(from, to - from).expect("works"));
        }
    }
    bytes
}

/// A guest that has set its ring so, and started or not.
fn guest_with_ring(start: u8, stop: u8, started: bool) -> Ne2k<Watched<Ne2000>> {
    let (watched, _lan) = ne2000(Policies::default());
    let mut driver = Ne2k::new(watched);
    driver.probe().expect("finds it");
    put(&mut driver, &[(0, 0x21), (1, start), (2, stop), (3, start), (4, 0x40), (0, 0x61), (7, start)]);
    put(&mut driver, &[(0, 0x21), (0x0e, 0x49), (0x0c, 0x20)]);
    if started {
        put(&mut driver, &[(0, 0x22)]);
    }
    driver
}

#[test]
fn hole_11_memory_beyond_the_ring_is_wiped() {
    for (start, stop) in
        [(0x4c, 0x50), (0x4c, 0x60), (0x40, 0x7f), (0x4c, 0x80), (0x70, 0x50), (0, 0), (0x41, 0x41)]
    {
        for started in [false, true] {
            let mut driver = guest_with_ring(start, stop, started);
            driver.reach.turn();
            driver.reach.hold().expect("reusable");
            let lan = Lan::new(OWN, OTHER);
            let (hardware, bench) = used_card(&lan);
            let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &memory()));
            let bytes = all(&mut driver, stop);
            assert_eq!(bytes.len(), 0x4000);
            let left = bytes.iter().filter(|byte| **byte == SECRET).count();
            assert_eq!(
                left, 0,
                "ring {start:#x} to {stop:#x}, started: {started}: {left} bytes of another guest's"
            );
            assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
        }
    }
}

#[test]
fn hole_11_a_forced_stop_takes_all_of_the_memory_along() {
    for (start, stop) in [(0x4c, 0x50), (0x4c, 0x60), (0x4c, 0x80)] {
        let mut driver = guest_with_ring(start, stop, true);
        let own: Vec<u8> = (0..0x4000u32).map(|n| (n % 251) as u8).collect();
        for (page, piece) in (0x40u16..).zip(own.chunks(256)) {
            driver.block_output(page << 8, piece).expect("works");
        }
        driver.reach.force();
        let lan = Lan::new(OWN, OTHER);
        let (hardware, bench) = used_card(&lan);
        let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &memory()));
        assert!(all(&mut driver, stop) == own, "ring {start:#x} to {stop:#x}: other bytes than there were");
    }
}

/// A card that its guest gives back is empty, whoever gets it next and however.
#[test]
fn hole_11_a_card_that_is_given_back_is_empty() {
    let lan = Lan::new(OWN, OTHER);
    for dropped in [false, true] {
        let (hardware, bench) = ne2000_card(&lan);
        let same = hardware.clone();
        let watched = watch(hardware, bench, &ne2000_model::MODEL, Policies::default(), &memory());
        let mut driver = Ne2k::new(watched);
        driver.probe().expect("finds it");
        put(&mut driver, &[(0, 0x21), (1, 0x4c), (2, 0x60)]);
        driver.block_output(0x5000, &[SECRET; 0x2000]).expect("works");
        driver.reach.force();
        let monitor = driver.reach.front.take().expect("held").into_device();
        if dropped {
            drop(monitor)
        } else {
            drop(monitor.into_hardware())
        }
        let mut next = Ne2k::new(Bare(same));
        next.reach.enable(true).expect("works");
        put(&mut next, &[(0, 0x21), (0x0e, 0x49), (1, 0), (2, 0), (0, 0x22)]);
        assert_eq!(next.block_input(0x4000, 0x4000).expect("works"), [0; 0x4000], "dropped: {dropped}");
    }
}

/// A card that is passed through as it is: empty for each client, whoever was there before, also somebody whom this daemon has not seen.
#[test]
fn hole_11_a_card_that_is_passed_through_is_empty_for_each_client() {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, _bench) = used_card(&lan);
    let same = hardware.clone();
    let mut held = Quiescent::new(
        Passthrough::new("nic1", hardware, Some(&ne2000_model::MODEL)).expect("passed through"),
    );
    for guest in 0..3 {
        held.with(|direct, proof| direct.admit(proof)).expect("handed on");
        let mut driver = Ne2k::new(Bare(same.clone()));
        driver.probe().expect("as after a reset");
        put(&mut driver, &[(0, 0x21), (0x0e, 0x49), (1, 0), (2, 0), (0, 0x22)]);
        let bytes = driver.block_input(0x4000, 0x4000).expect("works");
        let left = bytes.iter().filter(|byte| **byte != 0).count();
        assert_eq!(left, 0, "guest {guest}: {left} bytes of another's");
        driver.block_output(0x4000, &[SECRET; 0x4000]).expect("works");
        // It leaves in the middle of something, on another page of registers.
        put(&mut driver, &[(0, 0x61), (1, 0x4c), (2, 0x50), (0, 0x62)]);
        held.with(|direct, _| direct.dismiss());
    }
}

/// Nobody gets a card whose memory could not be wiped; the next one that asks makes it tried again.
#[test]
fn hole_11_a_card_that_was_not_wiped_goes_to_nobody() {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = used_card(&lan);
    let mut held = Quiescent::new(
        Passthrough::new("nic1", hardware, Some(&ne2000_model::MODEL)).expect("passed through"),
    );
    // The data port alone: its reset works.
    bench.trouble(Trouble::BrokenAt(0x10));
    let refused =
        held.with(|direct, proof| direct.admit(proof)).expect_err("it may hold another guest's frames");
    assert!(matches!(&refused, NotReady::Unusable(why) if why.contains("could not be wiped")), "{refused:?}");
    bench.trouble(Trouble::None);
    held.with(|direct, proof| direct.admit(proof)).expect("tried again");
}

/// The same, of a card that was passed through as it is: also after its client has left, and where it never comes to that.
#[test]
fn hole_11_a_card_that_was_passed_through_is_given_back_empty() {
    let lan = Lan::new(OWN, OTHER);
    for (left, dropped) in [(true, true), (true, false), (false, true), (false, false)] {
        let (hardware, _bench) = ne2000_card(&lan);
        let same = hardware.clone();
        let mut held = Quiescent::new(
            Passthrough::new("nic1", hardware, Some(&ne2000_model::MODEL)).expect("passed through"),
        );
        held.with(|direct, proof| direct.admit(proof)).expect("handed on");
        let mut driver = Ne2k::new(Bare(same.clone()));
        driver.probe().expect("as after a reset");
        driver.block_output(0x4000, &[SECRET; 0x4000]).expect("works");
        put(&mut driver, &[(0, 0x61), (1, 0x4c), (2, 0x50), (0, 0x62)]);
        if left {
            held.with(|direct, _| direct.dismiss());
        }
        let direct = held.into_device();
        if dropped {
            drop(direct)
        } else {
            drop(direct.into_hardware())
        }
        let mut next = Ne2k::new(Bare(same));
        next.reach.enable(true).expect("works");
        put(&mut next, &[(0, 0x21), (0x0e, 0x49), (1, 0), (2, 0), (0, 0x22)]);
        let bytes = next.block_input(0x4000, 0x4000).expect("works");
        let kept = bytes.iter().filter(|byte| **byte != 0).count();
        assert_eq!(kept, 0, "left: {left}, dropped: {dropped}: {kept} bytes of the guest's");
    }
}

/// One failed access of a wipe is no reason to count the card as gone, and reason enough to keep the guest out until a wipe succeeds.
#[test]
fn hole_11_a_mediated_card_that_was_not_wiped_reads_as_all_ones() {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = used_card(&lan);
    // The data port alone, once: its reset works.
    bench.trouble(Trouble::BrokenOnceAt(0x10));
    let watched = watch(hardware, bench, &ne2000_model::MODEL, Policies::default(), &memory());
    let mut driver = Ne2k::new(watched);
    for register in [0, 7, 0x10, 0x1f] {
        assert_eq!(driver.get(register), Ok(0xff), "register {register:#x}");
    }
    let reading = driver.reach.reading();
    assert_eq!((reading.gone, reading.faults_of("not-wiped")), (false, 1), "{:?}", reading.faults);
    assert!(driver.reach.error.count() > 0, "its guest is told");
    driver.reach.hold().expect("nothing can happen");
    let refused = driver.reach.front.save().expect_err("whose memory?");
    assert!(refused.to_string().contains("could not be wiped"), "{refused}");
    driver.reach.resume();
    assert_eq!(driver.get(0), Ok(0xff), "resuming does not try again");
    // A reset of the device does.
    driver.reach.reset();
    driver.probe().expect("as after a reset");
    put(&mut driver, &[(0, 0x21), (0x0e, 0x49), (1, 0x40), (2, 0x80), (0, 0x22)]);
    assert!(!all(&mut driver, 0x80).contains(&SECRET), "another guest's");
}

/// Between two guests: the next one is refused as long as a wipe fails.
#[test]
fn hole_11_a_mediated_card_that_was_not_wiped_goes_to_nobody() {
    let driver = guest_with_ring(0x4c, 0x80, true);
    let mut watched = driver.reach;
    watched.bench.trouble(Trouble::BrokenOnceAt(0x10));
    watched.with(Function::dismiss);
    watched.force();
    let mut held = watched.front.take().expect("held");
    for trouble in [Trouble::BrokenOnceAt(0x10), Trouble::BrokenOnceAt(0x10), Trouble::None] {
        watched.bench.trouble(trouble);
        let admitted = held.with(|monitor, proof| monitor.admit(proof));
        match (trouble, &admitted) {
            (Trouble::None, Ok(())) => {}
            (Trouble::BrokenOnceAt(_), Err(NotReady::Unusable(why)))
                if why.contains("could not be wiped") => {}
            _ => panic!("{trouble:?}: {admitted:?}"),
        }
    }
}

/// A guest that knows where the card is after a transfer, and where the monitor last saw it told to be.
#[test]
fn hole_11_the_address_that_the_card_has_is_checked() {
    let read_on: &[&[(u64, u8)]] = &[
        // The count only.
        &[(0, 0x22), (10, 0x10), (11, 0), (0, 0x0a)],
        // One half of the address only.
        &[(0, 0x22), (8, 0xf8), (10, 0x10), (11, 0), (0, 0x0a)],
        // Nothing at all: the count as it was.
        &[(0, 0x0a)],
        // After a reset, which leaves the address where it is.
        &[(0, 0x22), (10, 0x10), (11, 0), (0, 0x12)],
    ];
    for (n, writes) in read_on.iter().enumerate() {
        let (watched, _lan) = ne2000(Policies::default());
        let mut driver = Ne2k::new(watched);
        driver.probe().expect("finds it");
        put(&mut driver, &[(0, 0x21), (0x0c, 0x20), (1, 0x4c), (2, 0x60)]);
        driver.block_input(0x7fe0, 0x20).expect("works");
        assert_eq!((driver.get(8), driver.get(9)), (Ok(0), Ok(0x80)), "the card is behind its memory");
        if n == 3 {
            driver.get(0x1f).expect("works");
            put(&mut driver, &[(0x1f, 0), (0x0e, 0x49), (0x0c, 0x20)]);
        }
        put(&mut driver, writes);
        assert_eq!(driver.reach.faults("card-outside"), 1, "way {n}");
        assert_eq!(driver.reach.read(RegisterAddress::Bar(0, 0x10), 4), Ok(0), "way {n}");
    }
}

#[test]
fn hole_11_no_more_is_moved_than_was_checked() {
    let (watched, _lan) = ne2000(Policies::default());
    let mut driver = Ne2k::new(watched);
    driver.probe().expect("finds it");
    let before = driver.reach.bench.touches().reads;
    // No bytes from nowhere; then one access.
    put(&mut driver, &[(0, 0x22), (10, 0), (11, 0), (8, 0), (9, 0x90), (0, 0x0a)]);
    let writes = driver.reach.bench.touches().reads;
    assert_eq!(driver.reach.read(RegisterAddress::Bar(0, 0x10), 4), Ok(0));
    assert_eq!(driver.reach.bench.touches().reads, writes, "the card does not hear of it ({before})");
    // Two bytes at the end of the memory, by an access of four.
    put(&mut driver, &[(0, 0x22), (10, 2), (11, 0), (8, 0xfe), (9, 0x7f), (0, 0x0a)]);
    driver.reach.read(RegisterAddress::Bar(0, 0x10), 4).expect("works");
    put(&mut driver, &[(0, 0x22)]);
    let at = u16::from_le_bytes([driver.get(8).expect("works"), driver.get(9).expect("works")]);
    assert!(at <= 0x8000, "the card is at {at:#x}");
}

/// The monitor on QEMU's card, which has 32 KiB of memory, reads on behind its count and wraps at the very end of the ring only:
/// whatever the guest does, what a predecessor left never shows.
#[test]
fn hole_11_qemu_s_card_shows_nothing_of_a_predecessor() {
    if !qtest::installed() {
        use std::io::Write;
        let program = qtest::PROGRAM;
        let why = format!("SKIPPED: the monitor was NOT tried on QEMU's card: {program} is not installed");
        let _ = writeln!(std::io::stderr(), "{why}");
        return;
    }
    for seed in 0..4 {
        let mut qemu = Qemu::start("ne2k_pci", OWN).expect("QEMU starts");
        qemu.enable(true).expect("works");
        let mut before = Ne2k::new(&mut qemu);
        before.probe().expect("finds it");
        put(&mut before, &[(1, 0), (2, 0)]);
        before.block_output(0x4000, &[SECRET; 0x8000]).expect("works");
        assert_eq!(before.block_input(0xbffc, 4).expect("works"), [SECRET; 4], "32 KiB");
        let board = Board::new(qemu, 0x100).expect("a card");
        let monitor = Monitor::new(board, &ne2000_model::MODEL, MonitorOptions::new("nic1"))
            .expect("a card that works");
        let front = SharedDevice::new(monitor, Arc::new(HandCore::default())).expect("it starts");
        let mut dice = Dice::new(seed);
        let mut moved = 0;
        let put = |register: u64, value: u8| {
            front.access(RegisterAddress::Bar(0, register), Access::Write(&[value])).expect("it is there");
        };
        for (register, value) in [(0, 0x21), (0x0e, 0x49), (0x0c, 0x20), (1, 0x4c), (2, 0x80), (0, 0x22)] {
            put(register, value);
        }
        for _ in 0..1500 {
            let edge = [0x00, 0x3f, 0x40, 0x4c, 0x5f, 0x60, 0x7f, 0x80, 0x81, 0xbf, 0xc0];
            match dice.below(20) {
                0 => put(1, dice.of(&edge)),
                1 => put(2, dice.of(&edge)),
                2..=4 => put(8, dice.of(&[0, 1, 2, 0xfc, 0xfd, 0xfe, 0xff])),
                5..=7 => put(9, dice.of(&edge)),
                8 => put(10, dice.of(&[0, 1, 2, 3, 4, 8, 0xff])),
                9 => put(11, dice.of(&[0, 0, 0, 1, 0x20, 0x34, 0x40])),
                10 => put(0x0e, dice.of(&[0x48, 0x49])),
                11 | 12 => put(0, dice.of(&[0x0a, 0x0a, 0x12, 0x22, 0x21, 0x0b, 0x02])),
                13 => {
                    let _ = front.access(RegisterAddress::Bar(0, 0x1f), Access::Read(&mut [0]));
                    put(0, 0x22);
                }
                14 => {
                    // One that is wholly within the memory, near its end.
                    for (register, value) in [(0, 0x22), (8, 0xfe), (9, 0x7f), (10, 2), (11, 0), (0, 0x0a)] {
                        put(register, value);
                    }
                }
                _ => {
                    let width = dice.of(&[1, 2, 4]);
                    let at = RegisterAddress::Bar(0, dice.of(&[0x10, 0x10, 0x10, 0x10, 0x12, 0x11]));
                    let mut bytes = [0; 4];
                    front.access(at, Access::Read(&mut bytes[..width])).expect("it is there");
                    assert!(!bytes.contains(&SECRET), "seed {seed}: {bytes:02x?} of a predecessor's");
                    moved += 1;
                }
            }
        }
        assert!(moved > 100);
    }
}

fn changed(state: &SavedState, change: impl FnOnce(&mut MonitorStateV1)) -> SavedState {
    let mut saved: MonitorStateV1 = postcard::from_bytes(&state.body).expect("a state of its own");
    change(&mut saved);
    SavedState { body: postcard::to_stdvec(&saved).expect("it fits"), ..state.clone() }
}

fn claim(state: &SavedState, region: &str, name: &str) -> SavedState {
    changed(state, |saved| {
        let place = saved.machine.states.iter_mut().find(|(own, _)| own == region);
        place.expect("a region").1 = name.to_owned();
    })
}

/// Loads it into a monitor of other hardware; why it was refused.
fn load_ne2000(state: &SavedState) -> Result<(), String> {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = ne2000_card(&lan);
    load(hardware, bench, &ne2000_model::MODEL, state)
}

fn load_rtl8139(state: &SavedState) -> Result<(), String> {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = rtl8139_card(&lan);
    load(hardware, bench, &rtl8139_model::MODEL, state)
}

fn load<F: Function>(
    hardware: Simulated<F>,
    bench: Bench<F>,
    model: &'static ioplane_model::StateModel,
    state: &SavedState,
) -> Result<(), String>
where
    Simulated<F>: Hardware,
{
    let mut monitor =
        Monitor::new(hardware, model, MonitorOptions::new("nic2")).expect("hardware that works");
    monitor.grow_memory(memory()).expect("an IOMMU with room");
    let writes = bench.touches().writes;
    match Quiescent::new(monitor).load(state) {
        Ok(_) => Ok(()),
        Err(refused) => {
            assert_eq!(bench.touches().writes, writes, "refused before anything is touched");
            Err(refused.error.to_string())
        }
    }
}

/// A claim that the registers do not bear out is refused, but for regions that only say whether the device may change hands, which the
/// guest that claims it has to live with.
#[test]
fn hole_12_claimed_states_are_held_against_the_registers() {
    let driver = guest_with_ring(0x4c, 0x80, true);
    driver.reach.hold().expect("reusable");
    let ne = driver.reach.save();
    let (watched, map, _lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), 0x1_0000);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    driver.reach.hold().expect("reusable");
    let rtl = driver.reach.save();
    type Load = fn(&SavedState) -> Result<(), String>;
    let cards: [(_, _, Load, &[&str]); 2] = [
        (&ne, &ne2000_model::MODEL, load_ne2000, &["run", "ring", "dma"]),
        (&rtl, &rtl8139_model::MODEL, load_rtl8139, &["engine", "tally", "eeprom"]),
    ];
    for (state, model, load, decide) in cards {
        load(state).expect("it is what was saved");
        let saved: MonitorStateV1 = postcard::from_bytes(&state.body).expect("a state of its own");
        for region in model.regions {
            let (_, own) = saved.machine.states.iter().find(|(name, _)| name == region.name).expect("there");
            for other in region.states.iter().filter(|other| other.name != own) {
                let loaded = load(&claim(state, region.name, other.name));
                let what = format!("{} {} claims {}", model.name, region.name, other.name);
                match loaded {
                    Ok(()) => assert!(!decide.contains(&region.name), "{what}: believed"),
                    Err(why) => {
                        assert!(decide.contains(&region.name), "{what}: {why}");
                        assert!(
                            why.contains(region.name) && why.contains(other.name) && why.contains(own),
                            "{why}"
                        );
                    }
                }
            }
        }
    }
}

/// A state that says that a word of the EEPROM is being read, while the card is not even in that mode: a write would pass as the rest
/// of the word.
#[test]
fn hole_12_the_eeprom_is_not_written_by_way_of_a_saved_state() {
    let (watched, map, _lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), 0x1_0000);
    driver.open(OWN).expect("opens");
    driver.reach.hold().expect("reusable");
    let hostile = claim(&driver.reach.save(), "eeprom", "Read");
    let why = load_rtl8139(&hostile).expect_err("not believed");
    assert!(why.contains("eeprom"), "{why}");
}

#[test]
fn hole_12_ranges_in_a_saved_state_are_vetted() {
    let mut driver = guest_with_ring(0x4c, 0x80, true);
    put(&mut driver, &[(0, 0x22), (8, 0), (9, 0x40), (10, 0x40), (11, 0), (0, 0x0a)]);
    driver.reach.read(RegisterAddress::Bar(0, 0x10), 4).expect("works");
    driver.reach.force();
    let state = driver.reach.save();
    load_ne2000(&state).expect("it is what was saved");
    let transfer = |read, address, left| {
        changed(&state, |saved| saved.card.transfer = Some(TransferV1 { read, address, left }))
    };
    load_ne2000(&transfer(true, 0x4004, 0x3c)).expect("the same");
    for hostile in [
        transfer(true, 0x8000, 4),
        transfer(true, 0x7ffe, 0xffff),
        transfer(false, 0x4004, 0x3c),
        transfer(false, 0, 0x20),
        transfer(true, 0x3fff, 2),
        // Odd, in words, over the end of the ring: cards differ in where they go on.
        transfer(true, 0x7ff1, 0x20),
        // None under way, and the port open.
        changed(&state, |saved| saved.card.transfer = None),
    ] {
        load_ne2000(&hostile).expect_err("not what the guest could have begun");
    }
}

/// What is saved of a device anywhere in a driver's life is taken back, and the model is then where it was.
#[test]
fn hole_12_what_was_saved_is_what_is_derived() {
    let mut saved = 0;
    for forced in [false, true] {
        for steps in 0..24 {
            let (watched, _lan) = ne2000(Policies::default());
            let mut driver = Ne2k::new(watched);
            let script: &[(u64, u8)] = &[
                (0, 0x21),
                (0x0e, 0x49),
                (10, 0),
                (11, 0),
                (0x0c, 0x20),
                (0x0d, 2),
                (1, 0x4c),
                (2, 0x80),
                (3, 0x4c),
                (4, 0x40),
                (7, 0xff),
                (0, 0x61),
                (7, 0x4d),
                (0, 0x21),
                (0, 0x22),
                (0x0d, 0),
                (0x0c, 4),
                (10, 0x20),
                (11, 0),
                (8, 0),
                (9, 0x41),
                (0, 0x12),
                (8, 4),
                (0, 0x21),
            ];
            put(&mut driver, &script[..steps]);
            if forced {
                driver.reach.force();
            } else if driver.reach.hold().is_err() {
                continue;
            }
            saved += 1;
            let state = driver.reach.save();
            load_ne2000(&state).unwrap_or_else(|why| panic!("after {steps} steps, forced: {forced}: {why}"));
        }
    }
    assert!(saved > 40, "{saved}");
    for pins in [&[][..], &[0x80], &[0x80, 0x88], &[0x80, 0x88, 0x8a, 0x8e], &[0xc0]] {
        let (watched, map, _lan) = rtl8139(Policies::default());
        let mut driver = Cp::new(watched, view(&map), 0x1_0000);
        driver.open(OWN).expect("opens");
        for value in pins {
            driver.put(0x50, 1, *value).expect("works");
        }
        driver.reach.force();
        load_rtl8139(&driver.reach.save()).unwrap_or_else(|why| panic!("after {pins:02x?}: {why}"));
    }
}
