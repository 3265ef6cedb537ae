//! `ioplane-elvis [--json] [--guests N] [--seconds S]`: the counts of the ELVIS paper's evaluation with Linux guests.
//!
//! ```text
//!   guest 1 .. N: 64-byte TCP writes, or UDP request-response --> switch --> TAP --> the host's kernel in a namespace
//!   notified, then polled: frames, kicks and interrupts, from the daemon's own counts
//! ```
//!
//! Where guests are emulated the counts are what they would be elsewhere for the same pace, and times are not.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ioplane_e2e::exchange::{End, Passage};
use ioplane_e2e::protocol::{Command, Requests};
use ioplane_e2e::stage::{MINUTE, Stage, play};
use ioplane_e2e::status::Frames;
use ioplane_e2e::uplink::{HOST_MAC, Host};
use ioplane_e2e::{Accelerator, Agent, Version, Vm, network};
use ioplane_figures::report::envelope_of;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Ports of the host's ends; a guest's number is added.
const STREAM: u16 = 5000;
const ECHO: u16 = 6000;

/// Counts kicks and interrupts of Linux guests, notified and polled.
#[derive(Parser)]
struct Options {
    /// Print one JSON object in place of the table
    #[arg(long)]
    json: bool,
    /// Most guests
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u16).range(1..=14))]
    guests: u16,
    /// Seconds of each row
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
}

/// One load with one number of guests in one mode.
#[derive(Serialize)]
struct Row {
    load: &'static str,
    guests: u16,
    mode: &'static str,
    frames_per_s: f64,
    kicks_per_frame: f64,
    interrupts_per_frame: f64,
    /// Kicks and interrupts of a guest, a second: each an exit of a vCPU with hardware virtualization.
    notifications_per_guest_per_s: f64,
    mbit_per_s: Option<f64>,
    requests_per_s: Option<f64>,
    p50_us: Option<u64>,
    p99_us: Option<u64>,
}

#[derive(Serialize)]
struct Report {
    accelerator: &'static str,
    seconds: f64,
    rows: Vec<Row>,
}

impl Report {
    fn table(&self) -> String {
        let mut text = String::from(
            "| load | guests | core | frames/s | kicks/frame | interrupts/frame | both, a guest and second | Mbit/s | \
             requests/s | p50 us | p99 us |\n|---|---|---|---|---|---|---|---|---|---|---|\n",
        );
        let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.1}"));
        let us = |value: Option<u64>| value.map_or(String::new(), |value| value.to_string());
        for row in &self.rows {
            text.push_str(&format!(
                "| {} | {} | {} | {:.0} | {:.3} | {:.3} | {:.0} | {} | {} | {} | {} |\n",
                row.load,
                row.guests,
                row.mode,
                row.frames_per_s,
                row.kicks_per_frame,
                row.interrupts_per_frame,
                row.notifications_per_guest_per_s,
                number(row.mbit_per_s),
                number(row.requests_per_s),
                us(row.p50_us),
                us(row.p99_us),
            ));
        }
        text
    }
}

fn main() -> Result<()> {
    let options = Options::parse();
    let mut report =
        Report { accelerator: Accelerator::detect().name(), seconds: options.seconds, rows: Vec::new() };
    play("", |stage| {
        let tap = format!("iop{}", std::process::id() % 100_000);
        stage.daemon.cli(&["switch", "add", "lan", "--uplink", &tap])?;
        let host = Host::new(&tap)?;
        let mut guests: Vec<Vm> = Vec::new();
        for count in 1..=options.guests {
            let name = format!("guest{count}");
            let root = format!("{name}-root");
            stage.add_root(&root)?;
            stage.daemon.cli(&["nic", "add", &name, "--switch", "lan"])?;
            guests.push(stage.boot(stage.qemu(&name, Version::Host, &[&root, &name])?)?);
            for mode in ["notified", "polled"] {
                stage.daemon.cli(&["core", "mode", mode])?;
                for load in ["stream", "requests"] {
                    let row = measure(stage, &host, &guests, mode, load, options.seconds)?;
                    stage.say(format!("{count} guests, {mode}, {load}: {:.0} frames/s", row.frames_per_s));
                    report.rows.push(row);
                }
            }
        }
        guests.into_iter().try_for_each(Vm::poweroff)
    })?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&envelope_of("elvis-guests", &report)?)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

