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

    /// A call of KVM_RUN, on the vCPU's thread. `inside` is kept by the caller for the vCPU, and `false` at first. `enter` makes the call, `wanted` says whether
    /// the VMM wants the vCPU back, and `pause` waits a moment. While vCPUs are held it is made only for one that is wanted back, which enters nothing
    /// then; that call also fills in what a VMM reads after its first one.
    pub fn run(
        &self,
        inside: &mut bool,
        enter: impl FnOnce() -> i32,
        wanted: impl Fn() -> bool,
        pause: impl Fn(),
    ) -> i32 {
        loop {
            if !std::mem::replace(inside, true) {
                self.inside.fetch_add(1, Ordering::SeqCst);
            }
            // After the count: whoever holds them sees this one inside, or it sees that they are held.
            if !self.is_held() || wanted() {
                break;
            }
            self.out(inside);
            pause();
        }
        let result = enter();
        if result == -libc::EINTR {
            self.out(inside);
        }
        result
    }

    fn out(&self, inside: &mut bool) {
        *inside = false;
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    /// What a copy of the memory says: its words, by where they lie.
    pub(in crate::kvm) fn report_of(word: impl Fn(usize) -> u32) -> HoldReport {
        HoldReport { held: word(HELD_AT) != 0, inside: word(offset_of!(HoldPage, inside)) }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    fn hold(page: &HoldPage, held: bool) {
        page.held.store(u32::from(held), Ordering::SeqCst);
    }

    fn count(page: &HoldPage) -> u32 {
        page.inside.load(Ordering::SeqCst)
    }

    #[test]
    fn a_vcpu_counts_until_it_is_told_to_come_out() {
        let (page, mut inside) = (HoldPage::default(), false);
        let enter = |result| {
            move || {
                // Nobody waits here while nobody holds it.
                result
            }
        };
        assert_eq!(page.run(&mut inside, enter(0), || false, || unreachable!()), 0);
        assert_eq!(count(&page), 1, "its exit is being handled");
        assert_eq!(page.run(&mut inside, enter(0), || false, || unreachable!()), 0);
        assert_eq!(count(&page), 1);
        assert_eq!(page.run(&mut inside, enter(-libc::EINTR), || false, || unreachable!()), -libc::EINTR);
        assert_eq!(count(&page), 0);
    }

    #[test]
    fn one_that_is_held_enters_when_it_is_let_go() {
        let (page, mut inside, pauses) = (HoldPage::default(), false, Cell::new(0));
        hold(&page, true);
        let entered = Cell::new(false);
        let pause = || {
            assert!(!entered.get() && count(&page) == 0, "it waits outside");
            pauses.set(pauses.get() + 1);
            hold(&page, pauses.get() < 3);
        };
        let enter = || {
            entered.set(true);
            0
        };
        assert_eq!(page.run(&mut inside, enter, || false, pause), 0);
        assert_eq!((pauses.get(), count(&page), entered.get()), (3, 1, true));
    }

    #[test]
    fn one_that_the_vmm_wants_back_is_given_to_kvm_all_the_same() {
        let (page, mut inside) = (HoldPage::default(), false);
        hold(&page, true);
        let wanted = Cell::new(false);
        let result = page.run(&mut inside, || -libc::EINTR, || wanted.get(), || wanted.set(true));
        assert_eq!((result, count(&page), inside), (-libc::EINTR, 0, false));
    }
}
