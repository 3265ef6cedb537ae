//! QEMU's `rtl8139` and ours.

use ioplane_device::RegisterAddress;
use ioplane_memory::GuestView;
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};
use ioplane_passthrough::monitor::Policies;
use ioplane_pci::Function;
use ioplane_testkit::conformance::Dice;
use ioplane_testkit::nic::{Cp, Cut, Lan, Reach, frame};
use ioplane_testkit::oracle::{Book, Entry, Known, Logged, Rig, Whose, Wired};

use crate::rig::{OTHER, OWN, memory, rtl8139_card, view, watch};
use crate::{Script, compare, missing};

const IDR0: u64 = 0x00;
const MAR0: u64 = 0x08;
const TSD0: u64 = 0x10;
const TSAD0: u64 = 0x20;
const RBSTART: u64 = 0x30;
const CR: u64 = 0x37;
const CAPR: u64 = 0x38;
const CBR: u64 = 0x3a;
const IMR: u64 = 0x3c;
const ISR: u64 = 0x3e;
const TCR: u64 = 0x40;
const RCR: u64 = 0x44;
const MPC: u64 = 0x4c;
const CR9346: u64 = 0x50;
const TSAD: u64 = 0x60;
const TPPOLL: u64 = 0xd9;
const CPCR: u64 = 0xe0;

/// Where the driver has its memory, and its receive and transmit descriptors there.
const BASE: u64 = 0x1_0000;
const RINGS: usize = 0x800;

type Done = Result<(), String>;

fn put(card: &mut Logged<'_>, writes: &[(u64, usize, u32)]) -> Done {
    writes.iter().try_for_each(|(register, width, value)| {
        card.write(RegisterAddress::Bar(1, *register), *width, *value)
    })
}

fn get(card: &mut Logged<'_>, register: u64, width: usize) -> Result<u32, String> {
    card.read(RegisterAddress::Bar(1, register), width)
}

/// Registers that can be read at any time, and change by nothing but what is done to the chip.
fn look(card: &mut Logged<'_>) -> Done {
    for (register, width) in
        [(CR, 1), (IMR, 2), (ISR, 2), (TCR, 4), (RCR, 4), (MPC, 4), (CR9346, 1), (CPCR, 2)]
    {
        get(card, register, width)?;
    }
    card.line().map(drop)
}

