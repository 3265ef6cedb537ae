//! `swap`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Result;
use hyper::Method;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DiskReport, SwapReport, SwapWord};
use ioplane_api::request::SwapForm;
use ioplane_api::size::Size;

use super::{absolute, address, ask, get, working};
use crate::args::{SwapArgs, SwapTarget};
use crate::client::Client;
use crate::output::{CommandError, hint, print_done};
use crate::progress::{ByteBar, interrupted};

/// Time between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(200);

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
    let swap = follow(client, &args.name, &interrupted, &cancel)?;
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

/// Shows how far it is until it has ended. Ctrl-C cancels it; that the command line goes in another way does not.
fn follow(
    client: &Client,
    name: &str,
    interrupted: &AtomicBool,
    cancel: &dyn Fn() -> Result<DiskReport>,
) -> Result<SwapReport> {
    let bar = ByteBar::new()?;
    loop {
        if interrupted.load(Ordering::SeqCst) {
            bar.clear();
            return swap_of(&cancel()?);
        }
        let disk: DiskReport = client.get(&address(name))?;
        let swap = swap_of(&disk)?;
        if !swap.state.is_under_way() {
            bar.clear();
            return Ok(swap);
        }
        let words = format!("{} {}/s", swap.state.words(), Size(swap.bytes_per_s));
        bar.show(swap.bytes.saturating_sub(swap.left), swap.bytes, words);
        std::thread::sleep(LOOK);
    }
}
