//! `ioplane-exits [--json] [--seconds S]`: what watching exits costs, what it names, and what its remedies are worth.
//!
//! ```text
//!   here, on whatever KVM there is:  tiny-guest, its exits timed alone and watched          --> ns_per_event
//!                                    tiny-guest without device accesses, with the library and without --> idle_vm_cost
//!   L1, guests of stock QEMU:        a loop of port reads, watched and not in turn, by L1's clock and by instructions --> l1_profiler_cost
//!                                    Debian, PIIX3 IDE + e1000 + rtl8139, periodic tick     --> attributed, tables 1 to 3
//!                                    Debian, virtio, the same loads at the same pace        --> remedies
//!                                    Debian, IDE, NE2000, serial port and so on: plain, batches, clusters --> ide, boot, ne2000
//!                                    two Debians, virtio, clustering in one of them in turn  --> l1_idle_vm_cost
//!                                    two Debians ticking by the PIT, one clamped, in turn    --> timer_clamp_gain
//!   with --sweeps alone:             block sizes, message sizes, rates of the tick          --> scheduler_none, napi
//! ```
//!
//! In L1 exits are counted by real KVM in a translated machine: counts and rates of paced loads are what they would be elsewhere, times
//! are not.

mod beside;
mod clamp;
mod clusters;
mod cost;
mod idle;
mod remedies;
mod sweeps;
mod tables;

use anyhow::{Context, Result};
use clap::Parser;
use ioplane_e2e::L1;
use ioplane_e2e::daemon::binary;
use ioplane_figures::report::envelope_of;
use serde::Serialize;
use serde_json::Value;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// Measures the profiler and its remedies.
#[derive(Parser)]
struct Options {
    /// Print one JSON object in place of the tables
    #[arg(long)]
    json: bool,
    /// Seconds of each watch
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,
    /// Only what can be measured here without L1
    #[arg(long, conflicts_with = "l1")]
    native: bool,
    /// Only what is measured in L1
    #[arg(long)]
    l1: bool,
    /// Of that only what watching costs
    #[arg(long, requires = "l1", conflicts_with = "clusters")]
    cost: bool,
    /// Only what batches and clusters spare, and what the library costs: `script/bench exits-clusters`
    #[arg(long, conflicts_with_all = ["native", "no_clusters"])]
    clusters: bool,
    /// All but that
    #[arg(long)]
    no_clusters: bool,
    /// Only the sweeps over sizes of blocks and messages and rates of the tick: `script/bench exits-sweeps`
    #[arg(long, conflicts_with_all = ["native", "l1", "clusters", "no_clusters"])]
    sweeps: bool,
    /// Only what the library costs a guest without device accesses, natively: two minutes
    #[arg(long, conflicts_with_all = ["native", "l1", "clusters", "no_clusters", "sweeps"])]
    idle: bool,
    /// Seconds until what the library costs a VM without device accesses must be known, and as many for what a slower timer gains
    #[arg(long, default_value_t = 240.0)]
    idle_seconds: f64,
}

