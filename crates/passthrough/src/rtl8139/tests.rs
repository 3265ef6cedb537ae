//! What Linux's 8139cp does, access by access (read in its source, 6.x), never is refused; what a hostile driver does is.

use ioplane_model::{Check, Machine, ModelInput, verify};

use super::MODEL;
use crate::tests::play::Play;

fn play() -> Play {
    Play::new(&MODEL)
}

/// cp_stop_hw.
fn stop(p: &mut Play) {
    p.read(0x3e, 2);
    p.write(0x3e, 2, 0xffff);
    p.write(0x3c, 2, 0);
    p.read(0x3c, 2);
    p.write(0x37, 1, 0);
    p.write(0xe0, 2, 0);
    p.read(0xe0, 2);
    p.read(0x3e, 2);
    p.write(0x3e, 2, 0xffff);
}

/// read_eeprom: one word.
fn eeprom(p: &mut Play, command: u32, bits: u32) {
    p.write(0x50, 1, 0x80);
    p.write(0x50, 1, 0x88);
    for bit in (0..bits).rev() {
        let data = if command >> bit & 1 == 1 { 0x02 } else { 0 };
        p.write(0x50, 1, 0x88 | data);
        p.read(0x50, 1);
        p.write(0x50, 1, 0x88 | data | 0x04);
        p.read(0x50, 1);
    }
    p.write(0x50, 1, 0x88);
    for _ in 0..16 {
        p.write(0x50, 1, 0x8c);
        p.read(0x50, 1);
        p.write(0x50, 1, 0x88);
    }
    p.write(0x50, 1, 0);
}

/// cp_start_hw.
fn start(p: &mut Play) {
    p.write(0xe0, 2, 0x2b);
    for (offset, value) in
        [(0x28, 0), (0x2c, 0), (0xe4, 0x0123_4000), (0xe8, 0), (0x20, 0x0123_4400), (0x24, 0)]
    {
        p.write(offset, 4, value);
        p.read(offset, 4);
    }
    p.write(0x37, 1, 0x0c);
}

/// cp_init_hw.
fn init(p: &mut Play) {
    p.write(0x37, 1, 0x10);
    assert_eq!(p.state("engine"), "Reset");
    p.read(0x37, 1);
    p.write(0x50, 1, 0xc0);
    p.write(0x00, 4, 0x1234_5652);
    p.write(0x04, 4, 0x5678);
    start(p);
    p.write(0xec, 1, 6);
    p.write(0x44, 4, 0xb40f);
    p.write(0x08, 4, !0);
    p.write(0x0c, 4, !0);
    p.write(0x40, 4, 0x0300_0600);
    p.write(0x52, 1, 0x21);
    p.write(0x59, 1, 0x40);
    p.write(0xd8, 1, 0);
    p.write(0x5c, 2, 0);
    p.write(0x50, 1, 0);
}

/// cp_init_one and cp_open.
fn up(p: &mut Play) {
    stop(p);
    for word in [0, 7, 8, 9] {
        eeprom(p, 6 << 6 | word, 9);
        eeprom(p, 6 << 8 | word, 11);
    }
    init(p);
    p.write(0x3c, 2, 0x80bf);
    // mii_check_media.
    p.read(0x64, 2);
    assert_eq!(p.state("engine"), "Idle");
}

/// A ping: one frame out, one in.
fn ping(p: &mut Play, shadowed: bool) {
    p.write(0xd9, 1, 0x40);
    p.interrupt(0x04);
    p.interrupt(0x01);
    if !shadowed {
        p.read(0x3e, 2);
    }
    p.write(0x3e, 2, 0x04);
    p.write(0x3c, 2, 0x80ac);
    if !shadowed {
        p.read(0x3c, 2);
    }
    p.tell(ModelInput::Drained { ring: 0 });
    p.write(0x3e, 2, 0x53);
    p.write(0x3c, 2, 0x80ff);
    if !shadowed {
        p.read(0x3c, 2);
        p.read(0x3c, 2);
    }
}

