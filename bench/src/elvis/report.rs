//! Medians by number of guests, as JSON, a table and a plot.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::load::{Outcome, Work};
use super::plot::{self, Panel};
use ioplane_figures::machine::Cpus;
use ioplane_figures::report::{envelope, median, rounded, setup_lines};

/// Payload of a frame of the stream, bytes.
const WRITE: f64 = 64.0;

/// Everything measured in one run.
#[derive(Default)]
pub struct Report {
    outcomes: BTreeMap<(Work, u16, &'static str), Vec<Outcome>>,
    setup: Map<String, Value>,
}

/// The figures of one load.
#[derive(Debug, Clone, Copy)]
struct Medians {
    mbit: f64,
    frames: f64,
    mean_us: f64,
    p99_us: f64,
    kicks: f64,
    interrupts: f64,
    /// Both, a second: what would be exits of a guest without hardware help.
    notifications: f64,
    /// Processor time of the back end, percent of one.
    cpu_percent: f64,
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
            p99_us: of(&|o| o.latency.value_at_quantile(0.99) as f64 / 1e3),
            kicks: of(&|o| per(o, o.kicks)),
            interrupts: of(&|o| per(o, o.interrupts)),
            notifications: of(&|o| rate(o, o.kicks + o.interrupts)),
            cpu_percent: of(&|o| o.account.cpu_ns as f64 / 1e7 / o.account.seconds),
        }
    }
}

impl Report {
    pub fn new(cpus: Cpus, room: String) -> Self {
        let mut setup = Map::new();
        setup.insert("guests_cpu".into(), json!(cpus.front));
        setup.insert("back_end_cpu".into(), json!(cpus.back));
        setup.insert("bound_by".into(), json!(room));
        setup.insert(
            "ioplane_process".into(),
            json!("bench lan: switch and vhost-user host alone, not the daemon"),
        );
        Report { setup, ..Report::default() }
    }

    pub fn outcome(&mut self, guests: u16, work: Work, name: &'static str, outcome: Outcome) {
        self.outcomes.entry((work, guests, name)).or_default().push(outcome);
    }

    pub fn took(&mut self, time: Duration) {
        self.setup.insert("seconds".into(), json!(time.as_secs()));
    }

    pub fn json(&self) -> Value {
        envelope("elvis", &self.setup, self.figures())
    }

    /// What was measured, by number of guests.
    pub fn figures(&self) -> Map<String, Value> {
        let mut figures = Map::new();
        for ((work, guests, name), outcomes) in &self.outcomes {
            let m = Medians::of(outcomes);
            let cell = figures.entry(format!("guests{guests}")).or_insert_with(|| json!({}));
            let load = if *work == Work::Stream { "stream" } else { "requests" };
            let who = if *name == "ioplane" { "polled" } else { name };
            let mut put = |part: &str, value| cell[format!("{who}_{load}_{part}")] = json!(rounded(value));
            match work {
                Work::Stream => put("mbit_per_s", m.mbit),
                Work::Requests => {
                    put("mean_us", m.mean_us);
                    put("p99_us", m.p99_us);
                }
            }
            put("frames_per_s", m.frames);
            put("kicks_per_frame", m.kicks);
            put("interrupts_per_frame", m.interrupts);
            put("notifications_per_s", m.notifications);
            put("back_end_cpu_percent", m.cpu_percent);
            let of = |name| self.outcomes.get(&(*work, *guests, name)).map(|other| Medians::of(other));
            let (polled, notified) = (of("ioplane"), of("notified"));
            // Against the others, in this run.
            match (*name, polled, notified) {
                ("ioplane", _, Some(other)) => {
                    let (part, ratio) = match work {
                        Work::Stream => ("polled_vs_notified_stream", m.mbit / other.mbit),
                        Work::Requests => ("polled_vs_notified_latency", m.mean_us / other.mean_us),
                    };
                    cell[part] = json!(rounded(ratio));
                }
                ("adaptive", Some(polled), Some(notified)) => {
                    let (part, ratio) = match work {
                        Work::Stream => ("adaptive_vs_best_stream", m.mbit / polled.mbit.max(notified.mbit)),
                        Work::Requests => {
                            ("adaptive_vs_best_latency", m.mean_us / polled.mean_us.min(notified.mean_us))
                        }
                    };
                    cell[part] = json!(rounded(ratio));
                }
                _ => {}
            }
        }
        figures
    }

    /// The same for people.
    pub fn table(&self) -> String {
        let mut out = setup_lines(&self.setup, 14);
        let titles = ["Mbit/s", "frames/s", "mean us", "p99 us", "kicks/fr", "irqs/fr", "notif/s", "CPU %"];
        let _ = write!(out, "\n{:10}{:>7}  {:9}", "", "guests", "");
        for title in titles {
            let _ = write!(out, "{title:>11}");
        }
        let _ = writeln!(out);
        for ((work, guests, name), outcomes) in &self.outcomes {
            let m = Medians::of(outcomes);
            let who = if *name == "ioplane" { "polled" } else { name };
            let _ = write!(out, "{:10}{guests:>7}  {who:9}", format!("{work:?}").to_lowercase());
            let latency =
                |value: f64| if *work == Work::Stream { String::new() } else { format!("{value:.2}") };
            let _ = writeln!(
                out,
                "{:>11.0}{:>11.0}{:>11}{:>11}{:>11.4}{:>11.4}{:>11.0}{:>11.0}",
                m.mbit,
                m.frames,
                latency(m.mean_us),
                latency(m.p99_us),
                m.kicks,
                m.interrupts,
                m.notifications,
                m.cpu_percent,
            );
        }
        out
    }

    /// The paper's two figures side by side: throughput and latency by number of guests.
    pub fn plot(&self) -> String {
        let line = |work: Work, name: &str, value: fn(&Medians) -> f64| -> Vec<(f64, f64)> {
            let mine = self.outcomes.iter().filter(|((w, _, n), _)| *w == work && *n == name);
            mine.map(|((_, guests, _), outcomes)| (f64::from(*guests), value(&Medians::of(outcomes))))
                .collect()
        };
        let panel = |title, unit, work, value: fn(&Medians) -> f64| Panel {
            title,
            unit,
            lines: vec![
                ("polling", line(work, "ioplane", value)),
                ("notification", line(work, "notified", value)),
                ("adaptive", line(work, "adaptive", value)),
            ],
        };
        plot::svg(&[
            panel("TCP stream of 64-byte writes", "Mbit/s, all guests", Work::Stream, |m| m.mbit),
            panel("UDP request-response", "mean latency, us", Work::Requests, |m| m.mean_us),
            panel("Notifications of the stream", "kicks and interrupts a second", Work::Stream, |m| {
                m.notifications
            }),
        ])
    }
}
