//! The table of goals: what each benchmark must reach, read by `bench judge`, by the nightly tests and by
//! `docs/measurements/goals.md`.
//!
//! A goal comes from an issue or a paper, but for `attributed_percent`: no issue names its bound, 95 is ours. A *floor* is what the nightly tests refuse to fall below: a ratio within one run, with
//! room for the noise of a shared machine. Floors of absolute rates and times leave room for a machine that is several times slower.

mod table;

use std::fmt::{self, Write as _};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// The figure is this or more.
    AtLeast(f64),
    /// The figure is this or less.
    AtMost(f64),
}

impl Bound {
    pub fn holds(self, figure: f64) -> bool {
        match self {
            Bound::AtLeast(bound) => figure >= bound,
            Bound::AtMost(bound) => figure <= bound,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bound::AtLeast(bound) => write!(f, "at least {bound}"),
            Bound::AtMost(bound) => write!(f, "at most {bound}"),
        }
    }
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct Goal {
    /// What is measured, in words, with its unit.
    pub what: &'static str,
    /// The benchmark: `name` of its JSON.
    pub bench: &'static str,
    /// Where in `figures` it stands, parts separated by dots.
    pub figure: &'static str,
    pub goal: Bound,
    /// What a nightly run must not fall below.
    pub floor: Option<Bound>,
}

impl Goal {
    /// The command whose JSON has the figure.
    pub fn generator(&self) -> String {
        match self.bench.strip_suffix("-baseline") {
            Some(bench) => format!("script/bench {bench} --json --baseline BINARY"),
            None => format!("script/bench {} --json", self.bench),
        }
    }
}

pub use table::GOALS;

/// In place of a figure: it was measured, and the noise was too much for a number.
pub const UNRESOLVED: &str = "unresolved";

/// What a run has for a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Measured {
    Figure(f64),
    /// See [`UNRESOLVED`].
    Unresolved,
    /// The run has no such figure.
    Missing,
}

/// The figure of `goal` in the JSON of its benchmark.
fn measured(goal: &Goal, report: &Value) -> Measured {
    let found = goal.figure.split('.').try_fold(&report["figures"], |at, part| at.get(part));
    match found.map(|value| (value.as_f64(), value.as_str())) {
        Some((Some(figure), _)) => Measured::Figure(figure),
        Some((None, Some(UNRESOLVED))) => Measured::Unresolved,
        _ => Measured::Missing,
    }
}

/// What a run says of one goal.
#[derive(Debug, Clone, Copy)]
pub struct Verdict {
    pub goal: &'static Goal,
    pub measured: Measured,
}

impl Verdict {
    pub fn reached(&self) -> bool {
        matches!(self.measured, Measured::Figure(figure) if self.goal.goal.holds(figure))
    }

    /// The floor is kept. A figure that is not there keeps none; one that is unresolved keeps what is no floor.
    pub fn kept(&self) -> bool {
        match self.measured {
            Measured::Figure(figure) => self.goal.floor.is_none_or(|floor| floor.holds(figure)),
            Measured::Unresolved => self.goal.floor.is_none(),
            Measured::Missing => false,
        }
    }
}

impl fmt::Display for Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Measured::Figure(figure) => write!(f, "{figure}"),
            Measured::Unresolved => f.write_str(UNRESOLVED),
            Measured::Missing => f.write_str("no such figure"),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match (self.reached(), self.kept()) {
            (_, true) if self.measured == Measured::Unresolved => "not known",
            (_, false) => "BELOW ITS FLOOR",
            (true, _) => "reached",
            (false, true) => "missed",
        };
        let Goal { bench, figure, goal, .. } = self.goal;
        write!(f, "{word}: {bench}.{figure} = {}, goal {goal}", self.measured)?;
        if let Some(floor) = self.goal.floor {
            write!(f, ", floor {floor}")?;
        }
        Ok(())
    }
}

