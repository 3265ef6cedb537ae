//! Base address registers, and which of their pages a guest touches without us.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::PAGE;

/// The address space that a BAR asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Memory below 4 GiB.
    Memory32,
    /// Memory anywhere; takes the next BAR's register too.
    Memory64,
    /// Ports.
    Port,
}

/// How a guest may touch pages that are not trapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Reads and writes go straight to the file.
    Mapped,
    /// Reads come from the file without an exit; writes are trapped. Who owns the file keeps it coherent. A host that cannot map
    /// a page for reading only traps all of it.
    Shadow,
}

/// Pages of a BAR that are backed by a file. Offsets and lengths are multiples of [`PAGE`], in bytes.
#[derive(Debug, Clone)]
pub struct Pages {
    /// First byte in the BAR.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
    /// What the guest may do there.
    pub touch: Touch,
    /// The file.
    pub file: Arc<OwnedFd>,
    /// First byte in the file.
    pub at: u64,
}

/// One base address register.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Bytes: a power of two, at least 16 of memory or 4 of ports.
    pub size: u64,
    /// Where.
    pub space: Space,
    /// Whether reading has no effect and writes may be merged.
    pub prefetchable: bool,
    pages: Vec<Pages>,
}

/// Why pages cannot be offered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// Not on page boundaries, empty, or beyond the end.
    #[error("pages {offset:#x}+{len:#x} do not lie in whole pages of a BAR of {size:#x} bytes")]
    Shape {
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
        /// Size of the BAR.
        size: u64,
    },
    /// Ports cannot be mapped.
    #[error("ports cannot be mapped into a guest")]
    Ports,
    /// Some of them are offered already.
    #[error("pages {offset:#x}+{len:#x} overlap others of the BAR")]
    Overlap {
        /// First byte.
        offset: u64,
        /// How many.
        len: u64,
    },
}

impl Bar {
    /// A BAR all of whose pages are trapped. `size` is rounded up to what a BAR can have.
    pub fn new(size: u64, space: Space) -> Self {
        let least = if space == Space::Port { 4 } else { 16 };
        Bar { size: size.max(least).next_power_of_two(), space, prefetchable: false, pages: Vec::new() }
    }

    /// Offers pages to the guest.
    pub fn with_pages(mut self, pages: Pages) -> Result<Self, PageError> {
        let (offset, len) = (pages.offset, pages.len);
        let end = offset.checked_add(len).filter(|end| *end <= self.size);
        let whole = [offset, len, pages.at].iter().all(|n| n.is_multiple_of(PAGE));
        let Some(end) = end.filter(|_| len > 0 && whole) else {
            return Err(PageError::Shape { offset, len, size: self.size });
        };
        if self.space == Space::Port {
            return Err(PageError::Ports);
        }
        if self.pages.iter().any(|p| p.offset < end && offset < p.offset + p.len) {
            return Err(PageError::Overlap { offset, len });
        }
        self.pages.push(pages);
        self.pages.sort_by_key(|p| p.offset);
        Ok(self)
    }

    /// The pages that are not trapped, by rising offset.
    pub fn pages(&self) -> &[Pages] {
        &self.pages
    }
}

/// The BARs of a function.
#[derive(Debug, Clone, Default)]
pub struct BarMap {
    bars: [Option<Bar>; 6],
}

impl BarMap {
    /// None.
    pub fn new() -> Self {
        BarMap::default()
    }

    /// With `bar` as number `index`.
    ///
    /// # Panics
    /// If there is no such number, or it is taken, by the upper half of a 64-bit BAR too: the function's author is wrong.
    pub fn with(mut self, index: u8, bar: Bar) -> Self {
        let at = usize::from(index);
        assert!(at < 6 && self.bars[at].is_none(), "BAR {index} is not free");
        let upper_half =
            at > 0 && self.bars[at - 1].as_ref().is_some_and(|below| below.space == Space::Memory64);
        assert!(!upper_half, "BAR {index} is the upper half of BAR {}", index - 1);
        assert!(
            bar.space != Space::Memory64 || at < 5 && self.bars[at + 1].is_none(),
            "BAR {index} wants two"
        );
        self.bars[at] = Some(bar);
        self
    }

    /// That BAR, if there is one.
    pub fn bar(&self, index: u8) -> Option<&Bar> {
        self.bars.get(usize::from(index))?.as_ref()
    }

