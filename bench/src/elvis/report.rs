//! Medians by number of guests, as JSON and a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::load::{Outcome, SAMPLED, Work};
use ioplane_figures::compare::PairedRatio;
use ioplane_figures::machine::Cpus;
use ioplane_figures::report::{envelope, median, rounded, setup_lines};

/// Payload of a frame of the stream, bytes.
const WRITE: f64 = 64.0;

/// Everything measured in one run.
#[derive(Default)]
pub struct Report {
    outcomes: BTreeMap<(Work, u16, &'static str), Vec<Outcome>>,
    /// Drivers do not sleep.
    awake: bool,
    setup: Map<String, Value>,
}

/// The figures of one load.
#[derive(Debug, Clone, Copy)]
struct Medians {
    mbit: f64,
    frames: f64,
    /// Of a stream as [`Outcome`] has it, of one frame in [`super::load::SAMPLED`].
    mean_us: f64,
    p50_us: f64,
    p99_us: f64,
    kicks: f64,
    interrupts: f64,
    /// Both, a second: what would be exits of a guest without hardware help.
    notifications: f64,
    /// Interrupts from one processor of this machine to another, a second, where they are counted.
    between: Option<f64>,
    /// Processor time of the back end, percent of one.
    cpu_percent: f64,
    /// The same per frame, us.
    cpu_us: f64,
}

/// Processor time of the back end per frame, us.
fn cpu_us(outcome: &Outcome) -> f64 {
    outcome.account.cpu_ns as f64 / 1e3 / (outcome.frames as f64).max(1.0)
}

/// What a contender is called in figures.
fn called(name: &'static str) -> &'static str {
    if name == "ioplane" { "polled" } else { name }
}

/// The median over rounds of one contender's value as a multiple of the other's in the same round. Rounds alternate, so what disturbs
/// one disturbs the other.
fn ratio(one: &[Outcome], other: &[Outcome], value: fn(&Outcome) -> f64) -> f64 {
    median(
        one.iter().zip(other).map(|(one, other)| value(one) / value(other)).filter(|ratio| ratio.is_finite()),
    )
}

/// Whichever of the others has the larger median: the better one of each round would be the luckier one.
fn better<'a>(
    polled: &'a [Outcome],
    notified: &'a [Outcome],
    value: fn(&Outcome) -> f64,
) -> (&'static str, &'a [Outcome]) {
    let of = |all: &[Outcome]| median(all.iter().map(value));
    if of(polled) >= of(notified) { ("polled", polled) } else { ("notified", notified) }
}

/// What is the larger, the better.
type Goodness = fn(&Outcome) -> f64;

/// The more the shorter.
const SHORTNESS: [(&str, Goodness); 2] =
    [("mean", |o| 1.0 / o.latency.mean()), ("p50", |o| 1.0 / o.latency.value_at_quantile(0.5) as f64)];

/// Mean and median latency: those of `other` as parts of those of `one`, so that 1 and more is as good.
fn latency_against(one: &[Outcome], (name, other): (&str, &[Outcome])) -> Value {
    let mut told = json!({ "mode": name });
    for (key, value) in SHORTNESS {
        let pairs = one.iter().zip(other).map(|(one, other)| [value(one), value(other)]);
        told[key] = json!(PairedRatio::of(pairs).map(|ratio| ratio.json()));
    }
    told
}

/// The worst rows of an adaptive core.
#[derive(Default)]
struct Worst {
    /// Against the better of the others.
    least: Option<(f64, String)>,
    /// Mean latency of the others' better one as a part of its own.
    slowest: Option<(f64, String)>,
    /// Its processor time against notified's, where the core is not saturated and the work is the same.
    dearest: Option<(f64, String)>,
}

impl Worst {
    fn row(&mut self, work: Work, guests: u16, [good, short, cpu]: [f64; 3]) {
        let at = || format!("guests{guests}.{}", work.word());
        for (worst, value) in [(&mut self.least, good), (&mut self.slowest, short)] {
            if worst.as_ref().is_none_or(|(least, _)| value < *least) {
                *worst = Some((value, at()));
            }
        }
        if work == Work::Paced && self.dearest.as_ref().is_none_or(|(most, _)| cpu > *most) {
            self.dearest = Some((cpu, at()));
        }
    }