#[test]
fn the_table_is_sound() {
    let findings = verify::verify(&MODEL);
    assert!(findings.is_empty(), "{}", findings.iter().map(|f| format!("\n{f}")).collect::<String>());
    Machine::new(&MODEL).unwrap();
}

#[test]
fn every_byte_is_some_register_or_reserved() {
    let machine = Machine::new(&MODEL).unwrap();
    let unknown: Vec<u64> = (0..0x100)
        .filter(|offset| machine.at(ioplane_model::Way::Read, *offset, 1)[0].register.is_none())
        .collect();
    // Those that the data sheet calls reserved.
    assert_eq!(
        unknown,
        [0x53, 0x5f, 0x76, 0x77, 0xdc, 0xdd, 0xde, 0xdf, 0xed, 0xee, 0xef],
        "all others are named"
    );
}

#[test]
fn a_ping_is_hooked_five_times_with_shadow_reads() {
    let mut p = play();
    up(&mut p);
    let (before, checks) = (p.hooked, p.checks.len());
    ping(&mut p, true);
    assert_eq!(p.hooked - before, 5);
    assert_eq!(p.checks[checks..], [&Check::Descriptors("transmit")]);
    assert!(p.machine.reusable(), "{:?}", p.machine.busy());
    let before = p.hooked;
    ping(&mut p, false);
    assert_eq!(p.hooked - before, 9, "without them reads of virtual registers exit too");
    p.assert_allowed();
}

#[test]
fn a_stock_driver_is_never_refused() {
    let mut p = play();
    up(&mut p);
    for _ in 0..3 {
        ping(&mut p, false);
    }
    // ethtool -d, 8 or 4 bytes at a time; ethtool -S; while a frame is sent.
    p.write(0xd9, 1, 0x40);
    for offset in (0..0x100).step_by(8) {
        p.read(offset, 8);
    }
    p.write(0x14, 4, 0);
    p.write(0x10, 4, 0x0100_0008);
    assert_eq!(p.state("tally"), "Tally");
    p.hardware("DTCCR_LO", 0x0100_0008);
    assert_eq!(p.state("tally"), "Tally", "the bit is still set");
    p.hardware("DTCCR_LO", 0x0100_0000);
    p.write(0x10, 4, 0);
    p.write(0x14, 4, 0);
    assert_eq!(p.state("tally"), "Quiet");
    // One that was never seen to end: the driver gives up, and writes the address.
    p.write(0x10, 4, 0x0100_0008);
    p.write(0x10, 4, 0);
    p.write(0x14, 4, 0);
    // cp_set_rx_mode, cp_get_stats, cp_set_features, cp_set_mac_address, mdio_write, netdev_set_wol.
    p.write(0x44, 4, 0xb40f);
    p.write(0x08, 4, 0);
    p.read(0x4c, 4);
    p.write(0x4c, 4, 0);
    p.write(0xe0, 2, 0x0b);
    p.write(0x50, 1, 0xc0);
    p.write(0x00, 4, 0x1111_1152);
    p.write(0x50, 1, 0);
    p.write(0x50, 1, 0xc0);
    p.write(0x62, 2, 0x1200);
    p.write(0x50, 1, 0);
    p.write(0x66, 2, 0x01e1);
    // ethtool -e while it runs.
    eeprom(&mut p, 6 << 8, 11);
    // cp_tx_timeout.
    p.read(0x37, 1);
    stop(&mut p);
    assert_eq!((p.state("engine"), p.state("transmit")), ("Config", "Quiet"));
    assert!(p.machine.reusable());
    start(&mut p);
    p.write(0x3c, 2, 0x80bf);
    // cp_suspend writes back what it read (BUFE is set), cp_resume.
    p.write(0x3c, 2, 0);
    p.write(0x37, 1, 0x0d);
    init(&mut p);
    // Down and up.
    stop(&mut p);
    assert!(p.machine.reusable());
    init(&mut p);
    p.assert_allowed();
    assert!(p.ignored.is_empty());
}

