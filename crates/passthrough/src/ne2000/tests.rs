//! What Linux's ne2k-pci and 8390 do, access by access (read in their sources, 6.x), never is refused; what a hostile driver does is.

use ioplane_model::{Check, Machine, ModelInput, Way, verify};

use super::MODEL;
use super::functions::{CURRENT_INSIDE, FRAME_INSIDE, MAY_READ, RING_INSIDE};
use crate::tests::play::Play;

fn w(p: &mut Play, offset: u64, value: u32) {
    p.write(offset, 1, value);
}

fn all(p: &mut Play, writes: &[(u64, u32)]) {
    for (offset, value) in writes {
        w(p, *offset, *value);
    }
}

/// Read the reset port, write it, wait for ISR.RST.
fn reset(p: &mut Play) {
    p.read(0x1f, 1);
    assert_eq!(p.state("run"), "Reset");
    w(p, 0x1f, 0);
    p.read(0x07, 1);
    w(p, 0x07, 0xff);
}

/// __NS8390_init.
fn init(p: &mut Play, start: bool) {
    all(p, &[(0, 0x21), (0x0e, 0x49), (0x0a, 0), (0x0b, 0), (0x0c, 0x20), (0x0d, 0x02)]);
    all(p, &[(0x04, 0x40), (0x01, 0x4c), (0x03, 0x7f), (0x02, 0x80), (0x07, 0xff), (0x0f, 0)]);
    w(p, 0, 0x61);
    for offset in 1..7 {
        w(p, offset, 0x52);
    }
    all(p, &[(0x07, 0x4c), (0, 0x21)]);
    if start {
        all(p, &[(0x07, 0xff), (0x0f, 0x3f), (0, 0x22), (0x0d, 0), (0x0c, 0x04)]);
        multicast(p, 0x04);
    }
}

/// do_set_multicast_list.
fn multicast(p: &mut Play, mode: u32) {
    all(p, &[(0x0c, 0x04), (0, 0x60)]);
    for offset in 8..16 {
        w(p, offset, 0xff);
    }
    all(p, &[(0, 0x20), (0x0c, mode)]);
}

/// ne2k_pci_init_one.
fn probe(p: &mut Play) {
    p.read(0, 1);
    w(p, 0, 0x61);
    p.read(0x0d, 1);
    all(p, &[(0x0d, 0xff), (0, 0x20)]);
    p.read(0x0d, 1);
    p.read(0x0d, 1);
    reset(p);
    all(
        p,
        &[(0, 0x21), (0x0e, 0x49), (0x0a, 0), (0x0b, 0), (0x0f, 0), (0x07, 0xff), (0x0c, 0x20), (0x0d, 2)],
    );
    all(p, &[(0x0a, 32), (0x0b, 0), (0x08, 0), (0x09, 0), (0, 0x0a)]);
    assert_eq!(p.state("dma"), "DmaRd");
    let hooked = p.hooked;
    for _ in 0..32 {
        p.read(0x10, 1);
    }
    assert_eq!(p.hooked, hooked, "the port is not hooked while it moves what was checked");
    w(p, 0x0e, 0x49);
    init(p, false);
}

/// Reads `count` bytes at `from` through the port: ne2k_pci_get_8390_hdr and ne2k_pci_block_input.
fn input(p: &mut Play, from: u32, count: u32) {
    all(
        p,
        &[
            (0, 0x22),
            (0x0a, count & 0xff),
            (0x0b, count >> 8),
            (0x08, from & 0xff),
            (0x09, from >> 8),
            (0, 0x0a),
        ],
    );
    for _ in 0..count / 4 {
        p.read(0x10, 4);
    }
    if count & 2 != 0 {
        p.read(0x10, 2);
    }
    if count & 1 != 0 {
        p.read(0x10, 1);
    }
    w(p, 0x07, 0x40);
    assert_eq!(p.state("dma"), "Quiet");
}

/// ne2k_pci_block_output.
fn output(p: &mut Play, page: u32, count: u32) {
    all(
        p,
        &[
            (0, 0x22),
            (0x07, 0x40),
            (0x0a, count & 0xff),
            (0x0b, count >> 8),
            (0x08, 0),
            (0x09, page),
            (0, 0x12),
        ],
    );
    for _ in 0..count / 4 {
        p.write(0x10, 4, 0);
    }
    if count & 2 != 0 {
        p.write(0x10, 2, 0);
    }
    p.read(0x07, 1);
    w(p, 0x07, 0x40);
}

/// NS8390_trigger_send.
fn trigger(p: &mut Play, page: u32, count: u32) {
    w(p, 0, 0x20);
    p.read(0, 1);
    all(p, &[(0x05, count & 0xff), (0x06, count >> 8), (0x04, page), (0, 0x26)]);
}

