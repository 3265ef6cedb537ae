//! libc's own functions that this library stands in front of.
#![allow(unsafe_code)]
// UNSAFETY: looks up libc's functions and calls them by their known types.

use std::ffi::{CStr, c_int, c_ulong, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

pub(crate) type Sigaction =
    unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
pub(crate) type Signal = unsafe extern "C" fn(c_int, libc::sighandler_t) -> libc::sighandler_t;
pub(crate) type Ioctl = unsafe extern "C" fn(c_int, c_ulong, ...) -> c_int;

/// A function of a library behind this one: libc's, or that of another library that is preloaded.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// Looks it up the first time. Later calls find it without a lock.
    fn find(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: a name with its end.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

static SIGACTION: Next = Next::new(c"sigaction");
static SIGNAL: Next = Next::new(c"signal");
static IOCTL: Next = Next::new(c"ioctl");

/// Looks all up, so that no signal handler of the VMM is the first to do it.
pub(crate) fn find() {
    for next in [&SIGACTION, &SIGNAL, &IOCTL] {
        next.find();
    }
}

/// The `sigaction` that comes after ours.
pub(crate) fn sigaction() -> Option<Sigaction> {
    // SAFETY: null, or the function of that name, which has this type.
    unsafe { std::mem::transmute::<*mut c_void, Option<Sigaction>>(SIGACTION.find()) }
}

/// The `signal` that comes after ours.
pub(crate) fn signal() -> Option<Signal> {
    // SAFETY: null, or the function of that name, which has this type.
    unsafe { std::mem::transmute::<*mut c_void, Option<Signal>>(SIGNAL.find()) }
}

/// The `ioctl` that comes after ours.
pub(crate) fn ioctl() -> Option<Ioctl> {
    // SAFETY: null, or the function of that name, which has this type.
    unsafe { std::mem::transmute::<*mut c_void, Option<Ioctl>>(IOCTL.find()) }
}
