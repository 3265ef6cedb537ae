//! What a core counts. One list, from which come the numbers that the core adds to, what it publishes, and what its owner reads.

use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_scheduler::ObjectiveReport;

use crate::settings::Notify;

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a core counts, as plain numbers of its own.
        #[derive(Debug, Default, Clone, Copy)]
        pub(crate) struct Counts { $(pub(crate) $name: u64,)* }

        /// The counts as they were published last. One writer, the core; any number of readers.
        #[derive(Debug, Default)]
        pub(crate) struct PublishedCounts { $($name: AtomicU64,)* }

        impl PublishedCounts {
            /// The core's side: these are the counts from now on.
            pub(crate) fn publish(&self, counts: &Counts) {
                $(self.$name.store(counts.$name, Ordering::Relaxed);)*
            }

            /// The same reading, with the counts as they are now.
            pub(crate) fn read(&self, reading: CoreReading) -> CoreReading {
                CoreReading { $($name: self.$name.load(Ordering::Relaxed),)* ..reading }
            }
        }

        /// The meters of one core at one moment; counts are since it was started and at most some 10 ms old.
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
        pub struct CoreReading {
            /// Its number.
            pub core: u32,
            /// The processor it is pinned to; `None` if it is not, or could not be.
            pub cpu: Option<usize>,
            /// How its queues learn of requests.
            pub notify: Notify,
            /// What came of its objective in the last second.
            pub objective: ObjectiveReport,
            /// Queues that are attached or about to be.
            pub queues: u32,
            /// Queues that the core looks at each turn.
            pub awake: u32,
            /// Thousandths of the last tens of milliseconds spent in turns that found work.
            pub busy_permille: u32,
            /// Processor time of the thread, user and system, ns.
            pub cpu_ns: u64,
            /// Time since it was started, ns.
            pub age_ns: u64,
            /// Time awake in which no queue had work, ns: polling that found nothing, and what it yielded to others meanwhile.
            pub empty_ns: u64,
            $($(#[$doc])* pub $name: u64,)*
        }
    };
}

counts! {
    /// Rounds through the awake queues.
    turns,
    /// Polls of single queues, in turns and between them, whether or not they found work.
    steps,
    /// Turns that found work.
    busy_turns,
    /// Requests and completions handled.
    units,
    /// What pollers say that these cost, in bytes that could have been copied meanwhile.
    bytes,
    /// Times that it asked the kernel, for all resting queues at once, whether one was woken while others are awake.
    event_checks,
    /// Times that it went to sleep until woken.
    sleeps,
    /// Times that it slept for a millisecond at most, because a poller could not promise to wake it.
    short_sleeps,
    /// Times that it slept until a completion, for tens of microseconds at most, because all queues that it polled waited for one.
    waits,
    /// Times that it was woken by a descriptor.
    wakes,
    /// Messages handled.
    messages,
    /// Time in turns that found work, ns.
    busy_ns,
    /// Time asleep, ns.
    slept_ns,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_published_is_read() {
        let published = PublishedCounts::default();
        published.publish(&Counts { turns: 1, waits: 2, slept_ns: 3, ..Counts::default() });
        let reading = published.read(CoreReading { core: 4, ..CoreReading::default() });
        assert_eq!(
            reading,
            CoreReading { core: 4, turns: 1, waits: 2, slept_ns: 3, ..CoreReading::default() }
        );
    }
}
