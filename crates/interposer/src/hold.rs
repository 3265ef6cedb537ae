//! KVM_RUN of a VM whose vCPUs may be held: none enters the guest then (docs/decisions/0085-migrations-of-others.md). And from which none comes back to a VMM
//! that stops its guest, as long as others need (docs/decisions/0087-virsh-migrate.md).

use std::ffi::c_int;

use ioplane_vcpu::kvm::{HoldPage, VcpuStop};

/// How often a vCPU looks, a millisecond apart at least, until it comes back although nobody has said so: whoever asked for it may be gone. First while it is
/// not known for what it is wanted, then while it is kept. QEMU waits for it meanwhile: for a reset of the guest and `stop` its main loop, so that its monitors
/// do not say what it is wanted for. A little more than the QEMU at the destination may take to be found.
const ASKED: u32 = 4_500;
const KEPT: u32 = 60_000;

/// A call of KVM_RUN, on the vCPU's thread. `inside` is kept by the caller for the vCPU, and `false` at first. `enter` makes the call, `wanted` says whether the
/// VMM wants the vCPU back, and `pause` waits a moment. While vCPUs are held it is made only for one that is wanted back, which enters nothing then; that call
/// also fills in what a VMM reads after its first one. One that has come back from the guest with something to do waits, and still counts as inside: its VMM
/// has not stopped it.
pub(crate) fn run(
    page: &HoldPage,
    inside: &mut bool,
    enter: impl FnOnce() -> c_int,
    wanted: impl Fn() -> bool,
    pause: impl Fn(),
) -> c_int {
    let was_inside = *inside;
    loop {
        if !std::mem::replace(inside, true) {
            page.enter();
        }
        // After the count: whoever holds them sees this one inside, or it sees that they are held.
        if !page.is_held() || wanted() {
            break;
        }
        if !was_inside {
            *inside = false;
            page.leave();
        }
        pause();
    }
    let result = enter();
    // A processor that was not started yet is none that is inside.
    if result == -libc::EINTR || result == -libc::EAGAIN {
        let word = page.stop_word();
        let waits = result == -libc::EINTR && word != VcpuStop::Free && wanted();
        if waits {
            page.keep();
        }
        // After that: whoever sees none inside sees this one kept.
        *inside = false;
        page.leave();
        if waits {
            stay(page, word, pause);
            page.let_go();
        }
    }
    result
}

