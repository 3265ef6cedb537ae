//! The functions, with all values, or with all that differ: nothing passes that is not the guest's.

use ioplane_model::{Condition, PortStep, Transfer, Way};

use super::{
    CURRENT_INSIDE, FRAME_INSIDE, IN_WORDS, MAY_READ, MAY_WRITE, NO_RING, READABLE, RING_EMPTY, RING_INSIDE,
    Range, WRITABLE, inside, step,
};

/// A transfer by the values of a condition.
fn may(condition: &Condition, start: u32, count: u32, words: bool, ring: (u32, u32)) -> bool {
    let values =
        [start & 0xff, start >> 8, count & 0xff, count >> 8, 0x48 | u32::from(words), ring.0, ring.1];
    let holds = (condition.holds)(&values);
    let text = (condition.refusal)(&values);
    assert!(text.contains(&format!("{start:#06x}+{count:#x}")), "{text}");
    holds
}

fn byte(ranges: &[(u32, u32)], at: u32) -> bool {
    inside(ranges, at, at + 1)
}

/// Pages at which something begins or ends, and some beside them.
const PAGES: [u32; 7] = [0x00, 0x3f, 0x40, 0x4c, 0x7f, 0x80, 0xff];

#[test]
fn transfers_of_whole_pages_and_their_ends() {
    let ring = (0x4c, 0x80);
    assert!(may(&MAY_READ, 0, 32, false, ring), "the PROM");
    assert!(!may(&MAY_WRITE, 0, 32, false, ring));
    assert!(!may(&MAY_READ, 0, 33, false, ring));
    assert!(may(&MAY_READ, 0x7f04, 1500, false, ring), "it goes on at 4C00");
    assert!(!may(&MAY_READ, 0x7f04, 1500, false, (0x80, 0x40)), "no ring, and past the end");
    assert!(!may(&MAY_READ, 0x4c00, 0x3400 + 0x3401, false, ring), "twice round");
    assert!(!may(&MAY_READ, 0x7f00, 0x200, false, (0x10, 0x80)), "the ring begins outside");
    assert!(!may(&MAY_READ, 0x8000, 1, false, ring));
    assert!(may(&MAY_WRITE, 0xffff, 0, true, ring), "nothing");
    assert!(may(&MAY_READ, 0x7f05, 0x200, false, ring) && !may(&MAY_READ, 0x7f05, 0x200, true, ring), "odd");
}

/// What passes is walked byte by byte, as the card goes: around the end of the ring, in words where it moves words.
#[test]
fn no_transfer_that_passes_touches_a_byte_that_is_not_the_guests() {
    let mut passed = 0u32;
    for (condition, ranges) in [(&MAY_READ, READABLE), (&MAY_WRITE, WRITABLE)] {
        for (first, last) in PAGES.iter().flat_map(|first| PAGES.iter().map(move |last| (*first, *last))) {
            for near in [0x0000, 0x0020, 0x4000, 0x8000, first << 8, last << 8, 0x1_0000] {
                for start in (near.max(4) - 4..near + 4).filter(|start| *start < 0x1_0000) {
                    let run = longest(ranges, start, (first << 8, last << 8));
                    for count in [1, 2, 3, 4, 5, 0x20, 0xff, 0x100, 0x4000, run, run + 1] {
                        for words in [false, true] {
                            if count > 0xffff || !may(condition, start, count, words, (first, last)) {
                                continue;
                            }
                            passed += 1;
                            let moves = if words { count.next_multiple_of(2) } else { count };
                            assert!(
                                moves <= run,
                                "{}: {start:#x}+{count:#x}, words {words}, ring {first:#x} to {last:#x}: {run:#x}",
                                condition.words
                            );
                        }
                    }
                }
            }
        }
    }
    assert!(passed > 1_000, "{passed}");
}

/// How many bytes from `start` on are the guest's, as a card goes.
fn longest(ranges: &[(u32, u32)], start: u32, ring: (u32, u32)) -> u32 {
    let (mut at, mut run) = (start, 0);
    while run < 0xffff && byte(ranges, at) {
        (at, run) = (at + 1, run + 1);
        at = if at == ring.1 { ring.0 } else { at & 0xffff };
    }
    run
}

