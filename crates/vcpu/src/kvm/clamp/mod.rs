//! The clamp of a guest's periodic timer: the PIT in KVM counts from a larger number than the guest has set.
//!
//! ```text
//!   guest --ports--> KVM's PIT <--KVM_GET_PIT2, KVM_SET_PIT2-- step(), on a thread of its own, ten times a second
//!                        ^---- KVM_GET_PIT2, KVM_SET_PIT2 of the VMM: told what the guest has set
//! ```
//!
//! A count is set only while no vCPU is in KVM_RUN (`hold`): else a guest that programs the PIT at that moment would lose what it
//! has written. See docs/decisions/0059.
#![allow(unsafe_code)]
// UNSAFETY: changes what KVM has written for the VMM, at the VMM's address.

mod hold;
pub(super) mod page;
mod pit;
mod state;

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvm_bindings::{kvm_pit_channel_state, kvm_pit_state2, kvm_regs, kvm_sregs};

use super::abi;
use super::gate::SharedVm;
use super::kernel::Kernel;
use crate::registers::{cr0, rflags};
pub(super) use hold::{RunGate, RunHold};
pub use page::{ClampPage, ClampReport};
pub use pit::{PIT_HZ, PitClamp, PitWish, SETTLED};
pub use state::{ClampState, HIGHEST_HZ, LOWEST_HZ};

/// Time between two looks at the guest's timer.
const LOOK: Duration = Duration::from_millis(100);
/// Between two looks at the switch.
const IDLE: Duration = Duration::from_millis(500);

/// The clamp of one VM.
#[derive(Debug, Default)]
pub(super) struct TimerClamp {
    pit: Mutex<PitClamp>,
    pub(super) hold: RunHold,
}

impl TimerClamp {
    fn pit(&self) -> MutexGuard<'_, PitClamp> {
        self.pit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the guest's timer and sets it if need be. When to look again; `None` if KVM has no PIT there any more.
    pub(super) fn step<K: Kernel>(
        &self,
        kernel: &K,
        vm: &SharedVm,
        descriptor: i32,
        now: Duration,
    ) -> Option<Duration> {
        let page = kernel.clamp()?;
        let mut clamp = self.pit();
        let before = get(kernel, descriptor)?;
        // What has failed is put back, and nothing else is done.
        let hz = page.hz().filter(|_| !vm.has_failed());
        let wish = clamp.look(&before, hz, now);
        if wish != PitWish::Nothing {
            self.fulfil(
                &mut clamp,
                kernel,
                vm,
                descriptor,
                |clamp, pit| clamp.look(pit, hz, now) == wish,
                wish,
            );
        }
        if vm.has_failed() {
            clamp.failed(ClampState::Failed);
        }
        page.say(clamp.state(), clamp.counts());
        Some(if hz.is_none() && wish == PitWish::Nothing { IDLE } else { LOOK })
    }

    /// Sets a count while no vCPU runs.
    fn fulfil<K: Kernel>(
        &self,
        clamp: &mut PitClamp,
        kernel: &K,
        vm: &SharedVm,
        descriptor: i32,
        still: impl FnOnce(&mut PitClamp, &kvm_pit_state2) -> bool,
        wish: PitWish,
    ) {
        let gates = self.hold.gates();
        let followed = vm.read().is_some_and(|state| usize::try_from(state.vcpus()) == Ok(gates.len()));
        if !followed {
            return clamp.failed(ClampState::NotFollowed);
        }
        let Some(_held) = self.hold.hold(|thread| kernel.kick(thread)) else {
            return clamp.failed(ClampState::DoesNotStop);
        };
        let Some(pit) = get(kernel, descriptor).filter(|pit| still(clamp, pit)) else { return };
        // The first vCPU's: others may never have been started.
        let real = gates.first().is_none_or(|gate| in_real_mode(kernel, gate.descriptor));
        if real && matches!(wish, PitWish::Clamp(_)) {
            return clamp.failed(ClampState::RealMode);
        }
        let with = clamp.with(wish, &pit);
        if kernel.ioctl(descriptor, abi::KVM_SET_PIT2, ptr::from_ref(&with).expose_provenance()) != 0 {
            return clamp.failed(ClampState::Failed);
        }
        clamp.done(wish, &pit);
        if let Some(page) = kernel.clamp() {
            page.changed();
        }
    }

    /// A call of the VMM on the PIT.
    pub(super) fn call(&self, request: u64, argument: usize, call: impl FnOnce() -> i32) -> i32 {
        // Held across the call: what KVM says, and what the clamp has set, belong together.
        let mut clamp = self.pit();
        let result = call();
        if result != 0 {
            return result;
        }
        if matches!(request, abi::KVM_SET_PIT | abi::KVM_SET_PIT2) {
            *clamp = PitClamp::default();
            return result;
        }
        let channels = ptr::with_exposed_provenance_mut::<[kvm_pit_channel_state; 3]>(argument);
        // SAFETY: KVM has just written a structure there that begins with the channels.
        unsafe {
            let mut said = channels.read_unaligned();
            clamp.show(&mut said);
            channels.write_unaligned(said);
        }
        result
    }
}

/// What KVM says.
fn get<K: Kernel>(kernel: &K, descriptor: i32) -> Option<kvm_pit_state2> {
    let mut pit = kvm_pit_state2::default();
    let result = kernel.ioctl(descriptor, abi::KVM_GET_PIT2, ptr::from_mut(&mut pit).expose_provenance());
    (result == 0).then_some(pit)
}

/// Whether a vCPU that does not run is in real mode or virtual-8086 mode, or KVM does not say.
fn in_real_mode<K: Kernel>(kernel: &K, descriptor: i32) -> bool {
    let (mut special, mut general) = (kvm_sregs::default(), kvm_regs::default());
    let said = kernel.ioctl(descriptor, abi::KVM_GET_SREGS, ptr::from_mut(&mut special).expose_provenance())
        | kernel.ioctl(descriptor, abi::KVM_GET_REGS, ptr::from_mut(&mut general).expose_provenance());
    said != 0 || special.cr0 & cr0::PE == 0 || general.rflags & rflags::VM != 0
}
