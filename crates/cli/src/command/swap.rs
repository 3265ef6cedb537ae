//! `swap`.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::Method;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DiskReport, SwapReport, SwapWord};
use ioplane_api::request::SwapForm;
use ioplane_api::size::Size;

use super::{absolute, address, ask, get, working};
use crate::args::{SwapArgs, SwapTarget};
use crate::client::Client;
use crate::output::{CommandError, hint, print_done, quiet};

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

/// Becomes true by Ctrl-C, which ends this process no more: a swap would go on without anybody who looks at it.
fn interrupted() -> Result<Arc<AtomicBool>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut signal = {
        let _entered = runtime.enter();
        tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let noted = interrupted.clone();
    std::thread::spawn(move || {
        runtime.block_on(signal.recv());
        noted.store(true, Ordering::SeqCst);
    });
    Ok(interrupted)
}

/// Shows how far it is until it has ended. Ctrl-C cancels it; that the command line goes in another way does not.
fn follow(
    client: &Client,
    name: &str,
    interrupted: &AtomicBool,
    cancel: &dyn Fn() -> Result<DiskReport>,
) -> Result<SwapReport> {
    let shown = !quiet() && std::io::stderr().is_terminal();
    let bar = if shown { indicatif::ProgressBar::new(0) } else { indicatif::ProgressBar::hidden() };
    let style = "{wide_bar} {bytes}/{total_bytes} {msg}";
    bar.set_style(indicatif::ProgressStyle::with_template(style).context("the progress bar")?);
    loop {
        if interrupted.load(Ordering::SeqCst) {
            bar.finish_and_clear();
            return swap_of(&cancel()?);
        }
        let disk: DiskReport = client.get(&address(name))?;
        let swap = swap_of(&disk)?;
        if !swap.state.is_under_way() {
            bar.finish_and_clear();
            return Ok(swap);
        }
        bar.set_length(swap.bytes);
        bar.set_position(swap.bytes.saturating_sub(swap.left));
        bar.set_message(format!("{} {}/s", swap.state.words(), Size(swap.bytes_per_s)));
        std::thread::sleep(LOOK);
    }
}
