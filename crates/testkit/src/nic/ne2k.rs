//! The driver of an NE2000, as Linux's ne2k-pci and 8390 do it: everything through the data port.

use ioplane_device::RegisterAddress;
use ioplane_network::Mac;

use super::Reach;

const CMD: u64 = 0x00;
const DATAPORT: u64 = 0x10;
const RESET: u64 = 0x1f;

const STARTPG: u64 = 0x01;
const STOPPG: u64 = 0x02;
const BOUNDARY: u64 = 0x03;
const TSR: u64 = 0x04;
const TPSR: u64 = 0x04;
const TCNTLO: u64 = 0x05;
const TCNTHI: u64 = 0x06;
const ISR: u64 = 0x07;
const RSARLO: u64 = 0x08;
const RSARHI: u64 = 0x09;
const RCNTLO: u64 = 0x0a;
const RCNTHI: u64 = 0x0b;
const RXCR: u64 = 0x0c;
const TXCR: u64 = 0x0d;
const COUNTER0: u64 = 0x0d;
const DCFG: u64 = 0x0e;
const IMR: u64 = 0x0f;
const PHYS: u64 = 0x01;
const CURPAG: u64 = 0x07;
const MULT: u64 = 0x08;

const STOP: u8 = 0x01;
const START: u8 = 0x02;
const TRANS: u8 = 0x04;
const RREAD: u8 = 0x08;
const RWRITE: u8 = 0x10;
const NODMA: u8 = 0x20;
const PAGE0: u8 = 0x00;
const PAGE1: u8 = 0x40;

const ISR_RX: u8 = 0x01;
const ISR_TX: u8 = 0x02;
const ISR_RX_ERR: u8 = 0x04;
const ISR_TX_ERR: u8 = 0x08;
const ISR_OVER: u8 = 0x10;
const ISR_RDC: u8 = 0x40;
const ISR_RESET: u8 = 0x80;
const ISR_ALL: u8 = 0x3f;

const DATA_CONFIG: u8 = 0x49;
const TX_START: u8 = 0x40;
const TX_PAGES: u8 = 12;
const RX_START: u8 = TX_START + TX_PAGES;
const STOP_PAGE: u8 = 0x80;
/// Broadcast, and multicast by hash.
const RX_CONFIG: u8 = 0x04;

pub struct Ne2k<R> {
    pub reach: R,
    current: u8,
    /// How often the ring was overrun.
    pub overruns: u32,
}

impl<R: Reach> Ne2k<R> {
    pub fn new(reach: R) -> Self {
        Ne2k { reach, current: 0, overruns: 0 }
    }

    /// The same driver, its registers reached another way: they have moved to another card.
    pub fn map<S: Reach>(self, to: impl FnOnce(R) -> S) -> Ne2k<S> {
        Ne2k { reach: to(self.reach), current: self.current, overruns: self.overruns }
    }

    pub fn get(&mut self, register: u64) -> Result<u8, String> {
        self.reach.read(RegisterAddress::Bar(0, register), 1).map(|value| value as u8)
    }

    pub fn put(&mut self, register: u64, value: u8) -> Result<(), String> {
        self.reach.write(RegisterAddress::Bar(0, register), 1, value.into())
    }

    fn reset(&mut self) -> Result<(), String> {
        let pulse = self.get(RESET)?;
        self.put(RESET, pulse)?;
        if self.get(ISR)? & ISR_RESET == 0 {
            return Err("no reset acknowledge".into());
        }
        Ok(())
    }

    /// Finds the card; its address.
    pub fn probe(&mut self) -> Result<Mac, String> {
        self.reach.enable(true)?;
        self.put(CMD, NODMA | PAGE1 | STOP)?;
        self.get(0x0d)?;
        self.put(0x0d, 0xff)?;
        self.put(CMD, NODMA | PAGE0)?;
        self.get(COUNTER0)?;
        if self.get(COUNTER0)? != 0 {
            return Err("no 8390: a counter is not cleared by being read".into());
        }
        self.reset()?;
        self.put(ISR, 0xff)?;
        let sequence = [
            (CMD, NODMA | PAGE0 | STOP),
            (DCFG, DATA_CONFIG),
            (RCNTLO, 0),
            (RCNTHI, 0),
            (IMR, 0),
            (ISR, 0xff),
            (RXCR, 0x20),
            (TXCR, 0x02),
            (RCNTLO, 32),
            (RCNTHI, 0),
            (RSARLO, 0),
            (RSARHI, 0),
            (CMD, RREAD | START),
        ];
        for (register, value) in sequence {
            self.put(register, value)?;
        }
        let mut prom = [0; 32];
        for byte in &mut prom {
            *byte = self.get(DATAPORT)?;
        }
        if prom[14..16] != [0x57, 0x57] {
            return Err(format!("no NE2000: {prom:02x?}"));
        }
        self.init(false, [0; 6])?;
        Ok([prom[0], prom[1], prom[2], prom[3], prom[4], prom[5]])
    }

