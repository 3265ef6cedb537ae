//! How a clamp stands, and how slow it may be.

/// The slowest clamp: slower ones do not fit the counter's 16 bits.
pub const LOWEST_HZ: u32 = 19;
/// The fastest one.
pub const HIGHEST_HZ: u32 = 1000;
/// How the clamp of a VM's timer stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClampState {
    /// KVM has made no PIT for a VM of this process.
    #[default]
    NoPit,
    /// It is off, and the guest's count is in KVM.
    Off,
    /// The guest has programmed its timer, or channel 2, not long ago.
    Settling,
    /// The timer is slower than the guest has set it.
    Clamped,
    /// The guest's timer is not periodic, or slow enough.
    Nothing,
    /// Refused: the guest reads the timer's counter, so that is its clock.
    ReadsCounter,
    /// Refused: real mode or virtual-8086 mode.
    RealMode,
    /// Refused: the HPET has taken the timer's interrupt.
    Hpet,
    /// Refused: the counter counts decimally.
    Decimal,
    /// Refused: channel 2 runs, and its period would begin anew.
    Speaker,
    /// Refused: a vCPU is not followed, so it cannot be stopped.
    NotFollowed,
    /// A vCPU did not stop in time. It is tried again.
    DoesNotStop,
    /// KVM has refused a state, or the interposer has failed: nothing further is done.
    Failed,
}

#[rustfmt::skip]
const STATES: [ClampState; 13] = {
    use ClampState::*;
    [NoPit, Off, Settling, Clamped, Nothing, ReadsCounter, RealMode, Hpet, Decimal, Speaker, NotFollowed, DoesNotStop, Failed]
};

impl ClampState {
    /// What others have written may be anything.
    pub(super) fn of(word: u32) -> Self {
        usize::try_from(word).ok().and_then(|at| STATES.get(at)).copied().unwrap_or(Self::Failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_states() {
        for state in STATES {
            assert_eq!(ClampState::of(state as u32), state);
        }
        assert_eq!(ClampState::of(u32::MAX), ClampState::Failed);
    }
}
