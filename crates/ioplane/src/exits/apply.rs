//! `ioplane exits apply`: a small script does in the guest what a finding suggests, and can undo it.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use ioplane_cli::args::{ApplyArgs, ReachArgs};
use ioplane_cli::output::print;
use ioplane_exits::{Action, Finding, Report, action_of};
use serde::Serialize;

use super::reach::Reach;
use super::usage;
use super::work::{self, Harm, Measured, Rate, TUNE, Unit, UnitRow, measure};

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
    /// Work that the guest got done, and exits per unit of it.
    work: Vec<UnitRow>,
    /// The unit by which it is judged whether the change did harm; nothing where the guest did too little work to tell.
    judged_by: Option<Unit>,
    harm: Option<Harm>,
    /// What the script said.
    said: String,
}

/// Applies or undoes, and measures before and after.
pub(super) fn run(args: &ApplyArgs, json: bool) -> Result<()> {
    let actions = actions(&args.findings)?;
    let reach = Reach::new(&args.reach, &args.watch.which)?;
    let before = measure(&args.watch, &reach).context("nothing was changed")?;
    if super::interrupted()?.load(Ordering::Relaxed) {
        bail!("interrupted; nothing was changed");
    }
    let findings = if args.undo { Vec::new() } else { wanted(&args.findings, &before.report)? };
    let verb = if args.undo { "undo" } else { "apply" };
    let said = perform(&reach, verb, &actions)?;
    let after = measure(&args.watch, &reach)
        .with_context(|| format!("done, but what it is worth could not be measured:\n{said}"))?;
    let applied = Applied::new(args, &actions, &findings, &before, &after, said);
    print(json, &applied, Applied::to_string)
}

impl Applied {
    fn new(
        args: &ApplyArgs,
        actions: &[Action],
        findings: &[Finding],
        before: &Measured,
        after: &Measured,
        said: String,
    ) -> Applied {
        let rate = |report: &Report| report.exits as f64 / report.seconds.max(1e-9);
        let outcomes = findings.iter().map(|finding| Outcome {
            finding: finding.id.clone(),
            before: finding.rate_in(&before.report),
            after: finding.rate_in(&after.report),
        });
        let work = work::rows((&before.work, &before.report), (&after.work, &after.report));
        let judged = work::judged(&work, actions);
        let judged_by = judged.map(|row| row.unit);
        // Who undoes a change wants what was before, whatever it costs.
        let harm = judged.filter(|_| !args.undo).and_then(|row| work::harm(row, || undo(args)));
        Applied {
            outcomes: outcomes.collect(),
            before: rate(&before.report),
            after: rate(&after.report),
            work,
            judged_by,
            harm,
            said,
        }
    }
}

impl fmt::Display for Applied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = |f: &mut fmt::Formatter<'_>, name: &str, before: Option<f64>, after: Option<f64>| {
            let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
            writeln!(f, "{name:<24} {:>12} {:>12}", number(before), number(after))
        };
        writeln!(f, "{}\n{:<24} {:>12} {:>12}", self.said, "exits a second", "before", "after")?;
        for outcome in &self.outcomes {
            line(f, &outcome.finding, Some(outcome.before), Some(outcome.after))?;
        }
        line(f, "all", Some(self.before), Some(self.after))?;
        for UnitRow { unit, before, after } in &self.work {
            let each = |rate: &Option<Rate>| rate.map(|rate| rate.exits_each);
            line(f, &format!("per {}", unit.word()), each(before), each(after))?;
            let rate = |rate: &Option<Rate>| rate.map(|rate| rate.rate);
            line(f, &format!("{} a second", unit.words()), rate(before), rate(after))?;
        }
        match (&self.harm, self.judged_by) {
            (Some(harm), _) => writeln!(f, "\n{harm}"),
            (None, Some(_)) => Ok(()),
            (None, None) => writeln!(
                f,
                "\nnote: the guest did too little work that this change concerns to say whether each piece of it takes fewer exits now"
            ),
        }
    }
}

/// The command that takes a change back.
fn undo(args: &ApplyArgs) -> String {
    let mut words: Vec<String> = ["ioplane", "exits", "apply"].map(String::from).into();
    words.extend(args.findings.iter().cloned());
    words.push("--undo".into());
    let ReachArgs { ssh, ssh_config, agent, directory, via } = &args.reach;
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
    for (option, value) in [
        ("--vm", args.watch.which.vm.clone()),
        ("--libvirt", args.watch.which.libvirt.clone()),
        ("--ssh", ssh.clone()),
        ("--ssh-config", path(ssh_config)),
        ("--agent", path(agent)),
        ("--directory", path(directory)),
        ("--via", via.clone()),
    ] {
        words.extend(value.into_iter().flat_map(|value| [option.to_owned(), quoted(&value)]));
    }
    words.join(" ")
}

