//! The buffers that a port TX is filling.

use std::sync::atomic::{Ordering, fence};

use super::lent::LentOut;
use super::pool::{BUFFER_BYTES, FrameBatch, FramePool, HEADER, Record};
use super::port::PortShared;
use super::snapshot::{QUEUES, SwitchSnapshot, queue_number};
use crate::MOST_PAIRS;
use crate::cause::DropReason;
use crate::offload::Offload;
use crate::spec::NET_HDR;

/// Most receiving queues that a batch reaches before it is handed over in between.
const MOST: usize = 256;

/// What ringing for a receiver that sleeps costs: a system call, in which another thread is woken.
const BELL_COST: usize = 8 << 10;

/// One receiving queue, as one port TX sees it during a batch.
#[derive(Debug)]
struct TxReceiver {
    number: u16,
    buffer: Option<FrameBatch>,
    /// Bytes of it that hold frames.
    used: u32,
    frames: u32,
    /// Frames for which there was no buffer.
    full: u32,
}

/// All of them. As long as there are any the port TX stays with its snapshot.
#[derive(Debug)]
pub(crate) struct TxBatch {
    /// By number: which of `receivers` it is, from one; zero if none.
    numbers: Box<[u16]>,
    /// Never more than [`MOST`].
    receivers: Vec<TxReceiver>,
    sender: u16,
    /// What reaching the receivers has cost, in bytes copied; see [`crate::PortTx::spent`].
    pub spent: usize,
}

/// Room for one frame in a receiver's buffer; becomes a frame by [`Room::commit`], is nothing without.
pub(crate) struct Room<'a> {
    used: &'a mut u32,
    frames: &'a mut u32,
    /// The rest of the buffer.
    bytes: &'a mut [u8],
}

impl TxBatch {
    pub fn new(sender: u16) -> Self {
        TxBatch { numbers: vec![0; QUEUES].into(), receivers: Vec::with_capacity(MOST), sender, spent: 0 }
    }

