//! Seven modest guests beside a greedy one, each in a group of its own, all of weight 1.
//!
//! Two loads: disks in memory, so that the core is full, and files on one disk, so that the disk is. A modest guest asks for half of its fair
//! share, and the greedy one for all that makes twice of what there is: in blocks of 1 MiB, or by chains of 1,024 descriptors of one byte, which are
//! refused after they have been read. All ask in an open loop: what was not served stays wanted. What there is is measured first, with guests that
//! always ask.

use std::io::Write as _;
use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;
use ioplane_figures::machine::CpuTimes;
use ioplane_figures::report::median;
use ioplane_testkit::driver::{DiskPlan, Shape};

use super::drive::{Completion, Flow, drive, drive_and_watch, ns, rate};
use super::offered::{Arrivals, Offered};
use super::stage::{FORM, Stage};
use super::taken::Taken;
use super::{Bench, ROUNDS, SECOND};
use crate::daemon::Configuration;
use crate::exitless::backend::Backing;
use crate::exitless::load::BLOCK;
use crate::guest::{Form, Guest};
use crate::measured::Figure;

const MODEST: usize = 7;
const GUESTS: f64 = MODEST as f64 + 1.0;
/// What a modest guest asks for, as a part of its fair share.
const ASKS: f64 = 0.5;
/// What all ask for together, of what there is: the seven for 7/16, so the greedy one for 25/16.
const DEMAND: f64 = 2.0;
/// What a group of average weight may have in a turn by decision 41, bytes.
const QUANTUM: f64 = 131_072.0;
/// A second in which the generator, or a core that must always be at work, had less of its processor is not judged: others took it.
const UNDISTURBED: f64 = 0.9;

/// A kind of greed.
struct Greedy {
    name: &'static str,
    bytes: u32,
    plan: DiskPlan,
    depth: u16,
}

impl Greedy {
    /// Requests of no whole number of sectors are refused.
    fn reaches_the_disk(&self) -> bool {
        self.bytes.is_multiple_of(512)
    }
}

const BLOCKS: Greedy = Greedy {
    name: "blocks",
    bytes: 1 << 20,
    plan: DiskPlan { slots: 32, max_bytes: 1 << 20, segments: 1, shape: Shape::Indirect },
    depth: 32,
};

const CHAINS: Greedy = Greedy {
    name: "chains",
    bytes: 1022,
    // With header and status 1,024 descriptors.
    plan: DiskPlan { slots: 64, max_bytes: 1022, segments: 1022, shape: Shape::Indirect },
    depth: 64,
};

/// What all guests together have too little of.
struct Load {
    name: &'static str,
    /// Of a modest guest's request.
    bytes: u32,
    /// Sizes of the disks of a modest and of a greedy guest, bytes.
    sizes: [u64; 2],
    /// The disks are files; the core then sleeps while it waits for them.
    on_file: bool,
}

/// Where the core is to be full, the modest guests' requests are so large that they cost the core several times what they cost the one
/// generator. Chains of one-byte descriptors never reach a disk: where the modest guests' disks are files, such chains make the core what is short.
const LOADS: [Load; 2] = [
    Load { name: "core", bytes: 32 << 10, sizes: [16 << 20, 64 << 20], on_file: false },
    Load { name: "backing", bytes: BLOCK, sizes: [32 << 20, 256 << 20], on_file: true },
];

/// Each beside the modest guests of each load.
const KINDS: [Greedy; 2] = [BLOCKS, CHAINS];

impl Load {
    /// The lines of a disk's table, in the group of the disk's name.
    fn lines(&self, bench: &Bench, name: &str, bytes: u64) -> Result<String> {
        let backing = if self.on_file {
            let backing = bench.folders.backing(&format!("{}-{name}", self.name), true, bytes)?;
            fill(&backing)?;
            let Backing::File { file, .. } = &backing else { anyhow::bail!("{name} is no file") };
            format!("path = {file:?}")
        } else {
            format!("memory = \"{bytes}\"")
        };
        Ok(format!("{backing}\ngroup = {name:?}"))
    }
}

