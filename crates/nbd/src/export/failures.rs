//! Flushes that have failed: counted, and answered once the count is where the next process finds it
//! (docs/decisions/0044-remote-requests-once.md).
//!
//! ```text
//!   I/O core:      a flush fails -> report ------------------------> its error is answered
//!   control side:                     '-> next -> (written down) -> recorded
//! ```
//! Clients that were told of fewer failures ([`super::Export::bind`]) are read no more before that: what they ask for next comes by a connection that tells
//! them of this one.

#![expect(clippy::disallowed_types, reason = "whom to wake: control plane")]

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;

use super::bell::Bell;

/// How many flushes of an export have failed.
#[derive(Debug, Default)]
pub struct FailedFlushes {
    failed: AtomicU64,
    recorded: AtomicU64,
    /// Somebody writes the count down.
    is_watched: AtomicBool,
    waker: AtomicWaker,
    bells: Mutex<Vec<Weak<Bell>>>,
}

impl FailedFlushes {
    /// How many there are, those of earlier processes included. One that has just failed counts before its client hears of it.
    pub fn count(&self) -> u64 {
        self.failed.load(Ordering::Acquire)
    }

    /// So many had failed before this export was there.
    pub fn begin_at(&self, count: u64) {
        self.failed.store(count, Ordering::Release);
        self.recorded.fetch_max(count, Ordering::AcqRel);
    }

    /// From now on failures are answered once they are [`FlushRecorder::recorded`]. Until this is called, and after the recorder is dropped, at once.
    pub fn recorder(self: &Arc<Self>) -> FlushRecorder {
        self.is_watched.store(true, Ordering::Release);
        FlushRecorder(self.clone())
    }

    /// One more has failed: its number, if its answer has to wait for that to be recorded.
    pub fn report(&self) -> Option<u64> {
        let number = self.failed.fetch_add(1, Ordering::AcqRel) + 1;
        let waits = self.is_watched.load(Ordering::Acquire);
        self.waker.wake();
        waits.then_some(number)
    }

    /// Whether the failure with that number may be answered.
    pub fn is_recorded(&self, number: u64) -> bool {
        self.recorded.load(Ordering::Acquire) >= number || !self.is_watched.load(Ordering::Acquire)
    }

    /// Rings `bell` whenever some were recorded. Control plane.
    pub(super) fn tell(&self, bell: &Arc<Bell>) {
        let mut bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        bells.retain(|other| other.strong_count() > 0);
        bells.push(Arc::downgrade(bell));
    }

    fn ring(&self) {
        let bells = self.bells.lock().unwrap_or_else(PoisonError::into_inner);
        bells.iter().filter_map(Weak::upgrade).for_each(|bell| bell.ring());
    }
}

/// Who writes the count down. One at a time.
#[derive(Debug)]
pub struct FlushRecorder(Arc<FailedFlushes>);

impl FlushRecorder {
    /// The count, once it is greater than what was recorded. Dropping the future loses nothing.
    pub async fn next(&self) -> u64 {
        poll_fn(|context| self.poll(context)).await
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<u64> {
        self.0.waker.register(context.waker());
        let count = self.count();
        if count > self.0.recorded.load(Ordering::Acquire) { Poll::Ready(count) } else { Poll::Pending }
    }

    /// How many have failed by now.
    pub fn count(&self) -> u64 {
        self.0.count()
    }

    /// The first `count` may be answered: they are written down, or nobody is let in until they are.
    pub fn recorded(&self, count: u64) {
        self.0.recorded.fetch_max(count, Ordering::AcqRel);
        self.0.ring();
    }
}

impl Drop for FlushRecorder {
    /// Nobody waits for what nobody does.
    fn drop(&mut self) {
        self.0.is_watched.store(false, Ordering::Release);
        self.0.ring();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_waits_for_the_record_only_while_somebody_writes_it() {
        let failed = Arc::new(FailedFlushes::default());
        failed.begin_at(7);
        assert_eq!((failed.report(), failed.count()), (None, 8));
        failed.begin_at(8);
        let bell = Bell::new().unwrap();
        failed.tell(&bell);
        let recorder = failed.recorder();
        let (first, second) = (failed.report().unwrap(), failed.report().unwrap());
        assert_eq!((first, second, recorder.count()), (9, 10, 10));
        assert!(!failed.is_recorded(first) && !bell.heard());
        recorder.recorded(first);
        assert!(failed.is_recorded(first) && !failed.is_recorded(second) && bell.heard());
        drop(recorder);
        assert!(failed.is_recorded(second) && bell.heard());
    }
}