/// As a shell takes it for one word.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "@%+=:,./_-".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
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
    use std::time::Duration;

    use clap::Parser;
    use ioplane_exits::{Names, Profile, Subject, WatchCounts};
    use ioplane_kvmstat::Vm;
    use serde_json::{Value, json};

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

    /// Two seconds with so many exits.
    fn measured(exits: u64, counts: [Option<u64>; 3]) -> Measured {
        let (name, program) = ("web".into(), "qemu".into());
        let vm = Vm { pid: 1, name, program, vcpus: 1, vm_fds: Vec::new(), command: Vec::new() };
        let subject =
            Subject { vm: &vm, time: Duration::from_secs(2), seen: WatchCounts::default(), sample: 1 };
        let mut report = Report::new(subject, &Profile::default(), None, &Names::default());
        report.exits = exits;
        Measured { report, work: super::work::tests::work(counts) }
    }

    fn args(words: &[&str]) -> ApplyArgs {
        let words = ["ioplane", "exits", "apply"].iter().chain(words);
        let ioplane_cli::args::Command::Exits(args) =
            ioplane_cli::args::Cli::try_parse_from(words).unwrap().command
        else {
            panic!("exits")
        };
        let Some(ioplane_cli::args::ExitsCommand::Apply(args)) = args.command else { panic!("apply") };
        args
    }

    fn applied(words: &[&str], action: Action, before: Measured, after: Measured) -> (Value, String) {
        let applied = Applied::new(&args(words), &[action], &[], &before, &after, "said\n".into());
        (serde_json::to_value(&applied).unwrap(), applied.to_string())
    }

    /// Half as many packets at two thirds of the exits: fewer a second, and more for each packet.
    #[test]
    fn harm_is_told_per_unit_of_work_and_how_to_undo_it() {
        let busy = |exits, packets| measured(exits, [Some(10), Some(packets), Some(100_000)]);
        let words = ["napi", "--vm", "web 1", "--ssh", "root@web"];
        let (value, text) = applied(&words, Action::Napi, busy(6000, 2000), busy(4000, 1000));
        let undo = "ioplane exits apply napi --undo --vm 'web 1' --ssh root@web";
        let harm = &value["harm"];
        assert_eq!((&harm["unit"], &harm["undo"]), (&"packet".into(), &undo.into()), "{value:#}");
        assert!((harm["percent"].as_f64().unwrap() - 100.0 / 3.0).abs() < 1e-9, "{value:#}");
        assert!(text.contains(&format!("took 33 % more exits per packet: undo it with `{undo}`")), "{text}");
        // Ten disk requests are no work.
        let units: Vec<_> = value["work"].as_array().unwrap().iter().map(|row| &row["unit"]).collect();
        assert_eq!(units, ["packet", "context-switch"]);
        assert_eq!(value["work"][0]["before"], json!({"count": 2000, "rate": 1000.0, "exits_each": 3.0}));
        assert!(text.contains("per packet                        3.0          4.0"), "{text}");
        assert!(text.contains("packets a second               1000.0        500.0"), "{text}");
    }

    /// A profile has the report's own keys, and the work beside them.
    #[test]
    fn a_profile_has_exits_per_unit_of_work() {
        let busy = measured(6000, [Some(10), Some(2000), None]);
        let profiled = serde_json::to_value(busy.profiled()).unwrap();
        assert_eq!((&profiled["exits"], &profiled["vm"]), (&json!(6000), &json!("web")));
        let packets = json!([{"unit": "packet", "count": 2000, "rate": 1000.0, "exits_each": 3.0}]);
        assert_eq!(profiled["work"], packets);
        let text = busy.profiled().to_string();
        assert!(text.starts_with("web (qemu") && text.contains("1000.0         3.00  packet"), "{text}");
        let idle = measured(6000, [Some(10), None, None]).profiled().to_string();
        assert!(idle.contains("too little to divide exits by"), "{idle}");
    }

    #[test]
    fn what_is_no_harm() {
        let of = |words: &[&str], action, before, after| {
            let (value, text) = applied(words, action, before, after);
            assert_eq!(value["harm"], Value::Null, "{text}");
            (value["judged_by"].clone(), text)
        };
        let packets = |exits, packets| measured(exits, [None, Some(packets), None]);
        let (unit, text) =
            of(&["napi", "--ssh", "a"], Action::Napi, packets(6000, 2000), packets(6500, 2000));
        assert!(unit == "packet" && !text.contains("harm") && !text.contains("too little"), "{text}");
        // The guest wants what was before, whatever it costs.
        of(&["napi", "--undo", "--ssh", "a"], Action::Napi, packets(10, 2000), packets(9000, 2000));
        // A scheduler is for disks, and there were no requests: the packets say nothing of it.
        let (unit, text) =
            of(&["scheduler", "--ssh", "a"], Action::Scheduler, packets(10, 2000), packets(90, 2000));
        assert!(unit == Value::Null && text.contains("too little work"), "{text}");
        // A clock is for everything: the first unit that both have.
        let (before, after) =
            (measured(10, [Some(5), None, Some(900)]), measured(10, [Some(900), None, Some(900)]));
        assert_eq!(of(&["pm-timer", "--ssh", "a"], Action::Clocksource, before, after).0, "context-switch");
        // Nothing happened at all before.
        of(&["napi", "--ssh", "a"], Action::Napi, packets(0, 2000), packets(90, 2000));
    }

    #[test]
    fn the_way_back_is_a_command_for_a_shell() {
        let args = args(&["napi", "pm-timer", "--via", "a 'b' --"]);
        assert_eq!(undo(&args), r"ioplane exits apply napi pm-timer --undo --via 'a '\''b'\'' --'");
    }

    #[test]
    fn what_cannot_be_applied_is_refused_before_anything_happens() {
        let list = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(actions(&list(&["pm-timer", "hpet"])).unwrap(), [Action::Clocksource]);
        assert!(actions(&list(&["pm-timer", "ide"])).unwrap_err().to_string().contains("ide is nothing"));
    }
}