    fn tell(self, figures: &mut Map<String, Value>) {
        let worst = [
            ("adaptive_vs_best_min", self.least),
            ("adaptive_latency_vs_best_min", self.slowest),
            ("adaptive_cpu_vs_notified_max", self.dearest),
        ];
        for (key, (value, at)) in worst.into_iter().filter_map(|(key, worst)| Some((key, worst?))) {
            figures.insert(key.into(), json!(rounded(value)));
            figures.insert(format!("{key}_at"), json!(at));
        }
    }
}

impl Medians {
    fn of(outcomes: &[Outcome]) -> Self {
        let of = |value: &dyn Fn(&Outcome) -> f64| median(outcomes.iter().map(value));
        let rate = |o: &Outcome, count: u64| count as f64 / o.account.seconds;
        let per = |o: &Outcome, count: u64| count as f64 / (o.frames as f64).max(1.0);
        Medians {
            mbit: of(&|o| rate(o, o.frames) * WRITE * 8.0 / 1e6),
            frames: of(&|o| rate(o, o.frames)),
            mean_us: of(&|o| o.latency.mean() / 1e3),
            p50_us: of(&|o| o.latency.value_at_quantile(0.5) as f64 / 1e3),
            p99_us: of(&|o| o.latency.value_at_quantile(0.99) as f64 / 1e3),
            kicks: of(&|o| per(o, o.kicks)),
            interrupts: of(&|o| per(o, o.interrupts)),
            notifications: of(&|o| rate(o, o.kicks + o.interrupts)),
            between: outcomes
                .iter()
                .all(|o| o.between.is_some())
                .then(|| of(&|o| rate(o, o.between.unwrap_or_default()))),
            cpu_percent: of(&|o| o.account.cpu_ns as f64 / 1e7 / o.account.seconds),
            cpu_us: of(&cpu_us),
        }
    }
}

impl Report {
    /// `awake`: drivers do not sleep.
    pub fn new(cpus: Cpus, room: String, awake: bool) -> Self {
        let mut setup = Map::new();
        setup.insert("guests_cpu".into(), json!(cpus.front));
        setup.insert("back_end_cpu".into(), json!(cpus.back));
        setup.insert("bound_by".into(), json!(room));
        setup.insert(
            "ioplane_process".into(),
            json!("bench lan: switch and vhost-user host alone, not the daemon"),
        );
        let drivers = if awake { "look at their rings all the time" } else { "sleep until an interrupt" };
        setup.insert("drivers".into(), json!(drivers));
        let stream =
            format!("one frame in {SAMPLED}: from its guest's ring until the remote machine takes it");
        setup.insert("stream_latency".into(), json!(stream));
        Report { setup, awake, ..Report::default() }
    }

    pub fn outcome(&mut self, guests: u16, work: Work, name: &'static str, outcome: Outcome) {
        self.outcomes.entry((work, guests, name)).or_default().push(outcome);
    }

    pub fn took(&mut self, time: Duration) {
        self.setup.insert("seconds".into(), json!(time.as_secs()));
    }

    pub fn json(&self) -> Value {
        envelope(if self.awake { "elvis-awake" } else { "elvis" }, &self.setup, self.figures())
    }