/// 8139cp at work: frames of many sizes both ways, in one piece and in several, with sums and tags; statistics; the EEPROM.
fn driver(card: &mut Logged<'_>) -> Done {
    let view = card.view();
    let mut driver = Cp::new(&mut *card, view, BASE).with_features(0x40);
    driver.open(OWN)?;
    for n in 0..140usize {
        let mut sent = frame(OTHER, OWN, &vec![n as u8; 46 + n * 23 % 1454]);
        let (cuts, mut opts1, mut opts2): (&[usize], _, _) = match n % 7 {
            1 => (&[20], 0, 0),
            2 => (&[14, 40], 0, 0),
            _ => (&[], 0, 0),
        };
        if n % 5 == 3 {
            // IPv4 with UDP or TCP, summed by the card.
            let udp = n % 2 == 0;
            let len = sent.len() as u16 - 14;
            let total = len.to_be_bytes();
            let head =
                [8, 0, 0x45, 0, total[0], total[1], 0, n as u8, 0x40, 0, 64, if udp { 17 } else { 6 }, 0, 0];
            sent[12..26].copy_from_slice(&head);
            sent[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
            if udp {
                sent[38..40].copy_from_slice(&(len - 20).to_be_bytes());
            } else {
                sent[46] = 0x50;
            }
            opts1 = 1 << 18 | if udp { 1 << 17 } else { 1 << 16 };
        }
        if n % 9 == 4 {
            opts2 = 1 << 17 | 0x2a01;
        }
        driver.xmit(&sent, Cut { at: cuts, opts1, opts2 })?;
        driver.reach.sent();
        driver.reach.line()?;
        driver.interrupt()?;
        driver.reclaim()?;
        let mut came = frame(OWN, OTHER, &vec![n as u8 ^ 0xa5; 46 + n * 31 % 1454]);
        if n % 8 == 5 {
            came.splice(12..12, [0x81, 0, 0, n as u8]);
        }
        driver.reach.arrive(&came)?;
        driver.reach.line()?;
        driver.interrupt()?;
        driver.poll()?;
        driver.reach.line()?;
        driver.reach.memory(BASE, RINGS)?;
    }
    for word in 0..64 {
        driver.eeprom(word, 6)?;
    }
    driver.close()?;
    look(card)
}

fn tally(card: &mut Logged<'_>) -> Done {
    let view = card.view();
    let mut driver = Cp::new(&mut *card, view, BASE);
    driver.open(OWN)?;
    for n in 0..5 {
        driver.xmit(&frame(OTHER, OWN, &[n; 100]), Cut::default())?;
        for to in [OWN, [0xff; 6]] {
            driver.reach.arrive(&frame(to, OTHER, &[n; 100]))?;
        }
        driver.interrupt()?;
        driver.poll()?;
        driver.reclaim()?;
    }
    driver.reach.sent();
    driver.stats()?;
    card.memory(BASE + 0x800, 64).map(drop)
}

fn power_on(card: &mut Logged<'_>) -> Done {
    card.enable(true)?;
    for register in (0..0x100).filter(|register| !(0x48..0x4c).contains(register)) {
        get(card, register, 1)?;
    }
    for register in (0..0x100).step_by(2).filter(|register| !(0x48..0x4c).contains(register)) {
        get(card, register, 2)?;
    }
    for register in (0..0x100).step_by(4).filter(|register| *register != 0x48) {
        get(card, register, 4)?;
    }
    Ok(())
}

/// Registers by their width, and what of them stays.
const PLAIN: &[(u64, usize)] = &[
    (IDR0, 4),
    (IDR0 + 4, 4),
    (MAR0, 4),
    (MAR0 + 4, 4),
    (TSAD0, 4),
    (TSAD0 + 4, 4),
    (TSAD0 + 8, 4),
    (TSAD0 + 12, 4),
    (RBSTART, 4),
    (IMR, 2),
    (RCR, 4),
    (0x51, 1),
    (0x52, 1),
    (0x54, 4),
    (0x59, 1),
    (0x5a, 1),
    (0x5c, 2),
    (0x62, 2),
    (0x66, 2),
    (0xd8, 1),
    (CPCR, 2),
    (0xe4, 4),
    (0xe8, 4),
    (0xec, 1),
];

fn patterns(card: &mut Logged<'_>) -> Done {
    card.enable(true)?;
    for unlocked in [false, true] {
        put(card, &[(CR9346, 1, if unlocked { 0xc0 } else { 0 })])?;
        for value in [0u32, !0, 0x5555_5555, 0xaaaa_aaaa, 0x1234_5678] {
            for (register, width) in PLAIN {
                put(card, &[(*register, *width, value >> (32 - 8 * width))])?;
                get(card, *register, *width)?;
            }
        }
    }
    for enabled in [0x00, 0x04, 0x0c] {
        put(card, &[(CR, 1, enabled)])?;
        for value in [0u32, !0, 0x0301_0700] {
            put(card, &[(TCR, 4, value)])?;
            get(card, TCR, 4)?;
        }
        get(card, CR, 1)?;
    }
    // What a reset leaves.
    put(card, &[(0x54, 4, 0), (CR, 1, 0x10)])?;
    for (register, width) in PLAIN {
        get(card, *register, *width)?;
    }
    look(card)
}

/// The halves and bytes of wide registers.
fn pieces(card: &mut Logged<'_>) -> Done {
    card.enable(true)?;
    put(card, &[(CR9346, 1, 0xc0), (IDR0, 4, 0x4433_2211), (IDR0 + 4, 4, 0x6655)])?;
    put(card, &[(IDR0 + 2, 1, 0x77), (MAR0, 1, 1), (MAR0 + 5, 1, 2), (MAR0 + 2, 2, 0x0403)])?;
    for register in [IDR0, IDR0 + 4, MAR0, MAR0 + 4] {
        get(card, register, 4)?;
        get(card, register, 2)?;
        get(card, register + 2, 2)?;
        get(card, register + 3, 1)?;
    }
    for register in [TSD0, TSD0 + 2, TSAD0, TSAD0 + 6] {
        get(card, register, 2)?;
    }
    get(card, IMR, 4)?;
    put(card, &[(CR9346, 1, 0)])
}

fn interrupts(card: &mut Logged<'_>) -> Done {
    let view = card.view();
    let mut driver = Cp::new(&mut *card, view, BASE);
    driver.open(OWN)?;
    for mask in [0x0000, 0x0001, 0x0004, 0x0005, 0xffff] {
        driver.put(IMR, 2, mask)?;
        driver.xmit(&frame(OTHER, OWN, &[1; 100]), Cut::default())?;
        driver.reach.line()?;
        driver.reach.arrive(&frame(OWN, OTHER, &[1; 100]))?;
        driver.reach.line()?;
        driver.get(ISR, 2)?;
        for bits in [0x0000, 0x0004, 0x8000, 0x0001, 0xffff] {
            driver.put(ISR, 2, bits)?;
            driver.get(ISR, 2)?;
            driver.reach.line()?;
        }
        driver.reclaim()?;
        driver.reach.sent();
        driver.poll()?;
    }
    look(card)
}

const GROUP: [u8; 6] = [0x33, 0x33, 0, 0, 0, 0xfb];
const STRANGER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 9];