/// Writes all of a file: the kernel reads no disk for blocks that were never written.
fn fill(backing: &Backing) -> Result<()> {
    let Backing::File { file, len } = backing else { return Ok(()) };
    let mut handle = std::fs::File::options().write(true).open(file)?;
    let block = vec![0x5a; 1 << 20];
    for _ in 0..len / block.len() as u64 {
        handle.write_all(&block)?;
    }
    Ok(handle.sync_all()?)
}

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let [core, backing] = [one_load(bench, &LOADS[0])?, one_load(bench, &LOADS[1])?];
    Ok(vec![
        ("min_share_ratio", worse(&core.share, &backing.share, |new, old| new < old)),
        ("core_bound_share_ratio", core.share),
        ("backing_bound_share_ratio", backing.share),
        ("modest_p99_ratio", worse(&core.p99, &backing.p99, |new, old| new > old)),
        ("core_bound_p99_ratio", core.p99),
        ("backing_bound_p99_ratio", backing.p99),
    ])
}

/// The worse of two loads' figures; none if one of them is missing, since that one might be the worse.
fn worse(core: &Figure, backing: &Figure, is_worse: fn(f64, f64) -> bool) -> Figure {
    let (Some(first), Some(second)) = (core.value(), backing.value()) else {
        return Figure::missing("one of the two loads was not measured");
    };
    let (figure, name) = if is_worse(second, first) { (backing, "backing") } else { (core, "core") };
    figure.clone().beside("bound_by", name)
}

/// Both figures of one load.
struct Seen {
    share: Figure,
    p99: Figure,
}

fn one_load(bench: &Bench, load: &Load) -> Result<Seen> {
    eprintln!("seven modest guests and a greedy one, bound by the {}", load.name);
    let modest: Vec<String> = (0..MODEST).map(|number| format!("modest{number}")).collect();
    let [small, large] = load.sizes;
    let mut disks = Vec::new();
    for name in &modest {
        disks.push((name.as_str(), load.lines(bench, name, small)?));
    }
    for greedy in &KINDS {
        let bytes = if greedy.reaches_the_disk() { large } else { small };
        disks.push((greedy.name, load.lines(bench, greedy.name, bytes)?));
    }
    let configuration =
        disks.iter().fold(Configuration::new(bench.mode), |all, (name, _)| all.group(name, "weight = 1"));
    let lines: Vec<_> = disks.iter().map(|(name, lines)| (*name, lines.as_str())).collect();
    let mut stage = Stage::configured(bench, &format!("fair-{}", load.name), configuration, &lines)?;
    for name in &modest {
        let plan = DiskPlan { max_bytes: load.bytes, ..FORM.plan };
        stage.connect(name, Form { plan, ..FORM })?;
    }
    for greedy in &KINDS {
        stage.connect(greedy.name, Form { ring: 128, queues: 1, plan: greedy.plan })?;
    }
    let capacity = stage.turn(|stage| capacity(stage, bench, load))?;

    let mut alone = Vec::new();
    let mut kinds = KINDS.map(|_| Kind::default());
    for round in 0..ROUNDS {
        let seed = u64::from(round) * 100;
        alone.push(run(&mut stage, bench, load, &capacity, seed, None)?.p99_us());
        for (kind, seen) in kinds.iter_mut().enumerate() {
            let one = run(&mut stage, bench, load, &capacity, seed, Some(kind))?;
            seen.p99_us.push(one.p99_us());
            seen.turn_p99_us.push(one.turn_p99_us());
            seen.whole_p99_us.push(one.whole_p99_us());
            seen.taken_percent.push(one.taken.percent(one.ns));
            seen.add(&one);
        }
    }
    Ok(figures(load, &alone, &kinds, &capacity))
}

/// What there is to share.
struct Capacity {
    /// Of a modest guest's size, per second: what one gets alone, or what all get together in bytes, whichever is less. One guest alone may have
    /// all of its bytes in a cache, which eight do not.
    requests: f64,
    /// What a greedy guest of each kind gets alone, per second.
    greedy: [f64; KINDS.len()],
}

