//! The registers of all pages. What a driver writes and reads at the same place is often not the same register.

use serde::{Deserialize, Serialize};

use super::Ne2000;
use super::ring::Ring;
use super::spec::*;

/// The registers, as they are saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegistersV1 {
    /// Command, without [`CR_TXP`]: that ends at once.
    pub cr: u8,
    /// First page of the receive ring.
    pub pstart: u8,
    /// One past its last page.
    pub pstop: u8,
    /// Boundary: the page that the guest has not read yet begins behind it.
    pub bnry: u8,
    /// The page that the next frame goes to.
    pub curr: u8,
    /// First page to transmit.
    pub tpsr: u8,
    /// Bytes to transmit.
    pub tbcr: u16,
    /// Where remote DMA is.
    pub rsar: u16,
    /// How many bytes it has to go.
    pub rbcr: u16,
    /// Receive configuration.
    pub rcr: u8,
    /// Transmit configuration.
    pub tcr: u8,
    /// Data configuration.
    pub dcr: u8,
    /// Interrupt mask.
    pub imr: u8,
    /// Interrupt status.
    pub isr: u8,
    /// Transmit status.
    pub tsr: u8,
    /// Receive status.
    pub rsr: u8,
    /// Station address.
    pub par: [u8; 6],
    /// Multicast hash.
    pub mar: [u8; 8],
    /// Tally counters.
    pub cntr: [u8; 3],
    /// Page 3: 93C46 command, of which the mode counts.
    pub cr9346: u8,
    /// Page 3: full duplex.
    pub config3: u8,
}

pub(super) type Registers = RegistersV1;

/// Bits that these registers have.
const RCR_BITS: u8 = 0x3f;
const TCR_BITS: u8 = 0x1f;
const DCR_BITS: u8 = 0x7f;
/// Of page 3: the mode of the 93C46, and its value in which the configuration can be written; full duplex.
const EEM: u8 = 0xc0;
const CONFIG3_FUDUP: u8 = 0x40;
/// Of page 3, read: 10BASE-T is active.
const CONFIG2_ACTIVE: u8 = 0x40;
/// A tally counter stops here, and asks for attention from the half on (data sheet, 10.10).
const CNTR_MOST: u8 = 192;

impl RegistersV1 {
    /// As at power-on: stopped.
    pub(super) fn new() -> Self {
        RegistersV1 {
            cr: CR_STP | CR_RD_ABORT,
            pstart: 0,
            pstop: 0,
            bnry: 0,
            curr: 0,
            tpsr: 0,
            tbcr: 0,
            rsar: 0,
            rbcr: 0,
            rcr: 0,
            tcr: 0,
            dcr: DCR_LAS,
            imr: 0,
            isr: ISR_RST,
            tsr: 0,
            rsr: 0,
            par: [0; 6],
            mar: [0; 8],
            cntr: [0; 3],
            cr9346: 0,
            config3: CONFIG3_FUDUP,
        }
    }

    /// What the reset port changes (data sheet, 10.1).
    pub(super) fn reset(&mut self) {
        let fresh = RegistersV1::new();
        self.cr = fresh.cr;
        (self.isr, self.imr) = (fresh.isr, fresh.imr);
        self.dcr |= DCR_LAS;
        self.tcr &= !TCR_LB;
    }

    /// Whether an interrupt is asked for.
    pub(super) fn interrupts(&self) -> bool {
        self.isr & self.imr & IMR_ALL != 0
    }

    /// Whether it has been started.
    pub(super) fn running(&self) -> bool {
        self.cr & CR_STP == 0
    }

    /// Whether it hears and speaks to itself only.
    pub(super) fn looped(&self) -> bool {
        self.tcr & TCR_LB != 0
    }

    /// The receive ring, if there is one that a card could receive into.
    pub(super) fn ring(&self) -> Option<Ring> {
        Ring::of(self.pstart, self.pstop, self.curr)
    }

