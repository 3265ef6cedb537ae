//! The buffers of requests in flight, kept by head without allocation after [`BufferLists::new`].
//!
//! Most requests have few buffers, which stand with their head. The lists of others lie in areas for [`SEG_MAX`] buffers. An area is taken
//! for as long as its request is in flight, the one that became free last first. So a queue uses memory for as many areas as it ever had
//! such requests in flight at once: the room for the others is address space that nobody has touched.

use ioplane_memory::GuestRange;

use super::spec::SEG_MAX;

/// Most buffers of a list without an area.
const FEW: usize = 2;
/// Most buffers of a list.
const MOST: usize = SEG_MAX as usize;
/// No area.
const NONE: u16 = u16::MAX;

#[derive(Debug, Clone, Copy)]
struct List {
    few: [GuestRange; FEW],
    len: u16,
    area: u16,
}

/// See the module.
#[derive(Debug)]
pub(super) struct BufferLists {
    by_head: Box<[List]>,
    /// Areas of `MOST` ranges, as many as were ever in use at once.
    areas: Vec<GuestRange>,
    /// Areas that no list has.
    free: Vec<u16>,
    in_use: u16,
}

impl BufferLists {
    /// For heads below `size`.
    pub(super) fn new(size: usize) -> Self {
        let empty = List { few: [GuestRange::default(); FEW], len: 0, area: NONE };
        BufferLists {
            by_head: vec![empty; size].into(),
            areas: Vec::with_capacity(size * MOST),
            free: Vec::with_capacity(size),
            in_use: 0,
        }
    }

    /// Keeps `ranges`, at most [`SEG_MAX`], in place of what `head` had.
    #[inline]
    pub(super) fn keep(&mut self, head: u16, ranges: &[GuestRange]) {
        self.release(head);
        let list = &mut self.by_head[usize::from(head)];
        list.len = ranges.len() as u16;
        match list.few.get_mut(..ranges.len()) {
            Some(few) => few.copy_from_slice(ranges),
            None => self.keep_many(head, ranges),
        }
    }

    fn keep_many(&mut self, head: u16, ranges: &[GuestRange]) {
        debug_assert!(ranges.len() <= MOST, "the parser refuses more");
        let area = self.free.pop().unwrap_or_else(|| {
            let next = self.areas.len() / MOST;
            // A head has one area at most, so the room made at first is enough.
            self.areas.resize((next + 1) * MOST, GuestRange::default());
            next as u16
        });
        self.in_use += 1;
        self.by_head[usize::from(head)].area = area;
        self.areas[usize::from(area) * MOST..][..ranges.len()].copy_from_slice(ranges);
    }

    /// What is kept for `head`.
    #[inline]
    pub(super) fn of(&self, head: u16) -> &[GuestRange] {
        let list = &self.by_head[usize::from(head)];
        let room = if list.area == NONE { &list.few } else { &self.areas[usize::from(list.area) * MOST..] };
        &room[..usize::from(list.len)]
    }

    /// The request of `head` is not in flight any more.
    #[inline]
    pub(super) fn release(&mut self, head: u16) {
        if self.in_use == 0 {
            return;
        }
        let list = &mut self.by_head[usize::from(head)];
        let area = std::mem::replace(&mut list.area, NONE);
        if area != NONE {
            list.len = 0;
            self.in_use -= 1;
            self.free.push(area);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranges(count: usize, first: u64) -> Vec<GuestRange> {
        (0..count).map(|number| GuestRange { gpa: first + number as u64, len: 512 }).collect()
    }

    #[test]
    fn each_head_has_its_own_list() {
        let mut lists = BufferLists::new(8);
        let counts = [1, MOST, FEW, FEW + 1, 0, MOST - 1, 7, 2];
        for (head, count) in (0..).zip(counts) {
            lists.keep(head, &ranges(count, u64::from(head) << 20));
        }
        for (head, count) in (0..).zip(counts) {
            assert_eq!(lists.of(head), ranges(count, u64::from(head) << 20), "{head}");
        }
        // Kept anew, without a release between.
        lists.keep(1, &ranges(2, 5));
        lists.keep(0, &ranges(MOST, 9));
        assert_eq!((lists.of(1), lists.of(0)), (&*ranges(2, 5), &*ranges(MOST, 9)));
        assert_eq!(lists.of(3), ranges(FEW + 1, 3 << 20));
    }

    #[test]
    fn memory_follows_what_is_in_flight_at_once() {
        let mut lists = BufferLists::new(128);
        let room = lists.areas.capacity();
        for turn in 0..1000u16 {
            for head in [turn % 128, (turn + 50) % 128] {
                lists.keep(head, &ranges(MOST, u64::from(head)));
            }
            for head in [turn % 128, (turn + 50) % 128] {
                assert_eq!(lists.of(head), ranges(MOST, u64::from(head)));
                lists.release(head);
            }
            // Nothing is kept twice.
            lists.release(turn % 128);
        }
        assert_eq!((lists.areas.len(), lists.in_use), (2 * MOST, 0));
        for head in 0..128 {
            lists.keep(head, &ranges(MOST, u64::from(head)));
        }
        assert_eq!(
            (lists.areas.len(), lists.areas.capacity()),
            (128 * MOST, room),
            "all at once: no allocation"
        );
    }
}
