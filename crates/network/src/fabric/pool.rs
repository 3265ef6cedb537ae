//! The buffers of one receiving queue.
//!
//! ```text
//!            take                 hand_over                next                 put_back
//!   empties -----> FrameBatch (sender) --------> inbox, event -----> FrameBatch (receiver) ----> empties
//! ```
//!
//! A [`FrameBatch`] is the right to touch its bytes: it is made by the pool alone, cannot be copied, and exactly one of the four
//! places above has it at any time.

#![allow(unsafe_code)]
// UNSAFETY: one anonymous mapping, cut into buffers. A slice of it is only given out against the buffer's one token.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicUsize, Ordering, fence};

use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{MapFlags, ProtFlags};

use super::lent::{LentBytes, LentFor, LentFrame, LentOut, LentSlot, LentUse, Reclaim};
use super::stack::IndexStack;
use crate::offload::Offload;
use crate::spec::VLAN_HLEN;
use crate::{HEAD, LONGEST, MOST_PORTS};

/// Bytes of a buffer: one longest frame with its header, or some 820 of 64 bytes. An odd number of cache lines, so that the
/// beginnings of buffers, which is all that small batches touch, do not compete for the same sets of a cache.
pub const BUFFER_BYTES: usize = 65_600;
/// What stands before each frame in a buffer, which is also the unit in which they are aligned.
pub(crate) const HEADER: usize = 16;
const _: () = assert!(
    BUFFER_BYTES >= HEADER + LONGEST + VLAN_HLEN
        && (BUFFER_BYTES / 64) % 2 == 1
        && BUFFER_BYTES.is_multiple_of(64)
);

/// The right to touch the bytes of one buffer of one pool.
#[derive(Debug)]
pub(crate) struct FrameBatch {
    pool: u32,
    index: u16,
    /// Slot of the port that filled it, or is about to.
    sender: u16,
}

/// A buffer with frames.
#[derive(Debug)]
pub(crate) struct Filled {
    /// The buffer.
    pub buffer: FrameBatch,
    /// Bytes of it that hold frames.
    pub used: u32,
    /// Bytes that have been read.
    pub read: u32,
    /// Frames that have not.
    pub frames: u32,
    /// Its one frame is lent.
    pub lent: Option<LentRecord>,
}

/// A frame that is lent by a buffer. Its first [`HEAD`] bytes are in the buffer, those behind them in the sender's memory or, if it has been
/// copied, in the buffer, too.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LentRecord {
    pub lent: LentUse,
    pub record: Record,
}

/// `num_buffers` of a frame in one buffer.
const ONE_BUFFER: u64 = 1;
/// The longest frame that a [`Record`] can tell of.
const MOST_LEN: u32 = (1 << 24) - 1;
const _: () = assert!(LONGEST + VLAN_HLEN <= MOST_LEN as usize);

/// The header of a frame in a buffer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Record {
    /// Bytes of the frame.
    pub len: u32,
    /// Bytes between this header and the frame.
    pub skew: u8,
    /// What is left to do.
    pub offload: Offload,
}

impl Record {
    /// Two words: the length in 24 bits and the skew, and then what the 12 bytes before a frame say to a driver that gets it in one buffer
    /// (`virtio_net_hdr_v1`, 5.1.6), so that without a skew both are one copy.
    #[inline]
    pub fn to_words(self) -> [u64; 2] {
        let Offload { flags, gso, hdr_len, gso_size, csum_start, csum_offset } = self.offload;
        [
            u64::from(self.len)
                | u64::from(self.skew) << 24
                | u64::from(flags) << 32
                | u64::from(gso) << 40
                | u64::from(hdr_len) << 48,
            u64::from(gso_size)
                | u64::from(csum_start) << 16
                | u64::from(csum_offset) << 32
                | ONE_BUFFER << 48,
        ]
    }

    #[inline]
    pub fn write(&self, to: &mut [u8; HEADER]) {
        for (word, to) in self.to_words().iter().zip(to.as_chunks_mut::<8>().0) {
            *to = word.to_le_bytes();
        }
    }

