//! Guests in groups of unequal weights who ask for twice of what the core can do: whether each gets its weighted max-min share in every second.
//!
//! The greedy one has weight 1 and asks in blocks of 1 MiB. Of the modest ones, two have weight 2 and two weight 4; one of each asks for less than its
//! share, and gets all of it, one for more, and gets what the others leave by its weight. All ask in an open loop: what was not served stays wanted.

use std::time::Duration;

use anyhow::Result;
use ioplane_figures::report::median;
use ioplane_testkit::driver::{DiskPlan, Shape};

use super::drive::{Flow, drive, ns};
use super::fair::Clocks;
use super::offered::{Arrivals, Offered};
use super::stage::{FORM, Stage};
use super::{Bench, ROUNDS, SECOND};
use crate::daemon::Configuration;
use crate::guest::Form;
use crate::measured::Figure;

/// A guest and its group.
struct Asker {
    name: &'static str,
    weight: u32,
    /// What it asks for, as a part of what its weight alone would give it.
    asks: f64,
    /// Of a request.
    bytes: u32,
    slots: u16,
    /// The size of its disk, as the configuration has it.
    disk: &'static str,
}

const fn modest(name: &'static str, weight: u32, asks: f64) -> Asker {
    Asker { name, weight, asks, bytes: 32 << 10, slots: 64, disk: "16M" }
}

/// Together they ask for 200 %: of 13 parts the modest ones for 1, 6, 2 and 10, the greedy one for 7. Who asks for more than his share asks for far more: the
/// machine's speed changes within a second, and one who is now above his share and now below it gets less than his share of the whole second, rightly.
const ASKERS: [Asker; 5] = [
    Asker { name: "greedy1", weight: 1, asks: 7.0, bytes: 1 << 20, slots: 32, disk: "64M" },
    modest("less2", 2, 0.5),
    modest("more2", 2, 3.0),
    modest("less4", 4, 0.5),
    modest("more4", 4, 2.5),
];

const WEIGHTS: u32 = 13;

/// In a second in which all together did not want this many times what they got, there was enough for all, and nothing to judge.
const WANT: f64 = 1.2;

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!("guests of unequal weights");
    let configuration = ASKERS.iter().fold(Configuration::new(bench.mode), |all, one| {
        all.group(one.name, &format!("weight = {}", one.weight))
    });
    let lines = ASKERS.map(|one| format!("memory = {:?}\ngroup = {:?}", one.disk, one.name));
    let disks: Vec<_> = ASKERS.iter().zip(&lines).map(|(one, lines)| (one.name, lines.as_str())).collect();
    let mut stage = Stage::configured(bench, "shares", configuration, &disks)?;
    for one in &ASKERS {
        let plan = DiskPlan { slots: one.slots, max_bytes: one.bytes, segments: 1, shape: Shape::Indirect };
        stage.connect(one.name, Form { plan, ..FORM })?;
    }
    let mut seen = Seen::default();
    for round in 0..ROUNDS {
        // Before each run: the machine's speed changes.
        let capacity = stage.turn(|stage| capacity(stage, bench.pace.round))?;
        let (seconds, undisturbed) = run(&mut stage, bench, capacity, u64::from(round) * 100)?;
        seen.add(&seconds, &undisturbed, capacity);
    }
    Ok(vec![("weighted_share_ratio", seen.figure())])
}

/// What there is to share while all always ask, bytes per second. The first half of the time is to warm up: memory is touched for the first time.
fn capacity(stage: &mut Stage, half: Duration) -> Result<f64> {
    let flow = |(guest, one): (_, &Asker)| Flow::new(guest, 0, Offered::Backlog(one.slots), one.bytes, 1);
    let mut flows: Vec<_> = stage.guests.iter_mut().zip(&ASKERS).map(flow).collect();
    let (mut moved, warm) = (0u64, ns(half));
    drive(&mut flows, 2 * half, |completion| {
        if completion.at >= warm {
            moved += u64::from(ASKERS[completion.flow].bytes);
        }
    })?;
    Ok(moved as f64 / half.as_secs_f64())
}

/// What each guest asked for and got in a second, bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Second {
    arrived: [f64; ASKERS.len()],
    served: [f64; ASKERS.len()],
}