fn capacity(stage: &mut Stage, bench: &Bench, load: &Load) -> Result<Capacity> {
    let time = bench.pace.round;
    let backlog = || Offered::Backlog(BLOCKS.depth);
    let mut greedy = [0.0; KINDS.len()];
    for (number, kind) in KINDS.iter().enumerate() {
        let guest = &mut stage.guests[MODEST + number];
        let mut flow = Flow::new(guest, 0, Offered::Backlog(kind.depth), kind.bytes, 1);
        flow.may_fail = !kind.reaches_the_disk();
        greedy[number] = rate(flow, time)?;
    }
    let alone = rate(Flow::new(&mut stage.guests[0], 0, backlog(), load.bytes, 1), time)?;
    let size = |flow: usize| if flow == MODEST { BLOCKS.bytes } else { load.bytes };
    // Those who are greedy in another way keep quiet.
    let guests = stage.guests.iter_mut().take(MODEST + 1).enumerate();
    let mut flows: Vec<_> =
        guests.map(|(number, guest)| Flow::new(guest, 0, backlog(), size(number), 1)).collect();
    let mut moved = 0u64;
    drive(&mut flows, time, |completion| moved += u64::from(size(completion.flow)))?;
    let together = moved as f64 / time.as_secs_f64() / f64::from(load.bytes);
    Ok(Capacity { requests: alone.min(together), greedy })
}

impl Capacity {
    /// The fair share of each guest, requests per second.
    fn share(&self) -> f64 {
        self.requests / GUESTS
    }

    /// What a greedy guest of that kind asks for, requests per second.
    fn greedy_asks(&self, kind: usize) -> f64 {
        self.greedy[kind] * (DEMAND - MODEST as f64 * ASKS / GUESTS)
    }

    /// How long the quanta of all groups take, us.
    fn quanta_us(&self) -> f64 {
        GUESTS * QUANTUM / (self.greedy[0] * f64::from(BLOCKS.bytes)) * 1e6
    }
}

fn figures(load: &Load, alone: &[f64], kinds: &[Kind], capacity: &Capacity) -> Seen {
    let judged = kinds.iter().flat_map(|kind| &kind.judged).copied();
    let least = judged.clone().fold(f64::INFINITY, f64::min);
    let all = kinds.iter().map(|kind| kind.least).fold(f64::INFINITY, f64::min);
    let share = match judged.clone().count() {
        0 => Figure::missing(
            "in every second others took more than a tenth of the generator's or the core's processor",
        ),
        _ => Figure::of(least),
    };
    let disturbed: u32 = kinds.iter().map(|kind| kind.disturbed).sum();
    let mut share = share
        .beside("fair_share_requests_per_s", capacity.share())
        .beside("request_bytes", load.bytes)
        .beside("asked_requests_per_s", capacity.share() * ASKS)
        .beside("demand_percent", DEMAND * 100.0)
        .beside("seconds_judged", judged.count())
        .beside("seconds_disturbed", disturbed)
        .beside("with_disturbed_seconds", all);
    let quanta_us = capacity.quanta_us();
    let mut worst = Figure::missing("no p99");
    for (number, (kind, greedy)) in kinds.iter().zip(&KINDS).enumerate() {
        let pairs: Vec<[f64; 2]> = kind
            .p99_us
            .iter()
            .zip(alone)
            .map(|(beside, alone)| [(beside - quanta_us).max(0.0), *alone])
            .collect();
        let figure = Figure::ratio(&pairs)
            .beside("beside", greedy.name)
            .beside("p99_us", median(kind.p99_us.iter().copied()))
            .beside("alone_p99_us", median(alone.iter().copied()))
            .beside("p99_with_taken_time_us", median(kind.whole_p99_us.iter().copied()))
            .beside("taken_percent", median(kind.taken_percent.iter().copied()))
            .beside("generator_turn_p99_us", median(kind.turn_p99_us.iter().copied()))
            .beside("quanta_us", quanta_us);
        share = share
            .beside(&format!("beside_{}", greedy.name), kind.judged.iter().copied().reduce(f64::min))
            .beside(&format!("greedy_{}_asked_per_s", greedy.name), capacity.greedy_asks(number))
            .beside(
                &format!("greedy_{}_per_s", greedy.name),
                median(kind.greedy_bytes_per_s.iter().copied()) / f64::from(greedy.bytes),
            );
        if worst.value().is_none_or(|value| figure.value().is_some_and(|this| this > value)) {
            worst = figure;
        }
    }
    Seen { share, p99: worst }
}

