//! `swap`.

use std::sync::Arc;

use anyhow::Result;
use hyper::Method;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DiskReport, SwapReport, SwapWord};
use ioplane_api::request::SwapForm;
use ioplane_api::size::Size;

use super::follow::{LongWork, follow};
use super::{absolute, address, ask, get, working};
use crate::args::{SwapArgs, SwapTarget};
use crate::client::Client;
use crate::output::{CommandError, hint, print_done};
use crate::progress::interrupted;

pub fn run(client: &Client, args: SwapArgs, json: bool) -> Result<()> {
    let path = format!("{}/swap", address(&args.name));
    let cancel = || -> Result<DiskReport> {
        working("waiting for a quiet moment", || ask(client, Method::DELETE, &path, None::<&()>))
    };
    let line = |swap: &SwapReport| swap.words() + "\n";
    let Some(to) = &args.to else {
        let disk = cancel()?;
        return print_done(json, &swap_of(&disk)?, line);
    };
    let form = form(client, &args, to)?;
    let interrupted = if args.detach { Arc::default() } else { interrupted()? };
    let disk: DiskReport =
        working("opening the new backing", || ask(client, Method::POST, &path, Some(&form)))?;
    if args.detach {
        return print_done(json, &swap_of(&disk)?, line);
    }
    let swap: SwapReport = follow(client, &args.name, &interrupted, &cancel)?;
    match swap.state {
        SwapWord::Failed => {
            let remedy = swap.remedy.clone().unwrap_or_default();
            Err(CommandError::new(Code::Failed, format!("the swap {}", swap.words()), remedy).into())
        }
        SwapWord::Cancelled => {
            let error = format!("the swap {}", swap.words());
            let remedy = format!("the disk goes on with {}; begin anew to swap it", swap.from);
            Err(CommandError::new(Code::Conflict, error, remedy).into())
        }
        _ => {
            if disk.origin == "config" && !json {
                hint("to keep this after a reboot of the host, write it into the configuration as well");
            }
            print_done(json, &swap, line)
        }
    }
}

fn form(client: &Client, args: &SwapArgs, to: &SwapTarget) -> Result<SwapForm> {
    let mut form = SwapForm {
        rate: args.rate,
        hold: args.hold,
        overwrite: args.overwrite,
        direct: args.direct,
        engine: args.engine,
        timeout_s: args.timeout_s,
        ..SwapForm::default()
    };
    match to {
        SwapTarget::Path(path) => form.path = Some(absolute(path)?),
        SwapTarget::Remote(uri) => form.remote = Some(uri.clone()),
        SwapTarget::Memory => {
            let disk: DiskReport = get(client, &address(&args.name))?;
            form.memory = Some(Size(disk.size));
        }
    }
    Ok(form)
}

fn swap_of(disk: &DiskReport) -> Result<SwapReport> {
    let none = || CommandError::new(Code::BadAnswer, "the daemon tells of no swap", "is it another version?");
    Ok(disk.swap.clone().ok_or_else(none)?)
}

impl LongWork for SwapReport {
    fn of(disk: &DiskReport) -> Result<Self> {
        swap_of(disk)
    }

    fn is_under_way(&self) -> bool {
        self.state.is_under_way()
    }

    fn progress(&self) -> (u64, u64, String) {
        let held = self.hold_words().map_or(String::new(), |words| format!(", {words}"));
        let beside = format!("{} {}/s{held}", self.state.words(), Size(self.bytes_per_s));
        (self.bytes.saturating_sub(self.left), self.bytes, beside)
    }
}
