//! The NE2000 in front of the driver of the testkit.

use std::sync::Arc;

use ioplane_device::{Access, Device, Quiescent, RegisterAddress};
use ioplane_network::{Mac, Port, Sent};
use ioplane_nic::ne2000::{Ne2000, Ne2000Options, spec};
use ioplane_testkit::nic::{Lan, LanPeer, Ne2k, Reach, Unhosted, frame, readable};

const OWN: Mac = [2, 0, 0, 0, 0, 1];
const OTHER: Mac = [2, 0, 0, 0, 0, 2];

struct Bench {
    driver: Ne2k<Unhosted<Ne2000>>,
    lan: LanPeer,
    port: Arc<Port>,
}

fn make(port: &Arc<Port>) -> Ne2000 {
    Ne2000::new(Ne2000Options { name: "nic".into(), mac: OWN }, port.clone()).expect("a NIC")
}

fn bench() -> Bench {
    let Lan { port, neighbour } = Lan::new(OWN, OTHER);
    let mut driver = Ne2k::new(Unhosted::new(make(&port)));
    assert_eq!(driver.probe(), Ok(OWN));
    driver.open(OWN).expect("a card that opens");
    driver.reach.attend();
    Bench { driver, lan: neighbour, port }
}

impl Bench {
    fn interrupt(&mut self) -> (Vec<Vec<u8>>, Vec<u8>) {
        let seen = self.driver.interrupt().expect("sound");
        self.driver.reach.unmask();
        seen
    }

    fn card(&mut self) -> &mut Ne2000 {
        &mut self.driver.reach.function
    }
}

fn numbered(to: Mac, from: Mac, number: usize) -> Vec<u8> {
    let payload: Vec<u8> = (0..46 + number * 37 % 1455).map(|at| (at * number) as u8).collect();
    frame(to, from, &payload)
}

#[test]
fn frames_go_both_ways_many_times_around_the_ring() {
    let mut bench = bench();
    for number in 0..300 {
        let out = numbered(OTHER, OWN, number);
        bench.driver.xmit(&out).expect("sent");
        assert_eq!(bench.lan.take(), Some(out), "frame {number}, synchronously");
        assert_eq!(bench.driver.reach.line.count(), 2 * number as u64 + 1);
        assert_eq!(bench.interrupt(), (vec![], vec![spec::TSR_PTX]));

        let back = numbered(OWN, OTHER, number);
        assert_eq!(bench.lan.send(&back), Sent::Delivered(1));
        assert_eq!(bench.driver.reach.attend(), 1);
        assert_eq!(bench.driver.reach.line.count(), 2 * number as u64 + 2);
        assert_eq!(bench.interrupt(), (vec![back], vec![]), "frame {number}");
    }
    let counts = bench.card().counts();
    assert_eq!((counts.sent, counts.received, counts.faults, counts.resets), (300, 300, 0, 1));
    assert_eq!((counts.drops, counts.interrupts), (Default::default(), 600));
    assert_eq!(bench.driver.overruns, 0);
}

#[test]
fn frames_without_room_wait_and_none_is_lost() {
    let mut bench = bench();
    let frames: Vec<_> = (0..100).map(|number| numbered(OWN, OTHER, number)).collect();
    assert_eq!(bench.lan.send_all(&frames), 100);
    bench.driver.reach.attend();
    assert!(!readable(&bench.driver.reach.function), "it does not ask for what only the guest can do");
    let mut all = Vec::new();
    while all.len() < 100 {
        let before = all.len();
        all.extend(bench.interrupt().0);
        bench.driver.reach.attend();
        assert!(all.len() > before, "stuck at {before}");
    }
    assert_eq!(all, frames);
}

#[test]
fn or_they_are_lost_as_on_a_card() {
    let mut bench = bench();
    bench.card().lose_when_full(true);
    let frames: Vec<_> = (0..100).map(|number| numbered(OWN, OTHER, number)).collect();
    assert_eq!(bench.lan.send_all(&frames), 100);
    bench.driver.reach.attend();
    assert_ne!(bench.driver.get(spec::ISR).expect("read") & spec::ISR_OVW, 0);
    assert!(bench.driver.get(spec::CNTR2).expect("read") > 0);
    assert_eq!(bench.driver.get(spec::CNTR2), Ok(0), "read and cleared");
    let mut all = bench.interrupt().0;
    assert_eq!(bench.driver.overruns, 1);
    loop {
        let more = bench.interrupt().0;
        if more.is_empty() {
            break;
        }
        all.extend(more);
    }
    let lost = bench.card().counts().drops.no_room;
    assert!(!all.is_empty() && lost > 0 && bench.card().counts().received + lost == 100);
    assert!(all.iter().all(|frame| frames.contains(frame)));
    bench.lan.send(&frames[7]);
    bench.driver.reach.attend();
    assert!(bench.interrupt().0.contains(&frames[7]), "it goes on");
}

