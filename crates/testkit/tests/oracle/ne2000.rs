//! QEMU's `ne2k_pci` and ours.

use ioplane_device::RegisterAddress;
use ioplane_memory::GuestView;
use ioplane_nic::ne2000::{Ne2000, Ne2000Options};
use ioplane_passthrough::monitor::Policies;
use ioplane_testkit::conformance::Dice;
use ioplane_testkit::nic::{Lan, Ne2k, Reach, frame};
use ioplane_testkit::oracle::{Book, Entry, Known, Logged, Rig, Whose, Wired};

use crate::rig::{OTHER, OWN, memory, ne2000_card, view, watch};
use crate::{Script, compare, missing};

const CR: u64 = 0x00;
const PSTART: u64 = 0x01;
const PSTOP: u64 = 0x02;
const BNRY: u64 = 0x03;
const TSR: u64 = 0x04;
const TPSR: u64 = 0x04;
const TBCR0: u64 = 0x05;
const TBCR1: u64 = 0x06;
const ISR: u64 = 0x07;
const RSAR0: u64 = 0x08;
const RSAR1: u64 = 0x09;
const RBCR0: u64 = 0x0a;
const RBCR1: u64 = 0x0b;
const RSR: u64 = 0x0c;
const RCR: u64 = 0x0c;
const TCR: u64 = 0x0d;
const DCR: u64 = 0x0e;
const IMR: u64 = 0x0f;
const CURR: u64 = 0x07;
const DATA: u64 = 0x10;
const RESET: u64 = 0x1f;

const STOP: u8 = 0x21;
const START: u8 = 0x22;
const PAGE1: u8 = 0x40;
const READ: u8 = 0x0a;
const WRITE: u8 = 0x12;
const SEND: u8 = 0x26;

type Done = Result<(), String>;

fn put(card: &mut Logged<'_>, writes: &[(u64, u8)]) -> Done {
    writes
        .iter()
        .try_for_each(|(register, value)| card.write(RegisterAddress::Bar(0, *register), 1, (*value).into()))
}

fn get(card: &mut Logged<'_>, register: u64) -> Result<u8, String> {
    card.read(RegisterAddress::Bar(0, register), 1).map(|value| value as u8)
}

/// Where remote DMA is, and what has become of it.
fn transfer(card: &mut Logged<'_>) -> Done {
    for register in [RSAR0, RSAR1, ISR] {
        get(card, register)?;
    }
    Ok(())
}

/// The registers of pages 0 and 1 that can be read without an effect.
fn registers(card: &mut Logged<'_>, running: bool) -> Done {
    let run = if running { START } else { STOP };
    put(card, &[(CR, run)])?;
    for register in [CR, BNRY, TSR, ISR, RSAR0, RSAR1, 0x0a, 0x0b, RSR] {
        get(card, register)?;
    }
    put(card, &[(CR, run | PAGE1)])?;
    for register in 1..16 {
        get(card, register)?;
    }
    put(card, &[(CR, run)])
}

/// A remote DMA of so many bytes from `at`; `way` is [`READ`] or [`WRITE`].
fn begin(card: &mut Logged<'_>, at: u16, count: u16, way: u8) -> Done {
    let ([low, high], [few, many]) = (at.to_le_bytes(), count.to_le_bytes());
    put(card, &[(CR, START), (RBCR0, few), (RBCR1, many), (RSAR0, low), (RSAR1, high), (CR, way)])
}

fn data(card: &mut Logged<'_>, width: usize, times: usize) -> Done {
    (0..times).try_for_each(|_| card.read(RegisterAddress::Bar(0, DATA), width).map(drop))
}

/// The card at work, as drivers start it: ring from page 4C to 80, promiscuous or not.
fn start(card: &mut Logged<'_>, rcr: u8) -> Done {
    card.enable(true)?;
    put(card, &[(CR, STOP), (DCR, 0x49), (RBCR0, 0), (RBCR1, 0), (RCR, 0x20), (TCR, 2), (TPSR, 0x40)])?;
    put(card, &[(PSTART, 0x4c), (PSTOP, 0x80), (BNRY, 0x4c), (ISR, 0xff), (IMR, 0), (CR, STOP | PAGE1)])?;
    for (register, byte) in (1u64..).zip(OWN) {
        put(card, &[(register, byte)])?;
    }
    put(card, &[(CURR, 0x4d), (CR, STOP), (ISR, 0xff), (IMR, 0x7f), (CR, START), (TCR, 0), (RCR, rcr)])
}

