//! `ioplane-demo [--json] [--exits | --remote]`: two stock guests run from disks that ioplane serves and exchange TCP over its switch, first
//! notified, then polled; every byte is checked. `script/demo` builds and calls it.
//!
//! ```text
//!   Stage (daemon, four disks, switch, two NICs, two guests)
//!      notified:  TCP both ways --loads--> warm-up, disks
//!                                            | core mode polled, while they run
//!      polled:    TCP both ways <--check-- warm-up, disks
//!      '--> kernel logs, the daemon's counts --> Outcome --> table or JSON
//! ```
//!
//! With `--exits` it shows what clustering saves: see [`exits`]; with `--remote` a disk of another host: see [`remote`].

mod exits;
mod half;
mod network;
mod outcome;
mod remote;
mod show;
mod stage;
mod tally;

use anyhow::{Context, Result, bail};
use clap::Parser;
use ioplane_e2e::process::{end_all, ended};
use outcome::{Network, Outcome};
use show::Show;
use stage::Stage;
use std::process::ExitCode;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Boots two stock guests from disks of ioplane, which load them and exchange TCP over its switch, notified and then polled;
/// checks every byte.
#[derive(Debug, Parser)]
#[command(name = "demo")]
struct Arguments {
    /// Print one JSON object on standard output instead of the table
    #[arg(long)]
    json: bool,
    /// Show exit clustering instead: a stock VM without and with `ioplane run`, its exits by name, its own timing
    #[arg(long)]
    exits: bool,
    /// Show a disk of another host instead: its daemon is killed and the cable pulled while a guest uses it
    #[arg(long, conflicts_with = "exits")]
    remote: bool,
    /// Seconds that the disks are measured in each half; the network takes a third of that more
    #[arg(long, value_name = "N", conflicts_with_all = ["exits", "remote"], default_value_t = 15, value_parser = clap::value_parser!(u64).range(2..=600))]
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
    let shown = run(&arguments, &show);
    show.end();
    match shown {
        Ok((text, problems)) => {
            println!("{text}");
            for problem in &problems {
                eprintln!("demo: {problem}");
            }
            if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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

/// What is printed at the end, and what was wrong.
fn run(arguments: &Arguments, show: &Show) -> Result<(String, Vec<String>)> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "the demo needs root, for the guests' disks and the daemon's locked memory: run sudo script/demo"
        );
    }
    if arguments.exits {
        let outcome = exits::run(show)?;
        let text = if arguments.json { outcome.json() } else { outcome.table() };
        return Ok((text, outcome.problems));
    }
    if arguments.remote {
        let outcome = remote::run(show)?;
        let text = if arguments.json { outcome.json() } else { outcome.table() };
        return Ok((text, outcome.problems));
    }
    let outcome = disks_and_network(arguments, show)?;
    Ok((if arguments.json { outcome.json() } else { outcome.table() }, outcome.problems))
}

fn disks_and_network(arguments: &Arguments, show: &Show) -> Result<Outcome> {
    let stage = Stage::build(show)?;
    let ends = stage.connect(show)?;
    let (seconds, stretch) = (arguments.seconds, arguments.seconds.div_ceil(3));
    let exchange = |mode, port| network::measure(&stage, &ends, mode, port, stretch, show);
    // While the disks are loaded, a translated guest would have no time for it.
    let first = exchange("notified", 4000)?;
    let loads = stage.start_loads(show)?;
    let notified = half::measure(&stage, &loads, "notified", seconds, show)?;
    stage.switch("polled")?;
    let polled = half::measure(&stage, &loads, "polled", seconds, show)?;
    let mut problems = stage.check_disks(loads, show)?;
    let second = exchange("polled", 4010)?;
    problems.extend([first.wrong.as_slice(), &second.wrong].concat());
    problems.extend(stage.complaints()?);
    let accelerator = stage.accelerator.clone();
    stage.end(show)?;
    let network = Network { notified: first, polled: second };
    Ok(Outcome { verified: problems.is_empty(), accelerator, notified, polled, network, problems })
}
