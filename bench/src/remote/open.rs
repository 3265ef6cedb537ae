//! Requests that come at a rate of their own, whoever serves them, from a front end that sleeps: for how long the whole machine is busy with them.
//!
//! ```text
//!   a round: nobody (what the machine does by itself), then each contender, the others frozen
//!   busy = processors * time - idle time of /proc/stat - the same of nobody     generator, both daemons, kernel, interrupts: all of it
//! ```

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use ioplane_figures::machine::{Books, Idle};
use ioplane_figures::report::{median, rounded};
use ioplane_testkit::driver::DiskOp;
use serde_json::{Map, json};

use super::contender::{Exporter, Importer, Way, Wire};
use super::{Bench, WAYS};
use crate::core::drive::ns;
use crate::core::offered::Arrivals;
use crate::exitless::load::{BLOCK, SECTORS, Scatter};
use crate::exitless::qsd::Aio;
use crate::exitless::session::Session;
use crate::guest::{Guest, PATIENCE};
use crate::measured::{Figure, Report};

/// Requests per second.
const RATES: [u32; 2] = [2_000, 10_000];
const REMOTE: &str = "open_remote";
/// The others, and the figures of ours over theirs.
const OTHERS: [(&str, &str); 2] =
    [("open_qsd_qemu_nbd", "per_cpu_vs_qemu_nbd"), ("open_qsd_nbdkit", "per_cpu_vs_nbdkit")];

/// Measures, and says how each serves.
pub fn measure(bench: &Bench, report: &mut Report) -> Result<()> {
    let mut sessions = vec![
        bench.open(&bench.contender(REMOTE, Way::Remote(Importer::Ioplane, Wire::Tcp, Exporter::Ioplane)))?,
    ];
    let (aio, probes) = best_qemu_nbd(bench);
    report.setup.insert("open_qemu_nbd_by_way".into(), probes.into());
    let mut absent = BTreeMap::new();
    for ((name, _), exporter) in OTHERS.into_iter().zip([Exporter::QemuNbd(aio), Exporter::Nbdkit]) {
        let way = Way::Remote(Importer::Qsd, Wire::Tcp, exporter);
        match bench.open(&bench.contender(name, way)) {
            Ok(session) => sessions.push(session),
            Err(error) => {
                eprintln!("{name}: {error:#}");
                absent.insert(name, format!("{name}: {error:#}"));
            }
        }
    }
    for session in &sessions {
        report.setup.insert(session.name.into(), session.how.clone().into());
    }
    let slack = rustix::thread::current_timer_slack()?;
    // Arrivals are closer together than the 50 us by which the kernel may be late.
    rustix::thread::set_current_timer_slack(NonZeroU64::new(1))?;
    let measured = RATES.iter().map(|rate| rounds(bench, &mut sessions, *rate)).collect::<Result<Vec<_>>>();
    rustix::thread::set_current_timer_slack(NonZeroU64::new(slack))?;
    let measured = measured?;
    for session in sessions {
        session.close()?;
    }
    report.add(OTHERS.map(|(other, figure)| match absent.get(other) {
        Some(why) => (figure, Figure::missing(why)),
        None => (figure, worst(&measured, other)),
    }));
    Ok(())
}

/// With more than this of a processor busy with nobody, what a contender adds cannot be told.
const QUIET: f64 = 0.15;
/// What a contender is to keep of the rate, so that all do the same work.
const KEPT: f64 = 0.95;

/// One turn of one contender.
#[derive(Debug, Clone, Copy)]
struct Turn {
    /// Requests completed.
    requests: u64,
    /// Of those that were to come.
    kept: f64,
    /// How long it took, s.
    seconds: f64,
    /// Of the whole machine, less what it does by itself; s. Zero or less where others were too busy to tell.
    busy: f64,
    /// Processor time of the generator, of the processes that serve, and of kernel threads; s.
    own: f64,
    p50_us: f64,
}

/// What everybody did at one rate, and how busy the machine was with nobody: a value per round.
struct AtRate {
    rate: u32,
    turns: BTreeMap<&'static str, Vec<Turn>>,
    nobody: Vec<f64>,
}

/// A way of qemu-nbd that keeps [`KEPT`] of the lower rate with the least processor time, behind qemu-storage-daemon; where none does, the one that keeps most.
/// And what each does.
fn best_qemu_nbd(bench: &Bench) -> (Aio, Map<String, serde_json::Value>) {
    let (mut best, mut probes) = ((Aio::Threads, (false, f64::INFINITY)), Map::new());
    for (name, aio) in WAYS {
        let probe = || -> Result<Turn> {
            let way = Way::Remote(Importer::Qsd, Wire::Tcp, Exporter::QemuNbd(aio));
            let mut session = bench.open(&bench.contender(name, way))?;
            let turn = turn(bench, &mut session, RATES[0], 0, bench.pace.time * 8)?;
            session.close().map(|_| turn)
        };
        match probe() {
            Ok(turn) => {
                let own = turn.own * 1e6 / turn.requests.max(1) as f64;
                probes.insert(
                    name.into(),
                    json!({"processor_us_per_request": rounded(own), "part_of_the_rate": rounded(turn.kept)}),
                );
                let kept = turn.kept >= KEPT;
                let better = match best.1.0 {
                    true => kept && own < best.1.1,
                    // The most that is kept is the least that is not.
                    false => kept || 1.0 - turn.kept < best.1.1,
                };
                if better {
                    best = (aio, (kept, if kept { own } else { 1.0 - turn.kept }));
                }
            }
            Err(error) => {
                probes.insert(name.into(), format!("{error:#}").into());
            }
        }
    }
    (best.0, probes)
}