/// A stock driver finds the card, opens it, sends and receives, for more than once round the ring.
fn driver(card: &mut Logged<'_>) -> Done {
    let mut driver = Ne2k::new(&mut *card);
    let mac = driver.probe()?;
    driver.open(mac)?;
    for n in 0..60u16 {
        let sent = frame(OTHER, OWN, &vec![n as u8; usize::from(n * 24 % 1500)]);
        driver.xmit(&sent)?;
        driver.reach.line()?;
        driver.interrupt()?;
        driver.reach.line()?;
        driver.reach.sent();
        let came = frame(OWN, OTHER, &vec![n as u8 ^ 0x5a; usize::from(46 + n * 31 % 1454)]);
        driver.reach.arrive(&came)?;
        driver.reach.line()?;
        driver.interrupt()?;
        driver.reach.line()?;
    }
    Ok(())
}

fn power_on(card: &mut Logged<'_>) -> Done {
    card.enable(true)?;
    for register in 0..16 {
        get(card, register)?;
    }
    for page in [0x40, 0x80, 0xc0] {
        put(card, &[(CR, STOP | page)])?;
        for register in 0..16 {
            get(card, register)?;
        }
    }
    put(card, &[(CR, STOP)])?;
    get(card, RESET)?;
    put(card, &[(RESET, 0)])?;
    get(card, ISR)?;
    get(card, CR).map(drop)
}

/// What is written is what is read.
fn patterns(card: &mut Logged<'_>) -> Done {
    card.enable(true)?;
    for value in [0x00, 0x41, 0x55, 0x7f] {
        put(card, &[(CR, STOP), (PSTART, value), (PSTOP, value), (BNRY, value), (TPSR, value)])?;
        put(card, &[(RSAR0, value), (RSAR1, value), (RBCR0, value), (RBCR1, value), (RCR, value)])?;
        put(card, &[(TCR, value), (DCR, value), (IMR, value), (CR, STOP | PAGE1)])?;
        for register in 1..16 {
            put(card, &[(register, value ^ register as u8)])?;
        }
        registers(card, false)?;
        card.line()?;
        put(card, &[(CR, STOP | 0x80)])?;
        for register in 0..16 {
            get(card, register)?;
        }
        put(card, &[(CR, STOP)])?;
    }
    Ok(())
}

/// Remote DMA in words, by accesses of every width; the PROM; the count's end; a transfer that goes on.
fn words(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    for (at, count) in [(0x4000, 64), (0x5ffe, 64), (0x7fc0, 64), (0x4000, 63)] {
        put(card, &[(ISR, 0x40)])?;
        begin(card, at, count, WRITE)?;
        for n in 0..16u32 {
            card.write(RegisterAddress::Bar(0, DATA), 4, 0x0302_0100 + n * 0x0404_0404)?;
            transfer(card)?;
        }
        for width in [4usize, 2, 1] {
            put(card, &[(ISR, 0x40)])?;
            begin(card, at, count, READ)?;
            let each = if width == 4 { 4 } else { 2 };
            for _ in 0..usize::from(count).div_ceil(each) {
                data(card, width, 1)?;
                transfer(card)?;
            }
        }
    }
    put(card, &[(ISR, 0x40)])?;
    begin(card, 0, 32, READ)?;
    data(card, 2, 16)?;
    transfer(card)?;
    // Where it ended it goes on, if nobody says where.
    begin(card, 0x4000, 16, READ)?;
    data(card, 4, 4)?;
    put(card, &[(ISR, 0x40), (CR, START), (RBCR0, 8), (CR, READ)])?;
    data(card, 4, 2)?;
    transfer(card)
}

