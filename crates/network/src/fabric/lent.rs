//! Frames whose bytes stay in their sender's memory until the receiver copies them (docs/decisions/0054).
//!
//! ```text
//!    free --lend--> LENT --take--> TAKEN --done--> free          the receiver copies from the sender's memory
//!                    | ^             '--give back--> LENT        it has no room
//!                    |
//!                    +--recall--> COPYING --> COPIED --> free    the sender copies into the buffer; as any other frame from then on
//!                    '--revoke--> REVOKED -------------> free    the sender takes it back; nobody has it
//! ```
//!
//! One word for each buffer of a pool says where its frame is. It counts the frames lent by that buffer, so that a sender that looks late
//! does not take another's frame for its own. The sender's memory may be read in three states: LENT by nobody, TAKEN by the receiver, COPYING by the
//! sender. A sender whose word is in none of the first two has its memory for itself. TAKEN lasts for one copy within one poll.
//!
//! The bytes of the buffer itself: LENT nobody touches them, TAKEN both may read them, COPYING the sender writes them.

#![allow(unsafe_code)]
// UNSAFETY: the spans of a slot are written by who has its buffer, and read by who has changed its word to TAKEN or COPYING. What they point to is
// kept mapped by the sender (`LentOut`), which lets go of it only when neither is so any more.

use std::cell::UnsafeCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_memory::{GuestMap, IoVec, LentRanges, MOST_LENT_RANGES, Span};

/// Where a lent frame is: the low bits of a slot's word.
const STATE: u64 = 0b111;
const LENT: u64 = 1;
const TAKEN: u64 = 2;
const COPYING: u64 = 3;
const COPIED: u64 = 4;
const REVOKED: u64 = 5;
const FREE: u64 = 6;
const USE: u64 = STATE + 1;

/// Of one buffer of a pool: the frame that is lent by it. Zeros are one that has never been used.
#[repr(C, align(64))]
pub(crate) struct LentSlot {
    word: AtomicU64,
    spans: UnsafeCell<LentSpans>,
}

#[repr(C)]
struct LentSpans {
    count: usize,
    spans: [IoVec; MOST_LENT_RANGES],
}

// SAFETY: the spans are touched by one side at a time, as the word says; see the top.
unsafe impl Sync for LentSlot {}

/// One frame lent by a slot: the slot's word is of this use as long as this frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LentUse(u64);

/// How a sender asks for the oldest frame that it has lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaim {
    /// If its receiver is done with it.
    IfDone,
    /// At once: where the receiver has not begun with it, it is copied into the receiver's buffer.
    Copy,
    /// At once: where the receiver has not begun with it, nobody gets it.
    Revoke,
}

/// Where a lent frame is, for its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LentFor {
    /// Nobody has begun with it.
    Waiting,
    /// Its receiver copies it at this moment.
    Reading,
    /// Its receiver is done with it, or has dropped it.
    Done,
}

/// Where the bytes of a lent frame are, for its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LentBytes {
    /// Theirs to copy from the sender's memory, until the slot is told [`LentSlot::done`] or [`LentSlot::give_back`].
    Taken,
    /// In the buffer.
    Copied,
    /// In the buffer in a moment: the sender copies them at this one.
    Copying,
    /// Nowhere: the sender has taken the frame back.
    Revoked,
}

impl LentSlot {
    /// Lends `ranges` by a buffer that the caller has and fills; it hands the buffer over next.
    #[inline]
    pub fn lend(&self, ranges: &LentRanges) -> LentUse {
        let spans = ranges.spans();
        // SAFETY: the caller has the buffer, and its word is in no state in which anybody else touches the spans.
        unsafe {
            let own = &mut *self.spans.get();
            own.count = spans.len();
            own.spans[..spans.len()].copy_from_slice(spans);
        }
        let before = self.word.load(Ordering::Relaxed);
        let word = (before & !STATE).wrapping_add(USE) | LENT;
        self.word.store(word, Ordering::Release);
        LentUse(word & !STATE)
    }

