//! `ioplane exits apply`: a small script does in the guest what a finding suggests, and can undo it.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use ioplane_cli::args::ApplyArgs;
use ioplane_cli::output::print;
use ioplane_exits::{Action, Finding, Report, action_of};
use serde::Serialize;

use super::reach::Reach;
use super::{usage, watch};

/// What runs in the guest.
const TUNE: &str = include_str!("../../../../guest/tune/tune.sh");

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
    let reach = Reach::new(&args.reach, args.watch.vm.as_deref())?;
    let before = watch(&args.watch, None)?;
    if super::interrupted()?.load(Ordering::Relaxed) {
        bail!("interrupted; nothing was changed");
    }
    let findings = if args.undo { Vec::new() } else { wanted(&args.findings, &before)? };
    let verb = if args.undo { "undo" } else { "apply" };
    let said = perform(&reach, verb, &actions)?;
    let after = watch(&args.watch, None)
        .with_context(|| format!("done, but what it is worth could not be measured:\n{said}"))?;
    let rate = |report: &Report| report.exits as f64 / report.seconds.max(1e-9);
    let outcomes = findings.iter().map(|finding| Outcome {
        finding: finding.id.clone(),
        before: finding.rate_in(&before),
        after: finding.rate_in(&after),
    });
    let applied = Applied { outcomes: outcomes.collect(), before: rate(&before), after: rate(&after), said };
    print(json, &applied, |applied| {
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
            bail!(usage(format!(
                "{id} is nothing that can be applied from here; pm-timer, hpet, serial, scheduler and napi are. \
                 `ioplane exits advise` says what to do about others"
            )));
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

/// All or nothing: what was applied before something failed is undone, and the error says how that went.
fn perform(reach: &Reach, verb: &str, actions: &[Action]) -> Result<String> {
    let mut said = String::new();
    for (number, action) in actions.iter().enumerate() {
        match tune(reach, verb, *action) {
            Ok(words) => said += &words,
            Err(error) if number == 0 => return Err(error),
            Err(error) => {
                // The script has undone its own half. What is undone stays so.
                for action in actions[..number].iter().rev().filter(|_| verb == "apply") {
                    said += &tune(reach, "undo", *action).unwrap_or_else(|error| format!("{error:#}\n"));
                }
                return Err(
                    error.context(format!("done before that:\n{said}{} cannot be done", action.word()))
                );
            }
        }
    }
    Ok(said)
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
    use std::fs;

    use super::*;

    /// The second cannot be done, and the first is as it was.
    #[test]
    fn all_or_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let at = |path: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        let (console, clock) =
            (at("proc/sys/kernel/printk"), at("sys/devices/system/clocksource/clocksource0/a"));
        fs::write(&console, "7\t4\t1\t7\n").unwrap();
        fs::write(clock.with_file_name("available_clocksource"), "acpi_pm\n").unwrap();
        let variable =
            |name: &str, path: &str| format!("IOPLANE_TUNE_{name}={}", folder.path().join(path).display());
        let guest =
            ["env".into(), variable("STATE", "run"), variable("SYS", "sys"), variable("PROC", "proc")];
        let reach = Reach::Command(guest.into());
        let error = perform(&reach, "apply", &[Action::Console, Action::Clocksource]).unwrap_err();
        let error = format!("{error:#}");
        for word in [
            "7\t4\t1\t7 -> 1",
            "back to 7\t4\t1\t7",
            "clocksource cannot be done",
            "neither kvm-clock nor tsc",
        ] {
            assert!(error.contains(word), "{word:?} in {error}");
        }
        assert_eq!(fs::read_to_string(&console).unwrap().trim(), "7\t4\t1\t7");
        assert!(perform(&reach, "apply", &[Action::Console]).unwrap().contains("-> 1"));
    }

    #[test]
    fn what_cannot_be_applied_is_refused_before_anything_happens() {
        let list = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(actions(&list(&["pm-timer", "hpet"])).unwrap(), [Action::Clocksource]);
        assert!(actions(&list(&["pm-timer", "ide"])).unwrap_err().to_string().contains("ide is nothing"));
    }
}