    /// A frame was missed.
    pub(super) fn missed(&mut self) {
        let count = &mut self.cntr[2];
        *count = count.saturating_add(1).min(CNTR_MOST);
        if *count & 0x80 != 0 {
            self.isr |= ISR_CNT;
        }
    }

    /// Whether a card can have these.
    pub(super) fn check(&self) -> Result<(), String> {
        let bits = [
            ("command", self.cr, !CR_TXP),
            ("receive configuration", self.rcr, RCR_BITS),
            ("transmit configuration", self.tcr, TCR_BITS),
            ("data configuration", self.dcr, DCR_BITS),
            ("interrupt mask", self.imr, IMR_ALL),
            ("transmit status", self.tsr, TSR_PTX | TSR_ABT | TSR_FU),
            ("receive status", self.rsr, RSR_PRX | RSR_PHY | RSR_MPA),
            ("93C46 command", self.cr9346, EEM),
            ("configuration 3", self.config3, CONFIG3_FUDUP),
        ];
        if let Some((what, value, _)) = bits.iter().find(|(_, value, can)| value & !can != 0) {
            return Err(format!("{what} cannot be {value:#04x}"));
        }
        if self.running() == (self.isr & ISR_RST != 0) {
            return Err("it is stopped and not in reset, or the other way round".into());
        }
        if self.cntr[0] != 0 || self.cntr[1] != 0 || self.cntr[2] > CNTR_MOST {
            return Err(format!("tally counters of {:?}", self.cntr));
        }
        Ok(())
    }
}

fn low(word: &mut u16, value: u8) {
    *word = *word & 0xff00 | u16::from(value);
}

fn high(word: &mut u16, value: u8) {
    *word = *word & 0x00ff | u16::from(value) << 8;
}

impl Ne2000 {
    /// A read of any width. Registers are a byte each; a wide read at the data port is one of the data port.
    pub(super) fn read(&mut self, offset: u64, out: &mut [u8]) {
        match offset {
            0..DATA => {
                for (at, byte) in (offset..).zip(out) {
                    *byte = if at < DATA { self.read_register(at) } else { 0xff };
                }
            }
            DATA..=DATA_LAST => self.read_data(out),
            _ if offset < USED => {
                self.counts.resets += 1;
                self.registers.reset();
                out.fill(0);
            }
            _ => out.fill(0xff),
        }
    }

