//! What every report says in the same way.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::machine;

/// The object that every benchmark prints for `--json`. `name`, `commit`, `machine` and `figures` are always there; what a key of
/// `figures` means does not change later.
pub fn envelope(name: &str, setup: &Map<String, Value>, figures: Map<String, Value>) -> Value {
    json!({
        "name": name,
        "command": machine::command(),
        "commit": machine::commit(),
        "machine": machine::describe(),
        "date": machine::date(),
        "setup": setup,
        "figures": figures,
    })
}

/// The same for figures that a program has as a struct.
///
/// # Errors
/// When `figures` is no JSON object.
pub fn envelope_of(name: &str, figures: &impl serde::Serialize) -> anyhow::Result<Value> {
    match serde_json::to_value(figures)? {
        Value::Object(figures) => Ok(envelope(name, &Map::new(), figures)),
        other => anyhow::bail!("figures of {name} are no object: {other}"),
    }
}

/// What was measured on what, a line each; names end at column `width`.
pub fn setup_lines(setup: &Map<String, Value>, width: usize) -> String {
    let mut out = String::new();
    for (name, value) in setup {
        let _ = writeln!(out, "{name:>width$}  {}", value.as_str().map_or(value.to_string(), str::to_string));
    }
    out
}

/// The middle of `values`; of an even number of them, between the two in the middle. Zero without any.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        count if count.is_multiple_of(2) => (values[middle - 1] + values[middle]) / 2.0,
        _ => values[middle],
    }
}

/// Four digits that mean something.
pub fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}
