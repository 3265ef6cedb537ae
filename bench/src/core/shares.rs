//! Guests in groups of unequal weights who ask for twice of what the core can do: whether each gets its weighted max-min share in every second.
//!
//! The greedy one has weight 1 and asks in blocks of 1 MiB. Of the modest ones, two have weight 2 and two weight 4; one of each asks for less than its
//! share, and gets all of it, one for more, and gets what the others leave by its weight. All ask in an open loop: what was not served stays wanted.

use std::time::Duration;

use anyhow::Result;
use ioplane_figures::report::median;
use ioplane_testkit::driver::{DiskPlan, Shape};

use super::drive::{Flow, drive};
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

/// Together they ask for 200 %: of 13 parts the modest ones for 1, 3, 2 and 8, the greedy one for 12.
const ASKERS: [Asker; 5] = [
    Asker { name: "greedy1", weight: 1, asks: 12.0, bytes: 1 << 20, slots: 32, disk: "64M" },
    modest("less2", 2, 0.5),
    modest("more2", 2, 1.5),
    modest("less4", 4, 0.5),
    modest("more4", 4, 2.0),
];

const WEIGHTS: u32 = 13;

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
    let capacity = stage.turn(|stage| capacity(stage, bench.pace.round))?;
    let mut seen = Seen::default();
    for round in 0..ROUNDS {
        let (seconds, undisturbed) = run(&mut stage, bench, capacity, u64::from(round) * 100)?;
        seen.add(&seconds, &undisturbed);
    }
    Ok(vec![("weighted_share_ratio", seen.figure(capacity))])
}

/// What there is to share while all always ask, bytes per second.
fn capacity(stage: &mut Stage, time: Duration) -> Result<f64> {
    let flow = |(guest, one): (_, &Asker)| Flow::new(guest, 0, Offered::Backlog(one.slots), one.bytes, 1);
    let mut flows: Vec<_> = stage.guests.iter_mut().zip(&ASKERS).map(flow).collect();
    let mut moved = 0u64;
    drive(&mut flows, time, |completion| moved += u64::from(ASKERS[completion.flow].bytes))?;
    Ok(moved as f64 / time.as_secs_f64())
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

/// Of what each guest should have got in each second of a run, the part that it got. What there is to share is what all got in that second: the machine's
/// speed is not the same in each.
fn parts(seconds: &[Second]) -> Vec<[f64; ASKERS.len()]> {
    let mut left = [0.0; ASKERS.len()];
    let part = |second: &Second| {
        let wanted: [f64; ASKERS.len()] = std::array::from_fn(|one| left[one] + second.arrived[one]);
        left = std::array::from_fn(|one| (wanted[one] - second.served[one]).max(0.0));
        let shares = max_min(wanted, second.served.iter().sum());
        std::array::from_fn(|one| if shares[one] > 0.0 { second.served[one] / shares[one] } else { 1.0 })
    };
    seconds.iter().map(part).collect()
}

#[derive(Default)]
struct Seen {
    /// By guest, in each second that was not disturbed.
    judged: Vec<[f64; ASKERS.len()]>,
    disturbed: u32,
    /// The smallest of all, with the seconds that were disturbed.
    least_of_all: Option<f64>,
    /// What all got together in each judged second, bytes.
    served: Vec<f64>,
}

fn least(parts: impl IntoIterator<Item = f64>) -> Option<f64> {
    parts.into_iter().reduce(f64::min)
}

impl Seen {
    fn add(&mut self, seconds: &[Second], undisturbed: &[bool]) {
        for ((parts, second), undisturbed) in parts(seconds).into_iter().zip(seconds).zip(undisturbed) {
            self.least_of_all = least(parts.into_iter().chain(self.least_of_all));
            if *undisturbed {
                self.judged.push(parts);
                self.served.push(second.served.iter().sum());
            } else {
                self.disturbed += 1;
            }
        }
    }

    fn figure(&self, capacity: f64) -> Figure {
        let figure = least(self.judged.iter().flatten().copied()).map_or_else(
            || {
                Figure::missing(
                    "in every second others took more than a tenth of the generator's or the core's processor",
                )
            },
            Figure::of,
        );
        let served = median(self.served.iter().copied()) / capacity;
        let figure = figure
            .beside("seconds_judged", self.judged.len())
            .beside("seconds_disturbed", self.disturbed)
            .beside("with_disturbed_seconds", self.least_of_all)
            .beside("demand_percent", 200)
            .beside("served_of_what_there_is", served);
        ASKERS.iter().enumerate().fold(figure, |figure, (number, one)| {
            figure.beside(
                &format!("{}_asks_{}_of_its_weight", one.name, one.asks),
                least(self.judged.iter().map(|parts| parts[number])),
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
        let parts_of = parts(&[equal])[0];
        assert!((parts_of[4] - 10.0 / 3.0 / (40.0 / 7.0)).abs() < 1e-9, "{parts_of:?}");
        assert!(parts_of[0] > 1.0);
        // One that is starved in one second is owed that in the next, up to its share.
        let starved = Second { arrived, served: [2.0, 0.0, 4.0, 2.0, 5.0] };
        let next = Second { arrived, served: [2.0, 1.0, 2.0, 2.0, 6.0] };
        let parts_of = parts(&[starved, next]);
        assert_eq!((parts_of[0][1], parts_of[1][1]), (0.0, 0.5));
    }

    #[test]
    fn seconds_that_were_disturbed_are_counted_and_not_judged() {
        let fair = Second {
            arrived: [14.0, 1.0, 4.0, 2.0, 8.0],
            served: [10.0 / 7.0, 1.0, 20.0 / 7.0, 2.0, 40.0 / 7.0],
        };
        let unfair = Second { served: [10.0, 1.0, 1.0, 0.5, 0.5], ..fair };
        let mut seen = Seen::default();
        seen.add(&[fair, unfair], &[true, false]);
        assert_eq!((seen.judged.len(), seen.disturbed), (1, 1));
        assert!((seen.figure(13.0).value().unwrap() - 1.0).abs() < 1e-9);
        assert!(seen.least_of_all.unwrap() < 0.3);
        assert_eq!(Seen::default().figure(13.0).value(), None);
    }
}
