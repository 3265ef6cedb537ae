//! Medians, and how they are told: one JSON object, or a table.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde_json::{Map, Value, json};

use super::frame::Size;
use super::load::Outcome;
use super::nic::{RING, Shape};
use ioplane_figures::compare::PairedRatio;
use ioplane_figures::machine::Cpus;
use ioplane_figures::report::{envelope, median, rounded, setup_lines};

/// The key of a load's figures: `split64`, `packed1500`, and `split64k_8pairs` for example.
pub fn key(shape: Shape) -> String {
    let rings = if shape.packed { "packed" } else { "split" };
    let pairs = if shape.pairs > 1 { format!("_{}pairs", shape.pairs) } else { String::new() };
    format!("{rings}{}{pairs}", shape.size.name())
}

/// What was measured of one contender at one load.
#[derive(Debug, Default)]
struct Cell {
    floods: Vec<Outcome>,
    asleep: Vec<Outcome>,
    p50_us: Vec<f64>,
    p99_us: Vec<f64>,
    loss_free: Vec<f64>,
}

impl Cell {
    /// The rounds that others disturbed least: half of them. Both sides poll, so a round in which either was not on its
    /// processor all the time is one in which somebody else was.
    fn quiet(&self) -> Vec<&Outcome> {
        let mut rounds: Vec<_> = self.floods.iter().collect();
        rounds.sort_by(|a, b| a.account.disturbance().total_cmp(&b.account.disturbance()));
        rounds.truncate(rounds.len().div_ceil(2));
        rounds
    }

    fn of_quiet(&self, value: impl Fn(&Outcome) -> f64) -> f64 {
        median(self.quiet().into_iter().map(value))
    }

    fn frames_per_s(&self) -> f64 {
        self.of_quiet(frames_per_s)
    }

    /// Frames per second against the peer's in the round beside it: of the half of the pairs of rounds that others disturbed least.
    fn against(&self, peer: &Cell) -> Option<PairedRatio> {
        let mut pairs: Vec<[&Outcome; 2]> =
            self.floods.iter().zip(&peer.floods).map(|(own, peer)| [own, peer]).collect();
        let disturbance =
            |pair: &[&Outcome; 2]| pair.map(|o| o.account.disturbance()).into_iter().fold(0.0, f64::max);
        pairs.sort_by(|a, b| disturbance(a).total_cmp(&disturbance(b)));
        pairs.truncate(pairs.len().div_ceil(2));
        PairedRatio::of(pairs.into_iter().map(|pair| pair.map(frames_per_s)))
    }
}

fn frames_per_s(outcome: &Outcome) -> f64 {
    outcome.frames as f64 / outcome.account.seconds
}

/// Everything measured in one run.
#[derive(Default)]
pub struct Report {
    cells: BTreeMap<(Shape, &'static str), Cell>,
    ceilings: Map<String, Value>,
    setup: Map<String, Value>,
}

impl Report {
    pub fn new(cpus: Cpus, room: String) -> Self {
        let mut setup = Map::new();
        setup.insert("generator_cpu".into(), json!(cpus.front));
        setup.insert("back_end_cpu".into(), json!(cpus.back));
        setup.insert("bound_by".into(), json!(room));
        setup.insert("ring".into(), json!(RING));
        setup.insert(
            "ioplane_process".into(),
            json!("bench lan: switch and vhost-user host alone, not the daemon"),
        );
        setup.insert("frame_bytes".into(), json!(Size::ALL.map(Size::bytes)));
        Report { setup, ..Report::default() }
    }

    /// What the generator does through a backend that only moves ring entries.
    pub fn ceiling(&mut self, name: &str, outcome: &Outcome) {
        let rate = outcome.frames as f64 / outcome.account.seconds;
        let cell = json!({ "frames_per_s": rate.round(), "ns_per_frame": rounded(1e9 / rate) });
        eprintln!("generator, {name}: {cell}");
        self.ceilings.insert(name.into(), cell);
    }