/// Remote DMA in bytes.
fn bytes(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    put(card, &[(DCR, 0x48)])?;
    for (at, count) in [(0x4000u16, 9), (0x4001, 9), (0x7ff7, 9)] {
        put(card, &[(ISR, 0x40)])?;
        begin(card, at, count, WRITE)?;
        for n in 0..u32::from(count) {
            card.write(RegisterAddress::Bar(0, DATA), 1, 0xa0 + n)?;
            transfer(card)?;
        }
        for width in [1, 2] {
            put(card, &[(ISR, 0x40)])?;
            begin(card, at, count, READ)?;
            for _ in 0..count {
                data(card, width, 1)?;
                transfer(card)?;
            }
        }
    }
    begin(card, 0, 32, READ)?;
    data(card, 1, 32)
}

/// The port goes from the ring's end to its beginning.
fn around(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    begin(card, 0x4c00, 0x3400, WRITE)?;
    for n in 0..0x3400u32 / 4 {
        card.write(RegisterAddress::Bar(0, DATA), 4, n.wrapping_mul(0x0101_0101))?;
    }
    transfer(card)?;
    for (at, count) in [(0x7ff0, 32), (0x7f80, 0x100), (0x7ffc, 8)] {
        put(card, &[(ISR, 0x40)])?;
        begin(card, at, count, READ)?;
        for _ in 0..count / 4 {
            data(card, 4, 1)?;
            transfer(card)?;
        }
    }
    // By words it comes to the end from everywhere.
    begin(card, 0x7ffe, 8, READ)?;
    for _ in 0..4 {
        data(card, 2, 1)?;
        transfer(card)?;
    }
    Ok(())
}

fn interrupts(card: &mut Logged<'_>) -> Done {
    start(card, 4)?;
    card.line()?;
    put(card, &[(ISR, 0xff), (RBCR0, 0), (RBCR1, 0)])?;
    begin(card, 0x4000, 2, READ)?;
    card.line()?;
    data(card, 2, 1)?;
    card.line()?;
    for mask in [0, 0x40, 0x3f, 0x7f] {
        put(card, &[(IMR, mask)])?;
        card.line()?;
    }
    put(card, &[(CR, START), (ISR, 0x40)])?;
    card.line()?;
    // Nothing to transfer has been transferred.
    put(card, &[(RBCR0, 0), (RBCR1, 0), (CR, READ)])?;
    get(card, ISR)?;
    put(card, &[(ISR, 0x40), (CR, START), (TPSR, 0x40), (TBCR0, 60), (TBCR1, 0), (CR, SEND)])?;
    card.line()?;
    get(card, CR)?;
    get(card, ISR)?;
    put(card, &[(ISR, 0x02)])?;
    card.line()?;
    card.arrive(&frame([0xff; 6], OTHER, &[1; 100]))?;
    card.line()?;
    get(card, ISR)?;
    get(card, RSR)?;
    // A stop shows RST; a start takes it away.
    put(card, &[(CR, STOP)])?;
    get(card, CR)?;
    put(card, &[(CR, START)])?;
    get(card, ISR)?;
    card.line().map(drop)
}

const GROUP: [u8; 6] = [0x33, 0x33, 0, 0, 0, 0xfb];
const STRANGER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 9];

/// Who is heard.
fn filter(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    let all: &[[u8; 6]] = &[[0xff; 6], OWN, STRANGER, GROUP];
    for (rcr, station) in [(0x00, all), (0x04, all), (0x08, all), (0x0c, all), (0x10, &[OWN, STRANGER])] {
        for hash in [0x00, 0xff] {
            put(card, &[(CR, STOP | PAGE1)])?;
            for register in 8..16 {
                put(card, &[(register, hash)])?;
            }
            put(card, &[(CURR, 0x4d), (CR, STOP), (BNRY, 0x4c), (ISR, 0xff), (CR, START), (RCR, rcr)])?;
            for to in station {
                card.arrive(&frame(*to, OTHER, &[rcr; 60]))?;
                put(card, &[(CR, START | PAGE1)])?;
                let page = get(card, CURR)?;
                put(card, &[(CR, START)])?;
                get(card, RSR)?;
                get(card, ISR)?;
                begin(card, u16::from(page.wrapping_sub(1)) << 8, 4, READ)?;
                data(card, 4, 1)?;
                put(card, &[(CR, START), (BNRY, page.wrapping_sub(1)), (ISR, 0xff)])?;
            }
        }
    }
    // Every bit of the hash.
    for bit in 0..64u8 {
        put(card, &[(CR, START | PAGE1)])?;
        for register in 8..16u64 {
            let byte = if register == 8 + u64::from(bit / 8) { 1 << (bit % 8) } else { 0 };
            put(card, &[(register, byte)])?;
        }
        put(card, &[(CR, START), (RCR, 0x08)])?;
        for last in 0..4 {
            card.arrive(&frame([1, 0, 0x5e, 0, bit, last * 37], OTHER, &[1; 60]))?;
        }
        put(card, &[(CR, START | PAGE1)])?;
        let page = get(card, CURR)?;
        put(card, &[(CR, START), (BNRY, if page == 0x4c { 0x7f } else { page - 1 }), (ISR, 0xff)])?;
    }
    Ok(())
}

