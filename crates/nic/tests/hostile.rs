//! Guests and saved states that mean harm: nothing panics, nothing goes on for ever, no byte outside the guest's memory is touched.

use std::sync::Arc;

use ioplane_device::{Access, Device, DeviceError, Quiescent, RegisterAddress, SavedState};
use ioplane_memory::{GuestMap, GuestView};
use ioplane_network::{Mac, Port};
use ioplane_nic::ne2000::{Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options, spec as rtl};
use ioplane_nic::{ne2000, rtl8139};
use ioplane_pci::Function;
use ioplane_testkit::nic::{Cp, Cut, Lan, LanPeer, Reach, Unhosted, frame};
use proptest::prelude::*;

const OWN: Mac = [2, 0, 0, 0, 0, 1];
const OTHER: Mac = [2, 0, 0, 0, 0, 2];
const BASE: u64 = 0x10_0000;
const MEMORY: u64 = 0x20_0000;

fn rtl8139() -> (Unhosted<Rtl8139>, LanPeer, Arc<GuestMap>, Arc<Port>) {
    let memory = Arc::new(GuestMap::anonymous(MEMORY).expect("memory"));
    let Lan { port, neighbour } = Lan::new(OWN, OTHER);
    let options = Rtl8139Options { name: "nic".into(), mac: OWN };
    let card = Rtl8139::new(options, memory.clone(), port.clone()).expect("a NIC");
    (Unhosted::new(card), neighbour, memory, port)
}

fn ne2000() -> (Unhosted<Ne2000>, LanPeer) {
    let Lan { port, neighbour } = Lan::new(OWN, OTHER);
    (
        Unhosted::new(Ne2000::new(Ne2000Options { name: "nic".into(), mac: OWN }, port).expect("a NIC")),
        neighbour,
    )
}

fn some_frame(len: usize) -> Vec<u8> {
    frame(OWN, OTHER, &vec![0x5a; len])
}

/// What a guest, its neighbour and its host do.
#[derive(Debug, Clone)]
enum Act {
    Write { bar: u8, offset: u64, bytes: Vec<u8> },
    Read { bar: u8, offset: u64, len: usize },
    Configure { offset: u64, bytes: Vec<u8> },
    Store { at: u64, bytes: Vec<u8> },
    Send { len: usize },
    Attend,
    Unmask,
}

fn act(
    offsets: impl Strategy<Value = u64> + Clone + 'static,
    bars: std::ops::Range<u8>,
) -> impl Strategy<Value = Act> {
    let bytes = || {
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..9),
            // Whole flags are likelier to mean something.
            prop::sample::select(vec![0x0c, 0x10, 0x40, 0x80, 0xff, 0x22, 0x26, 0x0a, 0x12, 0x03, 0x0f])
                .prop_map(|byte| vec![byte]),
            any::<u32>().prop_map(|word| (word & 0x000f_ff00).to_le_bytes().to_vec()),
        ]
    };
    prop_oneof![
        10 => (bars.clone(), offsets.clone(), bytes()).prop_map(|(bar, offset, bytes)| Act::Write { bar, offset, bytes }),
        4 => (bars, offsets, 0usize..9).prop_map(|(bar, offset, len)| Act::Read { bar, offset, len }),
        1 => (0u64..260, bytes()).prop_map(|(offset, bytes)| Act::Configure { offset, bytes }),
        3 => (0u64..0x2000, prop::collection::vec(any::<u8>(), 1..32)).prop_map(|(at, bytes)| Act::Store { at, bytes }),
        2 => (0usize..1500).prop_map(|len| Act::Send { len }),
        2 => Just(Act::Attend),
        1 => Just(Act::Unmask),
    ]
}

fn play<F: Function>(card: &mut Unhosted<F>, lan: &mut LanPeer, memory: Option<&GuestView>, acts: &[Act]) {
    for act in acts {
        match act {
            Act::Write { bar, offset, bytes } => {
                card.access(RegisterAddress::Bar(*bar, *offset), Access::Write(bytes))
            }
            Act::Read { bar, offset, len } => {
                card.access(RegisterAddress::Bar(*bar, *offset), Access::Read(&mut vec![0; *len]))
            }
            Act::Configure { offset, bytes } => {
                card.access(RegisterAddress::Config(*offset), Access::Write(bytes))
            }
            Act::Store { at, bytes } => {
                let stored = memory.map(|memory| memory.write(*at, bytes));
                assert!(stored.is_none_or(|stored| stored.is_ok()));
                Ok(())
            }
            Act::Send { len } => {
                lan.send(&some_frame(*len));
                Ok(())
            }
            Act::Attend => {
                card.attend();
                Ok(())
            }
            Act::Unmask => {
                card.unmask();
                Ok(())
            }
        }
        .expect("answered");
        while lan.take().is_some() {}
    }
}

