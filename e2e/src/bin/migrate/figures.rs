//! What the figures are made of.

use crate::cost::Runtime;
use crate::moves::{Moved, middle};
use ioplane_e2e::memories::Stop;
use ioplane_figures::compare::interval;
use ioplane_figures::goals::UNRESOLVED;
use ioplane_figures::report::{median, rounded};
use serde_json::{Map, Value, json};

/// All that was measured.
#[derive(Default)]
pub struct Measured {
    /// Both cards, between models of the silicon.
    pub model: Option<Value>,
    pub vf: Vec<Moved>,
    pub virtio: Vec<Moved>,
    /// QEMU's pair.
    pub failover: Vec<Moved>,
    pub stops: Vec<Stop>,
    pub runtime: Option<Result<Runtime, String>>,
    /// The same with registers that are mapped.
    pub mapped: Option<Result<Runtime, String>>,
    /// The same with a driver that cooperates.
    pub cooperating: Option<Result<Runtime, String>>,
    /// Parts that ended with an error.
    pub failed: Vec<(String, String)>,
}

/// How far apart the ends of the interval of a quotient of times may be.
const CLOSE: f64 = 1.5;
const NOT_RUN: &str = "this part was not run";
/// What a model cannot say.
const NO_TIME: &str = "a model of the silicon has no time, and no 82599 is emulated";

impl Measured {
    /// By key; what is null stands in `not_measured` with its reason.
    pub fn figures(&self) -> Value {
        let mut missing = Map::new();
        let mut null = |key: &str, why: &str| {
            missing.insert(key.to_owned(), json!(why));
            Value::Null
        };
        let model = |card: &str, key: &str| self.model.as_ref().map(|model| model[card][key].clone());
        let most = |field: &str| self.vf.iter().filter_map(|moved| moved.of_function(field)).max();
        let device = middle(&self.vf, |moved| moved.device_ms().unwrap_or(0.0));
        let mut vf82576 = Map::new();
        let keep = |map: &mut Map<String, Value>, key: &str, value: Value| map.insert(key.to_owned(), value);
        if self.vf.is_empty() {
            for key in ["stop_accesses", "stop_messages", "missed_frames", "duplicated_frames", "state_bytes"]
            {
                keep(&mut vf82576, key, null(&format!("vf82576.{key}"), NOT_RUN));
            }
        } else {
            let accesses = |moved: &Moved| {
                Some(moved.of_function("stop_accesses")? + moved.of_function("replay_accesses")?)
            };
            let sum = |of: fn(&Moved) -> u64| json!(self.vf.iter().map(of).sum::<u64>());
            keep(&mut vf82576, "stop_accesses", json!(self.vf.iter().filter_map(accesses).max()));
            keep(&mut vf82576, "rest_accesses", json!(most("stop_accesses")));
            keep(&mut vf82576, "replay_accesses", json!(most("replay_accesses")));
            let messages = most("replay_messages").map_or_else(
                || null("vf82576.stop_messages", "this ioplane does not say replay_messages"),
                |most| json!(most),
            );
            keep(&mut vf82576, "stop_messages", messages);
            keep(&mut vf82576, "state_bytes", json!(most("state_bytes")));
            keep(&mut vf82576, "missed_frames", sum(|moved| moved.missed));
            keep(&mut vf82576, "duplicated_frames", sum(|moved| moved.duplicated));
            keep(&mut vf82576, "lost_while_away", sum(|moved| moved.lost_while_away));
            keep(&mut vf82576, "echoes", sum(|moved| moved.echoes));
            keep(&mut vf82576, "pages_sent", json!(most("pages_sent")));
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
        let own: Vec<f64> =
            self.vf.iter().map(|moved| moved.gap_ms - moved.device_ms().unwrap_or(0.0)).collect();
        let (virtio, paired) = (gaps(&self.virtio), gaps(&self.failover));
        let mut pairs = Map::new();
        for (key, of, to, why) in [
            ("downtime_vs_virtio", &gaps(&self.vf), &virtio, NOT_RUN),
            ("downtime_less_device_vs_virtio", &own, &virtio, NOT_RUN),
            ("downtime_vs_failover", &gaps(&self.vf), &paired, NOT_RUN),
        ] {
            let (ratio, seen) =
                against(of, to).unwrap_or_else(|| (null(&format!("vf82576.{key}"), why), Value::Null));
            keep(&mut vf82576, key, ratio);
            pairs.insert(key.to_owned(), seen);
        }
        keep(&mut vf82576, "downtime_pairs", Value::Object(pairs));
        keep(&mut vf82576, "device_ms", json!(device));
        keep(&mut vf82576, "moves", json!(self.vf.len()));
        keep(&mut vf82576, "traffic", times(&self.vf));
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
        let mut cost = |key: &str, measured: &Option<Result<Runtime, String>>| match measured {
            Some(Ok(runtime)) => (runtime.percent.clone(), json!(runtime)),
            Some(Err(error)) => (null(key, error), Value::Null),
            None => (null(key, NOT_RUN), Value::Null),
        };
        let (percent, runtime) = cost("runtime_cost_percent", &self.runtime);
        let (mapped_percent, mapped) = cost("mapped_cost_percent", &self.mapped);
        let (cooperating_percent, cooperating) = cost("cooperating_cost_percent", &self.cooperating);
        let modelled: f64 = cards.iter().filter_map(|card| number(card, "moves")).sum();
        for (part, error) in &self.failed {
            missing.insert(part.clone(), json!(error));
        }
        json!({
            "vf82576": vf82576,
            "vf82599": vf82599,
            "virtio": times(&self.virtio),
            "failover": times(&self.failover),
            "runtime_cost_percent": percent,
            "runtime": runtime,
            "mapped_cost_percent": mapped_percent,
            "mapped": mapped,
            "cooperating_cost_percent": cooperating_percent,
            "cooperating": cooperating,
            "pages_missed": pages_missed,
            "pages_marked_ratio": pages_marked_ratio,
            "memories": self.stops,
            "migrations": modelled as u64 + (self.vf.len() + self.stops.len()) as u64,
            "not_measured": missing,
        })
    }
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
    text += &row("virtio-net", &figures["virtio"]);
    text += &row("QEMU's pair", &figures["failover"]);
    for key in [
        "runtime_cost_percent",
        "pages_missed",
        "pages_marked_ratio",
        "migrations",
        "memories",
        "runtime",
        "mapped",
        "cooperating",
        "not_measured",
    ] {
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
        for key in ["pages_missed", "pages_marked_ratio", "runtime_cost_percent"] {
            assert!(figures[key].is_null() && figures["not_measured"][key] == NOT_RUN, "{key}");
        }
        assert!(figures["vf82599"]["downtime_vs_virtio"].is_null() && figures["migrations"] == 0);
    }
}