/// ei_receive: one frame, then the ring is empty.
fn receive(p: &mut Play) {
    for last in [false, true] {
        w(p, 0, 0x60);
        p.read(0x07, 1);
        w(p, 0, 0x20);
        p.read(0x03, 1);
        if !last {
            input(p, 0x4c00, 4);
            input(p, 0x4c04, 1042);
            w(p, 0x03, 0x50);
        }
    }
    w(p, 0x07, 0x05);
}

/// A frame of 1,042 bytes out, one in.
fn ping(p: &mut Play) {
    w(p, 0x0f, 0);
    output(p, 0x40, 1042);
    trigger(p, 0x40, 1042);
    w(p, 0x0f, 0x3f);
    p.interrupt(0x02);
    p.interrupt(0x01);
    w(p, 0, 0x20);
    p.read(0x07, 1);
    receive(p);
    p.read(0x04, 1);
    w(p, 0x07, 0x02);
    w(p, 0, 0x22);
    p.read(0x07, 1);
    p.tell(ModelInput::Holds { condition: 0 });
}

fn up() -> Play {
    let mut p = Play::new(&MODEL);
    probe(&mut p);
    init(&mut p, true);
    p
}

#[test]
fn the_table_is_sound() {
    let findings = verify::verify(&MODEL);
    assert!(findings.is_empty(), "{}", findings.iter().map(|f| format!("\n{f}")).collect::<String>());
    Machine::new(&MODEL).unwrap();
}

#[test]
fn a_ping_is_hooked_at_most_one_time_in_ten() {
    let mut p = up();
    let (accesses, hooked) = (p.accesses, p.hooked);
    ping(&mut p);
    let (accesses, hooked) = (p.accesses - accesses, p.hooked - hooked);
    assert!((550..600).contains(&accesses), "{accesses}: passthrough.md measured 570");
    assert!(hooked * 100 <= accesses * 8, "{hooked} of {accesses}");
    assert!(p.machine.reusable(), "{:?}", p.machine.busy());
    p.assert_allowed();
}

#[test]
fn a_stock_driver_is_never_refused() {
    let mut p = up();
    for _ in 0..3 {
        ping(&mut p);
    }
    // Two buffers: the second is filled while the first is sent.
    output(&mut p, 0x40, 60);
    assert_eq!(p.state("transmit"), "Loaded");
    trigger(&mut p, 0x40, 60);
    output(&mut p, 0x46, 60);
    assert_eq!(p.state("transmit"), "TxBoth");
    p.interrupt(0x02);
    assert_eq!(p.state("transmit"), "Loaded");
    trigger(&mut p, 0x46, 60);
    // The ring overruns while it is sent: stop, loop back, start, drain, send again.
    p.interrupt(0x10);
    assert_eq!(p.state("receive"), "Overrun");
    p.read(0, 1);
    all(&mut p, &[(0, 0x21), (0x0a, 0), (0x0b, 0)]);
    p.read(0x07, 1);
    all(&mut p, &[(0x0d, 0x02), (0, 0x22)]);
    receive(&mut p);
    w(&mut p, 0x07, 0x10);
    w(&mut p, 0x0d, 0);
    assert!(!p.machine.reusable(), "the frame is still there to be sent again");
    w(&mut p, 0, 0x26);
    p.interrupt(0x02);
    p.tell(ModelInput::Holds { condition: 0 });
    assert!(p.machine.reusable(), "{:?}", p.machine.busy());
    // ei_get_stats, set_rx_mode, promiscuous.
    for offset in [0x0d, 0x0e, 0x0f] {
        p.read(offset, 1);
    }
    multicast(&mut p, 0x1c);
    // ei_tx_timeout, and RDC that never comes.
    output(&mut p, 0x40, 60);
    trigger(&mut p, 0x40, 60);
    reset(&mut p);
    init(&mut p, true);
    // Down while a frame is sent, up.
    output(&mut p, 0x40, 60);
    trigger(&mut p, 0x40, 60);
    p.interrupt(0x01);
    init(&mut p, false);
    assert!(p.machine.reusable(), "{:?}", p.machine.busy());
    init(&mut p, true);
    ping(&mut p);
    // Full duplex: page 3.
    all(&mut p, &[(0, 0xe0), (0x01, 0xc0), (0x06, 0x40), (0x01, 0), (0, 0x20)]);
    p.assert_allowed();
    assert!(p.ignored.is_empty(), "{:?}", p.ignored);
}

