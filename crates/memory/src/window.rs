//! Fixed spans of shared memory: loads of one's own, and what the kernel wants to be told.

#![allow(unsafe_code)]
// UNSAFETY: raw copies and atomics on spans that were checked against a mapping kept alive by an `Arc` beside them.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::mapping::Mapping;

/// A checked span of guest memory in the shape that the kernel wants (`struct iovec`).
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct IoVec(pub(crate) libc::iovec);

// SAFETY: an address and a length; using them needs an unsafe block of its own.
unsafe impl Send for IoVec {}

impl IoVec {
    /// An empty span, to fill tables with.
    pub const EMPTY: IoVec = IoVec(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });

    /// Address of the first byte.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether the span has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }
}

/// A fixed span of shared memory, checked once, kept mapped while it lives. Loads are its own; stores to guest memory go
/// through [`GuestView`](crate::GuestView), which marks them. Offsets beyond the span panic: they are computed by us, never by a guest.
#[derive(Debug, Clone)]
pub struct Window {
    mapping: Arc<Mapping>,
    /// The first byte, in `mapping`.
    base: NonNull<u8>,
    len: usize,
    gpa: u64,
}

// SAFETY: `base` points into `mapping`, which may be shared, and lives as long as this.
unsafe impl Send for Window {}
// SAFETY: as above; loads and stores are atomic or may be torn, as their callers expect.
unsafe impl Sync for Window {}

macro_rules! loads {
    ($($(#[$doc:meta])* $name:ident $store:ident $ty:ty, $atomic:ty;)*) => {$(
        $(#[$doc])*
        #[inline]
        pub fn $name(&self, offset: usize) -> $ty {
            <$ty>::from_le(self.atomic::<$atomic>(offset).load(Ordering::Acquire))
        }
        /// The store that goes with it, Release, to memory that is not the guest's (a journal): no dirty log hears of it.
        #[inline]
        pub fn $store(&self, offset: usize, value: $ty) {
            self.atomic::<$atomic>(offset).store(value.to_le(), Ordering::Release);
        }
    )*};
}

impl Window {
    pub(crate) fn whole(mapping: Arc<Mapping>, len: usize) -> Self {
        Window::new(mapping, 0, len, 0)
    }

    /// A window on `len` bytes of `mapping` from `start`, or `None` if it has fewer.
    pub fn of_mapping(mapping: &Arc<Mapping>, start: usize, len: usize) -> Option<Self> {
        (start.checked_add(len)? <= mapping.len())
            .then(|| Window::new(mapping.clone(), start, len, start as u64))
    }

    pub(crate) fn new(mapping: Arc<Mapping>, start: usize, len: usize, gpa: u64) -> Self {
        assert!(start <= mapping.len() && len <= mapping.len() - start);
        // SAFETY: inside the mapping, by the line above.
        let base = unsafe { mapping.start().add(start) };
        Window { mapping, base, len, gpa }
    }

    /// What it is a window on.
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the window has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Guest address of its first byte (of a window on a bare mapping: the offset there).
    #[inline]
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Whether the memory went away.
    pub fn poisoned(&self) -> bool {
        self.mapping.poisoned()
    }

    #[inline]
    pub(crate) fn span(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "window offset {offset}+{len} of {}",
            self.len
        );
        // SAFETY: the window is inside the mapping by construction, offset + len inside the window by the check.
        unsafe { self.base.as_ptr().add(offset) }
    }

    #[inline]
    fn atomic<A>(&self, offset: usize) -> &A {
        let at = self.span(offset, size_of::<A>());
        assert!(at.align_offset(align_of::<A>()) == 0, "window offset {offset} is not aligned");
        // SAFETY: in bounds and aligned by the checks, mapped while self lives; atomics may be shared with anybody.
        unsafe { &*at.cast::<A>() }
    }

    loads! {
        /// Loads a byte, Acquire.
        load_u8 put_u8 u8, AtomicU8;
        /// Loads a little-endian number, Acquire. `offset` must be aligned.
        load_u16 put_u16 u16, AtomicU16;
        /// Loads a little-endian number, Acquire. `offset` must be aligned.
        load_u32 put_u32 u32, AtomicU32;
        /// Loads a little-endian number, Acquire. `offset` must be aligned.
        load_u64 put_u64 u64, AtomicU64;
    }

    /// The little-endian 16-bit numbers from `offset`, which must be even, to the end: checked once, for who loads many.
    #[inline]
    pub fn shorts(&self, offset: usize) -> &[AtomicU16] {
        self.atomics(offset)
    }

    /// As [`Window::shorts`], of 64 bits; `offset` must be a multiple of eight.
    #[inline]
    pub fn longs(&self, offset: usize) -> &[AtomicU64] {
        self.atomics(offset)
    }

    /// All that fit from `offset`, which must be aligned. Only for atomics.
    #[inline]
    fn atomics<A>(&self, offset: usize) -> &[A] {
        let at = self.span(offset, 0);
        assert!(at.align_offset(align_of::<A>()) == 0, "window offset {offset} is not aligned");
        // SAFETY: in bounds and aligned by the checks, mapped while self lives; atomics may be shared with anybody.
        unsafe { std::slice::from_raw_parts(at.cast::<A>(), (self.len - offset) / size_of::<A>()) }
    }

    /// Sets bits of a byte.
    #[inline]
    pub(crate) fn or_u8(&self, offset: usize, bits: u8, order: Ordering) {
        self.atomic::<AtomicU8>(offset).fetch_or(bits, order);
    }

    /// Sets bits of a little-endian number of 32 bits in one atomic step; what it was before. `offset` must be aligned. For a lock that
    /// is shared with a guest: no dirty log hears of it.
    #[inline]
    pub fn set_bits_u32(&self, offset: usize, bits: u32) -> u32 {
        u32::from_le(self.atomic::<AtomicU32>(offset).fetch_or(bits.to_le(), Ordering::SeqCst))
    }

    /// Clears bits likewise.
    #[inline]
    pub fn clear_bits_u32(&self, offset: usize, bits: u32) -> u32 {
        u32::from_le(self.atomic::<AtomicU32>(offset).fetch_and(!bits.to_le(), Ordering::SeqCst))
    }

    /// Exchanges a byte.
    #[inline]
    pub(crate) fn swap_u8(&self, offset: usize, value: u8, order: Ordering) -> u8 {
        self.atomic::<AtomicU8>(offset).swap(value, order)
    }

    /// Loads 16 bytes from `offset` as two little-endian words, each exactly once: the two halves of a descriptor. A word that is aligned
    /// to 8 bytes is loaded atomically.
    #[inline]
    pub fn pair(&self, offset: usize) -> (u64, u64) {
        let from = self.span(offset, 16);
        // SAFETY: in bounds by span.
        unsafe { load_pair(from) }
    }

    /// Asks for the first lines of `len` bytes at `offset`, as [`crate::GuestView::prefetch_lines`] does; nothing where they are beyond the span.
    #[inline]
    pub fn prefetch_lines(&self, offset: usize, len: usize, stores: bool) {
        if offset <= self.len && len <= self.len - offset {
            crate::prefetch::prefetch_lines(self.span(offset, len), len, stores);
        }
    }

    /// Asks the processor to fetch the line at `offset`; a hint, never a fault.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.len {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch cannot fault and changes nothing.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(self.span(offset, 0).cast());
            }
        }
    }
}

