//! `ioplane exits apply`: a small script does in the guest what a finding suggests, and can undo it.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use ioplane_exits::{Action, Finding, Report, action_of};
use serde::Serialize;

use super::reach::Reach;
use super::watch;
use crate::cli::ApplyArgs;

/// What runs in the guest.
const TUNE: &str = include_str!("../../../../../guest/tune/tune.sh");

/// One finding, before and after.
#[derive(Serialize)]
struct Outcome {
    finding: String,
    /// Exits a second that it is about.
    before: f64,
    after: f64,
}

#[derive(Serialize)]
struct Applied {
    outcomes: Vec<Outcome>,
    /// All exits a second.
    before: f64,
    after: f64,
    /// What the script said.
    said: String,
}

/// Applies or undoes, and measures before and after.
pub(super) fn run(args: &ApplyArgs, json: bool) -> Result<()> {
    let actions = actions(&args.findings)?;
    let reach = Reach::new(args)?;
    let before = watch(&args.watch, None)?;
    if super::interrupted()?.load(Ordering::Relaxed) {
        bail!("interrupted; nothing was changed");
    }
    let findings = if args.undo { Vec::new() } else { wanted(&args.findings, &before)? };
    let verb = if args.undo { "undo" } else { "apply" };
    let mut said = String::new();
    let mut done: Vec<Action> = Vec::new();
    for action in actions {
        match tune(&reach, verb, action) {
            Ok(words) => said += &words,
            Err(error) => {
                // All or nothing; the script has undone its own half.
                for action in done.into_iter().rev().filter(|_| !args.undo) {
                    said += &tune(&reach, "undo", action).unwrap_or_else(|error| format!("{error:#}\n"));
                }
                eprint!("{said}");
                return Err(error);
            }
        }
        done.push(action);
    }
    let after = watch(&args.watch, None)?;
    let rate = |report: &Report| report.exits as f64 / report.seconds.max(1e-9);
    let outcomes = findings.iter().map(|finding| Outcome {
        finding: finding.id.clone(),
        before: finding.rate_in(&before),
        after: finding.rate_in(&after),
    });
    let applied = Applied { outcomes: outcomes.collect(), before: rate(&before), after: rate(&after), said };
    super::super::print(json, &applied, |applied| {
        let mut text = applied.said.clone();
        text += &format!("\n{:<24} {:>12} {:>12}\n", "exits a second", "before", "after");
        for outcome in &applied.outcomes {
            text += &format!("{:<24} {:>12.1} {:>12.1}\n", outcome.finding, outcome.before, outcome.after);
        }
        text + &format!("{:<24} {:>12.1} {:>12.1}\n", "all", applied.before, applied.after)
    })
}

/// What is to be done; an error for what is not safe or not known.
fn actions(findings: &[String]) -> Result<Vec<Action>> {
    let mut actions = Vec::new();
    for id in findings {
        let Some(action) = action_of(id) else {
            bail!(
                "{id} is nothing that can be applied from here; pm-timer, hpet, serial and scheduler are. \
                 `ioplane exits advise` says what to do about others"
            );
        };
        if !actions.contains(&action) {
            actions.push(action);
        }
    }
    Ok(actions)
}

/// The findings that were named, if they are there.
fn wanted(ids: &[String], report: &Report) -> Result<Vec<Finding>> {
    let find = |id: &String| {
        let found = report.findings.iter().find(|finding| finding.id == *id);
        found.cloned().with_context(|| {
            let present: Vec<&str> = report.findings.iter().map(|finding| finding.id.as_str()).collect();
            format!("{id} is not among the findings now ({}); nothing was changed", present.join(", "))
        })
    };
    ids.iter().map(find).collect()
}

/// Runs the script in the guest.
fn tune(reach: &Reach, verb: &str, action: Action) -> Result<String> {
    let done = reach.run(TUNE, [verb, action.word()])?;
    if done.status != 0 {
        let word = action.word();
        bail!("{verb} {word} in the guest ended with {}: {}{}", done.status, done.said, done.error.trim());
    }
    Ok(done.said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_applied_is_refused_before_anything_happens() {
        let list = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(actions(&list(&["pm-timer", "hpet"])).unwrap(), [Action::Clocksource]);
        assert!(actions(&list(&["pm-timer", "ide"])).unwrap_err().to_string().contains("ide is nothing"));
    }
}