/// What the issue asks for.
#[derive(Serialize)]
struct Outcome {
    /// So many fewer exits a second with the profiler on, of a guest that does nothing but exit, natively: against a host on which nobody watches any guest.
    profiler_cost_percent: Option<f64>,
    /// So many fewer exits of a guest beside it, which nobody watches.
    profiler_neighbour_cost_percent: Option<f64>,
    /// The same, a hundredth of the time recorded.
    sampled_cost_percent: Option<f64>,
    /// The same in L1, where `kvm_exit` fires but profiler and guest share one translated processor.
    l1_profiler_cost_percent: Option<Value>,
    l1_profiler_cost: Option<cost::Fewer>,
    /// And there of exits in as many instructions: how many of them an exit takes on hardware would be much the same.
    l1_profiler_instructions: Option<cost::Fewer>,
    /// Of one hit of a tracepoint, natively; nothing where there is no KVM to measure on.
    ns_per_event: Option<f64>,
    /// Share of all exits whose function is named, and device and register if it is about one.
    attributed_percent: Option<f64>,
    remedies: Vec<remedies::Remedy>,
    #[serde(flatten)]
    clusters: Option<clusters::Figures>,
    #[serde(flatten)]
    idle: Option<idle::Cost>,
    #[serde(flatten)]
    clamp: Option<clamp::Gain>,
    /// What one unit of each work takes in each mode.
    modes: Vec<clusters::Row>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let begun = Instant::now();
    let say = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    if options.idle {
        let native = idle::native()?;
        let text = format!("more by {}\n", native.words());
        return print(options.json, "exits-idle", &idle::Native::of(native), &text);
    }
    if options.sweeps {
        let (sweeps, text) = sweeps::all(&say)?;
        return print(options.json, "exits-sweeps", &sweeps, &text);
    }
    let native = (!options.l1 && !options.clusters).then(|| cost::native(&say).context("natively"));
    let native = native
        .and_then(|native| native.map_err(|error| say(&format!("not measured natively: {error:#}"))).ok());
    let mut outcome = Outcome {
        profiler_cost_percent: native.as_ref().map(|native| native.cost_percent()[0]),
        profiler_neighbour_cost_percent: native.as_ref().map(|native| native.cost_percent()[2]),
        sampled_cost_percent: native.as_ref().map(|native| native.cost_percent()[1]),
        l1_profiler_cost_percent: None,
        l1_profiler_cost: None,
        l1_profiler_instructions: None,
        ns_per_event: native.as_ref().map(|native| native.ns_per_event),
        attributed_percent: None,
        remedies: Vec::new(),
        clusters: None,
        idle: None,
        clamp: None,
        modes: Vec::new(),
    };
    let mut text = native.as_ref().map(cost::Native::table).unwrap_or_default();
    if !options.native && !options.clusters {
        if !options.cost {
            let l1 = L1::boot(2048, "", &say)?;
            remedies::serve(&l1).context("the other end of the network in L1")?;
            let (rows, tables) = tables::and_remedies(&l1, options.seconds, &say)?;
            outcome.attributed_percent = Some(tables.attributed);
            outcome.remedies = rows;
            text += &remedies::table(&outcome.remedies);
            text += &tables.text;
        }
        let l1 = L1::boot(1024, "", &say)?;
        let by_time = cost::in_l1(&l1, &say).context("the cost in L1")?;
        drop(l1);
        let by_instructions =
            cost::in_l1(&L1::boot_by_instructions(1024, &say)?, &say).context("the cost in instructions")?;
        text += &format!(
            "\nIn L1, a guest of stock QEMU that reads a port of QEMU's in a loop, watched: exits a second {by_time}; in as many instructions {by_instructions}\n"
        );
        outcome.l1_profiler_cost_percent = Some(by_time.percent.clone());
        (outcome.l1_profiler_cost, outcome.l1_profiler_instructions) = (Some(by_time), Some(by_instructions));
    }
    if !options.native && !options.no_clusters && !options.cost {
        // One of its own: only one guest at a time is counted.
        let l1 = L1::boot(1536, "", &say)?;
        let modes = clusters::side_by_side(&l1, &say).context("plain, batches, clusters")?;
        text += &clusters::table(&modes.rows);
        (outcome.clusters, outcome.modes) = (Some(modes.figures), modes.rows);
        let limit = Duration::from_secs_f64(options.idle_seconds);
        let cost = idle::cost(&l1, limit, &say).context("a VM without device accesses")?;
        text += &cost.line;
        outcome.idle = Some(cost);
        let gain = clamp::gain(&l1, limit, &say)?;
        text += &gain.line;
        outcome.clamp = Some(gain);
    }
    let name = if options.clusters { "exits-clusters" } else { "exits" };
    print(options.json, name, &outcome, &text)
}

fn print(json: bool, name: &str, outcome: &impl Serialize, text: &str) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(&envelope_of(name, outcome)?)?);
        eprint!("{text}");
    } else {
        print!("{text}");
    }
    Ok(())
}

/// What `ioplane exits --json` says in L1.
fn exits(l1: &L1, words: &str) -> Result<Value> {
    let command =
        format!("{} exits {words} --json 2>/tmp/said || {{ cat /tmp/said; exit 1; }}", binary()?.display());
    let output = l1.run(&command, 2 * MINUTE)?;
    serde_json::from_str(&output).with_context(|| output)
}

/// Exits a second of a report.
fn rate(report: &Value) -> f64 {
    let number = |key: &str| report[key].as_f64().unwrap_or(0.0);
    number("exits") / number("seconds").max(1e-9)
}
