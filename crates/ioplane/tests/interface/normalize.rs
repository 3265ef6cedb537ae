//! Answers without what differs from run to run. By key, so that everything else shows: keys, types, words, defaults.

use serde_json::{Map, Value};

/// Numbers that differ from run to run.
const NUMBERS: &[&str] = &[
    "age_s",
    "age_us",
    "at_us",
    "awake",
    "busy_percent",
    "busy_us",
    "cpu_us",
    "empty_polls",
    "empty_us",
    "run_delay_us",
    "for_us",
    "slept_us",
    "from_pid",
    "held_ms",
    "next_ms",
    "number",
    "pause_us",
    "pid",
    "sleeps",
    "tries",
    "uptime_s",
    "units",
    "us",
    "waited_us",
    "wakes",
];
/// Numbers that differ while a guest does something.
const TRAFFIC: &[&str] = &[
    "interrupt_p50_us",
    "interrupt_p99_us",
    "interrupts",
    "interrupts_avoided",
    "interrupts_per_frame",
    "interrupts_per_request",
    "kicks",
    "kicks_avoided",
    "kicks_per_frame",
    "kicks_per_request",
    "p50_us",
    "p99_us",
    "wait_p50_us",
    "wait_p99_us",
];
/// Texts that differ from build to build, or from run to run.
const TEXTS: &[&str] = &["from_version", "version"];

/// What is taken out of texts and values.
#[derive(Debug, Clone, Default)]
pub struct Normalizer {
    /// Texts, and what stands for each.
    places: Vec<(String, &'static str)>,
    traffic: bool,
}

impl Normalizer {
    /// `found` is shown as `shown`, wherever in a text it is.
    pub fn with(mut self, found: impl Into<String>, shown: &'static str) -> Self {
        self.places.push((found.into(), shown));
        self
    }

    /// Leaves out what a guest's activity makes of counts and times.
    pub fn in_traffic(mut self) -> Self {
        self.traffic = true;
        self
    }

    pub fn text(&self, text: &str) -> String {
        let text =
            self.places.iter().fold(text.to_owned(), |text, (found, shown)| text.replace(found, shown));
        // How often until now depends on how fast the machine is.
        let Some((before, (_, after))) =
            text.split_once("(tried ").and_then(|(before, tried)| Some((before, tried.split_once(')')?)))
        else {
            return text;
        };
        format!("{before}(tried <times>){}", self.text(after))
    }

    pub fn value(&self, value: Value) -> Value {
        self.under("", "", value)
    }

    fn under(&self, parent: &str, key: &str, value: Value) -> Value {
        match value {
            Value::Number(number) if self.varies(parent, key) => {
                if number.is_f64() { "<fraction>" } else { "<number>" }.into()
            }
            Value::String(_) if TEXTS.contains(&key) => format!("<{key}>").into(),
            // The process of the test: its name has a hash in it.
            Value::String(_) if (parent, key) == ("vm", "name") => "<name>".into(),
            // A saved state, in base64: its own golden files are beside its devices.
            Value::String(_) if key == "body" => "<base64>".into(),
            Value::String(text) => self.text(&text).into(),
            Value::Array(all) => all.into_iter().map(|one| self.under(parent, key, one)).collect(),
            Value::Object(all) => sorted(all.into_iter().map(|(own, one)| {
                let one = self.under(key, &own, one);
                (self.text(&own), one)
            })),
            other => other,
        }
    }

    fn varies(&self, parent: &str, key: &str) -> bool {
        // The spin of a core is its user's; that of a queue is chosen by what was measured.
        let chosen = (parent, key) == ("choice", "spin_us");
        NUMBERS.contains(&key) || chosen || self.traffic && TRAFFIC.contains(&key)
    }
}

/// Keys have no order that anybody may rely on.
fn sorted(all: impl Iterator<Item = (String, Value)>) -> Value {
    let mut all: Vec<_> = all.collect();
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    Value::Object(Map::from_iter(all))
}

/// As a file, one value on a line.
pub fn pretty(value: &Value) -> String {
    serde_json::to_string_pretty(value).unwrap() + "\n"
}

/// What depends on the host: keys and types only. Elements of a list are one shape, if they have one.
pub fn shape(value: &Value) -> Value {
    match value {
        Value::Null => "null".into(),
        Value::Bool(_) => "bool".into(),
        Value::Number(number) => if number.is_f64() { "fraction" } else { "number" }.into(),
        Value::String(_) => "text".into(),
        Value::Array(all) => {
            let mut shapes: Vec<Value> = all.iter().map(shape).collect();
            shapes.sort_by_key(Value::to_string);
            shapes.dedup();
            shapes.into()
        }
        Value::Object(all) => sorted(all.iter().map(|(key, value)| (key.clone(), shape(value)))),
    }
}
