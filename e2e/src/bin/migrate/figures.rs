//! What the figures are made of.

use crate::cost::Runtime;
use crate::moves::{Moved, middle};
use crate::reads::Reads;
use anyhow::Result;
use ioplane_e2e::memories::Stop;
use ioplane_figures::compare::interval;
use ioplane_figures::goals::UNRESOLVED;
use ioplane_figures::report::{median, rounded};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// All that was measured.
#[derive(Default)]
pub struct Measured {
    /// Both cards, between models of the silicon.
    pub model: Option<Value>,
    pub vf: Vec<Moved>,
    /// The same function with a driver that cooperates.
    pub cooperating: Vec<Moved>,
    pub virtio: Vec<Moved>,
    /// QEMU's pair.
    pub failover: Vec<Moved>,
    pub stops: Vec<Stop>,
    /// What it costs while nothing moves, by the keys of [`COSTS`].
    pub costs: BTreeMap<&'static str, Result<Runtime, String>>,
    pub reads: Option<Result<Reads, String>>,
    /// Parts that ended with an error.
    pub failed: Vec<(String, String)>,
}

/// What can cost something while nothing moves: `runtime` is a function that moves by a table and has all its registers trapped.
const COSTS: [&str; 6] =
    ["runtime", "runtime_after_move", "mapped", "mapped_after_move", "cooperating", "cooperating_after_move"];
/// How far apart the ends of the interval of a quotient of times may be.
const CLOSE: f64 = 1.5;
const NOT_RUN: &str = "this part was not run";
/// What a model cannot say.
const NO_TIME: &str = "a model of the silicon has no time, and no 82599 is emulated";

impl Measured {
    /// Keeps what a part has come to if it has failed, and says so.
    pub fn note(&mut self, part: &str, done: Result<()>, say: &dyn Fn(&str)) {
        if let Err(error) = done {
            say(&format!("{part}: {error:#}"));
            self.failed.push((part.to_owned(), format!("{error:#}")));
        }
    }

    /// Keeps one of [`COSTS`], and says so.
    pub fn cost(&mut self, key: &'static str, found: Result<Runtime>, say: &dyn Fn(&str)) {
        say(&format!("{key}, while nothing moves: {found:?}"));
        self.costs.insert(key, found.map_err(|error| format!("{error:#}")));
    }