/// Who is heard, and what the descriptor says of it.
fn filter(card: &mut Logged<'_>) -> Done {
    let view = card.view();
    let mut driver = Cp::new(&mut *card, view, BASE);
    driver.open(OWN)?;
    let all: &[[u8; 6]] = &[[0xff; 6], OWN, STRANGER, GROUP];
    for (rcr, station) in [
        (0x00u32, all),
        (0x02, all),
        (0x04, all),
        (0x08, all),
        (0x0a, all),
        (0x0e, all),
        (0x01, &[OWN, STRANGER]),
    ] {
        for hash in [0, !0] {
            driver.put(MAR0, 4, hash)?;
            driver.put(MAR0 + 4, 4, hash)?;
            driver.put(RCR, 4, 0xe700 | rcr)?;
            for to in station {
                driver.reach.arrive(&frame(*to, OTHER, &[rcr as u8; 60]))?;
                driver.get(ISR, 2)?;
                driver.reach.memory(BASE, RINGS / 2)?;
                driver.poll()?;
            }
        }
    }
    // Every bit of the hash.
    driver.put(RCR, 4, 0xe704)?;
    for bit in 0..64u32 {
        driver.put(MAR0, 4, if bit < 32 { 1 << bit } else { 0 })?;
        driver.put(MAR0 + 4, 4, if bit < 32 { 0 } else { 1 << (bit - 32) })?;
        for last in 0..4 {
            driver.reach.arrive(&frame([1, 0, 0x5e, 0, bit as u8, last * 37], OTHER, &[1; 60]))?;
        }
        driver.poll()?;
    }
    Ok(())
}

/// As many frames as descriptors, and more.
fn full(card: &mut Logged<'_>) -> Done {
    let view = card.view();
    let mut driver = Cp::new(&mut *card, view, BASE);
    driver.open(OWN)?;
    for count in [64, 30, 64] {
        for n in 0..count {
            driver.reach.arrive(&frame(OWN, OTHER, &[n; 200]))?;
            driver.get(ISR, 2)?;
            driver.get(MPC, 4)?;
        }
        driver.reach.line()?;
        driver.poll()?;
        driver.reach.memory(BASE, RINGS / 2)?;
    }
    // One more than there are descriptors.
    driver.put(MPC, 4, 0)?;
    for n in 0..65 {
        driver.reach.arrive(&frame(OWN, OTHER, &[n; 200]))?;
    }
    driver.get(ISR, 2)?;
    driver.get(MPC, 4).map(drop)
}

