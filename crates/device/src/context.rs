//! What an I/O core lends its pollers for the length of one poll.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::clock::{Clock, Monotonic};

/// Bytes of [`CoreContext::scratch`]: room for the longest frame of a network, with headers.
pub const SCRATCH: usize = 128 << 10;

/// What the pollers of one core share: its clock and its scratch memory. One for each core, on the core's thread; whoever steps
/// seats by hand has one of its own.
pub struct CoreContext {
    clock: Arc<dyn Clock>,
    now: Instant,
    scratch: Box<[u8; SCRATCH]>,
}

impl CoreContext {
    /// A context that tells the time by `clock`. Allocates.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let scratch = vec![0; SCRATCH].into_boxed_slice().try_into();
        let now = clock.now();
        CoreContext { clock, now, scratch: scratch.unwrap_or_else(|_| unreachable!("made that long")) }
    }

    /// The core's last look at the clock: never later than now, and some tens of microseconds ago at most while it has work.
    /// Costs a load.
    #[inline]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Looks at the clock, which the core does now and then; some 25 ns.
    #[inline]
    pub fn look(&mut self) -> Instant {
        self.now = self.clock.now();
        self.now
    }

    /// Memory for what a poller needs within one poll. Holds whatever the last one left there.
    #[inline]
    pub fn scratch(&mut self) -> &mut [u8; SCRATCH] {
        &mut self.scratch
    }
}

/// By the clock of the host.
impl Default for CoreContext {
    fn default() -> Self {
        CoreContext::new(Arc::new(Monotonic))
    }
}

impl fmt::Debug for CoreContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoreContext")
            .field("clock", &self.clock)
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}
