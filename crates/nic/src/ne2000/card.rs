//! What is on the card: PROM, 16 KiB of memory, the data port to both; the ring of received frames in the memory.

use std::cmp::Ordering;

use ioplane_network::Mac;

use super::Ne2000;
use super::registers::Registers;
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

/// The receive ring, which lies in card memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ring {
    start: u8,
    stop: u8,
}

impl Ring {
    /// What the registers say, if it is a ring in card memory that the next frame goes to.
    pub fn of(registers: &Registers) -> Option<Self> {
        let Registers { pstart: start, pstop: stop, curr, .. } = *registers;
        let sound =
            MEMORY_PAGE <= start && start < stop && stop <= MEMORY_END_PAGE && (start..stop).contains(&curr);
        sound.then_some(Ring { start, stop })
    }

    fn pages(&self) -> u16 {
        u16::from(self.stop - self.start)
    }

    /// Pages that a frame takes, with its head.
    fn takes(len: usize) -> u16 {
        ((len + usize::from(HEADER)).div_ceil(usize::from(PAGE))) as u16
    }

    /// Whether a frame of `len` bytes could ever have room.
    pub fn holds(&self, len: usize) -> bool {
        Ring::takes(len) < self.pages()
    }

    /// Whether a frame of `len` bytes has room, from page `curr` to before page `bnry`. With both the same it is empty; it never becomes
    /// so by being filled. Drivers put the boundary one page before what they read next, even if that is before the ring.
    pub fn room(&self, curr: u8, bnry: u8, len: usize) -> bool {
        let free = match bnry.cmp(&curr) {
            Ordering::Equal => self.pages(),
            Ordering::Greater => u16::from(bnry - curr).min(self.pages()),
            Ordering::Less => self.pages().saturating_sub(u16::from(curr - bnry)),
        };
        Ring::takes(len) < free
    }

    /// Whether there are frames that the guest has not read: it says by the boundary up to where it has, one page less.
    pub fn unread(&self, registers: &Registers) -> bool {
        let Registers { bnry, curr, .. } = *registers;
        let next = if bnry.wrapping_add(1) == self.stop { self.start } else { bnry.wrapping_add(1) };
        (self.start..self.stop).contains(&next) && bnry != curr && next != curr
    }

    fn after(&self, page: u8, len: usize) -> u8 {
        let next = u16::from(page) + Ring::takes(len);
        let next = if next >= u16::from(self.stop) { next - self.pages() } else { next };
        next as u8
    }

    fn step(&self, at: u16) -> u16 {
        wrapped(at.wrapping_add(1), self.start, self.stop)
    }
}

/// An address that wraps at the end of the ring.
fn wrapped(at: u16, start: u8, stop: u8) -> u16 {
    if at == u16::from(stop) << 8 { u16::from(start) << 8 } else { at }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_full_before_it_looks_empty() {
        let mut registers = Registers::new();
        assert_eq!(Ring::of(&registers), None, "at power-on");
        (registers.pstart, registers.pstop, registers.curr) = (0x46, 0x80, 0x47);
        let ring = Ring::of(&registers).expect("a ring");
        assert!(ring.room(0x47, 0x46, 1518), "57 pages");
        assert!(!ring.room(0x47, 0x4d, 1518) && ring.room(0x47, 0x4e, 1518), "it takes six");
        assert!(ring.room(0x47, 0x47, 1518), "empty");
        assert!(!ring.room(0x7f, 0x46, 200) && !ring.room(0x47, 0x48, 200), "one page is not enough");
        assert!(
            !ring.room(0x7e, 0x45, 200) && ring.room(0x7d, 0x45, 200),
            "the page before the ring is its last"
        );
        assert!(ring.room(0x47, 0xff, 1518) && !ring.room(0x7f, 0, 200));
        let unread = |bnry, curr| ring.unread(&Registers { bnry, curr, ..registers.clone() });
        assert!(!unread(0x45, 0x46) && !unread(0x7f, 0x46) && !unread(0x46, 0x47) && !unread(0x50, 0x50));
        assert!(unread(0x45, 0x47) && unread(0x7f, 0x47) && unread(0x46, 0x7f) && !unread(0x20, 0x47));
        assert_eq!(ring.after(0x7f, 200), 0x46);
        assert_eq!(ring.after(0x7e, 1518), 0x4a);
        assert!(!ring.holds(58 * 256));
        for (pstart, pstop, curr) in [
            (0x3f, 0x80, 0x47),
            (0x46, 0x81, 0x47),
            (0x47, 0x47, 0x47),
            (0x46, 0x80, 0x80),
            (0x46, 0x80, 0x45),
        ] {
            let wrong = Registers { pstart, pstop, curr, ..registers.clone() };
            assert_eq!(Ring::of(&wrong), None, "{pstart:x} {pstop:x} {curr:x}");
        }
    }
}