/// C mode, as 8139too drives it: four buffers to send from, one ring of bytes to receive into.
fn c_mode(card: &mut Logged<'_>) -> Done {
    const RX: u64 = 0x2_0000;
    const TX: u64 = 0x4_0000;
    card.enable(true)?;
    put(card, &[(CR, 1, 0x10), (CR9346, 1, 0xc0), (IDR0, 4, 0x0000_5452), (IDR0 + 4, 4, 0x0100)])?;
    put(
        card,
        &[(CR9346, 1, 0), (RBSTART, 4, RX as u32), (CR, 1, 0x0c), (RCR, 4, 0xe70e), (TCR, 4, 0x0300_0700)],
    )?;
    put(card, &[(MAR0, 4, !0), (MAR0 + 4, 4, !0), (IMR, 2, 0xffff)])?;
    look(card)?;
    for n in 0..12u64 {
        let sent = frame(OTHER, OWN, &vec![n as u8; 46 + (n as usize) * 100]);
        let at = TX + n % 4 * 0x800;
        card.store(at, &sent)?;
        let (tsd, tsad) = (TSD0 + n % 4 * 4, TSAD0 + n % 4 * 4);
        put(card, &[(tsad, 4, at as u32), (tsd, 4, sent.len() as u32 | 8 << 16)])?;
        get(card, tsd, 4)?;
        get(card, TSAD, 2)?;
        card.sent();
        look(card)?;
        put(card, &[(ISR, 2, 0xffff)])?;
    }
    let mut read = 0u32;
    for n in 0..40usize {
        let len = 46 + n * 97 % 1454;
        card.arrive(&frame(if n % 3 == 0 { [0xff; 6] } else { OWN }, OTHER, &vec![n as u8; len]))?;
        look(card)?;
        get(card, CBR, 2)?;
        let head = card.memory(RX + u64::from(read), 4)?;
        let len = u32::from(u16::from_le_bytes([head[2], head[3]]));
        card.memory(RX, 8192 + 2048)?;
        read = ((read + len + 4 + 3) & !3) % 8192;
        put(card, &[(CAPR, 2, read.wrapping_sub(16) & 0xffff), (ISR, 2, 0xffff)])?;
        get(card, CAPR, 2)?;
    }
    put(card, &[(CR, 1, 0)])?;
    look(card)
}

/// Pins of the EEPROM, moved at random.
fn pins(card: &mut Logged<'_>, seed: u64) -> Done {
    card.enable(true)?;
    let mut dice = Dice::new(seed);
    for _ in 0..40 {
        put(card, &[(CR9346, 1, 0x80), (CR9346, 1, 0x88)])?;
        // A start bit after some zeros, a command that is most often to read, and clocks.
        let command = [dice.of(&[1, 1, 1, 0]), dice.of(&[0, 0, 0, 1])];
        let mut bits = vec![0; dice.below(3) as usize];
        bits.extend([1, command[0], command[1]]);
        bits.extend((0..6).map(|_| dice.below(2)));
        let clocks = dice.below(17);
        bits.extend((0..clocks).map(|_| dice.below(2)));
        let first = bits.len() - clocks as usize;
        for (n, bit) in bits.into_iter().enumerate() {
            let bit = (bit as u32) << 1;
            put(card, &[(CR9346, 1, 0x88 | bit), (CR9346, 1, 0x8c | bit)])?;
            // What comes out before the word does is looked at once, below.
            if command == [1, 0] && n >= first {
                get(card, CR9346, 1)?;
            }
        }
        put(card, &[(CR9346, 1, 0x80)])?;
        get(card, CR9346, 1)?;
        if dice.below(4) == 0 {
            put(card, &[(CR9346, 1, 0)])?;
            get(card, CR9346, 1)?;
        }
    }
    Ok(())
}