/// One turn of a contender; the busy time is that of the whole machine.
fn turn(bench: &Bench, session: &mut Session, rate: u32, seed: u64, time: Duration) -> Result<Turn> {
    session.turn(|guest, pids| {
        // Not counted: who was frozen has a cold cache.
        offer(guest, rate, seed, bench.pace.warm)?;
        let (books, idle) = (Books::open(pids), Idle::now()?);
        let (requests, latency) = offer(guest, rate, seed, time)?;
        let busy = idle.busy_since()?;
        let account = books.close(pids);
        Ok(Turn {
            requests,
            kept: requests as f64 / (f64::from(rate) * time.as_secs_f64()),
            seconds: busy.seconds,
            busy: busy.busy,
            own: (account.cpu_ns + account.own_ns + account.kernel_ns) as f64 / 1e9,
            p50_us: latency.value_at_quantile(0.5) as f64 / 1e3,
        })
    })
}

fn rounds(bench: &Bench, sessions: &mut [Session], rate: u32) -> Result<AtRate> {
    // The idle time of /proc/stat has steps of 10 ms.
    let time = bench.pace.time * 8;
    let rounds = bench.pace.rounds.min(12);
    eprintln!("{rate} requests per second, {rounds} rounds of {time:?} each");
    let mut all = AtRate { rate, turns: BTreeMap::new(), nobody: Vec::new() };
    for round in 0..rounds {
        let idle = Idle::now()?;
        std::thread::sleep(time);
        let nobody = idle.busy_since()?;
        all.nobody.push(nobody.busy / nobody.seconds);
        for place in 0..sessions.len() {
            let at = (place + round as usize) % sessions.len();
            let session = &mut sessions[at];
            let name = session.name;
            let mut turn = turn(bench, session, rate, u64::from(round), time)?;
            turn.busy -= nobody.busy * turn.seconds / nobody.seconds;
            all.turns.entry(name).or_default().push(turn);
        }
    }
    Ok(all)
}

impl AtRate {
    fn of(&self, name: &str) -> &[Turn] {
        self.turns.get(name).map_or(&[], Vec::as_slice)
    }

    /// Requests per second of processor time: ours over those of `other`, of each round that can tell.
    fn ratio(&self, other: &str, time: impl Fn(&Turn) -> f64) -> Figure {
        let per_cpu = |turn: &Turn| match time(turn) {
            time if time > 0.0 => turn.requests as f64 / time,
            _ => f64::NAN,
        };
        let pairs = self.of(REMOTE).iter().zip(self.of(other));
        Figure::ratio(&pairs.map(|(ours, theirs)| [per_cpu(ours), per_cpu(theirs)]).collect::<Vec<_>>())
    }
}

/// The figure at the rate at which it is worse, with that of each rate beside it.
fn worst(measured: &[AtRate], other: &str) -> Figure {
    let of = |at: &AtRate| at.ratio(other, |turn| turn.busy);
    let value = |at: &&AtRate| of(at).value().unwrap_or(f64::INFINITY);
    let Some(worst) = measured.iter().min_by(|one, two| value(one).total_cmp(&value(two))) else {
        return Figure::missing("no rate");
    };
    let rates = measured.iter().map(|at| {
        let mut row = Map::new();
        row.insert("requests_per_second".into(), at.rate.into());
        row.insert("by_busy_time".into(), of(at).brief());
        // Beside it, as it is exact and knows no interrupts: the processor time of those who took part.
        row.insert("by_processor_time".into(), at.ratio(other, |turn| turn.own).brief());
        row.insert("machine_busy_with_nobody".into(), json!(rounded(median(at.nobody.iter().copied()))));
        for name in [REMOTE, other] {
            let turns = at.of(name);
            let each = |value: fn(&Turn) -> f64| rounded(median(turns.iter().map(value)));
            row.insert(
                name.into(),
                json!({
                    "busy_us_per_request": each(|turn| turn.busy * 1e6 / turn.requests as f64),
                    "processor_us_per_request": each(|turn| turn.own * 1e6 / turn.requests as f64),
                    "p50_us": each(|turn| turn.p50_us),
                    "part_of_the_rate": each(|turn| turn.kept),
                }),
            );
        }
        row.into()
    });
    let rates: Vec<serde_json::Value> = rates.collect();
    let others = measured.iter().flat_map(|at| &at.nobody).copied();
    let others = median(others);
    let slow = measured.iter().flat_map(|at| [REMOTE, other].map(|name| (at, name))).find(|(at, name)| {
        let kept = median(at.of(name).iter().map(|turn| turn.kept));
        kept < KEPT
    });
    let figure = if let Some((at, name)) = slow {
        Figure::missing(format!(
            "{name} does not keep {} requests per second: the work is not the same",
            at.rate
        ))
    } else if others > QUIET {
        Figure::missing(format!(
            "others kept {others:.2} processors busy: stop them, or look at by_processor_time"
        ))
    } else {
        of(worst)
    };
    figure.beside("rates", rates)
}