#[test]
fn the_filter_is_that_of_the_registers() {
    let mut bench = bench();
    let (group, stranger) = ([0x33, 0x33, 0, 0, 0, 9], [2, 0, 0, 0, 0, 9]);
    let heard = |bench: &mut Bench, to: Mac| {
        bench.lan.send(&numbered(to, OTHER, 7));
        bench.driver.reach.attend();
        bench.interrupt().0.len() == 1
    };
    assert!(heard(&mut bench, OWN) && heard(&mut bench, [0xff; 6]));
    assert!(!heard(&mut bench, group) && !heard(&mut bench, stranger));
    let set = |bench: &mut Bench, bits: u8| bench.driver.put(spec::RCR, bits).expect("written");
    set(&mut bench, spec::RCR_AM);
    assert!(!heard(&mut bench, group), "not in the hash");
    bench.driver.put(spec::CR, spec::CR_STA | spec::CR_RD_ABORT | spec::CR_PAGE1).expect("written");
    for at in 0..8 {
        bench.driver.put(spec::MAR0 + at, 0xff).expect("written");
    }
    bench.driver.put(spec::CR, spec::CR_STA | spec::CR_RD_ABORT).expect("written");
    assert!(heard(&mut bench, group) && !heard(&mut bench, stranger) && !heard(&mut bench, [0xff; 6]));
    set(&mut bench, spec::RCR_PRO);
    assert!(heard(&mut bench, stranger) && heard(&mut bench, OWN));
    set(&mut bench, spec::RCR_PRO | spec::RCR_MON);
    assert!(!heard(&mut bench, OWN));
    assert_eq!(bench.driver.get(spec::CNTR2), Ok(1), "monitored");
    set(&mut bench, spec::RCR_AB);
    bench.driver.put(spec::TCR, 2).expect("written");
    assert!(!heard(&mut bench, OWN), "it hears itself only");
    bench.driver.xmit(&numbered(OTHER, OWN, 1)).expect("sent");
    assert_eq!((bench.lan.take(), bench.interrupt().1), (None, vec![spec::TSR_PTX]), "and nobody hears it");
    bench.driver.put(spec::TCR, 0).expect("written");
    assert!(heard(&mut bench, OWN));
}

#[test]
fn remote_dma_of_every_width_and_length() {
    let mut bench = bench();
    for len in 1..40u16 {
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + len) as u8).collect();
        bench.driver.block_output(0x4000 + len * 2, &bytes).expect("written");
        assert_eq!(bench.driver.block_input(0x4000 + len * 2, len), Ok(bytes));
    }
    // Bytes.
    bench.driver.put(spec::DCR, 0x48).expect("written");
    for (register, value) in [(spec::RSAR0, 0), (spec::RSAR1, 0), (spec::RBCR0, 12), (spec::RBCR1, 0)] {
        bench.driver.put(register, value).expect("written");
    }
    bench.driver.put(spec::CR, spec::CR_STA | spec::CR_RD_READ).expect("written");
    let prom: Vec<u8> = (0..12).map(|_| bench.driver.get(spec::DATA).expect("read")).collect();
    assert_eq!(prom, [2, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1], "each twice");
    assert_eq!(bench.driver.get(spec::ISR).expect("read") & spec::ISR_RDC, spec::ISR_RDC);
    assert_eq!(bench.driver.get(spec::DATA), Ok(0xff), "no more");
    assert_eq!(bench.driver.get(spec::CRDA0), Ok(12));
    // The PROM cannot be written, and what is nowhere neither.
    bench.driver.put(spec::DCR, 0x49).expect("written");
    for at in [0, 0x20, 0x3ffe, 0x8000, 0xfffc] {
        bench.driver.block_output(at, &[0xaa; 8]).expect("written");
    }
    assert_eq!(bench.driver.block_input(0, 4), Ok(vec![2, 2, 0, 0]));
    assert_eq!(bench.driver.block_input(0x3ffe, 4).expect("read")[..2], [0xff; 2]);
    assert_eq!(bench.driver.block_input(0x8000, 4), Ok(vec![0xff; 4]));
}

#[test]
fn reading_wraps_at_the_end_of_the_ring() {
    let mut bench = bench();
    bench.driver.block_output(0x7ff0, &[1; 16]).expect("written");
    bench.driver.block_output(0x4c00, &[2; 16]).expect("written");
    assert_eq!(bench.driver.block_input(0x7ff2, 20), Ok([vec![1; 14], vec![2; 6]].concat()));
}

