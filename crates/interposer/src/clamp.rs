//! The timer clamp's thread, and how it interrupts KVM_RUN.
//!
//! A PIT in KVM is programmed without an exit, so somebody has to look at it from time to time, also when no vCPU ever comes back. The thread is
//! made with the first PIT of the process, before a VMM shuts itself in, and blocks all signals: they are the VMM's.
#![allow(unsafe_code)]
// UNSAFETY: blocks signals, sends one to a thread of this process.

use std::cell::Cell;
use std::ffi::c_int;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ioplane_vcpu::kvm::{HIGHEST_HZ, LOWEST_HZ};

use crate::{OFF, interposer};

/// The most ticks per second from the beginning.
const CLAMP: &str = "IOPLANE_EXITS_CLAMP";
const STACK: usize = 256 << 10;
/// Linux's, which libc names only for C.
const SI_QUEUE: c_int = -1;
/// Interrupts KVM_RUN. It is one of two that the library handles itself, and no VMM blocks it on a vCPU's thread without
/// being left alone.
const KICK: c_int = libc::SIGSEGV;
/// What comes with a kick: an address that nobody else sends.
static TOKEN: u8 = 0;

static BEGUN: AtomicBool = AtomicBool::new(false);

thread_local! {
    static THREAD: Cell<i32> = const { Cell::new(0) };
}

/// `siginfo_t` of a signal with a value, as the kernel has it.
#[repr(C)]
struct Queued {
    signal: c_int,
    error: c_int,
    code: c_int,
    padding: c_int,
    process: libc::pid_t,
    user: libc::uid_t,
    value: usize,
    rest: [u64; 12],
}
const _: () = assert!(size_of::<Queued>() == 128 && size_of::<libc::siginfo_t>() == 128);

fn token() -> usize {
    ptr::from_ref(&TOKEN).addr()
}

/// What the environment says.
pub(crate) fn from_environment() -> Option<u32> {
    let hz = std::env::var(CLAMP).ok()?.parse().ok()?;
    (LOWEST_HZ..=HIGHEST_HZ).contains(&hz).then_some(hz)
}

/// This thread's number. One system call in its life.
pub(crate) fn thread() -> i32 {
    THREAD.with(|known| {
        if known.get() == 0 {
            // SAFETY: no arguments.
            known.set(unsafe { libc::gettid() });
        }
        known.get()
    })
}

/// A VM of this process has a PIT. Only the first such VM is looked after.
pub(crate) fn begin(descriptor: c_int) {
    if BEGUN.swap(true, Ordering::AcqRel) {
        return;
    }
    let body = move || {
        let begun = Instant::now();
        // Once it has failed, vCPUs do not say any more when they run.
        while !OFF.load(Ordering::Relaxed) {
            let Some(pause) = interposer().clamp_step(descriptor, begun.elapsed()) else { break };
            std::thread::sleep(pause);
        }
        // The VM is gone; the process may make another.
        BEGUN.store(false, Ordering::Release);
    };
    // A new thread has the mask of the one that makes it.
    // SAFETY: sets of signals, filled by the calls.
    unsafe {
        let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        let made = std::thread::Builder::new().name("ioplane-clamp".into()).stack_size(STACK).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut());
        if made.is_err() {
            BEGUN.store(false, Ordering::Release);
        }
    }
}

/// Whether a thread of this process takes the signal: `SigBlk` in what Linux says of it.
fn takes_kicks(thread: i32) -> bool {
    let said = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap_or_default();
    let blocked = said.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let blocked = blocked.and_then(|word| u64::from_str_radix(word.trim(), 16).ok());
    blocked.is_some_and(|blocked| blocked >> (KICK - 1) & 1 == 0)
}

/// Sends the signal to a thread of this process, if it does nothing there but to interrupt.
pub(crate) fn kick(thread: i32) -> bool {
    if !crate::signals::in_place(KICK) || !takes_kicks(thread) {
        return false;
    }
    let info = Queued {
        signal: KICK,
        error: 0,
        code: SI_QUEUE,
        padding: 0,
        // SAFETY: no arguments.
        process: unsafe { libc::getpid() },
        // SAFETY: no arguments.
        user: unsafe { libc::getuid() },
        value: token(),
        rest: [0; 12],
    };
    let process = info.process;
    // SAFETY: a structure of the size that the kernel reads.
    unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, KICK, &raw const info) == 0 }
}

/// Whether a signal is a kick of this process.
///
/// # Safety
/// `info` is the second argument of a handler that is running.
pub(crate) unsafe fn is_kick(signal: c_int, info: *const libc::siginfo_t) -> bool {
    // SAFETY: valid while the handler runs, and of this size.
    let info = unsafe { info.cast::<Queued>().read() };
    signal == KICK && info.code == SI_QUEUE && info.value == token()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_known_by_its_own_number() {
        let own = thread();
        assert_eq!(own, thread());
        assert_ne!(std::thread::spawn(thread).join().unwrap(), own);
    }

    #[test]
    fn whether_a_thread_takes_the_signal() {
        let (blocks, takes) = std::thread::spawn(|| {
            let takes = takes_kicks(thread());
            // SAFETY: a set of signals, filled by the calls.
            unsafe {
                let mut set: libc::sigset_t = mem::zeroed();
                libc::sigaddset(&raw mut set, KICK);
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
            }
            (!takes_kicks(thread()), takes)
        })
        .join()
        .unwrap();
        assert!(blocks && takes);
        assert!(!takes_kicks(-1));
    }
}
