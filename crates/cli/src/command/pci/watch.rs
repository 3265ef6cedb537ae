//! `pci watch`: how a function is and what its guest does, looked at again and again.
//!
//! ```text
//!   GET /v1/pci/NAME, twice --Look::between--> rates --> lines for people | one JSON object a look
//! ```

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::{EventReport, FunctionReport, WatchReport};
use ioplane_api::size::Size;
use serde::Serialize;

use super::address;
use crate::args::PciWatch;
use crate::client::Client;
use crate::command::show;
use crate::output::{out, print_next};

/// The shortest interval: less would mostly show what looking costs.
const LEAST: Duration = Duration::from_millis(100);

/// One look: what happened since the one before, for each second, and how it is now.
#[derive(Debug, Serialize)]
struct Look {
    /// Seconds since the look before.
    interval_s: f64,
    /// Rates, by name; the names are those of the counts in `function`.
    per_second: BTreeMap<&'static str, f64>,
    /// What happened since then. At most as many as the monitor remembers.
    events: Vec<EventReport>,
    /// Events that the monitor has forgotten in between.
    events_missed: u64,
    function: FunctionReport,
}

/// Every count that a rate is made of.
fn counts(function: &FunctionReport) -> Vec<(&'static str, u64)> {
    let traffic = &function.traffic;
    let mut all = vec![("reads", traffic.reads), ("writes", traffic.writes)];
    if let Some(port) = &function.port {
        all.extend([("sent_frames", port.sent_frames), ("received_frames", port.received_frames)]);
        all.extend([("sent_bytes", port.sent_bytes), ("received_bytes", port.received_bytes)]);
    }
    if let Some(watch) = &function.watch {
        all.extend([("accesses", watch.accesses), ("hooked", watch.hooked), ("updates", watch.updates)]);
        all.extend([("dma_vetted", watch.dma_vetted), ("dma_bytes", watch.dma_bytes)]);
        all.extend([("interrupts", watch.interrupts), ("denied", watch.denied)]);
    } else {
        all.push(("interrupts", traffic.interrupts));
    }
    all
}

impl Look {
    fn between(before: &FunctionReport, now: FunctionReport, seconds: f64) -> Look {
        let old: BTreeMap<_, _> = counts(before).into_iter().collect();
        let rate = |(name, count): (&'static str, u64)| {
            // A function that was removed and added again begins anew.
            let more = count.saturating_sub(old.get(name).copied().unwrap_or(0));
            (name, more as f64 / seconds.max(0.001))
        };
        let per_second = counts(&now).into_iter().map(rate).collect();
        let last = |function: &FunctionReport| {
            function.watch.as_ref().and_then(|watch| watch.events.last()).map(|event| event.number)
        };
        let seen = last(before);
        let new = |event: &&EventReport| seen.is_none_or(|seen| event.number > seen);
        let events: Vec<EventReport> =
            now.watch.iter().flat_map(|watch| &watch.events).filter(new).cloned().collect();
        let first = events.first().map(|event| event.number);
        let missed = first.zip(seen).map_or(0, |(first, seen)| first.saturating_sub(seen + 1));
        Look { interval_s: seconds, per_second, events, events_missed: missed, function: now }
    }

    fn rate(&self, name: &str) -> f64 {
        self.per_second.get(name).copied().unwrap_or(0.0)
    }

    fn text(&self) -> String {
        let rate = |name: &str| format!("{:.0}/s", self.rate(name));
        let bytes = |name: &str| format!("{}B/s", Size(self.rate(name) as u64));
        let FunctionReport { watch, port, stage, .. } = &self.function;
        let mut parts = Vec::new();
        match watch {
            Some(watch) => {
                parts.push(if watch.stopped { "STOPPED".to_owned() } else { stage.word().to_owned() });
                parts.push(show::states(watch));
                parts.push(self.hooked(watch));
                parts.push(format!("DMA {} ({})", rate("dma_vetted"), bytes("dma_bytes")));
                parts.push(format!("interrupts {}", rate("interrupts")));
                parts.push(format!("denied {}", watch.denied));
            }
            None => {
                parts.push(stage.word().to_owned());
                parts.push(format!("reads {} writes {}", rate("reads"), rate("writes")));
                parts.push(format!("interrupts {}", rate("interrupts")));
            }
        }
        if port.is_some() {
            parts.push(format!(
                "sent {} ({}) received {} ({})",
                rate("sent_frames"),
                bytes("sent_bytes"),
                rate("received_frames"),
                bytes("received_bytes")
            ));
        }
        let mut text = parts.join("  ") + "\n";
        if self.events_missed > 0 {
            text.push_str(&format!("    ... {} more\n", self.events_missed));
        }
        text.extend(self.events.iter().map(|event| format!("    {}\n", event.what)));
        text
    }

