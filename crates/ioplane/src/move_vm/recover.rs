//! `ioplane move recover`: a move that was broken off is brought to its end, by what is written down of it at the daemon here.
//!
//! ```text
//!   gone is written down:   what is left here leaves --> `cont` there
//!   it is not:              the QEMU there ends --> functions, command registers, `cont` here
//! ```
//!
//! Both monitors are held meanwhile, which serve one client at a time: a move that goes on is not disturbed.

use std::path::{Path, PathBuf};

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DoneReport, FunctionReport, MoveStep, ReplayedFunctionReport, StatusReport};
use ioplane_api::request::MoveNoteForm;
use ioplane_cli::args::MoveRecover;
use ioplane_cli::client::{Client, Method};
use ioplane_cli::output::{CommandError, hint, print_done};
use ioplane_cli::progress::ignore_signals;
use ioplane_plain::plain;
use serde::Serialize;
use serde_json::json;

use super::functions::{Functions, STEPS, hold};
use super::journal::{self, Journal};
use super::monitor::Monitor;
use super::peer::Reached;
use super::{failed, refused};

/// What has become of it.
#[derive(Debug, Serialize)]
struct RecoverReport {
    /// Name of the VM.
    vm: String,
    /// `here` or `there`: who has the guest, and nobody else.
    owner: &'static str,
    /// The guest runs.
    running: bool,
    /// Its PCI functions.
    functions: Vec<String>,
    /// What is not as it was.
    troubles: Vec<String>,
}

fn shown(report: &RecoverReport) -> String {
    let RecoverReport { vm, owner, running, .. } = report;
    let at = if *owner == "here" { "here".to_owned() } else { "on the other host".to_owned() };
    format!("{vm} is {at}, and {}\n", if *running { "runs" } else { "is paused" })
}

/// Brings it to its end, or says why not: then it may be tried again.
pub fn run(client: &Client, args: &MoveRecover, json: bool) -> Result<()> {
    let vm = args.name.as_str();
    let here = Client::new(client.socket())?.with_patience(super::STEP);
    let note = journal::read(&here, vm)?.ok_or_else(|| {
        let error = format!("nothing is written down of a move of VM {vm}");
        CommandError::new(
            Code::NotFound,
            error,
            "it has come to its end, or was not begun; see both monitors",
        )
    })?;
    let status: StatusReport = here.get("/v1/status")?;
    ignore_signals()?;
    let by_hand = args.there.is_some() && args.qmp_there.is_some();
    let reached = (!by_hand).then(|| Reached::again(&here, vm, &note));
    let known = reached.as_ref().and_then(|reached| reached.as_ref().ok());
    let there = args.there.clone().or_else(|| known?.there.clone());
    let there = Client::new(&there.unwrap_or_else(|| note.there.clone()))?.with_patience(super::STEP);
    let far_place = args.qmp_there.clone().or_else(|| known?.qmp_there.clone());
    let far_place = far_place.unwrap_or_else(|| note.qmp_there.clone());
    let (reached, far) = match reached {
        Some(Err(error)) if args.qmp_there.is_none() => (None, Err(error)),
        reached => (reached.and_then(Result::ok), monitor(vm, &far_place)),
    };
    let report = match note.gone {
        true => {
            let far = far.map_err(|error| {
                let before = format!("the guest of VM {vm} is the other host's");
                super::with_remedy(error, &before, "do not let the QEMU here continue")
            })?;
            forward(vm, &here, &there, note, &status, far)?
        }
        false => {
            let near = args.qmp.clone().unwrap_or_else(|| PathBuf::from(&note.qmp));
            let near = monitor(vm, &near)?;
            back(vm, (&here, &there), note, &status, near, far, args.ended_there)?
        }
    };
    if let Some(reached) = reached.filter(|_| report.owner == "there") {
        reached.settled(&there);
    }
    for trouble in &report.troubles {
        hint(format!("not as it was before: {trouble}"));
    }
    print_done(json, &report, shown)
}

fn monitor(vm: &str, place: &Path) -> Result<Monitor> {
    let mut monitor = Monitor::connect(place)?;
    monitor.is_surely_of(vm)?;
    Ok(monitor)
}

/// The functions of the VM that a daemon has.
fn function<'a>(status: &'a StatusReport, name: &str) -> Option<&'a FunctionReport> {
    status.functions.iter().find(|function| function.name == name)
}

