//! Views: how a poller reads and writes guest memory.

#![allow(unsafe_code)]
// UNSAFETY: raw copies and atomics on spans that were checked against a mapping kept alive by an `Arc` beside them.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::log::DirtyLog;
use crate::map::{GuestMap, MemoryRegion};
use crate::mutation::{Invariant, removed};
use crate::prefetch::{LINE, ask_for_loads, ask_for_stores, prefetch_lines};
use crate::window::{IoVec, Span, Window, copy_once};

/// What a guest or its memory did wrong. A value: the queue that met it stops, is counted by name, and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GuestFault {
    /// An address range that no region holds whole.
    #[error("guest address {gpa:#x}+{len:#x} is outside the guest's memory")]
    OutsideMemory {
        /// First byte.
        gpa: u64,
        /// Length in bytes.
        len: u64,
    },
    /// A ring part that is not aligned as the specification wants.
    #[error("guest address {gpa:#x} is not aligned to {align} bytes")]
    Misaligned {
        /// The address.
        gpa: u64,
        /// What it should be a multiple of.
        align: u64,
    },
    /// Bytes that no device may store into.
    #[error("guest address {gpa:#x}+{len:#x} is in memory that may only be read")]
    ReadOnly {
        /// First byte.
        gpa: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The memory behind a region went away.
    #[error("a memory region shrank under us")]
    MemoryShrank,
}

/// Guest physical addresses `gpa .. gpa + len`, unchecked. Bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GuestRange {
    /// First byte.
    pub gpa: u64,
    /// Length in bytes.
    pub len: u32,
}

/// One poller's view of one guest: the map, and the dirty log while there is one.
///
/// Every store to guest memory by ioplane goes through [`GuestView::wrote`]: the stores here call it themselves, and
/// whoever lets the kernel or a device write (a read from a disk) calls it when that has ended, well or badly.
#[derive(Debug, Clone)]
pub struct GuestView {
    map: Arc<GuestMap>,
    log: Option<Arc<DirtyLog>>,
}

impl GuestView {
    /// A view of `map`, without a log.
    pub fn new(map: Arc<GuestMap>) -> Self {
        GuestView { map, log: None }
    }

    /// The map in force. I/O in flight keeps a clone of it, so that the memory stays mapped under the kernel's hands.
    #[inline]
    pub fn map(&self) -> &Arc<GuestMap> {
        &self.map
    }

    /// Takes another map: every range of the old one that is still in use must be in it.
    pub fn set_map(&mut self, map: Arc<GuestMap>) {
        self.map = map;
    }

    /// Turns the dirty log on or off.
    pub fn set_log(&mut self, log: Option<Arc<DirtyLog>>) {
        self.log = log;
    }

