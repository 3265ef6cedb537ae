//! One suspect at a time.
//!
//! After a crash the journal says which requests were in hand. One of them may have killed the process, and on several
//! cores (or under `kill -9`) most of them have not. If all were replayed at once, the next death would find the innocent in
//! hand a second time, and stop their queues too. So a suspect is replayed only while no other suspect of the process is
//! between being taken and being returned.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long others wait for a suspect at most: a disk that stands still must not hold up the queues of its neighbours.
const PATIENCE: Duration = Duration::from_secs(5);

/// Whose turn it is, or whose it was: the moment, in ns of this process, until which nobody else gets one. Zero: nobody's.
static UNTIL: AtomicU64 = AtomicU64::new(0);
static BIRTH: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The right to replay a suspect; gives it back when dropped.
#[derive(Debug)]
pub struct ReplayPermit(u64);

impl ReplayPermit {
    /// `None` while somebody else has it. Never waits.
    pub fn begin() -> Option<ReplayPermit> {
        let until = UNTIL.load(Ordering::Relaxed);
        let now = BIRTH.elapsed().as_nanos() as u64;
        if now < until {
            return None;
        }
        let mine = now + PATIENCE.as_nanos() as u64;
        UNTIL
            .compare_exchange(until, mine, Ordering::Relaxed, Ordering::Relaxed)
            .ok()
            .map(|_| ReplayPermit(mine))
    }
}

impl Drop for ReplayPermit {
    fn drop(&mut self) {
        // Unless patience ran out and it is somebody else's by now.
        let _ = UNTIL.compare_exchange(self.0, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}
