//! A comparison as tables for a terminal.

use std::fmt;

use super::{ExitChange, ExitDiff, ExitDiffSide};

/// So many lines a table has.
const LINES: usize = 20;

impl fmt::Display for ExitDiff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        side(f, "before", &self.before)?;
        side(f, "after ", &self.after)?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        head(f, "reason")?;
        numbers(f, &self.all)?;
        writeln!(f, "(all)")?;
        for row in self.reasons.iter().take(LINES) {
            numbers(f, &row.change)?;
            writeln!(f, "{}", row.reason)?;
        }
        rest(f, self.reasons.len())?;
        head(f, "where, why, about what")?;
        for row in self.sites.iter().take(LINES) {
            numbers(f, &row.change)?;
            let register = if row.register.is_empty() { "" } else { "  " };
            writeln!(f, "{}  {}{register}{}", row.function, row.reason, row.register)?;
        }
        rest(f, self.sites.len())?;
        if !self.checks.is_empty() {
            writeln!(f)?;
        }
        for check in &self.checks {
            let word = if check.failed { "FAILED" } else { "passed" };
            let before = check.before.map_or("-".into(), |before| format!("{before:.1}"));
            write!(f, "{word}  {}  before {before}, after {:.1}", check.limit, check.after)?;
            write!(f, ", limit {:.1}", check.threshold)?;
            writeln!(f, "{}", if check.absent { "; neither recording has exits of that name" } else { "" })?;
        }
        Ok(())
    }
}

fn side(f: &mut fmt::Formatter<'_>, word: &str, side: &ExitDiffSide) -> fmt::Result {
    let ExitDiffSide { vm, machine, processor, kernel, seconds, exits, .. } = side;
    writeln!(f, "{word}  {vm} on {machine} ({processor}, Linux {kernel}), {seconds:.1} s, {exits} exits")
}

fn head(f: &mut fmt::Formatter<'_>, title: &str) -> fmt::Result {
    writeln!(
        f,
        "\n{:>10} {:>10} {:>10} {:>7} {:>9} {:>9}\n{:>10} {:>10} {:>10} {:>7} {:>9} {:>9}  {title}",
        "exits/s",
        "exits/s",
        "",
        "",
        "us each",
        "us each",
        "before",
        "after",
        "change",
        "ratio",
        "before",
        "after"
    )
}

fn numbers(f: &mut fmt::Formatter<'_>, change: &ExitChange) -> fmt::Result {
    let us = |us: Option<f64>| us.map_or("-".into(), |us| format!("{us:.1}"));
    let ratio = match change.ratio {
        None if change.after > 0.0 => "new".into(),
        None => "-".into(),
        Some(0.0) => "gone".into(),
        Some(ratio) if ratio >= 1000.0 => ">=1000".into(),
        Some(ratio) => format!("{ratio:.2}"),
    };
    write!(
        f,
        "{:>10.1} {:>10.1} {:>+10.1} {ratio:>7} {:>9} {:>9}  ",
        change.before,
        change.after,
        change.change,
        us(change.us_before),
        us(change.us_after)
    )
}

fn rest(f: &mut fmt::Formatter<'_>, rows: usize) -> fmt::Result {
    if rows > LINES { writeln!(f, "{:>10} {} more", "...", rows - LINES) } else { Ok(()) }
}
