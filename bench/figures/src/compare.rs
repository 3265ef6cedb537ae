//! Two builds compared: ratios of pairs of runs, the interval of their median, and the verdict on each figure.
//!
//! The interval is the exact one of the binomial distribution: each ratio is above the true median with probability 1/2, whatever its
//! distribution, so the k-th smallest and the k-th largest of n ratios enclose the median unless fewer than k ratios lie on one side.
//! `benchstat` does the same for single runs. Nothing is assumed about noise but that pairs do not depend on each other.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::{self, Write as _};

use serde_json::{Map, Value, json};

use crate::report::{median, rounded};

/// Which values of a figure are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// More is better: rates.
    Up,
    /// Less is better: times.
    Down,
}

/// Last parts of the keys of figures that are rates, and of those that are times or multiples of times.
const RATES: [&str; 2] = ["iops", "frames_per_s"];
const TIMES: [&str; 6] = ["p50_us", "p99_us", "mean_us", "cpu_us_per_request", "p50_ratio", "p99_ratio"];

/// The direction of a figure by its key; none for spreads, counts of events, and what is derived from other figures.
pub fn direction(key: &str) -> Option<Direction> {
    let ends = |parts: &[&str]| {
        parts.iter().any(|part| {
            key.strip_suffix(part).is_some_and(|head| head.is_empty() || head.ends_with(['.', '_']))
        })
    };
    match () {
        () if ends(&RATES) => Some(Direction::Up),
        () if ends(&TIMES) => Some(Direction::Down),
        () => None,
    }
}

/// The figures of one run that have a direction, by their keys: parts separated by dots.
pub fn directed(figures: &Value) -> BTreeMap<String, f64> {
    fn walk(at: &Value, key: &str, found: &mut BTreeMap<String, f64>) {
        if let Value::Object(parts) = at {
            for (name, part) in parts {
                let key = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
                walk(part, &key, found);
            }
        } else if let Some(figure) = at.as_f64()
            && direction(key).is_some()
        {
            found.insert(key.to_owned(), figure);
        }
    }
    let mut found = BTreeMap::new();
    walk(figures, "", &mut found);
    found
}

/// How sure an interval is at least.
const CONFIDENCE: f64 = 0.95;
/// An interval that holds 1 and also a build this much slower, as a part of the ratio, says nothing.
pub const ROOM: f64 = 0.1;

/// The ends of the interval of the median that holds with 95 % or more; none for fewer than six `ratios`.
pub fn interval(ratios: &[f64]) -> Option<[f64; 2]> {
    let mut sorted = ratios.to_vec();
    sorted.sort_by(f64::total_cmp);
    let left_out = left_out(sorted.len())?;
    Some([sorted[left_out], sorted[sorted.len() - 1 - left_out]])
}

/// How many of `count` ratios lie outside of the interval on each side: the most for which the chance that no more of them lie on
/// one side of the median is at most 2.5 %.
fn left_out(count: usize) -> Option<usize> {
    let (mut chance, mut ways, mut found) = (0.0, 0.5f64.powi(count as i32), None);
    for below in 0..count {
        chance += ways;
        if chance > (1.0 - CONFIDENCE) / 2.0 {
            break;
        }
        found = Some(below);
        ways *= (count - below) as f64 / (below + 1) as f64;
    }
    found
}

/// The median of the ratios of pairs of rounds in one run, and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairedRatio {
    pub ratio: f64,
    /// As [`interval`].
    pub interval: Option<[f64; 2]>,
    pub pairs: usize,
}

impl PairedRatio {
    /// Of first / second; none if no pair has both.
    pub fn of(pairs: impl IntoIterator<Item = [f64; 2]>) -> Option<Self> {
        let swapped: Vec<[f64; 2]> = pairs.into_iter().map(|[one, other]| [other, one]).collect();
        let ratios = ratios(&swapped);
        (!ratios.is_empty()).then(|| PairedRatio {
            ratio: median(ratios.iter().copied()),
            interval: interval(&ratios),
            pairs: ratios.len(),
        })
    }

    pub fn json(&self) -> Value {
        json!({
            "ratio": rounded(self.ratio),
            "interval": self.interval.map(|ends| ends.map(rounded)),
            "pairs": self.pairs,
        })
    }
}