    /// The same BARs, all of whose pages are trapped: no file is behind them.
    pub fn trapped(&self) -> BarMap {
        let mut bars = self.clone();
        for bar in bars.bars.iter_mut().flatten() {
            bar.pages.clear();
        }
        bars
    }

    /// The same BARs, but for these bytes of one, whose pages are trapped as a whole.
    pub fn trapped_in(&self, index: u8, from: u64, len: u64) -> BarMap {
        let (from, end) = (from & !(PAGE - 1), from.saturating_add(len).div_ceil(PAGE).saturating_mul(PAGE));
        let mut bars = self.clone();
        let Some(Some(bar)) = bars.bars.get_mut(usize::from(index)) else { return bars };
        for pages in std::mem::take(&mut bar.pages) {
            let last = pages.offset + pages.len;
            let before = (pages.offset, from.min(last));
            let behind = (end.max(pages.offset), last);
            for (offset, end) in [before, behind].into_iter().filter(|(offset, end)| offset < end) {
                let at = pages.at + (offset - pages.offset);
                bar.pages.push(Pages { offset, len: end - offset, at, ..pages.clone() });
            }
        }
        bars
    }

    /// All there are, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u8, &Bar)> {
        (0u8..).zip(&self.bars).filter_map(|(index, bar)| Some((index, bar.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(offset: u64, len: u64) -> Pages {
        let file = std::fs::File::open("/dev/null").expect("/dev/null");
        Pages { offset, len, touch: Touch::Shadow, file: Arc::new(file.into()), at: 0 }
    }

    #[test]
    fn pages_are_whole_inside_and_apart() {
        let bar = Bar::new(0x3000, Space::Memory32);
        assert_eq!(bar.size, 0x4000, "rounded up");
        let bar = bar.with_pages(pages(0x1000, 0x1000)).expect("whole");
        assert!(bar.clone().with_pages(pages(0, 0x1000)).is_ok(), "beside it");
        let refused = |offset, len| bar.clone().with_pages(pages(offset, len)).expect_err("refused");
        assert_eq!(refused(0, 0x2000), PageError::Overlap { offset: 0, len: 0x2000 });
        for (offset, len) in [(0x10, 0x1000), (0, 0), (0x4000, 0x1000), (u64::MAX - 0xfff, 0x1000)] {
            assert_eq!(refused(offset, len), PageError::Shape { offset, len, size: 0x4000 });
        }
        assert_eq!(
            Bar::new(0x1000, Space::Port).with_pages(pages(0, 0x1000)).expect_err("refused"),
            PageError::Ports
        );
    }

    #[test]
    fn pages_are_trapped_in_part() {
        let offered = |bar: Bar| BarMap::new().with(2, bar);
        let seen = |bars: BarMap| -> Vec<(u64, u64, u64)> {
            let pages = bars.bar(2).map(|bar| bar.pages().iter().map(|p| (p.offset, p.len, p.at)).collect());
            pages.unwrap_or_default()
        };
        let whole = || Pages { at: 0x10_0000, ..pages(0, 0x4000) };
        let bar = || offered(Bar::new(0x4000, Space::Memory32).with_pages(whole()).expect("whole"));
        assert_eq!(seen(bar().trapped_in(2, 0, 1)), [(0x1000, 0x3000, 0x10_1000)]);
        assert_eq!(
            seen(bar().trapped_in(2, 0x1800, 0x1000)),
            [(0, 0x1000, 0x10_0000), (0x3000, 0x1000, 0x10_3000)]
        );
        assert_eq!(seen(bar().trapped_in(2, 0x2000, u64::MAX)), [(0, 0x2000, 0x10_0000)]);
        for (index, from) in [(2, 0x4000), (2, 1 << 40), (3, 0), (9, 0)] {
            assert_eq!(seen(bar().trapped_in(index, from, 8)), seen(bar()), "{index} {from:#x}");
        }
        assert!(seen(bar().trapped_in(2, 0, 0x4000)).is_empty());
    }

    #[test]
    #[should_panic(expected = "upper half")]
    fn a_wide_bar_takes_two_numbers() {
        let wide = Bar::new(0x1000, Space::Memory64);
        let _ = BarMap::new().with(0, wide).with(1, Bar::new(0x100, Space::Port));
    }
}
