//! What the clamp makes of the PIT's state, as KVM_GET_PIT2 says it: whether channel 0 is to count from a larger number than
//! the guest's, or from the guest's again. Nothing here calls KVM.
//!
//! The guest programs the PIT without an exit to user space, so its writes are not seen, only their result. A count that the clamp has set
//! is told from the same one written by the guest: KVM keeps the low byte that was written last (`write_latch`), and the clamp sets no count
//! with that low byte, nor with 0, which is that of a count written by its high byte alone.

use std::time::Duration;

use kvm_bindings::{KVM_PIT_FLAGS_HPET_LEGACY, kvm_pit_channel_state, kvm_pit_state2};

use super::state::ClampState;

/// The PIT's clock.
pub const PIT_HZ: u32 = 1_193_182;
/// How long a guest's timer must have been programmed as it is. A kernel that measures clocks and interrupts against the PIT, as at
/// its boot, needs the true period; it programs the PIT for other things soon after.
pub const SETTLED: Duration = Duration::from_secs(10);
/// KVM's `RW_STATE_WORD1`: the low byte of a count is written, the high byte is not.
const SECOND_BYTE: u8 = 4;

/// The least count for at most so many ticks a second.
fn least_count(hz: u32) -> u32 {
    PIT_HZ.div_ceil(hz.max(1))
}

/// The least count from `least` on that is told from one that the guest writes.
fn marked_count(least: u32, latch: u8) -> u32 {
    let marked = |count: &u32| !has_low_byte(*count, 0) && !has_low_byte(*count, latch);
    (least..least + 4).find(marked).unwrap_or(least)
}

/// What is to be done to channel 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PitWish {
    /// Leave it.
    Nothing,
    /// Count from this number, not from the guest's.
    Clamp(u32),
    /// Count from the guest's number again.
    Restore(u32),
}

/// A count that the clamp has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    guest: u32,
    count: u32,
}

impl Held {
    /// Whether the guest has loaded no count since.
    fn is_in(&self, timer: &kvm_pit_channel_state) -> bool {
        let loading = timer.write_state == SECOND_BYTE;
        timer.count == self.count && (loading || !has_low_byte(self.count, timer.write_latch))
    }
}

fn has_low_byte(count: u32, byte: u8) -> bool {
    count & 0xff == u32::from(byte)
}

/// How the guest has programmed channel 0, and what else a new count would disturb.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Programmed {
    count: u32,
    latch: u8,
    mode: u8,
    bcd: u8,
    legacy: bool,
}

/// When channel 2 was loaded, and how. Setting a count of channel 0 loads it again.
type Speaker = (i64, u32, u8, u8);

/// The clamp of one PIT. If the VMM sets another state, a new one begins.
#[derive(Debug, Default)]
pub struct PitClamp {
    held: Option<Held>,
    seen: Option<(Programmed, Speaker, Duration)>,
    latched: u16,
    reads_counter: bool,
    real_mode: bool,
    state: ClampState,
}

fn is_periodic(timer: &kvm_pit_channel_state) -> bool {
    // Modes 6 and 7 are 2 and 3; KVM keeps them as those.
    matches!(timer.mode, 2 | 3)
}

impl PitClamp {
    /// How it stands since [`PitClamp::look`].
    pub fn state(&self) -> ClampState {
        self.state
    }

    /// What is to be done, by what KVM says now. `hz`: the most ticks per second, or `None` if the clamp is off. `now` is of any clock
    /// that only goes forwards.
    pub fn look(&mut self, pit: &kvm_pit_state2, hz: Option<u32>, now: Duration) -> PitWish {
        let timer = &pit.channels[0];
        self.held = self.held.filter(|held| held.is_in(timer));
        let since = self.see(pit, now);
        if hz.is_none() {
            (self.reads_counter, self.real_mode) = (false, false);
        }
        let guest = self.held.map_or(timer.count, |held| held.guest);
        let (state, wish) = match hz {
            None => (ClampState::Off, None),
            Some(_) if self.refusal(pit).is_some() => (self.refusal(pit).unwrap_or_default(), None),
            Some(hz) if !is_periodic(timer) || guest == 0 || guest >= least_count(hz) => {
                (ClampState::Nothing, None)
            }
            Some(hz) => self.wanted(pit, hz, now.saturating_sub(since)),
        };
        self.state = state;
        let in_use = timer.write_state == SECOND_BYTE || !is_periodic(timer);
        match (self.held, wish) {
            (Some(_), None) if in_use => {
                // The guest's count comes soon.
                self.state = ClampState::Settling;
                PitWish::Nothing
            }
            _ if in_use => PitWish::Nothing,
            (Some(held), None) => PitWish::Restore(held.guest),
            (Some(held), Some(count)) if held.count == count => PitWish::Nothing,
            (_, Some(count)) => PitWish::Clamp(count),
            (None, None) => PitWish::Nothing,
        }
    }