impl fmt::Display for PairedRatio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends = self.interval.map_or("too few".into(), |[low, high]| format!("{low:.2}-{high:.2}"));
        f.pad(&format!("{:.2} ({ends})", self.ratio))
    }
}

/// What the pairs say of one figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The interval holds 1, and does not hold a build slower by [`ROOM`].
    NoSlower,
    /// All of the interval is on the slow side, in both series of pairs.
    Slower,
    /// All of the interval is on the fast side.
    Faster,
    /// Too few pairs, too much noise, or slower in one series of two.
    Unclear,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::NoSlower => "no slower beyond the interval",
            Verdict::Slower => "SLOWER",
            Verdict::Faster => "faster",
            Verdict::Unclear => "unclear",
        })
    }
}

/// The verdict of one series of ratios, after through before.
pub fn judge(direction: Direction, ratios: &[f64]) -> Verdict {
    let Some([least, most]) = interval(ratios) else { return Verdict::Unclear };
    // As speed: above 1 the build is faster.
    let (least, most) = match direction {
        Direction::Up => (least, most),
        Direction::Down => (1.0 / most, 1.0 / least),
    };
    match () {
        () if most < 1.0 => Verdict::Slower,
        () if least > 1.0 => Verdict::Faster,
        () if least > 1.0 - ROOM => Verdict::NoSlower,
        () => Verdict::Unclear,
    }
}

/// The pairs of one figure.
#[derive(Debug, Clone)]
struct Series {
    direction: Direction,
    /// Before and after, of each pair.
    first: Vec<[f64; 2]>,
    /// Pairs made because the first ones said "slower".
    second: Vec<[f64; 2]>,
}

fn ratios(pairs: &[[f64; 2]]) -> Vec<f64> {
    let ratios = pairs.iter().map(|[before, after]| after / before);
    // A zero on either side (nothing was counted) is no measurement.
    ratios.filter(|ratio| ratio.is_finite() && *ratio > 0.0).collect()
}

impl Series {
    fn all(&self) -> Vec<[f64; 2]> {
        self.first.iter().chain(&self.second).copied().collect()
    }

    fn verdict(&self) -> Verdict {
        let all = judge(self.direction, &ratios(&self.all()));
        let slower = |pairs| judge(self.direction, &ratios(pairs)) == Verdict::Slower;
        // Among many figures some seem slower by chance, but hardly the same ones twice.
        match all {
            _ if slower(&self.first) && (self.second.is_empty() || slower(&self.second)) => Verdict::Slower,
            Verdict::Slower => Verdict::Unclear,
            all => all,
        }
    }
}

/// All pairs of two builds.
#[derive(Debug, Clone, Default)]
pub struct Comparison {
    figures: BTreeMap<String, Series>,
    /// Figures that one of the sides does not have.
    lonely: BTreeSet<String>,
}

impl Comparison {
    /// Adds a pair: the `figures` of each side's run. `again`: it belongs to the second series.
    pub fn add(&mut self, before: &Value, after: &Value, again: bool) {
        let (before, mut after) = (directed(before), directed(after));
        for (key, before) in before {
            let (Some(direction), Some(after)) = (direction(&key), after.remove(&key)) else {
                self.lonely.insert(key);
                continue;
            };
            let empty = || Series { direction, first: Vec::new(), second: Vec::new() };
            let series = self.figures.entry(key).or_insert_with(empty);
            let pairs = if again { &mut series.second } else { &mut series.first };
            pairs.push([before, after]);
        }
        self.lonely.extend(after.into_keys());
    }

    /// The figures that are slower so far: to be measured again.
    pub fn slower(&self) -> BTreeSet<String> {
        let slower = self.figures.iter().filter(|(_, series)| series.verdict() == Verdict::Slower);
        slower.map(|(key, _)| key.clone()).collect()
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.figures.values().filter(|series| series.verdict() == verdict).count()
    }

    /// How many figures there are of each verdict, and the method, in words.
    pub fn summary(&self) -> String {
        let mut out = format!(
            "{} figures: {} slower, {} faster, {} no slower beyond the interval, {} unclear\n",
            self.figures.len(),
            self.count(Verdict::Slower),
            self.count(Verdict::Faster),
            self.count(Verdict::NoSlower),
            self.count(Verdict::Unclear),
        );
        for key in &self.lonely {
            let _ = writeln!(out, "not compared: only one of the builds has {key}");
        }
        out
    }

