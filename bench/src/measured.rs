//! The figures, with what is known of each: an interval, a count of pairs, or why it was not measured.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ioplane_figures::compare::interval;
use ioplane_figures::goals::GOALS;
use ioplane_figures::report::{envelope, median, rounded, setup_lines};
use serde_json::{Map, Value, json};

/// One figure.
#[derive(Debug, Clone, Default)]
pub struct Figure {
    value: Option<f64>,
    /// In place of a value.
    rows: Option<Vec<Value>>,
    interval: Option<[f64; 2]>,
    pairs: Option<usize>,
    why_not: Option<String>,
    beside: Map<String, Value>,
}

impl Figure {
    /// Measured once.
    pub fn of(value: f64) -> Self {
        Figure { value: Some(value), ..Figure::default() }
    }

    /// The median of `values`, one for each pair of runs or repetition, and its interval.
    pub fn median(values: &[f64]) -> Self {
        if values.is_empty() {
            return Self::missing("nothing was counted");
        }
        Figure {
            value: Some(median(values.iter().copied())),
            interval: interval(values),
            pairs: Some(values.len()),
            ..Figure::default()
        }
    }

    /// The median of first / second over pairs.
    pub fn ratio(pairs: &[[f64; 2]]) -> Self {
        let ratios = pairs.iter().map(|[one, other]| one / other);
        // Where nothing was counted there is no ratio.
        Self::median(&ratios.filter(|ratio| ratio.is_finite()).collect::<Vec<_>>())
    }

    /// Not one number: a row for each case.
    pub fn table(rows: Vec<Value>) -> Self {
        Figure { rows: Some(rows), ..Figure::default() }
    }

    pub fn missing(why: impl Into<String>) -> Self {
        Figure { why_not: Some(why.into()), ..Figure::default() }
    }

    /// With a value, and the ends of its interval, changed by a monotonic function.
    pub fn map(mut self, change: impl Fn(f64) -> f64) -> Self {
        self.value = self.value.map(&change);
        self.interval = self.interval.map(|ends| {
            let [one, other] = ends.map(&change);
            [one.min(other), one.max(other)]
        });
        self
    }

    /// With something else that was seen.
    pub fn beside(mut self, name: &str, value: impl Into<Value>) -> Self {
        let value = value.into();
        let value = value.as_f64().filter(|_| value.is_f64()).map_or(value, |value| json!(rounded(value)));
        self.beside.insert(name.into(), value);
        self
    }

    pub fn value(&self) -> Option<f64> {
        self.value
    }

    /// The value or the table, if there is one.
    fn shown(&self) -> Option<String> {
        let rows = self.rows.as_ref().map(|rows| format!("{} rows", rows.len()));
        self.value.map(|value| rounded(value).to_string()).or(rows)
    }

    /// Value, interval and pairs of one of several from which a figure is chosen.
    pub fn brief(&self) -> Value {
        json!({
            "ratio": self.value.map(rounded),
            "interval": self.interval.map(|ends| ends.map(rounded)),
            "pairs": self.pairs,
        })
    }

    pub fn details(&self) -> Value {
        let mut details = self.beside.clone();
        if let Some(ends) = self.interval {
            details.insert("interval".into(), json!(ends.map(rounded)));
        }
        if let Some(pairs) = self.pairs {
            details.insert("pairs".into(), pairs.into());
        }
        if let Some(why) = &self.why_not {
            details.insert("not_measured".into(), why.as_str().into());
        }
        details.into()
    }
}

/// Everything measured in one run.
pub struct Report {
    bench: &'static str,
    /// Of `figures`, whether or not they are measured.
    keys: &'static [&'static str],
    pub setup: Map<String, Value>,
    figures: BTreeMap<&'static str, Figure>,
}