/// Offers reads at random places at `rate` for `time`, then waits for those that are not done; how many there were, and their latencies from when
/// each was due, ns.
fn offer(guest: &mut Guest, rate: u32, seed: u64, time: Duration) -> Result<(u64, Histogram<u64>)> {
    let mut arrivals = Arrivals::new(rate.into(), seed + 1).peekable();
    let mut scatter = Scatter::new(seed + 1);
    let mut latency = Histogram::new_with_bounds(1, 100_000_000_000, 2)?;
    let places = guest.capacity / u64::from(BLOCK);
    let Guest { front, queues, .. } = guest;
    let disk = &mut queues[0];
    let mut due = vec![0; usize::from(disk.place().size)];
    disk.ring().disable_interrupts();
    let (begin, end) = (Instant::now(), ns(time));
    let (mut done, mut progress) = (0, 0);
    loop {
        let now = ns(begin.elapsed());
        while let Some(one) = disk.reap()? {
            ensure!(one.ok(), "a read ended with status {:#x}", one.status);
            latency.saturating_record(now.saturating_sub(due[one.token.slot()]));
            done += 1;
            progress = now;
        }
        let mut submitted = false;
        // What could not be submitted until the end never is: who cannot keep the rate is not measured for longer.
        while now < end
            && disk.next().is_some()
            && let Some(at) = arrivals.next_if(|at| *at <= now)
        {
            let token = disk.submit(DiskOp::Read, scatter.below(places) * SECTORS, BLOCK);
            due[token.context("a free slot")?.slot()] = at;
            submitted = true;
        }
        let (kick, call) = front.events(0).context("a queue that has started")?;
        if submitted && disk.ring().kick_needed() {
            kick.signal();
        }
        if disk.in_flight() == 0 {
            if now >= end {
                return Ok((done, latency));
            }
            progress = now;
        }
        ensure!(now - progress < ns(PATIENCE), "nothing completed for {PATIENCE:?}");
        // Until something is done, or the next request is due, if there is room for it.
        if disk.ring().enable_interrupts() {
            let next = arrivals.peek().copied().unwrap_or(u64::MAX).min(end);
            let room = disk.next().is_some() && now < end;
            let until = if room { Duration::from_nanos(next) } else { begin.elapsed() + PATIENCE / 10 };
            call.wait(until.saturating_sub(begin.elapsed()));
            disk.ring().disable_interrupts();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rate: u32, ours: f64, theirs: f64) -> AtRate {
        let turn =
            |busy| Turn { requests: 1000, kept: 1.0, seconds: 1.0, busy, own: busy / 2.0, p50_us: 1.0 };
        let turns = [(REMOTE, vec![turn(ours); 6]), ("other", vec![turn(theirs); 6])];
        AtRate { rate, turns: turns.into_iter().collect(), nobody: vec![0.0; 6] }
    }

    #[test]
    fn the_worse_rate_is_the_figure_and_all_are_beside_it() {
        let figure = worst(&[at(2_000, 0.1, 0.3), at(10_000, 0.2, 0.3)], "other");
        assert_eq!(figure.value(), Some(1.5));
        assert_eq!(figure.details()["rates"][0]["by_busy_time"]["ratio"], 3.0);
        assert_eq!(figure.details()["rates"][1]["requests_per_second"], 10_000);
    }

    #[test]
    fn who_does_not_keep_the_rate_is_not_compared() {
        let mut slow = at(2_000, 0.1, 0.3);
        slow.turns.get_mut("other").unwrap().iter_mut().for_each(|turn| turn.kept = 0.3);
        let figure = worst(&[slow], "other");
        assert_eq!(figure.value(), None);
        assert!(figure.details()["not_measured"].as_str().unwrap().contains("other does not keep 2000"));
    }

    #[test]
    fn a_busy_machine_tells_nothing() {
        let mut busy = at(2_000, 0.1, 0.3);
        busy.nobody = vec![0.5; 6];
        let figure = worst(&[busy], "other");
        assert_eq!(figure.value(), None);
        assert_eq!(figure.details()["rates"][0]["by_processor_time"]["ratio"], 3.0);
    }

    #[test]
    fn a_round_in_which_others_were_too_busy_tells_nothing() {
        let mut at = at(2_000, 0.1, 0.3);
        at.turns.get_mut(REMOTE).unwrap()[0].busy = -0.1;
        assert_eq!(at.ratio("other", |turn| turn.busy).brief()["pairs"], 5);
        let nothing = worst(&[self::at(2_000, 0.0, 0.3)], "other");
        assert_eq!(nothing.value(), None, "nothing to divide by");
    }
}
