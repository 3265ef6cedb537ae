//! Stillness: recognised, forced, saved, loaded, resumed; a stock driver notices nothing.

use std::sync::Arc;

use ioplane_device::{Quiescent, SavedState};
use ioplane_memory::GuestMap;
use ioplane_nic::ne2000::Ne2000;
use ioplane_nic::rtl8139::Rtl8139;
use ioplane_passthrough::monitor::{Monitor, MonitorOptions, Policies};
use ioplane_testkit::nic::{Cp, Cut, Lan, Ne2k, Reach, frame};

use crate::rig::*;

const BASE: u64 = 0x1_0000;

/// Both ways, `n` tells the frames apart.
fn traffic(driver: &mut Cp<Watched<Rtl8139>>, lan: &mut Lan, n: u8) {
    let sent = frame(OTHER, OWN, &[n; 300]);
    driver.xmit(&sent, Cut::default()).expect("room");
    driver.reach.interrupts();
    driver.interrupt().expect("works");
    assert_eq!(lan.neighbour.take(), Some(sent), "frame {n} out");
    assert_eq!(driver.reclaim().expect("works").len(), 1, "frame {n} done");
    let came = frame(OWN, OTHER, &[n; 500]);
    lan.neighbour.send(&came);
    assert!(driver.reach.interrupts() > 0, "frame {n} is announced");
    driver.interrupt().expect("works");
    let got: Vec<_> = driver.poll().expect("works").into_iter().map(|received| received.bytes).collect();
    assert_eq!(got, [came], "frame {n} in");
    driver.reach.interrupts();
}

fn open(policies: Policies) -> (Cp<Watched<Rtl8139>>, Arc<GuestMap>, Lan) {
    let (watched, map, lan) = rtl8139(policies);
    let mut driver = Cp::new(watched, view(&map), BASE);
    driver.open(OWN).expect("opens");
    driver.reach.interrupts();
    (driver, map, lan)
}

fn moved(driver: Cp<Watched<Rtl8139>>, map: &Arc<GuestMap>, lan: &Lan) -> Cp<Watched<Rtl8139>> {
    let (hardware, bench) = rtl8139_card(lan);
    driver.map(|watched| watched.moves_to(hardware, bench, map))
}

#[test]
fn a_pause_is_not_noticed() {
    let (mut driver, _map, mut lan) = open(Policies::default());
    for n in 0..100 {
        traffic(&mut driver, &mut lan, n);
        driver.reach.hold().expect("reusable between frames");
        // What comes while it stands still waits on the wire, and guest memory is left alone.
        let came = frame(OWN, OTHER, &[n ^ 0xff; 200]);
        lan.neighbour.send(&came);
        let before = driver.reach.bench.with(|card| card.counts().received);
        driver.reach.resume();
        assert_eq!(
            driver.reach.bench.with(|card| card.counts().received),
            before,
            "nothing while it stood still"
        );
        if driver.reach.interrupts() > 0 {
            driver.interrupt().expect("works");
            assert_eq!(driver.poll().expect("works").len(), 1);
            driver.reach.interrupts();
        }
    }
    assert!(driver.reach.reading().faults.is_empty());
}