    /// How a contender works, in words.
    pub fn setup(&mut self, name: &str, how: &str) {
        self.setup.insert(name.into(), json!(how));
    }

    fn cell(&mut self, shape: Shape, name: &'static str) -> &mut Cell {
        self.cells.entry((shape, name)).or_default()
    }

    /// One round at full rate.
    pub fn flood(&mut self, shape: Shape, name: &'static str, outcome: Outcome) {
        self.cell(shape, name).floods.push(outcome);
    }

    /// One round of a driver that sleeps for interrupts.
    pub fn asleep(&mut self, shape: Shape, name: &'static str, outcome: Outcome) {
        self.cell(shape, name).asleep.push(outcome);
    }

    pub fn ping(&mut self, shape: Shape, name: &'static str, trips: &Histogram<u64>) {
        let cell = self.cell(shape, name);
        cell.p50_us.push(trips.value_at_quantile(0.5) as f64 / 1e3);
        cell.p99_us.push(trips.value_at_quantile(0.99) as f64 / 1e3);
    }

    /// A loss-free rate, frames a second.
    pub fn loss_free(&mut self, shape: Shape, name: &'static str, rate: f64) {
        self.cell(shape, name).loss_free.push(rate);
    }

    /// The rate of the rounds so far, frames a second.
    pub fn rate(&self, shape: Shape, name: &'static str) -> f64 {
        self.cells.get(&(shape, name)).map_or(0.0, Cell::frames_per_s)
    }

    pub fn took(&mut self, time: Duration) {
        self.setup.insert("seconds".into(), json!(time.as_secs()));
    }

    /// A contender and the peer at one load.
    fn both(&self, shape: Shape, name: &str) -> Option<[&Cell; 2]> {
        let peer = self.cells.get(&(shape, "testpmd")).filter(|_| name != "testpmd")?;
        let own = self.cells.iter().find(|((s, n), _)| *s == shape && *n == name)?.1;
        Some([own, peer])
    }

    fn versus(&self, shape: Shape, name: &str) -> Option<f64> {
        self.both(shape, name).map(|[own, peer]| own.frames_per_s() / peer.frames_per_s())
    }

    fn paired_versus(&self, shape: Shape, name: &str) -> Option<PairedRatio> {
        self.both(shape, name).and_then(|[own, peer]| own.against(peer))
    }

    pub fn json(&self) -> Value {
        let mut figures = self.figures();
        figures.insert("generator_ceiling".into(), self.ceilings.clone().into());
        envelope("network", &self.setup, figures)
    }

    /// What was measured of each contender, by load.
    pub fn figures(&self) -> Map<String, Value> {
        let mut figures = Map::new();
        for ((shape, name), cell) in &self.cells {
            let entry = figures.entry(key(*shape)).or_insert_with(|| json!({}));
            let who = if *name == "ioplane" { String::new() } else { format!("{name}_") };
            for (part, value) in parts(*shape, cell) {
                entry[format!("{who}{part}")] = json!(rounded(value));
            }
            if let Some(ratio) = self.versus(*shape, name) {
                entry[format!("{who}frames_vs_testpmd")] = json!(rounded(ratio));
            }
            if let Some(ratio) = self.paired_versus(*shape, name) {
                entry[format!("{who}frames_vs_testpmd_paired")] = ratio.json();
            }
        }
        figures
    }

