//! Saved NICs as bytes: what is stored today is what is written tomorrow, and is loaded tomorrow.

use std::sync::Arc;

use ioplane_device::{Device, Quiescent, RegisterAddress, SavedState};
use ioplane_memory::{GuestMap, GuestView};
use ioplane_network::{Mac, Port};
use ioplane_nic::ne2000::{self, Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{self, Rtl8139, Rtl8139Options};
use ioplane_testkit::golden;
use ioplane_testkit::nic::{Cp, Cut, Lan, Ne2k, Reach, Unhosted, frame};

const OWN: Mac = [2, 0, 0, 0, 0, 1];
const OTHER: Mac = [2, 0, 0, 0, 0, 2];
const BASE: u64 = 0x10_0000;
const MEMORY: u64 = 0x20_0000;

fn numbered(to: Mac, from: Mac, number: u8) -> Vec<u8> {
    frame(to, from, &(0..100).map(|at| at ^ number).collect::<Vec<u8>>())
}

fn saved<F: Device>(card: F) -> SavedState {
    Quiescent::new(card).save().expect("saved")
}

/// A card like it, in its place, that has loaded `state`.
fn loaded<F: ioplane_pci::Function>(fresh: F, state: &SavedState) -> Unhosted<F> {
    let Unhosted { function, line } = Unhosted::new(fresh);
    let function =
        Quiescent::new(function).load(state).expect("a stored state").into_quiescent().into_device();
    Unhosted { function, line }
}

fn rtl8139(memory: &Arc<GuestMap>, port: &Arc<Port>) -> Rtl8139 {
    let options = Rtl8139Options { name: "nic".into(), mac: OWN };
    Rtl8139::new(options, memory.clone(), port.clone()).expect("a NIC")
}

/// Its timer counts 33 million times a second: how far it came is the only thing that differs between two runs.
fn at_rest(state: SavedState) -> SavedState {
    let mut saved: rtl8139::StateV1 = postcard::from_bytes(&state.body).expect("a state of its own");
    assert!(saved.ticks > 0, "it runs");
    saved.ticks = 0x0123_4567;
    SavedState { body: postcard::to_stdvec(&saved).expect("it fits"), ..state }
}

#[test]
fn an_rtl8139() {
    let memory = Arc::new(GuestMap::anonymous(MEMORY).expect("memory"));
    let Lan { port, neighbour: mut lan } = Lan::new(OWN, OTHER);
    let card = Unhosted::new(rtl8139(&memory, &port));
    let mut driver = Cp::new(card, GuestView::new(memory.clone()), BASE);
    driver.open(OWN).expect("a card that opens");
    for number in 0..5 {
        driver.xmit(&numbered(OTHER, OWN, number), Cut::default()).expect("room");
        lan.take().expect("sent");
        lan.send(&numbered(OWN, OTHER, number));
        driver.reach.attend();
        driver.interrupt().expect("sound");
        assert_eq!((driver.poll().expect("sound").len(), driver.reclaim().expect("sound").len()), (1, 1));
        driver.reach.unmask();
    }
    // In the middle of reading the EEPROM, with an interrupt pending and a frame waiting.
    for bits in [0x80, 0x88, 0x8a, 0x8e, 0x8a, 0x8e] {
        driver.put(rtl8139::spec::CR9346, 1, bits).expect("written");
    }
    lan.send(&numbered(OWN, OTHER, 8));
    driver.reach.attend();
    lan.send(&numbered(OWN, OTHER, 9));

    let golden = golden!("rtl8139.state");
    let mut driver = driver.map(|card| {
        golden.check_state(&at_rest(saved(card.function)));
        loaded(rtl8139(&memory, &port), &golden.state())
    });
    driver.reach.attend();
    assert_eq!(driver.interrupt(), Ok(Some(rtl8139::spec::INT_ROK.into())), "signalled again");
    let received: Vec<_> = driver.poll().expect("sound").into_iter().map(|received| received.bytes).collect();
    assert_eq!(received, [8, 9].map(|number| numbered(OWN, OTHER, number)), "the one that waited, too");
    driver.xmit(&numbered(OTHER, OWN, 7), Cut::default()).expect("room");
    assert_eq!(lan.take(), Some(numbered(OTHER, OWN, 7)));
}

fn ne2000(port: &Arc<Port>) -> Ne2000 {
    Ne2000::new(Ne2000Options { name: "nic".into(), mac: OWN }, port.clone()).expect("a NIC")
}

#[test]
fn an_ne2000() {
    let Lan { port, neighbour: mut lan } = Lan::new(OWN, OTHER);
    let mut driver = Ne2k::new(Unhosted::new(ne2000(&port)));
    driver.probe().expect("found");
    driver.open(OWN).expect("a card that opens");
    driver.reach.attend();
    driver.xmit(&numbered(OTHER, OWN, 1)).expect("sent");
    lan.take().expect("sent");
    driver.interrupt().expect("sound");
    driver.reach.unmask();
    for number in 2..5 {
        lan.send(&numbered(OWN, OTHER, number));
    }
    driver.reach.attend();
    // One that waits, and in the middle of a transfer.
    lan.send(&numbered(OWN, OTHER, 5));
    for (register, value) in [
        (ne2000::spec::RSAR0, 0),
        (ne2000::spec::RSAR1, 0),
        (ne2000::spec::RBCR0, 12),
        (ne2000::spec::RBCR1, 0),
        (ne2000::spec::CR, ne2000::spec::CR_STA | ne2000::spec::CR_RD_READ),
    ] {
        driver.put(register, value).expect("written");
    }
    assert_eq!(driver.reach.read(RegisterAddress::Bar(0, ne2000::spec::DATA), 4), Ok(0x0000_0202));

    let golden = golden!("ne2000.state");
    let mut driver = driver.map(|card| {
        golden.check_state(&saved(card.function));
        loaded(ne2000(&port), &golden.state())
    });
    assert_eq!(driver.reach.read(RegisterAddress::Bar(0, ne2000::spec::DATA), 4), Ok(0));
    assert_eq!(driver.reach.read(RegisterAddress::Bar(0, ne2000::spec::DATA), 4), Ok(0x0101_0000));
    driver.reach.attend();
    let (frames, _) = driver.interrupt().expect("sound");
    assert_eq!(frames, [2, 3, 4, 5].map(|number| numbered(OWN, OTHER, number)), "the one that waited, too");
    driver.reach.unmask();
    driver.xmit(&numbered(OTHER, OWN, 6)).expect("sent");
    assert_eq!(lan.take(), Some(numbered(OTHER, OWN, 6)));
}