#[test]
fn another_card_goes_on_where_the_guest_is() {
    let (mut driver, map, mut lan) = open(Policies::default());
    for n in 0..150 {
        traffic(&mut driver, &mut lan, n);
        if n % 10 == 3 {
            driver.reach.hold().expect("reusable between frames");
            driver = moved(driver, &map, &lan);
            assert_eq!(driver.get(0x3c, 2), Ok(0x80ff), "the mask is kept");
        }
    }
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

#[test]
fn an_interrupt_that_was_not_taken_is_given_again() {
    let (mut driver, map, mut lan) = open(Policies::default());
    let came = frame(OWN, OTHER, &[1; 100]);
    lan.neighbour.send(&came);
    driver.reach.turn();
    driver.reach.hold().expect("reusable with frames unread: they are in the guest's memory");
    let mut driver = moved(driver, &map, &lan);
    assert!(driver.reach.interrupts() > 0);
    assert_eq!(driver.interrupt(), Ok(Some(1)));
    assert_eq!(driver.poll().expect("works")[0].bytes, came);
}

#[test]
fn frames_in_flight_are_sent_by_whoever_goes_on() {
    for elsewhere in [false, true] {
        let (mut driver, map, mut lan) = open(Policies::default());
        traffic(&mut driver, &mut lan, 1);
        // The card does not look at its doorbell any more.
        driver.reach.bench.hold(0xd9);
        let frames: Vec<_> = (0..20u8).map(|n| frame(OTHER, OWN, &[n; 200])).collect();
        for sent in &frames {
            driver.xmit(sent, Cut::default()).expect("room");
        }
        assert_eq!(driver.reach.hold(), Err("TxRun".to_owned()), "named");
        assert_eq!(lan.neighbour.take(), None);
        driver.reach.force();
        driver.reach.bench.forget();
        if elsewhere {
            driver = moved(driver, &map, &lan);
        } else {
            driver.reach.resume();
        }
        for sent in frames {
            assert_eq!(lan.neighbour.take(), Some(sent));
        }
        assert_eq!(lan.neighbour.take(), None, "each once");
        driver.reach.interrupts();
        driver.interrupt().expect("works");
        assert_eq!(driver.reclaim().expect("works").len(), 20);
        traffic(&mut driver, &mut lan, 2);
        driver.reach.hold().expect("reusable again");
    }
}

#[test]
fn a_driver_that_was_held_before_it_began_begins() {
    let (watched, map, mut lan) = rtl8139(Policies::default());
    watched.hold().expect("nothing has begun");
    let driver = Cp::new(watched, view(&map), BASE);
    let mut driver = moved(driver, &map, &lan);
    driver.open(OWN).expect("opens");
    traffic(&mut driver, &mut lan, 1);
}

#[test]
fn memory_may_be_exchanged_while_it_stands_still() {
    let (mut driver, map, mut lan) = open(Policies::default());
    traffic(&mut driver, &mut lan, 1);
    let swap = |driver: &Cp<Watched<Rtl8139>>, to: Arc<GuestMap>| {
        driver.reach.force();
        let mut quiescent = driver.reach.front.take().expect("held");
        use ioplane_pci::Function;
        quiescent.with(|monitor, proof| monitor.replace_memory(proof, to)).expect("an IOMMU with room");
        driver.reach.front.hold(quiescent).expect("away");
        driver.reach.resume();
    };
    swap(&driver, Arc::new(GuestMap::default()));
    assert_eq!(driver.reach.bench.mapped(), [(60 << 30, 0x5000)], "nothing of the guest is reachable");
    lan.neighbour.send(&frame(OWN, OTHER, &[9; 100]));
    driver.reach.turn();
    assert_eq!(driver.reach.bench.with(|card| card.counts().faults), 0, "nor tried");
    assert!(driver.reach.faults("ring-outside") > 0, "the guest's rings are where nothing is");
    swap(&driver, map.clone());
    // The frame that came meanwhile was for nobody.
    driver.reach.interrupts();
    driver.interrupt().expect("works");
    driver.poll().expect("works");
    driver.reach.interrupts();
    traffic(&mut driver, &mut lan, 2);
}

#[test]
fn a_state_from_a_stranger_is_taken_whole_or_not_at_all() {
    let (mut driver, map, mut lan) = open(Policies::default());
    traffic(&mut driver, &mut lan, 1);
    driver.reach.hold().expect("reusable");
    let good = driver.reach.save();
    let load = |state: &SavedState| {
        let other = Lan::new(OWN, OTHER);
        let (hardware, bench) = rtl8139_card(&other);
        let model = &ioplane_passthrough::rtl8139::MODEL;
        let monitor =
            Monitor::new(hardware, model, MonitorOptions::new("nic2")).expect("hardware that works");
        let writes = bench.touches().writes;
        let loaded = Quiescent::new(monitor).load(state);
        if loaded.is_err() {
            assert_eq!(bench.touches().writes, writes, "refused before anything is touched");
        }
        loaded.is_ok()
    };
    assert!(load(&good));
    for len in 0..good.body.len() {
        assert!(!load(&SavedState { body: good.body[..len].to_vec(), ..good.clone() }), "cut at {len}");
    }
    assert!(!load(&SavedState { kind: "ne2000".into(), ..good.clone() }));
    assert!(!load(&SavedState { version: 2, ..good.clone() }));
    // Whatever single byte is wrong: refused, or a state that a guest could have made, on which the device runs.
    for at in 0..good.body.len() {
        for flip in [0x01, 0xff] {
            let mut state = good.clone();
            state.body[at] ^= flip;
            let (hardware, bench) = rtl8139_card(&lan);
            let model = &ioplane_passthrough::rtl8139::MODEL;
            let mut monitor =
                Monitor::new(hardware, model, MonitorOptions::new("nic2")).expect("hardware that works");
            use ioplane_pci::Function;
            monitor.grow_memory(map.clone()).expect("an IOMMU with room");
            let Ok(loaded) = Quiescent::new(monitor).load(&state) else { continue };
            let placement = ioplane_testkit::hand::HandCore::default();
            let started = loaded.start(&placement);
            lan.neighbour.send(&frame(OWN, OTHER, &[1; 100]));
            bench.tick();
            drop(started);
            assert_eq!(
                bench.with(|card| card.counts().faults),
                0,
                "byte {at} xor {flip:#x}: the hardware strayed"
            );
        }
    }
    driver.reach.resume();
}

fn open_ne2000() -> (Ne2k<Watched<Ne2000>>, Lan) {
    let (watched, lan) = ne2000(Policies::default());
    let mut driver = Ne2k::new(watched);
    driver.probe().expect("finds it");
    driver.open(OWN).expect("opens");
    driver.reach.interrupts();
    (driver, lan)
}

fn traffic_ne2000(driver: &mut Ne2k<Watched<Ne2000>>, lan: &mut Lan, n: u8) {
    let sent = frame(OTHER, OWN, &[n; 300]);
    driver.xmit(&sent).expect("works");
    assert_eq!(lan.neighbour.take(), Some(sent), "frame {n} out");
    driver.reach.interrupts();
    driver.interrupt().expect("works");
    let came = frame(OWN, OTHER, &[n; 500]);
    lan.neighbour.send(&came);
    assert!(driver.reach.interrupts() > 0, "frame {n} is announced");
    assert_eq!(driver.interrupt().expect("works").0, [came], "frame {n} in");
    driver.reach.interrupts();
}

#[test]
fn another_ne2000_goes_on_where_the_guest_is() {
    let (mut driver, mut lan) = open_ne2000();
    for n in 0..60 {
        traffic_ne2000(&mut driver, &mut lan, n);
        if n % 10 == 3 {
            driver.reach.hold().expect("reusable between frames");
            let (hardware, bench) = ne2000_card(&lan);
            driver = driver.map(|watched| watched.moves_to(hardware, bench, &memory()));
        }
    }
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

/// What a driver reads after the interrupt that says that a frame was sent: the other card has sent none.
#[test]
fn how_a_frame_was_sent_is_known_on_the_other_card() {
    const TSR: u64 = 4;
    let (mut driver, mut lan) = open_ne2000();
    let sent = frame(OTHER, OWN, &[1; 300]);
    driver.xmit(&sent).expect("works");
    assert_eq!(lan.neighbour.take(), Some(sent));
    assert!(driver.reach.interrupts() > 0);
    for _ in 0..2 {
        driver.reach.hold().expect("reusable: the frame has been sent");
        let (hardware, bench) = ne2000_card(&lan);
        driver = driver.map(|watched| watched.moves_to(hardware, bench, &memory()));
        assert_eq!(driver.reach.bench.with(|card| card.counts().sent), 0, "it has sent nothing");
        // And once more where it is.
        driver.reach.hold().expect("reusable");
        driver.reach.resume();
        driver.put(0, 0x22).expect("works");
        assert_eq!(driver.get(TSR), Ok(0x01));
    }
    assert_eq!(driver.interrupt().expect("works").1, [0x01]);
    // From the next frame on the card's own is shown.
    traffic_ne2000(&mut driver, &mut lan, 2);
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

#[test]
fn a_forced_stop_takes_card_memory_and_a_transfer_along() {
    let (mut driver, mut lan) = open_ne2000();
    traffic_ne2000(&mut driver, &mut lan, 1);
    let frames: Vec<_> = (0..5u8).map(|n| frame(OWN, OTHER, &[n; 700])).collect();
    assert_eq!(lan.neighbour.send_all(&frames), 5);
    driver.reach.turn();
    assert_eq!(driver.reach.hold(), Err("RxPending".to_owned()), "frames unread on the card");
    // In the middle of writing a frame to the card.
    let frame_out = frame(OTHER, OWN, &[0x42; 98]);
    for (register, value) in [(0, 0x22), (10, frame_out.len() as u8), (11, 0), (8, 0), (9, 0x40), (0, 0x12)] {
        driver.put(register, value).expect("works");
    }
    let words: Vec<_> =
        frame_out.chunks(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
    let data = ioplane_device::RegisterAddress::Bar(0, 0x10);
    for word in &words[..10] {
        driver.reach.write(data, 4, *word).expect("works");
    }
    driver.reach.force();
    let (hardware, bench) = ne2000_card(&lan);
    let mut driver = driver.map(|watched| watched.moves_to(hardware, bench, &memory()));
    for word in &words[10..] {
        driver.reach.write(data, 4, *word).expect("works");
    }
    assert_eq!(driver.get(7).expect("works") & 0x40, 0x40, "the transfer is complete");
    for (register, value) in [(7, 0x40), (0, 0x22), (4, 0x40), (5, frame_out.len() as u8), (6, 0), (0, 0x26)]
    {
        driver.put(register, value).expect("works");
    }
    assert_eq!(lan.neighbour.take(), Some(frame_out));
    // The frames that were on the other card.
    assert!(driver.reach.interrupts() > 0);
    let mut got = Vec::new();
    loop {
        got.extend(driver.interrupt().expect("works").0);
        if driver.reach.interrupts() == 0 {
            break;
        }
    }
    assert_eq!(got, frames);
    traffic_ne2000(&mut driver, &mut lan, 2);
    assert!(driver.reach.reading().faults.is_empty(), "{:?}", driver.reach.reading().faults);
}

/// Linux leaves the base of the ring that it does not use at zero, where a PC has its interrupt vectors.
#[test]
fn a_ring_that_the_guest_never_rings_may_lie_over_anything() {
    let (mut driver, map, mut lan) = open(Policies::default());
    view(&map).write(0, &[0xff; 64]).expect("memory");
    for n in 0..3 {
        traffic(&mut driver, &mut lan, n);
        driver.reach.hold().expect("reusable");
        driver.reach.resume();
    }
    assert_eq!(driver.reach.reading().totals.denied, 0);
    driver.reach.hold().expect("reusable");
    let mut driver = moved(driver, &map, &lan);
    traffic(&mut driver, &mut lan, 4);
    assert_eq!(driver.reach.reading().totals.denied, 0);
}