    /// What was measured, by number of guests, and the worst row of what is asked of an adaptive core.
    pub fn figures(&self) -> Map<String, Value> {
        let mut figures = Map::new();
        let mut worst = Worst::default();
        for ((work, guests, name), outcomes) in &self.outcomes {
            let m = Medians::of(outcomes);
            let cell = figures.entry(format!("guests{guests}")).or_insert_with(|| json!({}));
            let (load, who) = (work.word(), called(name));
            let mut put = |part: &str, value| cell[format!("{who}_{load}_{part}")] = json!(rounded(value));
            if *work == Work::Stream {
                put("mbit_per_s", m.mbit);
            }
            put("mean_us", m.mean_us);
            put("p50_us", m.p50_us);
            put("p99_us", m.p99_us);
            put("frames_per_s", m.frames);
            put("kicks_per_frame", m.kicks);
            put("interrupts_per_frame", m.interrupts);
            put("notifications_per_s", m.notifications);
            if let Some(between) = m.between {
                put("processor_interrupts_per_s", between);
            }
            put("back_end_cpu_percent", m.cpu_percent);
            put("cpu_us_per_frame", m.cpu_us);
            let of = |name| self.outcomes.get(&(*work, *guests, name)).map(Vec::as_slice);
            let (polled, notified) = (of("ioplane"), of("notified"));
            // Against the others, in this run.
            match (*name, polled, notified) {
                ("ioplane", _, Some(other)) => {
                    let other = Medians::of(other);
                    let (part, ratio) = match work {
                        Work::Stream => ("stream", m.mbit / other.mbit),
                        Work::Requests | Work::Paced => ("latency", m.mean_us / other.mean_us),
                    };
                    let load = if *work == Work::Paced { "paced_" } else { "" };
                    cell[format!("polled_vs_notified_{load}{part}")] = json!(rounded(ratio));
                }
                ("again", Some(polled), _) => {
                    let same = ratio(outcomes, polled, work.goodness());
                    cell[format!("again_vs_polled_{load}")] = json!(rounded(same));
                }
                ("adaptive", Some(polled), Some(notified)) => {
                    let (_, best) = better(polled, notified, work.goodness());
                    let good = ratio(outcomes, best, work.goodness());
                    let shortest = better(polled, notified, SHORTNESS[0].1);
                    let short = ratio(outcomes, shortest.1, SHORTNESS[0].1);
                    let cpu = ratio(outcomes, notified, cpu_us);
                    cell[format!("adaptive_vs_best_{load}")] = json!(rounded(good));
                    cell[format!("adaptive_latency_vs_best_{load}")] = latency_against(outcomes, shortest);
                    cell[format!("adaptive_latency_vs_notified_{load}")] =
                        latency_against(outcomes, ("notified", notified));
                    cell[format!("adaptive_cpu_vs_notified_{load}")] = json!(rounded(cpu));
                    worst.row(*work, *guests, [good, short, cpu]);
                }
                _ => {}
            }
        }
        worst.tell(&mut figures);
        figures
    }