    pub fn table(&self) -> String {
        let width = self.figures.keys().map(String::len).max().unwrap_or(0).max(6);
        let mut out = format!(
            "{:width$}{:>12}{:>12}{:>8}  {:16}  verdict\n",
            "figure", "before", "after", "ratio", "95 % interval"
        );
        for (key, series) in &self.figures {
            let (all, [before, after]) = (ratios(&series.all()), series.medians());
            let [before, after] = [before, after].map(|figure| rounded(figure).to_string());
            let ends = interval(&all).map_or("none".into(), |[low, high]| format!("{low:.3} to {high:.3}"));
            let _ = writeln!(
                out,
                "{key:width$}{before:>12}{after:>12}{:>8.3}  {ends:16}  {}",
                median(all),
                series.verdict()
            );
        }
        out
    }

    /// The `figures` of `--json`, nested as those of the benchmark are.
    pub fn json(&self) -> Map<String, Value> {
        let mut figures = json!({});
        for (key, series) in &self.figures {
            let (all, [before, after]) = (ratios(&series.all()), series.medians());
            let mut at = &mut figures;
            for part in key.split('.') {
                at = &mut at[part];
            }
            *at = json!({
                "before": rounded(before),
                "after": rounded(after),
                "ratio": rounded(median(all.iter().copied())),
                "interval": interval(&all).map(|ends| ends.map(rounded)),
                "pairs": all.len(),
                "verdict": series.verdict().to_string().to_lowercase(),
            });
        }
        match figures {
            Value::Object(figures) => figures,
            _ => Map::new(),
        }
    }
}