/// A state loads into a fresh instance and comes out the same.
fn again<F: Function>(card: F, fresh: F) -> Result<(), TestCaseError> {
    let state = Quiescent::new(card).save().expect("saved");
    let mut other = Quiescent::new(fresh);
    let loaded = other.with(|card, proof| card.load(proof, &state));
    prop_assert!(loaded.is_ok(), "a saved state is refused: {:?}", loaded);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_access_to_an_rtl8139(
        acts in prop::collection::vec(act(prop_oneof![8 => 0u64..0x104, 1 => any::<u64>(), 1 => 0xff0u64..0x1010], 0..3), 1..300),
        opened: bool,
    ) {
        let (card, mut lan, memory, port) = rtl8139();
        let view = GuestView::new(memory.clone());
        let mut driver = Cp::new(card, view.clone(), BASE);
        if opened {
            driver.open(OWN).expect("it opens");
        } else {
            driver.reach.enable(true).expect("written");
        }
        play(&mut driver.reach, &mut lan, Some(&view), &acts);
        let fresh = Rtl8139::new(Rtl8139Options { name: "other".into(), mac: OWN }, memory, port).expect("a NIC");
        again(driver.reach.function, fresh)?;
    }

    #[test]
    fn any_access_to_an_ne2000(
        acts in prop::collection::vec(act(prop_oneof![8 => 0u64..0x24, 1 => any::<u64>()], 0..2), 1..400),
    ) {
        let (mut card, mut lan) = ne2000();
        play(&mut card, &mut lan, None, &acts);
        again(card.function, ne2000().0.function)?;
    }

    #[test]
    fn any_descriptors(
        words in prop::collection::vec((any::<u32>(), any::<u32>(), any::<u64>(), any::<bool>()), 128),
        frames in prop::collection::vec(0usize..1500, 0..20),
    ) {
        let (card, mut lan, memory, _) = rtl8139();
        let view = GuestView::new(memory);
        let mut driver = Cp::new(card, view.clone(), BASE);
        driver.open(OWN).expect("it opens");
        for (index, (opts1, opts2, address, inside)) in words.iter().enumerate() {
            let address = if *inside { address % MEMORY } else { *address };
            let at = BASE + 16 * index as u64;
            let bytes = [&opts1.to_le_bytes()[..], &opts2.to_le_bytes(), &address.to_le_bytes()].concat();
            view.write(at, &bytes).expect("memory");
        }
        for len in frames {
            driver.kick().expect("written");
            lan.send(&some_frame(len));
            driver.reach.attend();
            while lan.take().is_some() {}
        }
    }

    #[test]
    fn any_state(flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4), small: bool) {
        let state = if small {
            let (card, _lan, ..) = rtl8139();
            Quiescent::new(card.function).save().expect("saved")
        } else {
            Quiescent::new(ne2000().0.function).save().expect("saved")
        };
        let mut bad = state;
        for (index, with) in flips {
            let at = index.index(bad.body.len());
            bad.body[at] ^= with;
        }
        let load = |card: &mut dyn FnMut(&SavedState) -> bool| card(&bad);
        if small {
            let (card, mut lan, ..) = rtl8139();
            let mut quiescent = Quiescent::new(card.function);
            if load(&mut |state| quiescent.with(|card, proof| card.load(proof, state)).is_ok()) {
                poke(quiescent.into_device(), &mut lan, rtl::TPPOLL, 0xc1);
            }
        } else {
            let (card, mut lan) = ne2000();
            let mut quiescent = Quiescent::new(card.function);
            if load(&mut |state| quiescent.with(|card, proof| card.load(proof, state)).is_ok()) {
                poke(quiescent.into_device(), &mut lan, ne2000::spec::CR, 0x0e);
            }
        }
    }
}