/// Anything that a driver does with an open card, in any order.
fn random(card: &mut Logged<'_>, seed: u64, steps: usize) -> Done {
    let mut dice = Dice::new(seed);
    let view = card.view();
    let mut driver = Cp::new(&mut *card, view, BASE);
    driver.open(OWN)?;
    for _ in 0..steps {
        match dice.below(9) {
            0..=2 => {
                let sent = frame(OTHER, OWN, &vec![dice.roll() as u8; 46 + dice.below(1455) as usize]);
                let cuts = [14 + dice.below(40) as usize];
                driver.xmit(&sent, Cut { at: &cuts[..dice.below(2) as usize], ..Cut::default() })?;
                driver.reach.sent();
                driver.reclaim()?;
            }
            3..=5 => {
                let to = dice.of(&[OWN, OWN, [0xff; 6], GROUP, STRANGER]);
                let came = frame(to, OTHER, &vec![dice.roll() as u8; 46 + dice.below(1455) as usize]);
                driver.reach.arrive(&came)?;
                if dice.below(2) == 0 {
                    driver.poll()?;
                }
            }
            6 => driver.put(IMR, 2, dice.roll() as u32 & 0xe1ff)?,
            _ => driver.put(ISR, 2, dice.roll() as u32 & 0xffff)?,
        }
        driver.get(ISR, 2)?;
        driver.reach.line()?;
    }
    driver.poll()?;
    driver.reach.memory(BASE, RINGS)?;
    look(card)
}

/// What a guest does that knows the chip badly.
fn odd(card: &mut Logged<'_>) -> Done {
    let view = card.view();
    let mut driver = Cp::new(&mut *card, view, BASE);
    driver.open(OWN)?;
    // A short frame; a doorbell without work; one of high priority; a software interrupt.
    driver.xmit(&frame(OTHER, OWN, &[1; 10]), Cut::default())?;
    driver.reach.sent();
    driver.put(ISR, 2, 0xffff)?;
    driver.kick()?;
    driver.get(ISR, 2)?;
    driver.put(ISR, 2, 0xffff)?;
    driver.put(TPPOLL, 1, 0x01)?;
    driver.get(ISR, 2)?;
    driver.put(ISR, 2, 0xffff)?;
    driver.put(ISR, 2, 0xffff)?;
    // The EEPROM, selected and waiting.
    driver.put(CR9346, 1, 0x80)?;
    driver.put(CR9346, 1, 0x88)?;
    driver.get(CR9346, 1)?;
    driver.put(CR9346, 1, 0)?;
    // A broadcast for a chip that takes all physical addresses.
    driver.put(RCR, 4, 0xe701)?;
    driver.reach.arrive(&frame([0xff; 6], OTHER, &[1; 100]))?;
    driver.get(ISR, 2).map(drop)
}