    #[inline]
    fn change(&self, lent: LentUse, from: u64, to: u64) -> Result<(), u64> {
        self.word
            .compare_exchange(lent.0 | from, lent.0 | to, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(|word| if word & !STATE == lent.0 { word & STATE } else { FREE })
    }

    /// The sender's side.
    #[inline]
    pub fn look(&self, lent: LentUse) -> LentFor {
        let word = self.word.load(Ordering::Acquire);
        match (word & !STATE == lent.0).then_some(word & STATE) {
            Some(LENT) => LentFor::Waiting,
            Some(TAKEN) => LentFor::Reading,
            _ => LentFor::Done,
        }
    }

    /// The sender's side: copies the frame into `to`, the place for the lent bytes in its buffer, if nobody has begun with it. The memory is
    /// the sender's again unless it is [`LentFor::Reading`].
    ///
    /// # Safety
    /// `to` points to as many bytes of the buffer as were lent, and the sender has kept them mapped.
    #[inline]
    pub unsafe fn recall(&self, lent: LentUse, to: *mut u8) -> LentFor {
        match self.change(lent, LENT, COPYING) {
            Ok(()) => {
                // SAFETY: COPYING gives the bytes of the buffer to the sender; the rest is the caller's.
                unsafe { self.copy(to) };
                self.word.store(lent.0 | COPIED, Ordering::Release);
                LentFor::Done
            }
            Err(TAKEN) => LentFor::Reading,
            Err(_) => LentFor::Done,
        }
    }

    /// The sender's side: takes the frame back if nobody has begun with it: that is `Waiting`, and nobody ever will.
    #[inline]
    pub fn revoke(&self, lent: LentUse) -> LentFor {
        match self.change(lent, LENT, REVOKED) {
            Ok(()) => LentFor::Waiting,
            Err(TAKEN) => LentFor::Reading,
            Err(_) => LentFor::Done,
        }
    }

    /// The receiver's side: takes the frame to copy it, if it is still lent.
    #[inline]
    pub fn take(&self, lent: LentUse) -> LentBytes {
        match self.change(lent, LENT, TAKEN) {
            Ok(()) => LentBytes::Taken,
            Err(COPIED) => LentBytes::Copied,
            Err(COPYING) => LentBytes::Copying,
            Err(state) => {
                debug_assert_eq!(state, REVOKED, "a receiver has one frame in hand, once");
                LentBytes::Revoked
            }
        }
    }

    /// The receiver's side, of a frame taken: the spans, while it is.
    ///
    /// # Safety
    /// The caller has taken the frame, and gives it back or is done with it after the last use of what this returns.
    #[inline]
    pub unsafe fn spans(&self) -> &[IoVec] {
        // SAFETY: TAKEN gives the spans to the receiver, to read.
        let spans = unsafe { &*self.spans.get() };
        &spans.spans[..spans.count]
    }

    /// The receiver's side: has copied the frame that it took.
    #[inline]
    pub fn done(&self, lent: LentUse) {
        self.word.store(lent.0 | FREE, Ordering::Release);
    }

    /// The receiver's side: has not copied the frame that it took.
    #[inline]
    pub fn give_back(&self, lent: LentUse) {
        self.word.store(lent.0 | LENT, Ordering::Release);
    }

    /// The receiver's side: copies the frame into its buffer, as [`LentSlot::recall`] does for a sender.
    ///
    /// # Safety
    /// As of [`LentSlot::recall`].
    pub unsafe fn fetch(&self, lent: LentUse, to: *mut u8) -> LentBytes {
        let bytes = self.take(lent);
        if bytes == LentBytes::Taken {
            // SAFETY: TAKEN, and the buffer is the receiver's; the rest is the caller's.
            unsafe { self.copy(to) };
            self.word.store(lent.0 | COPIED, Ordering::Release);
            return LentBytes::Copied;
        }
        bytes
    }

    /// The receiver's side: does without the frame, which it has not taken. False if the sender copies it at this moment: then in a moment.
    #[inline]
    pub fn discard(&self, lent: LentUse) -> bool {
        self.change(lent, LENT, FREE) != Err(COPYING)
    }

    /// The receiver's side, or nobody's: whether the sender has taken the frame back.
    pub fn is_revoked(&self, lent: LentUse) -> bool {
        self.word.load(Ordering::Acquire) == lent.0 | REVOKED
    }

    /// # Safety
    /// The word is TAKEN or COPYING by the caller, `to` points to as many bytes as were lent, and they are mapped.
    unsafe fn copy(&self, to: *mut u8) {
        // SAFETY: the caller's.
        let spans = unsafe { self.spans() };
        let mut at = 0;
        for iovec in spans {
            // SAFETY: the sender keeps it mapped as long as the word is as it is.
            let span = unsafe { Span::of_iovec(*iovec) };
            // SAFETY: the lengths of all spans add up to the bytes at `to`.
            let out = unsafe { std::slice::from_raw_parts_mut(to.add(at), span.len()) };
            span.read(0, out);
            at += span.len();
        }
    }
}

/// A frame that its sender has lent, as the sender holds it: with what keeps its memory mapped. To be dropped only when the memory is the
/// sender's again.
#[derive(Debug)]
pub(crate) struct LentOut {
    pool: u32,
    index: u16,
    lent: LentUse,
    map: Arc<GuestMap>,
}

impl LentOut {
    pub(super) fn new(pool: u32, index: u16, lent: LentUse, map: Arc<GuestMap>) -> Self {
        LentOut { pool, index, lent, map }
    }

