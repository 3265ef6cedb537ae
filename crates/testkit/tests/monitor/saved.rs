//! Mediated cards as bytes: what is stored today is what is written tomorrow, and is loaded tomorrow by a monitor of other hardware.

use ioplane_device::RegisterAddress;
use ioplane_nic::ne2000::Ne2000;
use ioplane_passthrough::monitor::Policies;
use ioplane_testkit::golden;
use ioplane_testkit::golden::Golden;
use ioplane_testkit::nic::{Cp, Cut, Lan, Ne2k, Reach, frame};

use crate::rig::*;

const BASE: u64 = 0x1_0000;

fn numbered(n: u8) -> Vec<u8> {
    frame(OTHER, OWN, &[n; 200])
}

/// A card with a guest that has had three frames each way. Then `stop` brings it to where it is saved; on another card it goes on
/// with what is stored, and sends the frames that `stop` has left in its ring.
fn rtl8139_saved(
    golden: &Golden,
    stop: impl FnOnce(&mut Cp<Watched<ioplane_nic::rtl8139::Rtl8139>>) -> Vec<Vec<u8>>,
) {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.interrupts();
    for n in 0..3 {
        driver.xmit(&numbered(n), Cut::default()).expect("room");
        lan.neighbour.take().expect("sent");
        lan.neighbour.send(&frame(OWN, OTHER, &[n; 500]));
        driver.reach.interrupts();
        driver.interrupt().expect("works");
        assert_eq!((driver.poll().expect("works").len(), driver.reclaim().expect("works").len()), (1, 1));
        driver.reach.interrupts();
    }
    // Announced, and not read yet.
    lan.neighbour.send(&frame(OWN, OTHER, &[9; 500]));
    driver.reach.turn();
    let left = stop(&mut driver);
    golden.check_state(&driver.reach.save());
    let (hardware, bench) = rtl8139_card(&lan);
    let mut driver = driver.map(|watched| watched.goes_on_as(&golden.state(), hardware, bench, &map));
    for sent in left {
        assert_eq!(lan.neighbour.take(), Some(sent));
    }
    assert!(driver.reach.interrupts() > 0, "announced again");
    driver.interrupt().expect("works");
    assert_eq!(driver.poll().expect("works")[0].bytes, frame(OWN, OTHER, &[9; 500]));
    driver.reclaim().expect("works");
    driver.xmit(&numbered(8), Cut::default()).expect("room");
    assert_eq!(lan.neighbour.take(), Some(numbered(8)));
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

#[test]
fn an_rtl8139_between_two_frames() {
    rtl8139_saved(&golden!("rtl8139.state"), |driver| {
        driver.reach.hold().expect("reusable");
        Vec::new()
    });
}

#[test]
fn an_rtl8139_with_frames_in_flight() {
    rtl8139_saved(&golden!("rtl8139-forced.state"), |driver| {
        // The card does not look at its doorbell any more.
        driver.reach.bench.hold(0xd9);
        let frames: Vec<_> = (4..7).map(numbered).collect();
        frames.iter().for_each(|sent| driver.xmit(sent, Cut::default()).expect("room"));
        assert_eq!(driver.reach.hold(), Err("TxRun".to_owned()));
        driver.reach.force();
        driver.reach.bench.forget();
        frames
    });
}

/// The same of a card with memory of its own.
fn ne2000_saved(
    golden: &Golden,
    stop: impl FnOnce(&mut Ne2k<Watched<Ne2000>>),
    after: impl FnOnce(&mut Ne2k<Watched<Ne2000>>),
) {
    let (watched, mut lan) = ne2000(Policies::default());
    let mut driver = Ne2k::new(watched);
    driver.probe().expect("finds it");
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    for n in 0..3 {
        driver.xmit(&numbered(n)).expect("works");
        lan.neighbour.take().expect("sent");
        driver.reach.interrupts();
        lan.neighbour.send(&frame(OWN, OTHER, &[n; 500]));
        driver.reach.interrupts();
        assert_eq!(driver.interrupt().expect("works").0.len(), 1);
        driver.reach.interrupts();
    }
    stop(&mut driver);
    golden.check_state(&driver.reach.save());
    let other = Lan::new(OWN, OTHER);
    let (hardware, bench) = ne2000_card(&other);
    let mut driver = driver.map(|watched| watched.goes_on_as(&golden.state(), hardware, bench, &memory()));
    let mut lan = other;
    after(&mut driver);
    driver.xmit(&numbered(8)).expect("works");
    assert_eq!(lan.neighbour.take().expect("sent")[..], numbered(8));
    driver.reach.interrupts();
    driver.interrupt().expect("works");
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

#[test]
fn an_ne2000_between_two_frames() {
    let hold = |driver: &mut Ne2k<Watched<Ne2000>>| driver.reach.hold().expect("reusable");
    ne2000_saved(&golden!("ne2000.state"), hold, |_| ());
}

#[test]
fn an_ne2000_in_the_middle_of_a_transfer() {
    let stop = |driver: &mut Ne2k<Watched<Ne2000>>| {
        driver.block_output(0x4000, b"what the guest keeps there").expect("works");
        for (register, value) in [(0, 0x22), (8, 0), (9, 0x40), (10, 26), (11, 0), (0, 0x0a)] {
            driver.put(register, value).expect("works");
        }
        assert_eq!(driver.reach.read(RegisterAddress::Bar(0, 0x10), 4), Ok(u32::from_le_bytes(*b"what")));
        driver.reach.force();
    };
    let after = |driver: &mut Ne2k<Watched<Ne2000>>| {
        assert_eq!(driver.reach.read(RegisterAddress::Bar(0, 0x10), 4), Ok(u32::from_le_bytes(*b" the")));
        driver.put(0, 0x22).expect("works");
        assert_eq!(driver.block_input(0x4000, 26).expect("works"), b"what the guest keeps there");
    };
    ne2000_saved(&golden!("ne2000-forced.state"), stop, after);
}
