//! A lock-free stack of small numbers: which buffers are empty.
//!
//! Last in, first out, because the buffer that was emptied last is the one that the caches still have: a queue that keeps up
//! works in one or two buffers, whatever it was given.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// No number.
const NONE: u32 = u32::MAX;

/// Numbers below a limit, each in it once at most. Any thread pushes and pops.
#[derive(Debug)]
pub(crate) struct IndexStack {
    /// How often it has changed (upper half, so that a stale compare fails), and the topmost number.
    top: AtomicU64,
    /// The number below each.
    below: Box<[AtomicU32]>,
}

impl IndexStack {
    /// All numbers below `limit`, zero on top.
    pub fn full(limit: u16) -> Self {
        let limit = u32::from(limit);
        let below = (0..limit).map(|at| AtomicU32::new(if at + 1 < limit { at + 1 } else { NONE })).collect();
        IndexStack { top: AtomicU64::new(u64::from(if limit == 0 { NONE } else { 0 })), below }
    }

    /// Takes the topmost. What was done before it was pushed is visible afterwards: every change of `top` is a
    /// read-modify-write, so the release of each push reaches past the pops and pushes that follow it.
    pub fn pop(&self) -> Option<u16> {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let number = top as u32;
            if number == NONE {
                return None;
            }
            let below = self.below[number as usize].load(Ordering::Relaxed);
            match self.top.compare_exchange_weak(top, next(top, below), Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(number as u16),
                Err(now) => top = now,
            }
        }
    }

    /// Puts `number`, which was popped, on top.
    pub fn push(&self, number: u16) {
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            self.below[usize::from(number)].store(top as u32, Ordering::Relaxed);
            let put = next(top, u32::from(number));
            match self.top.compare_exchange_weak(top, put, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }
}

fn next(top: u64, number: u32) -> u64 {
    ((top >> 32) + 1) << 32 | u64::from(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_in_first_out() {
        let stack = IndexStack::full(3);
        assert_eq!([stack.pop(), stack.pop(), stack.pop(), stack.pop()], [Some(0), Some(1), Some(2), None]);
        stack.push(1);
        stack.push(2);
        assert_eq!([stack.pop(), stack.pop(), stack.pop()], [Some(2), Some(1), None]);
        assert_eq!(IndexStack::full(0).pop(), None);
    }

    #[test]
    fn nobody_has_the_same_number_at_once() {
        let stack = IndexStack::full(4);
        let held: Vec<AtomicU32> = (0..4).map(|_| AtomicU32::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        let Some(number) = stack.pop() else { continue };
                        assert_eq!(held[usize::from(number)].fetch_add(1, Ordering::Relaxed), 0);
                        held[usize::from(number)].fetch_sub(1, Ordering::Relaxed);
                        stack.push(number);
                    }
                });
            }
        });
        let mut left: Vec<_> = std::iter::from_fn(|| stack.pop()).collect();
        left.sort();
        assert_eq!(left, [0, 1, 2, 3]);
    }
}