    /// The same for people.
    pub fn table(&self) -> String {
        let mut out = setup_lines(&self.setup, 14);
        let titles = [
            "Mbit/s",
            "frames/s",
            "mean us",
            "p50 us",
            "p99 us",
            "kicks/fr",
            "irqs/fr",
            "notif/s",
            "cpu-irqs/s",
            "CPU %",
        ];
        let _ = write!(out, "\n{:10}{:>7}  {:9}", "", "guests", "");
        for title in titles {
            let _ = write!(out, "{title:>11}");
        }
        let _ = writeln!(out);
        for ((work, guests, name), outcomes) in &self.outcomes {
            let m = Medians::of(outcomes);
            let who = called(name);
            let _ = write!(out, "{:10}{guests:>7}  {who:9}", work.word());
            let _ = writeln!(
                out,
                "{:>11.0}{:>11.0}{:>11.2}{:>11.2}{:>11.2}{:>11.4}{:>11.4}{:>11.0}{:>11}{:>11.0}",
                m.mbit,
                m.frames,
                m.mean_us,
                m.p50_us,
                m.p99_us,
                m.kicks,
                m.interrupts,
                m.notifications,
                m.between.map_or(String::new(), |between| format!("{between:.0}")),
                m.cpu_percent,
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(values: &[(Work, u16, &'static str, u64, u64)]) -> Report {
        let mut report = Report::default();
        for &(work, guests, name, frames, cpu_ns) in values {
            // Each was as slow as it has few frames.
            let mut latency = hdrhistogram::Histogram::new(2).unwrap();
            latency.record(1_000_000_000 / frames).unwrap();
            let account = ioplane_figures::machine::Account {
                seconds: 1.0,
                cpu_ns,
                own_ns: 0,
                kernel_ns: 0,
                foreign: 0.0,
            };
            report.outcome(
                guests,
                work,
                name,
                Outcome { frames, kicks: 0, interrupts: 0, between: Some(7), latency, account },
            );
        }
        report
    }

    #[test]
    fn the_worst_row_of_an_adaptive_core_is_told() {
        let report = report(&[
            (Work::Stream, 1, "ioplane", 1000, 9_000_000),
            (Work::Stream, 1, "adaptive", 900, 9_000_000),
            (Work::Stream, 1, "notified", 500, 9_000_000),
            (Work::Requests, 2, "ioplane", 100, 9_000_000),
            (Work::Requests, 2, "adaptive", 160, 9_000_000),
            (Work::Requests, 2, "notified", 200, 9_000_000),
            (Work::Paced, 3, "ioplane", 100, 9_000_000),
            (Work::Paced, 3, "adaptive", 100, 1_200_000),
            (Work::Paced, 3, "notified", 100, 1_000_000),
        ]);
        let figures = report.figures();
        let part = |guests: &str, part: &str| figures[guests][part].as_f64().unwrap();
        assert_eq!(part("guests1", "notified_stream_processor_interrupts_per_s"), 7.0);
        assert_eq!(part("guests1", "adaptive_vs_best_stream"), 0.9);
        // A histogram of two digits.
        assert!((part("guests2", "adaptive_vs_best_requests") - 0.8).abs() < 0.02);
        assert_eq!(part("guests3", "adaptive_vs_best_paced"), 1.0);
        assert_eq!(part("guests3", "adaptive_cpu_vs_notified_paced"), 1.2);
        assert_eq!(figures["adaptive_vs_best_min_at"], "guests2.requests");
        assert_eq!(figures["adaptive_latency_vs_best_min_at"], "guests2.requests");
        assert_eq!(figures["adaptive_latency_vs_best_min"], figures["guests2"]["adaptive_vs_best_requests"]);
        assert_eq!(figures["adaptive_cpu_vs_notified_max"], 1.2);
        assert_eq!(figures["adaptive_cpu_vs_notified_max_at"], "guests3.paced");
    }
    #[test]
    fn a_paced_row_has_its_latency_beside_its_rate() {
        let mut report = Report::default();
        for round in 0..6 {
            for (name, ns) in [("ioplane", 30_000), ("adaptive", 100_000 + round), ("notified", 110_000)] {
                let mut latency = hdrhistogram::Histogram::new(3).unwrap();
                latency.record(ns).unwrap();
                let account = ioplane_figures::machine::Account {
                    seconds: 1.0,
                    cpu_ns: 1000,
                    own_ns: 0,
                    kernel_ns: 0,
                    foreign: 0.0,
                };
                let outcome =
                    Outcome { frames: 2000, kicks: 0, interrupts: 0, between: None, latency, account };
                report.outcome(4, Work::Paced, name, outcome);
            }
        }
        let figures = report.figures();
        let cell = &figures["guests4"];
        assert_eq!(cell["adaptive_vs_best_paced"], 1.0, "all have as many requests");
        let best = &cell["adaptive_latency_vs_best_paced"];
        assert_eq!((&best["mode"], &best["mean"]["pairs"]), (&json!("polled"), &json!(6)));
        for key in ["mean", "p50"] {
            let part = |of: &str| cell[of][key]["ratio"].as_f64().unwrap();
            assert!((part("adaptive_latency_vs_best_paced") - 0.3).abs() < 0.002);
            assert!((part("adaptive_latency_vs_notified_paced") - 1.1).abs() < 0.002);
        }
        assert!(best["mean"]["interval"].is_array());
        assert_eq!(figures["adaptive_latency_vs_best_min_at"], "guests4.paced");
    }
}
