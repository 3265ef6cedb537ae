//! `pci`.

mod watch;

use anyhow::{Context, Result};
use hyper::Method;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DoneReport, FunctionReport, MovedFunctionReport, QuiesceReport, StateFileV1};
use ioplane_api::request::{MoveFunctionForm, QuiesceForm};
use ioplane_api::spec::FunctionForm;

use super::{Host, address_of, ask, get, put, seen, show, working};
use crate::args::{PciCommand, PciMove};
use crate::client::Client;
use crate::output::{CommandError, print, print_done};

/// Largest file of `pci save`: twice what a device may save.
const STATE: u64 = 4 << 20;

fn address(name: &str) -> String {
    address_of("pci", name)
}

fn done(done: &DoneReport) -> String {
    done.done.join("\n") + "\n"
}

/// How a function is.
pub fn function(client: &Client, name: &str) -> Result<FunctionReport> {
    get(client, &address(name))
}

fn move_form(args: &PciMove, guest_stopped: bool) -> MoveFunctionForm {
    MoveFunctionForm {
        to: args.to,
        deadline_ms: args.deadline.as_millis() as u64,
        force: args.force,
        unsafe_interrupts: args.unsafe_interrupts,
        guest_stopped,
    }
}

/// Asks the daemon to put another function in the place of one, whose guest stands still or has a driver that cooperates.
pub fn exchange(client: &Client, args: &PciMove, guest_stopped: bool) -> Result<MovedFunctionReport> {
    ask(client, Method::POST, &format!("{}/move", address(&args.name)), Some(&move_form(args, guest_stopped)))
}

/// Asks it whether that could be done, before the guest is stopped for it.
pub fn check_exchange(client: &Client, args: &PciMove) -> Result<DoneReport> {
    let path = format!("{}/move/check", address(&args.name));
    ask(client, Method::POST, &path, Some(&move_form(args, false)))
}

/// Does what was typed. Listing what this host has needs no daemon.
pub fn run(client: &Client, command: PciCommand, json: bool, host: &impl Host) -> Result<()> {
    match command {
        PciCommand::List => host.functions(client, json),
        PciCommand::Add(add) => {
            let (path, form) =
                (address(&add.name), FunctionForm { socket: seen(add.form.socket)?, ..add.form });
            let function: FunctionReport =
                working("taking the function", || put(client, &path, &form, ("pci", &add.name)))?;
            print_done(json, &function, |function| show::functions(std::slice::from_ref(function)))
        }
        PciCommand::Remove { name, force } => {
            let path = format!("{}?force={force}", address(&name));
            let report: DoneReport = working("waiting for the function to become quiescent", || {
                ask(client, Method::DELETE, &path, None::<&()>)
            })?;
            print_done(json, &report, done)
        }
        PciCommand::Show { name } => {
            let function: FunctionReport = get(client, &address(&name))?;
            print(json, &function, show::function)
        }
        PciCommand::Watch(args) => watch::run(client, &args, json),
        PciCommand::Quiesce { name, deadline, or_resume } => {
            let form = QuiesceForm { deadline_ms: deadline.as_millis() as u64, or_resume };
            let path = format!("{}/quiesce", address(&name));
            let report: QuiesceReport = working("waiting for the function to become quiescent", || {
                ask(client, Method::POST, &path, Some(&form))
            })?;
            print_done(json, &report, show::quiesced)
        }
        PciCommand::Resume { name } => {
            let path = format!("{}/resume", address(&name));
            let report: DoneReport = ask(client, Method::POST, &path, None::<&()>)?;
            print_done(json, &report, done)
        }
        PciCommand::Reset { name } => {
            let path = format!("{}/reset", address(&name));
            let report: DoneReport =
                working("resetting the function", || ask(client, Method::POST, &path, None::<&()>))?;
            print_done(json, &report, done)
        }
        PciCommand::Move(args) => host.move_function(client, &args, json),
        PciCommand::Save { name, file, deadline } => {
            let form = QuiesceForm { deadline_ms: deadline.as_millis() as u64, or_resume: false };
            let path = format!("{}/save", address(&name));
            let state: StateFileV1 = working("waiting for the function to become quiescent", || {
                ask(client, Method::POST, &path, Some(&form))
            })?;
            let text = serde_json::to_string_pretty(&state)? + "\n";
            std::fs::write(&file, &text).with_context(|| format!("write {}", file.display()))?;
            let line = format!("{} bytes of {name}'s state are in {}", text.len(), file.display());
            print_done(json, &DoneReport { done: vec![line] }, done)
        }
        PciCommand::Load { name, file } => {
            let size = std::fs::metadata(&file).with_context(|| format!("read {}", file.display()))?.len();
            let remedy = "name a file of `ioplane pci save`";
            let unknown = |error: String| CommandError::new(Code::Invalid, error, remedy);
            if size > STATE {
                let error = format!("{}: {size} bytes are no saved state", file.display());
                return Err(unknown(error).into());
            }
            let text = std::fs::read(&file).with_context(|| format!("read {}", file.display()))?;
            let state: StateFileV1 = serde_json::from_slice(&text)
                .map_err(|error| unknown(format!("{} is no saved state: {error}", file.display())))?;
            let path = format!("{}/load", address(&name));
            let report: DoneReport = ask(client, Method::POST, &path, Some(&state))?;
            print_done(json, &report, done)
        }
    }
}
