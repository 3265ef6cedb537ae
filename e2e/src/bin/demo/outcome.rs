//! What the demo found: a table for people, an object for programs.

use ioplane_e2e::Accelerator;
use serde::Serialize;
use serde_json::json;
use std::fmt::Write;

/// One half.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Half {
    /// Requests on the two data disks.
    pub requests: u64,
    /// Kicks for each.
    pub kicks_per_request: f64,
    /// Interrupts for each.
    pub interrupts_per_request: f64,
    /// Bytes read and written, in units of a million, a second, in both guests together.
    pub mb_per_s: f64,
    /// Half of the guests' requests took at most so long.
    pub p50_us: u64,
    /// 99 of 100 did.
    pub p99_us: u64,
}

/// Both halves, and whether every byte was right.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Nothing was wrong anywhere.
    pub verified: bool,
    /// What ran the guests.
    pub accelerator: Accelerator,
    /// The first half.
    pub notified: Half,
    /// The second half.
    pub polled: Half,
    /// What was wrong.
    pub problems: Vec<String>,
}

impl Outcome {
    /// One object.
    pub fn json(&self) -> String {
        let Outcome { verified, accelerator, notified, polled, .. } = self;
        let name = accelerator.name();
        format!(
            "{:#}",
            json!({ "verified": verified, "accelerator": name, "notified": notified, "polled": polled })
        )
    }

    /// One table.
    pub fn table(&self) -> String {
        let Outcome { notified, polled, .. } = self;
        let mut text = format!("{:24}{:>12}{:>12}\n", "", "notified", "polled");
        let mut row = |name: &str, of: &dyn Fn(&Half) -> String| {
            let _ = writeln!(text, "{name:24}{:>12}{:>12}", of(notified), of(polled));
        };
        row("requests", &|half| half.requests.to_string());
        row("kicks per request", &|half| format!("{:.4}", half.kicks_per_request));
        row("interrupts per request", &|half| format!("{:.4}", half.interrupts_per_request));
        row("MB/s", &|half| format!("{:.1}", half.mb_per_s));
        row("p50, microseconds", &|half| half.p50_us.to_string());
        row("p99, microseconds", &|half| half.p99_us.to_string());
        let verdict = match self.problems.as_slice() {
            [] => "Every byte was right: verified in the guests, no error in their logs, none in the daemon."
                .into(),
            problems => format!("NOT VERIFIED: {}", problems.join("; ")),
        };
        let _ = write!(text, "\nGuests ran on {}.\n{verdict}", self.accelerator);
        text
    }
}
