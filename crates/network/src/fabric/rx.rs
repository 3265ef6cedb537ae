//! The receiving half of a queue pair.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::counts::Tally;
use super::pool::{Filled, FramePool, HEADER, Record, words};
use super::port::PortShared;
use crate::cause::DropReason;
use crate::offload::Offload;

/// A frame that waits to be received.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    words: [u64; 2],
    bytes: &'a [u8],
}

impl<'a> Frame<'a> {
    /// What is left to do for it: only what the port takes.
    #[inline]
    pub fn offload(&self) -> Offload {
        Record::of_words(self.words).offload
    }

    /// Bytes of its place in a buffer.
    #[inline]
    fn space(&self) -> u32 {
        let Record { len, skew, .. } = Record::of_words(self.words);
        Record::space(skew.into(), len as usize) as u32
    }

    /// The whole frame.
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Where the poller of a receiving queue takes its frames from. Dropped, it leaves what it has not popped to the next one.
#[derive(Debug)]
pub struct PortRx {
    shared: Arc<PortShared>,
    pair: u16,
    open: Option<Filled>,
    tally: Tally,
}

impl PortRx {
    pub(crate) fn new(shared: Arc<PortShared>, pair: u16) -> Self {
        PortRx { shared, pair, open: None, tally: Tally::default() }
    }

    #[inline]
    fn pool(&self) -> &FramePool {
        &self.shared.pools[usize::from(self.pair)]
    }

    /// The oldest frame, which stays there until [`PortRx::pop`].
    #[inline]
    pub fn front(&mut self) -> Option<Frame<'_>> {
        if self.open.is_none() {
            self.open = self.pool().next();
        }
        let filled = self.open.as_ref()?;
        frame(self.pool().bytes(&filled.buffer), filled.read)
    }

    /// Gives frames of one buffer to `take`, in order, until that has no room for one (`false`); says how many it took. Of
    /// these the guest has each.
    #[inline]
    pub fn deliver(&mut self, mut take: impl FnMut(Frame<'_>) -> bool) -> usize {
        if self.front().is_none() {
            return 0;
        }
        let pool = &self.shared.pools[usize::from(self.pair)];
        let Some(filled) = self.open.as_mut() else { return 0 };
        let bytes = pool.bytes(&filled.buffer);
        let (mut at, mut taken) = (filled.read, 0);
        while at < filled.used
            && let Some(frame) = frame(bytes, at)
            && take(frame)
        {
            at += frame.space();
            self.tally.frame(frame.bytes.len());
            taken += 1;
        }
        filled.read = at;
        filled.frames = filled.frames.saturating_sub(taken);
        self.settle();
        taken as usize
    }

    /// How many frames there are in the same buffer as the one at the front, that one included.
    #[inline]
    pub fn together(&self) -> usize {
        self.open.as_ref().map_or(0, |filled| filled.frames as usize)
    }

    /// The guest has the frame at the front.
    #[inline]
    pub fn pop(&mut self) {
        if let Some(len) = self.step() {
            self.tally.frame(len);
            self.settle();
        }
    }

    /// The guest does not get the frame, for that cause.
    pub fn skip(&mut self, cause: DropReason) {
        if self.step().is_some() {
            self.tally.drop(cause, 1);
            self.settle();
        }
    }

    /// Passes the frame; says how long it was.
    #[inline]
    fn step(&mut self) -> Option<usize> {
        let pool = &self.shared.pools[usize::from(self.pair)];
        let filled = self.open.as_mut()?;
        let frame = frame(pool.bytes(&filled.buffer), filled.read)?;
        filled.read += frame.space();
        filled.frames = filled.frames.saturating_sub(1);
        Some(frame.bytes.len())
    }

    /// Gives the buffer back when it is empty; that is also when the counts are added up.
    #[inline]
    fn settle(&mut self) {
        if let Some(filled) = self.open.take_if(|filled| filled.read >= filled.used) {
            self.pool().put_back(filled.buffer);
            self.shared.received.add(&mut self.tally);
        }
    }

    /// About to sleep: from now on whatever arrives makes [`PortRx::waker`] readable. True if something is there already, the
    /// queue must not sleep then (unless it waits for its guest's buffers, not for frames).
    pub fn arm(&mut self) -> bool {
        self.shared.received.add(&mut self.tally);
        let there = self.pool().arm();
        there || self.open.is_some()
    }

    /// Awake.
    pub fn disarm(&mut self) {
        self.pool().disarm();
    }

    /// Adds up the counts of frames that have been popped; otherwise they are when their buffer is empty. Called from `tidy`.
    pub fn tidy(&mut self) {
        self.shared.received.add(&mut self.tally);
    }

    /// An eventfd of the port's, readable while there is something after [`PortRx::arm`].
    pub fn waker(&self) -> BorrowedFd<'_> {
        self.pool().event()
    }
}

/// How many frames wait on a pool that nobody reads from or sends to meanwhile. Control side.
pub(crate) fn waiting(pool: &FramePool) -> u64 {
    let filled: Vec<Filled> = std::iter::from_fn(|| pool.next()).collect();
    let frames = filled.iter().map(|filled| u64::from(filled.frames)).sum();
    for filled in filled {
        if filled.read > 0 {
            pool.leave(filled)
        } else {
            pool.hand_over(filled.buffer, filled.used, filled.frames)
        }
    }
    frames
}

/// The frame at `at` of a buffer.
#[inline]
fn frame(buffer: &[u8], at: u32) -> Option<Frame<'_>> {
    let buffer = &buffer[at as usize..];
    let words = words(buffer.first_chunk()?);
    let Record { len, skew, .. } = Record::of_words(words);
    Some(Frame { words, bytes: buffer[HEADER + usize::from(skew)..].get(..len as usize)? })
}

impl std::ops::Drop for PortRx {
    fn drop(&mut self) {
        self.shared.received.add(&mut self.tally);
        if let Some(filled) = self.open.take() {
            self.pool().leave(filled);
        }
    }
}
