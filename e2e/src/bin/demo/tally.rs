//! What the daemon counts of disks and of NICs alike: what was carried, and what it took.

use anyhow::Result;
use ioplane_e2e::Status;
use ioplane_e2e::status::{Counts, Frames};
use std::time::Instant;

/// The counts so far.
#[derive(Clone, Copy, Debug)]
pub struct Tally {
    units: u64,
    kicks: u64,
    interrupts: u64,
    at: Instant,
}

impl Tally {
    /// Of disks; a unit is a request.
    pub fn of_disks(status: &Status, disks: &[&str]) -> Result<Tally> {
        let Counts { requests, kicks, interrupts, .. } = status.sum(disks)?;
        Ok(Tally { units: requests, kicks, interrupts, at: Instant::now() })
    }

    /// Of NICs; a unit is a frame that crossed the switch. It is counted where it was received: with the sender's it would
    /// count twice. Kicks and interrupts are those of both.
    pub fn of_nics(status: &Status, nics: &[&str]) -> Result<Tally> {
        let Frames { kicks, interrupts, .. } = status.sum_nics(nics)?;
        let mut units = 0;
        for nic in nics {
            units += status.nic(nic)?.received.frames;
        }
        Ok(Tally { units, kicks, interrupts, at: Instant::now() })
    }

    /// What has come since then.
    pub fn since(&self, before: &Tally) -> Stretch {
        Stretch {
            units: self.units - before.units,
            kicks: self.kicks - before.kicks,
            interrupts: self.interrupts - before.interrupts,
            seconds: (self.at - before.at).as_secs_f64(),
        }
    }
}

/// What came between two tallies.
#[derive(Clone, Copy, Debug)]
pub struct Stretch {
    /// Requests or frames.
    pub units: u64,
    kicks: u64,
    interrupts: u64,
    seconds: f64,
}

impl Stretch {
    /// Units a second.
    pub fn rate(&self) -> f64 {
        self.units as f64 / self.seconds
    }

    pub fn kicks_each(&self) -> f64 {
        self.each(self.kicks)
    }

    pub fn interrupts_each(&self) -> f64 {
        self.each(self.interrupts)
    }

    fn each(&self, count: u64) -> f64 {
        rounded(count as f64 / self.units.max(1) as f64, 5)
    }
}

/// As it is shown: to so many digits behind the point.
pub fn rounded(value: f64, digits: i32) -> f64 {
    let unit = 10f64.powi(digits);
    (value * unit).round() / unit
}