    /// By key; what is null stands in `not_measured` with its reason.
    pub fn figures(&self) -> Value {
        let mut missing = Map::new();
        let mut null = |key: &str, why: &str| {
            missing.insert(key.to_owned(), json!(why));
            Value::Null
        };
        let model = |card: &str, key: &str| self.model.as_ref().map(|model| model[card][key].clone());
        let most = |field: &str| self.vf.iter().filter_map(|moved| moved.of_function(field)).max();
        let device = |moves: &[Moved]| middle(moves, |moved| moved.device_ms().unwrap_or(0.0));
        let mut vf82576 = Map::new();
        let keep = |map: &mut Map<String, Value>, key: &str, value: Value| map.insert(key.to_owned(), value);
        if self.vf.is_empty() {
            for key in [
                "stop_accesses",
                "stop_messages",
                "stop_frames",
                "missed_frames",
                "duplicated_frames",
                "state_bytes",
            ] {
                keep(&mut vf82576, key, null(&format!("vf82576.{key}"), NOT_RUN));
            }
        } else {
            vf82576 = function(&self.vf);
            for (key, field) in [("stop_messages", "replay_messages"), ("stop_frames", "replay_frames")] {
                let said = most(field).map_or_else(
                    || null(&format!("vf82576.{key}"), &format!("this ioplane does not say {field}")),
                    |most| json!(most),
                );
                keep(&mut vf82576, key, said);
            }
        }
        let mut cooperating = function(&self.cooperating);
        if self.cooperating.is_empty() {
            cooperating = Map::from_iter([("moves".to_owned(), null("vf82576_cooperating", NOT_RUN))]);
        }
        let times = |moves: &[Moved]| {
            if moves.is_empty() {
                return Value::Null;
            }
            json!({
                "moves": moves.len(),
                "gap_ms": middle(moves, |moved| moved.gap_ms),
                "next_gap_ms": middle(moves, |moved| moved.next_gap_ms),
                "tcp_gap_ms": middle(moves, |moved| moved.tcp_gap_ms),
                "unplug_gap_ms": middle(moves, |moved| moved.unplug_gap_ms.unwrap_or(0.0)).filter(|ms| *ms > 0.0),
                "missed_frames": moves.iter().map(|moved| moved.missed).sum::<u64>(),
                "duplicated_frames": moves.iter().map(|moved| moved.duplicated).sum::<u64>(),
                "lost_while_away": moves.iter().map(|moved| moved.lost_while_away).sum::<u64>(),
                "rows": moves,
            })
        };
        let gaps = |moves: &[Moved]| moves.iter().map(|moved| moved.gap_ms).collect::<Vec<f64>>();
        let (virtio, paired) = (gaps(&self.virtio), gaps(&self.failover));
        for (into, name, moves) in [
            (&mut vf82576, "vf82576", &self.vf),
            (&mut cooperating, "vf82576_cooperating", &self.cooperating),
        ] {
            let own: Vec<f64> =
                moves.iter().map(|moved| moved.gap_ms - moved.device_ms().unwrap_or(0.0)).collect();
            let mut pairs = Map::new();
            for (key, of, to) in [
                ("downtime_vs_virtio", &gaps(moves), &virtio),
                ("downtime_less_device_vs_virtio", &own, &virtio),
                ("downtime_vs_failover", &gaps(moves), &paired),
            ] {
                let (ratio, seen) =
                    against(of, to).unwrap_or_else(|| (null(&format!("{name}.{key}"), NOT_RUN), Value::Null));
                keep(into, key, ratio);
                pairs.insert(key.to_owned(), seen);
            }
            keep(into, "downtime_pairs", Value::Object(pairs));
            keep(into, "device_ms", json!(device(moves)));
            keep(into, "moves", json!(moves.len()));
            keep(into, "traffic", times(moves));
        }
        let rested = middle(&self.cooperating, |moved| moved.rested_before_ms().unwrap_or(0.0));
        keep(&mut cooperating, "rested_before_ms", json!(rested));
        keep(
            &mut vf82576,
            "model",
            self.model.as_ref().map_or(Value::Null, |model| model["vf82576"].clone()),
        );
        let mut vf82599 = Map::new();
        let no_time = |key| (key, None, NO_TIME);
        let counted = |key| (key, model("vf82599", key), NOT_RUN);
        for (key, value, why) in [
            counted("stop_accesses"),
            counted("rest_accesses"),
            counted("replay_accesses"),
            counted("stop_messages"),
            counted("stop_frames"),
            no_time("downtime_vs_virtio"),
            no_time("downtime_vs_failover"),
            counted("missed_frames"),
            counted("duplicated_frames"),
            counted("state_bytes"),
            counted("moves"),
            counted("pages_missed"),
            counted("pages_marked_ratio"),
            counted("pages_marked_ratio_with_resets"),
            counted("without_marking"),
        ] {
            let value = value.unwrap_or_else(|| null(&format!("vf82599.{key}"), why));
            keep(&mut vf82599, key, value);
        }
        let cards = ["vf82576", "vf82599"];
        let number = |card: &str, key: &str| model(card, key).and_then(|value| value.as_f64());
        let logged: u64 = self.stops.iter().filter(|stop| stop.log).map(|stop| stop.missed).sum();
        let missed: Option<f64> = cards.iter().map(|card| number(card, "pages_missed")).sum();
        let pages_missed = match missed {
            None if self.stops.is_empty() => null("pages_missed", NOT_RUN),
            missed => json!(missed.unwrap_or(0.0) as u64 + logged),
        };
        let ratios = cards.iter().filter_map(|card| number(card, "pages_marked_ratio")).reduce(f64::max);
        let pages_marked_ratio =
            ratios.map_or_else(|| null("pages_marked_ratio", NOT_RUN), |ratio| json!(ratio));
        let mut costs = Map::new();
        for key in COSTS {
            let percent_key = format!("{key}_cost_percent");
            let (percent, runtime) = match self.costs.get(key) {
                Some(Ok(runtime)) => (runtime.percent.clone(), json!(runtime)),
                Some(Err(error)) => (null(&percent_key, error), Value::Null),
                None => (null(&percent_key, NOT_RUN), Value::Null),
            };
            costs.insert(percent_key, percent);
            costs.insert(key.to_owned(), runtime);
        }
        let reads = match &self.reads {
            Some(Ok(reads)) => json!(reads),
            Some(Err(error)) => null("reads", error),
            None => null("reads", NOT_RUN),
        };
        let modelled: f64 = cards.iter().filter_map(|card| number(card, "moves")).sum();
        for (part, error) in &self.failed {
            missing.insert(part.clone(), json!(error));
        }
        let mut figures = json!({
            "vf82576": vf82576,
            "vf82576_cooperating": cooperating,
            "vf82599": vf82599,
            "virtio": times(&self.virtio),
            "failover": times(&self.failover),
            "reads": reads,
            "pages_missed": pages_missed,
            "pages_marked_ratio": pages_marked_ratio,
            "memories": self.stops,
            "migrations": modelled as u64 + (self.vf.len() + self.cooperating.len() + self.stops.len()) as u64,
            "not_measured": missing,
        });
        if let Value::Object(figures) = &mut figures {
            figures.append(&mut costs);
        }
        figures
    }
}

