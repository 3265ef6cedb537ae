//! No driver gets out: whatever it writes anywhere, the hardware touches nothing but the guest's own memory.

use std::sync::Arc;

use ioplane_device::{Access, Device, RegisterAddress};
use ioplane_memory::{GuestMap, GuestView, Mapping, MemoryRegion, RegionSpec};
use ioplane_passthrough::monitor::{Policies, Policy};
use ioplane_pci::Function;
use ioplane_testkit::nic::{Cp, Cut, Lan, Ne2k, frame};
use proptest::prelude::*;

use crate::rig::*;

/// Guest memory with a hole in which a canary sits that is not the guest's: two regions of one file, and what is between them.
struct GuardedMemory {
    map: Arc<GuestMap>,
    canary: GuestView,
}

const LOW: u64 = 0x4_0000;
const CANARY: u64 = 0x1_0000;
const HIGH: u64 = 0x2_0000;

fn guarded_memory() -> GuardedMemory {
    let mapping = Mapping::anonymous("guest", LOW + CANARY + HIGH).expect("memory");
    let file = || mapping.file().try_clone_to_owned().expect("a descriptor");
    let region = |gpa, len| {
        MemoryRegion::map(RegionSpec { gpa, len, user: 0, offset: gpa, file: file() }).expect("maps")
    };
    let map = Arc::new(GuestMap::new(vec![region(0, LOW), region(LOW + CANARY, HIGH)]).expect("apart"));
    let canary = GuestView::new(Arc::new(GuestMap::new(vec![region(LOW, CANARY)]).expect("one")));
    canary.write(LOW, &[0xc5; CANARY as usize]).expect("memory");
    GuardedMemory { map, canary }
}

impl GuardedMemory {
    fn canary_lives(&self) -> bool {
        let mut bytes = vec![0; CANARY as usize];
        self.canary.read(LOW, &mut bytes).expect("memory");
        bytes.iter().all(|byte| *byte == 0xc5)
    }
}

#[derive(Debug, Clone)]
enum Move {
    Read {
        bar: u8,
        offset: u64,
        width: usize,
    },
    Write {
        bar: u8,
        offset: u64,
        value: u64,
        width: usize,
    },
    /// A descriptor somewhere in the pages where rings are.
    Describe {
        slot: u64,
        opts1: u32,
        address: u64,
    },
    Frame(usize),
    Attend,
    Still,
    Force,
    Master(bool),
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..LOW + CANARY + HIGH,
        1 => (0..64u64).prop_map(|n| LOW - 32 + n),
        1 => (0..64u64).prop_map(|n| LOW + CANARY + HIGH - 32 + n),
        1 => Just(60 << 30),
        1 => Just(64 << 30),
        1 => any::<u64>(),
    ]
}

/// Registers that matter most, and all others.
fn offset(hot: &'static [u64]) -> impl Strategy<Value = u64> {
    prop_oneof![
        6 => proptest::sample::select(hot),
        3 => 0..0x110u64,
        1 => any::<u64>(),
    ]
}

/// Values that these registers live by, and all others.
fn value(warm: &'static [u64]) -> impl Strategy<Value = u64> {
    prop_oneof![5 => proptest::sample::select(warm), 2 => address(), 2 => any::<u64>(), 1 => 0..256u64]
}

fn moves(hot: &'static [u64], warm: &'static [u64]) -> impl Strategy<Value = Vec<Move>> {
    let width = || prop_oneof![4 => proptest::sample::select(&[1usize, 2, 4][..]), 1 => 0..9usize];
    let one = prop_oneof![
        4 => (0..3u8, offset(hot), width()).prop_map(|(bar, offset, width)| Move::Read { bar, offset, width }),
        16 => (0..3u8, offset(hot), value(warm), width())
            .prop_map(|(bar, offset, value, width)| Move::Write { bar, offset, value, width }),
        8 => (0..256u64, any::<u32>(), address())
            .prop_map(|(slot, opts1, address)| Move::Describe { slot, opts1: opts1 | 1 << 31, address }),
        2 => (14..1600usize).prop_map(Move::Frame),
        2 => Just(Move::Attend),
        1 => Just(Move::Still),
        1 => Just(Move::Force),
        1 => any::<bool>().prop_map(Move::Master),
    ];
    proptest::collection::vec(one, 1..200)
}

