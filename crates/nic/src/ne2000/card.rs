//! What is on the card: PROM, 16 KiB of memory, the data port to both.

use ioplane_network::Mac;

use super::Ne2000;
use super::ring::{Ring, wrapped};
use super::spec::*;

/// Bytes of card memory.
pub(super) const SIZE: usize = (MEMORY_END - MEMORY) as usize;

/// PROM and memory, by the addresses of remote DMA. What is neither reads as all ones and cannot be written.
#[derive(Debug, Clone)]
pub(super) struct Card {
    prom: [u8; PROM as usize],
    memory: Box<[u8; SIZE]>,
}

impl Card {
    pub fn new(mac: Mac) -> Self {
        let mut prom = [0; PROM as usize];
        for (twice, byte) in prom.as_chunks_mut::<2>().0.iter_mut().zip(mac) {
            *twice = [byte; 2];
        }
        prom[28..].fill(PROM_WORDS);
        Card { prom, memory: Box::new([0; SIZE]) }
    }

    /// All of the memory, for who saves it.
    pub fn memory(&self) -> &[u8] {
        &self.memory[..]
    }

    /// Takes memory over.
    pub fn load(&mut self, saved: &[u8]) {
        for (byte, saved) in self.memory.iter_mut().zip(saved) {
            *byte = *saved;
        }
    }

    fn byte(&self, at: u16) -> u8 {
        match at {
            0..PROM => self.prom[usize::from(at)],
            MEMORY..MEMORY_END => self.memory[usize::from(at - MEMORY)],
            _ => 0xff,
        }
    }

    fn put(&mut self, at: u16, byte: u8) {
        if (MEMORY..MEMORY_END).contains(&at) {
            self.memory[usize::from(at - MEMORY)] = byte;
        }
    }

    /// The memory from `at` on, so many bytes; `None` if it does not have them.
    pub fn slice(&self, at: u16, len: u16) -> Option<&[u8]> {
        let start = usize::from(at.checked_sub(MEMORY)?);
        self.memory.get(start..start + usize::from(len))
    }

    /// Stores a frame into a ring, from the beginning of page `page` on: status, next page, length, the bytes.
    pub fn store(&mut self, ring: &Ring, page: u8, status: u8, bytes: &[u8]) -> u8 {
        let next = ring.after(page, bytes.len());
        let [low, high] = (bytes.len() as u16).to_le_bytes();
        let head = [status, next, low, high];
        let mut at = u16::from(page) << 8;
        for byte in head.iter().chain(bytes) {
            self.put(at, *byte);
            at = ring.step(at);
        }
        next
    }
}

impl Ne2000 {
    /// One element of remote DMA: how many bytes it moves for an access of so many.
    fn element(&mut self, access: usize) -> u16 {
        let words = self.registers.dcr & DCR_WTS != 0;
        if access > 2 || words {
            // Words lie at even addresses.
            self.registers.rsar &= !1;
        }
        match access {
            3.. => 4,
            _ if words => 2,
            _ => 1,
        }
    }

    /// Remote DMA goes on by one byte.
    fn step(&mut self) {
        let registers = &mut self.registers;
        registers.rsar = wrapped(registers.rsar.wrapping_add(1), registers.pstart, registers.pstop);
    }

    /// So many bytes have been moved.
    fn moved(&mut self, bytes: u16) {
        let registers = &mut self.registers;
        registers.rbcr = registers.rbcr.saturating_sub(bytes);
        if registers.rbcr == 0 {
            registers.isr |= ISR_RDC;
        }
    }

    /// The data port is read. Without a transfer it gives all ones.
    pub(super) fn read_data(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(4) {
            chunk.fill(0xff);
            if self.registers.rbcr == 0
                || self.registers.cr & CR_RD_ABORT != 0
                || self.registers.cr & CR_RD_READ == 0
            {
                continue;
            }
            let bytes = self.element(chunk.len());
            chunk.fill(0);
            for n in 0..bytes {
                let byte = self.card.byte(self.registers.rsar);
                if let Some(place) = chunk.get_mut(usize::from(n)) {
                    *place = byte;
                }
                self.step();
            }
            self.moved(bytes);
        }
    }

    /// The data port is written. Without a transfer nothing comes of it.
    pub(super) fn write_data(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(4) {
            if self.registers.rbcr == 0 || self.registers.cr & CR_RD != CR_RD_WRITE {
                return;
            }
            let count = self.element(chunk.len());
            for n in 0..count {
                let byte = chunk.get(usize::from(n)).copied().unwrap_or(0);
                self.card.put(self.registers.rsar, byte);
                self.step();
            }
            self.moved(count);
        }
    }
}