/// Counts of the moves of a function.
fn function(moves: &[Moved]) -> Map<String, Value> {
    let most = |field: &str| json!(moves.iter().filter_map(|moved| moved.of_function(field)).max());
    let accesses =
        |moved: &Moved| Some(moved.of_function("stop_accesses")? + moved.of_function("replay_accesses")?);
    let sum = |of: fn(&Moved) -> u64| json!(moves.iter().map(of).sum::<u64>());
    let counts = [
        ("stop_accesses", json!(moves.iter().filter_map(accesses).max())),
        ("rest_accesses", most("stop_accesses")),
        ("replay_accesses", most("replay_accesses")),
        ("state_bytes", most("state_bytes")),
        ("missed_frames", sum(|moved| moved.missed)),
        ("duplicated_frames", sum(|moved| moved.duplicated)),
        ("lost_while_away", sum(|moved| moved.lost_while_away)),
        ("echoes", sum(|moved| moved.echoes)),
        ("pages_sent", most("pages_sent")),
    ];
    counts.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The median of the quotients of moves one and one, and what is known of it; `unresolved` unless it is known within a factor of [`CLOSE`]. Nothing if
/// there are no moves of either.
fn against(of: &[f64], to: &[f64]) -> Option<(Value, Value)> {
    let ratios: Vec<f64> = of.iter().zip(to).filter(|(_, to)| **to > 0.0).map(|(of, to)| of / to).collect();
    let ends = interval(&ratios);
    let middle = (!ratios.is_empty()).then(|| rounded(median(ratios.iter().copied())))?;
    let close = ends.is_some_and(|[low, high]| low > 0.0 && high <= CLOSE * low);
    let value = if close { json!(middle) } else { json!(UNRESOLVED) };
    Some((value, json!({ "median": middle, "interval": ends, "pairs": ratios.len() })))
}

/// For people.
pub fn table(figures: &Value) -> String {
    let mut text = String::from("| figure | 82576 | 82599 |\n|---|---|---|\n");
    let (one, other) = (&figures["vf82576"], &figures["vf82599"]);
    for key in [
        "stop_accesses",
        "stop_messages",
        "stop_frames",
        "state_bytes",
        "missed_frames",
        "duplicated_frames",
        "downtime_vs_virtio",
        "downtime_vs_failover",
    ] {
        text += &format!("| {key} | {} | {} |\n", one[key], other[key]);
    }
    text += "\n| guest | moves | longest gap, ms | of TCP | while unplugged | missed | doubled | lost while away |\n|---|---|---|---|---|---|---|---|\n";
    let row = |name: &str, of: &Value| {
        format!(
            "| {name} | {} | {} | {} | {} | {} | {} | {} |\n",
            of["moves"],
            of["gap_ms"],
            of["tcp_gap_ms"],
            of["unplug_gap_ms"],
            of["missed_frames"],
            of["duplicated_frames"],
            of["lost_while_away"]
        )
    };
    text += &row("virtual function", &one["traffic"]);
    text += &row("a driver that cooperates", &figures["vf82576_cooperating"]["traffic"]);
    text += &row("virtio-net", &figures["virtio"]);
    text += &row("QEMU's pair", &figures["failover"]);
    for key in [
        "runtime_cost_percent",
        "pages_missed",
        "pages_marked_ratio",
        "migrations",
        "memories",
        "reads",
        "not_measured",
    ]
    .into_iter()
    .chain(COSTS)
    {
        text += &format!("{key}: {}\n", figures[key]);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quotient_of_few_or_of_uneven_moves_is_no_number() {
        let ratio = |of: &[f64], to: &[f64]| against(of, to).map(|(ratio, _)| ratio);
        assert_eq!(ratio(&[], &[1.0]), None);
        assert_eq!(ratio(&[1.0; 5], &[2.0; 5]), Some(json!(UNRESOLVED)));
        assert_eq!(ratio(&[1.0; 6], &[2.0; 6]), Some(json!(0.5)));
        assert_eq!(ratio(&[1.0, 2.0, 1.0, 1.0, 1.0, 1.0], &[2.0; 6]), Some(json!(UNRESOLVED)));
    }

    #[test]
    fn what_was_not_run_is_null_and_says_so() {
        let figures = Measured::default().figures();
        for key in
            ["pages_missed", "pages_marked_ratio", "runtime_cost_percent", "mapped_after_move_cost_percent"]
        {
            assert!(figures[key].is_null() && figures["not_measured"][key] == NOT_RUN, "{key}");
        }
        assert!(figures["vf82599"]["downtime_vs_virtio"].is_null() && figures["migrations"] == 0);
    }
}
