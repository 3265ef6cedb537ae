//! Medians, and how they are told: one JSON object, or a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::load::{Outcome, Waiting};
use ioplane_figures::compare::PairedRatio;
use ioplane_figures::machine::Cpus;
use ioplane_figures::report::{envelope, median, rounded, setup_lines};

/// Which load an outcome is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// On the file, else on memory.
    pub on_file: bool,
    /// Requests in flight.
    pub depth: u16,
    /// Writes, else reads.
    pub write: bool,
    /// Polling or interrupts.
    pub waiting: Waiting,
}

impl Key {
    /// Under which key of `figures` its figures stand.
    fn cell(self) -> String {
        format!("{}depth{}", if self.on_file { "file_" } else { "" }, self.depth)
    }

    /// What is put before the name of each figure of contender `name`: who, and then the kind of rounds and of request.
    fn prefix(self, name: &str) -> [String; 2] {
        let who = if name == "ioplane" { String::new() } else { format!("{name}_") };
        let irq = if self.waiting == Waiting::Interrupts { "irq_" } else { "" };
        [who, format!("{irq}{}", if self.write { "write_" } else { "" })]
    }

    /// The keys of the figures of contender `name` that a comparison judges.
    pub fn judged(self, name: &str) -> [String; 4] {
        let [who, load] = self.prefix(name);
        ["iops", "p50_us", "p99_us", "cpu_us_per_request"]
            .map(|part| format!("{}.{who}{load}{part}", self.cell()))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (*self as u8).cmp(&(*other as u8))
    }
}

/// Medians over the rounds of one contender at one load.
#[derive(Debug, Clone, Copy)]
struct Medians {
    iops: f64,
    /// Largest minus smallest, as a part of the median.
    iops_spread: f64,
    p50_us: f64,
    p99_us: f64,
    cpu_us: f64,
    /// Of kernel threads, whoever they worked for; not in `cpu_us`.
    kernel_us: f64,
    kicks: f64,
    interrupts: f64,
}

impl Medians {
    fn of(outcomes: &[Outcome]) -> Self {
        let median = |value: &dyn Fn(&Outcome) -> f64| median(outcomes.iter().map(value));
        let iops = |o: &Outcome| o.requests as f64 / o.seconds;
        let per = |count: u64, o: &Outcome| count as f64 / (o.requests as f64).max(1.0);
        let most = outcomes.iter().map(iops).fold(0.0, f64::max);
        let least = outcomes.iter().map(iops).fold(f64::INFINITY, f64::min);
        let quantile = |o: &Outcome, part| o.latency.value_at_quantile(part) as f64 / 1e3;
        Medians {
            iops: median(&iops),
            iops_spread: (most - least) / median(&iops).max(1.0),
            p50_us: median(&|o| quantile(o, 0.5)),
            p99_us: median(&|o| quantile(o, 0.99)),
            cpu_us: median(&|o| per(o.cpu_ns, o) / 1e3),
            kernel_us: median(&|o| per(o.kernel_ns, o) / 1e3),
            kicks: median(&|o| per(o.kicks, o)),
            interrupts: median(&|o| per(o.interrupts, o)),
        }
    }
}

/// Requests per second of processor time.
fn per_cpu_second(outcome: &Outcome) -> f64 {
    outcome.requests as f64 / outcome.cpu_ns as f64 * 1e9
}

/// Everything measured in one run.
#[derive(Default)]
pub struct Report {
    outcomes: BTreeMap<(Key, &'static str), Vec<Outcome>>,
    ceilings: Map<String, Value>,
    probes: Map<String, Value>,
    setup: Map<String, Value>,
    disturbed: u64,
}

impl Report {
    pub fn new(cpus: Cpus, room: String) -> Self {
        let mut setup = Map::new();
        setup.insert("generator_cpu".into(), json!(cpus.front));
        setup.insert("back_end_cpu".into(), json!(cpus.back));
        setup.insert("bound_by".into(), json!(room));
        setup.insert("qsd_version".into(), json!(super::qsd::version()));
        let unequal =
            "unequal: ioplane copies in its own memory, qsd makes system calls on a file of a tmpfs";
        setup.insert("work_on_memory".into(), json!(unequal));
        setup.insert("work_on_file".into(), json!("equal: both io_uring with O_DIRECT"));
        setup.insert("ring".into(), json!(super::RING));
        setup.insert("descriptors".into(), json!(format!("{:?}", super::SHAPE)));
        Report { setup, ..Report::default() }
    }

