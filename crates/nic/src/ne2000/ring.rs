//! The ring of received frames in card memory, in pages: how much room it has, what the guest has not read, where a frame ends.

use std::cmp::Ordering;

use super::spec::*;

/// The receive ring, which lies in card memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ring {
    start: u8,
    stop: u8,
}

impl Ring {
    /// The ring from page `start` to before page `stop`, if it lies in card memory and the next frame goes to a page of it.
    pub fn of(start: u8, stop: u8, curr: u8) -> Option<Self> {
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
    pub fn unread(&self, bnry: u8, curr: u8) -> bool {
        let next = if bnry.wrapping_add(1) == self.stop { self.start } else { bnry.wrapping_add(1) };
        (self.start..self.stop).contains(&next) && bnry != curr && next != curr
    }

    pub fn after(&self, page: u8, len: usize) -> u8 {
        let next = u16::from(page) + Ring::takes(len);
        let next = if next >= u16::from(self.stop) { next - self.pages() } else { next };
        next as u8
    }

    pub fn step(&self, at: u16) -> u16 {
        wrapped(at.wrapping_add(1), self.start, self.stop)
    }
}

/// An address that wraps at the end of the ring.
pub(super) fn wrapped(at: u16, start: u8, stop: u8) -> u16 {
    if at == u16::from(stop) << 8 { u16::from(start) << 8 } else { at }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_full_before_it_looks_empty() {
        assert_eq!(Ring::of(0, 0, 0), None, "at power-on");
        let ring = Ring::of(0x46, 0x80, 0x47).expect("a ring");
        assert!(ring.room(0x47, 0x46, 1518), "57 pages");
        assert!(!ring.room(0x47, 0x4d, 1518) && ring.room(0x47, 0x4e, 1518), "it takes six");
        assert!(ring.room(0x47, 0x47, 1518), "empty");
        assert!(!ring.room(0x7f, 0x46, 200) && !ring.room(0x47, 0x48, 200), "one page is not enough");
        assert!(
            !ring.room(0x7e, 0x45, 200) && ring.room(0x7d, 0x45, 200),
            "the page before the ring is its last"
        );
        assert!(ring.room(0x47, 0xff, 1518) && !ring.room(0x7f, 0, 200));
        let unread = |bnry, curr| ring.unread(bnry, curr);
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
            assert_eq!(Ring::of(pstart, pstop, curr), None, "{pstart:x} {pstop:x} {curr:x}");
        }
    }
}
