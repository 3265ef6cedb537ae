//! The longest time without a completion, while something happens and while nothing does.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};
use ioplane_figures::machine;

use crate::core::drive::{Completion, Flow, drive_while};
use crate::core::offered::Offered;
use crate::exitless::load::BLOCK;
use crate::guest::Guest;

/// Requests in flight.
pub const DEPTH: u16 = 32;
/// Of quiet before something happens, and how long after it a pause still counts as its own.
const QUIET: Duration = Duration::from_millis(10);
const AFTER: Duration = Duration::from_millis(2);

/// The window that time is in.
pub struct Windows(AtomicUsize);

impl Windows {
    /// Quiet, then something that happens.
    pub fn during<T>(&self, act: impl FnOnce() -> Result<T>) -> Result<T> {
        std::thread::sleep(QUIET);
        self.0.fetch_add(1, Ordering::Relaxed);
        let done = act()?;
        std::thread::sleep(AFTER);
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(done)
    }
}

/// Keeps queue 0 of `guest` busy until `act`, on a thread of its own on processor `cpu`, has had so many things happen. The gaps, and what `act` returns.
pub fn while_busy<T: Send>(
    guest: &mut Guest,
    cpu: usize,
    times: usize,
    act: impl FnOnce(&Windows) -> Result<T> + Send,
) -> Result<(Gaps, T)> {
    let (windows, over) = (Windows(AtomicUsize::new(0)), AtomicBool::new(false));
    let mut gaps = Gaps::new(times);
    let done = std::thread::scope(|scope| -> Result<T> {
        let actor = scope.spawn(|| {
            // It waits for most of the time; the generator never does.
            let done = machine::pin(cpu).and_then(|()| act(&windows));
            over.store(true, Ordering::Release);
            done
        });
        let flow = Flow::new(guest, 0, Offered::Backlog(DEPTH), BLOCK, 1);
        let driven = drive_while(
            &mut [flow],
            |_| !over.load(Ordering::Acquire),
            |completion| gaps.see(completion, windows.0.load(Ordering::Relaxed)),
            |_, _| {},
        );
        let done = actor.join().map_err(|_| anyhow!("the thread beside the generator panicked"))?;
        driven.and(done)
    })?;
    Ok((gaps, done))
}

/// Of each window, by number: even ones are quiet, and something happens in each odd one.
pub struct Gaps {
    longest: Vec<u64>,
    /// When the last completion was, and in which window.
    last: Option<(u64, usize)>,
}

impl Gaps {
    /// For so many times that something happens.
    fn new(times: usize) -> Self {
        Gaps { longest: vec![0; 2 * times + 1], last: None }
    }

    /// A gap belongs to the window that has all of it, otherwise to each odd one that has a part of it.
    fn see(&mut self, completion: Completion, window: usize) {
        if let Some((last, first)) = self.last {
            let gap = completion.at - last;
            for (number, longest) in self.longest.iter_mut().enumerate().take(window + 1).skip(first) {
                if first == window || number % 2 == 1 {
                    *longest = (*longest).max(gap);
                }
            }
        }
        self.last = Some((completion.at, window));
    }

    /// Of the windows in which something happens, or of as many quiet ones before them; us.
    pub fn us(&self, happens: bool) -> Vec<f64> {
        let of = self.longest.iter().skip(usize::from(happens)).step_by(2);
        of.take(self.longest.len() / 2).map(|ns| *ns as f64 / 1e3).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_over_several_windows_belongs_to_those_in_which_something_happens() {
        let mut gaps = Gaps::new(2);
        // The pause of window 1 ends in window 2; all of window 3 is within a pause.
        for (at, window) in
            [(100_000, 0), (110_000, 0), (140_000, 1), (145_000, 1), (175_000, 2), (180_000, 2), (900_000, 4)]
        {
            gaps.see(Completion { flow: 0, due: 0, not_before: 0, at }, window);
        }
        assert_eq!(gaps.us(false), [10.0, 5.0], "and what lies in no window is left out");
        assert_eq!(gaps.us(true), [30.0, 720.0]);
    }
}