    /// The pool whose buffer it is lent by.
    #[inline]
    pub fn pool(&self) -> u32 {
        self.pool
    }

    /// The buffer's number there.
    #[inline]
    pub fn index(&self) -> u16 {
        self.index
    }

    /// Which use of the buffer it is.
    #[inline]
    pub fn lent(&self) -> LentUse {
        self.lent
    }

    /// What has kept its memory mapped.
    pub fn into_map(self) -> Arc<GuestMap> {
        self.map
    }
}

/// A frame in its sender's memory, taken by its receiver to be copied. While this lives the sender waits, should it want its memory back.
/// Dropped before [`LentFrame::done`], it is there to be taken again.
#[derive(Debug)]
pub struct LentFrame<'a> {
    slot: &'a LentSlot,
    lent: LentUse,
    head: &'a [u8],
    done: bool,
}

impl<'a> LentFrame<'a> {
    /// # Safety
    /// The frame has been taken, and nobody else gives it back.
    #[inline]
    pub(super) unsafe fn of_taken(slot: &'a LentSlot, lent: LentUse, head: &'a [u8]) -> Self {
        LentFrame { slot, lent, head, done: false }
    }

    /// Its first [`crate::HEAD`] bytes, as they were judged.
    #[inline]
    pub fn head(&self) -> &[u8] {
        self.head
    }

    /// The bytes behind, piece by piece. Its guest may change them at any time.
    #[inline]
    pub fn spans(&self) -> impl Iterator<Item = Span<'_>> {
        // SAFETY: taken, and neither given back nor done before self is dropped.
        let spans = unsafe { self.slot.spans() };
        // SAFETY: the sender keeps them mapped while the frame is taken.
        spans.iter().map(|iovec| unsafe { Span::of_iovec(*iovec) })
    }

    /// It has been copied: the memory is its sender's again.
    #[inline]
    pub fn done(mut self) {
        self.done = true;
        self.slot.done(self.lent);
    }
}

impl Drop for LentFrame<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.slot.give_back(self.lent);
        }
    }
}

impl std::fmt::Debug for LentSlot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentSlot").field("word", &self.word).finish_non_exhaustive()
    }
}
