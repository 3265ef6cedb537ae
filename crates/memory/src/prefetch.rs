//! Hints to the processor's caches. None of them can fault, whatever address it names.

#![allow(unsafe_code)]
// UNSAFETY: prefetch instructions take raw addresses, and do nothing where there is no memory.

/// Bytes of a line of a cache.
pub(crate) const LINE: u32 = 64;

/// Asks for the first of the `len` bytes at `first`, for loads or for stores.
#[inline]
pub(crate) fn prefetch_lines(first: *const u8, len: usize, stores: bool) {
    const LINES: usize = 8;
    for line in 0..LINES.min(len.div_ceil(LINE as usize)) {
        let line = first.wrapping_add(line * LINE as usize);
        if stores { ask_for_stores(line) } else { ask_for_loads(line) }
    }
}

/// Asks for the line at `line` to be loaded from.
#[inline(always)]
pub(crate) fn ask_for_loads(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch cannot fault and changes nothing.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
}

/// Asks for the line at `line` to be stored to.
#[inline(always)]
pub(crate) fn ask_for_stores(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch cannot fault and changes nothing; processors without PREFETCHW treat it as a no-op. The
    // intrinsic would become a prefetch for loads, since the compiler may not assume that there is another.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
    }
}
