//! What can be chosen about a core.

use std::time::Duration;

use ioplane_device::Budget;

use crate::ring::RingChoice;

/// How the queues of a core learn of new requests. Switchable while the core runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Notify {
    /// The core looks at every ring in turn and guests need not kick. A ring that had no work for [`CoreSettings::spin`] asks to be
    /// kicked and is left alone until it is; the core sleeps when all of its rings are.
    #[default]
    Polled,
    /// Guests kick; the core looks only at rings that were kicked or whose I/O ended. An idle queue costs nothing, a busy
    /// one an exit a batch: the right thing where no processor time can be spared, and the baseline to measure against.
    Notified,
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

/// Default of [`CoreSettings::completion_wait`].
///
/// The longest that a request waits which a guest adds while an earlier one is in flight: as long as the core has had no work, and at
/// most this. The first request of a resting ring
/// waits as long beside a busy one. A flash disk completes a read in 50 to 100 us, so mostly the completion ends the sleep. A
/// silent disk costs 20,000 looks per second, a few percent of a processor, until [`CoreSettings::spin`] is over.
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
    /// The longest that a polled core sleeps while all queues that it polls wait for completions of a disk. The first completion ends the
    /// sleep. Guests are not asked to kick, so the core looks at their rings again: after 10 us, then after sleeps that get longer up to
    /// this time. Zero: it polls meanwhile, as a [`YieldPolicy::Dedicated`] core always does.
    pub completion_wait: Duration,
    /// Most requests taken from one queue before the next queue's turn: 64 by default, some 40 us on a memory disk, which
    /// bounds what one guest's burst adds to another's latency.
    pub budget: Budget,
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
            yield_policy: YieldPolicy::default(),
            ring: RingChoice::default(),
        }
    }
}