/// However wide the guest's accesses are, what the port moves for them is what was checked.
#[test]
fn the_port_moves_what_was_checked_and_meets_the_end_of_the_ring() {
    let mut moved = 0u64;
    for (first, last) in [(0x4c, 0x80), (0x46, 0x60), (0x80, 0x40), (0x00, 0x00), (0x40, 0x41)] {
        for words in [false, true] {
            for start in [0x4000, 0x40fd, 0x40fe, 0x40ff, 0x5ffa, 0x5ffb, 0x7ffc, 0x7ffd, 0x7ffe, 0x7fff, 0] {
                for left in 1..0x60 {
                    for way in [Way::Read, Way::Write] {
                        let transfer = Transfer { way, address: start, left };
                        let ring = (first << 8, last << 8);
                        if !(Range { transfer, words, ring }).allowed() {
                            continue;
                        }
                        for width in [1, 2, 3, 4, 8] {
                            moved += played(transfer, words, (first, last), width);
                        }
                    }
                }
            }
        }
    }
    assert!(moved > 100_000, "{moved}");
}

/// A transfer to its end, by accesses of one width. How many bytes moved.
fn played(mut transfer: Transfer, words: bool, ring: (u32, u32), width: usize) -> u64 {
    let ranges = if transfer.way == Way::Read { READABLE } else { WRITABLE };
    let registers = [u32::from(words), ring.0, ring.1];
    let (mut sum, left) = (0, transfer.left);
    while transfer.left > 0 {
        let mut wanted = width;
        while let Some(PortStep { width: bytes, moved, after }) =
            Some(()).filter(|()| transfer.left > 0).and_then(|()| step(transfer, &registers, wanted, width))
        {
            assert!((1..=wanted).contains(&bytes) && moved >= 1, "{transfer:?} {bytes} of {wanted}");
            assert!(
                inside(ranges, transfer.address, transfer.address + moved),
                "{transfer:?}, {moved} at once, ring {ring:x?}, words {words}"
            );
            // It never passes the end of the ring in one access.
            let end = ring.1 << 8;
            assert!(transfer.address >= end || transfer.address + moved <= end, "{transfer:?}");
            assert!(after.left < transfer.left && byte(ranges, transfer.address));
            sum += u64::from(moved);
            transfer = after;
            wanted -= bytes;
        }
    }
    // The last access may have more bytes than are left, all of them the guest's.
    let most = left + if width >= 4 { 3 } else { 1 };
    assert!(sum >= u64::from(left) && sum <= u64::from(most), "{sum} of {left}");
    sum
}

#[test]
fn frames_and_rings_of_all_pages() {
    for page in 0..=0xff {
        for count in [0u32, 1, 60, 0xff, 0x100, 0x101, 1518, 0x4000, 0x4001, 0xffff] {
            let (start, end) = (page << 8, (page << 8) + count.max(1));
            let fits = (start..end).all(|at| byte(WRITABLE, at));
            assert_eq!((FRAME_INSIDE.holds)(&[page, count & 0xff, count >> 8]), fits, "{page:#x}+{count:#x}");
        }
        for end in 0..=0xff {
            let sound = page < end && (page..end).all(|page| (0x40..0x80).contains(&page));
            assert_eq!((RING_INSIDE.holds)(&[page, end]), sound, "{page:#x} to {end:#x}");
            assert_eq!((NO_RING.holds)(&[page, end]), page == end);
            for current in 0..=0xff {
                let within = page <= current && current < end;
                assert_eq!((CURRENT_INSIDE.holds)(&[current, page, end]), within);
            }
        }
        assert_eq!((IN_WORDS.holds)(&[page]), page & 1 == 1);
    }
}

/// A ring in which a frame was put is not empty before the boundary has followed, wherever they are.
#[test]
fn a_ring_is_empty_once_the_boundary_has_followed() {
    let empty = |first, end, boundary, current| (RING_EMPTY.holds)(&[first, end, boundary, current]);
    for first in 0..=0xffu32 {
        for end in first + 1..=0xff {
            for boundary in [first, first + 1, end - 1, 0, 0xff] {
                let next = if (first..end - 1).contains(&boundary) { boundary + 1 } else { first };
                if boundary < first || boundary >= end {
                    // A boundary outside is one before the ring, if it is there.
                    assert!(boundary + 1 != first || empty(first, end, boundary, first));
                    continue;
                }
                for current in first..end {
                    assert_eq!(
                        empty(first, end, boundary, current),
                        current == next,
                        "{first:x} {end:x} {boundary:x} {current:x}"
                    );
                }
            }
        }
        assert!(empty(first, first, 7, 9), "of a ring that is none");
    }
}
