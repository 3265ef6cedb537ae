//! Requests that are looked at before they are taken.
//!
//! ```text
//!   heads -> first descriptors -> indirect tables -> first and last buffers      (then Ring::take, one by one, finds all of it at hand)
//! ```
//!
//! Everything that a request consists of has just been written by the driver's processor, and each step has to wait for the one before. Taken
//! one by one, each request waits at each step; here a group of requests waits together.

use ioplane_memory::{GuestRange, GuestView};

use super::chain::Descriptor;
use crate::spec::split::{DESC_SIZE, VIRTQ_DESC_F_INDIRECT};

/// Most requests that are looked at together.
pub const GROUP: usize = 8;

/// What a request seems to begin with. A driver may change it before it is taken.
#[derive(Debug, Clone, Copy, Default)]
pub struct AheadRequest {
    /// Its first buffer.
    pub first: GuestRange,
    /// The one after that; empty if it is not known.
    pub second: GuestRange,
}

/// What the next requests seem to consist of: a hint.
#[derive(Debug, Default)]
pub struct Ahead {
    requests: [AheadRequest; GROUP],
    count: usize,
}

impl Ahead {
    /// The requests, in order.
    #[inline]
    pub fn requests(&self) -> &[AheadRequest] {
        &self.requests[..self.count]
    }

    /// Of requests that begin with the descriptors `first`, at most [`GROUP`].
    #[inline]
    pub(super) fn of(view: &GuestView, first: &[Descriptor]) -> Self {
        for descriptor in first {
            // The table, or the buffer itself.
            view.prefetch_load(range(descriptor));
        }
        let mut ahead = Ahead::default();
        for (descriptor, request) in first.iter().zip(&mut ahead.requests) {
            *request = look(view, descriptor);
            ahead.count += 1;
        }
        ahead
    }
}

/// Asks for the first and the last buffer of the request that begins with `descriptor`.
#[inline]
fn look(view: &GuestView, descriptor: &Descriptor) -> AheadRequest {
    if descriptor.flags & VIRTQ_DESC_F_INDIRECT == 0 {
        return AheadRequest { first: range(descriptor), second: GuestRange::default() };
    }
    // What is wrong with it is found by who takes it.
    let Ok((table, count)) = descriptor.table(view, 0) else { return AheadRequest::default() };
    // Drivers lay out the entries of a table in order.
    let entry = |index: u64| {
        let (gpa, word) = table.pair((index * DESC_SIZE) as usize);
        GuestRange { gpa, len: word as u32 }
    };
    let first = entry(0);
    view.prefetch_load(first);
    if count == 1 {
        return AheadRequest { first, second: GuestRange::default() };
    }
    // What the device writes stands last (2.7.4.2), so there its answer goes.
    view.prefetch_store(entry(count - 1));
    AheadRequest { first, second: entry(1) }
}

#[inline]
fn range(descriptor: &Descriptor) -> GuestRange {
    GuestRange { gpa: descriptor.addr, len: descriptor.len }
}
