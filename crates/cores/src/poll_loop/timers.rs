//! What a core does at a certain time.

use std::time::Instant;

/// What is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Timer {
    /// Pollers are tidied and the meters published.
    Tidy,
    /// The slots that nothing is sure to wake are looked at.
    Unwakeable,
    /// The resting slot of that index is stepped: its poller has asked for it.
    Slot(usize),
}

/// The timers of one core: few, so that a sorted list is faster than a heap and does not allocate once it has grown.
#[derive(Debug, Default)]
pub(super) struct Timers {
    /// The nearest last.
    set: Vec<(Instant, Timer)>,
}

impl Timers {
    /// Makes room for the timers of so many slots, so that setting one does not allocate.
    pub(super) fn reserve(&mut self, slots: usize) {
        let room = slots + 2;
        self.set.reserve(room.saturating_sub(self.set.len()));
    }

    /// Sets `timer`, which is not set, to `at`.
    pub(super) fn insert(&mut self, timer: Timer, at: Instant) {
        let place = self.set.partition_point(|(other, _)| *other > at);
        self.set.insert(place, (at, timer));
    }

    /// Sets `timer` to `at` unless it is set.
    pub(super) fn ensure(&mut self, timer: Timer, at: Instant) {
        if !self.is_set(timer) {
            self.insert(timer, at);
        }
    }

    /// Takes `timer` back.
    pub(super) fn clear(&mut self, timer: Timer) {
        if let Some(place) = self.set.iter().rposition(|(_, other)| *other == timer) {
            self.set.remove(place);
        }
    }

    pub(super) fn is_set(&self, timer: Timer) -> bool {
        self.set.iter().rev().any(|(_, other)| *other == timer)
    }

    /// When the nearest is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.set.last().map(|(at, _)| *at)
    }

    /// Takes the nearest if it is due.
    #[inline]
    pub(super) fn due(&mut self, now: Instant) -> Option<Timer> {
        self.set.pop_if(|(at, _)| *at <= now).map(|(_, timer)| timer)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn timers_come_in_their_order_and_once() {
        let start = Instant::now();
        let ms = |n| start + Duration::from_millis(n);
        let mut timers = Timers::default();
        assert_eq!((timers.next(), timers.due(ms(9))), (None, None));
        timers.ensure(Timer::Tidy, ms(5));
        timers.ensure(Timer::Unwakeable, ms(1));
        timers.ensure(Timer::Tidy, ms(0));
        assert_eq!(timers.next(), Some(ms(1)));
        assert_eq!(timers.due(ms(0)), None);
        assert_eq!(timers.due(ms(7)), Some(Timer::Unwakeable));
        assert!(timers.is_set(Timer::Tidy) && !timers.is_set(Timer::Unwakeable));
        assert_eq!(timers.due(ms(7)), Some(Timer::Tidy));
        assert_eq!(timers.due(ms(7)), None);
        timers.ensure(Timer::Tidy, ms(8));
        timers.clear(Timer::Tidy);
        timers.clear(Timer::Unwakeable);
        assert_eq!(timers.next(), None);
        for (slot, at) in [(7, 3), (8, 1), (9, 2)] {
            timers.insert(Timer::Slot(slot), ms(at));
        }
        timers.clear(Timer::Slot(9));
        assert_eq!(timers.due(ms(3)), Some(Timer::Slot(8)));
        assert_eq!(timers.due(ms(3)), Some(Timer::Slot(7)));
        assert_eq!(timers.due(ms(3)), None);
    }
}
