//! The table and the plot of documents, from the JSON of a run.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::load::Work;
use ioplane_figures::plot::{self, Panel};

const CORES: [&str; 3] = ["polled", "adaptive", "notified"];

/// Numbers of guests of a run, ascending.
fn guests(figures: &Value) -> Vec<u16> {
    let keys = figures.as_object().into_iter().flat_map(|figures| figures.keys());
    let mut guests: Vec<u16> = keys.filter_map(|key| key.strip_prefix("guests")?.parse().ok()).collect();
    guests.sort_unstable();
    guests
}

fn part(figures: &Value, guests: u16, part: &str) -> Option<f64> {
    figures[format!("guests{guests}")][part].as_f64()
}

/// A row for each load, number of guests and core.
pub fn table(figures: &Value) -> String {
    let mut out = String::from(
        "| load | guests | core | frames/s | mean us | p50 us | p99 us | kicks/frame | interrupts/frame | both, per second | between processors, per second | CPU % | CPU us/frame | \
         against the better | mean and p50 latency against the better | the same against notified's | polled again against polled | CPU against notified's |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for load in Work::ALL.map(Work::word) {
        for guests in guests(figures) {
            for core in CORES {
                let of = |what: &str, digits: usize| {
                    let value = part(figures, guests, &format!("{core}_{load}_{what}"));
                    value.map_or(String::new(), |value| format!("{value:.digits$}"))
                };
                let ratio = |what: &str| {
                    let value = part(figures, guests, &format!("{what}_{load}"));
                    value.filter(|_| core == "adaptive").map_or(String::new(), |value| format!("{value:.3}"))
                };
                let latency = |what: &str| {
                    let told = &figures[format!("guests{guests}")][format!("{what}_{load}")];
                    let parts = ["mean", "p50"].map(|key| told[key]["ratio"].as_f64());
                    match parts {
                        [Some(mean), Some(p50)] if core == "adaptive" => format!("{mean:.3}, {p50:.3}"),
                        _ => String::new(),
                    }
                };
                let _ = writeln!(
                    out,
                    "| {load} | {guests} | {core} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                    of("frames_per_s", 0),
                    of("mean_us", 1),
                    of("p50_us", 1),
                    of("p99_us", 1),
                    of("kicks_per_frame", 4),
                    of("interrupts_per_frame", 4),
                    of("notifications_per_s", 0),
                    of("processor_interrupts_per_s", 0),
                    of("back_end_cpu_percent", 0),
                    of("cpu_us_per_frame", 2),
                    ratio("adaptive_vs_best"),
                    latency("adaptive_latency_vs_best"),
                    latency("adaptive_latency_vs_notified"),
                    ratio("again_vs_polled"),
                    ratio("adaptive_cpu_vs_notified"),
                );
            }
        }
    }
    out
}

/// The paper's two figures side by side, throughput and latency by number of guests, with notifications and processor time.
pub fn plot(figures: &Value, path: &Path) -> Result<()> {
    let line = |core: &str, load: &str, what: &str| -> Vec<(f64, f64)> {
        let key = format!("{core}_{load}_{what}");
        let point = |guests: u16| Some((f64::from(guests), part(figures, guests, &key)?));
        guests(figures).into_iter().filter_map(point).collect()
    };
    let panel = |title, unit, load, what| Panel {
        title,
        unit,
        across: "guests",
        from: 1.0,
        step: 1.0,
        width: 300.0,
        marks: Vec::new(),
        lines: vec![
            ("polling", line("polled", load, what)),
            ("notification", line("notified", load, what)),
            ("adaptive", line("adaptive", load, what)),
        ],
    };
    let svg = plot::svg(&[
        panel("TCP stream of 64-byte writes", "Mbit/s, all guests", "stream", "mbit_per_s"),
        panel("UDP request-response", "mean latency, us", "requests", "mean_us"),
        panel(
            "Notifications of the stream",
            "kicks and interrupts a second",
            "stream",
            "notifications_per_s",
        ),
        panel(
            "2,000 requests per second and guest",
            "CPU of the core, percent",
            "paced",
            "back_end_cpu_percent",
        ),
    ]);
    std::fs::write(path, svg).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_core_has_a_row_and_ratios_stand_with_the_adaptive_one() {
        let figures = json!({
            "adaptive_vs_best_min": 0.9,
            "guests10": {"polled_stream_frames_per_s": 5.0},
            "guests2": {"adaptive_stream_frames_per_s": 7.0, "adaptive_vs_best_stream": 0.95,
                "adaptive_latency_vs_best_stream": {"mode": "polled", "mean": {"ratio": 0.9}, "p50": {"ratio": 1.02}},
                "adaptive_cpu_vs_notified_stream": 1.1, "again_vs_polled_stream": 0.98, "notified_stream_frames_per_s": 6.0},
        });
        let table = table(&figures);
        let row = |begin: &str| {
            let row = table.lines().find(|line| line.starts_with(begin));
            row.unwrap_or_else(|| panic!("{begin} is not in\n{table}")).to_owned()
        };
        assert_eq!(
            row("| stream | 2 | adaptive"),
            "| stream | 2 | adaptive | 7 |  |  |  |  |  |  |  |  |  | 0.950 | 0.900, 1.020 |  | 0.980 | 1.100 |"
        );
        assert_eq!(
            row("| stream | 2 | notified"),
            "| stream | 2 | notified | 6 |  |  |  |  |  |  |  |  |  |  |  |  |  |  |"
        );
        assert!(table.find("| stream | 2 |") < table.find("| stream | 10 |"));
        assert_eq!(table.lines().count(), 2 + 3 * 2 * 3);
    }
}
