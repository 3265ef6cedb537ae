//! What the table of a DP8390 cannot say: which bytes of the card's memory a transfer or a frame takes, where a receive ring lies, when it
//! is empty, and how its data port goes along (data sheet, sections 10 and 11, remote DMA).
//!
//! All of them are functions of register values; the tests beside them try all values, or all that differ.

use ioplane_model::{Condition, PortStep, Transfer, Way};

/// Bytes of a page.
const PAGE: u32 = 256;
/// Of DCR: every access to the data port moves two bytes at least.
const WTS: u32 = 0x01;
/// What may be read: the PROM with the station address, the packet memory. First address and end.
pub(crate) const READABLE: &[(u32, u32)] = &[(0x0000, 0x0020), (0x4000, 0x8000)];
/// What may be written: the packet memory.
pub(crate) const WRITABLE: &[(u32, u32)] = &[(0x4000, 0x8000)];

const TRANSFER: &[&str] = &["RSAR0", "RSAR1", "RBCR0", "RBCR1", "DCR", "PSTART", "PSTOP"];

/// The bytes that a command is about to read lie where guests may read.
pub(crate) static MAY_READ: Condition = Condition {
    name: "card-outside",
    words: "RSAR1:RSAR0 + RBCR1:RBCR0 may be read on the card",
    registers: TRANSFER,
    holds: |values| transfer(Way::Read, values).allowed(),
    refusal: |values| outside("reading", values[0] | values[1] << 8, values[2] | values[3] << 8),
};

/// The bytes that a command is about to write lie where guests may write.
pub(crate) static MAY_WRITE: Condition = Condition {
    name: "card-outside",
    words: "RSAR1:RSAR0 + RBCR1:RBCR0 may be written on the card",
    registers: TRANSFER,
    holds: |values| transfer(Way::Write, values).allowed(),
    refusal: |values| outside("writing", values[0] | values[1] << 8, values[2] | values[3] << 8),
};

/// A frame that is sent lies in the packet memory.
pub(crate) static FRAME_INSIDE: Condition = Condition {
    name: "card-page-outside",
    words: "page TPSR + TBCR1:TBCR0 bytes lie in the card's memory",
    registers: &["TPSR", "TBCR0", "TBCR1"],
    holds: |values| {
        let (start, count) = frame(values);
        inside(WRITABLE, start, start + count)
    },
    refusal: |values| {
        let (start, count) = frame(values);
        outside("sending", start, count)
    },
};

/// The receive ring is one, and lies in the packet memory.
pub(crate) static RING_INSIDE: Condition = Condition {
    name: "card-ring",
    words: "PSTART is below PSTOP, both in the card's memory",
    registers: &["PSTART", "PSTOP"],
    holds: |values| values[0] < values[1] && inside(WRITABLE, values[0] * PAGE, values[1] * PAGE),
    refusal: |values| {
        let (first, end) = (values[0], values[1]);
        format!("PSTART {first:#04x} and PSTOP {end:#04x} are no range of pages of the card's memory")
    },
};

/// The page that is received into next lies in the ring.
pub(crate) static CURRENT_INSIDE: Condition = Condition {
    name: "card-page",
    words: "CURR is a page of the receive ring",
    registers: &["CURR", "PSTART", "PSTOP"],
    holds: |values| (values[1]..values[2]).contains(&values[0]),
    refusal: |values| {
        let (page, first, end) = (values[0], values[1], values[2]);
        format!("CURR {page:#04x} is outside the card's ring {first:#04x} to {end:#04x}")
    },
};

/// The guest has read every frame: the boundary is one page behind the current one. Of a ring that is none: nothing can be in it. A
/// ring whose boundary *is* the current page may be full or empty, depending on the driver's habits, and counts as full.
pub(crate) static RING_EMPTY: Condition = Condition {
    name: "card-ring-empty",
    words: "the card's ring was read empty",
    registers: &["PSTART", "PSTOP", "BNRY", "CURR"],
    holds: |values| {
        let (first, end, boundary, current) = (values[0], values[1], values[2], values[3]);
        let next = if boundary + 1 >= end { first } else { boundary + 1 };
        first >= end || next == current
    },
    refusal: |values| format!("BNRY {:#04x} has not followed CURR {:#04x}", values[2], values[3]),
};