/// What was seen beside one kind of greed.
struct Kind {
    /// The worst of the modest guests in each round.
    p99_us: Vec<f64>,
    /// [`Run::turn_p99_us`] of each round.
    turn_p99_us: Vec<f64>,
    /// The worst of the modest guests, with what waited while others had a processor, and the part of the time in which that may be, percent.
    whole_p99_us: Vec<f64>,
    taken_percent: Vec<f64>,
    /// The smallest part of what it should have that any modest guest got, in each second that was not disturbed.
    judged: Vec<f64>,
    disturbed: u32,
    /// With the seconds that were disturbed.
    least: f64,
    /// What the greedy guest got, of each run.
    greedy_bytes_per_s: Vec<f64>,
}

impl Default for Kind {
    fn default() -> Self {
        Kind {
            p99_us: Vec::new(),
            turn_p99_us: Vec::new(),
            whole_p99_us: Vec::new(),
            taken_percent: Vec::new(),
            judged: Vec::new(),
            disturbed: 0,
            least: f64::INFINITY,
            greedy_bytes_per_s: Vec::new(),
        }
    }
}

impl Kind {
    fn add(&mut self, run: &Run) {
        self.greedy_bytes_per_s.push(run.greedy_bytes as f64 / run.undisturbed.len().max(1) as f64);
        for (second, undisturbed) in run.undisturbed.iter().enumerate() {
            let parts = run.modest.iter().map(|one| parts(&one.served, &one.arrived, run.share)[second]);
            let least = parts.fold(f64::INFINITY, f64::min);
            self.least = self.least.min(least);
            if *undisturbed {
                self.judged.push(least);
            } else {
                self.disturbed += 1;
            }
        }
    }
}

/// Of what a guest should have in each second - what it asks for and has not got yet, but no more than `share` - the part that it got.
fn parts(served: &[u64], arrived: &[u64], share: f64) -> Vec<f64> {
    let mut left = 0;
    let mut part = |(served, arrived): (&u64, &u64)| {
        let wanted = left + arrived;
        left = wanted.saturating_sub(*served);
        let due = (wanted as f64).min(share);
        if due > 0.0 { *served as f64 / due } else { 1.0 }
    };
    served.iter().zip(arrived).map(&mut part).collect()
}

/// A modest guest in one run.
struct Modest {
    /// When each request was wanted and done, ns.
    times: Vec<[u64; 2]>,
    /// By second.
    served: Vec<u64>,
    arrived: Vec<u64>,
}

struct Run {
    share: f64,
    modest: Vec<Modest>,
    /// ns that turns of the generator took, each counted by its length: so long one was under way at a moment of which nothing else is known.
    turns: Histogram<u64>,
    taken: Taken,
    /// How long it was.
    ns: u64,
    undisturbed: Vec<bool>,
    /// What the greedy guest asked for and was answered, refused or not.
    greedy_bytes: u64,
}

impl Run {
    fn turn_p99_us(&self) -> f64 {
        self.turns.value_at_quantile(0.99) as f64 / 1e3
    }

    /// Of the guest with the largest, without what may have waited while others had a processor.
    fn p99_us(&self) -> f64 {
        self.p99_of(|due, done| !self.taken.may_have_held(due, done))
    }

    /// With all.
    fn whole_p99_us(&self) -> f64 {
        self.p99_of(|_, _| true)
    }

    fn p99_of(&self, counts: impl Fn(u64, u64) -> bool) -> f64 {
        let p99 = |one: &Modest| {
            let counted = one.times.iter().filter(|[due, done]| counts(*due, *done));
            let mut ns: Vec<u64> = counted.map(|[due, done]| done.saturating_sub(*due)).collect();
            ns.sort_unstable();
            ns.get(ns.len() * 99 / 100).map_or(0.0, |ns| *ns as f64 / 1e3)
        };
        self.modest.iter().map(p99).fold(0.0, f64::max)
    }
}

