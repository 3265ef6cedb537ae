//! When others had the processor of the generator or of an I/O core.
//!
//! The kernel counts for each thread how long it was runnable and did not run (the second number of `schedstat`). What a request waits for
//! meanwhile is not what this benchmark asks for: on the machine of 2026-11-25 a kernel thread (`kdamond`) takes 1 to 8 ms twice a second. A core that is
//! slow by itself, or asleep, is not runnable without running, so it hides nothing here.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result, ensure};

/// Between two looks, ns.
const PERIOD: u64 = 250_000;

/// What is taken in one period and counts, ns. A switch to another thread and back takes some microseconds.
const TAKEN: u64 = 50_000;

/// The looks of one run. Times in ns since it began.
#[derive(Default)]
pub struct Taken {
    threads: Vec<File>,
    last: Option<(u64, u64)>,
    /// One after the other, and apart.
    windows: Vec<[u64; 2]>,
}

impl Taken {
    /// Watches the calling thread and the I/O cores of the processes.
    pub fn new(pids: &[u32]) -> Result<Self> {
        let open = |path: std::path::PathBuf| File::open(&path).with_context(|| path.display().to_string());
        let mut threads = vec![open("/proc/thread-self/schedstat".into())?];
        for pid in pids {
            for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
                let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
                if name.starts_with("ioplane-core") {
                    threads.push(open(task.path().join("schedstat"))?);
                }
            }
        }
        ensure!(threads.len() > 1, "no thread of {pids:?} is an I/O core");
        Ok(Taken { threads, last: None, windows: Vec::new() })
    }

    /// It is `now`: looks, if that is due.
    #[inline]
    pub fn at(&mut self, now: u64) {
        if self.last.is_none_or(|(at, _)| now >= at + PERIOD) {
            self.look(now);
        }
    }

    fn look(&mut self, now: u64) {
        let waited = self.threads.iter().filter_map(waited_ns).sum();
        if let Some((at, before)) = self.last.replace((now, waited)) {
            self.add(window(at, now, waited.saturating_sub(before)));
        }
    }

    fn add(&mut self, window: Option<[u64; 2]>) {
        let Some([from, to]) = window else { return };
        match self.windows.last_mut() {
            Some([_, until]) if *until >= from => *until = to.max(*until),
            _ => self.windows.push([from, to]),
        }
    }

    /// Whether a request that was due and done then may have waited for others.
    pub fn may_have_held(&self, due: u64, done: u64) -> bool {
        let next = self.windows.partition_point(|[_, to]| *to <= due);
        self.windows.get(next).is_some_and(|[from, _]| *from < done)
    }

    /// The part of `time` in which requests may have waited for others, percent.
    pub fn percent(&self, time: u64) -> f64 {
        let sum: u64 = self.windows.iter().map(|[from, to]| to.min(&time).saturating_sub(*from)).sum();
        sum as f64 / time.max(1) as f64 * 100.0
    }
}

/// The most time to catch up that is left out, ns.
const CATCH_UP: u64 = 1_000_000_000 - PERIOD;

/// The time in which requests may have waited, if `taken` ns were taken between two looks. What has come meanwhile is served for as long again: the
/// modest guests ask for half of what they may have.
fn window(from: u64, to: u64, taken: u64) -> Option<[u64; 2]> {
    (taken >= TAKEN).then(|| [from, to + (2 * taken).min(CATCH_UP)])
}

/// The thread was runnable for so long without running.
fn waited_ns(schedstat: &File) -> Option<u64> {
    let mut bytes = [0; 96];
    let len = schedstat.read_at(&mut bytes, 0).ok()?;
    let text = std::str::from_utf8(&bytes[..len]).ok()?;
    text.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_while_others_run_and_shortly_after_is_told_apart() {
        let windows = [window(1_000_000, 2_000_000, 900_000), window(2_000_000, 2_250_000, 10_000)];
        let mut taken = Taken::default();
        windows.into_iter().for_each(|window| taken.add(window));
        assert_eq!(taken.windows, [[1_000_000, 3_800_000]]);
        assert!(taken.may_have_held(500_000, 1_100_000), "done after it began");
        assert!(!taken.may_have_held(500_000, 900_000));
        assert!(taken.may_have_held(3_700_000, 3_900_000), "caught up with later");
        assert!(!taken.may_have_held(3_800_000, 3_900_000));
        assert!((taken.percent(28_000_000) - 10.0).abs() < 1e-9);
        // One that begins while the other is caught up with, and one that ends within it.
        taken.add(window(3_000_000, 3_250_000, 500_000));
        taken.add(window(3_250_000, 3_500_000, 50_000));
        assert_eq!(taken.windows, [[1_000_000, 4_250_000]]);
        assert!(taken.may_have_held(4_000_000, 5_000_000) && !taken.may_have_held(4_250_000, 5_000_000));
    }

    #[test]
    fn this_thread_says_how_long_it_waited() {
        assert!(waited_ns(&File::open("/proc/thread-self/schedstat").unwrap()).is_some());
    }
}
