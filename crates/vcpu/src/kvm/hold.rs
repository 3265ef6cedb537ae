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
    /// Written by others: what becomes of a vCPU that is wanted back, a [`StopWord`].
    stop: AtomicU32,
    /// vCPUs that are wanted back and wait.
    kept: AtomicU32,
}

/// What becomes of a vCPU that its VMM wants back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopWord {
    /// It comes back.
    Free,
    /// It waits until this is something else.
    Kept,
    /// It waits while somebody finds out for what it is wanted. This number rises as long as it is not for what it is to be kept for.
    Asked(u32),
}

impl StopWord {
    /// What others have written may be any number.
    pub fn of(word: u32) -> StopWord {
        match word {
            0 => StopWord::Free,
            1 => StopWord::Kept,
            number => StopWord::Asked(number),
        }
    }

    /// As it is written.
    pub fn word(self) -> u32 {
        match self {
            StopWord::Free => 0,
            StopWord::Kept => 1,
            StopWord::Asked(number) => number,
        }
    }

    /// Asked once more.
    pub fn next(self) -> StopWord {
        match self {
            StopWord::Asked(number) if number < u32::MAX => StopWord::Asked(number + 1),
            _ => StopWord::Asked(2),
        }
    }

    /// Whether a vCPU that waits since this was `before` goes on waiting: one that was there before it was asked last is known not to be kept.
    pub fn keeps_since(self, before: StopWord) -> bool {
        match (before, self) {
            (_, StopWord::Free) => false,
            (StopWord::Asked(before), StopWord::Asked(now)) => now.wrapping_sub(before) < 2,
            (_, StopWord::Kept) => true,
            (_, StopWord::Asked(_)) => false,
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
    pub stop: StopWord,
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
    pub fn stop_word(&self) -> StopWord {
        StopWord::of(self.stop.load(Ordering::SeqCst))
    }

    /// Says so, in this process.
    pub fn set_stop_word(&self, word: StopWord) {
        self.stop.store(word.word(), Ordering::SeqCst);
    }

    /// Nobody has said anything else than `word` for too long: whoever did may be gone.
    pub fn give_up(&self, word: StopWord) {
        let free = StopWord::Free.word();
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
            stop: StopWord::of(word(STOP_AT)),
            kept: word(offset_of!(HoldPage, kept)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_waits_is_let_go_when_it_was_asked_twice_since() {
        let first = StopWord::Free.next();
        let (second, third) = (first.next(), first.next().next());
        assert!(first.keeps_since(first) && second.keeps_since(first) && !third.keeps_since(first));
        assert!(third.keeps_since(second));
        assert!(StopWord::Kept.keeps_since(first) && StopWord::Kept.keeps_since(StopWord::Kept));
        assert!(!StopWord::Free.keeps_since(first) && !StopWord::Free.keeps_since(StopWord::Kept));
        // A hand-over that has not come about, and the next attendance.
        assert!(!first.keeps_since(StopWord::Kept));
        assert_eq!(StopWord::Kept.next(), first);
        assert_eq!(StopWord::Asked(u32::MAX).next(), StopWord::Asked(2));
        for word in [0, 1, 2, 7, u32::MAX] {
            assert_eq!(StopWord::of(word).word(), word);
        }
    }

    #[test]
    fn what_is_given_up_is_only_what_nobody_has_changed() {
        let page = HoldPage::default();
        page.set_stop_word(StopWord::Kept);
        page.give_up(StopWord::Asked(2));
        assert_eq!(page.stop_word(), StopWord::Kept);
        page.give_up(StopWord::Kept);
        assert_eq!(page.stop_word(), StopWord::Free);
    }
}