    /// What the generator does at `depth` when the backend costs nothing.
    pub fn ceiling(&mut self, depth: u16, outcome: &Outcome) {
        let m = Medians::of(std::slice::from_ref(outcome));
        let cell = json!({ "iops": m.iops.round(), "p50_us": m.p50_us, "p99_us": m.p99_us });
        eprintln!("generator: depth {depth}: {cell}");
        self.ceilings.insert(format!("depth{depth}"), cell);
    }

    /// How a contender serves, in words.
    pub fn setup(&mut self, name: &str, what: &str, how: &str) {
        self.setup.insert(format!("{name}_{what}"), json!(how));
    }

    /// Which processors its io_uring workers may use, at the end.
    pub fn workers(&mut self, name: &str, what: &str, cpus: &[String]) {
        if !cpus.is_empty() {
            self.setup.insert(format!("{name}_{what}_io_workers"), json!(cpus));
        }
    }

    /// One way of the peer to serve memory. Returns its processor time a request, us, reads and writes together.
    pub fn probe(&mut self, name: &str, outcomes: &[Outcome]) -> f64 {
        let m = Medians::of(outcomes);
        let cell = json!({
            "iops": m.iops.round(),
            "cpu_us_per_request": rounded(m.cpu_us),
            "kicks_per_request": rounded(m.kicks),
        });
        eprintln!("qsd: {name}: {cell}");
        self.probes.insert(name.into(), cell);
        m.cpu_us
    }

    /// A round was disturbed: others were busy. Returns how many were so far.
    pub fn disturbed(&mut self) -> u64 {
        self.disturbed += 1;
        self.disturbed
    }

    pub fn outcome(&mut self, name: &'static str, key: Key, outcome: Outcome) {
        self.outcomes.entry((key, name)).or_default().push(outcome);
    }

    pub fn took(&mut self, time: Duration) {
        self.setup.insert("seconds".into(), json!(time.as_secs()));
        self.setup.insert("rounds_disturbed".into(), json!(self.disturbed));
    }

    fn medians(&self, key: Key, name: &'static str) -> Option<Medians> {
        self.outcomes.get(&(key, name)).map(|outcomes| Medians::of(outcomes))
    }

    pub fn json(&self) -> Value {
        let mut figures = self.figures();
        figures.insert("generator_ceiling".into(), self.ceilings.clone().into());
        figures.insert("qsd_memory_probes".into(), self.probes.clone().into());
        envelope("exitless", &self.setup, figures)
    }

    /// Requests per CPU second against the peer's in the same round, over all rounds.
    fn per_cpu_vs_qsd(&self, key: Key, name: &'static str) -> Option<PairedRatio> {
        let own = self.outcomes.get(&(key, name)).filter(|_| name != "qsd")?;
        let peer = self.outcomes.get(&(key, "qsd"))?;
        PairedRatio::of(own.iter().zip(peer).map(|(own, peer)| [per_cpu_second(own), per_cpu_second(peer)]))
    }