/// Judges the JSON of a run.
///
/// # Errors
/// When it is not the JSON of a benchmark.
pub fn judge(report: &Value) -> Result<Vec<Verdict>> {
    for key in ["name", "commit", "machine", "figures"] {
        ensure!(!report[key].is_null(), "no '{key}': this is not what `script/bench NAME --json` prints");
    }
    let name = report["name"].as_str().context("'name' is no string")?;
    let mine = GOALS.iter().filter(|goal| goal.bench == name);
    Ok(mine.map(|goal| Verdict { goal, measured: measured(goal, report) }).collect())
}

/// The JSON of the runs that documents show, of each benchmark: `docs/measurements/results/NAME.json`, and `NAME.PART.json` of parts that have a run of
/// their own.
///
/// # Errors
/// When one is there and cannot be read.
pub fn recorded(results: &Path) -> Result<Vec<Value>> {
    let mut names: Vec<&str> = GOALS.iter().map(|goal| goal.bench).collect();
    names.dedup();
    let mut reports = Vec::new();
    let mut files: Vec<_> =
        std::fs::read_dir(results)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    // `NAME.json` is before `NAME.PART.json`.
    files.sort_by_key(|path| path.with_extension(""));
    for name in names {
        let of = |path: &&std::path::PathBuf| {
            let file = path.file_name().and_then(|file| file.to_str()).unwrap_or_default();
            file.ends_with(".json") && file.split('.').next() == Some(name)
        };
        for path in files.iter().filter(of) {
            let text = std::fs::read_to_string(path)?;
            reports.push(serde_json::from_str(&text).with_context(|| path.display().to_string())?);
        }
    }
    Ok(reports)
}

/// What the runs of its benchmark have for a goal: the first that has it.
fn found(goal: &Goal, reports: &[Value]) -> Measured {
    let of = reports.iter().filter(|report| report["name"] == goal.bench);
    of.map(|report| measured(goal, report))
        .find(|found| *found != Measured::Missing)
        .unwrap_or(Measured::Missing)
}

/// The page of goals, as `docs/measurements/goals.md` has it.
pub fn page(reports: &[Value]) -> String {
    let mut page = String::from(
        "# Goals\n\nMade by `script/bench goals --write` from the table in `bench/figures/src/goals/table.rs` and from the runs in \
         `docs/measurements/results`; a test compares. The nightly tests fail for a figure beyond its floor. Most figures are ratios within \
         one run; floors of absolute ones leave room for a machine that is several times slower. These machines are shared: two runs differ by up to a factor of two, ratios by less.\n\n\
         | figure | goal | floor | measured | | key |\n|---|---|---|---|---|---|\n",
    );
    for goal in GOALS {
        let measured = found(goal, reports);
        let verdict = Verdict { goal, measured };
        let floor = goal.floor.map_or(String::new(), |floor| floor.to_string());
        let (measured, word) = match measured {
            Measured::Figure(_) => {
                (measured.to_string(), if verdict.reached() { "reached" } else { "**missed**" })
            }
            Measured::Unresolved => (measured.to_string(), "not known"),
            Measured::Missing => (format!("no run of `{}` recorded", goal.generator()), ""),
        };
        let _ = writeln!(
            page,
            "| {} | {} | {floor} | {measured} | {word} | `{}.{}` |",
            goal.what, goal.goal, goal.bench, goal.figure
        );
    }
    page.push_str(
        "\n## The runs\n\n| benchmark | command | commit | date | machine |\n|---|---|---|---|---|\n",
    );
    for report in reports {
        let text = |key: &str| report[key].as_str().unwrap_or("not recorded").to_string();
        let machine = &report["machine"];
        let _ = writeln!(
            page,
            "| {} | `{}` | {} | {} | {} CPUs, {}, {} kB, Linux {} |",
            text("name"),
            text("command"),
            text("commit"),
            text("date"),
            machine["cpus"],
            machine["cpu"].as_str().unwrap_or_default(),
            machine["memory"].as_str().unwrap_or_default().trim_end_matches(" kB"),
            machine["kernel"].as_str().unwrap_or_default(),
        );
    }
    page
}

#[cfg(test)]
#[path = "goals_tests.rs"]
mod tests;
