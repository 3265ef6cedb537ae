//! e1000e on a watched 82574L.

use std::sync::Arc;

use ioplane_device::{Change, RegisterAddress};
use ioplane_memory::{DirtyLog, GuestMap};
use ioplane_nic::i82574::{I82574, spec};
use ioplane_passthrough::monitor::Policies;
use ioplane_pci::Function;
use ioplane_testkit::nic::{E1000e, Lan, Reach, Sending, frame};

use crate::rig::*;

const BASE: u64 = 0x1_0000;
type Driver = E1000e<Watched<I82574>>;

fn opened() -> (Driver, Arc<GuestMap>, Lan) {
    let (watched, map, lan) = i82574(Policies::default());
    let mut driver = E1000e::new(watched, view(&map), BASE);
    assert_eq!(driver.probe(), Ok(OWN));
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    (driver, map, lan)
}

/// A frame each way, both announced and taken back.
fn both_ways(driver: &mut Driver, lan: &mut Lan, n: u32) {
    let sent = frame(OTHER, OWN, &n.to_le_bytes().repeat(100));
    driver.xmit(&sent, Sending::default()).expect("room");
    assert_eq!(lan.neighbour.take().as_deref(), Some(&sent[..]), "frame {n}");
    assert!(driver.reach.interrupts() > 0, "the guest is told of frame {n}");
    assert_eq!(driver.interrupt(), Ok(Some(1)), "TXDW only");
    assert_eq!(driver.reclaim(), Ok(1));
    assert_eq!(driver.poll(), Ok(vec![]));
    let came = frame(OWN, OTHER, &n.to_be_bytes().repeat(150));
    lan.neighbour.send(&came);
    assert!(driver.reach.interrupts() > 0, "frame {n} is announced");
    assert_eq!(driver.interrupt(), Ok(Some(0x80)), "RXT0 only");
    assert_eq!(driver.poll(), Ok(vec![came]));
    assert_eq!(driver.reach.interrupts(), 0, "acknowledged");
}

fn without_fault(driver: &Driver) {
    let reading = driver.reach.reading();
    assert!(reading.faults.is_empty(), "{:?}", reading.faults);
    let violations = driver.reach.bench.with(|card| card.violations().to_vec());
    assert!(violations.is_empty(), "{violations:?}");
    assert_eq!(driver.reach.bench.with(|card| card.counts().faults), 0);
}

#[test]
fn frames_go_both_ways_and_statuses_come_back() {
    let (mut driver, _map, mut lan) = opened();
    for n in 0..200 {
        both_ways(&mut driver, &mut lan, n);
    }
    without_fault(&driver);
    let reading = driver.reach.reading();
    assert!(reading.reusable, "{:?}", reading.states);
    assert!(reading.totals.descriptors >= 400, "{:?}", reading.totals);
    driver.close().expect("closes");
}

#[test]
fn legacy_descriptors_work_too() {
    let (watched, map, mut lan) = i82574(Policies::default());
    let mut driver = E1000e::new(watched, view(&map), BASE).by_legacy_descriptors();
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    for n in 0..100u32 {
        let sent = frame(OTHER, OWN, &n.to_le_bytes().repeat(60));
        driver.xmit(&sent, Sending { at: &[40], legacy: true, ..Sending::default() }).expect("room");
        assert_eq!(lan.neighbour.take(), Some(sent));
        let came = frame(OWN, OTHER, &n.to_be_bytes().repeat(150));
        lan.neighbour.send(&came);
        driver.reach.interrupts();
        assert_eq!(driver.interrupt(), Ok(Some(0x81)));
        assert_eq!((driver.reclaim(), driver.poll()), (Ok(1), Ok(vec![came])));
        driver.reach.turn();
    }
    // The guest's descriptors have its own addresses, not ours.
    for index in 0..Driver::RING {
        let words = driver.words(Driver::RX_RING, index).expect("memory");
        assert_eq!(words[1], 0, "{words:x?}");
        assert_eq!(u64::from(words[0]), BASE + Driver::RX_BUFFERS + index * 2048);
    }
    without_fault(&driver);
}

