//! How fast the time stamp counter counts: from what has passed since the library was loaded.
#![allow(unsafe_code)]
// UNSAFETY: reads the time stamp counter.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Assumed if the clocks say nothing sensible: 1 GHz, which errs towards short clusters.
const SLOWEST: u64 = 1000;
/// What both clocks must have counted at least.
const ENOUGH: Duration = Duration::from_millis(1);

static BEGIN: OnceLock<(Instant, u64)> = OnceLock::new();

fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Remembers now. Without it the counter is measured when it is asked for.
pub(crate) fn begin() {
    BEGIN.get_or_init(|| (Instant::now(), cycles()));
}

/// Waits if too little has passed. The clock is read without a system call where the kernel offers that.
pub(crate) fn cycles_per_microsecond() -> u64 {
    let (then, before) = *BEGIN.get_or_init(|| (Instant::now(), cycles()));
    while then.elapsed() < ENOUGH {
        std::hint::spin_loop();
    }
    let (passed, now) = (then.elapsed(), cycles());
    let microseconds = u64::try_from(passed.as_micros()).unwrap_or(u64::MAX).max(1);
    now.checked_sub(before).map_or(SLOWEST, |cycles| (cycles / microseconds).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counter_is_as_fast_as_it_is_measured_again() {
        begin();
        let first = cycles_per_microsecond();
        let (then, before) = (Instant::now(), cycles());
        while then.elapsed() < Duration::from_millis(20) {
            std::hint::spin_loop();
        }
        let (passed, now) = (then.elapsed(), cycles());
        let again = (now - before) / u64::try_from(passed.as_micros()).unwrap();
        assert!(first > again / 2 && first < again * 2, "{first} and {again} cycles per microsecond");
    }
}