/// One run: its seconds, and in which of them both sides had their processors.
fn run(stage: &mut Stage, bench: &Bench, capacity: f64, seed: u64) -> Result<(Vec<Second>, Vec<bool>)> {
    let count = bench.pace.seconds;
    let arrivals = |number: usize| {
        let one = &ASKERS[number];
        let bytes_per_s = capacity * f64::from(one.weight) / f64::from(WEIGHTS) * one.asks;
        Arrivals::new(bytes_per_s / f64::from(one.bytes), seed + number as u64 + 1)
    };
    let mut seconds = vec![Second::default(); count];
    for (number, one) in ASKERS.iter().enumerate() {
        for (second, requests) in seconds.iter_mut().zip(arrivals(number).per_second(count)) {
            second.arrived[number] = requests as f64 * f64::from(one.bytes);
        }
    }
    let pids = stage.pids();
    let mut clocks = Clocks::new(&pids);
    stage.turn(|stage| {
        let flow = |(number, guest)| {
            let mut flow = Flow::new(
                guest,
                0,
                Offered::open(arrivals(number)),
                ASKERS[number].bytes,
                seed + number as u64,
            );
            if number == 0 {
                flow.at_once = 1;
            }
            flow
        };
        let mut flows: Vec<_> = stage.guests.iter_mut().enumerate().map(flow).collect();
        clocks.begin();
        drive(&mut flows, Duration::from_secs(count as u64), |completion| {
            let second = (completion.at / SECOND) as usize;
            clocks.at(second);
            if let Some(second) = seconds.get_mut(second) {
                second.served[completion.flow] += f64::from(ASKERS[completion.flow].bytes);
            }
        })
    })?;
    clocks.at(count);
    let undisturbed = clocks.undisturbed(count, true);
    Ok((seconds, undisturbed))
}

/// Weighted max-min: each gets what it wants, but no more than its weight times a level that is the same for all who do not get all they want.
fn max_min(wanted: [f64; ASKERS.len()], available: f64) -> [f64; ASKERS.len()] {
    let mut shares = wanted;
    let mut open: Vec<usize> = (0..ASKERS.len()).collect();
    let mut left = available;
    loop {
        let weights: f64 = open.iter().map(|one| f64::from(ASKERS[*one].weight)).sum();
        let due = |one: usize| f64::from(ASKERS[one].weight) / weights * left;
        let (sated, hungry): (Vec<usize>, Vec<usize>) =
            open.iter().partition(|one| wanted[**one] <= due(**one));
        if sated.is_empty() {
            hungry.iter().for_each(|one| shares[*one] = due(*one));
            return shares;
        }
        left -= sated.iter().map(|one| wanted[*one]).sum::<f64>();
        open = hungry;
    }
}

/// What there was to say of a second.
struct Judged {
    /// Of what each guest should have got, the part that it got.
    parts: [f64; ASKERS.len()],
    /// What all wanted, as a multiple of what all got.
    want: f64,
}

/// Judges each second of a run. What there is to share is what all got in that second: the machine's speed is not the same in each.
fn judge(seconds: &[Second]) -> Vec<Judged> {
    let mut left = [0.0; ASKERS.len()];
    let one = |second: &Second| {
        let wanted: [f64; ASKERS.len()] = std::array::from_fn(|one| left[one] + second.arrived[one]);
        left = std::array::from_fn(|one| (wanted[one] - second.served[one]).max(0.0));
        let served: f64 = second.served.iter().sum();
        let shares = max_min(wanted, served);
        let part = |one: usize| if shares[one] > 0.0 { second.served[one] / shares[one] } else { 1.0 };
        Judged { parts: std::array::from_fn(part), want: wanted.iter().sum::<f64>() / served }
    };
    seconds.iter().map(one).collect()
}

#[derive(Default)]
struct Seen {
    /// Parts of each guest, in each second that counts.
    parts: Vec<[f64; ASKERS.len()]>,
    /// Seconds that do not count: others had the processors; there was enough for all.
    disturbed: u32,
    enough: u32,
    /// The smallest part of all, with the seconds that were disturbed.
    least_of_all: Option<f64>,
    /// In the seconds that count, what all got as a part of what was measured before the run, and what they wanted as a multiple of it.
    served: Vec<f64>,
    want: Vec<f64>,
}

fn least(parts: impl IntoIterator<Item = f64>) -> Option<f64> {
    parts.into_iter().reduce(f64::min)
}

impl Seen {
    fn add(&mut self, seconds: &[Second], undisturbed: &[bool], capacity: f64) {
        for ((judged, second), undisturbed) in judge(seconds).into_iter().zip(seconds).zip(undisturbed) {
            if judged.want < WANT {
                self.enough += 1;
                continue;
            }
            self.least_of_all = least(judged.parts.into_iter().chain(self.least_of_all));
            if *undisturbed {
                self.parts.push(judged.parts);
                self.want.push(judged.want);
                self.served.push(second.served.iter().sum::<f64>() / capacity);
            } else {
                self.disturbed += 1;
            }
        }
    }