fn counted(stage: &Stage, names: &[&str]) -> Result<Frames> {
    stage.daemon.status()?.sum_nics(names)
}

fn measure(
    stage: &Stage,
    host: &Host,
    guests: &[Vm],
    mode: &'static str,
    load: &'static str,
    seconds: f64,
) -> Result<Row> {
    let names: Vec<&str> = guests.iter().map(Vm::name).collect();
    let status = stage.daemon.status()?;
    let ends: Vec<End<'_>> = guests
        .iter()
        .map(|vm| End::up(vm.agent(), &status.nic(vm.name())?.mac).map_err(|error| vm.explain(error)))
        .collect::<Result<_>>()?;
    let agents: Vec<&Agent> = guests.iter().map(Vm::agent).collect();
    let over = AtomicBool::new(false);
    let (begun, before) = (Instant::now(), counted(stage, &names)?);
    let said = host.within(|index| {
        std::thread::scope(|scope| {
            let echo = scope.spawn(|| network::echo(index, ECHO, &over));
            let each: Vec<_> = (1..)
                .zip(agents.iter().zip(&ends))
                .map(|(number, (agent, end))| {
                    scope.spawn(move || one(agent, end, index, number, load, seconds))
                })
                .collect();
            let said: Result<Vec<_>> = each
                .into_iter()
                .map(|one| one.join().map_err(|_| anyhow::anyhow!("a load panicked"))?)
                .collect();
            over.store(true, Ordering::Release);
            echo.join().map_err(|_| anyhow::anyhow!("the echo panicked"))??;
            said
        })
    });
    let said = said.map_err(|error| guests.iter().fold(error, |error, vm| vm.explain(error)))?;
    let (elapsed, after) = (begun.elapsed().as_secs_f64(), counted(stage, &names)?);
    let frames = (after.frames - before.frames) as f64;
    ensure!(frames > 0.0, "no frame was counted");
    let (kicks, interrupts) =
        ((after.kicks - before.kicks) as f64, (after.interrupts - before.interrupts) as f64);
    let bytes: u64 = said.iter().map(|(bytes, _)| bytes).sum();
    let asked: Vec<&Requests> = said.iter().filter_map(|(_, asked)| asked.as_ref()).collect();
    let worst = |at: fn(&Requests) -> u64| asked.iter().map(|asked| at(asked)).max();
    Ok(Row {
        load,
        guests: guests.len() as u16,
        mode,
        frames_per_s: frames / elapsed,
        kicks_per_frame: kicks / frames,
        interrupts_per_frame: interrupts / frames,
        notifications_per_guest_per_s: (kicks + interrupts) / elapsed / guests.len() as f64,
        mbit_per_s: (bytes > 0).then_some(bytes as f64 * 8e-6 / elapsed),
        requests_per_s: (!asked.is_empty())
            .then(|| asked.iter().map(|asked| asked.answered as f64).sum::<f64>() / elapsed),
        p50_us: worst(|asked| asked.p50_us),
        p99_us: worst(|asked| asked.p99_us),
    })
}

/// What one guest does: bytes that it has sent, or how its requests went.
fn one(
    agent: &Agent,
    end: &End<'_>,
    index: u32,
    number: u16,
    load: &str,
    seconds: f64,
) -> Result<(u64, Option<Requests>)> {
    let (ours, to) = (end.interface.index, HOST_MAC.to_owned());
    if load == "requests" {
        let ask = Command::NetRequests { index: ours, to, port: ECHO, seconds, bytes: 64 };
        let asked: Requests = agent.call(ask, 2 * MINUTE)?;
        return Ok((0, Some(asked)));
    }
    let port = STREAM + number;
    let send =
        Command::NetSend { index: ours, to, port, seconds: Some(seconds), seed: number.into(), write: 64 };
    let sending = agent.begin(send)?;
    let received = network::receive(index, port).context("the host's end")?;
    let sent = serde_json::from_value(sending.end(2 * MINUTE, |_| {})?)?;
    let sent = Passage { sent, received }.right()?;
    Ok((sent.bytes, None))
}
