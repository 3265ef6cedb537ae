//! 8139cp on a watched RTL8139C+.

use std::sync::Arc;

use ioplane_device::{Change, RegisterAddress};
use ioplane_memory::DirtyLog;
use ioplane_model::Writes;
use ioplane_nic::rtl8139::spec;
use ioplane_passthrough::monitor::Policies;
use ioplane_testkit::nic::{Cp, Cut, Reach, frame};

use crate::rig::*;

const BASE: u64 = 0x1_0000;

#[test]
fn frames_go_both_ways_and_statuses_come_back() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    for n in 0..200u32 {
        let sent = frame(OTHER, OWN, &n.to_le_bytes().repeat(100));
        driver.xmit(&sent, Cut::default()).expect("room");
        assert_eq!(lan.neighbour.take().as_deref(), Some(&sent[..]), "frame {n}");
        assert!(driver.reach.interrupts() > 0, "the guest is told");
        assert_eq!(driver.interrupt().expect("works"), Some(4), "TOK only");
        assert_eq!(driver.reclaim().expect("works").len(), 1);

        let came = frame(OWN, OTHER, &n.to_be_bytes().repeat(150));
        lan.neighbour.send(&came);
        assert!(driver.reach.interrupts() > 0, "frame {n} is announced");
        assert_eq!(driver.interrupt().expect("works"), Some(1), "ROK only");
        let received = driver.poll().expect("works");
        assert_eq!(received.len(), 1);
        assert_eq!(received[0].bytes, came);
        assert_eq!(driver.reach.interrupts(), 0, "acknowledged");
    }
    let reading = driver.reach.reading();
    assert!(reading.faults.is_empty(), "{:?}", reading.faults);
    assert_eq!(reading.totals.denied, 0);
    assert!(reading.reusable, "{:?}", reading.states);
    assert!(reading.totals.descriptors >= 400, "{:?}", reading.totals);
    assert_eq!(driver.reach.bench.with(|card| card.counts().faults), 0);
    driver.close().expect("closes");
}

#[test]
fn a_burst_fills_the_ring_and_nothing_is_lost() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    // More than the ring has, so that the driver gives buffers back meanwhile.
    let mut expected = Vec::new();
    let mut got = Vec::new();
    for round in 0..20u32 {
        let frames: Vec<_> =
            (0..40u32).map(|n| frame(OWN, OTHER, &(round * 100 + n).to_le_bytes().repeat(64))).collect();
        assert_eq!(lan.neighbour.send_all(&frames), 40);
        expected.extend(frames);
        while driver.reach.interrupts() > 0 {
            driver.interrupt().expect("works");
            got.extend(driver.poll().expect("works").into_iter().map(|received| received.bytes));
        }
    }
    assert_eq!(got, expected);
    // As many to send as the ring takes, in pieces.
    for n in 0..31u8 {
        driver.queue(&frame(OTHER, OWN, &[n; 400]), Cut { at: &[100], ..Cut::default() }).expect("room");
    }
    driver.kick().expect("works");
    for n in 0..31u8 {
        assert_eq!(lan.neighbour.take(), Some(frame(OTHER, OWN, &[n; 400])));
    }
    driver.reach.turn();
    driver.interrupt().expect("works");
    assert_eq!(driver.reclaim().expect("works").len(), 31);
    assert!(driver.reach.reading().faults.is_empty());
}

#[test]
fn statistics_eeprom_and_ports_work() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE).by_ports();
    driver.open(OWN).expect("opens");
    assert_eq!(driver.eeprom(7, 6).expect("works"), u16::from_le_bytes([OWN[0], OWN[1]]));
    driver.xmit(&frame(OTHER, OWN, &[1; 100]), Cut::default()).expect("room");
    assert!(lan.neighbour.take().is_some());
    let stats = driver.stats().expect("works");
    assert_eq!(stats[..8], 1u64.to_le_bytes());
    let reading = driver.reach.reading();
    assert!(reading.faults.is_empty(), "{:?}", reading.faults);
    assert!(reading.reusable, "{:?}", reading.states);
}