/// Uses a card whose state was accepted.
fn poke<F: Function>(card: F, lan: &mut LanPeer, register: u64, value: u8) {
    let mut card = Unhosted::new(card);
    lan.send(&some_frame(100));
    card.attend();
    card.enable(true).expect("written");
    for offset in (0..0x100).step_by(4) {
        card.read(RegisterAddress::Bar(0, offset), 4).expect("read");
    }
    card.write(RegisterAddress::Bar(0, register), 1, value.into()).expect("written");
    lan.send(&some_frame(100));
    card.attend();
}

#[test]
fn a_ring_without_an_end_ends() {
    let (card, mut lan, memory, _) = rtl8139();
    let view = GuestView::new(memory);
    let mut driver = Cp::new(card, view.clone(), BASE);
    driver.open(OWN).expect("it opens");
    // No descriptor ends the ring, none ends a frame, all are the card's.
    let fill = |from: u64, opts1: u32| {
        for index in 0..64 {
            view.write(from + 16 * index, &opts1.to_le_bytes()).expect("memory");
        }
    };
    fill(BASE + 1024, rtl::DESC_OWN | rtl::DESC_FS | 60);
    driver.kick().expect("written");
    assert_eq!(lan.take(), None);
    assert!(driver.reach.function.counts().drops.malformed > 0);
    assert_ne!(driver.get(rtl::ISR, 2).expect("read") & u32::from(rtl::INT_TER), 0);
    fill(BASE + 1024, rtl::DESC_OWN | 60);
    driver.kick().expect("written");
    // One frame of all 64, each of 64 KiB.
    fill(BASE + 1024, rtl::DESC_OWN | 0xffff);
    view.write(BASE + 1024, &(rtl::DESC_OWN | rtl::DESC_FS | 0xffff).to_le_bytes()).expect("memory");
    view.write(BASE + 1024 + 63 * 16, &(rtl::DESC_OWN | rtl::DESC_LS | rtl::DESC_EOR | 0xffff).to_le_bytes())
        .expect("memory");
    driver.put(rtl::CR, 1, (rtl::CR_RE | rtl::CR_TE).into()).expect("written");
    driver.kick().expect("written");
    assert_eq!(lan.take(), None);
    // Buffers of no bytes, a ring of one descriptor without bytes.
    for opts1 in [rtl::DESC_OWN, rtl::DESC_OWN | rtl::DESC_EOR, rtl::DESC_OWN | 1] {
        fill(BASE, opts1);
        lan.send(&some_frame(1000));
        driver.reach.attend();
    }
    assert_eq!(driver.reach.function.counts().drops.no_room, 3);
    assert_eq!(driver.get(rtl::MPC, 4), Ok(3));
}

#[test]
fn dma_outside_memory_is_told_and_counted() {
    let (card, mut lan, memory, _) = rtl8139();
    let view = GuestView::new(memory);
    let mut driver = Cp::new(card, view.clone(), BASE);
    driver.open(OWN).expect("it opens");
    // Buffers to send, to receive.
    driver.queue(&some_frame(100), Cut::default()).expect("room");
    view.write(BASE + 1024 + 8, &(MEMORY - 10).to_le_bytes()).expect("memory");
    driver.kick().expect("written");
    let done = driver.reclaim().expect("sound");
    assert_eq!(done[0] & (rtl::TX_TES | rtl::TX_UNF), rtl::TX_TES | rtl::TX_UNF);
    let serr = u32::from(rtl::INT_SERR);
    assert_eq!(driver.get(rtl::ISR, 2).expect("read") & serr, serr);
    driver.put(rtl::ISR, 2, 0xffff).expect("written");
    view.write(BASE + 8, &u64::MAX.to_le_bytes()).expect("memory");
    lan.send(&some_frame(100));
    driver.reach.attend();
    assert_eq!(driver.get(rtl::ISR, 2).expect("read") & serr, serr);
    // Rings, statistics.
    for ring in [rtl::TNPDS, rtl::RDSAR] {
        for (offset, word) in [(0, 0xffff_ff00), (4, 0xffff_ffff)] {
            driver.put(ring + offset, 4, word).expect("written");
        }
    }
    driver.put(rtl::ISR, 2, 0xffff).expect("written");
    driver.kick().expect("written");
    lan.send(&some_frame(100));
    driver.reach.attend();
    driver.put(rtl::DTCCR + 4, 4, 0xffff_ffff).expect("written");
    driver.put(rtl::DTCCR, 4, 0xffff_ffc8).expect("written");
    assert_eq!(driver.get(rtl::DTCCR, 4), Ok(0xffff_ffc0), "it ends");
    let counts = driver.reach.function.counts();
    assert_eq!((counts.faults, counts.drops.fault), (5, 3));
    assert_eq!(lan.take(), None);
}