/// A span of guest memory that has been checked, for as long as the view that checked it is borrowed: as [`Window`], without a count of
/// references, which the cores of a guest would share.
#[derive(Debug, Clone, Copy)]
pub struct Span<'a> {
    base: NonNull<u8>,
    len: usize,
    view: PhantomData<&'a u8>,
}

impl Span<'_> {
    /// # Safety
    /// `base` points to `len` mapped bytes that stay so for the lifetime.
    #[inline]
    pub(crate) unsafe fn new(base: NonNull<u8>, len: usize) -> Self {
        Span { base, len, view: PhantomData }
    }

    /// The bytes that the kernel would be given `iovec` for.
    ///
    /// # Safety
    /// They are mapped, to be loaded from, and stay so for the lifetime.
    #[inline]
    pub unsafe fn of_iovec(iovec: IoVec) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::of_parts(iovec.base(), iovec.len()) }
    }

    /// The same by their address and number, perhaps those of a part of such a span.
    ///
    /// # Safety
    /// They are mapped, to be loaded from, and stay so for the lifetime.
    #[inline]
    pub unsafe fn of_parts(base: *mut u8, len: usize) -> Self {
        let base = NonNull::new(base).unwrap_or(NonNull::dangling());
        Span { base, len, view: PhantomData }
    }

    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the span has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    pub(crate) fn part(&self, offset: usize, len: usize) -> *const u8 {
        let inside = offset <= self.len && len <= self.len - offset;
        assert!(inside, "span offset {offset}+{len} of {}", self.len);
        // SAFETY: in the span, by the check.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies the bytes from `offset` on into `out`. Reaching beyond the span panics.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.part(offset, out.len());
        // SAFETY: in the span, by `part`; out is ours.
        unsafe { copy_once(from, out) };
    }

    /// As [`Window::pair`].
    #[inline]
    pub fn pair(&self, offset: usize) -> (u64, u64) {
        assert!(offset <= self.len && self.len - offset >= 16, "span offset {offset} of {}", self.len);
        // SAFETY: the bytes are in the span, by the check.
        unsafe { load_pair(self.base.as_ptr().add(offset)) }
    }
}

/// Loads 16 bytes as two little-endian words, each exactly once, and atomically if it is aligned to 8 bytes.
///
/// # Safety
/// `from` points to 16 readable bytes.
#[inline]
unsafe fn load_pair(from: *mut u8) -> (u64, u64) {
    if from.align_offset(align_of::<AtomicU64>()) == 0 {
        // SAFETY: the caller's, and aligned; atomics may be shared with anybody.
        let halves = unsafe { &*from.cast::<[AtomicU64; 2]>() };
        let load = |half: &AtomicU64| u64::from_le(half.load(Ordering::Acquire));
        return (load(&halves[0]), load(&halves[1]));
    }
    let mut out = [0u8; 16];
    // SAFETY: the caller's; out is ours.
    unsafe { copy_once(from, &mut out) };
    let word = u128::from_le_bytes(out);
    (word as u64, (word >> 64) as u64)
}

/// Copies out of memory that a guest may write at the same time. The result is some mixture of old and new bytes, and does not change afterwards.
///
/// The barrier makes sure of the latter. Without it the compiler may drop the copy and load a field from guest memory at each use, so that the
/// value checked and the value used differ.
///
/// # Safety
/// `from` points to `out.len()` readable bytes, none of them in `out`.
#[inline]
pub(crate) unsafe fn copy_once(from: *const u8, out: &mut [u8]) {
    // SAFETY: the caller's. A race can tear the bytes, and the reader expects that.
    unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
    std::hint::black_box(out.as_mut_ptr());
}