#[test]
fn a_burst_fills_the_ring_and_nothing_is_lost() {
    let (mut driver, _map, mut lan) = opened();
    let (mut expected, mut got) = (Vec::new(), Vec::new());
    for round in 0..20u32 {
        let frames: Vec<_> =
            (0..50u32).map(|n| frame(OWN, OTHER, &(round * 100 + n).to_le_bytes().repeat(64))).collect();
        assert_eq!(lan.neighbour.send_all(&frames), 50);
        expected.extend(frames);
        while driver.reach.interrupts() > 0 {
            driver.interrupt().expect("works");
            got.extend(driver.poll().expect("works"));
        }
    }
    assert_eq!(got, expected);
    for n in 0..20u8 {
        driver
            .queue(&frame(OTHER, OWN, &[n; 400]), Sending { at: &[100, 300], ..Sending::default() })
            .expect("room");
    }
    driver.kick().expect("works");
    for n in 0..20u8 {
        assert_eq!(lan.neighbour.take(), Some(frame(OTHER, OWN, &[n; 400])));
    }
    driver.reach.turn();
    driver.interrupt().expect("works");
    assert_eq!(driver.reclaim(), Ok(20));
    without_fault(&driver);
}

/// A context describes later frames: also on the card that the guest goes on with.
#[test]
fn a_context_goes_along() {
    let (mut driver, map, mut lan) = opened();
    let sent = frame(OTHER, OWN, &[3; 100]);
    let summed = |driver: &mut Driver, lan: &mut Lan, how: Sending<'_>| {
        driver.xmit(&sent, how).expect("room");
        let came = lan.neighbour.take().expect("it was sent");
        assert_eq!(came[..20], sent[..20]);
        driver.reach.turn();
        driver.reclaim().expect("works");
        came[20..22].to_vec()
    };
    let first = summed(&mut driver, &mut lan, Sending { sum: Some((14, 20)), ..Sending::default() });
    assert_ne!(first, [3, 3]);
    let again = Sending { again: true, ..Sending::default() };
    assert_eq!(summed(&mut driver, &mut lan, again), first);
    driver.reach.hold().expect("reusable");
    let (hardware, bench) = i82574_card(&lan);
    let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &map));
    assert_eq!(summed(&mut driver, &mut lan, again), first);
    // Held and taken up again on the same card.
    driver.reach.hold().expect("reusable");
    driver.reach.resume();
    assert_eq!(summed(&mut driver, &mut lan, again), first);
    without_fault(&driver);
}

#[test]
fn it_moves_between_any_two_frames() {
    let (mut driver, map, mut lan) = opened();
    let mut sizes = Vec::new();
    for n in 0..40 {
        both_ways(&mut driver, &mut lan, n);
        driver.reach.hold().expect("reusable");
        sizes.push(driver.reach.save().body.len());
        let (hardware, bench) = i82574_card(&lan);
        driver = driver.map(|watched| watched.moves_to(hardware, bench, &map));
        without_fault(&driver);
    }
    let most = sizes.iter().max().copied().unwrap_or(0);
    println!("a state has at most {most} bytes");
    assert!(most <= 1024, "{sizes:?}");
}

/// Frames that the card has not sent are sent by the next one, and what it has received is the guest's.
#[test]
fn a_forced_stop_loses_nothing() {
    let (mut driver, map, mut lan) = opened();
    both_ways(&mut driver, &mut lan, 1);
    lan.neighbour.send(&frame(OWN, OTHER, &[9; 500]));
    driver.reach.turn();
    driver.reach.bench.hold(spec::TDT);
    let sent: Vec<_> = (0..7u8).map(|n| frame(OTHER, OWN, &[n; 300])).collect();
    for one in &sent {
        driver.xmit(one, Sending { at: &[100], ..Sending::default() }).expect("room");
    }
    assert_eq!(driver.reach.hold(), Err("TxRun".to_owned()));
    driver.reach.force();
    driver.reach.bench.forget();
    assert_eq!(lan.neighbour.take(), None);
    let (hardware, bench) = i82574_card(&lan);
    let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &map));
    for one in sent {
        assert_eq!(lan.neighbour.take(), Some(one));
    }
    assert!(driver.reach.interrupts() > 0, "announced again");
    driver.interrupt().expect("works");
    assert_eq!((driver.reclaim(), driver.poll()), (Ok(7), Ok(vec![frame(OWN, OTHER, &[9; 500])])));
    both_ways(&mut driver, &mut lan, 2);
    without_fault(&driver);
}

