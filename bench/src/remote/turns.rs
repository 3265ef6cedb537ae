//! Contenders in turn: in each round each has one, and each is first equally often.

use std::collections::BTreeMap;

use anyhow::Result;
use ioplane_figures::report::median;
use ioplane_testkit::driver::DiskOp;

use super::Pace;
use crate::exitless::FOREIGN;
use crate::exitless::load::{Load, Outcome, Scatter, Waiting};
use crate::exitless::session::Session;
use crate::measured::Figure;

/// What one turn measured.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub iops: f64,
    /// Requests per second of processor time, of the processes that serve and of all kernel threads.
    pub per_cpu_second: f64,
    pub p50_us: f64,
}

impl Sample {
    fn of(outcome: &Outcome) -> Self {
        let requests = outcome.requests as f64;
        Sample {
            iops: requests / outcome.seconds,
            per_cpu_second: requests * 1e9 / ((outcome.cpu_ns + outcome.kernel_ns) as f64).max(1.0),
            p50_us: outcome.latency.value_at_quantile(0.5) as f64 / 1e3,
        }
    }
}

/// Those who have started, and why others have not.
#[derive(Default)]
pub struct Turns {
    sessions: Vec<Session>,
    absent: BTreeMap<&'static str, String>,
}

impl Turns {
    pub fn add(&mut self, session: Session) {
        self.sessions.push(session);
    }

    /// Goes on without `name` if it has not started.
    pub fn try_add(&mut self, name: &'static str, session: Result<Session>) {
        match session {
            Ok(session) => self.add(session),
            Err(error) => {
                eprintln!("{name}: {error:#}");
                self.absent.insert(name, format!("{name}: {error:#}"));
            }
        }
    }

    /// How each serves.
    pub fn described(&self) -> Vec<(&'static str, String)> {
        self.sessions.iter().map(|session| (session.name, session.how.clone())).collect()
    }

    /// Reads of 4 KiB at random places, `depth` in flight.
    pub fn measure(&mut self, depth: u16, pace: &Pace) -> Result<Samples> {
        self.measure_and(DiskOp::Read, depth, pace, || Ok(()))
    }

    /// The same with writes.
    pub fn measure_writes(&mut self, depth: u16, pace: &Pace) -> Result<Samples> {
        self.measure_and(DiskOp::Write, depth, pace, || Ok(()))
    }

    /// Reads or writes, and `also` once in each round.
    pub fn measure_and(
        &mut self,
        op: DiskOp,
        depth: u16,
        pace: &Pace,
        mut also: impl FnMut() -> Result<()>,
    ) -> Result<Samples> {
        let mut samples = Samples { absent: self.absent.clone(), ..Samples::default() };
        let (warm, time) = (pace.warm, pace.time);
        let load = Load { op, depth, blocks: 0, waiting: Waiting::Polling, warm, time };
        let count = self.sessions.len();
        for round in 0..pace.rounds {
            for turn in 0..count {
                let session = &mut self.sessions[(turn + round as usize) % count];
                let outcome = loop {
                    // Everybody goes to the same places in the same round.
                    let outcome = session.round(load, &mut Scatter::new(u64::from(round) + 1))?;
                    if outcome.foreign <= FOREIGN || samples.repeated >= pace.repeats {
                        break outcome;
                    }
                    samples.repeated += 1;
                };
                samples.push(session.name, Sample::of(&outcome));
            }
            also()?;
        }
        Ok(samples)
    }

    /// Checks a part of the bytes once more.
    pub fn close(self) -> Result<()> {
        self.sessions.into_iter().try_for_each(|session| session.close().map(drop))
    }
}

/// What each measured, a sample per round.
#[derive(Default)]
pub struct Samples {
    of: BTreeMap<&'static str, Vec<Sample>>,
    absent: BTreeMap<&'static str, String>,
    /// Turns that were repeated because others were busy.
    pub repeated: u32,
}

impl Samples {
    pub fn push(&mut self, name: &'static str, sample: Sample) {
        self.of.entry(name).or_default().push(sample);
    }

    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.of.keys().copied()
    }

    /// In the order of rounds; none of who is absent.
    pub fn of(&self, name: &str) -> &[Sample] {
        self.of.get(name).map_or(&[], Vec::as_slice)
    }

    /// `one` over `other` in each round, with the median of each `what` beside it.
    pub fn ratio(&self, one: &str, other: &str, what: &str, value: impl Fn(&Sample) -> f64) -> Figure {
        if let Some(why) = [one, other].iter().find_map(|name| self.absent.get(name)) {
            return Figure::missing(why);
        }
        let pairs: Vec<[f64; 2]> =
            self.of(one).iter().zip(self.of(other)).map(|(one, other)| [value(one), value(other)]).collect();
        let of = |side: usize| median(pairs.iter().map(|pair| pair[side]));
        Figure::ratio(&pairs)
            .beside(&format!("{one}_{what}"), of(0))
            .beside(&format!("{other}_{what}"), of(1))
    }

    /// `one` less `other` in each round.
    pub fn difference(&self, one: &str, other: &str, value: impl Fn(&Sample) -> f64) -> Figure {
        if let Some(why) = [one, other].iter().find_map(|name| self.absent.get(name)) {
            return Figure::missing(why);
        }
        let pairs = self.of(one).iter().zip(self.of(other));
        Figure::median(&pairs.map(|(one, other)| value(one) - value(other)).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples() -> Samples {
        let mut samples = Samples::default();
        for iops in [100.0, 200.0, 300.0] {
            samples.push("local", Sample { iops, per_cpu_second: 1.0, p50_us: 1.0 });
            samples.push("remote", Sample { iops: iops / 2.0, per_cpu_second: 1.0, p50_us: 1.0 });
        }
        samples
    }

    #[test]
    fn a_ratio_is_that_of_the_same_rounds() {
        let figure = samples().ratio("remote", "local", "iops", |sample| sample.iops);
        assert_eq!(figure.value(), Some(0.5));
    }

    #[test]
    fn who_is_absent_has_no_ratio() {
        let mut samples = samples();
        samples.absent.insert("qemu_nbd", "qemu_nbd: not installed".into());
        assert_eq!(samples.ratio("remote", "qemu_nbd", "iops", |sample| sample.iops).value(), None);
    }
}