    /// A write of any width.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        match offset {
            0..DATA => {
                for (at, byte) in (offset..DATA).zip(bytes) {
                    self.write_register(at, *byte);
                }
            }
            DATA..=DATA_LAST => self.write_data(bytes),
            // The end of a reset pulse, and what is not there.
            _ => {}
        }
    }

    fn read_register(&mut self, at: u64) -> u8 {
        let registers = &mut self.registers;
        if at == CR {
            return registers.cr;
        }
        match (registers.cr & CR_PS, at) {
            // Local DMA is never seen under way.
            (CR_PAGE0, CLDA0) => 0,
            (CR_PAGE0, CLDA1) => registers.curr,
            (CR_PAGE0, BNRY) => registers.bnry,
            (CR_PAGE0, TSR) => registers.tsr,
            (CR_PAGE0, ISR) => registers.isr,
            (CR_PAGE0, CRDA0) => registers.rsar as u8,
            (CR_PAGE0, CRDA1) => (registers.rsar >> 8) as u8,
            (CR_PAGE0, ID0) => ID[0],
            (CR_PAGE0, ID1) => ID[1],
            (CR_PAGE0, RSR) => registers.rsr,
            (CR_PAGE0, CNTR0..=CNTR2) => std::mem::take(&mut registers.cntr[(at - CNTR0) as usize]),
            (CR_PAGE1, PAR0..CURR) => registers.par[(at - PAR0) as usize],
            (CR_PAGE1, CURR) => registers.curr,
            (CR_PAGE1, MAR0..) => registers.mar[(at - MAR0) as usize],
            (CR_PAGE2, PSTART) => registers.pstart,
            (CR_PAGE2, PSTOP) => registers.pstop,
            (CR_PAGE2, TPSR) => registers.tpsr,
            // Bits that are not there read as ones.
            (CR_PAGE2, RCR) => registers.rcr | !RCR_BITS,
            (CR_PAGE2, TCR) => registers.tcr | !TCR_BITS,
            (CR_PAGE2, DCR) => registers.dcr | !DCR_BITS,
            (CR_PAGE2, IMR) => registers.imr | !IMR_ALL,
            (CR_PAGE3, CR9346) => registers.cr9346,
            (CR_PAGE3, CONFIG2) => CONFIG2_ACTIVE,
            (CR_PAGE3, CONFIG3) => registers.config3,
            _ => 0,
        }
    }

    fn write_register(&mut self, at: u64, value: u8) {
        if at == CR {
            return self.command(value);
        }
        let registers = &mut self.registers;
        match (registers.cr & CR_PS, at) {
            (CR_PAGE0, PSTART) => registers.pstart = value,
            (CR_PAGE0, PSTOP) => registers.pstop = value,
            (CR_PAGE0, BNRY) => registers.bnry = value,
            (CR_PAGE0, TPSR) => registers.tpsr = value,
            (CR_PAGE0, TBCR0) => low(&mut registers.tbcr, value),
            (CR_PAGE0, TBCR1) => high(&mut registers.tbcr, value),
            (CR_PAGE0, ISR) => self.acknowledge(value),
            (CR_PAGE0, RSAR0) => low(&mut registers.rsar, value),
            (CR_PAGE0, RSAR1) => high(&mut registers.rsar, value),
            (CR_PAGE0, RBCR0) => low(&mut registers.rbcr, value),
            (CR_PAGE0, RBCR1) => high(&mut registers.rbcr, value),
            (CR_PAGE0, RCR) => registers.rcr = value & RCR_BITS,
            (CR_PAGE0, TCR) => registers.tcr = value & TCR_BITS,
            (CR_PAGE0, DCR) => registers.dcr = value & DCR_BITS,
            (CR_PAGE0, IMR) => registers.imr = value & IMR_ALL,
            (CR_PAGE1, PAR0..CURR) => registers.par[(at - PAR0) as usize] = value,
            (CR_PAGE1, CURR) => registers.curr = value,
            (CR_PAGE1, MAR0..) => registers.mar[(at - MAR0) as usize] = value,
            (CR_PAGE3, CR9346) => registers.cr9346 = value & EEM,
            (CR_PAGE3, CONFIG3) if registers.cr9346 == EEM => registers.config3 = value & CONFIG3_FUDUP,
            _ => {}
        }
    }

    /// A one clears; reset ends when the card is started. Frames that are left in the ring are announced again: on silicon one that comes
    /// between a driver's last look at the ring and its acknowledgement, or that it did not take because it takes so many at a
    /// time, lies there until another comes; and here many come at once.
    fn acknowledge(&mut self, value: u8) {
        let registers = &mut self.registers;
        registers.isr &= !(value & IMR_ALL);
        if value & ISR_PRX != 0
            && registers.running()
            && registers.ring().is_some_and(|ring| ring.unread(registers.bnry, registers.curr))
        {
            registers.isr |= ISR_PRX;
        }
    }

    fn command(&mut self, value: u8) {
        let registers = &mut self.registers;
        registers.cr = value & !CR_TXP;
        if value & CR_STP != 0 {
            registers.isr |= ISR_RST;
            return;
        }
        registers.isr &= !ISR_RST;
        // Nothing to transfer has been transferred.
        if value & CR_RD_ABORT == 0 && value & CR_RD != 0 && registers.rbcr == 0 {
            registers.isr |= ISR_RDC;
        }
        if value & CR_TXP != 0 {
            self.transmit();
        }
    }
}