#[test]
fn counters_go_on_and_filters_go_along() {
    let (mut driver, map, mut lan) = opened();
    let group = [0x01, 0, 0x5e, 0, 0, 0x1f];
    let bit = u64::from(group[4] >> 4) | u64::from(group[5]) << 4;
    driver.put(spec::MTA + (bit >> 5) * 4, 1 << (bit & 31)).expect("works");
    for n in 0..3 {
        both_ways(&mut driver, &mut lan, n);
    }
    driver.reach.hold().expect("reusable");
    let (hardware, bench) = i82574_card(&lan);
    let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &map));
    both_ways(&mut driver, &mut lan, 4);
    assert_eq!((driver.get(spec::GPRC), driver.get(spec::GPTC)), (Ok(4), Ok(4)));
    assert_eq!((driver.get(spec::GPRC), driver.get(spec::GPTC)), (Ok(0), Ok(0)), "reading clears them");
    assert_eq!((driver.get(spec::GORCL), driver.get(spec::GORCH)), (Ok(4 * 614), Ok(0)));
    assert_eq!((driver.get(spec::GORCL), driver.get(spec::GORCH)), (Ok(0), Ok(0)));
    let came = frame(group, OTHER, &[1; 100]);
    lan.neighbour.send(&came);
    driver.reach.interrupts();
    driver.interrupt().expect("works");
    assert_eq!(driver.poll(), Ok(vec![came]), "the filter has come along");
    without_fault(&driver);
}

/// Interrupt status and mask as section 10.2.4 of the datasheet has them.
#[test]
fn the_status_is_virtual() {
    let (mut driver, _map, _lan) = opened();
    driver.put(spec::IMC, !0).expect("works");
    driver.cause(1 << 4).expect("works");
    assert_eq!(driver.reach.interrupts(), 0, "masked");
    assert_eq!(driver.get(spec::IMS), Ok(0));
    assert_eq!(
        (driver.get(spec::ICR), driver.get(spec::ICR)),
        (Ok(1 << 4), Ok(0)),
        "read with nothing wanted: cleared"
    );
    driver.put(spec::IMS, 1 << 2).expect("works");
    driver.cause(1 << 4).expect("works");
    assert_eq!(
        (driver.get(spec::ICR), driver.get(spec::ICR)),
        (Ok(1 << 4), Ok(1 << 4)),
        "not asserted: kept"
    );
    driver.cause(1 << 2).expect("works");
    assert!(driver.reach.interrupts() > 0);
    assert_eq!(driver.get(spec::ICR), Ok(1 << 31 | 1 << 4 | 1 << 2));
    assert_eq!((driver.get(spec::IMS), driver.get(spec::ICR)), (Ok(0), Ok(0)), "masked by itself");
    assert_eq!(driver.get(spec::IAM), Ok(!0));
    // The hardware never masks by itself.
    assert_eq!(driver.reach.bench.with(|card| card.peek(spec::CTRL_EXT)) & 1 << 27, 0);
    assert_ne!(driver.get(spec::CTRL_EXT).expect("works") & 1 << 27, 0);
    driver.put(spec::IMS, 1 << 2).expect("works");
    driver.cause(1 << 2 | 1 << 4).expect("works");
    driver.put(spec::ICR, 1 << 2).expect("works");
    assert_eq!((driver.get(spec::IMS), driver.get(spec::ICR)), (Ok(0), Ok(1 << 4)), "ones clear, and mask");
    without_fault(&driver);
}

#[test]
fn the_guest_sees_its_own_ring_and_never_ours() {
    let (mut driver, map, mut lan) = opened();
    for n in 0..5 {
        both_ways(&mut driver, &mut lan, n);
    }
    driver.reach.hold().expect("reusable");
    let (hardware, bench) = i82574_card(&lan);
    let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &map));
    let ring =
        |driver: &mut Driver, low: u64| [0, 4, 8, 0x10, 0x18].map(|at| driver.get(low + at).expect("works"));
    let rings = BASE as u32 + Driver::TX_RING as u32;
    assert_eq!(ring(&mut driver, spec::TDBAL), [rings, 0, 1024, 5, 5]);
    assert_eq!(ring(&mut driver, spec::RDBAL), [BASE as u32, 0, 1024, 5, 4]);
    both_ways(&mut driver, &mut lan, 5);
    assert_eq!(ring(&mut driver, spec::TDBAL), [rings, 0, 1024, 6, 6]);
    assert_eq!(
        driver.reach.bench.with(|card| [card.peek(spec::TDH), card.peek(spec::RDH)]),
        [1, 1],
        "from the start"
    );
    for (first, _) in driver.reach.bench.mapped() {
        assert!([60 << 30, 64 << 30].contains(&first), "{first:#x} is reachable");
    }
}