    fn figure(&self) -> Figure {
        let figure = least(self.parts.iter().flatten().copied()).map_or_else(
            || {
                Figure::missing("in every second there was enough for all, or others took more than a tenth of the generator's or the core's processor")
            },
            Figure::of,
        );
        let figure = figure
            .beside("seconds_judged", self.parts.len())
            .beside("seconds_disturbed", self.disturbed)
            .beside("seconds_with_enough_for_all", self.enough)
            .beside("with_disturbed_seconds", self.least_of_all)
            .beside("served_of_what_was_measured", median(self.served.iter().copied()))
            .beside("wanted_of_what_was_served", median(self.want.iter().copied()));
        ASKERS.iter().enumerate().fold(figure, |figure, (number, one)| {
            figure.beside(
                &format!("{}_asks_{}_of_its_weight", one.name, one.asks),
                least(self.parts.iter().map(|parts| parts[number])),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(one: [f64; ASKERS.len()], other: [f64; ASKERS.len()]) -> bool {
        one.iter().zip(other).all(|(one, other)| (one - other).abs() < 1e-9)
    }

    #[test]
    fn they_ask_for_twice_of_what_there_is() {
        let weights: u32 = ASKERS.iter().map(|one| one.weight).sum();
        let asked: f64 = ASKERS.iter().map(|one| f64::from(one.weight) * one.asks).sum();
        assert_eq!((weights, asked), (WEIGHTS, 2.0 * f64::from(WEIGHTS)));
    }

    #[test]
    fn a_weighted_max_min_share_is_what_is_wanted_or_a_part_by_weight_of_what_is_left() {
        // 13 to share by 1 : 2 : 2 : 4 : 4. Two want less; the rest, 10, goes by 1 : 2 : 4.
        let seventh = 10.0 / 7.0;
        let shares = max_min([12.0, 1.0, 3.0, 2.0, 8.0], 13.0);
        assert!(close(shares, [seventh, 1.0, 2.0 * seventh, 2.0, 4.0 * seventh]), "{shares:?}");
        // What one leaves sates another, whose rest the last ones share.
        let shares = max_min([12.0, 1.0, 2.5, 2.0, 8.0], 13.0);
        assert!(close(shares, [1.5, 1.0, 2.5, 2.0, 6.0]), "{shares:?}");
        assert!(close(max_min([1.0; ASKERS.len()], 13.0), [1.0; ASKERS.len()]), "there is enough for all");
        assert!(close(max_min([0.0; ASKERS.len()], 0.0), [0.0; ASKERS.len()]));
    }

    #[test]
    fn who_gets_less_than_its_share_is_found_and_what_it_missed_stays_wanted() {
        let arrived = [12.0, 1.0, 3.0, 2.0, 8.0];
        // By equal parts in place of weights: the heaviest gets less, the lightest more.
        let equal = Second { arrived, served: [10.0 / 3.0, 1.0, 10.0 / 3.0, 2.0, 10.0 / 3.0] };
        let parts_of = judge(&[equal])[0].parts;
        assert!((parts_of[4] - 10.0 / 3.0 / (40.0 / 7.0)).abs() < 1e-9, "{parts_of:?}");
        assert!(parts_of[0] > 1.0);
        // One that is starved in one second is owed that in the next, up to its share.
        let starved = Second { arrived, served: [2.0, 0.0, 4.0, 2.0, 5.0] };
        let next = Second { arrived, served: [2.0, 1.0, 2.0, 2.0, 6.0] };
        let seconds = judge(&[starved, next]);
        assert_eq!((seconds[0].parts[1], seconds[1].parts[1]), (0.0, 0.5));
        assert_eq!(seconds[0].want, 2.0);
    }

    #[test]
    fn seconds_that_say_nothing_are_counted_and_not_judged() {
        let fair = Second {
            arrived: [14.0, 1.0, 4.0, 2.0, 8.0],
            served: [10.0 / 7.0, 1.0, 20.0 / 7.0, 2.0, 40.0 / 7.0],
        };
        let unfair = Second { served: [10.0, 1.0, 1.0, 0.5, 0.5], ..fair };
        let mut seen = Seen::default();
        seen.add(&[fair, unfair], &[true, false], 26.0);
        assert_eq!((seen.parts.len(), seen.disturbed, seen.enough), (1, 1, 0));
        assert!((seen.figure().value().unwrap() - 1.0).abs() < 1e-9);
        assert!(seen.least_of_all.unwrap() < 0.3);
        assert_eq!(seen.served, [0.5]);
        // All that is wanted is served, and one guest a little late.
        let enough = Second { arrived: [1.0; 5], served: [1.0, 0.9, 1.0, 1.0, 1.0] };
        seen.add(&[enough], &[true], 26.0);
        assert_eq!((seen.parts.len(), seen.disturbed, seen.enough), (1, 1, 1));
        assert_eq!(Seen::default().figure().value(), None);
    }
}
