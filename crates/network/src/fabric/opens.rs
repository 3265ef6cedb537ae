//! The trays that an outlet is filling.

use std::sync::atomic::{Ordering, fence};

use super::plan::{LANES, SwitchSnapshot, lane};
use super::shelf::{FrameBatch, FramePool, HEADER, Record, TRAY};
use super::station::PortShared;
use crate::MOST_PAIRS;
use crate::cause::DropReason;

/// Most receiving queues that a batch reaches before it is handed over in between.
const MOST: usize = 256;

/// What ringing for a receiver that sleeps costs: a system call, in which another thread is woken.
const BELL_COST: usize = 8 << 10;

/// One receiving queue, as one outlet sees it during a batch.
#[derive(Debug)]
struct TxReceiver {
    lane: u16,
    tray: Option<FrameBatch>,
    /// Bytes of it that hold frames.
    used: u32,
    frames: u32,
    /// Frames for which there was no tray.
    full: u32,
}

/// All of them. As long as there are any the outlet stays with its plan.
#[derive(Debug)]
pub(crate) struct TxBatch {
    /// By lane: which of `opens` it is, from one; zero if none.
    lanes: Box<[u16]>,
    /// Never more than [`MOST`].
    opens: Vec<TxReceiver>,
    sender: u16,
    /// What reaching the receivers has cost, in bytes copied; see [`crate::PortTx::spent`].
    pub spent: usize,
}

/// Room for one frame in a receiver's tray; becomes a frame by [`Room::commit`], is nothing without.
pub(crate) struct Room<'a> {
    used: &'a mut u32,
    frames: &'a mut u32,
    /// The rest of the tray.
    bytes: &'a mut [u8],
}

impl TxBatch {
    pub fn new(sender: u16) -> Self {
        TxBatch { lanes: vec![0; LANES].into(), opens: Vec::with_capacity(MOST), sender, spent: 0 }
    }

    /// Room for `len` bytes in a queue of `station`, which is in `plan`. If there is none that is counted there; see
    /// [`DropReason::Full`].
    #[inline(always)]
    pub fn room<'a>(
        &'a mut self,
        plan: &SwitchSnapshot,
        station: &'a PortShared,
        pair: u16,
        len: usize,
    ) -> Option<Room<'a>> {
        let shelf = &station.shelves[usize::from(pair)];
        let sender = self.sender;
        let at = self.open(plan, station, pair);
        let open = &mut self.opens[at];
        if open.tray.is_some() && open.used as usize + Record::space(0, len) > TRAY {
            open.hand_over(shelf);
        }
        if open.tray.is_none() {
            open.tray = shelf.take(sender);
            (open.used, open.frames) = (0, 0);
        }
        let TxReceiver { tray: Some(tray), used, frames, .. } = open else {
            open.full += 1;
            return None;
        };
        let bytes = &mut shelf.bytes_mut(tray)[*used as usize..];
        Some(Room { used, frames, bytes })
    }

    /// Counts frames that were not even tried because there is no room.
    pub fn full(&mut self, plan: &SwitchSnapshot, station: &PortShared, pair: u16, frames: usize) {
        let at = self.open(plan, station, pair);
        self.opens[at].full += frames as u32;
    }

    /// Which of `opens` it is.
    #[inline(always)]
    fn open(&mut self, plan: &SwitchSnapshot, station: &PortShared, pair: u16) -> usize {
        let lane = lane(station.place.slot, pair);
        if self.lanes[lane] == 0 {
            if self.opens.len() == MOST {
                self.flush(plan);
            }
            if station.shelves[usize::from(pair)].sleeps() {
                self.spent += BELL_COST;
            }
            self.opens.push(TxReceiver { lane: lane as u16, tray: None, used: 0, frames: 0, full: 0 });
            self.lanes[lane] = self.opens.len() as u16;
        }
        usize::from(self.lanes[lane]) - 1
    }

    /// Hands everything over and rings for whoever sleeps.
    #[inline]
    pub fn flush(&mut self, plan: &SwitchSnapshot) {
        if self.opens.is_empty() {
            return;
        }
        for open in &mut self.opens {
            let Some((station, shelf)) = receiver(plan, open.lane) else { continue };
            open.hand_over(shelf);
            if open.full > 0 {
                station.received.drop(DropReason::Full, open.full.into());
            }
        }
        // Between handing over and looking for sleepers; a receiver fences between saying so and looking.
        fence(Ordering::SeqCst);
        for open in self.opens.drain(..) {
            self.lanes[usize::from(open.lane)] = 0;
            if let Some((_, shelf)) = receiver(plan, open.lane) {
                shelf.ring_if_asleep();
            }
        }
    }
}

#[inline]
fn receiver(plan: &SwitchSnapshot, lane: u16) -> Option<(&PortShared, &FramePool)> {
    let station = &plan.face(lane / MOST_PAIRS)?.station;
    Some((station, &station.shelves[usize::from(lane % MOST_PAIRS)]))
}

impl TxReceiver {
    #[inline]
    fn hand_over(&mut self, shelf: &FramePool) {
        let Some(tray) = self.tray.take() else { return };
        if self.used > 0 {
            shelf.hand_over(tray, self.used, self.frames);
        } else {
            shelf.put_back(tray);
        }
    }
}

impl Room<'_> {
    /// The bytes behind the header: at least as many as were asked for.
    #[inline]
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[HEADER..]
    }

    /// There is a frame in it now.
    #[inline]
    pub fn commit(self, record: Record) {
        if let Some(header) = self.bytes.first_chunk_mut::<HEADER>() {
            record.write(header);
            *self.used += Record::space(record.skew.into(), record.len as usize) as u32;
            *self.frames += 1;
        }
    }
}
