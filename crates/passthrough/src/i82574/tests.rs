//! What Linux's e1000e does, access by access (read in its source, 6.x), never is refused; what a hostile driver does is.

use ioplane_model::{Check, ModelInput, Writes, verify};

use super::MODEL;
use super::table::buffer;
use crate::tests::play::Play;

const CTRL: u64 = 0x0000;
const EERD: u64 = 0x0014;
const CTRL_EXT: u64 = 0x0018;
const MDIC: u64 = 0x0020;
const RCTL: u64 = 0x0100;
const TCTL: u64 = 0x0400;
const RDT: u64 = 0x2818;
const TDT: u64 = 0x3818;
const EN: u32 = 1 << 1;

fn play() -> Play {
    Play::new(&MODEL)
}

/// e1000_reset_hw_82571.
fn reset(p: &mut Play) {
    // e1000e_disable_pcie_master.
    p.read(CTRL, 4);
    p.write(CTRL, 4, 0x0018_0245);
    p.read(0x08, 4);
    p.write(0xd8, 4, !0);
    p.write(RCTL, 4, 0);
    p.write(TCTL, 4, 0x8);
    p.read(0x08, 4);
    // e1000_get_hw_semaphore_82574.
    p.read(0xf00, 4);
    p.write(0xf00, 4, 0x20);
    p.read(CTRL, 4);
    p.write(CTRL, 4, 0x0418_0241);
    p.write(0xf00, 4, 0);
    assert_eq!(p.state("engine"), "Reset");
    p.hardware("EECD", 0x0000_0100);
    assert_eq!(p.state("engine"), "Reset", "the NVM is still being read");
    p.hardware("EECD", 0x0000_0300);
    p.write(0xd8, 4, !0);
    p.read(0xc0, 4);
}

/// e1000_read_phy_reg_mdic.
fn phy(p: &mut Play) {
    p.write(MDIC, 4, 0x0821_0000);
    assert_eq!(p.machine.busy(), Some(("phy", "Access")));
    p.hardware("MDIC", 0x0821_0000);
    p.hardware("MDIC", 0x1821_796d);
    p.read(MDIC, 4);
    assert_eq!(p.state("phy"), "Quiet");
}

/// e1000e_read_nvm_eerd.
fn nvm(p: &mut Play) {
    p.write(EERD, 4, 1 << 2 | 1);
    assert_eq!(p.machine.busy(), Some(("nvm", "Read")));
    p.hardware("EERD", 0x1234_0002);
    p.read(EERD, 4);
}

/// e1000_init_hw_82571, e1000_configure, e1000_irq_enable.
fn up(p: &mut Play) {
    reset(p);
    nvm(p);
    phy(p);
    p.write(0xe00, 4, 0x0704_0602);
    for word in 0..128 {
        p.write(0x5600 + word * 4, 4, 0);
        p.write(0x5200 + word * 4, 4, 0);
    }
    for address in 0..15 {
        p.write(0x5400 + address * 8, 4, 0x0054_5200);
        p.write(0x5404 + address * 8, 4, 0x8000_0200);
    }
    for (offset, value) in [
        (0x28, 0x00c2_8001),
        (0x2c, 0x100),
        (0x30, 0x8808),
        (0x170, 0xffff),
        (0x2160, 0x1000),
        (0x2168, 0x1008),
        (CTRL, 0x0018_0261),
        (0x3828, 0x0141_001f),
        (0x3928, 0x0141_001f),
        (0x3840, 0x400),
        (0x3940, 0x400),
        (CTRL_EXT, 0x1040_0000),
        (0x5b00, 0x0040_0000),
        (0x5b64, 1),
        (0x1000, 0x0014_0014),
        (0x38, 0x8100),
    ] {
        p.read(offset, 4);
        p.write(offset, 4, value);
    }
    // e1000_configure_tx.
    for (offset, value) in [
        (0x3800, 0x0123_4000),
        (0x3804, 0),
        (0x3808, 4096),
        (0x3810, 0),
        (TDT, 0),
        (0x3820, 8),
        (0x382c, 32),
        (0x410, 0x0060_2008),
    ] {
        p.write(offset, 4, value);
    }
    p.write(TCTL, 4, 0x0003_f0fa);
    // e1000e_setup_rss_hash, e1000_setup_rctl: the receiver is on before it has a ring.
    for word in 0..32 {
        p.write(0x5c00 + word * 4, 4, 0);
    }
    p.write(0x5818, 4, 0x0037_0000);
    p.write(0x5008, 4, 0x0000_8000);
    p.write(RCTL, 4, 0x0400_8002);
    // e1000_configure_rx.
    for (offset, value) in [
        (0x2828, 0x0104_0420),
        (0x2928, 0x0104_0420),
        (0x2820, 0),
        (0x282c, 8),
        (0xc4, 488),
        (0xe0, !0),
        (CTRL_EXT, 0x1840_0000),
        (0x2800, 0x0124_0000),
        (0x2804, 0),
        (0x2808, 4096),
        (0x2810, 0),
        (RDT, 0),
        (0x5000, 0x3300),
    ] {
        p.write(offset, 4, value);
    }
    p.write(RDT, 4, 255);
    p.write(0xd0, 4, 0x9d);
    p.write(0xc8, 4, 4);
    drained(p);
    assert_eq!((p.state("engine"), p.state("transmit")), ("Ready", "Quiet"));
}

