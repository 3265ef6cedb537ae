//! What a person sees while the demo runs, on standard error: one live line on a terminal, else a line now and then.

use indicatif::{ProgressBar, ProgressStyle};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// How often a line is written where there is no terminal.
const OFTEN: Duration = Duration::from_secs(5);
const STEPS: u64 = 1000;

/// The live line.
#[derive(Debug)]
pub struct Show {
    bar: Option<ProgressBar>,
    begun: Instant,
    said: Cell<Option<Instant>>,
}

impl Show {
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(STEPS);
            bar.set_style(spinner());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Show { bar, begun: Instant::now(), said: Cell::new(None) }
    }

    /// Since it began.
    pub fn seconds(&self) -> f64 {
        self.begun.elapsed().as_secs_f64()
    }

    /// Something is done, or begins: a line that stays.
    pub fn line(&self, text: &str) {
        let line = format!("[{:5.1} s] {text}", self.seconds());
        match &self.bar {
            Some(bar) => bar.suspend(|| eprintln!("{line}")),
            None => eprintln!("{line}"),
        }
        self.said.set(Some(Instant::now()));
    }

    /// Something goes on whose end is not known.
    pub fn busy(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_style(spinner());
            bar.set_message(text.to_owned());
        }
    }

    /// Something goes on and is done to this `part` (0 to 1).
    pub fn progress(&self, part: f64, text: &str) {
        let part = part.clamp(0.0, 1.0);
        match &self.bar {
            Some(bar) => {
                bar.set_style(measure());
                bar.set_position((part * STEPS as f64) as u64);
                bar.set_message(text.to_owned());
            }
            None if self.said.get().is_none_or(|said| said.elapsed() >= OFTEN) => {
                self.line(&format!("{:3.0} % {text}", part * 100.0));
            }
            None => {}
        }
    }

    /// Clears the live line.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn spinner() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn measure() -> ProgressStyle {
    let style = ProgressStyle::with_template("{bar:24} {wide_msg}");
    style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> ")
}