/// Waits until the vCPU, which does since the word was `before`, may go back to its VMM.
fn stay(page: &HoldPage, before: VcpuStop, pause: impl Fn()) {
    let (mut asked, mut kept) = (ASKED, KEPT);
    loop {
        let word = page.stop_word();
        if !word.keeps_since(before) {
            return;
        }
        let left = if word == VcpuStop::Kept { &mut kept } else { &mut asked };
        if *left == 0 {
            page.give_up(word);
            return;
        }
        *left -= 1;
        pause();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_vcpu_counts_until_it_is_told_to_come_out() {
        let (page, mut inside) = (HoldPage::default(), false);
        let enter = |result| {
            move || {
                // Nobody waits here while nobody holds it.
                result
            }
        };
        assert_eq!(run(&page, &mut inside, enter(0), || false, || unreachable!()), 0);
        assert_eq!(page.inside(), 1, "its exit is being handled");
        assert_eq!(run(&page, &mut inside, enter(0), || false, || unreachable!()), 0);
        assert_eq!(page.inside(), 1);
        assert_eq!(run(&page, &mut inside, enter(-libc::EINTR), || false, || unreachable!()), -libc::EINTR);
        assert_eq!(page.inside(), 0);
    }

    /// Its VMM has not stopped it: whoever wants to hold it is told that it runs.
    #[test]
    fn one_that_comes_back_with_something_to_do_waits_and_still_counts() {
        let (page, mut inside, waits) = (HoldPage::default(), true, Cell::new(0));
        page.enter();
        page.hold(true);
        let pause = || {
            waits.set(waits.get() + 1);
            assert_eq!(page.inside(), 1, "it is not out");
            page.hold(waits.get() < 3);
        };
        assert_eq!(run(&page, &mut inside, || 0, || false, pause), 0);
        assert_eq!((waits.get(), page.inside()), (3, 1));
        // Kicked, it comes out.
        page.hold(true);
        assert_eq!(run(&page, &mut inside, || -libc::EINTR, || true, || unreachable!()), -libc::EINTR);
        assert_eq!((inside, page.inside()), (false, 0));
    }

    #[test]
    fn one_that_is_held_enters_when_it_is_let_go() {
        let (page, mut inside, pauses) = (HoldPage::default(), false, Cell::new(0));
        page.hold(true);
        let entered = Cell::new(false);
        let pause = || {
            assert!(!entered.get() && page.inside() == 0, "it waits outside");
            pauses.set(pauses.get() + 1);
            page.hold(pauses.get() < 3);
        };
        let enter = || {
            entered.set(true);
            0
        };
        assert_eq!(run(&page, &mut inside, enter, || false, pause), 0);
        assert_eq!((pauses.get(), page.inside(), entered.get()), (3, 1, true));
    }

    /// Comes back from KVM with this, while the word is what `says` makes it at each look. How often it looked.
    fn comes_back(page: &HoldPage, result: c_int, wanted: bool, says: impl Fn(u32)) -> u32 {
        let (mut inside, looks) = (false, Cell::new(0));
        let pause = || {
            assert_eq!((page.inside(), page.kept()), (0, 1), "it is neither in the guest nor the VMM's");
            looks.set(looks.get() + 1);
            says(looks.get());
        };
        assert_eq!(run(page, &mut inside, || result, || wanted, pause), result);
        assert_eq!((inside, page.inside(), page.kept()), (false, 0, 0));
        looks.get()
    }

    #[test]
    fn one_that_is_wanted_back_is_kept_until_it_is_let_go() {
        let page = HoldPage::default();
        let asked = VcpuStop::Free.next();
        page.set_stop_word(asked);
        let says = |look| match look {
            5 => page.set_stop_word(VcpuStop::Kept),
            9 => page.set_stop_word(VcpuStop::Free),
            _ => {}
        };
        assert_eq!(comes_back(&page, -libc::EINTR, true, says), 9);
        // Nobody asks any more.
        assert_eq!(comes_back(&page, -libc::EINTR, true, |_| unreachable!()), 0);
        // It is wanted for something else.
        page.set_stop_word(asked);
        let says = |look| match look {
            3 => page.set_stop_word(asked.next()),
            6 => page.set_stop_word(asked.next().next()),
            _ => {}
        };
        assert_eq!(comes_back(&page, -libc::EINTR, true, says), 6);
        // All that wait are let go at once, and the next one waits.
        page.set_stop_word(asked);
        let says = |look| {
            if look == 3 {
                page.set_stop_word(asked.pass());
            }
        };
        assert_eq!(comes_back(&page, -libc::EINTR, true, says), 3);
        let says = |look| {
            if look == 40 {
                page.set_stop_word(VcpuStop::Free);
            }
        };
        assert_eq!(comes_back(&page, -libc::EINTR, true, says), 40);
        page.set_stop_word(asked);
        // A signal of another sort, and a processor that was not started yet.
        assert_eq!(comes_back(&page, -libc::EINTR, false, |_| unreachable!()), 0);
        assert_eq!(comes_back(&page, -libc::EAGAIN, true, |_| unreachable!()), 0);
    }

    #[test]
    fn whoever_asked_may_be_gone() {
        let page = HoldPage::default();
        page.set_stop_word(VcpuStop::Free.next());
        assert_eq!(comes_back(&page, -libc::EINTR, true, |_| ()), ASKED);
        assert_eq!(page.stop_word(), VcpuStop::Free, "the next one is not kept");
        page.set_stop_word(VcpuStop::Free.next());
        let says = |look| {
            if look == 7 {
                page.set_stop_word(VcpuStop::Kept);
            }
        };
        assert_eq!(comes_back(&page, -libc::EINTR, true, says), 7 + KEPT);
        assert_eq!(page.stop_word(), VcpuStop::Free);
    }

    #[test]
    fn one_that_the_vmm_wants_back_is_given_to_kvm_all_the_same() {
        let (page, mut inside) = (HoldPage::default(), false);
        page.hold(true);
        let wanted = Cell::new(false);
        let result = run(&page, &mut inside, || -libc::EINTR, || wanted.get(), || wanted.set(true));
        assert_eq!((result, page.inside(), inside), (-libc::EINTR, 0, false));
    }
}
