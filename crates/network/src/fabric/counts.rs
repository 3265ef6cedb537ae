//! Counting frames: plain numbers while a batch is made, added up afterwards.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::cause::DropReason;

/// How many causes there are.
pub(crate) const CAUSES: usize = DropReason::ALL.len();

/// The counts of one direction of one port. Several pollers add to them, once a batch.
#[derive(Debug)]
pub(crate) struct Counts {
    frames: AtomicU64,
    bytes: AtomicU64,
    drops: [AtomicU64; CAUSES],
}

/// What one poller has counted since it last added it up.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Tally {
    pub frames: u64,
    pub bytes: u64,
    drops: [u64; CAUSES],
    dropped: bool,
}

/// One direction of a port, at one moment.
#[derive(Debug, Default, Clone, PartialEq, Eq, serde::Serialize)]
pub struct SideReading {
    /// Frames. Sent: accepted by the switch. Received: taken by the port's guest.
    pub frames: u64,
    /// Their bytes, without offload headers.
    pub bytes: u64,
    /// Frames dropped, by cause; those that have not happened are not listed.
    pub drops: Vec<(DropReason, u64)>,
}

impl SideReading {
    /// Frames dropped for `cause`.
    pub fn dropped(&self, cause: DropReason) -> u64 {
        self.drops.iter().find(|(other, _)| *other == cause).map_or(0, |(_, count)| *count)
    }

    /// Frames dropped for any cause.
    pub fn dropped_in_all(&self) -> u64 {
        self.drops.iter().map(|(_, count)| count).sum()
    }
}

impl Tally {
    #[inline]
    pub fn frame(&mut self, bytes: usize) {
        self.frames += 1;
        self.bytes += bytes as u64;
    }

    #[inline]
    pub fn drop(&mut self, cause: DropReason, frames: u64) {
        self.drops[cause as usize] += frames;
        self.dropped = true;
    }
}

impl Counts {
    pub fn new() -> Self {
        Counts {
            frames: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            drops: [const { AtomicU64::new(0) }; CAUSES],
        }
    }

    /// Adds what has been tallied, and begins anew.
    #[inline]
    pub fn add(&self, tally: &mut Tally) {
        if tally.frames > 0 {
            self.frames.fetch_add(tally.frames, Ordering::Relaxed);
            self.bytes.fetch_add(tally.bytes, Ordering::Relaxed);
        }
        if tally.dropped {
            for (count, more) in self.drops.iter().zip(&tally.drops).filter(|(_, more)| **more > 0) {
                count.fetch_add(*more, Ordering::Relaxed);
            }
            tally.drops = [0; CAUSES];
        }
        (tally.frames, tally.bytes, tally.dropped) = (0, 0, false);
    }

    /// Counts drops at once.
    #[inline]
    pub fn drop(&self, cause: DropReason, frames: u64) {
        self.drops[cause as usize].fetch_add(frames, Ordering::Relaxed);
    }

    /// Adds what was counted elsewhere.
    pub fn restore(&self, reading: &SideReading) {
        self.frames.fetch_add(reading.frames, Ordering::Relaxed);
        self.bytes.fetch_add(reading.bytes, Ordering::Relaxed);
        for (cause, count) in &reading.drops {
            self.drop(*cause, *count);
        }
    }

    pub fn read(&self) -> SideReading {
        let drops = DropReason::ALL.iter().zip(&self.drops);
        SideReading {
            frames: self.frames.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            drops: drops
                .map(|(cause, count)| (*cause, count.load(Ordering::Relaxed)))
                .filter(|(_, count)| *count > 0)
                .collect(),
        }
    }
}
