//! The longest time without a completion, while something happens and while nothing does.

use crate::core::drive::Completion;

/// Of each window, by number: even ones are quiet, and something happens in each odd one.
pub struct Gaps {
    longest: Vec<u64>,
    /// When the last completion was, and in which window.
    last: Option<(u64, usize)>,
}

impl Gaps {
    /// For so many times that something happens.
    pub fn new(times: usize) -> Self {
        Gaps { longest: vec![0; 2 * times + 1], last: None }
    }

    /// A gap belongs to the window that has all of it, otherwise to each odd one that has a part of it.
    pub fn see(&mut self, completion: Completion, window: usize) {
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

    /// The next completion begins anew.
    pub fn pause(&mut self) {
        self.last = None;
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