/// Frames of every size end where they should, in the ring and in its heads.
fn sizes(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    let mut next = 0x4du8;
    for len in [46, 47, 100, 232, 233, 236, 237, 238, 239, 240, 241, 500, 1000, 1499, 1500] {
        card.arrive(&frame(OWN, OTHER, &vec![len as u8; len]))?;
        put(card, &[(CR, START | PAGE1)])?;
        let page = get(card, CURR)?;
        put(card, &[(CR, START)])?;
        begin(card, u16::from(next) << 8, len as u16 + 18, READ)?;
        data(card, 2, (len + 19) / 2)?;
        transfer(card)?;
        put(card, &[(CR, START), (BNRY, if page == 0x4c { 0x7f } else { page - 1 }), (ISR, 0xff)])?;
        next = page;
    }
    Ok(())
}

/// Frames of every size go as they lie on the card.
fn sends(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    for (page, len) in [(0x40u8, 60u16), (0x40, 61), (0x46, 1514), (0x4b, 64), (0x7e, 512), (0x40, 1000)] {
        begin(card, u16::from(page) << 8, len, WRITE)?;
        let bytes = frame(OTHER, OWN, &vec![page; usize::from(len) - 14]);
        for pair in bytes.chunks(2) {
            let pair = u16::from_le_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]);
            card.write(RegisterAddress::Bar(0, DATA), 2, pair.into())?;
        }
        let [low, high] = len.to_le_bytes();
        put(card, &[(CR, START), (TPSR, page), (TBCR0, low), (TBCR1, high), (CR, SEND)])?;
        card.sent();
        for register in [CR, TSR, ISR] {
            get(card, register)?;
        }
        card.line()?;
        put(card, &[(ISR, 0xff)])?;
    }
    Ok(())
}

/// The ring is filled until nothing more goes in, and read empty again.
fn full(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    for n in 0..12u8 {
        card.arrive(&frame(OWN, OTHER, &[n; 1400]))?;
        put(card, &[(CR, START | PAGE1)])?;
        get(card, CURR)?;
        put(card, &[(CR, START)])?;
        get(card, ISR)?;
        get(card, RSR)?;
    }
    for counter in 0x0d..0x10 {
        get(card, counter)?;
    }
    put(
        card,
        &[(CR, STOP), (RBCR0, 0), (RBCR1, 0), (TCR, 2), (CR, START), (BNRY, 0x71), (ISR, 0xff), (TCR, 0)],
    )?;
    card.arrive(&frame(OWN, OTHER, &[0xee; 1400]))?;
    get(card, ISR)?;
    put(card, &[(CR, START | PAGE1)])?;
    get(card, CURR).map(drop)
}

