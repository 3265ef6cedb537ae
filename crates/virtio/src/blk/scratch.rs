//! What a poll needs to read requests, one for each thread that polls: no queue keeps anything in it from one poll to the next.
//!
//! It is 14 KiB. A queue that had its own would keep it while it is idle.

use std::cell::Cell;

use ioplane_memory::GuestRange;

use super::request::Parser;
use super::spec::SEG_MAX;
use crate::ring::Chain;

pub(super) struct Scratch {
    pub(super) chain: Chain,
    pub(super) parser: Parser,
    /// The buffers of the slice in hand.
    pub(super) cut: Vec<GuestRange>,
}

impl Default for Scratch {
    fn default() -> Self {
        Scratch { chain: Chain::new(), parser: Parser::new(), cut: Vec::with_capacity(SEG_MAX as usize + 2) }
    }
}

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

/// Takes this thread's; to be given back. Allocates where there is none.
#[inline]
pub(super) fn borrow() -> Box<Scratch> {
    SCRATCH.take().unwrap_or_default()
}

/// Gives it back.
#[inline]
pub(super) fn give_back(scratch: Box<Scratch>) {
    SCRATCH.set(Some(scratch));
}