    /// The dirty log in force.
    pub fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref()
    }

    #[inline]
    fn find(&self, gpa: u64, len: u64) -> Result<(&MemoryRegion, usize), GuestFault> {
        match self.map.holding(gpa) {
            Some((region, at)) if len <= region.len - at => {
                // Zeros that nobody wrote are of no use, and what is stored there would become memory of ours.
                if region.poisoned() { Err(GuestFault::MemoryShrank) } else { Ok((region, at as usize)) }
            }
            _ => Err(GuestFault::OutsideMemory { gpa, len }),
        }
    }

    /// As [`GuestView::find`], for bytes that may be stored into.
    #[inline]
    fn find_writable(&self, gpa: u64, len: u64) -> Result<(&MemoryRegion, usize), GuestFault> {
        let (region, at) = self.find(gpa, len)?;
        if region.writable { Ok((region, at)) } else { Err(GuestFault::ReadOnly { gpa, len }) }
    }

    /// A window on `len` bytes at `gpa`, aligned to `align` (a power of two, at most a page), that may be stored into.
    pub fn window(&self, gpa: u64, len: u64, align: u64) -> Result<Window, GuestFault> {
        let (region, at) = self.find_writable(gpa, len)?;
        let start = region.skip + at;
        if !gpa.is_multiple_of(align) || !(start as u64).is_multiple_of(align) {
            return Err(GuestFault::Misaligned { gpa, align });
        }
        Ok(Window::new(region.mapping.clone(), start, len as usize, gpa))
    }

    /// As [`GuestView::window`], of any alignment, while the view is borrowed.
    #[inline]
    pub fn span(&self, gpa: u64, len: u64) -> Result<Span<'_>, GuestFault> {
        let (region, at) = self.find_writable(gpa, len)?;
        // SAFETY: inside the mapping, by find; the map that is borrowed with the view holds the mapping.
        Ok(unsafe { Span::new(NonNull::new_unchecked(region.base().add(at)), len as usize) })
    }

    /// Checks `range` and gives it as the kernel wants it, which may store into it: what may only be read is refused. The span stays valid while [`GuestView::map`] (a clone of it) lives.
    #[inline]
    pub fn iovec(&self, range: GuestRange) -> Result<IoVec, GuestFault> {
        let (region, at) = self.find_writable(range.gpa, u64::from(range.len))?;
        // SAFETY: inside the mapping: skip + at + len is at most its length.
        let base = unsafe { region.base().add(at) };
        Ok(IoVec(libc::iovec { iov_base: base.cast(), iov_len: range.len as usize }))
    }

    /// As [`GuestView::iovec`], of bytes that are only loaded.
    #[inline]
    pub(crate) fn iovec_to_load(&self, range: GuestRange) -> Result<IoVec, GuestFault> {
        let (region, at) = self.find(range.gpa, u64::from(range.len))?;
        // SAFETY: inside the mapping, by find.
        let base = unsafe { region.base().add(at) };
        Ok(IoVec(libc::iovec { iov_base: base.cast(), iov_len: range.len as usize }))
    }

    /// Asks the processor to fetch the first bytes of `range`, at most two lines, for loads that come soon. A hint: an
    /// address outside memory is ignored.
    #[inline]
    pub fn prefetch_load(&self, range: GuestRange) {
        self.each_line(range, ask_for_loads);
    }

    /// As [`GuestView::prefetch_load`], for stores: takes the lines from the guest's processor while we do something else.
    #[inline]
    pub fn prefetch_store(&self, range: GuestRange) {
        self.each_line(range, ask_for_stores);
    }

    /// For a store to `current` that goes on at the beginning of `next`: asks for eight lines there, if `current` is long enough for them to come
    /// meanwhile. The processor finds by itself what follows a store, but not where it goes on in another page.
    #[inline]
    pub fn prefetch_store_after(&self, current: GuestRange, next: Option<&GuestRange>) {
        const LONG: u32 = 1024;
        const LINES: usize = 8;
        // A loop of its own: with `each_line` for both, frames of 1500 bytes were 3 to 7 % slower.
        let Some(next) = next.filter(|_| current.len >= LONG) else { return };
        if let Ok((region, at)) = self.find(next.gpa, next.len.into()) {
            // SAFETY: inside the mapping, by find.
            let first = unsafe { region.base().add(at) };
            for line in 0..LINES.min((next.len as usize).div_ceil(LINE as usize)) {
                // SAFETY: as above.
                ask_for_stores(unsafe { first.add(line * LINE as usize) });
            }
        }
    }

    #[inline(always)]
    fn each_line(&self, range: GuestRange, ask: impl Fn(*const u8)) {
        if let Ok((region, at)) = self.find(range.gpa, range.len.into()) {
            // SAFETY: inside the mapping, by find.
            let first = unsafe { region.base().add(at) };
            ask(first);
            if range.len > LINE {
                // SAFETY: as above.
                ask(unsafe { first.add(LINE as usize) });
            }
        }
    }

    /// Asks for the first lines of `range`, at most eight, for loads or for stores: for who copies a page from or to there soon.
    #[inline]
    pub fn prefetch_lines(&self, range: GuestRange, stores: bool) {
        if let Ok((region, at)) = self.find(range.gpa, range.len.into()) {
            // SAFETY: inside the mapping, by find.
            prefetch_lines(unsafe { region.base().add(at) }, range.len as usize, stores);
        }
    }

    /// Copies guest bytes at `gpa` into `out`.
    #[inline]
    pub fn read(&self, gpa: u64, out: &mut [u8]) -> Result<(), GuestFault> {
        let (region, at) = self.find(gpa, out.len() as u64)?;
        // SAFETY: source checked by find, destination is ours.
        unsafe { copy_once(region.base().add(at), out) };
        Ok(())
    }

    /// Copies `N` guest bytes at `gpa`.
    #[inline]
    pub fn bytes<const N: usize>(&self, gpa: u64) -> Result<[u8; N], GuestFault> {
        let mut out = [0; N];
        self.read(gpa, &mut out).map(|()| out)
    }

    /// Copies `bytes` to guest address `gpa`, and marks it.
    #[inline]
    pub fn write(&self, gpa: u64, bytes: &[u8]) -> Result<(), GuestFault> {
        let (region, at) = self.find_writable(gpa, bytes.len() as u64)?;
        // SAFETY: destination checked by find, source is ours.
        unsafe {
            let to = region.base().add(at);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
        self.wrote(gpa, bytes.len() as u64);
        Ok(())
    }

    /// Copies from another mapping of ours (a memory disk) to guest address `gpa`, and marks it.
    #[inline]
    pub fn copy_from(&self, gpa: u64, from: &Window, offset: usize, len: usize) -> Result<(), GuestFault> {
        let (region, at) = self.find_writable(gpa, len as u64)?;
        let source = from.span(offset, len);
        // SAFETY: both checked; `copy` allows them to overlap, which a hostile front end can arrange by mapping twice.
        unsafe { std::ptr::copy(source, region.base().add(at), len) };
        self.wrote(gpa, len as u64);
        Ok(())
    }

    /// Copies from a span of another guest's memory to guest address `gpa`, and marks it. Reaching beyond the span panics.
    #[inline]
    pub fn copy_from_span(
        &self,
        gpa: u64,
        from: &Span<'_>,
        offset: usize,
        len: usize,
    ) -> Result<(), GuestFault> {
        let (region, at) = self.find_writable(gpa, len as u64)?;
        let source = from.part(offset, len);
        // SAFETY: both checked; `copy` allows them to overlap, which two front ends can arrange by sharing a file.
        unsafe { std::ptr::copy(source, region.base().add(at), len) };
        self.wrote(gpa, len as u64);
        Ok(())
    }

    /// Copies guest bytes at `gpa` to a mapping of ours (a memory disk).
    #[inline]
    pub fn copy_to(&self, gpa: u64, to: &Window, offset: usize, len: usize) -> Result<(), GuestFault> {
        let (region, at) = self.find(gpa, len as u64)?;
        let target = to.span(offset, len);
        // SAFETY: as in copy_from.
        unsafe { std::ptr::copy(region.base().add(at), target, len) };
        Ok(())
    }

    /// Stores a little-endian number into a window of this guest, Release, and marks it.
    #[inline]
    pub fn store_u16(&self, window: &Window, offset: usize, value: u16) {
        window.put_u16(offset, value);
        self.wrote(window.gpa() + offset as u64, 2);
    }

    /// As [`GuestView::store_u16`], 32 bits.
    #[inline]
    pub fn store_u32(&self, window: &Window, offset: usize, value: u32) {
        window.put_u32(offset, value);
        self.wrote(window.gpa() + offset as u64, 4);
    }

    /// As [`GuestView::store_u16`], 64 bits.
    #[inline]
    pub fn store_u64(&self, window: &Window, offset: usize, value: u64) {
        window.put_u64(offset, value);
        self.wrote(window.gpa() + offset as u64, 8);
    }

    /// Stores a used element (`id`, `len`: two little-endian words, 4-byte aligned) and marks it.
    #[inline]
    pub fn store_u32_pair(&self, window: &Window, offset: usize, first: u32, second: u32) {
        window.put_u32(offset, first);
        window.put_u32(offset + 4, second);
        self.wrote(window.gpa() + offset as u64, 8);
    }

    /// Says that `len` bytes at `gpa` have been stored: the one place that marks the dirty log (invariant 6). Call it after the
    /// store; for asynchronous reads when they have ended, the failed ones too.
    #[inline]
    pub fn wrote(&self, gpa: u64, len: u64) {
        if let Some(log) = &self.log
            && !removed(Invariant::MarksStores)
        {
            log.mark(gpa, len);
        }
    }

    /// Whether a region, or the dirty log, lost pages since it was mapped: ask after each batch. (Single accesses are refused from
    /// then on; windows have no check of their own.)
    #[inline]
    pub fn check(&self) -> Result<(), GuestFault> {
        let log = self.log.as_ref().is_some_and(|log| log.poisoned());
        if self.map.poisoned() || log { Err(GuestFault::MemoryShrank) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mapping, RegionSpec};
    use std::os::fd::OwnedFd;

    #[test]
    fn what_may_only_be_read_is_only_read() {
        let source = Mapping::anonymous("guest", 8192).unwrap();
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&source.file()));
        // A descriptor that itself is for reading alone.
        let file: OwnedFd = std::fs::File::open(path).unwrap().into();
        let other = source.file().try_clone_to_owned().unwrap();
        let spec = |gpa, file| RegionSpec { gpa, len: 4096, user: gpa, offset: 0, file };
        let rom = MemoryRegion::map_read_only(spec(0x1000, file)).unwrap();
        let ram = MemoryRegion::map(spec(0x2000, other)).unwrap();
        assert!(!rom.writable() && ram.writable() && !rom.is_same(&ram));
        let view = GuestView::new(Arc::new(GuestMap::new(vec![rom, ram]).unwrap()));
        view.write(0x2010, b"abcd").unwrap();
        assert_eq!(view.bytes::<4>(0x1010), Ok(*b"abcd"));
        let refused = GuestFault::ReadOnly { gpa: 0x1010, len: 4 };
        let window = view.window(0x2000, 64, 4).unwrap();
        assert_eq!(view.write(0x1010, b"efgh"), Err(refused));
        assert_eq!(view.copy_from(0x1010, &window, 0, 4), Err(refused));
        assert_eq!(view.window(0x1010, 4, 4).err(), Some(refused));
        assert_eq!(view.iovec(GuestRange { gpa: 0x1010, len: 4 }).err(), Some(refused));
        view.copy_to(0x1010, &window, 0x20, 4).unwrap();
        assert_eq!(view.bytes::<4>(0x2020), Ok(*b"abcd"));
    }

    #[test]
    fn a_span_is_checked_as_a_window_is() {
        let view = GuestView::new(Arc::new(GuestMap::anonymous(8192).unwrap()));
        view.write(0x103, &[1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        view.write(0x200, &[3, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert_eq!(view.span(0x100, 64).unwrap().pair(3), (1, 2), "not aligned");
        assert_eq!(view.span(0x200, 16).unwrap().pair(0), (3, 4));
        for (gpa, len) in [(8192, 1), (8191, 2), (u64::MAX, 2), (0, 8193)] {
            assert_eq!(view.span(gpa, len).err(), view.window(gpa, len, 1).err(), "{gpa:#x}+{len:#x}");
            assert!(view.span(gpa, len).is_err());
        }
        for offset in [1, 16, usize::MAX] {
            let beyond = std::panic::catch_unwind(|| view.span(0x200, 16).unwrap().pair(offset));
            assert!(beyond.is_err(), "offset {offset} is beyond the span");
        }
        // Hints for any address are ignored, or harmless.
        for gpa in [0, 8000, 8192, u64::MAX] {
            view.prefetch_lines(GuestRange { gpa, len: 4096 }, true);
            view.prefetch_lines(GuestRange { gpa, len: 192 }, false);
        }
    }
}
