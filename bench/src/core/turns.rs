//! The mode under test and the modes it is compared with, a daemon each, in turns: first requests, slow loads, square waves.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ioplane_figures::machine::Books;
use ioplane_figures::report::median;
use ioplane_testkit::driver::DiskOp;
use serde_json::Map;

use super::drive::{Flow, drive, ns};
use super::offered::{Arrivals, Offered, SquareWave};
use super::stage::{FORM, Stage};
use super::{Bench, Mode};
use crate::exitless::load::{BLOCK, SECTORS};
use crate::guest::{Guest, PATIENCE};
use crate::measured::Figure;

/// Silence before a first request: twice as long as a polled core polls an idle queue.
const SILENCE: Duration = Duration::from_millis(100);
/// Requests per second of a slow load.
const SLOW: f64 = 1000.0;
/// Periods of square waves, us.
const PERIODS: [u64; 6] = [10, 100, 1_000, 10_000, 100_000, 1_000_000];

/// A daemon in `mode` with one disk in memory.
fn one_disk(bench: &Bench, what: &str, side: &str, mode: Mode) -> Result<Stage> {
    let mut stage = Stage::start(bench, &format!("{what}-{side}"), mode, &[("disk", "memory = \"64M\"")])?;
    stage.connect("disk", FORM)?;
    Ok(stage)
}

/// The mode under test, and notified mode.
fn against_notified(bench: &Bench, what: &str) -> Result<[Stage; 2]> {
    Ok([one_disk(bench, what, "test", bench.mode)?, one_disk(bench, what, "notified", Mode::Notified)?])
}

/// The first request after silence, in pairs of runs.
pub fn wakeup(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!("the first request after {SILENCE:?}");
    let mut stages = against_notified(bench, "wakeup")?;
    let mut pairs = Vec::new();
    for number in 0..bench.pace.pairs {
        let mut us = [0.0; 2];
        for side in Bench::order(number) {
            us[side] = stages[side].turn(|stage| {
                let firsts: Result<Vec<f64>> =
                    (0..bench.pace.wakeups).map(|_| first_request(&mut stage.guests[0])).collect();
                Ok(median(firsts?))
            })?;
        }
        pairs.push(us);
    }
    let of = |side: usize| median(pairs.iter().map(|pair| pair[side]));
    let figure = Figure::ratio(&pairs).beside("us", of(0)).beside("notified_us", of(1));
    Ok(vec![("wakeup_ratio", figure)])
}

/// From before a request is made available until it is seen to be done, us, after [`SILENCE`].
fn first_request(guest: &mut Guest) -> Result<f64> {
    guest.queues[0].ring().disable_interrupts();
    std::thread::sleep(SILENCE);
    let begin = Instant::now();
    guest.queues[0].submit(DiskOp::Read, 8 * SECTORS, BLOCK).context("a free slot")?;
    guest.kick_if_needed(0);
    loop {
        if let Some(done) = guest.queues[0].reap()? {
            ensure!(done.ok(), "a first read ended with status {:#x}", done.status);
            return Ok(begin.elapsed().as_secs_f64() * 1e6);
        }
        ensure!(begin.elapsed() < PATIENCE, "a first read was never completed");
    }
}

/// Processor time per request at [`SLOW`].
pub fn slow_load(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!("{SLOW} requests per second");
    let mut stages = against_notified(bench, "slow")?;
    let mut pairs = Vec::new();
    for number in 0..bench.pace.pairs {
        let mut us = [0.0; 2];
        for side in Bench::order(number) {
            us[side] = stages[side].turn(|stage| {
                let pids = stage.pids();
                let arrivals = Offered::open(Arrivals::new(SLOW, u64::from(number) + 1));
                let mut flow = Flow::new(&mut stage.guests[0], 0, arrivals, BLOCK, 1);
                flow.interrupts = true;
                let mut requests = 0u64;
                let books = Books::open(&pids);
                drive(&mut [flow], bench.pace.slow_round, |_| requests += 1)?;
                Ok(books.close(&pids).cpu_ns as f64 / 1e3 / requests.max(1) as f64)
            })?;
        }
        pairs.push(us);
    }
    let of = |side: usize| median(pairs.iter().map(|pair| pair[side]));
    let figure = Figure::ratio(&pairs)
        .beside("requests_per_s", SLOW)
        .beside("cpu_us_per_request", of(0))
        .beside("notified_cpu_us_per_request", of(1));
    Ok(vec![("slow_load_cpu_ratio", figure)])
}

/// Requests per second of the mode under test, polled and notified mode in each round, by the wave's period in us.
type Rounds = BTreeMap<u64, Vec<[f64; 3]>>;