/// Where QEMU's chip is not as ours. "Data sheet" is Realtek's of the RTL8139C+, revision 1.6; functions are QEMU 7.2's, hw/net/rtl8139.c.
const KNOWN: &[Known] = &[
    Known {
        what: "the status of a sent frame keeps the bits that asked for sums and a tag",
        source: "rtl8139_cplus_transmit_one; data sheet 6.1.2: in the status these bits are the count of collisions",
        explains: |d| {
            let words = d.words();
            let status = |at: u64| at.is_multiple_of(16) && (BASE + 0x400..BASE + 0x800).contains(&at);
            !words.is_empty()
                && words.iter().all(|(at, theirs, ours)| status(*at) && theirs & !0x0007_0000 == *ours)
        },
    },
    Known {
        what: "in promiscuous mode the status does not say for whom a frame was",
        source: "rtl8139_do_receive; data sheet 6.1.4: MAR, PAM, BAR",
        explains: |d| {
            let words = d.words();
            let status = |at: u64| at.is_multiple_of(16) && (BASE..BASE + 0x400).contains(&at);
            let kinds = 0x0700_0000;
            d.script == "filter"
                && !words.is_empty()
                && words
                    .iter()
                    .all(|(at, theirs, ours)| status(*at) && theirs & kinds == 0 && *theirs == ours & !kinds)
        },
    },
    Known {
        what: "a frame without a descriptor is lost",
        source: "rtl8139_do_receive; crates/nic/src/rtl8139/mod.rs: ours waits at the port, as in the FIFO",
        explains: |d| d.script == "full" && d.read(MPC) == Some((1, 0)),
    },
    Known {
        what: "a doorbell without work is not answered",
        source: "rtl8139_cplus_transmit; data sheet 5.6, TDU",
        explains: |d| d.script == "odd" && d.read(ISR) == Some((0, 0x80)),
    },
    Known {
        what: "there is no software interrupt",
        source: "rtl8139_io_writeb, TxPoll; data sheet 6.2.9, FSWINT",
        explains: |d| d.script == "odd" && d.read(ISR) == Some((0, 0x100)),
    },
    Known {
        what: "short frames are not padded",
        source: "rtl8139_transfer_frame; data sheet 6.1.1: the chip pads to 64 bytes, check sequence included",
        explains: |d| {
            matches!((d.theirs, d.ours), (Entry::Sent(theirs), Entry::Sent(ours))
            if d.script == "odd" && theirs.len() == 1 && ours.len() == 1
                && ours[0].len() == 60 && ours[0].starts_with(&theirs[0]))
        },
    },
    Known {
        what: "the EEPROM does not say that it is ready",
        source: "prom9346_set_wire; 93C46 data sheet: DO is high when it is selected and nothing is being programmed",
        explains: |d| {
            let pins = |entry: &Entry| match entry {
                Entry::Write { at: RegisterAddress::Bar(_, CR9346), value, .. } => Some(*value),
                _ => None,
            };
            let selected = d.before.iter().rev().filter_map(pins).take_while(|value| value & 0x08 != 0);
            let clocks = selected.filter(|value| value & 0x04 != 0).count();
            let high = d.read(CR9346).is_some_and(|(theirs, ours)| theirs & 1 == 0 && ours == theirs | 1);
            // A start bit, two of the command, six of the address.
            high && clocks < 9 && ["odd", "driver"].contains(&d.script)
        },
    },
    Known {
        what: "who takes all physical addresses takes broadcasts too",
        source: "rtl8139_do_receive; data sheet 5.9: AAP is of physical addresses, AB of broadcasts",
        explains: |d| d.script == "odd" && d.read(ISR) == Some((1, 0)) && d.written(RCR) == Some(0xe701),
    },
    Known {
        what: "RERID is the revision of the configuration space",
        source: "rtl8139_io_readb, PCIRevisionID; data sheet 5.1: 10h",
        explains: |d| {
            let values = [(0x5e, (0x20, 0x10)), (0x5c, (0x20_0000, 0x10_0000))];
            d.script == "power on" && values.iter().any(|(at, values)| d.read(*at) == Some(*values))
        },
    },
    Known {
        what: "after power-on the reset bit stays until something is written",
        source: "rtl8139_reset; data sheet 5.7: the chip clears it when the reset is done",
        explains: |d| {
            let shifts = [(0x37, 0), (0x36, 8), (0x34, 24)];
            d.script == "power on"
                && shifts.iter().any(|(at, shift)| {
                    d.read(*at).is_some_and(|(theirs, ours)| theirs ^ ours == 0x10 << shift)
                })
        },
    },
    Known {
        what: "parts of some registers, and some together, read as zero",
        source: "rtl8139_io_readb and rtl8139_io_readw know some registers by their own width only",
        explains: |d| {
            let at = [
                0x38, 0x39, 0x42, 0x40, 0x5c, 0x60, 0x62, 0x63, 0x64, 0x65, 0x66, 0x67, 0x68, 0x69, 0x6a,
                0x74, 0x75,
            ];
            let less = |(theirs, ours): (u32, u32)| theirs & !ours == 0;
            d.script == "power on" && at.iter().any(|at| d.read(*at).is_some_and(less))
        },
    },
    Known {
        what: "HLTCLK can be read",
        source: "rtl8139_io_readb gives whether the clock runs; data sheet 5.1: written only",
        explains: |d| {
            let shifts = [(0x5b, 0), (0x5a, 8), (0x58, 24)];
            d.script == "power on"
                && shifts
                    .iter()
                    .any(|(at, shift)| d.read(*at).is_some_and(|(theirs, ours)| theirs ^ ours == 1 << shift))
        },
    },
    Known {
        what: "of BMCR nothing but the restart can be written, and that stays",
        source: "rtl8139_BasicModeCtrl_write; data sheet 5.21: speed, negotiation and duplex; the restart ends by itself",
        explains: |d| d.script == "patterns" && d.read(0x62).is_some_and(|(theirs, _)| theirs & !0x1200 == 0),
    },
    Known {
        what: "ETTHR has eight bits",
        source: "rtl8139_io_writeb, TxThresh; data sheet 6.2.13: six",
        explains: |d| {
            d.script == "patterns" && d.read(0xec).is_some_and(|(theirs, ours)| theirs & 0x3f == ours)
        },
    },
    Known {
        what: "a reset by CR takes the configuration and the address as well, and leaves addresses of C mode, RCR and MULINT",
        source: "rtl8139_reset; data sheet 5.7: state machines, FIFOs, and the registers that say so; not the address, the PHY, the configuration",
        explains: |d| {
            let registers = [
                IDR0,
                IDR0 + 4,
                0x20,
                0x24,
                0x28,
                0x2c,
                RBSTART,
                RCR,
                0x51,
                0x52,
                0x59,
                0x5a,
                0x5c,
                0x62,
                0x66,
                0xd8,
                0xec,
            ];
            d.script == "patterns"
                && d.written(CR) == Some(0x10)
                && registers.iter().any(|register| d.read(*register).is_some())
        },
    },
];