fn drained(p: &mut Play) {
    if p.machine.awaits_rings().next().is_some() {
        p.tell(ModelInput::Drained { ring: 0 });
    }
}

#[test]
fn the_table_is_sound() {
    assert_eq!(verify::verify(&MODEL), []);
}

#[test]
fn a_stock_driver_is_never_refused() {
    let mut p = play();
    up(&mut p);
    assert!(p.machine.reusable());
    let before = p.accesses;
    // A ping: e1000_xmit_frame, e1000_intr, e1000e_poll; then the same for what comes.
    p.write(TDT, 4, 1);
    assert_eq!(p.machine.busy(), Some(("transmit", "TxRun")));
    p.read(0xc0, 4);
    p.write(0xd0, 4, 0x9d);
    drained(&mut p);
    assert!(p.machine.reusable());
    p.read(0xc0, 4);
    p.write(RDT, 4, 0);
    p.write(0xd0, 4, 0x9d);
    assert_eq!(p.accesses - before, 6);
    // e1000e_update_stats, e1000_watchdog_task: the link is up, the transmitter is switched on again.
    for word in 0..0x4a {
        p.read(0x4000 + word * 4, 4);
    }
    p.read(0x08, 4);
    phy(&mut p);
    p.write(TCTL, 4, 0x0003_f0fa);
    drained(&mut p);
    p.write(0xc8, 4, 0x10);
    // e1000e_set_rx_mode, e1000e_config_hwtstamp, ethtool -d.
    p.write(RCTL, 4, 0x0400_801a);
    p.write(0xb614, 4, 0x10);
    p.write(0xb620, 4, 0);
    p.write(0xb608, 4, 0x0118_6a00);
    for offset in [0x00, 0x08, 0x100, 0x2808, 0x2810, 0x2818, 0x2820, 0x400, 0x3808, 0x3810, 0x3818, 0x3820] {
        p.read(offset, 4);
    }
    // e1000e_down, and up again.
    p.write(TCTL, 4, 0x0003_f0f8);
    p.write(0x3820, 4, 0x8000_0008);
    p.write(0x2820, 4, 0x8000_0000);
    reset(&mut p);
    assert!(p.machine.reusable());
    up(&mut p);
    p.assert_allowed();
    assert!(p.ignored.is_empty());
}

#[test]
fn the_rings_are_checked_before_the_card_looks() {
    let mut p = play();
    up(&mut p);
    p.checks.clear();
    p.write(TDT, 4, 3);
    p.write(RDT, 4, 7);
    assert_eq!(p.checks, [&Check::Descriptors("transmit"), &Check::Descriptors("receive")]);
    // While the transmitter is off too: it would take them later.
    p.write(TCTL, 4, 0);
    assert_eq!(p.state("transmit"), "Quiet");
    p.write(TDT, 4, 4);
    assert_eq!((p.checks.len(), p.state("transmit")), (3, "Quiet"));
    p.write(TCTL, 4, EN);
    assert_eq!(p.machine.busy(), Some(("transmit", "TxRun")));
}

#[test]
fn descriptors_that_are_not_checked_are_not_offered() {
    let mut p = play();
    up(&mut p);
    // Packet split, with the receiver off as well; the reserved size of buffers.
    for rctl in [EN | 1 << 10, 1 << 10, 3 << 10, EN | 1 << 25] {
        p.write(RCTL, 4, rctl);
    }
    assert_eq!(p.denied.len(), 4);
    // The size that is given in KiB counts instead.
    p.write(RCTL, 4, EN | 1 << 25 | 2 << 27);
    assert_eq!(p.denied.len(), 4);
    // The second rings are not written at all.
    for name in ["QUEUE1_RX", "QUEUE1_TX", "EECD", "FLA", "EEMNG", "WUC", "MANC"] {
        let register = MODEL.registers.iter().find(|register| register.name == name).expect("a register");
        assert_eq!(register.writes, Writes::Never, "{name}");
    }
}

/// Section 10.2.5.1 of the datasheet.
#[test]
fn buffers_are_as_long_as_the_register_says() {
    let sizes = [0, 1 << 16, 2 << 16, 3 << 16].map(buffer);
    assert_eq!(sizes, [2048, 1024, 512, 256]);
    let sizes = [1 << 16, 2 << 16, 3 << 16].map(|size| buffer(1 << 25 | size));
    assert_eq!(sizes, [16384, 8192, 4096]);
    assert_eq!([buffer(1 << 25), buffer(15 << 27), buffer(3 << 27 | 3 << 16)], [16384, 15360, 3072]);
    // No value gives more than the buffer that stands in for one that is not the guest's.
    for rctl in 0..=0xffu32 {
        let value = rctl << 24 | (rctl & 3) << 16;
        assert!(buffer(value) <= 0x4000 && buffer(value) > 0, "{value:#x}");
    }
}
