//! Handlers of SIGSEGV and SIGBUS: ours is in the kernel, the VMM's is behind it.
//!
//! Guest memory may be taken away while an instruction of the guest is interpreted (a file that shrinks). Our handler takes
//! faults of exactly those accesses and gives everything else to the VMM, with the mask and the flags that it has asked for: the kernel
//! has them with our handler in the place of the VMM's. So the VMM may set and read its handlers as before, at any
//! time, and by libc's functions; one that makes the system call itself replaces ours.
#![allow(unsafe_code)]
// UNSAFETY: installs signal handlers, and calls those that the VMM has installed.

// The tests of this crate run without the symbols that others call.
#![cfg_attr(test, allow(dead_code))]

use std::ffi::{c_int, c_void};
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::{clamp, symbols};

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// In a word with the VMM's handler: it takes three arguments.
const SIGINFO: u64 = 1 << 62;
/// And it is taken away when it is called.
const RESETHAND: u64 = 1 << 63;
const ADDRESS: u64 = SIGINFO - 1;
/// No word: the VMM's handler is still in the kernel.
const UNSET: u64 = u64::MAX;
/// The code of a SIGBUS that tells of broken memory before anybody has touched it (linux/include/uapi/asm-generic/siginfo.h).
const BUS_MCEERR_AO: c_int = 5;

/// Our handler is in place.
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// The VMM's handlers, one word each, so that a handler that runs sees the one or the other.
static BEHIND: [AtomicU64; 2] = [const { AtomicU64::new(UNSET) }; 2];

type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

fn behind(signal: c_int) -> Option<&'static AtomicU64> {
    SIGNALS.iter().position(|known| *known == signal).map(|index| &BEHIND[index])
}

fn word_of(action: &libc::sigaction) -> u64 {
    let mut word = action.sa_sigaction as u64 & ADDRESS;
    if action.sa_flags & libc::SA_SIGINFO != 0 {
        word |= SIGINFO;
    }
    if action.sa_flags & libc::SA_RESETHAND != 0 {
        word |= RESETHAND;
    }
    word
}

/// The VMM's action with our handler.
fn with_ours(action: &libc::sigaction) -> libc::sigaction {
    let mut ours = *action;
    ours.sa_sigaction = handler as *const () as usize;
    ours.sa_flags = action.sa_flags & !libc::SA_RESETHAND | libc::SA_SIGINFO;
    ours
}

/// What the VMM has asked for, from what the kernel has and the word that was kept.
fn as_asked(kernel: &libc::sigaction, word: u64) -> libc::sigaction {
    let mut asked = *kernel;
    asked.sa_sigaction = usize::try_from(word & ADDRESS).unwrap_or(libc::SIG_DFL);
    asked.sa_flags &= !(libc::SA_SIGINFO | libc::SA_RESETHAND);
    if word & SIGINFO != 0 {
        asked.sa_flags |= libc::SA_SIGINFO;
    }
    if word & RESETHAND != 0 {
        asked.sa_flags |= libc::SA_RESETHAND;
    }
    asked
}

fn next_sigaction(
    signal: c_int,
    new: Option<&libc::sigaction>,
    old: Option<&mut MaybeUninit<libc::sigaction>>,
) -> c_int {
    let Some(next) = symbols::sigaction() else { return -1 };
    let new = new.map_or(ptr::null(), ptr::from_ref);
    let old = old.map_or(ptr::null_mut(), |old| old.as_mut_ptr());
    // SAFETY: both null or valid.
    unsafe { next(signal, new, old) }
}

/// Puts our handlers in front of those that are there.
pub(crate) fn install() {
    if INSTALLED.swap(true, Ordering::AcqRel) {
        return;
    }
    for signal in SIGNALS {
        let mut there = MaybeUninit::uninit();
        if next_sigaction(signal, None, Some(&mut there)) == 0 {
            // SAFETY: the call has filled it.
            install_in_front_of(signal, unsafe { there.assume_init_ref() });
        }
    }
}

/// The VMM may have set another handler since it was looked at: with ours, as [`INSTALLED`] says, and that stays.
fn install_in_front_of(signal: c_int, there: &libc::sigaction) {
    let Some(behind) = behind(signal) else { return };
    let word = word_of(there);
    if is_ours(there) || behind.compare_exchange(UNSET, word, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return;
    }
    let mut was = MaybeUninit::uninit();
    if next_sigaction(signal, Some(&with_ours(there)), Some(&mut was)) == 0 {
        // SAFETY: the call has filled it.
        let was = unsafe { was.assume_init_ref() };
        if is_ours(was) {
            // With the mask and the flags of the VMM's newer handler.
            next_sigaction(signal, Some(was), None);
        }
    }
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == handler as *const () as usize
}