#[test]
fn the_guest_sees_its_own_addresses_and_never_ours() {
    let (watched, map, _lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    for (register, value) in [(0xe4, BASE as u32), (0xe8, 0), (0x20, BASE as u32 + 0x400), (0x24, 0)] {
        assert_eq!(driver.get(register, 4).expect("works"), value);
    }
    let hardware = driver.reach.bench.mapped();
    assert_eq!(hardware, [(60 << 30, 0x5000), (64 << 30, MEMORY)], "nothing else is reachable");
}

#[test]
fn a_reset_in_the_middle_of_sending_is_a_fresh_start() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    for round in 0..10u8 {
        driver.open(OWN).expect("opens");
        driver.reach.turn();
        let sent = frame(OTHER, OWN, &[round; 100]);
        driver.xmit(&sent, Cut::default()).expect("room");
        assert_eq!(lan.neighbour.take(), Some(sent));
        lan.neighbour.send(&frame(OWN, OTHER, &[round; 100]));
        driver.reach.turn();
        assert_eq!(driver.poll().expect("works").len(), 1);
        // The card has not looked at these yet.
        driver.reach.bench.hold(0xd9);
        for _ in 0..5 {
            driver.xmit(&frame(OTHER, OWN, &[0xee; 100]), Cut::default()).expect("room");
        }
        driver.put(0x37, 1, 0x10).expect("resets");
        assert_eq!(driver.get(0x3c, 4), Ok(0), "mask and status too");
        driver.reach.bench.release();
        assert_eq!(lan.neighbour.take(), None, "they went with the reset");
        driver.reach.interrupts();
    }
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

#[test]
fn every_store_to_guest_memory_is_in_the_dirty_log() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    let log = Arc::new(DirtyLog::new(MEMORY).expect("memory"));
    assert!(driver.reach.front.change(&Change::Log(Some(log.clone())), soon()).expect("here"));
    assert_eq!(log.take(), [0u64; 0]);
    // Statuses of the ring that sends; the ring and the buffer that receive.
    driver.xmit(&frame(OTHER, OWN, &[1; 100]), Cut::default()).expect("room");
    driver.reach.turn();
    assert_eq!(log.take(), [BASE]);
    driver.interrupt().expect("works");
    lan.neighbour.send(&frame(OWN, OTHER, &[1; 100]));
    driver.reach.turn();
    let buffer = BASE + Cp::<Watched<ioplane_nic::rtl8139::Rtl8139>>::RX_BUFFERS.start;
    assert_eq!(log.take(), [BASE, buffer]);
    // The block of counters.
    driver.stats().expect("works");
    assert_eq!(log.take(), [BASE]);
    // Buffers that may have been written in part when the device is stopped.
    driver.reach.force();
    let marked = log.take();
    assert!((0..32).all(|page| marked.contains(&(buffer + page * 4096))), "{marked:x?}");
}

#[test]
fn what_the_card_may_have_written_is_marked_when_the_guest_begins_anew() {
    let (watched, map, _lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    let log = Arc::new(DirtyLog::new(MEMORY).expect("memory"));
    assert!(driver.reach.front.change(&Change::Log(Some(log.clone())), soon()).expect("here"));
    // A block of counters that another one follows before anybody has looked.
    let (first, second) = (0x3000u32, 0x5000u32);
    for at in [first, second] {
        driver.reach.write(RegisterAddress::Bar(1, spec::DTCCR), 4, at | 8).expect("allowed");
    }
    driver.reach.read(RegisterAddress::Bar(1, spec::DTCCR), 4).expect("there");
    assert_eq!(log.take(), [u64::from(first), u64::from(second)]);
    // The receiver off and on again, with all of its buffers given.
    driver.reach.write(RegisterAddress::Bar(1, spec::CR), 1, 0x04).expect("allowed");
    let marked = log.take();
    let buffer = BASE + Cp::<Watched<ioplane_nic::rtl8139::Rtl8139>>::RX_BUFFERS.start;
    assert!((0..32).all(|page| marked.contains(&(buffer + page * 4096))), "{marked:x?}");
}

/// What outlives a reset and a guest: boot ROM, tests of the transceiver.
#[test]
fn registers_that_no_guest_may_write_are_not_written() {
    let (watched, map, _lan) = rtl8139(Policies::default());
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.turn();
    let model = &ioplane_passthrough::rtl8139::MODEL;
    let silent: Vec<_> = model.registers.iter().filter(|r| r.writes == Writes::Never).collect();
    assert!(silent.iter().any(|register| register.name.starts_with("FLASH")), "{silent:?}");
    let before = driver.reach.bench.touches().writes;
    for register in silent {
        // Byte by byte through the ports, at once through memory.
        let (first, width) = (u64::from(register.offset), u64::from(register.width));
        for at in first..first + width {
            driver.reach.write(RegisterAddress::Bar(0, at), 1, 0x5a).expect("dropped");
        }
        driver
            .reach
            .write(RegisterAddress::Bar(1, first), width.min(4) as usize, 0x5a5a_5a5a)
            .expect("dropped");
    }
    assert_eq!(driver.reach.bench.touches().writes, before, "the hardware hears of none");
}
