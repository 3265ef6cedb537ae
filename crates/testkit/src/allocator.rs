//! A global allocator for tests that ends the process when a poller allocates or frees inside `poll`.
//!
//! ```text
//! #[global_allocator]
//! static ALLOCATOR: ioplane_testkit::allocator::Strict = ioplane_testkit::allocator::Strict;
//! ```
//!
//! It asks [`ioplane_device::inside_poll`], which every `PollerSlot::step` sets around `Poller::poll` when the feature
//! `mutations` is on, for every poller of every device and without a wrapper around any; without the feature there is
//! nothing to ask and nothing is checked.

#![allow(unsafe_code)]
// UNSAFETY: a global allocator is an unsafe trait; all work is the system allocator's.

use std::alloc::{GlobalAlloc, Layout, System};

/// See the module.
#[derive(Debug)]
pub struct Strict;

/// Says so and ends. A panic would allocate.
fn check(what: &str) {
    #[cfg(feature = "mutations")]
    if ioplane_device::inside_poll() {
        use std::io::Write;
        // Standard error has no buffer of its own.
        let mut stderr = std::io::stderr();
        for part in ["ioplane: a poller ", what, " memory inside poll\n"] {
            let _ = stderr.write_all(part.as_bytes());
        }
        std::process::abort();
    }
    let _ = what;
}

// SAFETY: hands everything to the system allocator unchanged.
unsafe impl GlobalAlloc for Strict {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        check("allocates");
        // SAFETY: as our caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        check("frees");
        // SAFETY: as our caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        check("reallocates");
        // SAFETY: as our caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}