impl Report {
    /// Of benchmark `bench`, whose figures have these `keys`.
    pub fn new(bench: &'static str, keys: &'static [&'static str]) -> Self {
        Report { bench, keys, setup: Map::new(), figures: BTreeMap::new() }
    }

    pub fn add(&mut self, figures: impl IntoIterator<Item = (&'static str, Figure)>) {
        for (name, figure) in figures {
            eprintln!("{name}: {}", figure.shown().unwrap_or_else(|| "not measured".into()));
            self.figures.insert(name, figure);
        }
    }

    fn figure(&self, name: &str) -> Figure {
        self.figures.get(name).cloned().unwrap_or_else(|| Figure::missing("not asked for (--only)"))
    }

    pub fn json(&self) -> Value {
        let (mut figures, mut details) = (Map::new(), Map::new());
        for &name in self.keys {
            let figure = self.figure(name);
            let rows = figure.rows.clone().map(Value::from);
            figures.insert(name.into(), rows.unwrap_or_else(|| json!(figure.value.map(rounded))));
            details.insert(name.into(), figure.details());
        }
        figures.insert("details".into(), details.into());
        envelope(self.bench, &self.setup, figures)
    }

    pub fn table(&self) -> String {
        let mut out = setup_lines(&self.setup, 28);
        let _ = writeln!(
            out,
            "\n{:28}{:>12}  {:22}{:>6}  {:24}  seen beside it, or why not",
            "figure", "value", "95 % interval", "pairs", "goal"
        );
        for &name in self.keys {
            let figure = self.figure(name);
            let goal = GOALS.iter().find(|goal| goal.bench == self.bench && goal.figure == name);
            let goal = goal.map_or(String::new(), |goal| {
                let missed = figure.value.is_some_and(|value| !goal.goal.holds(value));
                format!("{}{}", goal.goal, if missed { ": missed" } else { "" })
            });
            let ends = figure.interval.map(|ends| ends.map(|end| rounded(end).to_string()));
            let mut beside: Vec<_> =
                figure.beside.iter().map(|(name, value)| format!("{name} {value}")).collect();
            beside.extend(figure.why_not.clone());
            beside.extend(figure.rows.iter().flatten().map(Value::to_string));
            let _ = writeln!(
                out,
                "{name:28}{:>12}  {:22}{:>6}  {goal:24}  {}",
                figure.shown().unwrap_or_else(|| "null".into()),
                ends.map_or(String::new(), |[low, high]| format!("{low} to {high}")),
                figure.pairs.map_or(String::new(), |pairs| pairs.to_string()),
                beside.join(", ")
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 3] = ["weight_error_percent", "wakeup_ratio", "move_pause_us"];

    #[test]
    fn what_is_not_measured_is_null_with_a_reason() {
        let mut report = Report::new("core", &KEYS);
        report
            .add([("weight_error_percent", Figure::missing("no groups")), ("wakeup_ratio", Figure::of(1.5))]);
        let json = report.json();
        for name in KEYS {
            assert!(json["figures"].as_object().unwrap().contains_key(name), "{name}");
        }
        assert_eq!(json["figures"]["wakeup_ratio"], 1.5);
        assert!(json["figures"]["weight_error_percent"].is_null());
        assert_eq!(json["figures"]["details"]["weight_error_percent"]["not_measured"], "no groups");
        assert!(json["figures"]["details"]["move_pause_us"]["not_measured"].is_string());
        assert!(report.table().contains("no groups"));
    }

    #[test]
    fn a_table_is_an_array_and_has_no_value() {
        let mut report = Report::new("core", &KEYS);
        report.add([("wakeup_ratio", Figure::table(vec![json!({ "readers": 1 })]))]);
        assert_eq!(report.json()["figures"]["wakeup_ratio"], json!([{ "readers": 1 }]));
        assert!(report.json()["figures"]["details"]["wakeup_ratio"].as_object().unwrap().is_empty());
        assert!(report.table().contains("1 rows") && report.table().contains("{\"readers\":1}"));
    }

    #[test]
    fn a_ratio_has_an_interval_from_six_pairs_on() {
        let pairs: Vec<[f64; 2]> = (1..=6).map(|number| [f64::from(number), 2.0]).collect();
        let figure = Figure::ratio(&pairs);
        assert_eq!((figure.value, figure.interval, figure.pairs), (Some(1.75), Some([0.5, 3.0]), Some(6)));
        assert_eq!(Figure::ratio(&pairs[..5]).interval, None);
        assert_eq!(Figure::ratio(&[[1.0, 0.0]]).value, None, "nothing counted");
    }

    #[test]
    fn a_falling_function_swaps_the_ends() {
        let values = [0.9, 0.92, 0.94, 0.96, 0.98, 1.0];
        let loss = Figure::median(&values).map(|ratio| (1.0 - ratio) * 100.0);
        let [low, high] = loss.interval.unwrap();
        assert!((low - 0.0).abs() < 1e-9 && (high - 10.0).abs() < 1e-9);
        assert!((loss.value.unwrap() - 5.0).abs() < 1e-9);
    }
}