/// Requests that square waves get, against the better of polled and notified mode: of each period the median over pairs of runs, and the smallest of these
/// medians. The pairs are spread over several starts of the daemons. The smallest ratio of single runs would be that of the unluckiest run.
pub fn square_waves(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let mut rounds = Rounds::new();
    for start in 0..bench.pace.wave_starts {
        let what = format!("wave{start}");
        let mut stages = [
            one_disk(bench, &what, "test", bench.mode)?,
            one_disk(bench, &what, "polled", Mode::Polled)?,
            one_disk(bench, &what, "notified", Mode::Notified)?,
        ];
        for period_us in PERIODS {
            eprintln!("square wave, {period_us} us, start {} of {}", start + 1, bench.pace.wave_starts);
            let wave = SquareWave { period: period_us * 1000 };
            let time = bench.pace.wave_round.max(Duration::from_micros(period_us));
            let is_long = Some(&period_us) == PERIODS.last();
            let rounds = rounds.entry(period_us).or_default();
            for _ in 0..if is_long { bench.pace.wave_pairs.div_ceil(2) } else { bench.pace.wave_pairs } {
                let mut requests = [0.0; 3];
                // Each is first, second and last equally often.
                for turn in 0..stages.len() {
                    let side = (turn + rounds.len()) % stages.len();
                    requests[side] = stages[side].turn(|stage| waves(&mut stage.guests[0], wave, time))?;
                }
                rounds.push(requests);
            }
        }
    }
    let figure = least_median(&rounds).beside("starts", bench.pace.wave_starts);
    Ok(vec![("square_wave_min_ratio", figure)])
}

/// The period with the smallest median, with those of all beside it.
fn least_median(rounds: &Rounds) -> Figure {
    let mut all = Map::new();
    let mut worst: Option<(u64, Figure)> = None;
    for (period_us, rounds) in rounds {
        let (figure, better) = against_better(rounds);
        let mut told = figure.brief();
        told["better"] = better.word().into();
        all.insert(format!("{period_us}us"), told);
        let least = worst.as_ref().and_then(|(_, least)| least.value()).unwrap_or(f64::INFINITY);
        if figure.value().is_some_and(|value| value < least) {
            worst = Some((*period_us, figure));
        }
    }
    match worst {
        Some((period_us, figure)) => figure.beside("at_period_us", period_us).beside("periods", all),
        None => Figure::missing("no request was completed"),
    }
}

/// Requests completed.
fn waves(guest: &mut Guest, wave: SquareWave, time: Duration) -> Result<f64> {
    let mut requests = 0u64;
    let flow = Flow::new(guest, 0, Offered::Square(wave), BLOCK, 1);
    drive(&mut [flow], time, |_| requests += 1)?;
    Ok(requests as f64 / ns(time) as f64 * 1e9)
}

/// Rounds of (under test, polled, notified): the first against whichever of the others has the larger median. Taking the better one of each
/// round would take the luckier one.
fn against_better(rounds: &[[f64; 3]]) -> (Figure, Mode) {
    let of = |side: usize| median(rounds.iter().map(|round| round[side]));
    let (better, mode) = if of(1) >= of(2) { (1, Mode::Polled) } else { (2, Mode::Notified) };
    let pairs: Vec<[f64; 2]> = rounds.iter().map(|round| [round[0], round[better]]).collect();
    (Figure::ratio(&pairs), mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_better_mode_is_chosen_once() {
        // Notified is lucky in one round, polled is better.
        let rounds = [[80.0, 100.0, 50.0], [90.0, 100.0, 400.0], [100.0, 100.0, 50.0]];
        let (figure, mode) = against_better(&rounds);
        assert_eq!((figure.value(), mode), (Some(0.9), Mode::Polled));
        let (figure, mode) = against_better(&[[30.0, 10.0, 20.0]]);
        assert_eq!((figure.value(), mode), (Some(1.5), Mode::Notified));
    }

    #[test]
    fn nothing_completed_is_no_ratio() {
        assert_eq!(against_better(&[[0.0, 0.0, 0.0]]).0.value(), None);
    }
    #[test]
    fn the_period_with_the_smallest_median_counts_and_not_the_unluckiest_run() {
        let of = |ratios: [f64; 6]| ratios.map(|ratio| [100.0 * ratio, 100.0, 50.0]).to_vec();
        let rounds = Rounds::from([
            (10, of([0.2, 0.98, 0.98, 0.98, 0.98, 1.0])),
            (1000, of([0.9, 0.92, 0.92, 0.92, 0.92, 0.94])),
        ]);
        let figure = least_median(&rounds);
        assert!((figure.value().unwrap() - 0.92).abs() < 1e-9);
        let told = serde_json::to_value(figure.details()).unwrap();
        assert_eq!((&told["at_period_us"], &told["pairs"]), (&1000.into(), &6.into()));
        assert_eq!(told["interval"], serde_json::json!([0.9, 0.94]));
        let other = &told["periods"]["10us"];
        assert_eq!(
            (&other["ratio"], &other["better"], &other["pairs"]),
            (&0.98.into(), &"polled".into(), &6.into())
        );
        assert_eq!(least_median(&Rounds::new()).value(), None);
    }
}
