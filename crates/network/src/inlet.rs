//! The receiving half of a queue pair.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::cause::Drop;
use crate::counts::Tally;
use crate::offload::Offload;
use crate::shelf::{Filled, HEADER, Record, Shelf};
use crate::station::Station;

/// A frame that waits to be received.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// What is left to do for it: only what the port takes.
    pub offload: Offload,
    bytes: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The whole frame.
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Where the poller of a receiving queue takes its frames from. Dropped, it leaves what it has not popped to the next one.
#[derive(Debug)]
pub struct Inlet {
    station: Arc<Station>,
    pair: u16,
    open: Option<Filled>,
    tally: Tally,
}

impl Inlet {
    pub(crate) fn new(station: Arc<Station>, pair: u16) -> Self {
        Inlet { station, pair, open: None, tally: Tally::default() }
    }

    #[inline]
    fn shelf(&self) -> &Shelf {
        &self.station.shelves[usize::from(self.pair)]
    }

    /// The oldest frame, which stays there until [`Inlet::pop`].
    #[inline]
    pub fn front(&mut self) -> Option<Frame<'_>> {
        if self.open.is_none() {
            self.open = self.shelf().next();
        }
        let filled = self.open.as_ref()?;
        let (record, start) = record(self.shelf().bytes(&filled.tray), filled.read as usize);
        let bytes = &self.shelf().bytes(&filled.tray)[start..start + record.len as usize];
        Some(Frame { offload: record.offload, bytes })
    }

    /// The guest has the frame.
    #[inline]
    pub fn pop(&mut self) {
        if let Some(len) = self.step() {
            self.tally.frame(len);
            self.settle();
        }
    }

    /// The guest does not get the frame, for that cause.
    pub fn skip(&mut self, cause: Drop) {
        if self.step().is_some() {
            self.tally.drop(cause, 1);
            self.settle();
        }
    }

    /// Passes the frame; says how long it was.
    #[inline]
    fn step(&mut self) -> Option<usize> {
        let shelf = &self.station.shelves[usize::from(self.pair)];
        let filled = self.open.as_mut()?;
        let (record, _) = record(shelf.bytes(&filled.tray), filled.read as usize);
        filled.read += Record::space(record.skew.into(), record.len as usize) as u32;
        Some(record.len as usize)
    }

    /// Gives the tray back when it is empty; that is also when the counts are added up.
    #[inline]
    fn settle(&mut self) {
        if let Some(filled) = self.open.take_if(|filled| filled.read >= filled.used) {
            self.shelf().put_back(filled.tray);
            self.station.received.add(&mut self.tally);
        }
    }

    /// About to sleep: from now on whatever arrives makes [`Inlet::waker`] readable. True if something is there already, the
    /// queue must not sleep then (unless it waits for its guest's buffers, not for frames).
    pub fn arm(&mut self) -> bool {
        self.station.received.add(&mut self.tally);
        let there = self.shelf().arm();
        there || self.open.is_some()
    }

    /// Awake.
    pub fn disarm(&mut self) {
        self.shelf().disarm();
    }

    /// Adds up the counts of frames that have been popped; otherwise they are when their tray is empty. Called from `tidy`.
    pub fn tidy(&mut self) {
        self.station.received.add(&mut self.tally);
    }

    /// An eventfd of the port's, readable while there is something after [`Inlet::arm`].
    pub fn waker(&self) -> BorrowedFd<'_> {
        self.shelf().bell()
    }
}

/// How many frames wait on a shelf that nobody reads from or sends to meanwhile. Control side.
pub(crate) fn waiting(shelf: &Shelf) -> u64 {
    let filled: Vec<Filled> = std::iter::from_fn(|| shelf.next()).collect();
    let mut frames = 0;
    for filled in filled {
        let (bytes, mut at) = (shelf.bytes(&filled.tray), filled.read as usize);
        while at < filled.used as usize {
            let (record, _) = record(bytes, at);
            at += Record::space(record.skew.into(), record.len as usize);
            frames += 1;
        }
        if filled.read > 0 { shelf.leave(filled) } else { shelf.hand_over(filled.tray, filled.used) }
    }
    frames
}

/// The header of the frame at `at`, and where the frame begins.
#[inline]
fn record(bytes: &[u8], at: usize) -> (Record, usize) {
    let header = bytes[at..].first_chunk::<HEADER>().copied().unwrap_or_default();
    let record = Record::read(&header);
    (record, at + HEADER + usize::from(record.skew))
}

impl std::ops::Drop for Inlet {
    fn drop(&mut self) {
        self.station.received.add(&mut self.tally);
        if let Some(filled) = self.open.take() {
            self.shelf().leave(filled);
        }
    }
}