/// What a guest does that knows the card badly.
fn odd(card: &mut Logged<'_>) -> Done {
    start(card, 0)?;
    // An odd address in words.
    begin(card, 0x4001, 8, READ)?;
    data(card, 2, 1)?;
    transfer(card)?;
    // Reading on behind the count, and writing where it reads.
    begin(card, 0x4000, 2, READ)?;
    data(card, 2, 3)?;
    transfer(card)?;
    begin(card, 0x4000, 4, READ)?;
    card.write(RegisterAddress::Bar(0, DATA), 2, 0xabcd)?;
    transfer(card)?;
    // Over the PROM, and what comes of that.
    begin(card, 0, 4, WRITE)?;
    card.write(RegisterAddress::Bar(0, DATA), 4, 0x1234_5678)?;
    begin(card, 0, 4, READ)?;
    data(card, 4, 1)?;
    get(card, RESET)?;
    put(card, &[(RESET, 0)])?;
    start(card, 0)?;
    begin(card, 0, 4, READ)?;
    data(card, 4, 1)?;
    // Behind the memory.
    begin(card, 0x8000, 4, READ)?;
    data(card, 4, 1)?;
    begin(card, 0x2000, 4, READ)?;
    data(card, 4, 1)?;
    put(card, &[(CR, START), (TPSR, 0x20), (TBCR0, 60), (TBCR1, 0), (CR, SEND)])?;
    card.sent();
    get(card, TSR)?;
    get(card, ISR)?;
    // A frame while it only monitors, and while it is looped back.
    put(card, &[(ISR, 0xff), (RCR, 0x20)])?;
    card.arrive(&frame(OWN, OTHER, &[1; 100]))?;
    get(card, ISR)?;
    put(card, &[(ISR, 0xff), (RCR, 0), (TCR, 2)])?;
    card.arrive(&frame(OWN, OTHER, &[1; 100]))?;
    get(card, ISR)?;
    put(card, &[(ISR, 0xff), (TCR, 0), (CR, START | PAGE1), (1, 0x77), (CR, START)])?;
    card.arrive(&frame(OWN, OTHER, &[1; 100]))?;
    get(card, ISR)?;
    get(card, RESET)?;
    get(card, CR)?;
    // A broadcast for a card that takes all physical addresses.
    start(card, 0x10)?;
    card.arrive(&frame([0xff; 6], OTHER, &[1; 100]))?;
    get(card, ISR)?;
    // A frame that is left in the ring, and its interrupt acknowledged.
    start(card, 4)?;
    card.arrive(&frame([0xff; 6], OTHER, &[1; 100]))?;
    put(card, &[(ISR, 0x01)])?;
    get(card, ISR)?;
    card.line().map(drop)
}

/// A driver that does anything that a driver may do, in any order.
fn random(card: &mut Logged<'_>, seed: u64, steps: usize) -> Done {
    let mut dice = Dice::new(seed);
    start(card, 0x14)?;
    for _ in 0..steps {
        match dice.below(12) {
            0..=2 => {
                let at = 0x4000 + 2 * dice.below(0x600) as u16;
                let count = 2 + 2 * dice.below(40) as u16;
                let width = dice.of(&[1, 2, 4]);
                begin(card, at, count, WRITE)?;
                for _ in 0..usize::from(count).div_ceil(width.max(2)) {
                    card.write(RegisterAddress::Bar(0, DATA), width, dice.roll() as u32)?;
                }
                transfer(card)?;
            }
            3..=5 => {
                let at = 0x4000 + 2 * dice.below(0x600) as u16;
                let count = 2 + 2 * dice.below(40) as u16;
                let width: usize = dice.of(&[1, 2, 4]);
                begin(card, at, count, READ)?;
                let whole = usize::from(count).div_ceil(width.max(2));
                // Sometimes it is left off.
                data(card, width, if dice.below(4) == 0 { whole / 2 } else { whole })?;
                transfer(card)?;
            }
            6 => {
                let [low, high] = (60 + dice.below(600) as u16).to_le_bytes();
                let page = 0x40 + dice.below(8) as u8;
                begin(card, u16::from(page) << 8, 12, WRITE)?;
                for word in [OTHER, OWN].concat().as_chunks::<4>().0 {
                    card.write(RegisterAddress::Bar(0, DATA), 4, u32::from_le_bytes(*word))?;
                }
                put(card, &[(CR, START), (TPSR, page), (TBCR0, low), (TBCR1, high), (CR, SEND)])?;
                card.sent();
                get(card, TSR)?;
            }
            7 | 8 => {
                let to = dice.of(&[OWN, [0xff; 6], STRANGER]);
                let len = 46 + dice.below(1455) as usize;
                card.arrive(&frame(to, OTHER, &vec![len as u8; len]))?;
                put(card, &[(CR, START | PAGE1)])?;
                let page = get(card, CURR)?;
                put(card, &[(CR, START)])?;
                // All of it has been read.
                put(card, &[(BNRY, if page == 0x4c { 0x7f } else { page - 1 })])?;
            }
            9 => put(card, &[(IMR, dice.roll() as u8 & 0x7f)])?,
            10 => put(card, &[(ISR, dice.roll() as u8)])?,
            _ => put(card, &[(CR, STOP), (CR, START)])?,
        }
        get(card, ISR)?;
        card.line()?;
    }
    registers(card, true)
}