/// One modest guest alone, or all beside a greedy one.
fn run(
    stage: &mut Stage,
    bench: &Bench,
    load: &Load,
    capacity: &Capacity,
    seed: u64,
    greedy: Option<usize>,
) -> Result<Run> {
    let share = capacity.share();
    let greedy = greedy.map(|kind| (kind, &KINDS[kind]));
    let mut greedy_bytes = 0;
    let seconds = bench.pace.seconds;
    let time = Duration::from_secs(seconds as u64);
    let count = if greedy.is_some() { MODEST } else { 1 };
    let arrivals = |number: usize| Arrivals::new(share * ASKS, seed + number as u64 + 1);
    let mut modest = Vec::new();
    for number in 0..count {
        modest.push(Modest {
            times: Vec::with_capacity((2.0 * share * seconds as f64) as usize),
            served: vec![0; seconds],
            arrived: arrivals(number).per_second(seconds),
        });
    }
    let pids = stage.pids();
    let mut clocks = Clocks::new(&pids);
    let mut turns = Histogram::new_with_bounds(1, 100 * SECOND, 3)?;
    let mut taken = Taken::new(&pids)?;
    stage.turn(|stage| {
        let (modest_guests, greedy_guests) = stage.guests.split_at_mut(MODEST);
        let modest_flow = |(number, guest): (usize, _)| -> Flow<'_> {
            let guest: &mut Guest = guest;
            Flow::new(guest, 0, Offered::open(arrivals(number)), load.bytes, seed + number as u64)
        };
        let mut flows: Vec<Flow<'_>> =
            modest_guests.iter_mut().take(count).enumerate().map(modest_flow).collect();
        if let Some((kind, what)) = greedy {
            let guest = greedy_guests.get_mut(kind).context("a greedy guest")?;
            let asks = Arrivals::new(capacity.greedy_asks(kind), seed + MODEST as u64 + 1);
            let mut flow = Flow::new(guest, 0, Offered::open(asks), what.bytes, seed);
            flow.may_fail = !what.reaches_the_disk();
            flow.at_once = 1;
            flows.push(flow);
        }
        clocks.begin();
        let done = |completion: Completion| {
            let Completion { flow, due, at, .. } = completion;
            let second = (at / SECOND) as usize;
            clocks.at(second);
            if let Some((_, what)) = greedy.filter(|_| flow == MODEST) {
                greedy_bytes += u64::from(what.bytes);
            } else if let Some(one) = modest.get_mut(flow) {
                one.times.push([due, at]);
                if let Some(served) = one.served.get_mut(second) {
                    *served += 1;
                }
            }
        };
        let turn = |now: u64, last: u64| {
            turns.saturating_record_n(now - last, now - last);
            taken.at(now);
        };
        drive_and_watch(&mut flows, time, done, turn)
    })?;
    clocks.at(seconds);
    let undisturbed = clocks.undisturbed(seconds, !load.on_file);
    let ns = ns(time);
    Ok(Run { share, modest, turns, taken, ns, undisturbed, greedy_bytes })
}

/// Processor time of both sides, read at the beginning of each second.
pub struct Clocks<'a> {
    pids: &'a [u32],
    /// When a second began, s; time of the generator and of the daemon until then, s.
    read: Vec<(std::time::Instant, CpuTimes, CpuTimes)>,
}

impl<'a> Clocks<'a> {
    pub fn new(pids: &'a [u32]) -> Self {
        Clocks { pids, read: Vec::new() }
    }

    pub fn begin(&mut self) {
        let own = CpuTimes::of(&[std::process::id()]);
        self.read.push((std::time::Instant::now(), own, CpuTimes::of(self.pids)));
    }

    /// It is second `second`: reads the clocks, once for each.
    #[inline]
    pub fn at(&mut self, second: usize) {
        if self.read.len() <= second {
            self.begin();
        }
    }

