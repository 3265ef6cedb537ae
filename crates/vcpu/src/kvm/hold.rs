//! Whether the vCPUs of a VMM may enter the guest: others say so, and the vCPUs obey. A part of the [cluster page](crate::kvm::ClusterPage).
//!
//! For a guest whose devices are brought to another host: it stands still until its devices do what they did, whoever has the VMM run it
//! (docs/decisions/0085-migrations-of-others.md). The VMM notices nothing but KVM_RUN that takes long: a vCPU that it wants back comes back, with EINTR.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU32, Ordering};

/// The memory. All zeros are a value of it: nobody is held.
#[repr(C)]
#[derive(Debug, Default)]
pub struct HoldPage {
    /// Written by others: 0 if vCPUs may enter the guest.
    held: AtomicU32,
    /// vCPUs in the guest, or whose exits are being handled: those whose last KVM_RUN has not returned EINTR.
    inside: AtomicU32,
}

/// What that memory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldReport {
    /// No vCPU enters the guest.
    pub held: bool,
    /// vCPUs that are in the guest, or were last seen to come from there with something to do.
    pub inside: u32,
}

/// Where the switch lies.
pub(in crate::kvm) const HELD_AT: usize = offset_of!(HoldPage, held);

impl HoldPage {
    /// Whether vCPUs are held.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::SeqCst) != 0
    }

    /// Says so, in this process.
    pub fn hold(&self, held: bool) {
        self.held.store(u32::from(held), Ordering::SeqCst);
    }

    /// One more vCPU is inside, before it looks whether it is held.
    pub fn enter(&self) {
        self.inside.fetch_add(1, Ordering::SeqCst);
    }

    /// One fewer.
    pub fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    /// vCPUs that are inside.
    pub fn inside(&self) -> u32 {
        self.inside.load(Ordering::SeqCst)
    }

    /// What a copy of the memory says: its words, by where they lie.
    pub(in crate::kvm) fn report_of(word: impl Fn(usize) -> u32) -> HoldReport {
        HoldReport { held: word(HELD_AT) != 0, inside: word(offset_of!(HoldPage, inside)) }
    }
}
