//! libc's own functions that this library stands in front of.
#![allow(unsafe_code)]
// UNSAFETY: looks up libc's functions and calls them by their known types.

use std::ffi::{CStr, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

pub(crate) type Sigaction =
    unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;

static SIGACTION: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

fn next(name: &CStr) -> *mut c_void {
    // SAFETY: a name with its end.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Looks them up. Later calls find them without a lock.
pub(crate) fn find() {
    if SIGACTION.load(Ordering::Relaxed).is_null() {
        SIGACTION.store(next(c"sigaction"), Ordering::Relaxed);
    }
}

/// The `sigaction` that comes after ours.
pub(crate) fn sigaction() -> Option<Sigaction> {
    find();
    let found = SIGACTION.load(Ordering::Relaxed);
    // SAFETY: null, or libc's function of that name, which has this type.
    unsafe { std::mem::transmute::<*mut c_void, Option<Sigaction>>(found) }
}
