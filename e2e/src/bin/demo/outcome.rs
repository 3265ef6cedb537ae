//! What the demo found: a table for people, an object for programs.

use ioplane_e2e::Accelerator;
use serde::Serialize;
use serde_json::json;
use std::fmt::Write;

/// The disks in one half.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Half {
    /// Requests on the two data disks.
    pub requests: u64,
    pub kicks_per_request: f64,
    pub interrupts_per_request: f64,
    /// Bytes read and written, in units of a million, a second, in both guests together.
    pub mb_per_s: f64,
    /// Half of the guests' requests took at most so long.
    pub p50_us: u64,
    /// 99 of 100 did.
    pub p99_us: u64,
}

/// The network in one half.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Traffic {
    /// Frames that crossed the switch; a large one counts as one.
    pub frames: u64,
    /// Kicks for each, of both guests.
    pub kicks_per_frame: f64,
    pub interrupts_per_frame: f64,
    /// Bytes that the guests' programs sent, in units of a million, a second, both ways together.
    pub mb_per_s: f64,
    /// What arrived as something else than was sent.
    #[serde(skip)]
    pub wrong: Vec<String>,
}

/// The network in both.
#[derive(Clone, Debug, Serialize)]
pub struct Network {
    /// The first half.
    pub notified: Traffic,
    /// The second half.
    pub polled: Traffic,
}

/// Both halves, and whether every byte was right.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Nothing was wrong anywhere.
    pub verified: bool,
    /// What ran the guests.
    pub accelerator: Accelerator,
    /// The disks in the first half.
    pub notified: Half,
    pub polled: Half,
    pub network: Network,
    pub problems: Vec<String>,
}

impl Outcome {
    pub fn json(&self) -> String {
        let Outcome { verified, accelerator, notified, polled, network, .. } = self;
        let name = accelerator.name();
        format!(
            "{:#}",
            json!({
                "verified": verified, "accelerator": name, "notified": notified, "polled": polled, "network": network
            })
        )
    }

    pub fn table(&self) -> String {
        let Outcome { notified, polled, network, .. } = self;
        let mut text = String::new();
        let mut row = |name: &str, disks: [String; 2], network: [String; 2]| {
            let ([a, b], [c, d]) = (disks, network);
            let _ = writeln!(text, "{name:24}{a:>12}{b:>12}{c:>12}{d:>12}");
        };
        let (first, second) = (&network.notified, &network.polled);
        let disks = |of: &dyn Fn(&Half) -> String| [of(notified), of(polled)];
        let frames = |of: &dyn Fn(&Traffic) -> String| [of(first), of(second)];
        let modes = || ["notified", "polled"].map(String::from);
        // Nobody in a guest knows when a frame of its TCP was sent, and when it came.
        let unknown = || ["-", "-"].map(String::from);
        let each = |count: f64| format!("{count:.4}");
        row("", ["", "disks"].map(String::from), ["", "network"].map(String::from));
        row("", modes(), modes());
        row("requests, frames", disks(&|h| h.requests.to_string()), frames(&|t| t.frames.to_string()));
        row("kicks each", disks(&|h| each(h.kicks_per_request)), frames(&|t| each(t.kicks_per_frame)));
        row(
            "interrupts each",
            disks(&|h| each(h.interrupts_per_request)),
            frames(&|t| each(t.interrupts_per_frame)),
        );
        row("MB/s", disks(&|h| format!("{:.1}", h.mb_per_s)), frames(&|t| format!("{:.1}", t.mb_per_s)));
        row("p50, microseconds", disks(&|h| h.p50_us.to_string()), unknown());
        row("p99, microseconds", disks(&|h| h.p99_us.to_string()), unknown());
        let verdict = match self.problems.as_slice() {
            [] => "Every byte was right, on disks and network; no error in the guests' logs, none in the daemon."
                .into(),
            problems => format!("NOT VERIFIED: {}", problems.join("; ")),
        };
        let _ = write!(text, "\nGuests ran on {}.\n{verdict}", self.accelerator);
        text
    }
}