/// Where QEMU's card is not as ours. "DP8390" is National Semiconductor's data sheet, "RTL8029AS" Realtek's; functions are QEMU 7.2's,
/// hw/net/ne2000.c.
const KNOWN: &[Known] = &[
    Known {
        what: "a second reset leaves copies of the address in bytes 12 and 13 of the PROM",
        source: "ne2000_reset doubles bytes 0 to 15 of what the first reset has doubled",
        explains: |d| d.script == "driver" && d.read(DATA) == Some((1, 0)) && d.written(RSAR1) == Some(0),
    },
    Known {
        what: "the port is read on behind the count",
        source: "ne2000_asic_ioport_read does not look at it; DP8390 10.3: the transfer ends. Ours gives ones; mediated, zeros",
        explains: |d| match (d.script, d.whose) {
            ("driver", Whose::Watched) => d.read(DATA) == Some((0xff, 0)) && d.written(RSAR1) == Some(0),
            ("odd", _) => d.read(DATA) == Some((0, 0xffff)) || d.read(RSAR0) == Some((6, 2)),
            _ => false,
        },
    },
    Known {
        what: "the port moves data whichever way",
        source: "ne2000_asic_ioport_write does not look at the command; DP8390 10.3, RD0 to RD2",
        explains: |d| d.script == "odd" && d.read(RSAR0) == Some((2, 0)),
    },
    Known {
        what: "an odd address stays odd in words",
        source: "ne2000_dma_update adds two; DP8390 10.3, WTS: words lie at even addresses, of which ours keeps the count",
        explains: |d| d.script == "odd" && d.read(RSAR0) == Some((3, 2)),
    },
    Known {
        what: "the PROM can be written",
        source: "ne2000_mem_writel lets addresses below 32 through; a PROM is read-only",
        explains: |d| d.script == "odd" && d.read(DATA) == Some((0x1234_5678, 0x5454_5252)),
    },
    Known {
        what: "there are 32 KiB of memory",
        source: "NE2000_PMEM_SIZE; RTL8029AS: 16 KiB, pages 40 to 7F",
        explains: |d| d.script == "odd" && d.read(DATA) == Some((0, !0)) && d.written(RSAR1) == Some(0x80),
    },
    Known {
        what: "what is no memory is sent",
        source: "ne2000_ioport_write looks at the end only; DP8390 10.9: the FIFO runs empty, the transmission is aborted",
        explains: |d| {
            let sent = matches!((d.theirs, d.ours), (Entry::Sent(theirs), Entry::Sent(ours)) if theirs.len() == 1 && ours.is_empty());
            let told = d.read(TSR) == Some((0x01, 0x28)) || d.read(ISR) == Some((0x42, 0x48));
            d.script == "odd" && d.written(TPSR) == Some(0x20) && (sent || told)
        },
    },
    Known {
        what: "monitor mode keeps frames",
        source: "ne2000_receive does not look at RCR.MON; DP8390 10.8",
        explains: |d| d.script == "odd" && d.read(ISR) == Some((1, 0)) && d.written(RCR) == Some(0x20),
    },
    Known {
        what: "a card that is looped back hears the wire",
        source: "TCR is not implemented; DP8390 12: in loopback the wire is not heard",
        explains: |d| d.script == "odd" && d.read(ISR) == Some((1, 0)) && d.written(TCR) == Some(2),
    },
    Known {
        what: "the station address is that of the PROM",
        source: "ne2000_receive compares with the PROM; DP8390 10.12: with PAR0 to PAR5",
        explains: |d| d.script == "odd" && d.read(ISR) == Some((1, 0)) && d.written(1) == Some(0x77),
    },
    Known {
        what: "who takes all physical addresses takes broadcasts too",
        source: "ne2000_receive; DP8390 10.8: PRO is of physical addresses, AB of broadcasts",
        explains: |d| d.script == "odd" && d.read(ISR) == Some((1, 0)) && d.written(RCR) == Some(0x10),
    },
    Known {
        what: "the reset port leaves the command register",
        source: "ne2000_reset sets ISR.RST only; DP8390 11.0: STP is set, TXP and STA are cleared",
        explains: |d| d.script == "odd" && d.read(CR) == Some((0x22, 0x21)),
    },
    Known {
        what: "a frame that is left in the ring is not announced again",
        source: "crates/nic/src/ne2000/mod.rs says why ours does",
        explains: |d| {
            let up = matches!((d.theirs, d.ours), (Entry::Line(false), Entry::Line(true)));
            d.script == "odd" && d.written(ISR) == Some(1) && (up || d.read(ISR) == Some((0, 1)))
        },
    },
    Known {
        what: "the command register is zero at power-on",
        source: "DP8390 11.0: a reset sets STP; RTL8029AS 6.2.1: 21h",
        explains: |d| d.script == "power on" && d.read(CR) == Some((0, 0x21)),
    },
    Known {
        what: "page 2 has PSTART and PSTOP only",
        source: "ne2000_ioport_read; DP8390 10.2: what was written on page 0, and ones where there are no bits",
        explains: |d| {
            let registers = [TPSR, RCR, TCR, DCR, IMR];
            let zero =
                registers.iter().any(|register| d.read(*register).is_some_and(|(theirs, _)| theirs == 0));
            d.whose == Whose::Chip && zero && d.written(CR).is_some_and(|cr| cr & 0xc0 == 0x80)
        },
    },
    Known {
        what: "the check sequence is not kept behind a frame",
        source: "ne2000_receive; DP8390 5.0: it is stored with the frame",
        explains: |d| d.script == "sizes" && d.read(DATA).is_some_and(|(theirs, ours)| theirs == ours & 0xff),
    },
    Known {
        what: "a full ring is no overrun",
        source: "ne2000_receive drops the frame without a word; DP8390 10.4 (OVW), 10.10 (MPA), 10.11 (CNTR2)",
        explains: |d| {
            let told = [
                d.read(ISR) == Some((0x01, 0x11)),
                d.read(RSR) == Some((0x01, 0x10)),
                d.read(0x0f) == Some((0, 4)),
            ];
            d.script == "full" && told.contains(&true)
        },
    },
];

