//! `ioplane-demo [--json]`: two stock guests run from disks that ioplane serves, first notified, then polled; every byte is
//! checked. `script/demo` builds and calls it.
//!
//! ```text
//!   Stage (daemon, four disks, two guests) --load, warm-up--> half notified --core mode polled, warm-up--> half polled
//!      '--> checks: verify, copy, kernel logs, the daemon's counts --> Outcome --> table or JSON
//! ```

mod half;
mod outcome;
mod show;
mod stage;

use anyhow::{Context, Result, bail};
use clap::Parser;
use ioplane_e2e::process::{end_all, ended};
use outcome::Outcome;
use show::Show;
use stage::Stage;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Boots two stock guests from disks of ioplane, loads them notified and then polled, checks every byte.
#[derive(Debug, Parser)]
#[command(name = "demo")]
struct Arguments {
    /// Print one JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
    /// Seconds of each measured half
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u64).range(2..=600))]
    seconds: u64,
}

/// How long the end of everything may take after a signal; then it is not waited for.
const LAST: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Err(error) = heed_signals() {
        eprintln!("demo: {error:#}");
        return ExitCode::FAILURE;
    }
    let show = Show::new();
    let outcome = run(&arguments, &show);
    show.end();
    match outcome {
        Ok(outcome) => {
            println!("{}", if arguments.json { outcome.json() } else { outcome.table() });
            for problem in &outcome.problems {
                eprintln!("demo: {problem}");
            }
            if outcome.verified { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(_) if ended() => {
            eprintln!("demo: interrupted; guests, daemon and disks are gone");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// After a signal all children are killed; then everything that waits for them fails, and drops what it made.
fn heed_signals() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let caught = |kind| -> Result<_> {
        let _entered = runtime.enter();
        signal(kind).context("heed signals")
    };
    let mut int = caught(SignalKind::interrupt())?;
    let mut term = caught(SignalKind::terminate())?;
    let mut hup = caught(SignalKind::hangup())?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            tokio::select! { _ = int.recv() => {}, _ = term.recv() => {}, _ = hup.recv() => {} }
        });
        end_all();
        std::thread::sleep(LAST);
        std::process::exit(130);
    });
    Ok(())
}

fn run(arguments: &Arguments, show: &Show) -> Result<Outcome> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "the demo needs root, for the guests' disks and the daemon's locked memory: run sudo script/demo"
        );
    }
    let stage = Stage::build(show)?;
    let loads = stage.start_loads(show)?;
    let names = stage::DATA;
    let notified = half::measure(&stage, &loads, "notified", arguments.seconds, &names, show)?;
    stage.switch("polled")?;
    let polled = half::measure(&stage, &loads, "polled", arguments.seconds, &names, show)?;
    let problems = stage.check(loads, show)?;
    let accelerator = stage.accelerator.clone();
    stage.end(show)?;
    Ok(Outcome { verified: problems.is_empty(), accelerator, notified, polled, problems })
}