#[test]
fn c_mode_cannot_be_entered() {
    let mut p = play();
    p.write(0x37, 1, 0x10);
    for value in [0x04, 0x08, 0x0c] {
        p.write(0x37, 1, value);
    }
    assert_eq!(p.denied.len(), 3);
    // Half of it.
    p.write(0xe0, 2, 0x02);
    p.write(0x37, 1, 0x0c);
    assert_eq!(p.denied.len(), 4);
    p.write(0x37, 1, 0x08);
    assert_eq!((p.denied.len(), p.state("engine")), (4, "Idle"));
    // Out of it while it receives, byte by byte too.
    p.write(0xe0, 2, 0x00);
    p.write(0xe0, 1, 0x01);
    assert_eq!(p.denied.len(), 6);
    p.write(0xe1, 1, 0x01);
    assert_eq!(p.denied.len(), 6, "the other byte does not matter");
    // CR as a part of a wide write.
    p.write(0x34, 4, 0x0c00_0000);
    assert_eq!(p.denied.len(), 7);
    // A reset forgets the mode.
    p.write(0x37, 1, 0x10);
    p.write(0x37, 1, 0x08);
    assert_eq!(p.denied.len(), 8);
    // Transmit status of C mode.
    p.write(0x18, 4, 0x2000);
    p.write(0x1e, 1, 0x20);
    assert_eq!(p.denied.len(), 10);
}

#[test]
fn the_rings_are_checked_before_the_chip_looks() {
    let mut p = play();
    up(&mut p);
    assert_eq!(p.checks, [&Check::Base("receive"), &Check::Base("transmit")]);
    p.checks.clear();
    p.write(0xd9, 1, 0xc0);
    assert_eq!(p.checks, [&Check::Descriptors("transmit"), &Check::Descriptors("priority")]);
    assert_eq!(p.machine.busy(), Some(("transmit", "TxRun")));
    assert_eq!(p.machine.awaits_rings().collect::<Vec<_>>(), [0, 1]);
    p.tell(ModelInput::Drained { ring: 0 });
    assert_eq!(p.machine.busy(), Some(("priority", "TxRun")));
    p.tell(ModelInput::Drained { ring: 1 });
    assert!(p.machine.reusable());
    // A doorbell for a transmitter that is off.
    p.write(0x37, 1, 0x08);
    p.write(0xd9, 1, 0x40);
    assert!(p.machine.reusable());
}

/// What the pins of an EEPROM would see, if it were one: a decoder of its own, not the model's.
#[derive(Default)]
struct Pins {
    select: bool,
    clock: bool,
    bits: Vec<bool>,
}

impl Pins {
    /// The command's two bits, once they are there.
    fn set(&mut self, value: u8) -> Option<(bool, bool)> {
        if value & 0xc0 != 0x80 {
            return None; // The pins stay as they are.
        }
        let (select, clock, data) = (value & 8 != 0, value & 4 != 0, value & 2 != 0);
        if select && !self.select {
            self.bits.clear();
        }
        let rises = select && clock && !self.clock;
        (self.select, self.clock) = (select, clock);
        if rises && (data || !self.bits.is_empty()) {
            self.bits.push(data);
        }
        (rises && self.bits.len() == 3).then(|| (self.bits[1], self.bits[2]))
    }
}

#[test]
fn no_sequence_on_the_pins_writes_the_eeprom() {
    use proptest::prelude::*;
    let register = Machine::new(&MODEL).unwrap().find("CR9346").unwrap();
    // Mostly programming mode: all of the pins, and the other modes.
    let value = prop_oneof![8 => (0u8..16).prop_map(|pins| 0x80 | pins), 1 => any::<u8>()];
    proptest!(ProptestConfig::with_cases(2000), |(values in proptest::collection::vec(value, 1..120))| {
        let mut machine = Machine::new(&MODEL).unwrap();
        let mut pins = Pins::default();
        for value in values {
            let pending = machine.ask(ModelInput::Write { register, value: u32::from(value) });
            if pending.checks().any(Check::refuses) {
                continue;
            }
            // Not even a reset is sure to reset the EEPROM.
            machine.commit(pending);
            if let Some(command) = pins.set(value) {
                prop_assert_eq!(command, (true, false), "only 10 reads");
            }
        }
    });
}
