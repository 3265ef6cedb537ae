//! A backing whose writes are noted.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use ioplane_device::CoreContext;
use ioplane_memory::{GuestRange, GuestView};

use super::blocks::unit;
use super::comparer::Comparer;
use crate::channel::{Backing, BackingInfo, IoChannel, Op, Outcome, StorageError, Submitted, Tag};
use crate::mirror::ranges::DirtyMap;

/// A backing while it is compared: what is written is noted. Otherwise it is what it was.
#[derive(Debug)]
pub struct Watched {
    disk: Arc<dyn Backing>,
    bytes: u64,
    written: Arc<DirtyMap>,
}

impl Watched {
    /// Nothing has been written yet. It is put in at a quiescent point, so that no write is under way of which it does not know.
    pub fn new(disk: Arc<dyn Backing>) -> Arc<Self> {
        let bytes = disk.info().bytes;
        Arc::new(Watched { disk, bytes, written: Arc::new(DirtyMap::none(bytes, unit(bytes))) })
    }

    /// The one that is watched.
    pub fn disk(&self) -> &Arc<dyn Backing> {
        &self.disk
    }

    /// What compares it with `other`. Sizes may differ: what only one of both has is not looked at.
    pub fn comparer(&self, other: &Arc<dyn Backing>) -> Result<Comparer, StorageError> {
        Comparer::new(&self.disk, other, &self.written)
    }
}

impl Backing for Watched {
    /// As long as it was: it is not known what is written beyond.
    fn info(&self) -> BackingInfo {
        BackingInfo { bytes: self.bytes, ..self.disk.info() }
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        let disk = self.disk.channel(depth)?;
        Ok(Box::new(WatchedChannel { disk, written: self.written.clone() }))
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        let why = "it is being compared: cancel that, or wait for it".to_owned();
        Err(StorageError::Size { image: self.disk.info().name, bytes, why })
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.disk.wait_quiet(deadline)
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        self.disk.file()
    }

    fn trust_quiet(&self) {
        self.disk.trust_quiet();
    }
}

struct WatchedChannel {
    disk: Box<dyn IoChannel>,
    written: Arc<DirtyMap>,
}

impl WatchedChannel {
    /// Before the write begins: who has read any byte of it meets the mark.
    #[inline]
    fn mark(&self, op: &Op<'_>) {
        let (offset, len) = match *op {
            Op::Read { .. } | Op::Flush => return,
            Op::Write { offset, from } => (offset, from.iter().map(|range| u64::from(range.len)).sum()),
            Op::Discard { offset, len } | Op::WriteZeroes { offset, len, .. } => (offset, len),
        };
        // What overflows is beyond the end, and refused below.
        if len > 0 && offset.checked_add(len).is_some() {
            self.written.mark(offset, len);
        }
    }
}

impl IoChannel for WatchedChannel {
    fn slice(&self) -> u32 {
        self.disk.slice()
    }

    #[inline]
    fn expect(&self, view: &GuestView, read: bool, offset: u64, buffer: GuestRange) {
        self.disk.expect(view, read, offset, buffer);
    }

    fn submit(&mut self, context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        self.mark(op);
        self.disk.submit(context, view, op, tag)
    }

    fn push(&mut self, context: &mut CoreContext) {
        self.disk.push(context);
    }

    fn held_back(&self) -> bool {
        self.disk.held_back()
    }

    fn held_until(&self) -> Option<Instant> {
        self.disk.held_until()
    }

    fn set_draining(&mut self, draining: bool) {
        self.disk.set_draining(draining);
    }

    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        self.disk.reap(context, done)
    }

    fn in_flight(&self) -> usize {
        self.disk.in_flight()
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        self.disk.waker()
    }

    fn detach(&mut self, context: &mut CoreContext) {
        self.disk.detach(context);
    }
}