fn spoilt<T: serde::de::DeserializeOwned + serde::Serialize>(
    good: &SavedState,
    spoil: impl Fn(&mut T),
) -> SavedState {
    let mut body = postcard::from_bytes(&good.body).expect("a good state");
    spoil(&mut body);
    SavedState { body: postcard::to_stdvec(&body).expect("encoded"), ..good.clone() }
}

#[test]
fn impossible_states_are_refused_and_change_nothing() {
    let (mut card, ..) = rtl8139();
    card.enable(true).expect("written");
    card.write(RegisterAddress::Bar(0, rtl::MAR0), 4, 0x1234_5678).expect("written");
    let mut quiescent = Quiescent::new(card.function);
    let good = quiescent.save().expect("saved");
    type Spoil = fn(&mut rtl8139::StateV1);
    let spoils: &[(&str, Spoil)] = &[
        ("a descriptor beyond the ring", |state| state.receive = 64),
        ("another", |state| state.transmit[1] = u32::MAX),
        ("a fifth descriptor", |state| state.current = 4),
        ("half a configuration space", |state| state.config.truncate(128)),
        ("too many registers", |state| state.registers.push(0)),
        ("another chip", |state| state.registers[rtl::TCR as usize + 3] = 0x60),
        ("a reset that does not end", |state| state.registers[rtl::CR as usize] |= rtl::CR_RST),
        ("a write pointer beyond the buffer", |state| state.registers[rtl::CBR as usize + 1] = 0x20),
        ("a write pointer between words", |state| state.registers[rtl::CBR as usize] = 2),
        ("an interrupt that there is not", |state| state.registers[rtl::ISR as usize + 1] = 0x10),
        ("data out without a chip", |state| state.eeprom.out = true),
        ("an EEPROM of 128 words", |state| {
            state.eeprom.phase = rtl8139::PhaseV1::Read { address: 64, bits: 0 };
        }),
        ("too many bits of a command", |state| {
            state.eeprom.phase = rtl8139::PhaseV1::Command { bits: 8, word: 0 };
        }),
    ];
    for (what, spoil) in spoils {
        let bad = spoilt(&good, spoil);
        let refused = quiescent.with(|card, proof| card.load(proof, &bad));
        assert!(matches!(refused, Err(DeviceError::State(_))), "{what}");
    }
    let mut long = good.clone();
    long.body.push(0);
    assert!(quiescent.with(|card, proof| card.load(proof, &long)).is_err());
    let after: rtl8139::StateV1 =
        postcard::from_bytes(&quiescent.save().expect("saved").body).expect("decodes");
    let before: rtl8139::StateV1 = postcard::from_bytes(&good.body).expect("decodes");
    assert_eq!(rtl8139::StateV1 { ticks: before.ticks, ..after }, before);

    let mut quiescent = Quiescent::new(ne2000().0.function);
    let good = quiescent.save().expect("saved");
    type Spoil2 = fn(&mut ne2000::StateV1);
    let spoils: &[(&str, Spoil2)] = &[
        ("more memory", |state| state.memory.push(0)),
        ("no configuration space", |state| state.config.clear()),
        ("a transmission under way", |state| state.registers.cr |= ne2000::spec::CR_TXP),
        ("stopped and not reset", |state| state.registers.isr = 0),
        ("an interrupt mask of eight bits", |state| state.registers.imr = 0x80),
        ("a counter beyond its end", |state| state.registers.cntr[2] = 193),
        ("alignment errors", |state| state.registers.cntr[0] = 1),
        ("a carrier lost", |state| state.registers.tsr = ne2000::spec::TSR_CRS),
    ];
    for (what, spoil) in spoils {
        let bad = spoilt(&good, spoil);
        let refused = quiescent.with(|card, proof| card.load(proof, &bad));
        assert!(matches!(refused, Err(DeviceError::State(_))), "{what}");
    }
    assert_eq!(quiescent.save().expect("saved"), good);
}
