//! The guest's time stamp counter: the host's and an offset that KVM knows.
//!
//! KVM is asked when a cluster first reads the counter, and again in the next one: the guest writes its counter, and the number
//! that goes with it, without an exit to user space.

use super::descriptor::VcpuDescriptor;
use crate::arithmetic::ordered_cycles;

/// What KVM has said of a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Asked<T> {
    /// It has not been asked since the guest, or the VMM, could have changed it.
    #[default]
    Not,
    Said(T),
    /// It has refused, and will again.
    Refused,
}

impl<T: Copy> Asked<T> {
    fn get(&mut self, ask: impl FnOnce() -> Option<T>) -> Option<T> {
        if matches!(self, Self::Not) {
            *self = ask().map_or(Self::Refused, Self::Said);
        }
        match self {
            Self::Said(value) => Some(*value),
            _ => None,
        }
    }

    fn forget(&mut self) {
        if matches!(self, Self::Said(_)) {
            *self = Self::Not;
        }
    }
}

/// The counter of one vCPU.
#[derive(Debug, Default)]
pub(super) struct GuestClock {
    /// The host's speed in kHz, as KVM has said; 0 if that is not known.
    host_speed: u64,
    /// The guest's. If it is another, KVM multiplies by what only KVM knows exactly.
    speed: u64,
    /// CPUID offers RDTSCP. Elsewhere it is an invalid instruction.
    has_rdtscp: bool,
    offset: Asked<u64>,
    /// The host's counter when it was last read.
    read: u64,
    /// IA32_TSC_AUX.
    auxiliary: Asked<u32>,
}

impl GuestClock {
    /// The guest is entered, or the VMM makes another call.
    pub(super) fn forget(&mut self) {
        self.offset.forget();
        self.auxiliary.forget();
    }

    /// A new vCPU counts as the host does, at this speed; 0 if that is not known.
    pub(super) fn set_host_speed(&mut self, kilohertz: u64) {
        self.host_speed = kilohertz;
        self.speed = kilohertz;
    }

    /// KVM_SET_TSC_KHZ has given it a speed.
    pub(super) fn set_speed(&mut self, kilohertz: u64) {
        self.speed = kilohertz;
    }

    /// KVM_SET_CPUID2 says whether there is RDTSCP.
    pub(super) fn set_rdtscp(&mut self, offered: bool) {
        self.has_rdtscp = offered;
    }

    /// The counter now.
    pub(super) fn cycles(&mut self, kvm: &mut impl VcpuDescriptor) -> Option<u64> {
        if self.host_speed == 0 || self.speed != self.host_speed {
            return None;
        }
        let now = ordered_cycles();
        Some(now.wrapping_add(self.offset_at(now, || kvm.time_stamp_offset())?))
    }

    /// The offset, when the host's counter is at `now`. If that goes backwards, the host has slept and its counter begins anew; KVM then
    /// gives its guests another offset.
    fn offset_at(&mut self, now: u64, ask: impl FnOnce() -> Option<u64>) -> Option<u64> {
        if now < self.read {
            self.offset.forget();
        }
        self.read = now;
        self.offset.get(ask)
    }

    /// What RDTSCP has in ECX.
    pub(super) fn auxiliary(&mut self, kvm: &mut impl VcpuDescriptor) -> Option<u32> {
        if !self.has_rdtscp {
            return None;
        }
        self.auxiliary.get(|| kvm.time_stamp_auxiliary())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_goes_backwards_has_another_offset() {
        let mut clock = GuestClock::default();
        assert_eq!(clock.offset_at(1000, || Some(5)), Some(5));
        assert_eq!(clock.offset_at(2000, || Some(6)), Some(5), "it is known");
        assert_eq!(clock.offset_at(10, || Some(7)), Some(7));
        assert_eq!(clock.offset_at(20, || Some(8)), Some(7));
    }
}
