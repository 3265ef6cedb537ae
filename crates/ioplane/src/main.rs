//! `ioplane`, the one command: the command line, the daemon, and what needs this host itself.
//!
//! ```text
//!   main --> ioplane_cli::perform --HTTP over a unix socket--> a daemon
//!                  \--Host--> serve, check: ioplane_daemon | exits: ioplane_exits | run, exits cluster: ioplane_vcpu | move: ioplane_qemu | doctor, inventory, model, identity: this host
//! ```
//!
//! Must not know: rings, guest memory, protocols of hosts.
#![forbid(unsafe_code)]

mod check;
mod doctor;
mod exits;
mod identity;
mod inventory;
mod log;
mod model;
mod move_function;
mod move_prepare;
mod move_vm;
mod preload;
mod vm_monitor;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use ioplane_cli::args::{
    ExitsArgs, IdentityArgs, ModelCommand, MoveAttend, MovePrepare, MoveRecover, MoveVm, PciMove, RunArgs,
};
use ioplane_cli::client::Client;
use ioplane_cli::output::{CommandError, complain};
use ioplane_cli::{Host, perform};
use ioplane_daemon::config::Problems;
use ioplane_daemon::{Invocation, Refusal};

/// The host that this process runs on.
struct ThisHost;

impl Host for ThisHost {
    fn serve(&self, config: &Path, socket: Option<PathBuf>, inherit: bool, log: &str) -> Result<()> {
        log::start(log)?;
        let invocation = Invocation { config: config.to_owned(), socket, log: log.to_owned() };
        ioplane_daemon::serve(invocation, inherit).map_err(coded)
    }

    fn check(&self, config: &Path, json: bool) -> Result<ExitCode> {
        check::run(config, json)
    }

    fn doctor(&self, client: Option<&Client>, json: bool) -> Result<ExitCode> {
        doctor::run(client, json)
    }

    fn exits(&self, args: &ExitsArgs, json: bool) -> Result<ExitCode> {
        exits::run(args, json)
    }

    fn move_function(&self, client: &Client, args: &PciMove, json: bool) -> Result<()> {
        move_function::run(client, args, json)
    }

    fn move_vm(&self, client: &Client, args: &MoveVm, json: bool) -> Result<()> {
        move_vm::run(client, args, json)
    }

    fn move_attend(&self, client: &Client, args: &MoveAttend, json: bool) -> Result<()> {
        move_vm::attend(client, args, json)
    }

    fn move_recover(&self, client: &Client, args: &MoveRecover, json: bool) -> Result<()> {
        move_vm::recover(client, args, json)
    }

    fn move_prepare(&self, client: &Client, args: &MovePrepare, json: bool) -> Result<()> {
        move_prepare::run(client, args, json)
    }

    fn run(&self, args: &RunArgs) -> Result<ExitCode> {
        preload::run(args)
    }

    fn model(&self, command: ModelCommand, json: bool) -> Result<()> {
        model::run(command, json)
    }

    fn identity(&self, args: &IdentityArgs, json: bool) -> Result<ExitCode> {
        identity::run(args, json)
    }

    fn functions(&self, client: &Client, json: bool) -> Result<()> {
        inventory::run(client, json)
    }
}

/// Why a daemon does not start, with the code and the remedy of what it refuses.
fn coded(error: anyhow::Error) -> anyhow::Error {
    let Some(Refusal { code, remedy, .. }) = error.downcast_ref() else { return error };
    CommandError::new(*code, format!("{error:#}"), remedy).into()
}

fn main() -> ExitCode {
    let cli = match ioplane_cli::parse(std::env::args_os()) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let json = cli.json;
    perform(cli, &ThisHost).unwrap_or_else(|error| match error.downcast_ref::<Problems>() {
        Some(problems) => check::refused(problems, json),
        None => {
            complain(&error, json);
            ExitCode::FAILURE
        }
    })
}