#[test]
fn every_store_to_guest_memory_is_in_the_dirty_log() {
    let (mut driver, _map, mut lan) = opened();
    let log = Arc::new(DirtyLog::new(MEMORY).expect("memory"));
    assert!(driver.reach.front.change(&Change::Log(Some(log.clone())), soon()).expect("here"));
    driver.xmit(&frame(OTHER, OWN, &[1; 100]), Sending::default()).expect("room");
    driver.reach.turn();
    assert_eq!(log.take(), [BASE + Driver::TX_RING]);
    driver.interrupt().expect("works");
    driver.poll().expect("works");
    lan.neighbour.send(&frame(OWN, OTHER, &[1; 100]));
    driver.reach.turn();
    assert_eq!(log.take(), [BASE, BASE + Driver::RX_BUFFERS]);
    // Buffers that may have been written in part when the device is stopped.
    driver.reach.force();
    let marked = log.take();
    let all = (BASE + Driver::RX_BUFFERS..BASE + Driver::TX_BUFFERS).step_by(4096);
    assert!(all.clone().skip(1).all(|page| marked.contains(&page)), "{marked:x?}");
}

/// The transceiver and the NVM are busy until they answer, and what they have answered is shown on another card.
#[test]
fn accesses_to_the_transceiver_and_the_nvm_end_before_it_moves() {
    let (mut driver, map, lan) = opened();
    driver.reach.bench.hold(spec::MDIC);
    driver.put(spec::MDIC, 2 << 26 | 1 << 21 | 2 << 16).expect("works");
    assert_eq!(driver.reach.hold(), Err("Access".to_owned()));
    driver.reach.bench.release();
    driver.put(spec::EERD, 2 << 2 | 1).expect("works");
    driver.reach.hold().expect("both have ended");
    let (hardware, bench) = i82574_card(&lan);
    let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &map));
    assert_eq!(driver.get(spec::MDIC).map(|value| value & 0xf000_ffff), Ok(1 << 28 | 0x0141));
    assert_eq!(driver.get(spec::EERD).map(|value| value >> 16), Ok(0x0100));
    assert_eq!((driver.phy(1), driver.nvm(0)), (Ok(0x796d), Ok(0x5452)), "the new card's");
    without_fault(&driver);
}

/// Registers of what outlives a guest are not written.
#[test]
fn what_no_guest_may_write_is_not_written() {
    let (mut driver, _map, _lan) = opened();
    let before = driver.reach.bench.touches().writes;
    // The flash, the pins of the NVM, writing it, the second rings, wake-up, management.
    for register in [0x1c, 0x10, 0x102c, 0x2900, 0x2918, 0x3900, 0x3918, 0x5800, 0x5808, 0x5820, 0xe8] {
        driver.put(register, 0x5a5a_5a5a).expect("dropped");
    }
    assert_eq!(driver.reach.bench.touches().writes, before, "the hardware hears of none");
    // BARs of flash, ports and MSI-X reach nothing.
    driver.reach.write(RegisterAddress::Bar(1, 0), 4, 1).expect("denied");
    assert_eq!(driver.reach.faults("unknown-register"), 1);
}

/// Tables, counters, rings and masks go with a guest; the card is reset by its registers also where the bus has reset it.
#[test]
fn the_next_guest_finds_nothing_of_the_last() {
    let (mut driver, map, mut lan) = opened();
    driver.put(spec::MTA + 8, 0x55).expect("works");
    driver.put(spec::RAL0 + 8, 0x1234_5678).expect("works");
    for n in 0..3 {
        both_ways(&mut driver, &mut lan, n);
    }
    let watched = &mut driver.reach;
    watched.bench.can_reset(true);
    let resets = watched.bench.with(|card| card.counts().resets);
    watched.force();
    let mut quiescent = watched.front.take().expect("held");
    quiescent.reset();
    quiescent.with(|monitor, _| monitor.dismiss());
    quiescent.with(|monitor, proof| monitor.admit(proof)).expect("it can be used");
    quiescent.with(|monitor, _| monitor.grow_memory(map.clone())).expect("room");
    watched.front.hold(quiescent).expect("away");
    watched.resume();
    assert!(watched.bench.touches().resets > 0 && watched.bench.with(|card| card.counts().resets) > resets);
    for register in [spec::MTA + 8, spec::RAL0 + 8, spec::GPRC, spec::GPTC, spec::IMS, spec::IAM, spec::RCTL]
    {
        assert_eq!(driver.get(register), Ok(0), "{register:#x}");
    }
    for low in [spec::TDBAL, spec::RDBAL] {
        for at in [0, 4, 8, 0x10, 0x18] {
            assert_eq!(driver.get(low + at), Ok(0), "{low:#x} + {at:#x}");
        }
    }
    driver.open(OWN).expect("opens");
    let sent = frame(OTHER, OWN, &[5; 100]);
    driver.xmit(&sent, Sending::default()).expect("room");
    assert_eq!(lan.neighbour.take(), Some(sent));
    without_fault(&driver);
}