#[test]
fn a_frame_from_nowhere_is_an_error() {
    let mut bench = bench();
    for (page, len) in [(0x00, 60), (0x3f, 60), (0x80, 60), (0x7f, 257), (0xff, 60), (0x40, 0xffff)] {
        bench.driver.put(spec::TPSR, page).expect("written");
        bench.driver.put(spec::TBCR0, len as u8).expect("written");
        bench.driver.put(spec::TBCR1, (len >> 8) as u8).expect("written");
        bench.driver.put(spec::CR, spec::CR_STA | spec::CR_TXP | spec::CR_RD_ABORT).expect("written");
        assert_eq!(bench.interrupt().1, vec![spec::TSR_ABT | spec::TSR_FU], "{page:x}");
    }
    assert_eq!((bench.card().counts().faults, bench.lan.take()), (6, None));
}

#[test]
fn page_3_is_harmless() {
    let mut bench = bench();
    for (register, value) in [(spec::CR, 0xe2), (1, 0xc0), (6, 0x40), (1, 0), (spec::CR, 0x22)] {
        bench.driver.put(register, value).expect("written");
    }
    bench.driver.put(spec::CR, 0xe2).expect("written");
    assert_eq!(bench.driver.get(spec::CONFIG3), Ok(0x40));
    bench.driver.put(spec::CR, 0x22).expect("written");
    assert_eq!((bench.driver.get(spec::ID0), bench.driver.get(spec::ID1)), (Ok(b'P'), Ok(b'C')));
    bench.driver.xmit(&numbered(OTHER, OWN, 1)).expect("sent");
    assert!(bench.lan.take().is_some());
}

#[test]
fn a_saved_card_goes_on_in_another_instance() {
    let mut bench = bench();
    for number in 0..5 {
        bench.lan.send(&numbered(OWN, OTHER, number));
    }
    bench.driver.reach.attend();
    bench.lan.send(&numbered(OWN, OTHER, 5));
    // In the middle of a transfer.
    for (register, value) in [(spec::RSAR0, 0), (spec::RSAR1, 0), (spec::RBCR0, 12), (spec::RBCR1, 0)] {
        bench.driver.put(register, value).expect("written");
    }
    bench.driver.put(spec::CR, spec::CR_STA | spec::CR_RD_READ).expect("written");
    let half = bench.driver.reach.read(RegisterAddress::Bar(0, spec::DATA), 4).expect("read");
    assert_eq!(half, 0x0000_0202);

    let fresh = Unhosted::new(make(&bench.port));
    let old = std::mem::replace(&mut bench.driver.reach, fresh);
    let state = Quiescent::new(old.function).save().expect("saved");
    let Unhosted { function, line } =
        std::mem::replace(&mut bench.driver.reach, Unhosted::new(make(&bench.port)));
    let mut quiescent = Quiescent::new(function);
    quiescent.with(|card, proof| card.load(proof, &state)).expect("a good state");
    bench.driver.reach = Unhosted { function: quiescent.into_device(), line };
    assert_eq!(bench.driver.reach.line.count(), 1, "signalled again: invariant 3");
    assert_eq!(bench.driver.reach.read(RegisterAddress::Bar(0, spec::DATA), 4), Ok(0));
    assert_eq!(bench.driver.reach.read(RegisterAddress::Bar(0, spec::DATA), 4), Ok(0x0101_0000));
    bench.driver.reach.attend();
    let frames = bench.interrupt().0;
    let expected: Vec<_> = (0..6).map(|number| numbered(OWN, OTHER, number)).collect();
    assert_eq!(frames, expected, "the one that waited, too");
    bench.driver.xmit(&numbered(OTHER, OWN, 5)).expect("sent");
    assert!(bench.lan.take().is_some());
}

#[test]
fn wide_accesses_are_to_one_register_after_the_other() {
    let mut bench = bench();
    bench
        .driver
        .reach
        .access(RegisterAddress::Bar(0, spec::RSAR0), Access::Write(&[0x34, 0x12, 8, 0]))
        .expect("written");
    let mut bytes = [0; 8];
    bench.driver.reach.access(RegisterAddress::Bar(0, spec::CRDA0), Access::Read(&mut bytes)).expect("read");
    assert_eq!(bytes[..4], [0x34, 0x12, b'P', b'C']);
    bench.driver.reach.access(RegisterAddress::Bar(0, 0x0e), Access::Read(&mut bytes)).expect("read");
    assert_eq!(bytes[2..], [0xff; 6], "the data port is not reached from below");
    bench.driver.reach.access(RegisterAddress::Bar(0, spec::USED), Access::Read(&mut bytes)).expect("read");
    assert_eq!(bytes, [0xff; 8]);
    assert_eq!(bench.card().counts().resets, 1);
}
