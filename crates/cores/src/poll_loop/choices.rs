//! What is noted of each slot for the control plane: how the core learns of its requests, and why.

use ioplane_scheduler::QueueMode;

use super::PollLoop;
use super::slot::SlotState;
use crate::settings::Notify;

impl PollLoop {
    /// Notes that the slot is in another mode from now on. On a core that decides nothing by itself only limits are noted.
    #[inline]
    pub(super) fn note(&self, index: usize, mode: QueueMode) {
        let Some(Some(entry)) = self.slots.get(index) else { return };
        let mode = match mode {
            QueueMode::Polled | QueueMode::Armed(_) if self.notify != Notify::Adaptive => QueueMode::Fixed,
            mode => mode,
        };
        entry.slot.meter().choices().enter(mode, self.shared.age_ns(self.context.now()));
    }

    /// Notes that nothing holds the slot back any more, if something did. It goes on resting.
    pub(super) fn note_unheld(&self, index: usize) {
        let Some(Some(entry)) = self.slots.get(index) else { return };
        if entry.slot.meter().choices().mode().is_held() {
            self.note(index, QueueMode::Fixed);
        }
    }

    /// As [`PollLoop::note`], after the mode of the core has changed.
    pub(super) fn note_each(&self) {
        for (index, entry) in self.slots.iter().enumerate() {
            let Some(entry) = entry else { continue };
            // For what reason a resting one is armed is known when it rests for the next time.
            let mode = match entry.state {
                SlotState::Held => QueueMode::Held(entry.slot.held_by()),
                state if state.is_awake() => QueueMode::Polled,
                _ => QueueMode::Fixed,
            };
            self.note(index, mode);
        }
    }
}
