//! The diagram for Graphviz.

use std::fmt::Write;

use super::{Chart, Row, Target, chart, wrapped};
use crate::StateModel;

/// A digraph: a cluster a region, a node a state (reusable ones doubled and green), an edge a transition.
pub fn dot(model: &StateModel) -> String {
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = draw(&mut out, &chart(model));
    out
}

fn draw(out: &mut String, chart: &Chart) -> std::fmt::Result {
    writeln!(out, "digraph {} {{", quoted(chart.name))?;
    writeln!(out, "  label={}; labelloc=t; fontname=\"sans-serif\"; rankdir=TB;", quoted(chart.title))?;
    writeln!(out, "  node [shape=box, style=rounded, fontname=\"sans-serif\"];")?;
    writeln!(out, "  edge [fontname=\"sans-serif\", fontsize=10];")?;
    for region in &chart.regions {
        let id = |name: &str| quoted(&format!("{}.{name}", region.name));
        writeln!(out, "  subgraph {} {{", quoted(&format!("cluster_{}", region.name)))?;
        writeln!(out, "    label={};", quoted(region.name))?;
        if !region.any.is_empty() {
            writeln!(out, "    {} [label=\"any state\", style=\"rounded,dashed\"];", id("*"))?;
        }
        for state in &region.states {
            let look = if state.reusable { ", peripheries=2, color=\"#2e7d32\"" } else { "" };
            writeln!(out, "    {} [label={}{look}];", id(state.name), quoted(state.name))?;
        }
        let first = region.states.first().map_or("*", |state| state.name);
        let any = region.any.iter().map(|row| ("*", row));
        let rows = region.states.iter().flat_map(|state| state.rows.iter().map(|row| (state.name, row)));
        for (from, row) in any.chain(rows) {
            let (to, look) = match row.to {
                Target::State(name) => (name, ""),
                Target::Stays => (from, ""),
                Target::Resets => (first, ", style=dashed"),
                Target::Denied => (from, ", color=\"#b71c1c\", fontcolor=\"#b71c1c\""),
                Target::Ignored => (from, ", color=\"#757575\", fontcolor=\"#757575\""),
            };
            writeln!(out, "    {} -> {} [label={}{look}];", id(from), id(to), quoted(&label(row)))?;
        }
        writeln!(out, "  }}")?;
    }
    writeln!(out, "}}")
}

fn label(row: &Row) -> String {
    let mut lines = wrapped(&row.on, 30);
    lines.extend(row.given.iter().flat_map(|given| wrapped(&format!("if {given}"), 30)));
    lines.extend(row.checks.iter().flat_map(|check| wrapped(check, 30)));
    lines.join("\n")
}

/// A name or label as DOT writes it.
fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("\"{text}\"")
}