/// To fill the memory through the port: it goes from the end of a ring to its beginning, and leaves out what lies behind the end.
pub(crate) static NO_RING: Condition = Condition {
    name: "card-ring-set",
    words: "PSTART is PSTOP: the data port reaches all of the card's memory",
    registers: &["PSTART", "PSTOP"],
    holds: |values| values[0] == values[1],
    refusal: |_| {
        "the data port does not reach all of the card's memory: it goes from the end of the ring to its beginning"
            .to_owned()
    },
};

/// The memory is filled in words.
pub(crate) static IN_WORDS: Condition = Condition {
    name: "card-bytes",
    words: "DCR says words: the card's memory is filled in words",
    registers: &["DCR"],
    holds: |values| values[0] & WTS != 0,
    refusal: |_| {
        "the card's memory is filled in words, and who was there may have left it in bytes".to_owned()
    },
};

/// The registers by which [`step`] decides.
pub(crate) const STEP: &[&str] = &["DCR", "PSTART", "PSTOP"];

/// How the port goes along: none are moved that the guest may not have, for there are cards that go on behind the count. And the end of
/// the ring is met exactly: there are cards that pass it otherwise.
pub(crate) fn step(transfer: Transfer, registers: &[u32], wanted: usize, width: usize) -> Option<PortStep> {
    let range =
        Range { transfer, words: registers[0] & WTS != 0, ring: (registers[1] * PAGE, registers[2] * PAGE) };
    let Transfer { way, address, left } = transfer;
    let (first, end) = range.ring;
    let element = if range.words { 2 } else { 1 };
    let four = || left >= 4 || Range { transfer: Transfer { way, address, left: 4 }, ..range }.allowed();
    let width = match wanted {
        0 => return None,
        4.. if (address >= end || end - address >= 4) && four() => 4,
        // A part of a wider access goes in elements.
        _ if width > 2 => wanted.min(element),
        _ => wanted,
    };
    let moved = if width >= 4 { 4 } else { element as u32 };
    let next = address + moved;
    let address = if address < end && next >= end { first + (next - end) } else { next & 0xffff };
    Some(PortStep { width, moved, after: Transfer { way, address, left: left.saturating_sub(moved) } })
}

/// A transfer, and what the card makes of it.
#[derive(Debug, Clone, Copy)]
struct Range {
    transfer: Transfer,
    /// It moves two bytes at a time.
    words: bool,
    /// The receive ring in bytes, first and end: an address that reaches its end goes on at its beginning, even where the two are no
    /// ring.
    ring: (u32, u32),
}

/// What a command is about to begin, by the values of [`TRANSFER`].
fn transfer(way: Way, values: &[u32]) -> Range {
    let (address, left) = (values[0] | values[1] << 8, values[2] | values[3] << 8);
    Range {
        transfer: Transfer { way, address, left },
        words: values[4] & WTS != 0,
        ring: (values[5] * PAGE, values[6] * PAGE),
    }
}

impl Range {
    /// Whether all of it lies where a guest may go. No bytes are always allowed. From an odd address, in words, some cards never meet the
    /// end of the ring.
    fn allowed(self) -> bool {
        let Transfer { way, address: start, left } = self.transfer;
        let ranges = if way == Way::Read { READABLE } else { WRITABLE };
        let count = if self.words { left.next_multiple_of(2) } else { left };
        let ((first, last), end) = (self.ring, start + count);
        if count == 0 {
            return true;
        }
        if start >= last || end <= last {
            return inside(ranges, start, end);
        }
        // It passes the end of the ring, and at most once round it. A ring that begins behind its end is met once.
        let over = end - last;
        let all_round = first < last && over > last - first;
        let odd = self.words && start % 2 == 1;
        !odd && !all_round && inside(ranges, start, last) && inside(ranges, first, first + over)
    }
}

/// First byte and length of the frame to be sent. A card that is to send nothing looks at the page all the same.
fn frame(values: &[u32]) -> (u32, u32) {
    (values[0] * PAGE, (values[1] | values[2] << 8).max(1))
}

fn inside(ranges: &[(u32, u32)], from: u32, to: u32) -> bool {
    ranges.iter().any(|(low, high)| *low <= from && to <= *high)
}

fn outside(doing: &str, start: u32, count: u32) -> String {
    format!("{doing} card memory {start:#06x}+{count:#x}, which is not the guest's")
}

#[cfg(test)]
#[path = "functions_tests.rs"]
mod tests;