#[test]
fn the_port_moves_only_what_was_checked() {
    let mut p = up();
    p.read(0x10, 4);
    p.write(0x10, 2, 0);
    assert_eq!((p.ignored.len(), p.denied.len()), (2, 0));
    p.checks.clear();
    all(&mut p, &[(0x0a, 4), (0x0b, 0), (0x08, 0), (0x09, 0x4c), (0, 0x0a)]);
    assert_eq!(p.checks, [&Check::Holds(&MAY_READ)]);
    p.write(0x10, 4, 0);
    assert_eq!(p.denied.len(), 1, "it was to read");
    p.tell(ModelInput::Moved);
    p.read(0x10, 4);
    assert_eq!(p.ignored.len(), 3, "no more than was asked for");
    // The range is written over while it moves.
    for offset in [0x01, 0x02, 0x08, 0x09, 0x0a, 0x0b] {
        w(&mut p, 0x0c, 0x20);
        w(&mut p, 0, 0x12);
        assert_eq!(p.state("dma"), "DmaWr");
        w(&mut p, offset, 0x60);
        assert_eq!(p.state("dma"), "Quiet");
    }
    w(&mut p, 0, 0x1a);
    assert_eq!(p.denied.len(), 2, "send packet");
}

#[test]
fn the_ring_is_checked_before_the_card_receives() {
    let mut p = up();
    p.checks.clear();
    w(&mut p, 0x01, 0x10);
    w(&mut p, 0x02, 0xff);
    assert_eq!(p.denied.len(), 2, "it receives into that ring");
    all(&mut p, &[(0, 0x21), (0x01, 0x10)]);
    assert_eq!((p.denied.len(), p.checks.len()), (2, 0));
    w(&mut p, 0, 0x22);
    assert_eq!(p.checks, [&Check::Holds(&RING_INSIDE), &Check::Holds(&CURRENT_INSIDE)]);
    // It keeps nothing while the ring is set.
    p.checks.clear();
    all(&mut p, &[(0, 0x21), (0x0c, 0x20), (0, 0x22), (0x01, 0x4c), (0x02, 0x80)]);
    assert!(p.checks.is_empty());
    w(&mut p, 0x0c, 0x04);
    assert_eq!(p.checks.len(), 2);
}

#[test]
fn a_ring_that_was_moved_under_the_card_is_not_received_into() {
    let mut p = up();
    assert_eq!(p.state("ring"), "Used");
    // Stopped, shortened: what the card has in CURR may lie beyond, whatever was last written there.
    all(&mut p, &[(0, 0x21), (0x02, 0x50)]);
    assert_eq!((p.state("ring"), p.denied.len()), ("Shifted", 0));
    w(&mut p, 0, 0x22);
    assert_eq!((p.state("run"), p.denied.len()), ("Stopped", 1));
    // It may run while it keeps nothing, but not begin to keep.
    all(&mut p, &[(0x0c, 0x20), (0, 0x22), (0x0c, 0x04)]);
    assert_eq!((p.state("run"), p.denied.len()), ("Started", 2));
    all(&mut p, &[(0, 0x62), (0x07, 0x4c), (0, 0x22), (0x0c, 0x04)]);
    assert_eq!((p.state("ring"), p.denied.len()), ("Used", 2));
}

#[test]
fn what_is_sent_is_checked_and_stays_checked() {
    let mut p = up();
    p.checks.clear();
    w(&mut p, 0, 0x26);
    w(&mut p, 0x04, 0xff);
    w(&mut p, 0x06, 0xff);
    assert_eq!(p.checks.len(), 3);
    assert!(p.checks.iter().all(|check| **check == Check::Holds(&FRAME_INSIDE)));
}

#[test]
fn pages_are_followed_and_a_page_in_the_middle_of_a_wide_write_is_not_guessed() {
    let mut p = up();
    let name = |p: &Play, way, offset| {
        p.machine.at(way, offset, 1)[0].register.map(|id| p.machine.register(id).name)
    };
    assert_eq!(name(&p, Way::Write, 0x07), Some("ISR"));
    assert_eq!(name(&p, Way::Write, 0x01), Some("PSTART"));
    assert_eq!(name(&p, Way::Read, 0x01), Some("CLDA0"));
    w(&mut p, 0, 0x62);
    assert_eq!(name(&p, Way::Write, 0x07), Some("CURR"));
    assert_eq!(p.machine.bank(), 1);
    let select = p.machine.select(0).unwrap();
    assert_eq!((p.machine.register(select.0).name, select.1), ("CR", 0x22));
    let wide = p.machine.at(Way::Write, 0, 4);
    assert_eq!(wide.iter().map(|piece| piece.register.is_some()).collect::<Vec<_>>(), [true, false]);
    assert_eq!(p.machine.at(Way::Read, 0, 4).len(), 4, "a read chooses no page");
}