/// Whether the kernel calls our handler.
pub(crate) fn in_place(signal: c_int) -> bool {
    let mut there = MaybeUninit::uninit();
    // SAFETY: the call has filled it if it says so.
    next_sigaction(signal, None, Some(&mut there)) == 0 && is_ours(unsafe { there.assume_init_ref() })
}

unsafe extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the second argument of a handler that is running.
    if unsafe { clamp::is_kick(signal, info) } {
        return;
    }
    // SAFETY: the second argument of a handler that is running.
    let code = unsafe { (*info).si_code };
    // Positive codes are the kernel's own. A signal that is not for a fault comes at any instruction, also at one that might fault.
    let fault = code > 0 && !(signal == libc::SIGBUS && code == BUS_MCEERR_AO);
    // SAFETY: the third argument of a handler that is running.
    if fault && unsafe { ioplane_vcpu::resume_refused_access(context) } {
        return;
    }
    let Some(behind) = behind(signal) else { return };
    let word = match behind.load(Ordering::Acquire) {
        UNSET => libc::SIG_DFL as u64,
        word => word,
    };
    match usize::try_from(word & ADDRESS).unwrap_or(libc::SIG_DFL) {
        libc::SIG_IGN if !fault => {}
        // A fault that is ignored ends a process too.
        libc::SIG_DFL | libc::SIG_IGN => end(signal, fault),
        address => {
            if word & RESETHAND != 0 {
                // Unless another thread has set one meanwhile.
                let default = libc::SIG_DFL as u64;
                let _ = behind.compare_exchange(word, default, Ordering::AcqRel, Ordering::Acquire);
            }
            // SAFETY: the VMM has given it to `sigaction` as a handler. One with a single argument does not look at the others.
            unsafe { mem::transmute::<usize, Handler>(address)(signal, info, context) };
        }
    }
}

/// As if there were no handler: the instruction faults again, or the signal comes again.
fn end(signal: c_int, fault: bool) {
    // SAFETY: a structure of plain numbers, all zeros being the default action.
    let default: libc::sigaction = unsafe { mem::zeroed() };
    next_sigaction(signal, Some(&default), None);
    if !fault {
        // SAFETY: no memory is involved.
        unsafe { libc::raise(signal) };
    }
}

/// libc's, as far as a caller can tell.
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    let Some(behind) = behind(signal).filter(|_| INSTALLED.load(Ordering::Acquire)) else {
        let Some(next) = symbols::sigaction() else { return -1 };
        // SAFETY: the caller's.
        return unsafe { next(signal, new, old) };
    };
    let mut there = MaybeUninit::uninit();
    // SAFETY: null, or the caller's.
    let new = unsafe { new.as_ref() };
    let word = match new {
        // First: whoever is called from now on finds the one or the other.
        Some(new) => behind.swap(word_of(new), Ordering::AcqRel),
        None => behind.load(Ordering::Acquire),
    };
    let result = next_sigaction(signal, new.map(with_ours).as_ref(), Some(&mut there));
    if result == 0 && !old.is_null() {
        // SAFETY: filled by the call, and the caller's.
        unsafe {
            let there = there.assume_init();
            old.write(if word == UNSET { there } else { as_asked(&there, word) });
        }
    }
    result
}

/// libc's: with BSD's meaning, as glibc has it by default.
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
    let ours = behind(signal).is_some() && INSTALLED.load(Ordering::Acquire) && handler != libc::SIG_ERR;
    if let Some(next) = symbols::signal().filter(|_| !ours) {
        // What `siginterrupt` has said of other signals only libc knows.
        // SAFETY: the caller's.
        return unsafe { next(signal, handler) };
    }
    // SAFETY: structures of plain numbers.
    let (mut new, mut old): (libc::sigaction, libc::sigaction) = unsafe { (mem::zeroed(), mem::zeroed()) };
    new.sa_sigaction = handler;
    new.sa_flags = libc::SA_RESTART;
    // SAFETY: both are valid.
    if unsafe { sigaction(signal, &raw const new, &raw mut old) } != 0 {
        return libc::SIG_ERR;
    }
    old.sa_sigaction
}

