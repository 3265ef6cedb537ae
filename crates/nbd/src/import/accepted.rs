//! A person has said that a disk is to go on although something of it may be lost (`ioplane disk accept`).
//!
//! ```text
//!   stopped --accept--> Accepted: copies are written again, and it is flushed --its disk fails--> AsItIs: nothing is written or flushed
//!                                            '--------- it goes on ---------> Nothing <--it goes on---'
//! ```
//! What there are copies of is given up only when its disk refuses it once more. What a connection that is lost brings to nothing is tried again.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::Shared;

const NOTHING: u8 = 0;
const ACCEPTED: u8 = 1;
const AS_IT_IS: u8 = 2;

/// See the module. Looked at and changed by who holds [`Shared::turnover`].
#[derive(Debug, Default)]
pub(super) struct AcceptedDisk {
    state: AtomicU8,
    /// How often it has gone on.
    settled: AtomicU64,
}

impl AcceptedDisk {
    /// A person has accepted it, and it has not gone on since.
    pub fn is_accepted(&self) -> bool {
        self.state.load(Ordering::Acquire) != NOTHING
    }

    /// It is to go on without a flush.
    pub fn is_as_it_is(&self) -> bool {
        self.state.load(Ordering::Acquire) == AS_IT_IS
    }

    /// Its disk has refused the copies, or a flush, once more.
    pub fn take_as_it_is(&self) {
        self.state.store(AS_IT_IS, Ordering::Release);
    }

    /// It goes on: what is in doubt from now on is another question.
    pub fn settle(&self) {
        self.settled.fetch_add(1, Ordering::AcqRel);
        self.state.store(NOTHING, Ordering::Release);
    }

    /// How often it has gone on.
    pub fn settled(&self) -> u64 {
        self.settled.load(Ordering::Acquire)
    }
}

impl Shared {
    /// A person has accepted the disk, which has been in doubt since it had gone on `settled` times. If it goes on meanwhile, by another channel that was in
    /// the same doubt, that was accepted, and nothing that comes later.
    pub async fn accept(&self, settled: u64) {
        let _turnover = self.turnover.lock().await;
        if self.accepted.settled() == settled && !self.accepted.is_accepted() {
            self.count_doubt();
            self.accepted.state.store(ACCEPTED, Ordering::Release);
        }
    }
}
