//! Many small requests at once.

use ioplane_memory::{GuestRange, GuestView};

use super::{Ring, RingRequest};
use crate::spec::split::VIRTQ_DESC_F_WRITE;

/// Most requests of a [`Batch`]: some three lines each, of which a first cache can hold hundreds.
pub const MOST_PLAIN: usize = 32;

/// Requests of one buffer each, taken together by [`Ring::take_plain`]. Each is to be completed or given back, as if it had
/// been taken alone.
#[derive(Debug)]
pub struct Batch(pub(super) Vec<(RingRequest, GuestRange)>);

impl Default for Batch {
    fn default() -> Self {
        Batch(Vec::with_capacity(MOST_PLAIN))
    }
}

impl Batch {
    /// The requests, in the order in which they were taken.
    #[inline]
    pub fn buffers(&self) -> impl ExactSizeIterator<Item = GuestRange> {
        self.0.iter().map(|(_, buffer)| *buffer)
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Ends it. The first requests, with as many bytes written for the driver as `written` says, are completed; the others given back to `ring` as if
    /// they had not been taken.
    #[inline]
    pub fn settle(&mut self, ring: &mut Ring, written: impl ExactSizeIterator<Item = u32>) {
        self.keep(ring, written.len());
        ring.complete_all(self.0.drain(..).map(|(taken, _)| taken).zip(written));
    }

    /// As [`Batch::settle`], where the request after the first ones could not be carried out: it is in flight for ever.
    #[cold]
    pub fn settle_fault(&mut self, ring: &mut Ring, written: impl ExactSizeIterator<Item = u32>) {
        if let Some(taken) = self.settle_begun(ring, written) {
            taken.abandon();
        }
    }

    /// As [`Batch::settle`], where the request after the first ones is not done yet: it stays in flight, and is the caller's.
    #[cold]
    pub fn settle_begun(
        &mut self,
        ring: &mut Ring,
        written: impl ExactSizeIterator<Item = u32>,
    ) -> Option<RingRequest> {
        let count = written.len();
        self.keep(ring, count + 1);
        let last = if self.0.len() > count { self.0.pop() } else { None };
        self.settle(ring, written);
        last.map(|(taken, _)| taken)
    }

    /// Empties it: each request is the caller's from here on.
    #[inline]
    pub fn take(&mut self) -> impl Iterator<Item = (RingRequest, GuestRange)> {
        self.0.drain(..)
    }

    /// Gives all but the first `count` back to `ring`, the last one first.
    #[inline]
    pub fn keep(&mut self, ring: &mut Ring, count: usize) {
        while self.0.len() > count
            && let Some((taken, _)) = self.0.pop()
        {
            ring.rewind(taken);
        }
    }
}

/// What is done with the buffers of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BufferAccess {
    /// They are read.
    Load,
    /// They are written, one by one and soon.
    Store,
    /// They are written as one long one, by who asks for each in its turn.
    StoreLong,
}

impl BufferAccess {
    /// The flags of a descriptor of one such buffer.
    #[inline]
    pub(super) fn flags(self) -> u16 {
        match self {
            BufferAccess::Load => 0,
            BufferAccess::Store | BufferAccess::StoreLong => VIRTQ_DESC_F_WRITE,
        }
    }

    /// Asks for the beginning of a buffer: a header and a small frame.
    #[inline]
    pub(super) fn ask(self, view: &GuestView, buffer: GuestRange) {
        match self {
            BufferAccess::Load => view.prefetch_load(buffer),
            BufferAccess::Store => view.prefetch_store(buffer),
            BufferAccess::StoreLong => {}
        }
    }
}

/// Bytes of a line of a cache.
pub(super) const LINE: usize = 64;