    /// What [`words`] gave.
    #[inline]
    pub fn of_words([first, second]: [u64; 2]) -> Self {
        let offload = Offload {
            flags: (first >> 32) as u8,
            gso: (first >> 40) as u8,
            hdr_len: (first >> 48) as u16,
            gso_size: second as u16,
            csum_start: (second >> 16) as u16,
            csum_offset: (second >> 32) as u16,
        };
        Record { len: first as u32 & MOST_LEN, skew: (first >> 24) as u8, offload }
    }

    /// Bytes that a frame takes in a buffer.
    #[inline]
    pub fn space(skew: usize, len: usize) -> usize {
        (HEADER + skew + len).next_multiple_of(HEADER)
    }
}

/// The words of a record. Handed on like this where its fields would go through memory one by one, to be read again as more.
#[inline]
pub(crate) fn words(from: &[u8; HEADER]) -> [u64; 2] {
    let words = from.as_chunks::<8>().0;
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}

/// Bytes that a pool of so many buffers maps: the buffers, and a slot for each, of which nothing is touched before a frame is lent.
fn mapped(buffers: u16) -> usize {
    usize::from(buffers) * (BUFFER_BYTES + size_of::<LentSlot>())
}

/// The buffers of one receiving queue, all of them for its whole life.
pub(crate) struct FramePool {
    id: u32,
    start: NonNull<u8>,
    buffers: u16,
    /// Buffers that one sender may have out here.
    share: u16,
    empties: IndexStack,
    inbox: ArrayQueue<Filled>,
    /// A buffer half-read by a port RX that has ended.
    left: ArrayQueue<Filled>,
    /// By the sender's slot: buffers that it has out here.
    out: Box<[AtomicU16]>,
    asleep: CachePadded<AtomicBool>,
    event: OwnedFd,
    retired: AtomicBool,
    /// Port RXs that take lent frames: one, or none.
    takes_lent: AtomicU16,
    /// How often a sender wrote the eventfd.
    pub wakes: AtomicUsize,
}

// SAFETY: the mapping is reached through tokens, of which there is one for each buffer, and everything else is atomic.
unsafe impl Send for FramePool {}
// SAFETY: as above: a `&FramePool` gives bytes only together with a token.
unsafe impl Sync for FramePool {}

