//! The receiving half of a queue pair.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::counts::Tally;
use super::lent::{LentBytes, LentFrame};
use super::pool::{Filled, FramePool, HEADER, Record, words};
use super::port::PortShared;
use crate::cause::DropReason;
use crate::offload::Offload;
use crate::spec::NET_HDR;

/// A frame that waits to be received.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    words: [u64; 2],
    /// Its header, the skew, and the frame. Empty of one that is lent.
    whole: &'a [u8],
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

    /// The whole frame. Nothing of one that is lent ([`PortRx::take_lent_frames`]): see [`PortRx::take_bytes`].
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        let Record { skew, .. } = Record::of_words(self.words);
        self.whole.get(NET_HDR + usize::from(skew)..).unwrap_or_default()
    }

    /// The whole frame with the header before it that a driver gets which has it in one buffer: `virtio_net_hdr_v1` (5.1.6), 12 bytes.
    /// `None` where they do not stand together: if a tag was taken off, and of a frame that is lent.
    #[inline]
    pub fn header_and_frame(&self) -> Option<&'a [u8]> {
        let Record { skew, .. } = Record::of_words(self.words);
        (skew == 0 && !self.whole.is_empty()).then_some(self.whole)
    }

    /// Its length in bytes.
    #[inline]
    #[expect(clippy::len_without_is_empty, reason = "no frame is empty")]
    pub fn len(&self) -> usize {
        Record::of_words(self.words).len as usize
    }
}

