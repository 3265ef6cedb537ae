//! A backing whose operations end later, in another order, and sometimes badly: the asynchronous half of a channel's
//! contract without a kernel.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ioplane_device::CoreContext;
use ioplane_memory::{GuestRange, GuestView};
use ioplane_storage::{
    Backing, BackingInfo, Fault, IoChannel, MAX_RANGES, Op, Outcome, StorageError, Submitted, Tag,
};

/// A disk of plain bytes.
#[derive(Debug)]
pub struct Late {
    bytes: Arc<Mutex<Vec<u8>>>,
    /// Decides, bit by bit, what ends when and how.
    whims: u64,
}

impl Late {
    /// A disk of `len` bytes, each telling its place.
    pub fn new(len: usize, whims: u64) -> Arc<Self> {
        let bytes = (0..len).map(|at| (at / 512 + at) as u8).collect();
        Arc::new(Late { bytes: Arc::new(Mutex::new(bytes)), whims })
    }
}

impl Backing for Late {
    fn info(&self) -> BackingInfo {
        BackingInfo {
            name: "late".into(),
            bytes: self.bytes.lock().unwrap_or_else(PoisonError::into_inner).len() as u64,
            logical_block: 512,
            physical_block: 4096,
            read_only: false,
            volatile_cache: true,
            discards: true,
            block_device: None,
        }
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        Ok(Box::new(LateChannel { bytes: self.bytes.clone(), whims: self.whims, depth, waiting: Vec::new() }))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).resize(bytes as usize, 0);
        Ok(())
    }

    fn wait_quiet(&self, _deadline: Instant) -> bool {
        true
    }
}

enum Owned {
    Read(u64, Vec<GuestRange>),
    Write(u64, Vec<GuestRange>),
    Zero(u64, u64),
    Nothing,
}

struct LateChannel {
    bytes: Arc<Mutex<Vec<u8>>>,
    whims: u64,
    depth: u16,
    waiting: Vec<(Tag, Owned, GuestView)>,
}

impl LateChannel {
    fn whim(&mut self) -> bool {
        self.whims = self.whims.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        self.whims >> 63 != 0
    }

    fn check(&self, view: &GuestView, offset: u64, ranges: &[GuestRange]) -> Outcome {
        if ranges.len() > MAX_RANGES {
            return Err(Fault::Io(7));
        }
        for range in ranges {
            view.iovec(*range)?;
        }
        self.fits(offset, ranges.iter().map(|range| u64::from(range.len)).sum())
    }

    fn fits(&self, offset: u64, len: u64) -> Outcome {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner).len() as u64;
        if offset.checked_add(len).is_none_or(|end| end > bytes) { Err(Fault::BeyondEnd) } else { Ok(()) }
    }

    /// Does it; a bad whim stops half-way.
    fn carry_out(&mut self, op: &Owned, view: &GuestView) -> Outcome {
        let broken = self.whim() && self.whim() && self.whim();
        let mut disk = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let stops_at = |ranges: &[GuestRange]| if broken { ranges.len() / 2 } else { ranges.len() };
        match op {
            Owned::Read(offset, ranges) => {
                let mut at = *offset as usize;
                for range in &ranges[..stops_at(ranges)] {
                    view.write(range.gpa, &disk[at..at + range.len as usize])?;
                    at += range.len as usize;
                }
            }
            Owned::Write(offset, ranges) => {
                let mut at = *offset as usize;
                for range in &ranges[..stops_at(ranges)] {
                    view.read(range.gpa, &mut disk[at..at + range.len as usize])?;
                    at += range.len as usize;
                }
            }
            Owned::Zero(offset, len) => disk[*offset as usize..(*offset + *len) as usize].fill(0),
            Owned::Nothing => {}
        }
        if broken { Err(Fault::Io(5)) } else { Ok(()) }
    }
}

impl IoChannel for LateChannel {
    fn submit(&mut self, _context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let twice = self.waiting.iter().any(|(other, ..)| *other == tag);
        assert!(!twice && tag.0 < self.depth, "{tag:?} breaks the channel's contract");
        assert!(
            self.waiting.len() < usize::from(self.depth),
            "more operations than the channel was opened for"
        );
        let (checked, owned) = match *op {
            Op::Read { offset, into } => (self.check(view, offset, into), Owned::Read(offset, into.to_vec())),
            Op::Write { offset, from } => {
                (self.check(view, offset, from), Owned::Write(offset, from.to_vec()))
            }
            Op::Flush => (Ok(()), Owned::Nothing),
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => {
                (self.fits(offset, len), Owned::Zero(offset, len))
            }
        };
        if checked.is_err() {
            return Submitted::Done(checked);
        }
        // Without the log: as with a kernel that writes, marking is the poller's duty.
        self.waiting.push((tag, owned, GuestView::new(view.map().clone())));
        Submitted::Pending
    }

    fn push(&mut self, _context: &mut CoreContext) {}

    fn held_back(&self) -> bool {
        false
    }

    fn reap(&mut self, _context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        let mut count = 0;
        while !self.waiting.is_empty() && self.whim() {
            let last = if self.whim() { 0 } else { self.waiting.len() - 1 };
            let (tag, op, view) = self.waiting.swap_remove(last);
            let outcome = self.carry_out(&op, &view);
            done(tag, outcome);
            count += 1;
        }
        count
    }

    fn in_flight(&self) -> usize {
        self.waiting.len()
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
