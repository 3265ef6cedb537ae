//! What a write to each register does.

use std::time::Instant;

use super::registers::*;
use super::spec::*;
use super::transmit::Queue;
use super::{EepromV1, Rtl8139};

impl Rtl8139 {
    /// A write of any width at any offset: each register that it covers, by rising offset.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let mut writes = [None; 8];
        let mut next = writes.iter_mut();
        self.chip.registers.split(offset, bytes, |write| {
            if let Some(place) = next.next() {
                *place = Some(write);
            }
        });
        // Nothing that an earlier one does changes what a later one's bytes are merged with, but a reset.
        for write in writes.into_iter().flatten() {
            self.write_register(write);
        }
    }

    fn write_register(&mut self, Write { at, value, lanes }: Write) {
        let unlocked = self.unlocked();
        let registers = &mut self.chip.registers;
        match at {
            IDR0 | MAR0 | 0x0c | RBSTART | RDSAR | 0xe8 => registers.put(at, 4, value),
            0x04 => registers.put(at, 2, value),
            TSD0 | 0x14 | 0x18 | 0x1c if self.chip.plus => self.dump(at, value),
            TSD0 | 0x14 | 0x18 | 0x1c => self.transmit_descriptor(at, value),
            TSAD0 | 0x24 | 0x28 | 0x2c => registers.put(at, 4, value),
            CR => self.command(value as u8),
            CAPR => {
                registers.put(at, 2, value);
                self.see_buffer();
            }
            IMR => registers.put_bits(at, 2, value, INT_ALL.into()),
            // Only of the bytes that were written: a one clears.
            ISR => registers.put(at, 2, registers.get(at, 2) & !(value & lanes)),
            // It can be set while the transmitter is on only.
            TCR if registers.u8(CR) & CR_TE != 0 => registers.put_bits(at, 4, value, TCR_WRITABLE),
            RCR => {
                registers.put_bits(at, 4, value, RCR_WRITABLE);
                registers.put(CAPR, 2, 0u16.wrapping_sub(CAPR_SHORT).into());
                registers.put(CBR, 2, 0);
                self.see_buffer();
            }
            TCTR => {
                let wait = self.clock.set(Instant::now(), 0, registers.u32(TIMER_INT));
                self.wake_sources.wake_after(wait);
            }
            TIMER_INT => {
                registers.put(at, 4, value);
                self.wake_sources.wake_after(self.clock.arm(Instant::now(), value));
            }
            MPC => registers.put(at, 4, 0),
            CR9346 => self.eeprom(value as u8),
            CONFIG0 => self.configure_byte(at, value, CONFIG0_WRITABLE),
            CONFIG1 => self.configure_byte(at, value, CONFIG1_WRITABLE),
            CONFIG3 => self.configure_byte(at, value, CONFIG3_WRITABLE),
            CONFIG4 => self.configure_byte(at, value, CONFIG4_WRITABLE),
            CONFIG5 => registers.put_bits(at, 1, value, CONFIG5_WRITABLE.into()),
            MULINT => registers.put_bits(at, 2, value, MULINT_WRITABLE.into()),
            // Reset and a new negotiation end at once.
            BMCR if unlocked => registers.put_bits(at, 2, value, BMCR_WRITABLE.into()),
            ANAR | RMS => registers.put(at, 2, value),
            TPPOLL => self.poll(value as u8),
            CPCR => {
                registers.put_bits(at, 2, value, CPCR_WRITABLE.into());
                self.chip.plus = true;
            }
            ETTHR => registers.put_bits(at, 1, value, ETTHR_WRITABLE.into()),
            _ => {}
        }
    }

    /// Whether the configuration registers can be written.
    fn unlocked(&self) -> bool {
        self.chip.registers.u8(CR9346) & EEM == EEM_CONFIG
    }

    fn configure_byte(&mut self, at: u64, value: u32, writable: u8) {
        if self.unlocked() {
            self.chip.registers.put_bits(at, 1, value, writable.into());
        }
    }

    fn command(&mut self, value: u8) {
        if value & CR_RST != 0 {
            self.soft_reset();
        }
        // Turned on, even if it was on: it begins at the first descriptor.
        if value & CR_RE != 0 {
            self.chip.receive = 0;
        }
        if value & CR_TE != 0 {
            self.chip.transmit = [0; 2];
        }
        self.chip.registers.put_bits(CR, 1, value.into(), (CR_RE | CR_TE).into());
    }

    /// Ends within the write that asks for it.
    fn soft_reset(&mut self) {
        self.counts.resets += 1;
        self.chip.registers.reset();
        self.chip.plus = false;
        (self.chip.transmit, self.chip.receive, self.chip.current) = ([0; 2], 0, 0);
        self.wake_sources.wake_after(self.clock.set(Instant::now(), 0, 0));
    }

    fn eeprom(&mut self, value: u8) {
        let mut value = value & (EEM | EECS | EESK | EEDI);
        match value & EEM {
            EEM_PROGRAM => self.chip.eeprom.pins(value, self.mac),
            EEM_AUTOLOAD => {
                // What the EEPROM has of the registers is the address. The mode ends by itself.
                self.soft_reset();
                let [a, b, c, d, e, f] = self.mac;
                self.chip.registers.put(IDR0, 4, u32::from_le_bytes([a, b, c, d]));
                self.chip.registers.put(IDR0 + 4, 2, u32::from_le_bytes([e, f, 0, 0]));
                self.chip.eeprom = EepromV1::default();
                value = 0;
            }
            _ => self.chip.eeprom = EepromV1::default(),
        }
        if self.chip.eeprom.out {
            value |= EEDO;
        }
        self.chip.registers.put(CR9346, 1, value.into());
    }

    /// The dump tally counter command; the registers beside its two words do nothing in C+ mode.
    fn dump(&mut self, at: u64, value: u32) {
        let command = DTCCR_CMD as u32;
        self.chip.registers.put(at, 4, value);
        if at != DTCCR || value & command == 0 {
            return;
        }
        if self.master() {
            let to = self.chip.registers.u64(DTCCR) & !(TALLY as u64 - 1);
            if let Err(fault) = self.memory.write(to, &self.chip.tally.bytes()) {
                self.fault(fault);
            }
        }
        self.chip.registers.put(at, 4, value & !command);
    }

    fn poll(&mut self, value: u8) {
        if value & TPPOLL_FSWINT != 0 {
            self.chip.registers.raise(INT_SW);
        }
        if value & TPPOLL_HPQ != 0 {
            self.transmit_ring(Queue::High);
        }
        if value & TPPOLL_NPQ != 0 {
            self.transmit_ring(Queue::Normal);
        }
    }
}