/// Where the bytes of the frame at the front are.
#[derive(Debug)]
pub enum FrameBytes<'a> {
    /// Here.
    Whole(&'a [u8]),
    /// In its sender's memory, to be copied from there at once.
    Lent(LentFrame<'a>),
    /// Here in a moment: its sender is copying them. The frame stays at the front.
    Soon,
    /// Nowhere: its sender has taken the frame back, and it is not at the front any more.
    Revoked,
}

/// Where the poller of a receiving queue takes its frames from. Dropped, it leaves what it has not popped to the next one.
#[derive(Debug)]
pub struct PortRx {
    shared: Arc<PortShared>,
    pair: u16,
    open: Option<Filled>,
    tally: Tally,
    /// Frames that are lent are given as they are.
    lent: bool,
    /// The pool has been told so.
    told: bool,
}

impl PortRx {
    pub(crate) fn new(shared: Arc<PortShared>, pair: u16) -> Self {
        PortRx { shared, pair, open: None, tally: Tally::default(), lent: false, told: false }
    }

    /// As [`PortRx::new`], for one who only passes frames.
    pub(crate) fn to_skip(shared: Arc<PortShared>, pair: u16) -> Self {
        let mut port_rx = PortRx::new(shared, pair);
        port_rx.lent = true;
        port_rx
    }

    /// Lets senders lend frames to this queue from now on. Whoever does so asks for the bytes of long frames by [`PortRx::take_bytes`].
    pub fn take_lent_frames(&mut self) {
        self.lent = true;
        if !std::mem::replace(&mut self.told, true) {
            self.pool().set_takes_lent(true);
        }
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
        if self.open.as_ref()?.lent.is_some() {
            return self.front_lent();
        }
        let filled = self.open.as_ref()?;
        frame(self.pool().bytes(&filled.buffer), filled.read)
    }

    /// [`PortRx::front`], of a frame that is or was lent.
    fn front_lent(&mut self) -> Option<Frame<'_>> {
        let pool = &self.shared.pools[usize::from(self.pair)];
        if self.lent {
            let words = self.open.as_ref()?.lent?.record.to_words();
            return Some(Frame { words, whole: &[] });
        }
        // Who takes no lent frames finds the bytes here, as of any other frame.
        while let Some(filled) = &mut self.open {
            match filled.lent.map(|lent| pool.fetch_lent(&mut filled.buffer, lent.lent)) {
                None | Some(LentBytes::Copied | LentBytes::Taken) => break,
                Some(LentBytes::Copying) => return None,
                Some(LentBytes::Revoked) => {
                    let next = pool.next();
                    if let Some(gone) = std::mem::replace(&mut self.open, next) {
                        pool.put_back(gone.buffer);
                    }
                }
            }
        }
        let filled = self.open.as_ref()?;
        frame(pool.bytes(&filled.buffer), filled.read)
    }

    /// The bytes of the frame at the front, which stays there until [`PortRx::pop`], unless it turns out to have been revoked.
    #[inline]
    pub fn take_bytes(&mut self) -> FrameBytes<'_> {
        let pool = &self.shared.pools[usize::from(self.pair)];
        let Some(Filled { buffer, read, lent, .. }) = &self.open else { return FrameBytes::Revoked };
        let elsewhere = match lent.map(|lent| pool.take_lent(buffer, lent.lent)) {
            Some(Ok(lent)) => return FrameBytes::Lent(lent),
            Some(Err(elsewhere)) => elsewhere,
            None => LentBytes::Copied,
        };
        match elsewhere {
            LentBytes::Copying => FrameBytes::Soon,
            LentBytes::Copied | LentBytes::Taken => frame(pool.bytes(buffer), *read)
                .map_or(FrameBytes::Soon, |frame| FrameBytes::Whole(frame.bytes())),
            LentBytes::Revoked => {
                if let Some(gone) = self.open.take() {
                    pool.put_back(gone.buffer);
                }
                FrameBytes::Revoked
            }
        }
    }

    /// Gives frames of one buffer to `take`, in order, until that has no room for one (`false`); says how many it took. Of
    /// these the guest has each.
    #[inline]
    pub fn deliver(&mut self, mut take: impl FnMut(Frame<'_>) -> bool) -> usize {
        // A lent one is alone in its buffer, and is not for who takes several at once.
        if self.front().is_none() || (self.lent && self.front_is_lent()) {
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
            self.tally.frame(frame.len());
            taken += 1;
        }
        filled.read = at;
        filled.frames = filled.frames.saturating_sub(taken);
        self.settle();
        taken as usize
    }

    /// Whether the frame at the front is or was lent: then it is alone.
    #[inline]
    pub fn front_is_lent(&self) -> bool {
        self.open.as_ref().is_some_and(|filled| filled.lent.is_some())
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

    /// Passes the frame; says how long it was. `None`: it is not there any more, or its sender is copying it at this moment.
    #[inline]
    fn step(&mut self) -> Option<usize> {
        let pool = &self.shared.pools[usize::from(self.pair)];
        let filled = self.open.as_mut()?;
        if let Some(lent) = filled.lent {
            if pool.is_revoked(filled) {
                if let Some(gone) = self.open.take() {
                    pool.put_back(gone.buffer);
                }
                return None;
            }
            if !pool.discard_lent(&filled.buffer, lent.lent) {
                return None;
            }
            (filled.read, filled.frames) = (filled.used, 0);
            return Some(lent.record.len as usize);
        }
        let frame = frame(pool.bytes(&filled.buffer), filled.read)?;
        filled.read += frame.space();
        filled.frames = filled.frames.saturating_sub(1);
        Some(frame.len())
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
    let (gone, filled): (Vec<_>, Vec<_>) =
        std::iter::from_fn(|| pool.next()).partition(|filled: &Filled| pool.is_revoked(filled));
    gone.into_iter().for_each(|filled| pool.put_back_filled(filled));
    let frames = filled.iter().map(|filled| u64::from(filled.frames)).sum();
    for filled in filled {
        if filled.read > 0 { pool.leave(filled) } else { pool.put(filled) }
    }
    frames
}

/// The frame at `at` of a buffer.
#[inline]
fn frame(buffer: &[u8], at: u32) -> Option<Frame<'_>> {
    let buffer = &buffer[at as usize..];
    let words = words(buffer.first_chunk()?);
    let Record { len, skew, .. } = Record::of_words(words);
    let end = HEADER + usize::from(skew) + len as usize;
    Some(Frame { words, whole: buffer.get(HEADER - NET_HDR..end)? })
}

impl std::ops::Drop for PortRx {
    fn drop(&mut self) {
        self.shared.received.add(&mut self.tally);
        if self.told {
            self.pool().set_takes_lent(false);
        }
        if let Some(filled) = self.open.take() {
            self.pool().leave(filled);
        }
    }
}
