//! Counting what queues do: plain numbers on the data path, published now and then.

use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets of a [`Histogram`]: 8 for each power of two of nanoseconds, up to about 18 minutes. What takes longer counts in the last.
const BUCKETS: usize = 8 * 38;

macro_rules! meters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What a poller counts, as plain numbers of its own; published to a [`Meter`] in `tidy`.
        #[derive(Debug, Default, Clone, Copy)]
        pub struct Tally { $($(#[$doc])* pub $name: u64,)* }

        /// The published counts of one queue. One writer (its poller), any number of readers.
        #[derive(Debug, Default)]
        pub struct Meter {
            $($name: AtomicU64,)*
            /// Device time: from taking a request to having its result. The time for which the result of a disk lies with the kernel until the core
            /// looks is part of it, since nobody notes when it ended.
            pub latency: Histogram,
            /// Waiting for the core: how long a request may have been in the ring before it was taken. While the ring is polled
            /// that is an upper bound, the time since the core saw it empty. Of a request whose kick the core was asked for nobody
            /// knows when it came, and the last look at the ring may be long ago. It counts from [`crate::CoreContext::kicked`] on: what a
            /// wake-up of this core takes, as it was measured, is part of it.
            pub wait: Histogram,
            /// Time to the interrupt: from when the core has the last of the results that it is about to show the driver until the call that
            /// interrupts the driver for them has returned. One count for each interrupt, whatever the number of results. Nothing is
            /// counted where the driver does not ask for an interrupt (VIRTIO_F_EVENT_IDX or its flag, virtio 1.3, 2.7.7 and 2.8.10),
            /// where it has none, and for the one interrupt of a queue that resumes. What follows cannot be seen from here: the wake-up of
            /// the vCPU, and of the VMM where that forwards interrupts.
            pub interrupt: Histogram,
        }

        /// Counts at one moment.
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct MeterReading { $($(#[$doc])* pub $name: u64,)* }

        impl Meter {
            /// Publishes `tally` as the counts from now on.
            pub fn publish(&self, tally: &Tally) {
                $(self.$name.store(tally.$name, Ordering::Relaxed);)*
            }
            /// Goes on from counts that another process has had, by name; what is not known here is left out. Before any
            /// poller has it.
            pub fn restore<'n>(&self, counts: impl Iterator<Item = (&'n str, u64)>) {
                for (name, count) in counts {
                    match name {
                        $(stringify!($name) => self.$name.store(count, Ordering::Relaxed),)*
                        _ => {}
                    }
                }
            }
            /// The counts, to go on from (a queue that is resumed continues its meter).
            pub fn tally(&self) -> Tally {
                Tally { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
            /// The counts now.
            pub fn read(&self) -> MeterReading {
                MeterReading { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
        impl MeterReading {
            /// Each count by name.
            pub fn each(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }
            /// Adds another queue's counts.
            pub fn add(&mut self, other: &MeterReading) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

meters! {
    /// Requests put into the used ring.
    requests,
    /// Bytes read by the guest.
    bytes_read,
    /// Bytes written by the guest.
    bytes_written,
    /// Kicks taken: the sum of the kick eventfd.
    kicks,
    /// Batches of requests that were found by looking, so that the driver need not kick.
    kicks_avoided,
    /// Interrupts sent.
    interrupts,
    /// Batches published without an interrupt, because the driver did not ask for one.
    interrupts_avoided,
    /// Polls that left something in the ring because a limit held it back.
    limited,
    /// Requests that ended with an error status for want of the backing: input or output error.
    errors_io,
    /// Requests that ended with an error status: no space, or beyond the end.
    errors_space,
    /// Requests that ended with an error status: malformed or not allowed (write to a read-only disk).
    errors_request,
    /// Requests of a type that this device does not know.
    unsupported,
    /// Guest faults: each stops the queue.
    faults,
    /// Requests replayed after a crash.
    replayed,
}

/// A histogram of times with a relative error below one in eight. One writer, any number of readers, no locks.
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: [const { AtomicU64::new(0) }; BUCKETS] }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Histogram").field("count", &self.snapshot().iter().sum::<u64>()).finish()
    }
}

#[inline]
fn bucket(ns: u64) -> usize {
    if ns < 8 {
        return ns as usize;
    }
    let power = 63 - ns.leading_zeros() as usize;
    (((power - 2) * 8) + ((ns >> (power - 3)) & 7) as usize).min(BUCKETS - 1)
}

/// Upper edge of a bucket, in ns.
fn edge(bucket: usize) -> u64 {
    if bucket < 8 {
        return bucket as u64;
    }
    let (power, step) = (bucket / 8 + 2, (bucket % 8) as u64);
    ((8 + step + 1) << (power - 3)) - 1
}

impl Histogram {
    /// Counts `times` requests that took `ns` nanoseconds. Only the queue's poller calls it.
    #[inline]
    pub fn record(&self, ns: u64, times: u64) {
        let bucket = &self.buckets[bucket(ns)];
        bucket.store(bucket.load(Ordering::Relaxed) + times, Ordering::Relaxed);
    }

    /// The counts of all buckets now.
    pub fn snapshot(&self) -> Vec<u64> {
        self.buckets.iter().map(|b| b.load(Ordering::Relaxed)).collect()
    }

    /// The longest time that counts in a bucket of a snapshot, ns.
    pub fn edge_ns(bucket: usize) -> u64 {
        edge(bucket)
    }

    /// The time below which `part` (0 to 1) of the counts of `snapshot` lie, in ns; zero if there are none.
    pub fn quantile(snapshot: &[u64], part: f64) -> u64 {
        let total: u64 = snapshot.iter().sum();
        let mut left = (total as f64 * part).ceil().max(1.0) as u64;
        for (index, count) in snapshot.iter().enumerate() {
            if *count >= left {
                return if total == 0 { 0 } else { edge(index) };
            }
            left -= count;
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_an_eighth() {
        for ns in [0u64, 1, 7, 8, 9, 100, 12345, 1 << 20, (1 << 33) + 5] {
            let histogram = Histogram::default();
            histogram.record(ns, 3);
            let p50 = Histogram::quantile(&histogram.snapshot(), 0.5);
            assert!(p50 >= ns && p50 as f64 <= ns as f64 * 1.13 + 1.0, "{ns} read as {p50}");
        }
        assert_eq!(Histogram::quantile(&Histogram::default().snapshot(), 0.99), 0);
    }
}
