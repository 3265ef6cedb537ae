//! One thing that two threads work with in turn.

use crossbeam_queue::ArrayQueue;

/// Where it is while nobody works with it. Each of them takes it out, and puts it back, without waiting.
#[derive(Debug)]
pub(super) struct Locker<T>(ArrayQueue<Box<T>>);

impl<T> Locker<T> {
    pub fn new(thing: Box<T>) -> Locker<T> {
        let locker = Locker(ArrayQueue::new(1));
        locker.put(thing);
        locker
    }

    /// `None` while the other one has it.
    #[inline]
    pub fn take(&self) -> Option<Box<T>> {
        self.0.pop()
    }

    #[inline]
    pub fn put(&self, thing: Box<T>) {
        let full = self.0.push(thing);
        debug_assert!(full.is_ok(), "there is one");
    }
}
