//! What each step cost the guest: a table for people, an object for programs.

use ioplane_e2e::Accelerator;
use ioplane_e2e::protocol::Report;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::fmt::Write;

/// What this host's daemon says of a remote disk, as far as the demo looks at it.
#[derive(Clone, Debug, Deserialize)]
pub struct Remote {
    pub state: String,
    pub losses: u64,
    pub replays: u64,
    pub device_errors: u64,
}

/// What happened, and what came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    pub what: &'static str,
    /// Requests that ended meanwhile.
    pub requests: u64,
    /// The longest that one of them took.
    pub longest_ms: f64,
    pub connections_lost: u64,
    /// Requests that were in flight when a connection was lost.
    pub sent_again: u64,
    /// What failed in the guest, and blocks that did not hold what they must.
    pub errors: u64,
    pub mismatches: u64,
}

impl Step {
    /// As the guest has met it.
    pub fn of(what: &'static str, report: &Report) -> Step {
        Step {
            what,
            requests: report.requests,
            longest_ms: report.max_us as f64 / 1000.0,
            connections_lost: 0,
            sent_again: 0,
            errors: report.errors,
            mismatches: report.mismatches,
        }
    }

    /// With what this host's daemon counted.
    pub fn with_connections(self, connections_lost: u64, sent_again: u64) -> Step {
        Step { connections_lost, sent_again, ..self }
    }

    pub fn sentence(&self) -> String {
        format!(
            "{}: the longest request took {:.1} s, {} connections were lost, {} requests were sent again, {} failed",
            self.what,
            self.longest_ms / 1000.0,
            self.connections_lost,
            self.sent_again,
            self.errors
        )
    }
}

/// All of it, and whether it is as it should be.
#[derive(Debug)]
pub struct RemoteOutcome {
    accelerator: Accelerator,
    steps: Vec<Step>,
    blocks: u64,
    seconds: f64,
    pub problems: Vec<String>,
}

impl RemoteOutcome {
    /// Counts are judged, and no times.
    pub fn judge(
        accelerator: Accelerator,
        steps: Vec<Step>,
        blocks: u64,
        complaints: Vec<String>,
        end: Remote,
    ) -> RemoteOutcome {
        let mut problems = complaints;
        for step in &steps {
            if step.errors > 0 || step.mismatches > 0 {
                let Step { what, errors, mismatches, .. } = step;
                problems.push(format!("{what}: {errors} requests failed, {mismatches} blocks were wrong"));
            }
            if step.requests == 0 {
                problems.push(format!("{}: no request has ended", step.what));
            }
        }
        if steps.iter().all(|step| step.sent_again == 0) {
            problems.push("no request was in flight when a connection was lost, which proves nothing".into());
        }
        if blocks == 0 {
            problems.push("nothing was read once more".into());
        }
        if end.device_errors > 0 {
            problems.push(format!("the far host answered {} requests with an error", end.device_errors));
        }
        RemoteOutcome { accelerator, steps, blocks, seconds: 0.0, problems }
    }

    /// How long it was shown for.
    pub fn took(self, seconds: f64) -> RemoteOutcome {
        RemoteOutcome { seconds, ..self }
    }

    pub fn json(&self) -> String {
        let object = json!({
            "verified": self.problems.is_empty(),
            "accelerator": self.accelerator.name(),
            "seconds": (self.seconds * 10.0).round() / 10.0,
            "steps": self.steps,
            "blocks_right": self.blocks,
        });
        format!("{object:#}")
    }

    pub fn table(&self) -> String {
        let mut text = line("", "requests", "longest, s", "lost", "sent again", "failed");
        for step in &self.steps {
            text += &line(
                step.what,
                &step.requests.to_string(),
                &format!("{:.1}", step.longest_ms / 1000.0),
                &step.connections_lost.to_string(),
                &step.sent_again.to_string(),
                &step.errors.to_string(),
            );
        }
        let blocks = self.blocks;
        let right = if self.problems.is_empty() { "Nothing was lost" } else { "SOMETHING IS WRONG" };
        let _ = write!(
            text,
            "{right}: {blocks} blocks of 4 KiB were read once more and checked, in {:.0} s. The guest ran on {}.",
            self.seconds, self.accelerator
        );
        text
    }
}

fn line(what: &str, requests: &str, longest: &str, lost: &str, again: &str, failed: &str) -> String {
    format!("{what:26}{requests:>10}{longest:>12}{lost:>7}{again:>12}{failed:>8}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(what: &'static str, sent_again: u64, errors: u64) -> Step {
        Step { what, requests: 9, longest_ms: 4200.0, connections_lost: 2, sent_again, errors, mismatches: 0 }
    }

    fn remote() -> Remote {
        Remote { state: "connected".into(), losses: 4, replays: 9, device_errors: 0 }
    }

    #[test]
    fn a_failed_request_and_a_pause_without_one_are_problems() {
        let judge = |steps| RemoteOutcome::judge(Accelerator::detect(), steps, 8, vec![], remote());
        let good = judge(vec![step("undisturbed", 0, 0), step("cable pulled", 3, 0)]);
        assert_eq!(good.problems, [""; 0]);
        assert!(good.table().contains("Nothing was lost: 8 blocks"), "{}", good.table());
        let json = good.took(44.83).json();
        assert!(json.contains("\"verified\": true") && json.contains("\"seconds\": 44.8"), "{json}");
        assert_eq!(judge(vec![step("undisturbed", 0, 0)]).problems.len(), 1);
        assert_eq!(judge(vec![step("cable pulled", 3, 1)]).problems.len(), 1);
    }
}