    /// Brings the interface up.
    pub fn open(&mut self, mac: Mac) -> Result<(), String> {
        self.init(true, mac)
    }

    fn init(&mut self, start: bool, mac: Mac) -> Result<(), String> {
        let sequence = [
            (CMD, NODMA | PAGE0 | STOP),
            (DCFG, DATA_CONFIG),
            (RCNTLO, 0),
            (RCNTHI, 0),
            (RXCR, 0x20),
            (TXCR, 0x02),
            (TPSR, TX_START),
            (STARTPG, RX_START),
            (BOUNDARY, STOP_PAGE - 1),
            (STOPPG, STOP_PAGE),
            (ISR, 0xff),
            (IMR, 0),
            (CMD, NODMA | PAGE1 | STOP),
        ];
        for (register, value) in sequence {
            self.put(register, value)?;
        }
        for (register, byte) in (PHYS..).zip(mac) {
            self.put(register, byte)?;
            if self.get(register)? != byte {
                return Err("the station address does not stay".into());
            }
        }
        self.put(CURPAG, RX_START)?;
        self.current = RX_START;
        self.put(CMD, NODMA | PAGE0 | STOP)?;
        if start {
            self.put(ISR, 0xff)?;
            self.put(IMR, ISR_ALL)?;
            self.put(CMD, NODMA | PAGE0 | START)?;
            self.put(TXCR, 0)?;
            self.put(CMD, NODMA | PAGE1)?;
            for register in MULT..MULT + 8 {
                self.put(register, 0)?;
            }
            self.put(CMD, NODMA | PAGE0)?;
            self.put(RXCR, RX_CONFIG)?;
        }
        Ok(())
    }

    fn remote(&mut self, at: u16, len: u16, command: u8) -> Result<(), String> {
        let [count_low, count_high] = len.to_le_bytes();
        let [low, high] = at.to_le_bytes();
        for (register, value) in [
            (CMD, NODMA | PAGE0 | START),
            (RCNTLO, count_low),
            (RCNTHI, count_high),
            (RSARLO, low),
            (RSARHI, high),
            (CMD, command | START),
        ] {
            self.put(register, value)?;
        }
        Ok(())
    }

    /// Reads card memory.
    pub fn block_input(&mut self, at: u16, len: u16) -> Result<Vec<u8>, String> {
        self.remote(at, len, RREAD)?;
        let mut bytes = Vec::new();
        for _ in 0..len / 4 {
            bytes.extend(self.reach.read(RegisterAddress::Bar(0, DATAPORT), 4)?.to_le_bytes());
        }
        if len & 2 != 0 {
            bytes.extend(&self.reach.read(RegisterAddress::Bar(0, DATAPORT), 2)?.to_le_bytes()[..2]);
        }
        if len & 1 != 0 {
            bytes.push(self.get(DATAPORT)?);
        }
        self.put(ISR, ISR_RDC)?;
        Ok(bytes)
    }

    /// Writes card memory.
    pub fn block_output(&mut self, at: u16, bytes: &[u8]) -> Result<(), String> {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        self.put(ISR, ISR_RDC)?;
        self.remote(at, bytes.len() as u16, RWRITE)?;
        for word in bytes.as_chunks::<4>().0 {
            self.reach.write(RegisterAddress::Bar(0, DATAPORT), 4, u32::from_le_bytes(*word))?;
        }
        if self.get(ISR)? & ISR_RDC == 0 {
            return Err("timeout waiting for Tx RDC".into());
        }
        self.put(ISR, ISR_RDC)
    }

