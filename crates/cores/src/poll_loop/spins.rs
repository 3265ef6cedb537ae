//! When the earliest spin of the awake slots ends. Before that no look at the clock goes through the slots.
//!
//! A slot that runs dry is entered at the look after that, with the time at which its spin ends. Of all slots only the earliest of these times is kept.
//! The slot may have work before then: the look goes through the slots in vain, and finds the next time. What else decides about a spin
//! (the core's mode, its settings, its objective) is said by [`Spins::changed`].

use super::PollLoop;
use crate::settings::Notify;

/// What a core knows of the spins of its awake slots. Times are ns of the core's age.
#[derive(Debug, Default)]
pub(super) struct Spins {
    /// No spin of a slot that was entered ends before.
    earliest_ns: u64,
    /// Slots that have run dry, or have begun or ceased to wait for a disk, since the last look. Each once: `SlotEntry::enters`.
    dry: Vec<usize>,
}

impl Spins {
    /// The core has so many slots: to note one does not allocate.
    pub(super) fn reserve(&mut self, slots: usize) {
        self.dry.reserve(slots.saturating_sub(self.dry.len()));
    }

    /// Something else than a slot's own work decides about spins now. The next look goes through all slots.
    pub(super) fn changed(&mut self) {
        self.earliest_ns = 0;
    }

    /// To be entered at the next look.
    #[inline]
    pub(super) fn ran_dry(&mut self, index: usize) {
        self.dry.push(index);
    }

    /// The slot is free, and may become another's.
    pub(super) fn forget(&mut self, index: usize) {
        self.dry.retain(|dry| *dry != index);
    }

    /// All slots are gone through.
    pub(super) fn find_anew(&mut self) {
        self.earliest_ns = u64::MAX;
    }
}

impl PollLoop {
    /// Whether the spin of an awake slot may have ended, at the last look. Enters those that have run dry.
    pub(super) fn a_spin_ends(&mut self) -> bool {
        if self.notify == Notify::Notified {
            return true;
        }
        let now_ns = self.age.at(self.context.now(), &self.shared);
        while let Some(index) = self.spins.dry.pop() {
            self.enter_spin(index, now_ns);
        }
        now_ns >= self.spins.earliest_ns || !self.objective.may_poll()
    }

    /// Enters when the spin of the slot ends, if it has one.
    pub(super) fn enter_spin(&mut self, index: usize, now_ns: u64) {
        let Some(entry) = &mut self.slots[index] else { return };
        entry.enters = false;
        if let Some(ends_ns) = entry.spin_ends(now_ns, self.notify, self.spin, &self.shared, &self.trials) {
            self.spins.earliest_ns = self.spins.earliest_ns.min(ends_ns);
        }
    }
}