/// Whether this thread takes the signals of a fault. The kernel ends a process with one that is blocked, whatever handler there is.
pub(crate) fn faults_arrive() -> bool {
    // SAFETY: a structure of plain numbers, which the call fills; it changes nothing.
    unsafe {
        let mut blocked: libc::sigset_t = mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), &raw mut blocked) == 0
            && SIGNALS.iter().all(|signal| libc::sigismember(&raw const blocked, *signal) == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Handlers are the process's.
    static ALONE: Mutex<()> = Mutex::new(());
    static CALLED: AtomicUsize = AtomicUsize::new(0);

    unsafe extern "C" {
        // Where `ioplane-vcpu` has the instructions that may fault: each place relative to its own entry.
        #[link_name = "__start_ioplane_faults"]
        static TABLE: [[i32; 2]; 1];
    }

    extern "C" fn counts(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
        CALLED.fetch_add(1, Ordering::Relaxed);
    }

    fn action(flags: c_int) -> libc::sigaction {
        // SAFETY: a structure of plain numbers.
        let mut action: libc::sigaction = unsafe { mem::zeroed() };
        action.sa_sigaction = counts as *const () as usize;
        action.sa_flags = flags | libc::SA_SIGINFO;
        action
    }

    /// The signal comes at an instruction that may fault. Whether it was taken for its fault.
    fn taken_at_an_access(signal: c_int, code: c_int) -> bool {
        // SAFETY: structures of plain numbers, and the table, which has an entry; the handler is called as the kernel would.
        unsafe {
            let mut info: libc::siginfo_t = mem::zeroed();
            let mut context: libc::ucontext_t = mem::zeroed();
            info.si_code = code;
            let entry = &raw const TABLE;
            let rip = i64::try_from(entry.addr()).unwrap() + i64::from((*entry)[0][0]);
            let place = usize::try_from(libc::REG_RIP).unwrap();
            context.uc_mcontext.gregs[place] = rip;
            handler(signal, &raw mut info, (&raw mut context).cast());
            context.uc_mcontext.gregs[place] != rip
        }
    }

    #[test]
    fn a_signal_that_is_not_for_a_fault_is_the_vmms_wherever_it_comes() {
        let _alone = ALONE.lock().unwrap();
        let called = || CALLED.swap(0, Ordering::Relaxed);
        for signal in SIGNALS {
            behind(signal).unwrap().store(word_of(&action(0)), Ordering::Relaxed);
            // SEGV_MAPERR and BUS_ADRALN, the kernel's without an address, memory that is broken.
            for code in [1, 0x80, 4] {
                assert!(taken_at_an_access(signal, code), "{code}");
                assert_eq!(called(), 0);
            }
            for code in [libc::SI_USER, libc::SI_QUEUE, libc::SI_TKILL] {
                assert!(!taken_at_an_access(signal, code), "{code}");
                assert_eq!(called(), 1);
            }
        }
        assert!(!taken_at_an_access(libc::SIGBUS, BUS_MCEERR_AO));
        assert_eq!(called(), 1);
        behind(libc::SIGBUS).unwrap().store(libc::SIG_IGN as u64, Ordering::Relaxed);
        assert!(!taken_at_an_access(libc::SIGBUS, BUS_MCEERR_AO), "and ignored, if the VMM says so");
        SIGNALS.iter().for_each(|signal| behind(*signal).unwrap().store(UNSET, Ordering::Relaxed));
    }

    #[test]
    fn a_handler_that_is_set_while_ours_are_installed_stays() {
        let _alone = ALONE.lock().unwrap();
        let signal = libc::SIGBUS;
        let (mut before, mut now) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        assert_eq!(next_sigaction(signal, None, Some(&mut before)), 0);
        // SAFETY: filled by the call.
        let before = unsafe { before.assume_init() };
        INSTALLED.store(true, Ordering::Release);
        let mut old = MaybeUninit::uninit();
        let vmms = action(libc::SA_NODEFER);
        // SAFETY: both are valid.
        assert_eq!(unsafe { sigaction(signal, &raw const vmms, old.as_mut_ptr()) }, 0);
        // SAFETY: filled by the call.
        let old = unsafe { old.assume_init() };
        assert_eq!(
            (old.sa_sigaction, old.sa_flags),
            (before.sa_sigaction, before.sa_flags),
            "the one before"
        );
        for looked_at in [&before, &with_ours(&vmms)] {
            install_in_front_of(signal, looked_at);
            assert_eq!(behind(signal).unwrap().load(Ordering::Relaxed), word_of(&vmms));
            assert_eq!(next_sigaction(signal, None, Some(&mut now)), 0);
            // SAFETY: filled by the call.
            let now = unsafe { now.assume_init() };
            assert!(is_ours(&now) && now.sa_flags & libc::SA_NODEFER != 0);
        }
        INSTALLED.store(false, Ordering::Release);
        behind(signal).unwrap().store(UNSET, Ordering::Relaxed);
        assert_eq!(next_sigaction(signal, Some(&before), None), 0);
    }

    #[test]
    fn a_thread_that_blocks_faults_is_known() {
        assert!(faults_arrive());
        for signal in SIGNALS {
            let blocks = std::thread::spawn(move || {
                // SAFETY: a structure of plain numbers; the mask is this thread's own.
                unsafe {
                    let mut set: libc::sigset_t = mem::zeroed();
                    libc::sigaddset(&raw mut set, signal);
                    libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
                }
                faults_arrive()
            });
            assert!(!blocks.join().unwrap());
        }
    }
}