    /// Sends a frame. The one before has been sent.
    pub fn xmit(&mut self, frame: &[u8]) -> Result<(), String> {
        let mut frame = frame.to_vec();
        frame.resize(frame.len().max(60), 0);
        self.put(IMR, 0)?;
        self.block_output(u16::from(TX_START) << 8, &frame)?;
        self.put(CMD, NODMA | PAGE0)?;
        if self.get(CMD)? & TRANS != 0 {
            return Err("trigger_send() called with the transmitter busy".into());
        }
        let [low, high] = (frame.len() as u16).to_le_bytes();
        for (register, value) in
            [(TCNTLO, low), (TCNTHI, high), (TPSR, TX_START), (CMD, NODMA | TRANS | START)]
        {
            self.put(register, value)?;
        }
        self.put(IMR, ISR_ALL)
    }

    /// The interrupt handler: frames received, and transmit statuses.
    pub fn interrupt(&mut self) -> Result<(Vec<Vec<u8>>, Vec<u8>), String> {
        let (mut frames, mut sent) = (Vec::new(), Vec::new());
        self.put(CMD, NODMA | PAGE0)?;
        for _ in 0..12 {
            let interrupts = self.get(ISR)?;
            if interrupts & !ISR_RDC == 0 {
                break;
            }
            if interrupts & ISR_OVER != 0 {
                self.overrun(&mut frames)?;
            } else if interrupts & (ISR_RX | ISR_RX_ERR) != 0 {
                self.receive(&mut frames)?;
            }
            if interrupts & (ISR_TX | ISR_TX_ERR) != 0 {
                sent.push(self.get(TSR)?);
                self.put(ISR, interrupts & (ISR_TX | ISR_TX_ERR))?;
            }
            let counters = interrupts & 0x20;
            if counters != 0 {
                for counter in 0..3 {
                    self.get(COUNTER0 + counter)?;
                }
                self.put(ISR, counters)?;
            }
            if interrupts & ISR_RDC != 0 {
                self.put(ISR, ISR_RDC)?;
            }
            self.put(CMD, NODMA | PAGE0 | START)?;
        }
        Ok((frames, sent))
    }

    fn receive(&mut self, frames: &mut Vec<Vec<u8>>) -> Result<(), String> {
        for _ in 0..10 {
            self.put(CMD, NODMA | PAGE1)?;
            let receiving = self.get(CURPAG)?;
            self.put(CMD, NODMA | PAGE0)?;
            let mut this = self.get(BOUNDARY)?.wrapping_add(1);
            if this >= STOP_PAGE {
                this = RX_START;
            }
            if this != self.current {
                return Err(format!("mismatched read page pointers {this:x} and {:x}", self.current));
            }
            if this == receiving {
                break;
            }
            let head = self.block_input(u16::from(this) << 8, 4)?;
            let (status, next, count) = (head[0], head[1], u16::from_le_bytes([head[2], head[3]]));
            let len = count.checked_sub(4).filter(|len| (60..=1518).contains(len));
            let Some(len) = len else { return Err(format!("bogus packet: {head:02x?}")) };
            if status & 0x0f != 1 {
                return Err(format!("bogus packet: {head:02x?}"));
            }
            let expected = u16::from(this) + 1 + (count >> 8);
            let around = u16::from(STOP_PAGE - RX_START);
            let next_page = u16::from(next);
            if ![expected, expected + 1].iter().any(|page| next_page == *page || next_page + around == *page)
            {
                return Err(format!("next frame inconsistency: {head:02x?} at {this:x}"));
            }
            frames.push(self.block_input((u16::from(this) << 8) + 4, len)?);
            self.current = next;
            // Even if that is before the ring.
            self.put(BOUNDARY, next.wrapping_sub(1))?;
        }
        self.put(ISR, ISR_RX | ISR_RX_ERR)
    }

    fn overrun(&mut self, frames: &mut Vec<Vec<u8>>) -> Result<(), String> {
        self.overruns += 1;
        self.put(CMD, NODMA | PAGE0 | STOP)?;
        self.put(RCNTLO, 0)?;
        self.put(RCNTHI, 0)?;
        self.put(TXCR, 0x02)?;
        self.put(CMD, NODMA | PAGE0 | START)?;
        self.receive(frames)?;
        self.put(ISR, ISR_OVER)?;
        self.put(TXCR, 0)
    }
}
