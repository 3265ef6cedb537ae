//! Pollers that have stopped, and the numbers of pollers.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_scheduler::QueuePolling;

use crate::poller::{Poller, Stop};

/// Number of a poller, unique in the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PollerId(u64);

impl PollerId {
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        PollerId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// The bare number, for an event loop's user data.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// A poller that has stopped, on its way back to its device. Made by [`crate::PollerSlot::step`] only.
pub struct Parked {
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) queue: u16,
    pub(crate) stop: Stop,
    /// Of one that leaves its core for another: what the core knows of its requests.
    pub(crate) polling: Option<Box<QueuePolling>>,
}

impl Parked {
    /// The queue that it served.
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// Whether it may be polled on another core as it is.
    pub(crate) fn goes_on(&self) -> bool {
        self.stop == Stop::Drained && self.poller.goes_on()
    }

    /// How it stopped.
    pub fn stop(&self) -> Stop {
        self.stop
    }

    /// The poller as the type that its device knows, or the parked poller back.
    pub fn into_poller<P: Poller>(self) -> Result<Box<P>, Parked> {
        let Parked { poller, queue, stop, polling } = self;
        if (&*poller as &dyn Any).is::<P>() {
            let any: Box<dyn Any> = poller;
            match any.downcast::<P>() {
                Ok(poller) => Ok(poller),
                Err(_) => unreachable!("asked a line above"),
            }
        } else {
            Err(Parked { poller, queue, stop, polling })
        }
    }
}

impl fmt::Debug for Parked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parked").field("queue", &self.queue).field("stop", &self.stop).finish_non_exhaustive()
    }
}