fn chip() -> Box<dyn Rig> {
    let lan = Lan::cable(OTHER);
    let options = Ne2000Options { name: "card".into(), mac: OWN };
    let mut card = Ne2000::new(options, lan.port.clone()).expect("a card");
    card.lose_when_full(true);
    Box::new(Wired::bare(card, lan, GuestView::new(memory())))
}

fn watched() -> Box<dyn Rig> {
    let (lan, map) = (Lan::cable(OTHER), memory());
    let (hardware, bench) = ne2000_card(&lan);
    bench.with(|card| card.lose_when_full(true));
    let model = &ioplane_passthrough::ne2000::MODEL;
    let mut watched = watch(hardware, bench, model, Policies::default(), &map);
    watched.turn();
    Box::new(Wired::new(watched, lan, view(&map)))
}

/// What a driver may do: a mediated one of ours does all of it too.
const MAY: &[Script<'static>] = &[
    ("driver", &driver),
    ("words", &words),
    ("bytes", &bytes),
    ("around", &around),
    ("interrupts", &interrupts),
    ("filter", &filter),
    ("sizes", &sizes),
    ("sends", &sends),
    ("full", &full),
    ("random 1", &|card| random(card, 1, 300)),
    ("random 2", &|card| random(card, 2, 300)),
];
const ANYTHING: &[Script<'static>] = &[("power on", &power_on), ("patterns", &patterns), ("odd", &odd)];

#[test]
fn hole_11_the_ne2000_is_as_qemu_s() {
    if missing() {
        return;
    }
    let mut book = Book::new(KNOWN);
    let mut wrong = compare("ne2k_pci", MAY, &mut book, &[(Whose::Chip, &chip), (Whose::Watched, &watched)]);
    wrong.extend(compare("ne2k_pci", ANYTHING, &mut book, &[(Whose::Chip, &chip)]));
    wrong.extend(book.check().err());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
