//! What a VMM's process and others say to each other of the clamp: a part of the [cluster page](crate::kvm::ClusterPage).

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

use super::pit::{HIGHEST_HZ, LOWEST_HZ};
use crate::kvm::page::{self, ClusterPage};

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

const STATES: [ClampState; 13] = [
    ClampState::NoPit,
    ClampState::Off,
    ClampState::Settling,
    ClampState::Clamped,
    ClampState::Nothing,
    ClampState::ReadsCounter,
    ClampState::RealMode,
    ClampState::Hpet,
    ClampState::Decimal,
    ClampState::Speaker,
    ClampState::NotFollowed,
    ClampState::DoesNotStop,
    ClampState::Failed,
];

impl ClampState {
    /// What others have written may be anything.
    fn of(word: u32) -> Self {
        usize::try_from(word).ok().and_then(|at| STATES.get(at)).copied().unwrap_or(Self::Failed)
    }

    fn word(self) -> u32 {
        u32::try_from(STATES.iter().position(|state| *state == self).unwrap_or(0)).unwrap_or(0)
    }

    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Self::NoPit => "KVM has no PIT of this VM",
            Self::Off => "off",
            Self::Settling => "waits until the guest's timer has been the same for 10 s",
            Self::Clamped => "clamped",
            Self::Nothing => "the guest's timer is not periodic or slow enough",
            Self::ReadsCounter => "refused: the guest reads the timer's counter",
            Self::RealMode => "refused: real mode or virtual-8086 mode",
            Self::Hpet => "refused: the HPET replaces the timer",
            Self::Decimal => "refused: the timer counts decimally",
            Self::Speaker => "refused: channel 2 of the PIT runs",
            Self::NotFollowed => "refused: a vCPU is not followed",
            Self::DoesNotStop => "waits for a vCPU that does not stop",
            Self::Failed => "failed",
        }
    }
}

/// The memory. All zeros are a value of it.
#[repr(C)]
#[derive(Debug)]
pub struct ClampPage {
    /// Written by others: the most ticks per second, 0 for off.
    hz: AtomicU32,
    state: AtomicU32,
    guest_count: AtomicU32,
    count: AtomicU32,
    changes: AtomicU32,
}

/// What that memory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClampReport {
    /// The most ticks per second; `None` if the clamp is off.
    pub hz: Option<u32>,
    /// How it stands.
    pub state: ClampState,
    /// The count that the guest has set; 0 if it is not known.
    pub guest_count: u32,
    /// The count that KVM has; 0 if it is not known.
    pub count: u32,
    /// How often a count was set in KVM.
    pub changes: u32,
}

fn valid(hz: u32) -> Option<u32> {
    (LOWEST_HZ..=HIGHEST_HZ).contains(&hz).then_some(hz)
}

impl ClampPage {
    /// The most ticks per second, as others have set it. What is out of range is off.
    pub fn hz(&self) -> Option<u32> {
        valid(self.hz.load(Ordering::Relaxed))
    }

    /// Sets it at first.
    pub fn begin(&self, hz: Option<u32>) {
        self.hz.store(hz.unwrap_or(0), Ordering::Relaxed);
    }

    pub(super) fn say(&self, state: ClampState, (guest, count): (u32, u32)) {
        self.guest_count.store(guest, Ordering::Relaxed);
        self.count.store(count, Ordering::Relaxed);
        self.state.store(state.word(), Ordering::Relaxed);
    }

    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// What it says.
    pub fn report(&self) -> ClampReport {
        let word = |word: &AtomicU32| word.load(Ordering::Relaxed);
        ClampReport {
            hz: self.hz(),
            state: ClampState::of(word(&self.state)),
            guest_count: word(&self.guest_count),
            count: word(&self.count),
            changes: word(&self.changes),
        }
    }

    /// Reads it in the file of another process.
    pub fn read(file: &File) -> io::Result<ClampReport> {
        let header = page::read_header(file)?;
        let word = |at: usize| u32::from_ne_bytes(page::array(&header, offset_of!(ClusterPage, clamp) + at));
        Ok(ClampReport {
            hz: valid(word(offset_of!(ClampPage, hz))),
            state: ClampState::of(word(offset_of!(ClampPage, state))),
            guest_count: word(offset_of!(ClampPage, guest_count)),
            count: word(offset_of!(ClampPage, count)),
            changes: word(offset_of!(ClampPage, changes)),
        })
    }

    /// Sets the most ticks per second in the process that has this file; `None` switches the clamp off.
    pub fn set(file: &File, hz: Option<u32>) -> io::Result<()> {
        page::read_header(file)?;
        let at = offset_of!(ClusterPage, clamp) + offset_of!(ClampPage, hz);
        file.write_all_at(&hz.unwrap_or(0).to_ne_bytes(), at as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_states() {
        for state in STATES {
            assert_eq!(ClampState::of(state.word()), state);
            assert!(!state.text().is_empty());
        }
        assert_eq!(ClampState::of(u32::MAX), ClampState::Failed);
    }

    #[test]
    fn rates_out_of_range_are_off() {
        for (hz, is) in [(0, None), (18, None), (19, Some(19)), (1000, Some(1000)), (1001, None)] {
            assert_eq!(valid(hz), is, "{hz}");
        }
    }
}