/// The guest is the other host's.
fn forward(
    vm: &str,
    here: &Client,
    there: &Client,
    note: MoveNoteForm,
    status: &StatusReport,
    mut far: Monitor,
) -> Result<RecoverReport> {
    let mut troubles = Vec::new();
    let step = |name: &str| function(status, name).and_then(|function| function.step);
    for one in note.functions.iter().filter(|one| step(&one.name) == Some(MoveStep::AtRest)) {
        let path = format!("/v1/pci/{}/leave", one.name);
        if let Err(error) = here.ask::<DoneReport>(Method::POST, &path, None::<&()>) {
            troubles
                .push(format!("PCI function {} here stands still, and is not reset: {error:#}", one.name));
        }
    }
    // It goes on there in any case, as with a cable that is unplugged.
    match there.get::<StatusReport>("/v1/status") {
        Ok(status) => {
            for one in &note.functions {
                troubles.extend(revived(there, &status, &one.name));
            }
        }
        Err(error) => troubles.push(format!("the daemon there: {error:#}")),
    }
    let state = far.state()?;
    if !matches!(state.as_str(), "running" | "paused") {
        return Err(failed(
            format!("the guest of VM {vm} is the other host's, and is {} there", plain(&state)),
            "see what the QEMU there says; do not let the one here continue",
        ));
    }
    // Whoever attended the move may have held them.
    let held = note.functions.first().map(|one| hold(there, &one.name, false));
    if let Some(Err(error)) = held {
        troubles.push(format!("the vCPUs there may be held: {error:#}"));
    }
    if note.running && state == "paused" {
        far.execute("cont", &json!({}))?;
    }
    let running = far.state()? == "running";
    let functions = note.functions.iter().map(|one| one.name.clone()).collect();
    Journal::found(here, vm, note).end()?;
    hint("the QEMU here has no guest any more: end it, and do not let it continue");
    Ok(RecoverReport { vm: vm.to_owned(), owner: "there", running, functions, troubles })
}

fn gone_with_its_daemon(name: &str, at: &str) -> String {
    format!(
        "PCI function {name} {at} is gone with its daemon, and the guest has none: unplug it, and plug it in again"
    )
}

/// A function there goes on, if it has not.
fn revived(there: &Client, status: &StatusReport, name: &str) -> Option<String> {
    let Some(function) = function(status, name).filter(|function| function.connected) else {
        return Some(gone_with_its_daemon(name, "there"));
    };
    if function.step != Some(MoveStep::Taken) {
        return None;
    }
    let replayed: Result<ReplayedFunctionReport> =
        there.ask(Method::POST, &format!("/v1/pci/{name}/replay"), Some(&STEPS));
    replayed.err().map(|error| format!("PCI function {name} there: {error:#}"))
}

/// The guest is still this host's.
fn back(
    vm: &str,
    (here, there): (&Client, &Client),
    note: MoveNoteForm,
    status: &StatusReport,
    mut near: Monitor,
    far: Result<Monitor>,
    ended_there: bool,
) -> Result<RecoverReport> {
    for one in &note.functions {
        let vmm = function(status, &one.name).and_then(|function| function.vm.as_ref());
        if let Some(vmm) = vmm.filter(|vmm| vmm.pid != note.pid) {
            return Err(refused(
                format!(
                    "PCI function {} is used by process {}, and the move was of process {}",
                    one.name, vmm.pid, note.pid
                ),
                "that VM has ended: nothing is left to be brought to its end",
            ));
        }
    }
    let (state, migration) = (near.state()?, near.migration()?);
    // All of the guest was sent, or may have been.
    let sent =
        matches!(state.as_str(), "postmigrate") || matches!(migration.as_str(), "completed" | "device");
    let far = match far {
        Ok(mut far) => {
            let state = far.state()?;
            if state == "running" {
                return Err(refused(
                    format!(
                        "VM {vm} runs on the other host, and nobody has written down that it is its: it is not let run here"
                    ),
                    "stop it there, if the guest is to go on here",
                ));
            }
            Some(far)
        }
        Err(_) if ended_there || !sent => None,
        Err(error) => {
            let error = super::with_remedy(
                error,
                &format!("all of the guest of VM {vm} was sent, and the QEMU there is not reached"),
                "see that it has ended, then say --ended-there",
            );
            return Err(error);
        }
    };
    let names: Vec<String> = note.functions.iter().map(|one| one.name.clone()).collect();
    let at_rest = |name: &str| {
        let step = function(status, name).and_then(|function| function.step);
        matches!(step, Some(MoveStep::AtRest))
    };
    let lost = |name: &&String| {
        function(status, name)
            .is_none_or(|function| !function.connected || function.step == Some(MoveStep::Lost))
    };
    let lost: Vec<String> =
        names.iter().filter(lost).map(|name| gone_with_its_daemon(name, "here")).collect();
    let running = note.running;
    let journal = Journal::found(here, vm, note);
    let mut functions = Functions::found(vm, journal, there, far, sent, at_rest);
    let mut troubles = functions.recover(&mut near)?;
    troubles.extend(lost);
    let now = near.state()?;
    if running && now != "running" {
        hint("the guest ran before, and is here, paused: `cont` by its monitor lets it go on");
    }
    if !troubles.is_empty() && now != "running" && running {
        return Err(failed(
            format!("VM {vm} is here, and does not run: {}", troubles.join("; ")),
            format!("see to it, and run it again: ioplane move recover {vm}"),
        ));
    }
    Ok(RecoverReport {
        vm: vm.to_owned(),
        owner: "here",
        running: now == "running",
        functions: names,
        troubles,
    })
}
