//! Whether this thread is inside [`crate::Poller::poll`]: what a test's allocator asks, to see that `poll` never allocates.
//! Only with the feature `mutations`; without it nothing is left of this in [`crate::PollerSlot::step`].

#[cfg(feature = "mutations")]
thread_local! {
    static INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Whether the calling thread is inside a poll. Allocates nothing itself.
#[cfg(feature = "mutations")]
pub fn inside_poll() -> bool {
    INSIDE.with(std::cell::Cell::get)
}

/// Held while inside.
pub(crate) struct Inside;

#[inline(always)]
pub(crate) fn enter() -> Inside {
    #[cfg(feature = "mutations")]
    INSIDE.with(|inside| inside.set(true));
    Inside
}

impl Drop for Inside {
    #[inline(always)]
    fn drop(&mut self) {
        #[cfg(feature = "mutations")]
        INSIDE.with(|inside| inside.set(false));
    }
}
