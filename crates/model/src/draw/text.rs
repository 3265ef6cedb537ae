//! The table as text.

use std::fmt::Write;

use super::{Chart, Row, Target, chart, wrapped};
use crate::{StateModel, words};

/// Widest line, in characters.
const WIDE: usize = 100;

/// Regions, states, events, checks, then the registers, for a terminal.
pub fn text(model: &StateModel) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = states(&mut out, &chart(model));
    let _ = registers(&mut out, model);
    out
}

fn states(out: &mut String, chart: &Chart) -> std::fmt::Result {
    writeln!(out, "{}: {}", chart.name, chart.title)?;
    for region in &chart.regions {
        writeln!(out, "\nregion {}", region.name)?;
        if !region.any.is_empty() {
            writeln!(out, "  in any state")?;
            rows(out, &region.any)?;
        }
        for (at, state) in region.states.iter().enumerate() {
            let begins = if at == 0 { ", begins here" } else { "" };
            let reusable = if state.reusable { "reusable" } else { "busy" };
            writeln!(out, "  {} [{reusable}{begins}]", state.name)?;
            lines(out, 4, state.note)?;
            if !state.hooked.is_empty() {
                lines(out, 4, &format!("hooked here: {}", state.hooked.join(", ")))?;
            }
            rows(out, &state.rows)?;
        }
    }
    Ok(())
}

fn rows(out: &mut String, rows: &[Row]) -> std::fmt::Result {
    for row in rows {
        let given = row.given.as_ref().map(|given| format!(", if {given}")).unwrap_or_default();
        let to = match row.to {
            Target::State(name) => format!(" -> {name}"),
            Target::Stays => " -> stays".to_owned(),
            Target::Resets => " -> all begin again".to_owned(),
            Target::Denied | Target::Ignored => String::new(),
        };
        lines(out, 4, &format!("{}{given}{to}", row.on))?;
        let refused = [Target::Denied, Target::Ignored].contains(&row.to);
        for check in &row.checks {
            lines(out, 8, &if refused { check.clone() } else { format!("if {check}") })?;
        }
    }
    Ok(())
}

fn lines(out: &mut String, indent: usize, text: &str) -> std::fmt::Result {
    for (at, line) in wrapped(text, WIDE - indent - 2).iter().enumerate() {
        let more = if at == 0 { 0 } else { 2 };
        writeln!(out, "{:1$}{line}", "", indent + more)?;
    }
    Ok(())
}

fn registers(out: &mut String, model: &StateModel) -> std::fmt::Result {
    writeln!(
        out,
        "\n{:<10} {:>6} {:>5} {:>4}  {:<10} {:<10} hooked",
        "register", "offset", "bytes", "bank", "reads", "writes"
    )?;
    for register in model.registers {
        let bank = register.bank.map_or("-".to_owned(), |bank| bank.to_string());
        writeln!(
            out,
            "{:<10} {:>6} {:>5} {bank:>4}  {:<10} {:<10} {}",
            register.name,
            format!("{:02x}h", register.offset),
            register.width,
            words::reads(register.reads),
            words::writes(register.writes),
            words::hook(register.hook),
        )?;
    }
    writeln!(out, "\nbrought back, in this order:")?;
    let steps: Vec<String> = model.restore.iter().map(words::restore).collect();
    lines(out, 2, &steps.join("; "))
}