    /// The same for people.
    pub fn table(&self) -> String {
        let mut out = setup_lines(&self.setup, 24);
        let _ = writeln!(out, "{:>24}  {}\n", "generator's ceiling", json!(self.ceilings));
        let titles = [
            "frames/s",
            "Gbit/s",
            "disturb",
            "p50 us",
            "p99 us",
            "loss-free/s",
            "kicks",
            "irqs",
            "vs testpmd",
        ];
        let _ = write!(out, "{:18}{:9}", "", "");
        for title in titles {
            let _ = write!(out, "{title:>12}");
        }
        let _ = writeln!(out, "{:>20}", "by rounds (95 %)");
        for ((shape, name), cell) in &self.cells {
            let _ = write!(out, "{:18}{name:9}", key(*shape));
            for (part, value) in parts(*shape, cell) {
                let digits = if value >= 1000.0 { 0 } else { 3 };
                if ["frames_per_s_spread", "lost"].contains(&part) {
                    continue;
                }
                let _ = write!(out, "{value:>12.digits$}");
            }
            let ratio = self.versus(*shape, name).map_or(String::new(), |ratio| format!("{ratio:.2}x"));
            let paired = self.paired_versus(*shape, name).map_or(String::new(), |ratio| ratio.to_string());
            let _ = writeln!(out, "{ratio:>12}{paired:>20}");
        }
        out
    }
}

/// The figures of a cell by name, in the table's order.
fn parts(shape: Shape, cell: &Cell) -> [(&'static str, f64); 10] {
    let per_frame =
        |count: fn(&Outcome) -> u64| move |o: &Outcome| count(o) as f64 / (o.frames as f64).max(1.0);
    let rate = cell.frames_per_s();
    let rates = || cell.quiet().into_iter().map(frames_per_s);
    let (most, least) = (rates().fold(0.0, f64::max), rates().fold(f64::INFINITY, f64::min));
    [
        ("frames_per_s", rate),
        ("gbit_per_s", rate * f64::from(shape.size.bytes()) * 8.0 / 1e9),
        ("frames_per_s_spread", (most - least) / rate.max(1.0)),
        ("disturbed", cell.of_quiet(|o| o.account.disturbance())),
        ("p50_us", median(cell.p50_us.iter().copied())),
        ("p99_us", median(cell.p99_us.iter().copied())),
        ("loss_free_per_s", median(cell.loss_free.iter().copied())),
        ("kicks_per_frame", cell.of_quiet(per_frame(|o| o.kicks))),
        ("interrupts_per_frame", median(cell.asleep.iter().map(per_frame(|o| o.interrupts)))),
        ("lost", cell.of_quiet(|o| o.lost as f64 / (o.sent as f64).max(1.0))),
    ]
}

#[cfg(test)]
mod tests {
    use ioplane_figures::machine::Account;

    use super::*;

    /// A round with so many frames in its second, of which the backend had `cpu` of its processor.
    fn round(frames: u64, cpu: f64) -> Outcome {
        let account = Account {
            seconds: 1.0,
            cpu_ns: (cpu * 1e9) as u64,
            own_ns: 1_000_000_000,
            kernel_ns: 0,
            foreign: 0.0,
        };
        Outcome { frames, lost: 0, sent: frames, owed: 0, kicks: 0, interrupts: 0, account }
    }

    #[test]
    fn rounds_beside_each_other_are_compared_and_pairs_that_were_disturbed_are_left_out() {
        let shape = Shape { packed: false, size: Size::Small, pairs: 1 };
        let mut report = Report::default();
        for number in 0..12 {
            // The machine becomes faster; six rounds of one side or the other are disturbed.
            let (rate, disturbed) = (100 * (number + 1), number % 2 == 0);
            let (own, peer) = if number % 4 == 0 { (0.5, 1.0) } else { (1.0, 0.5) };
            let part = |of: f64| if disturbed { of } else { 1.0 };
            report.flood(shape, "ioplane", round((rate as f64 * 1.2 * part(own)) as u64, part(own)));
            report.flood(shape, "testpmd", round((rate as f64 * part(peer)) as u64, part(peer)));
        }
        let figures = report.figures();
        let paired = &figures["split64"]["frames_vs_testpmd_paired"];
        assert_eq!(*paired, json!({ "ratio": 1.2, "interval": [1.2, 1.2], "pairs": 6 }));
        assert!(figures["split64"].get("testpmd_frames_vs_testpmd_paired").is_none());
    }
}
