//! Ranges of one guest's memory that the poller of another reads: a frame that goes from guest to guest in one copy.

#![allow(unsafe_code)]
// UNSAFETY: tests read spans whose map they hold, as a receiver does whose sender holds it.

use std::sync::Arc;

use crate::map::GuestMap;
use crate::view::{GuestRange, GuestView};
use crate::window::IoVec;

/// Most ranges that are lent at once: a packet of Linux has up to 17 pages, its first bytes, and the header before it.
pub const MOST_LENT_RANGES: usize = 20;

/// Checked ranges of a guest's memory, with the map that keeps them mapped. While this lives the spans may be loaded from, by any thread.
#[derive(Debug)]
pub struct LentRanges {
    map: Arc<GuestMap>,
    spans: [IoVec; MOST_LENT_RANGES],
    count: usize,
}

impl LentRanges {
    /// The spans, in order.
    #[inline]
    pub fn spans(&self) -> &[IoVec] {
        &self.spans[..self.count]
    }

    /// What keeps the spans mapped: all that is left to hold once they have been copied from here.
    #[inline]
    pub fn into_map(self) -> Arc<GuestMap> {
        self.map
    }
}

impl GuestView {
    /// Checks `ranges` to be lent, for loads alone. `None` if one is not in memory or if there are more than [`MOST_LENT_RANGES`].
    #[inline]
    pub fn lend(&self, ranges: impl Iterator<Item = GuestRange>) -> Option<LentRanges> {
        let (mut spans, mut count) = ([IoVec::EMPTY; MOST_LENT_RANGES], 0);
        for range in ranges {
            *spans.get_mut(count)? = self.iovec_to_load(range).ok()?;
            count += 1;
        }
        Some(LentRanges { map: self.map().clone(), spans, count })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Span;

    fn range(gpa: u64, len: u32) -> GuestRange {
        GuestRange { gpa, len }
    }

    #[test]
    fn what_is_lent_is_in_memory_and_stays_mapped() {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(8192).unwrap()));
        view.write(0x100, b"first").unwrap();
        view.write(0x1ffe, b"xy").unwrap();
        let lent = view.lend([range(0x100, 5), range(0x1ffe, 2)].into_iter()).unwrap();
        for outside in [range(0x1ffe, 3), range(u64::MAX, 2), range(1 << 40, 1)] {
            assert!(view.lend([range(0, 1), outside].into_iter()).is_none(), "{outside:?}");
        }
        assert!(view.lend(std::iter::repeat_n(range(0, 1), MOST_LENT_RANGES)).is_some());
        assert!(view.lend(std::iter::repeat_n(range(0, 1), MOST_LENT_RANGES + 1)).is_none());
        // The view goes; what was lent is there.
        drop(view);
        let other = GuestView::new(Arc::new(GuestMap::anonymous(8192).unwrap()));
        let [first, second] = lent.spans() else { panic!("two ranges were lent") };
        // SAFETY: `lent` holds the map.
        let (first, second) = unsafe { (Span::of_iovec(*first), Span::of_iovec(*second)) };
        assert_eq!((first.len(), second.len()), (5, 2));
        other.copy_from_span(0x10, &first, 1, 4).unwrap();
        other.copy_from_span(0x14, &second, 0, 2).unwrap();
        assert_eq!(other.bytes::<6>(0x10), Ok(*b"irstxy"));
        let mut out = [0; 2];
        first.read(3, &mut out);
        assert_eq!(&out, b"st");
        assert!(other.copy_from_span(8190, &first, 0, 5).is_err());
        for (offset, len) in [(0, 6), (5, 1), (usize::MAX, 2)] {
            let beyond = std::panic::catch_unwind(|| other.copy_from_span(0, &first, offset, len));
            assert!(beyond.is_err(), "{offset}+{len} is beyond the span");
        }
    }

    #[test]
    fn a_copy_from_another_guest_marks_the_dirty_log() {
        let map = Arc::new(GuestMap::anonymous(4 * 4096).unwrap());
        let from = GuestView::new(map.clone());
        let lent = from.lend([range(0x10, 16)].into_iter()).unwrap();
        let mut to = GuestView::new(map);
        let log = Arc::new(crate::DirtyLog::new(4 * 4096).unwrap());
        to.set_log(Some(log.clone()));
        // SAFETY: `lent` holds the map.
        let span = unsafe { Span::of_iovec(lent.spans()[0]) };
        to.copy_from_span(2 * 4096 - 4, &span, 0, 8).unwrap();
        assert_eq!(log.take(), [4096, 8192]);
    }
}