impl FramePool {
    /// A pool of `buffers` empty buffers. No page is taken before it is written.
    pub fn new(buffers: u16) -> std::io::Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let buffers = buffers.max(2);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapped(buffers),
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
        let mut pool = FramePool {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            start,
            buffers,
            share: (buffers - buffers / 4).max(1),
            empties: IndexStack::full(buffers),
            inbox: ArrayQueue::new(usize::from(buffers)),
            left: ArrayQueue::new(1),
            out: (0..MOST_PORTS).map(|_| AtomicU16::new(0)).collect(),
            asleep: CachePadded::new(AtomicBool::new(false)),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            retired: AtomicBool::new(false),
            takes_lent: AtomicU16::new(0),
            wakes: AtomicUsize::new(0),
        };
        // A single buffer of many is nobody's reserve.
        pool.share = pool.share.min(buffers - 1);
        Ok(pool)
    }

    /// An empty buffer for the port in slot `sender`; `None` if there is none, or if the port has three quarters of them
    /// already: one that floods leaves room for the others.
    #[inline]
    pub fn take(&self, sender: u16) -> Option<FrameBatch> {
        let out = &self.out[usize::from(sender)];
        if out.fetch_add(1, Ordering::Relaxed) < self.share
            && !self.retired.load(Ordering::Relaxed)
            && let Some(index) = self.empties.pop()
        {
            return Some(FrameBatch { pool: self.id, index, sender });
        }
        out.fetch_sub(1, Ordering::Relaxed);
        None
    }

    /// Gives an emptied buffer back.
    #[inline]
    pub fn put_back(&self, buffer: FrameBatch) {
        assert_eq!(buffer.pool, self.id);
        self.out[usize::from(buffer.sender)].fetch_sub(1, Ordering::Relaxed);
        self.empties.push(buffer.index);
    }

    /// Puts a buffer with so many bytes of so many frames into the inbox. After a batch of these, and a fence, comes [`FramePool::wake_if_asleep`].
    #[inline]
    pub fn hand_over(&self, buffer: FrameBatch, used: u32, frames: u32) {
        assert_eq!(buffer.pool, self.id);
        self.put(Filled { buffer, used, read: 0, frames, lent: None });
    }

    /// Puts a buffer into the inbox.
    #[inline]
    pub fn put(&self, filled: Filled) {
        assert_eq!(filled.buffer.pool, self.id);
        if self.inbox.push(filled).is_err() {
            unreachable!("the inbox has room for every buffer that there is");
        }
    }

    /// As [`FramePool::hand_over`], of a frame that is lent: of `head`, its first [`HEAD`] bytes, and `ranges`, those behind.
    #[inline]
    pub fn lend(
        &self,
        mut buffer: FrameBatch,
        head: &[u8],
        record: Record,
        ranges: ioplane_memory::LentRanges,
    ) -> LentOut {
        let bytes = self.bytes_mut(&mut buffer);
        if let Some(header) = bytes.first_chunk_mut::<HEADER>() {
            record.write(header);
        }
        bytes[HEADER..HEADER + HEAD].copy_from_slice(head);
        let (index, lent) = (buffer.index, self.slot(&buffer).lend(&ranges));
        let used = Record::space(0, record.len as usize) as u32;
        self.put(Filled { buffer, used, read: 0, frames: 1, lent: Some(LentRecord { lent, record }) });
        LentOut::new(self.id, index, lent, ranges.into_map())
    }

    /// The sender's side: asks for the memory of a frame that it has lent. [`LentFor::Waiting`] is a frame that has been revoked, or that was not
    /// asked for at once.
    pub fn reclaim(&self, out: &LentOut, how: Reclaim) -> LentFor {
        assert_eq!(out.pool(), self.id);
        let slot = self.slot_at(out.index());
        match how {
            Reclaim::IfDone => slot.look(out.lent()),
            Reclaim::Revoke => slot.revoke(out.lent()),
            // SAFETY: `out` holds the map; the buffer is of this pool, and has room for the longest frame.
            Reclaim::Copy => unsafe { slot.recall(out.lent(), self.lent_bytes(out.index())) },
        }
    }

    /// Where the bytes of a lent frame go if they are copied into its buffer.
    #[inline]
    fn lent_bytes(&self, index: u16) -> *mut u8 {
        assert!(index < self.buffers);
        // SAFETY: in the mapping, by the assertion.
        unsafe { self.start.as_ptr().add(usize::from(index) * BUFFER_BYTES + HEADER + HEAD) }
    }

    #[inline]
    fn slot(&self, buffer: &FrameBatch) -> &LentSlot {
        assert_eq!(buffer.pool, self.id);
        self.slot_at(buffer.index)
    }

    #[inline]
    fn slot_at(&self, index: u16) -> &LentSlot {
        assert!(index < self.buffers);
        let at = usize::from(self.buffers) * BUFFER_BYTES + usize::from(index) * size_of::<LentSlot>();
        // SAFETY: the slots stand behind the buffers in the mapping, aligned as lines are; zeros are valid, and slots may be shared.
        unsafe { &*self.start.as_ptr().add(at).cast::<LentSlot>() }
    }

    /// Whether whoever receives here takes lent frames.
    #[inline]
    pub fn takes_lent(&self) -> bool {
        self.takes_lent.load(Ordering::Relaxed) > 0
    }

    /// The receiver's side: it takes lent frames from now on, or has ceased to.
    pub fn set_takes_lent(&self, takes: bool) {
        if takes {
            self.takes_lent.fetch_add(1, Ordering::Relaxed);
        } else {
            self.takes_lent.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The receiver's side: takes the frame that is lent by a buffer, to copy it. `Err`: where its bytes are instead.
    #[inline]
    pub fn take_lent(&self, buffer: &FrameBatch, lent: LentUse) -> Result<LentFrame<'_>, LentBytes> {
        let slot = self.slot(buffer);
        match slot.take(lent) {
            // SAFETY: taken just now, by who has the buffer.
            LentBytes::Taken => {
                let head = &self.bytes(buffer)[HEADER..HEADER + HEAD];
                // SAFETY: it has been taken just now, and is this guard's from here on.
                Ok(unsafe { LentFrame::of_taken(slot, lent, head) })
            }
            elsewhere => Err(elsewhere),
        }
    }

    /// The receiver's side: has the frame that is lent by a buffer in the buffer.
    pub fn fetch_lent(&self, buffer: &mut FrameBatch, lent: LentUse) -> LentBytes {
        // SAFETY: the buffer is the caller's, and who sees it lent by this use sees its sender's memory mapped: that lets go of it only after it
        // has changed the word.
        unsafe { self.slot(buffer).fetch(lent, self.lent_bytes(buffer.index)) }
    }

    /// The receiver's side: gives a buffer back that has a lent frame, or what is left of one. False, and the buffer stays where it is, if the
    /// frame's sender copies into it at this moment.
    #[inline]
    pub fn discard_lent(&self, buffer: &FrameBatch, lent: LentUse) -> bool {
        self.slot(buffer).discard(lent)
    }

    /// Gives a buffer back, whatever is in it. Control side: a sender may be copying into it.
    pub fn put_back_filled(&self, filled: Filled) {
        if let Some(LentRecord { lent, .. }) = filled.lent {
            while !self.discard_lent(&filled.buffer, lent) {
                std::thread::yield_now();
            }
        }
        self.put_back(filled.buffer);
    }

    /// Whether the frame of a buffer was taken back by its sender.
    pub fn is_revoked(&self, filled: &Filled) -> bool {
        filled.lent.is_some_and(|lent| self.slot(&filled.buffer).is_revoked(lent.lent))
    }

    /// Wakes a receiver that sleeps. The sender has pushed and fenced before; the receiver says that it sleeps, fences,
    /// and looks (see [`FramePool::arm`]): one of the two sees the other.
    #[inline]
    pub fn wake_if_asleep(&self) {
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::AcqRel) {
            self.wakes.fetch_add(1, Ordering::Relaxed);
            // Fails only if the counter is full, and then the receiver is awake anyway.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Whether its receiver would have to be woken now.
    #[inline]
    pub fn sleeps(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// The receiver's side: what it has left half-read, else the oldest buffer with frames.
    #[inline]
    pub fn next(&self) -> Option<Filled> {
        if !self.left.is_empty()
            && let Some(filled) = self.left.pop()
        {
            return Some(filled);
        }
        self.inbox.pop()
    }

    /// The receiver's side: its port RX ends here, the next one goes on.
    pub fn leave(&self, filled: Filled) {
        if let Err(filled) = self.left.push(filled) {
            // Two port RXs ended half-way: the second's rest is lost.
            self.put_back_filled(filled);
        }
    }

    /// The receiver's side: from now on whoever hands over wakes. True if there is something already.
    pub fn arm(&self) -> bool {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.is_empty()
    }

    /// The receiver's side: awake. Empties the eventfd even if no sender seems to have written it: one may be about to.
    pub fn disarm(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }

    /// Whether nothing waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.inbox.is_empty() && self.left.is_empty()
    }

    /// Readable when a sender has woken the receiver.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Buffers that wait to be read.
    pub fn waiting(&self) -> usize {
        self.inbox.len() + self.left.len()
    }

    /// The bytes of a buffer.
    #[inline]
    pub fn bytes(&self, buffer: &FrameBatch) -> &[u8] {
        // SAFETY: `place` is inside the mapping, which lives as long as self; the token is borrowed, so that nobody
        // writes there meanwhile.
        unsafe { std::slice::from_raw_parts(self.place(buffer), BUFFER_BYTES) }
    }

    /// The bytes of a buffer, to write.
    #[inline]
    pub fn bytes_mut<'a>(&'a self, buffer: &'a mut FrameBatch) -> &'a mut [u8] {
        // SAFETY: as above; the token is borrowed for writing, and there is one for each buffer.
        unsafe { std::slice::from_raw_parts_mut(self.place(buffer), BUFFER_BYTES) }
    }

    #[inline]
    fn place(&self, buffer: &FrameBatch) -> *mut u8 {
        assert_eq!(buffer.pool, self.id);
        // SAFETY: a token of this pool has an index below `buffers`, and the mapping is buffers * BUFFER_BYTES long.
        unsafe { self.start.as_ptr().add(usize::from(buffer.index) * BUFFER_BYTES) }
    }

    /// The port has gone: no buffer is given out any more, and if all are here their pages go back to the system now, not
    /// only when the last sleeping sender has noticed. Control side.
    pub fn retire(&self) {
        self.retired.store(true, Ordering::SeqCst);
        while let Some(filled) = self.next() {
            self.put_back_filled(filled);
        }
        let free = std::iter::from_fn(|| self.empties.pop()).count();
        if free == usize::from(self.buffers) {
            // SAFETY: every token has just been taken out and is never given back: nobody can reach these bytes.
            let _ = unsafe {
                rustix::mm::madvise(
                    self.start.as_ptr().cast(),
                    usize::from(self.buffers) * BUFFER_BYTES,
                    rustix::mm::Advice::LinuxDontNeed,
                )
            };
        }
    }
}

impl std::ops::Drop for FramePool {
    fn drop(&mut self) {
        // SAFETY: what mmap gave; no slice outlives the borrow of self that it was given out against.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), mapped(self.buffers)) };
    }
}

impl std::fmt::Debug for FramePool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FramePool")
            .field("buffers", &self.buffers)
            .field("waiting", &self.waiting())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_read_as_written() {
        let offload =
            Offload { flags: 1, gso: 0x81, hdr_len: 2, gso_size: 3, csum_start: 65_535, csum_offset: 5 };
        let record = Record { len: 65_557, skew: 4, offload };
        let mut bytes = [0; HEADER];
        record.write(&mut bytes);
        assert_eq!(Record::of_words(words(&bytes)), record);
        assert_eq!(Record::space(0, 64), 80);
    }

    #[test]
    fn one_sender_leaves_a_quarter_to_the_others() {
        let pool = FramePool::new(8).unwrap();
        let greedy: Vec<_> = std::iter::from_fn(|| pool.take(1)).collect();
        assert_eq!(greedy.len(), 6);
        let modest: Vec<_> = std::iter::from_fn(|| pool.take(2)).collect();
        assert_eq!(modest.len(), 2);
        greedy.into_iter().for_each(|buffer| pool.put_back(buffer));
        assert!(pool.take(2).is_some() && pool.take(1).is_some());
    }

    #[test]
    fn buffers_do_not_overlap() {
        let pool = FramePool::new(4).unwrap();
        let mut buffers: Vec<_> = (0..4).map(|sender| pool.take(sender).unwrap()).collect();
        for (at, buffer) in buffers.iter_mut().enumerate() {
            pool.bytes_mut(buffer).fill(at as u8);
        }
        for (at, buffer) in buffers.iter().enumerate() {
            assert!(pool.bytes(buffer).iter().all(|byte| usize::from(*byte) == at));
        }
    }

    #[test]
    #[should_panic]
    fn a_buffer_of_another_pool_is_refused() {
        let (one, other) = (FramePool::new(2).unwrap(), FramePool::new(2).unwrap());
        let buffer = one.take(0).unwrap();
        other.put_back(buffer);
    }

    #[test]
    fn a_retired_pool_gives_nothing() {
        let pool = FramePool::new(4).unwrap();
        let out = pool.take(0).unwrap();
        pool.retire();
        assert!(pool.take(1).is_none());
        pool.hand_over(out, 16, 1);
        assert_eq!(pool.waiting(), 1, "a buffer that was out comes back, and goes with the pool");
    }
}