fn play<F: Function>(watched: &mut Watched<F>, lan: &mut Lan, guest: &GuardedMemory, moves: &[Move]) {
    let view = GuestView::new(guest.map.clone());
    for step in moves {
        match step {
            Move::Read { bar, offset, width } => {
                let mut bytes = [0; 9];
                let _ = watched
                    .front
                    .access(RegisterAddress::Bar(*bar, *offset), Access::Read(&mut bytes[..*width]));
            }
            Move::Write { bar, offset, value, width } => {
                let bytes = value.to_le_bytes();
                let bytes = &bytes[..(*width).min(8)];
                let _ = watched.front.access(RegisterAddress::Bar(*bar, *offset), Access::Write(bytes));
            }
            Move::Describe { slot, opts1, address } => {
                view.write(slot * 16 + 8, &address.to_le_bytes()).expect("memory");
                view.write(slot * 16, &opts1.to_le_bytes()).expect("memory");
            }
            Move::Frame(len) => {
                lan.neighbour.send(&frame(OWN, OTHER, &vec![0x5a; len - 14]));
            }
            Move::Attend => {
                watched.bench.tick();
                watched.with(|monitor| monitor.attend());
            }
            Move::Still => {
                if watched.hold().is_ok() {
                    watched.resume();
                }
            }
            Move::Force => {
                watched.force();
                watched.save();
                watched.resume();
            }
            Move::Master(yes) => {
                let command = if *yes { 7u16 } else { 3 };
                let _ =
                    watched.front.access(RegisterAddress::Config(4), Access::Write(&command.to_le_bytes()));
            }
        }
    }
    watched.bench.tick();
    watched.with(|monitor| {
        monitor.attend();
        monitor.quiescence();
    });
}

fn policy() -> impl Strategy<Value = Policy> {
    proptest::sample::select(&[Policy::Ignore, Policy::Error][..])
}

const HOT_8139: &[u64] =
    &[0x10, 0x14, 0x20, 0x24, 0x28, 0x2c, 0x37, 0x3c, 0x3e, 0x40, 0x44, 0x50, 0xd9, 0xe0, 0xe4, 0xe8];
const WARM_8139: &[u64] =
    &[0, 3, 4, 8, 0xc, 0x10, 0x40, 0x80, 0xc0, 0x100, 0x400, 0x800, LOW - 0x100, LOW, 0xffff, 0x8000_0000];
const HOT_NE2000: &[u64] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0x10, 0x1f];
const WARM_NE2000: &[u64] =
    &[0, 1, 2, 0x0a, 0x12, 0x20, 0x21, 0x22, 0x26, 0x40, 0x49, 0x4c, 0x61, 0x62, 0x7f, 0x80, 0xff, 0xe2];

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn no_driver_of_an_rtl8139_gets_out(
        policy in policy(),
        opened in any::<bool>(),
        moves in moves(HOT_8139, WARM_8139),
    ) {
        let (mut lan, guest) = (Lan::new(OWN, OTHER), guarded_memory());
        let (hardware, bench) = rtl8139_card(&lan);
        let model = &ioplane_passthrough::rtl8139::MODEL;
        let mut watched = watch(hardware, bench, model, Policies::all(policy), &guest.map);
        if opened {
            let mut driver = Cp::new(watched, GuestView::new(guest.map.clone()), 0);
            // Its buffers do not fit into this memory, so that some of its descriptors are bad from the start.
            let _ = driver.open(OWN);
            watched = driver.reach;
        }
        play(&mut watched, &mut lan, &guest, &moves);
        let strayed = watched.bench.with(|card| card.counts().faults);
        prop_assert_eq!(strayed, 0, "the hardware tried to touch what is not mapped");
        prop_assert!(guest.canary_lives());
        // Reset by its host, it serves a decent driver.
        watched.reset();
        while lan.neighbour.take().is_some() {}
        let view = GuestView::new(guest.map.clone());
        view.write(0, &[0; 0x1_0000]).expect("memory");
        let mut driver = Cp::new(watched, view, 0);
        prop_assert_eq!(driver.open(OWN), Ok(()));
        let sent = frame(OTHER, OWN, &[7; 100]);
        let _ = driver.queue(&sent, Cut::default());
        prop_assert_eq!(driver.kick(), Ok(()));
        prop_assert_eq!(lan.neighbour.take(), Some(sent));
    }

    #[test]
    fn no_driver_of_an_ne2000_gets_out(
        policy in policy(),
        opened in any::<bool>(),
        moves in moves(HOT_NE2000, WARM_NE2000),
    ) {
        let (mut lan, guest) = (Lan::new(OWN, OTHER), guarded_memory());
        let (hardware, bench) = ne2000_card(&lan);
        let model = &ioplane_passthrough::ne2000::MODEL;
        let mut watched = watch(hardware, bench, model, Policies::all(policy), &guest.map);
        if opened {
            let mut driver = Ne2k::new(watched);
            let _ = driver.probe().and_then(|mac| driver.open(mac));
            watched = driver.reach;
        }
        play(&mut watched, &mut lan, &guest, &moves);
        // It has no way to the guest's memory. What it does to the packet memory is between the guest and itself; a card that runs
        // without a ring drops what comes.
        prop_assert!(guest.canary_lives());
        prop_assert_eq!(watched.bench.mapped(), [], "nothing is mapped for a card that is never a bus master");
        watched.reset();
        while lan.neighbour.take().is_some() {}
        let mut driver = Ne2k::new(watched);
        prop_assert_eq!(driver.probe(), Ok(OWN));
        prop_assert_eq!(driver.open(OWN), Ok(()));
        prop_assert_eq!(driver.block_input(0x4000, 0x4000), Ok(vec![0; 0x4000]), "wiped");
        let sent = frame(OTHER, OWN, &[7; 100]);
        prop_assert_eq!(driver.xmit(&sent), Ok(()));
        prop_assert_eq!(lan.neighbour.take(), Some(sent));
    }
}