    /// Room for `len` bytes in a queue of `shared`, which is in `snapshot`. If there is none that is counted there; see
    /// [`DropReason::Full`].
    #[inline(always)]
    pub fn room<'a>(
        &'a mut self,
        snapshot: &SwitchSnapshot,
        shared: &'a PortShared,
        pair: u16,
        len: usize,
    ) -> Option<Room<'a>> {
        let pool = &shared.pools[usize::from(pair)];
        let sender = self.sender;
        let at = self.open(snapshot, shared, pair);
        let open = &mut self.receivers[at];
        if open.buffer.is_some() && open.used as usize + Record::space(0, len) > BUFFER_BYTES {
            open.hand_over(pool);
        }
        if open.buffer.is_none() {
            open.buffer = pool.take(sender);
            (open.used, open.frames) = (0, 0);
        }
        let TxReceiver { buffer: Some(buffer), used, frames, .. } = open else {
            open.full += 1;
            return None;
        };
        let bytes = &mut pool.bytes_mut(buffer)[*used as usize..];
        Some(Room { used, frames, bytes })
    }

    /// As [`TxBatch::room`], in the queue of that number at its place in the batch, if it is still there and has room in the buffer that is open.
    #[inline(always)]
    pub fn room_at<'a>(
        &'a mut self,
        snapshot: &'a SwitchSnapshot,
        number: u16,
        at: usize,
        len: usize,
    ) -> Option<Room<'a>> {
        let (_, pool) = receiver(snapshot, number)?;
        let open = self.receivers.get_mut(at).filter(|open| open.number == number)?;
        let TxReceiver { buffer: Some(buffer), used, frames, .. } = open else { return None };
        if *used as usize + Record::space(0, len) > BUFFER_BYTES {
            return None;
        }
        let bytes = &mut pool.bytes_mut(buffer)[*used as usize..];
        Some(Room { used, frames, bytes })
    }

    /// Where in the batch the queue of that number is.
    pub fn place_of(&self, number: usize) -> Option<usize> {
        usize::from(self.numbers[number]).checked_sub(1)
    }

    /// Lends a frame in a buffer of its own to a queue of `shared`, which is in `snapshot`: the frame's first bytes, its length and what is left to
    /// do for it, and where its other bytes are. Says which receiving queue that is. `None` if there is no buffer; that is not counted.
    pub fn lend(
        &mut self,
        snapshot: &SwitchSnapshot,
        shared: &PortShared,
        pair: u16,
        (head, len, offload): (&[u8], usize, Offload),
        ranges: ioplane_memory::LentRanges,
    ) -> Option<(u16, LentOut)> {
        let pool = &shared.pools[usize::from(pair)];
        let sender = self.sender;
        let at = self.open(snapshot, shared, pair);
        let open = &mut self.receivers[at];
        // In order: what is before it in the same batch first.
        open.hand_over(pool);
        let buffer = pool.take(sender)?;
        let record = Record { len: len as u32, skew: 0, offload };
        Some((open.number, pool.lend(buffer, head, record, ranges)))
    }

    /// Counts frames that were not even tried because there is no room.
    pub fn full(&mut self, snapshot: &SwitchSnapshot, shared: &PortShared, pair: u16, frames: usize) {
        let at = self.open(snapshot, shared, pair);
        self.receivers[at].full += frames as u32;
    }

    /// Which of `receivers` it is.
    #[inline(always)]
    fn open(&mut self, snapshot: &SwitchSnapshot, shared: &PortShared, pair: u16) -> usize {
        let number = queue_number(shared.place.slot, pair);
        if self.numbers[number] == 0 {
            if self.receivers.len() == MOST {
                self.flush(snapshot);
            }
            if shared.pools[usize::from(pair)].sleeps() {
                self.spent += BELL_COST;
            }
            self.receivers.push(TxReceiver {
                number: number as u16,
                buffer: None,
                used: 0,
                frames: 0,
                full: 0,
            });
            self.numbers[number] = self.receivers.len() as u16;
        }
        usize::from(self.numbers[number]) - 1
    }

    /// Hands everything over and wakes the receivers that sleep.
    #[inline]
    pub fn flush(&mut self, snapshot: &SwitchSnapshot) {
        if self.receivers.is_empty() {
            return;
        }
        for open in &mut self.receivers {
            let Some((shared, pool)) = receiver(snapshot, open.number) else { continue };
            open.hand_over(pool);
            if open.full > 0 {
                shared.received.drop(DropReason::Full, open.full.into());
            }
        }
        // Between handing over and looking for sleepers; a receiver fences between saying so and looking.
        fence(Ordering::SeqCst);
        for open in self.receivers.drain(..) {
            self.numbers[usize::from(open.number)] = 0;
            if let Some((_, pool)) = receiver(snapshot, open.number) {
                pool.wake_if_asleep();
            }
        }
    }
}

/// A receiving queue by its number.
#[inline]
pub(super) fn receiver(snapshot: &SwitchSnapshot, number: u16) -> Option<(&PortShared, &FramePool)> {
    let shared = &snapshot.entry(number / MOST_PAIRS)?.shared;
    Some((shared, &shared.pools[usize::from(number % MOST_PAIRS)]))
}

impl TxReceiver {
    #[inline]
    fn hand_over(&mut self, pool: &FramePool) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.used > 0 {
            pool.hand_over(buffer, self.used, self.frames);
        } else {
            pool.put_back(buffer);
        }
    }
}

impl Room<'_> {
    /// The bytes behind the header: at least as many as were asked for.
    #[inline]
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[HEADER..]
    }

    /// Room for the header that a driver puts before a frame, and for the frame of `len` bytes, which is what was asked for. The header is
    /// overwritten when the frame is committed.
    #[inline]
    pub fn header_and_frame(&mut self, len: usize) -> &mut [u8] {
        &mut self.bytes[HEADER - NET_HDR..HEADER + len]
    }

    /// There is a frame in it now.
    #[inline(always)]
    pub fn commit(self, record: Record) {
        if let Some(header) = self.bytes.first_chunk_mut::<HEADER>() {
            record.write(header);
            *self.used += Record::space(record.skew.into(), record.len as usize) as u32;
            *self.frames += 1;
        }
    }
}
