//! Measurements against peers. `script/bench NAME [--json]` is the door; each NAME is a module.
//!
//! Nothing here asserts a time. What is asserted is that the bytes were right: a fast wrong backend fails.
#![allow(missing_docs, reason = "a program: a comment says what a name does not")]

mod baseline;
mod control;
mod core;
mod daemon;
mod elvis;
mod exitless;
mod gaps;
mod guest;
mod lan;
mod measured;
mod mode;
mod neighbour;
mod network;
mod remote;
mod served;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use ioplane_figures::goals;

use baseline::{Pair, Paired};

#[derive(Parser)]
#[command(name = "bench", about = "Measures ioplane against its peers")]
struct Command {
    #[command(subcommand)]
    name: Name,
}

#[derive(Subcommand)]
enum Name {
    /// virtio-blk served by polling, against qemu-storage-daemon: one core each, same front end, same backing.
    Exitless(exitless::Options),
    /// virtio-net through the switch, against DPDK's testpmd: one core each, same front end on both sides.
    Network(network::Options),
    /// The paper's evaluation: 1 to 7 guests on one I/O core, notification against polling.
    Elvis(elvis::Options),
    /// What a guest feels of a hostile neighbour on the same I/O core: the p99 of its reads, quiet and hostile in turns.
    Neighbour(neighbour::Options),
    /// I/O cores: idle queues, first requests, slow loads, square waves, limits, moves, greedy neighbours, a file against qemu-storage-daemon.
    Core(core::Options),
    /// A disk in another daemon's memory, imported over NBD: against a disk of the same daemon, and against qemu-nbd.
    Remote(remote::Options),
    /// Judges the JSON of runs by the table of goals; fails when one falls below its floor.
    Judge {
        /// What `script/bench NAME --json` printed; of any benchmark
        #[arg(required = true)]
        runs: Vec<PathBuf>,
    },
    /// Prints the table of goals beside the recorded runs.
    Goals {
        /// Write docs/measurements/goals.md
        #[arg(long)]
        write: bool,
        /// Record these runs first: docs/measurements/results/NAME.json
        #[arg(long)]
        record: Vec<PathBuf>,
    },
    /// Serves NICs, for the measurements above.
    #[command(hide = true)]
    Lan(lan::Options),
}

fn main() -> Result<ExitCode> {
    let command = Command::parse();
    if let Some(code) = compare(&command.name)? {
        return Ok(code);
    }
    measure(command.name)?;
    Ok(ExitCode::SUCCESS)
}

/// What `--baseline` asks for, if it is given.
fn compare(name: &Name) -> Result<Option<ExitCode>> {
    const DAEMON: [&str; 2] = ["serve", "--help"];
    const LAN: [&str; 2] = ["lan", "--help"];
    let this = std::env::current_exe;
    let code = match name {
        Name::Exitless(options) if options.against.baseline().is_some() => {
            let run = |pair: &Pair<'_>| exitless::pair(options, pair);
            let paired = Paired { name: "exitless", serves: DAEMON, after: served::ioplane()?, run: &run };
            options.against.compare(options.json, &paired)
        }
        Name::Network(options) if options.against.baseline().is_some() => {
            let run = |pair: &Pair<'_>| network::pair(options, pair);
            let paired = Paired { name: "network", serves: LAN, after: this()?, run: &run };
            options.against.compare(options.json, &paired)
        }
        Name::Elvis(options) if options.against.baseline().is_some() => {
            let run = |pair: &Pair<'_>| elvis::pair(options, pair);
            let paired = Paired { name: "elvis", serves: LAN, after: this()?, run: &run };
            options.against.compare(options.json, &paired)
        }
        Name::Neighbour(options) if options.against.baseline().is_some() => {
            let paired = Paired {
                name: "neighbour",
                serves: DAEMON,
                after: served::ioplane()?,
                run: &neighbour::pair,
            };
            options.against.compare(options.json, &paired)
        }
        _ => return Ok(None),
    };
    Ok(Some(code))
}

fn measure(name: Name) -> Result<()> {
    let (json, value, table) = match name {
        Name::Exitless(options) => {
            let report = exitless::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Network(options) => {
            let report = network::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Elvis(options) => {
            if let Some(table) = options.page()? {
                print!("{table}");
                return Ok(());
            }
            let report = elvis::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Neighbour(options) => {
            let report = neighbour::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Core(options) => {
            let report = core::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Remote(options) => {
            let report = remote::run(&options)?;
            (options.json, report.json(), report.table())
        }
        Name::Judge { runs } => return judge(&runs),
        Name::Goals { write, record } => return page(write, &record),
        Name::Lan(options) => return lan::run(&options),
    };
    if json {
        println!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        print!("{table}");
    }
    Ok(())
}

fn judge(runs: &[PathBuf]) -> Result<()> {
    let mut fallen = 0;
    for run in runs {
        let text = std::fs::read_to_string(run).with_context(|| run.display().to_string())?;
        let report = serde_json::from_str(&text).with_context(|| run.display().to_string())?;
        for verdict in goals::judge(&report).with_context(|| run.display().to_string())? {
            println!("{verdict}");
            fallen += usize::from(!verdict.kept());
        }
    }
    ensure!(fallen == 0, "{fallen} figures are below their floors");
    Ok(())
}

fn page(write: bool, record: &[PathBuf]) -> Result<()> {
    let docs = PathBuf::from("docs/measurements");
    let results = docs.join("results");
    for run in record {
        let text = std::fs::read_to_string(run).with_context(|| run.display().to_string())?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        goals::judge(&report)?;
        let name = report["name"].as_str().context("a run without a name")?;
        std::fs::create_dir_all(&results)?;
        std::fs::write(
            results.join(name).with_extension("json"),
            serde_json::to_string_pretty(&report)? + "\n",
        )?;
    }
    let page = goals::page(&goals::recorded(&results)?);
    if write {
        std::fs::write(docs.join("goals.md"), page)?;
    } else {
        print!("{page}");
    }
    Ok(())
}