fn chip() -> Box<dyn Rig> {
    let (lan, map) = (Lan::cable(OTHER), memory());
    let options = Rtl8139Options { name: "card".into(), mac: OWN };
    let mut card = Rtl8139::new(options, map.clone(), lan.port.clone()).expect("a card");
    card.attend();
    Box::new(Wired::bare(card, lan, GuestView::new(map)))
}

fn watched() -> Box<dyn Rig> {
    let (lan, map) = (Lan::cable(OTHER), memory());
    let (hardware, bench) = rtl8139_card(&lan);
    let model = &ioplane_passthrough::rtl8139::MODEL;
    let mut watched = watch(hardware, bench, model, Policies::default(), &map);
    watched.turn();
    Box::new(Wired::new(watched, lan, view(&map)))
}

/// What a driver may do: a mediated one of ours does all of it too.
const MAY: &[Script<'static>] = &[
    ("driver", &driver),
    ("tally", &tally),
    ("interrupts", &interrupts),
    ("filter", &filter),
    ("full", &full),
    ("random 1", &|card| random(card, 1, 300)),
    ("random 2", &|card| random(card, 2, 300)),
];
const ANYTHING: &[Script<'static>] = &[
    ("power on", &power_on),
    ("patterns", &patterns),
    ("pieces", &pieces),
    ("C mode", &c_mode),
    ("pins 1", &|card| pins(card, 1)),
    ("odd", &odd),
];

#[test]
fn hole_11_the_rtl8139_is_as_qemu_s() {
    if missing() {
        return;
    }
    let mut book = Book::new(KNOWN);
    let mut wrong = compare("rtl8139", MAY, &mut book, &[(Whose::Chip, &chip), (Whose::Watched, &watched)]);
    wrong.extend(compare("rtl8139", ANYTHING, &mut book, &[(Whose::Chip, &chip)]));
    wrong.extend(book.check().err());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
