//! What a core asks of the kernel for its own thread.

#![allow(unsafe_code)]
// UNSAFETY: one call of clock_gettime with a clock that rustix has no name for: another thread's processor time.

use std::num::NonZeroU64;

use rustix::thread::{CpuSet, Pid, gettid};

/// Pins the calling thread to `cpu`; says whether the kernel allowed it.
pub(crate) fn pin(cpu: usize) -> bool {
    if cpu >= CpuSet::MAX_CPU {
        return false;
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).is_ok()
}

/// Runs the calling thread at nice 19. On Linux niceness belongs to a thread.
pub(crate) fn be_nice() {
    let _ = rustix::process::setpriority_process(Some(gettid()), 19);
}

/// Has the kernel end the sleeps of the calling thread when their time is up. By default it may add 50 us.
pub(crate) fn sleep_precisely() {
    let _ = rustix::thread::set_current_timer_slack(Some(NonZeroU64::MIN));
}

/// The kernel's name of the calling thread.
pub(crate) fn id() -> i32 {
    Pid::as_raw(Some(gettid()))
}

/// User and system time of the thread called `tid` in this process so far, ns. `None` if there is no such thread.
pub(crate) fn cpu_time(tid: i32) -> Option<u64> {
    // The kernel's MAKE_THREAD_CPUCLOCK(tid, CPUCLOCK_SCHED), as in linux/posix-timers_types.h.
    let clock: libc::clockid_t = (!tid << 3) | 0b110;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: time is ours; a clock that does not exist gives an error.
    let done = unsafe { libc::clock_gettime(clock, &mut time) };
    (done == 0).then_some(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// How long thread `tid` of this process could have run and waited for a processor, ns: the second number of the kernel's
/// `/proc/PID/task/TID/schedstat` (Linux, Documentation/scheduler/sched-stats.rst). `None` if there is no such thread, or a kernel without it.
pub(crate) fn run_delay(tid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/self/task/{tid}/schedstat")).ok()?;
    text.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_beside_others_on_its_processor_waits_for_it() {
        let waited = std::thread::scope(|scope| {
            let crowd: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        assert!(pin(0));
                        let begun = std::time::Instant::now();
                        let at_first = run_delay(id())?;
                        while begun.elapsed() < std::time::Duration::from_millis(200) {
                            std::hint::spin_loop();
                        }
                        Some(run_delay(id())? - at_first)
                    })
                })
                .collect();
            crowd.into_iter().map(|one| one.join().unwrap()).collect::<Option<Vec<u64>>>()
        });
        let Some(waited) = waited else {
            return eprintln!(
                "SKIPPED (cannot be had here): this kernel has no /proc/PID/task/TID/schedstat"
            );
        };
        // Each has half of the time, whatever else runs here.
        assert!(waited.iter().sum::<u64>() > 20_000_000, "{waited:?}");
        assert_eq!(run_delay(0), None);
    }

    #[test]
    fn processor_time_of_a_thread_is_its_own() {
        let mine = id();
        let before = cpu_time(mine).unwrap();
        let mut spent = before;
        for _ in 0..100_000_000 {
            spent = cpu_time(mine).unwrap();
            if spent > before + 1_000_000 {
                break;
            }
        }
        assert!(spent > before);
        assert_eq!(cpu_time(i32::MAX - 1), None);
    }
}