    /// Remembers how it is programmed; since when.
    fn see(&mut self, pit: &kvm_pit_state2, now: Duration) -> Duration {
        let [timer, _, speaker] = &pit.channels;
        let programmed = Programmed {
            count: self.held.map_or(timer.count, |held| held.guest),
            latch: timer.write_latch,
            mode: timer.mode,
            bcd: timer.bcd,
            legacy: pit.flags & KVM_PIT_FLAGS_HPET_LEGACY != 0,
        };
        let loaded = (speaker.count_load_time, speaker.count, speaker.mode, speaker.gate);
        match self.seen {
            Some((before, ..)) if before != programmed => {
                (self.reads_counter, self.real_mode) = (false, false);
            }
            Some((_, before, since)) => {
                // A value that was latched and read stays where it was.
                self.reads_counter |= timer.latched_count != self.latched;
                if self.held.is_some() || before == loaded {
                    self.latched = timer.latched_count;
                    return since;
                }
            }
            None => {}
        }
        self.latched = timer.latched_count;
        self.seen = Some((programmed, loaded, now));
        now
    }

    fn refusal(&self, pit: &kvm_pit_state2) -> Option<ClampState> {
        if pit.flags & KVM_PIT_FLAGS_HPET_LEGACY != 0 {
            return Some(ClampState::Hpet);
        }
        if pit.channels[0].bcd != 0 {
            return Some(ClampState::Decimal);
        }
        if self.real_mode {
            return Some(ClampState::RealMode);
        }
        self.reads_counter.then_some(ClampState::ReadsCounter)
    }

    /// The count for a timer that is too fast; `None` if it is to be the guest's.
    fn wanted(&self, pit: &kvm_pit_state2, hz: u32, unchanged: Duration) -> (ClampState, Option<u32>) {
        let [timer, _, speaker] = &pit.channels;
        let count = marked_count(least_count(hz), timer.write_latch);
        if self.held.is_some_and(|held| held.count == count) {
            return (ClampState::Clamped, Some(count));
        }
        if unchanged < SETTLED {
            return (ClampState::Settling, None);
        }
        if speaker.gate != 0 && is_periodic(speaker) {
            // It would begin a period anew.
            return (ClampState::Speaker, None);
        }
        (ClampState::Clamped, Some(count))
    }

    /// What could not be done: this is how it stands. Real mode is remembered.
    pub fn failed(&mut self, state: ClampState) {
        self.real_mode |= state == ClampState::RealMode;
        self.state = state;
    }

    /// What KVM is to be told, by what it has just said.
    pub fn with(&self, wish: PitWish, pit: &kvm_pit_state2) -> kvm_pit_state2 {
        let mut with = *pit;
        if let PitWish::Clamp(count) | PitWish::Restore(count) = wish {
            with.channels[0].count = count;
        }
        with
    }

    /// KVM has been told; `pit` is what it said before.
    pub fn done(&mut self, wish: PitWish, pit: &kvm_pit_state2) {
        let timer = &pit.channels[0];
        match wish {
            PitWish::Nothing => {}
            PitWish::Restore(_) => self.held = None,
            PitWish::Clamp(count) => {
                let guest = self.held.map_or(timer.count, |held| held.guest);
                self.held = Some(Held { guest, count });
            }
        }
    }

    /// What the VMM is told: what the guest has set.
    pub fn show(&self, channels: &mut [kvm_pit_channel_state; 3]) {
        if let Some(held) = self.held.filter(|held| held.is_in(&channels[0])) {
            channels[0].count = held.guest;
        }
    }

    /// The count that the guest has set, and the one that KVM has; as of the last look.
    pub fn counts(&self) -> (u32, u32) {
        let guest = self.seen.map_or(0, |(programmed, ..)| programmed.count);
        (guest, self.held.map_or(guest, |held| held.count))
    }
}

#[cfg(test)]
mod tests;
