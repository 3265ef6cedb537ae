//! Whether the vCPUs of a VMM may enter the guest, and whether those that it wants back come back: others say so, and the vCPUs obey. A part of the
//! [cluster page](crate::kvm::ClusterPage).
//!
//! For a guest whose devices are brought to another host: it stands still until its devices do what they did, whoever has the VMM run it
//! (docs/decisions/0085-migrations-of-others.md). The VMM notices nothing but KVM_RUN that takes long: a vCPU that it wants back comes back, with EINTR.
//! Where it stops all of them to hand its guest over, they are kept for as long as others need: it waits for them, and serves its devices meanwhile.
//!
//! ```text
//!   word:      free --> asked (n, n + 1, ...) --> kept --> free
//!   a vCPU that is wanted back:  comes back | waits, until two more of these have come or it is free | waits until it is free
//! ```

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
    /// Written by others: what becomes of a vCPU that is wanted back, a [`VcpuStop`].
    stop: AtomicU32,
    /// vCPUs that are wanted back and wait.
    kept: AtomicU32,
}

/// What becomes of a vCPU that its VMM wants back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VcpuStop {
    /// It comes back.
    Free,
    /// It waits until this is something else.
    Kept,
    /// It waits while somebody finds out for what it is wanted. This number rises as long as it is not for what it is to be kept for.
    Asked(u32),
}

impl VcpuStop {
    /// What others have written may be any number.
    pub fn of(word: u32) -> VcpuStop {
        match word {
            0 => VcpuStop::Free,
            1 => VcpuStop::Kept,
            number => VcpuStop::Asked(number),
        }
    }

    /// As it is written.
    pub fn word(self) -> u32 {
        match self {
            VcpuStop::Free => 0,
            VcpuStop::Kept => 1,
            VcpuStop::Asked(number) => number,
        }
    }

    /// Asked once more.
    pub fn next(self) -> VcpuStop {
        match self {
            VcpuStop::Asked(number) if number < u32::MAX => VcpuStop::Asked(number + 1),
            _ => VcpuStop::Asked(2),
        }
    }

    /// Asked so often that all that wait now are let go; those that are wanted back from then on wait.
    pub fn pass(self) -> VcpuStop {
        self.next().next()
    }

    /// Whether a vCPU that waits since this was `before` goes on waiting: one that was there before it was asked last is known not to be kept.
    pub fn keeps_since(self, before: VcpuStop) -> bool {
        match (before, self) {
            (_, VcpuStop::Free) => false,
            (VcpuStop::Asked(before), VcpuStop::Asked(now)) => now.wrapping_sub(before) < 2,
            (_, VcpuStop::Kept) => true,
            (_, VcpuStop::Asked(_)) => false,
        }
    }
}

/// What that memory says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldReport {
    /// No vCPU enters the guest.
    pub held: bool,
    /// vCPUs that are in the guest, or were last seen to come from there with something to do.
    pub inside: u32,
    /// What becomes of those that are wanted back.
    pub stop: VcpuStop,
    /// vCPUs that are wanted back and wait.
    pub kept: u32,
}

/// Where the switches lie.
pub(in crate::kvm) const HELD_AT: usize = offset_of!(HoldPage, held);
pub(in crate::kvm) const STOP_AT: usize = offset_of!(HoldPage, stop);

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

    /// What becomes of a vCPU that is wanted back.
    pub fn stop_word(&self) -> VcpuStop {
        VcpuStop::of(self.stop.load(Ordering::SeqCst))
    }

    /// Says so, in this process.
    pub fn set_stop_word(&self, word: VcpuStop) {
        self.stop.store(word.word(), Ordering::SeqCst);
    }

    /// Nobody has said anything else than `word` for too long: whoever did may be gone.
    pub fn give_up(&self, word: VcpuStop) {
        let free = VcpuStop::Free.word();
        let _ = self.stop.compare_exchange(word.word(), free, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// One more vCPU waits, before it counts as outside.
    pub fn keep(&self) {
        self.kept.fetch_add(1, Ordering::SeqCst);
    }

    /// One fewer.
    pub fn let_go(&self) {
        self.kept.fetch_sub(1, Ordering::SeqCst);
    }

    /// vCPUs that wait.
    pub fn kept(&self) -> u32 {
        self.kept.load(Ordering::SeqCst)
    }

    /// What a copy of the memory says: its words, by where they lie.
    pub(in crate::kvm) fn report_of(word: impl Fn(usize) -> u32) -> HoldReport {
        HoldReport {
            held: word(HELD_AT) != 0,
            inside: word(offset_of!(HoldPage, inside)),
            stop: VcpuStop::of(word(STOP_AT)),
            kept: word(offset_of!(HoldPage, kept)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_waits_is_let_go_when_it_was_asked_twice_since() {
        let first = VcpuStop::Free.next();
        let (second, third) = (first.next(), first.next().next());
        assert!(first.keeps_since(first) && second.keeps_since(first) && !third.keeps_since(first));
        assert!(third.keeps_since(second));
        assert!(VcpuStop::Kept.keeps_since(first) && VcpuStop::Kept.keeps_since(VcpuStop::Kept));
        assert!(!VcpuStop::Free.keeps_since(first) && !VcpuStop::Free.keeps_since(VcpuStop::Kept));
        // A hand-over that has not come about, and the next attendance.
        assert!(!first.keeps_since(VcpuStop::Kept));
        assert_eq!(VcpuStop::Kept.next(), first);
        for asked in [first, third, VcpuStop::Asked(u32::MAX - 1), VcpuStop::Asked(u32::MAX)] {
            let passed = asked.pass();
            assert!(!passed.keeps_since(asked) && passed.keeps_since(passed), "{asked:?}");
        }
        assert_eq!(VcpuStop::Asked(u32::MAX).next(), VcpuStop::Asked(2));
        for word in [0, 1, 2, 7, u32::MAX] {
            assert_eq!(VcpuStop::of(word).word(), word);
        }
    }

    #[test]
    fn what_is_given_up_is_only_what_nobody_has_changed() {
        let page = HoldPage::default();
        page.set_stop_word(VcpuStop::Kept);
        page.give_up(VcpuStop::Asked(2));
        assert_eq!(page.stop_word(), VcpuStop::Kept);
        page.give_up(VcpuStop::Kept);
        assert_eq!(page.stop_word(), VcpuStop::Free);
    }
}
