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

use crate::symbols;

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// In a word with the VMM's handler: it takes three arguments.
const SIGINFO: u64 = 1 << 62;
/// And it is taken away when it is called.
const RESETHAND: u64 = 1 << 63;
const ADDRESS: u64 = SIGINFO - 1;

/// Our handler is in place.
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// The VMM's handlers, one word each, so that a handler that runs sees the one or the other.
static BEHIND: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

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
        if next_sigaction(signal, None, Some(&mut there)) != 0 {
            continue;
        }
        // SAFETY: the call has filled it.
        let there = unsafe { there.assume_init() };
        if let Some(behind) = behind(signal) {
            behind.store(word_of(&there), Ordering::Release);
        }
        next_sigaction(signal, Some(&with_ours(&there)), None);
    }
}

unsafe extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the third argument of a handler that is running.
    if unsafe { ioplane_vcpu::resume_refused_access(context) } {
        return;
    }
    let Some(behind) = behind(signal) else { return };
    let word = behind.load(Ordering::Acquire);
    // SAFETY: the second argument of a handler that is running. Positive codes are the kernel's own, for a fault.
    let fault = unsafe { (*info).si_code > 0 };
    match usize::try_from(word & ADDRESS).unwrap_or(libc::SIG_DFL) {
        libc::SIG_IGN if !fault => {}
        // A fault that is ignored ends a process too.
        libc::SIG_DFL | libc::SIG_IGN => end(signal, fault),
        address => {
            if word & RESETHAND != 0 {
                behind.store(libc::SIG_DFL as u64, Ordering::Release);
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
        unsafe { old.write(as_asked(&there.assume_init(), word)) };
    }
    result
}

/// libc's: with BSD's meaning, as glibc has it by default.
///
/// # Safety
/// As libc's.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn signal(signal: c_int, handler: libc::sighandler_t) -> libc::sighandler_t {
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
