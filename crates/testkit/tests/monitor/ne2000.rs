//! ne2k-pci on a watched NE2000.

use ioplane_passthrough::monitor::Policies;
use ioplane_testkit::nic::{Ne2k, frame};

use crate::rig::*;

#[test]
fn frames_go_both_ways_through_the_data_port() {
    let (watched, mut lan) = ne2000(Policies::default());
    let mut driver = Ne2k::new(watched);
    assert_eq!(driver.probe().expect("finds it"), OWN);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    for n in 0..200u32 {
        let sent = frame(OTHER, OWN, &n.to_le_bytes().repeat(257));
        driver.xmit(&sent).expect("works");
        assert_eq!(lan.neighbour.take().as_deref(), Some(&sent[..]), "frame {n}");
        assert!(driver.reach.interrupts() > 0, "the guest is told");
        let (frames, statuses) = driver.interrupt().expect("works");
        assert_eq!((frames.len(), statuses.len()), (0, 1));
        let came = frame(OWN, OTHER, &n.to_be_bytes().repeat(257));
        lan.neighbour.send(&came);
        assert!(driver.reach.interrupts() > 0, "frame {n} is announced");
        let (frames, _) = driver.interrupt().expect("works");
        assert_eq!(frames, [came]);
        driver.reach.interrupts();
    }
    let reading = driver.reach.reading();
    assert!(reading.faults.is_empty(), "{:?}", reading.faults);
    let totals = reading.totals;
    let share = totals.hooked * 100 / totals.accesses;
    // Frames of 1,000 bytes, as the goal has it: at most 10 %.
    assert!(share < 10, "{share} % hooked: {totals:?}");
    // Reusable once the monitor has asked the card.
    driver.reach.hold().expect("reusable");
    driver.reach.resume();
}

#[test]
fn a_burst_wraps_the_card_s_ring() {
    let (watched, mut lan) = ne2000(Policies::default());
    let mut driver = Ne2k::new(watched);
    driver.probe().expect("finds it");
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    let (mut expected, mut got) = (Vec::new(), Vec::new());
    for round in 0..30u8 {
        let frames: Vec<_> = (0..7).map(|n| frame(OWN, OTHER, &[round ^ n; 1400])).collect();
        assert_eq!(lan.neighbour.send_all(&frames), 7);
        expected.extend(frames);
        while driver.reach.interrupts() > 0 {
            got.extend(driver.interrupt().expect("works").0);
        }
    }
    assert_eq!(got.len(), expected.len());
    assert_eq!(got, expected);
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

#[test]
fn what_a_predecessor_left_on_the_card_is_gone() {
    let lan = ioplane_testkit::nic::Lan::new(OWN, OTHER);
    let (hardware, bench) = ne2000_card(&lan);
    // The predecessor had the card without anybody in between.
    let mut before = Ne2k::new(Bare(hardware));
    before.probe().expect("finds it");
    before.open(OWN).expect("opens");
    before.block_output(0x5000, b"secret of another guest!").expect("works");
    assert_eq!(before.block_input(0x5000, 24).expect("works"), b"secret of another guest!");
    let watched =
        watch(before.reach.0, bench, &ioplane_passthrough::ne2000::MODEL, Policies::default(), &memory());
    let mut driver = Ne2k::new(watched);
    driver.probe().expect("finds it");
    driver.open(OWN).expect("opens");
    assert_eq!(driver.block_input(0x4000, 0x4000).expect("works"), [0; 0x4000]);
    assert!(driver.reach.reading().faults.is_empty());
}