    /// For each second whether the generator had its processor, and the daemon too if it `is_always_busy`.
    pub fn undisturbed(&self, seconds: usize, is_always_busy: bool) -> Vec<bool> {
        let one = |pair: &[(std::time::Instant, CpuTimes, CpuTimes)]| {
            let [(begin, own, daemon), (end, own_end, daemon_end)] = pair else { return false };
            let daemon = if is_always_busy { daemon_end.since(daemon) } else { u64::MAX };
            let least = own_end.since(own).min(daemon) as f64;
            least / 1e9 >= UNDISTURBED * (*end - *begin).as_secs_f64()
        };
        let mut all: Vec<bool> = self.read.windows(2).map(one).collect();
        // A second without a completion was not read: nothing says whether others were at work.
        all.resize(seconds, false);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_is_owed_what_it_asks_for_and_no_more_than_its_share() {
        assert_eq!(parts(&[50, 50], &[50, 50], 100.0), [1.0, 1.0]);
        assert_eq!(parts(&[25], &[50], 100.0), [0.5], "it asked for less than its share");
        assert_eq!(parts(&[80], &[200], 100.0), [0.8], "it asked for more");
        assert_eq!(parts(&[0], &[0], 100.0), [1.0], "it asked for nothing");
        // What it did not get is asked for in the next second too.
        assert_eq!(parts(&[40, 60], &[80, 40], 100.0), [0.5, 0.75]);
        assert_eq!(parts(&[0, 0], &[10, 0], 100.0), [0.0, 0.0], "starved for as long as it is");
    }

    #[test]
    fn what_was_disturbed_is_counted_and_not_judged() {
        let modest =
            |served: [u64; 2]| Modest { times: Vec::new(), served: served.to_vec(), arrived: vec![100; 2] };
        let mut kind = Kind::default();
        let run = |undisturbed: [bool; 2]| Run {
            share: 200.0,
            turns: Histogram::new(3).unwrap(),
            taken: Taken::default(),
            ns: 2 * SECOND,
            modest: vec![modest([100, 90]), modest([100, 30])],
            undisturbed: undisturbed.to_vec(),
            greedy_bytes: 0,
        };
        kind.add(&run([true, false]));
        assert_eq!((kind.judged.clone(), kind.disturbed, kind.least), (vec![1.0], 1, 0.3));
        let capacity = Capacity { requests: 1600.0, greedy: [1000.0; 2] };
        let none = figures(&LOADS[0], &[10.0; 6], &[Kind::default(), Kind::default()], &capacity);
        assert_eq!(none.share.value(), None);
        kind.add(&run([true, true]));
        let figures = figures(&LOADS[0], &[10.0; 6], &[kind, Kind::default()], &capacity);
        assert_eq!(figures.share.value(), Some(0.3));
    }

    #[test]
    fn all_together_ask_for_twice_of_what_there_is() {
        let capacity = Capacity { requests: 1600.0, greedy: [160.0, 3200.0] };
        for kind in 0..KINDS.len() {
            let modest = MODEST as f64 * capacity.share() * ASKS / capacity.requests;
            let greedy = capacity.greedy_asks(kind) / capacity.greedy[kind];
            assert!((modest + greedy - 2.0).abs() < 1e-9, "{modest} and {greedy}");
        }
    }

    #[test]
    fn the_quanta_are_taken_off_the_tail() {
        let kind = |p99: f64| Kind { p99_us: vec![p99; 6], ..Kind::default() };
        let blocks = GUESTS * QUANTUM / 50e-6 / f64::from(BLOCKS.bytes);
        let capacity = Capacity { requests: 8.0, greedy: [blocks, 1.0] };
        let figures = figures(&LOADS[0], &[10.0; 6], &[kind(70.0), kind(30.0)], &capacity);
        assert!((figures.p99.value().unwrap() - 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_worse_load_counts_and_a_missing_one_is_not_passed_over() {
        let [low, high] = [0.4, 0.9].map(Figure::of);
        assert_eq!(worse(&high, &low, |new, old| new < old).value(), Some(0.4));
        assert_eq!(worse(&high, &low, |new, old| new > old).value(), Some(0.9));
        assert_eq!(worse(&high, &Figure::missing("no disk"), |new, old| new < old).value(), None);
    }
}
