//! What can be chosen about a core.

use std::time::Duration;

use ioplane_device::Budget;
use ioplane_scheduler::CoreObjective;

use crate::ring::RingChoice;

/// How the queues of a core learn of new requests. Switchable while the core runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Notify {
    /// The core looks at every ring in turn and guests need not kick. A ring that had no work for [`CoreSettings::spin`] asks to be
    /// kicked and is left alone until it is; the core sleeps when all of its rings are.
    Polled,
    /// As polled, but for how long a ring without work is looked at: that follows from how its requests have come so far
    /// ([`ioplane_scheduler::QueuePolling`]). A ring whose requests come slowly asks to be kicked at once, and costs what it costs a notified
    /// core; one whose requests come in bursts is polled within a burst. A ring that waits for a disk is polled for [`CoreSettings::spin`],
    /// as on a polled core, unless its requests come slowly.
    #[default]
    Adaptive,
    /// Guests kick; the core looks only at rings that were kicked or whose I/O ended. An idle queue costs nothing, a busy
    /// one an exit a batch: the right thing where no processor time can be spared, and the baseline to measure against.
    Notified,
}

impl Notify {
    /// Whether a core looks by itself at the rings that are awake, so that their guests need not kick.
    #[inline]
    pub(crate) fn polls(self) -> bool {
        self != Notify::Notified
    }
}

/// How a core shares its processor with other threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum YieldPolicy {
    /// The processor is its own: it never yields, and waits for completions by polling.
    Dedicated,
    /// Yields every few turns without work, and sleeps while it waits only for completions
    /// ([`CoreSettings::completion_wait`]). A spinner that yields costs the others nothing, and one that has work is not slowed.
    #[default]
    Yields,
    /// Yields, and runs at nice 19 as well: others come first even while it has work. Where guests compute without pause on
    /// every processor their I/O becomes slow.
    Nice,
}

/// Default of [`CoreSettings::completion_wait`]: a flash disk completes a read in 50 to 100 us, so guests of a fast disk are hardly ever asked to kick.
const COMPLETION_WAIT: Duration = Duration::from_micros(50);

/// What is chosen when a core is started.
#[derive(Debug, Clone)]
pub struct CoreSettings {
    /// The processor to pin the thread to. Where that is not allowed the core runs unpinned and its reading says so.
    pub cpu: Option<usize>,
    /// How it starts; see [`crate::Core::notify`].
    pub notify: Notify,
    /// How long a polled core looks at a ring in vain before it has the guest kick, each ring by itself.
    ///
    /// 50 ms by default. That costs the guest an exit and tens of microseconds at its next request, so the core must
    /// outlast every gap of a guest that is at work: a tick of its kernel (4 ms), a file system's wait for another
    /// processor, one or two time slices of a competing thread on a host with two processors. Beyond some ten ticks
    /// nobody waits for this disk, and going on would burn a processor for nothing.
    pub spin: Duration,
    /// The longest that a polled core sleeps without having asked guests to kick, while all queues that it polls wait for completions of a disk.
    /// A completion ends the sleep. Before a longer one guests are asked to kick. Zero: it polls meanwhile, as a [`YieldPolicy::Dedicated`] core always does.
    pub completion_wait: Duration,
    /// Most requests taken from one queue before the next queue's turn: 64 by default, some 40 us on a memory disk, which
    /// bounds what one guest's burst adds to another's latency.
    pub budget: Budget,
    /// What the user asks of an adaptive core; other cores pay no heed to it. See [`crate::Core::objective`].
    pub objective: CoreObjective,
    /// Towards others on the same processor.
    pub yield_policy: YieldPolicy,
    /// Which io_uring the core makes. The best, but in tests.
    pub ring: RingChoice,
}

impl Default for CoreSettings {
    fn default() -> Self {
        CoreSettings {
            cpu: None,
            notify: Notify::default(),
            spin: Duration::from_millis(50),
            completion_wait: COMPLETION_WAIT,
            budget: Budget::of(64),
            objective: CoreObjective::default(),
            yield_policy: YieldPolicy::default(),
            ring: RingChoice::default(),
        }
    }
}