    fn hooked(&self, watch: &WatchReport) -> String {
        let accesses = self.rate("accesses");
        let share =
            if accesses > 0.0 { 100.0 * self.rate("hooked") / accesses } else { watch.hooked_percent };
        format!("accesses {accesses:.0}/s, hooked {share:.1} %")
    }
}

/// Looks until the time is over or somebody interrupts.
pub fn run(client: &Client, args: &PciWatch, json: bool) -> Result<()> {
    let (interval, path) = (args.interval.max(LEAST), address(&args.name));
    let end = args.limit.map(|limit| Instant::now() + limit);
    let mut before: FunctionReport = client.get(&path)?;
    let mut at = Instant::now();
    if !json && std::io::stdout().is_terminal() {
        out(show::function(&before).as_bytes())?;
    }
    while end.is_none_or(|end| at < end) {
        std::thread::sleep(end.map_or(interval, |end| interval.min(end - at)));
        let now: FunctionReport = client.get(&path)?;
        let taken = Instant::now();
        let look = Look::between(&before, now, (taken - at).as_secs_f64());
        if !print_next(json, &look, Look::text)? {
            return Ok(());
        }
        (before, at) = (look.function, taken);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ioplane_api::report::{RegionReport, TrafficReport};

    fn report(accesses: u64, hooked: u64, events: &[u64]) -> FunctionReport {
        let events = events.iter().map(|number| EventReport {
            number: *number,
            at_us: 0,
            what: format!("event {number}"),
        });
        let watch = WatchReport {
            states: vec![RegionReport { region: "transmit".into(), state: "Idle".into() }],
            reusable: true,
            accesses,
            hooked,
            events: events.collect(),
            ..WatchReport::default()
        };
        let mut function = show::tests::function("n");
        function.traffic = TrafficReport { reads: accesses, ..TrafficReport::default() };
        function.watch = Some(watch);
        function
    }

    #[test]
    fn a_look_is_what_happened_in_between() {
        let look = Look::between(&report(100, 10, &[1, 2]), report(300, 40, &[5, 6]), 2.0);
        assert_eq!((look.rate("accesses"), look.rate("hooked"), look.rate("reads")), (100.0, 15.0, 100.0));
        assert_eq!((look.events.len(), look.events_missed), (2, 2));
        let text = look.text();
        assert!(text.contains("transmit Idle (reusable)") && text.contains("hooked 15.0 %"), "{text}");
        assert!(text.contains("... 2 more\n    event 5\n    event 6\n"), "{text}");
        // Removed and added again in between.
        let look = Look::between(&report(300, 40, &[6]), report(5, 1, &[1]), 1.0);
        assert_eq!((look.rate("accesses"), look.events_missed), (0.0, 0));
    }

    #[test]
    fn bytes_have_their_unit() {
        let now = report(0, 0, &[]);
        let mut before = now.clone();
        let watch = |bytes| Some(WatchReport { dma_bytes: bytes, dma_vetted: 1, ..WatchReport::default() });
        before.watch = watch(0);
        let look = |bytes| {
            let now = FunctionReport { watch: watch(bytes), ..now.clone() };
            Look::between(&before, now, 1.0).text()
        };
        assert!(look(512).contains("DMA 0/s (512B/s)"), "{}", look(512));
        assert!(look(2048).contains("DMA 0/s (2KB/s)"), "{}", look(2048));
    }

    #[test]
    fn a_function_that_nobody_watches_has_rates_too() {
        let (mut before, mut now) = (show::tests::function("n"), show::tests::function("n"));
        (before.traffic.writes, now.traffic.writes) = (5, 25);
        let look = Look::between(&before, now, 1.0);
        assert!(look.text().starts_with("running  reads 0/s writes 20/s"), "{}", look.text());
    }
}
