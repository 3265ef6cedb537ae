//! What a VMM's process and others say to each other of the clamp: a part of the [cluster page](crate::kvm::ClusterPage).

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

use super::state::{ClampState, HIGHEST_HZ, LOWEST_HZ};

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

/// Where others write the most ticks per second.
pub(in crate::kvm) const HZ_AT: usize = offset_of!(ClampPage, hz);

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
        self.state.store(state as u32, Ordering::Relaxed);
    }

    pub(super) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// What such a memory says, of which `word` is the one at a place.
    pub fn report_of(word: impl Fn(usize) -> u32) -> ClampReport {
        ClampReport {
            hz: valid(word(HZ_AT)),
            state: ClampState::of(word(offset_of!(Self, state))),
            guest_count: word(offset_of!(Self, guest_count)),
            count: word(offset_of!(Self, count)),
            changes: word(offset_of!(Self, changes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_out_of_range_are_off() {
        for (hz, is) in [(0, None), (18, None), (19, Some(19)), (1000, Some(1000)), (1001, None)] {
            assert_eq!(valid(hz), is, "{hz}");
        }
    }
}