impl Series {
    fn medians(&self) -> [f64; 2] {
        [0, 1].map(|side| median(self.all().into_iter().map(|pair| pair[side])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ratios around `middle`, half a percent apart.
    fn spread(middle: f64, count: usize) -> Vec<f64> {
        (0..count).map(|at| middle * (1.0 + (at as f64 - (count - 1) as f64 / 2.0) * 0.005)).collect()
    }

    #[test]
    fn the_interval_leaves_out_what_the_tables_say() {
        // Of n values, the ranks of the 95 % interval of the median, as printed in books (Altman et al., 2000).
        for (count, rank) in [(6, 1), (8, 1), (9, 2), (10, 2), (11, 2), (12, 3), (15, 4), (20, 6), (40, 14)] {
            assert_eq!(left_out(count), Some(rank - 1), "{count} values");
        }
        for count in 0..6 {
            assert_eq!(left_out(count), None, "{count} values have no such interval");
        }
    }

    #[test]
    fn the_interval_holds_as_often_as_it_says() {
        // A skewed distribution whose median is 1, from a generator that is good enough for this.
        let mut state = 88_172_645_463_325_252u64;
        let mut draw = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let even = (state >> 11) as f64 / (1u64 << 53) as f64;
            if even < 0.5 { 0.9 + 0.2 * even } else { 1.0 + 8.0 * (even - 0.5).powi(2) }
        };
        for (count, holds) in [(10, 0.979), (20, 0.959)] {
            let held = (0..20_000)
                .filter(|_| {
                    let ratios: Vec<f64> = (0..count).map(|_| draw()).collect();
                    interval(&ratios).is_some_and(|[low, high]| low <= 1.0 && 1.0 <= high)
                })
                .count() as f64
                / 20_000.0;
            assert!((held - holds).abs() < 0.006, "{count} pairs: {held} in place of {holds}");
        }
    }

    #[test]
    fn the_ratio_of_pairs_is_first_through_second_and_says_how_sure_it_is() {
        let pairs = (1..=6).map(|one| [f64::from(one), 2.0]);
        let ratio = PairedRatio::of(pairs.clone()).unwrap();
        assert_eq!(ratio, PairedRatio { ratio: 1.75, interval: Some([0.5, 3.0]), pairs: 6 });
        assert_eq!(ratio.json(), json!({ "ratio": 1.75, "interval": [0.5, 3.0], "pairs": 6 }));
        assert_eq!(format!("{ratio:>18}|"), "  1.75 (0.50-3.00)|");
        let few = PairedRatio::of(pairs.take(5)).unwrap();
        assert_eq!((few.interval, few.to_string().as_str()), (None, "1.50 (too few)"));
        assert_eq!(PairedRatio::of([[1.0, 0.0], [0.0, 1.0]]), None, "nothing was counted");
    }

    #[test]
    fn one_wild_pair_decides_nothing() {
        let mut ratios = spread(1.0, 10);
        ratios[3] = 40.0;
        assert_eq!(judge(Direction::Up, &ratios), Verdict::NoSlower);
        assert_eq!(judge(Direction::Down, &ratios), Verdict::NoSlower);
    }

    #[test]
    fn each_verdict_can_be() {
        for (direction, slow, fast) in [(Direction::Up, 0.95, 1.05), (Direction::Down, 1.05, 0.95)] {
            assert_eq!(judge(direction, &spread(1.0, 10)), Verdict::NoSlower);
            assert_eq!(judge(direction, &spread(slow, 10)), Verdict::Slower);
            assert_eq!(judge(direction, &spread(fast, 10)), Verdict::Faster);
            let wild: Vec<f64> = (0..10).map(|at| 0.7 + 0.06 * f64::from(at)).collect();
            assert_eq!(judge(direction, &wild), Verdict::Unclear);
            assert_eq!(judge(direction, &spread(slow, 5)), Verdict::Unclear, "too few");
        }
    }

    /// Pairs of a run with one figure.
    fn pairs(comparison: &mut Comparison, ratio: f64, again: bool) {
        for ratio in spread(ratio, 10) {
            let run = |iops: f64| json!({ "depth1": { "iops": iops, "iops_spread": 0.1 } });
            comparison.add(&run(1000.0), &run(1000.0 * ratio), again);
        }
    }

    #[test]
    fn slower_is_what_was_slower_twice() {
        let mut twice = Comparison::default();
        pairs(&mut twice, 0.95, false);
        assert_eq!(twice.slower().into_iter().collect::<Vec<_>>(), ["depth1.iops"]);
        let mut once = twice.clone();
        pairs(&mut twice, 0.95, true);
        assert_eq!(twice.slower().len(), 1);
        assert_eq!(twice.json()["depth1"]["iops"]["verdict"], "slower");
        pairs(&mut once, 1.0, true);
        assert!(once.slower().is_empty());
    }

    #[test]
    fn figures_keep_their_keys() {
        let mut comparison = Comparison::default();
        pairs(&mut comparison, 1.0, false);
        let figure = &comparison.json()["depth1"]["iops"];
        assert_eq!(figure["ratio"], 1.0);
        assert_eq!(figure["pairs"], 10);
        assert_eq!(figure["verdict"], "no slower beyond the interval");
        assert!(comparison.table().contains("depth1.iops"));
        assert!(comparison.summary().starts_with("1 figures: 0 slower"));
    }

    #[test]
    fn a_figure_of_one_side_is_named() {
        let mut comparison = Comparison::default();
        comparison.add(&json!({ "p99_us": 1.0 }), &json!({ "p50_us": 1.0 }), false);
        assert!(comparison.summary().contains("p99_us") && comparison.summary().contains("p50_us"));
        assert!(comparison.json().is_empty());
    }

    #[test]
    fn nothing_counted_is_no_pair() {
        let mut comparison = Comparison::default();
        for _ in 0..10 {
            comparison.add(&json!({ "p99_us": 0.0 }), &json!({ "p99_us": 1.0 }), false);
        }
        assert_eq!(comparison.json()["p99_us"]["verdict"], "unclear");
        assert_eq!(comparison.json()["p99_us"]["pairs"], 0);
    }

    #[test]
    fn rates_and_times_have_a_direction() {
        for key in ["depth1.iops", "file_depth32.irq_write_iops", "split64.frames_per_s"] {
            assert_eq!(direction(key), Some(Direction::Up), "{key}");
        }
        for key in ["p99_ratio", "quiet_p99_us", "depth1.notified_cpu_us_per_request", "split64k.p50_us"] {
            assert_eq!(direction(key), Some(Direction::Down), "{key}");
        }
        for key in ["depth1.iops_spread", "depth1.kicks_per_request", "split64.gbit_per_s", "flops.miops"] {
            assert_eq!(direction(key), None, "{key}");
        }
    }
}
