//! The trays that an outlet is filling.

use std::sync::atomic::{Ordering, fence};

use crate::cause::Drop;
use crate::plan::{LANES, Plan, lane};
use crate::shelf::{HEADER, Record, Shelf, TRAY, Tray};
use crate::{MOST_PAIRS, MOST_PORTS};

/// One receiving queue, as one outlet sees it during a poll.
#[derive(Debug, Default)]
struct Open {
    tray: Option<Tray>,
    used: u32,
    /// Frames for which there was no tray.
    full: u32,
    touched: bool,
}

/// All of them. As long as any is open the outlet stays with its plan.
#[derive(Debug)]
pub(crate) struct Opens {
    lanes: Box<[Open]>,
    /// Lanes with something to do at the next flush.
    touched: Vec<u16>,
    sender: u16,
}

/// Room for one frame in a receiver's tray; becomes a frame by [`Room::commit`], is nothing without.
pub(crate) struct Room<'a> {
    open: &'a mut Open,
    shelf: &'a Shelf,
}

impl Opens {
    pub fn new(sender: u16) -> Self {
        debug_assert_eq!(LANES, usize::from(MOST_PORTS) * usize::from(MOST_PAIRS));
        Opens {
            lanes: (0..LANES).map(|_| Open::default()).collect(),
            touched: Vec::with_capacity(LANES),
            sender,
        }
    }

    /// Room for `len` bytes in a queue of the port in `slot`. If there is none that is counted there; see
    /// [`Drop::Full`].
    #[inline]
    pub fn room<'a>(&'a mut self, slot: u16, pair: u16, shelf: &'a Shelf, len: usize) -> Option<Room<'a>> {
        let lane = lane(slot, pair);
        let open = &mut self.lanes[lane];
        if !open.touched {
            open.touched = true;
            self.touched.push(lane as u16);
        }
        let space = Record::space(0, len);
        if open.tray.is_some() && open.used as usize + space > TRAY {
            open.hand_over(shelf);
        }
        if open.tray.is_none() {
            open.tray = shelf.take(self.sender);
            open.used = 0;
            if open.tray.is_none() {
                open.full += 1;
                return None;
            }
        }
        Some(Room { open, shelf })
    }

    /// Counts frames that were not even tried because there is no room.
    pub fn full(&mut self, slot: u16, pair: u16, frames: usize) {
        self.lanes[lane(slot, pair)].full += frames as u32;
    }

    /// Hands everything over and rings for whoever sleeps.
    #[inline]
    pub fn flush(&mut self, plan: &Plan) {
        if self.touched.is_empty() {
            return;
        }
        for lane in &self.touched {
            let open = &mut self.lanes[usize::from(*lane)];
            let Some(face) = plan.face(lane / MOST_PAIRS) else { continue };
            open.hand_over(&face.station.shelves[usize::from(lane % MOST_PAIRS)]);
            if open.full > 0 {
                face.station.received.drop(Drop::Full, std::mem::take(&mut open.full).into());
            }
        }
        // Between handing over and looking for sleepers; a receiver fences between saying so and looking.
        fence(Ordering::SeqCst);
        for lane in self.touched.drain(..) {
            self.lanes[usize::from(lane)].touched = false;
            if let Some(face) = plan.face(lane / MOST_PAIRS) {
                face.station.shelves[usize::from(lane % MOST_PAIRS)].ring_if_asleep();
            }
        }
    }
}

impl Open {
    #[inline]
    fn hand_over(&mut self, shelf: &Shelf) {
        let Some(tray) = self.tray.take() else { return };
        if self.used > 0 {
            shelf.hand_over(tray, self.used);
        } else {
            shelf.put_back(tray);
        }
    }
}

impl Room<'_> {
    /// The bytes behind the header: at least as many as were asked for.
    #[inline]
    pub fn bytes(&mut self) -> &mut [u8] {
        let used = self.open.used as usize;
        match &mut self.open.tray {
            Some(tray) => &mut self.shelf.bytes_mut(tray)[used + HEADER..],
            None => &mut [],
        }
    }

    /// There is a frame in it now.
    #[inline]
    pub fn commit(self, record: Record) {
        let used = self.open.used as usize;
        if let Some(tray) = &mut self.open.tray
            && let Some(header) = self.shelf.bytes_mut(tray)[used..].first_chunk_mut::<HEADER>()
        {
            record.write(header);
            self.open.used += Record::space(record.skew.into(), record.len as usize) as u32;
        }
    }
}