    /// What was measured of each contender, by load.
    pub fn figures(&self) -> Map<String, Value> {
        let mut figures = Map::new();
        for (key, name) in self.outcomes.keys() {
            let Some(m) = self.medians(*key, name) else { continue };
            let cell = figures.entry(key.cell()).or_insert_with(|| json!({}));
            let [who, load] = key.prefix(name);
            let op = if key.write { "write_" } else { "" };
            let irq = key.waiting == Waiting::Interrupts;
            let mut put = |part: &str, value: f64| {
                cell[format!("{who}{part}")] = json!(rounded(value));
            };
            if irq {
                put(&format!("{op}interrupts_per_request"), m.interrupts);
            }
            put(&format!("{load}iops"), m.iops);
            put(&format!("{load}iops_spread"), m.iops_spread);
            put(&format!("{load}p50_us"), m.p50_us);
            put(&format!("{load}p99_us"), m.p99_us);
            put(&format!("{load}cpu_us_per_request"), m.cpu_us);
            put(&format!("{load}kernel_threads_us_per_request"), m.kernel_us);
            put(&format!("{load}kicks_per_request"), m.kicks);
            if *name != "qsd"
                && let Some(peer) = self.medians(*key, "qsd")
            {
                put(&format!("{load}per_cpu_vs_qsd"), peer.cpu_us / m.cpu_us);
            }
            if let Some(ratio) = self.per_cpu_vs_qsd(*key, name) {
                cell[format!("{who}{load}per_cpu_vs_qsd_paired")] = ratio.json();
            }
        }
        figures
    }

    /// The same for people.
    pub fn table(&self) -> String {
        let mut out = setup_lines(&self.setup, 24);
        let _ = writeln!(out, "{:>24}  {}", "generator's ceiling", json!(self.ceilings));
        let _ = writeln!(out, "{:>24}  {}", "qsd on memory, by way", json!(self.probes));
        let _ = writeln!(
            out,
            "\n{:34}{:9}{:>10}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>20}",
            "4 KiB random",
            "",
            "IOPS",
            "+-%",
            "p50 us",
            "p99 us",
            "cpu us",
            "kthr us",
            "kicks",
            "irqs",
            "vs qsd",
            "by rounds (95 %)"
        );
        for (key, name) in self.outcomes.keys() {
            let Some(m) = self.medians(*key, name) else { continue };
            let ratio =
                self.medians(*key, "qsd").filter(|_| *name != "qsd").map(|peer| peer.cpu_us / m.cpu_us);
            let load = format!(
                "{} {} depth {} {}",
                if key.on_file { "file" } else { "memory" },
                if key.write { "write" } else { "read" },
                key.depth,
                if key.waiting == Waiting::Polling { "polling" } else { "interrupts" },
            );
            let _ = writeln!(
                out,
                "{load:34}{name:9}{:>10.0}{:>7.0}{:>9.2}{:>9.2}{:>9.3}{:>9.3}{:>9.4}{:>9.4}{:>9}{:>20}",
                m.iops,
                m.iops_spread * 100.0,
                m.p50_us,
                m.p99_us,
                m.cpu_us,
                m.kernel_us,
                m.kicks,
                m.interrupts,
                ratio.map_or(String::new(), |ratio| format!("{ratio:.2}x")),
                self.per_cpu_vs_qsd(*key, name).map_or(String::new(), |ratio| ratio.to_string()),
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use hdrhistogram::Histogram;

    use super::*;

    #[test]
    fn processor_time_is_compared_with_the_peers_in_the_same_round() {
        let key = Key { on_file: false, depth: 32, write: false, waiting: Waiting::Polling };
        let mut report = Report::default();
        for round in 1..=6 {
            let outcome = |cpu_ns| Outcome {
                requests: 1000,
                seconds: 1.0,
                latency: Histogram::new(2).unwrap(),
                kicks: 0,
                interrupts: 0,
                cpu_ns,
                kernel_ns: 0,
                foreign: 0.0,
            };
            // The machine becomes slower; the peer takes four times as long throughout.
            report.outcome("ioplane", key, outcome(1000 * round));
            report.outcome("qsd", key, outcome(4000 * round));
        }
        let figures = report.figures();
        let paired = &figures["depth32"]["per_cpu_vs_qsd_paired"];
        assert_eq!(*paired, json!({ "ratio": 4.0, "interval": [4.0, 4.0], "pairs": 6 }));
        assert!(figures["depth32"].get("qsd_per_cpu_vs_qsd_paired").is_none());
        assert!(report.table().contains("4.00 (4.00-4.00)"));
    }
}
