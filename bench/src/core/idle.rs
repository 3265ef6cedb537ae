//! Queues that are connected, started, were used, and are idle: what they cost a busy one, the processor, and memory.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ioplane_figures::machine::Books;
use ioplane_figures::report::median;
use ioplane_testkit::driver::{DiskPlan, Shape};

use super::drive::{Flow, drive, rate};
use super::offered::Offered;
use super::stage::{FORM, Stage};
use super::{Bench, Mode};
use crate::exitless::load::BLOCK;
use crate::guest::Form;
use crate::measured::Figure;

/// Queues of an idle disk. A daemon has at most 512 clients, so 1,000 queues need disks with several.
pub const QUEUES: u16 = 8;

/// Few requests at a time: what counts is the queue.
const IDLE: Form = Form {
    ring: 128,
    queues: QUEUES,
    plan: DiskPlan { slots: 4, max_bytes: BLOCK, segments: 1, shape: Shape::Indirect },
};

/// Longer than a core polls a queue that is silent.
const SETTLE: Duration = Duration::from_millis(500);

/// How many requests the busy queue has in flight.
const DEPTHS: [u16; 2] = [1, 32];

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let count = bench.pace.idle_queues / u32::from(QUEUES);
    let queues = count * u32::from(QUEUES);
    eprintln!("idle: {queues} queues of {count} disks");
    let mut stages = [busy(bench, "alone", bench.mode, 0)?, busy(bench, "beside", bench.mode, count)?];
    for stage in &mut stages {
        stage.turn(use_each_queue)?;
    }
    let memory = [pss(&stages[0])?, pss(&stages[1])?];
    let bytes = Figure::of((memory[1].bytes - memory[0].bytes) / f64::from(queues))
        .beside("queues", queues)
        .beside("queues_per_disk", QUEUES)
        .beside("resident_bytes", (memory[1].resident - memory[0].resident) / f64::from(queues));

    let span = bench.pace.idle_span;
    eprintln!("idle: {span:?} of silence");
    let account = stages[1].turn(|stage| {
        let pids = stage.pids();
        let books = Books::open(&pids);
        std::thread::sleep(span);
        let account = books.close(&pids);
        // Silence costs nothing if nobody listens: each of them still answers.
        use_each_queue(stage)?;
        Ok(account)
    })?;
    let percent = |ns: u64| ns as f64 / account.seconds / 1e9 * 100.0;
    let cpu = Figure::of(percent(account.cpu_ns))
        .beside("queues", queues)
        .beside("seconds", account.seconds)
        .beside("kernel_threads_of_the_host_percent", percent(account.kernel_ns));

    let mut losses = Vec::new();
    for depth in DEPTHS {
        let mut pairs = Vec::new();
        for number in 0..bench.pace.pairs {
            let mut rates = [0.0; 2];
            for side in Bench::order(number) {
                rates[side] = stages[side].turn(|stage| {
                    let load = Offered::Backlog(depth);
                    rate(
                        Flow::new(&mut stage.guests[0], 0, load, BLOCK, u64::from(number) + 1),
                        bench.pace.round,
                    )
                })?;
            }
            // Beside them, against alone.
            pairs.push([rates[1], rates[0]]);
        }
        let of = |side: usize| median(pairs.iter().map(|pair: &[f64; 2]| pair[side]));
        losses.push(
            Figure::ratio(&pairs)
                .map(|ratio| (1.0 - ratio) * 100.0)
                .beside("requests_per_s", of(0))
                .beside("alone_requests_per_s", of(1)),
        );
    }
    let [one, deep] = &losses[..] else { bail!("a loss for each depth") };
    let (one, deep) = (one.value().unwrap_or(f64::NAN), deep.value().unwrap_or(f64::NAN));
    let worse = if one >= deep { losses.remove(0) } else { losses.remove(1) };
    let loss = worse.beside("queues", queues).beside("at_depth_1", one).beside("at_depth_32", deep);
    Ok(vec![("idle_cpu_percent", cpu), ("idle_queues_loss_percent", loss), ("idle_queue_bytes", bytes)])
}

/// Some load on each queue, then silence for longer than a core polls. Fails if a queue does not answer.
fn use_each_queue(stage: &mut Stage) -> Result<()> {
    for guest in &mut stage.guests {
        for queue in 0..guest.queues.len() as u16 {
            let flow = Flow::new(guest, queue, Offered::Backlog(4), BLOCK, 1);
            // Fails if what it has in flight at the end is not completed.
            drive(&mut [flow], Duration::from_millis(5), |_| {})?;
        }
    }
    std::thread::sleep(SETTLE);
    Ok(())
}

/// A daemon with a busy disk, guest 0, and `count` others.
fn busy(bench: &Bench, name: &str, mode: Mode, count: u32) -> Result<Stage> {
    let names: Vec<String> = (0..count).map(|number| format!("idle{number}")).collect();
    // Small, so that the memory is the queues' and not the disk's.
    let keys = format!("memory = \"64K\"\nqueues = {QUEUES}");
    let mut disks = vec![("busy", "memory = \"64M\"")];
    disks.extend(names.iter().map(|name| (name.as_str(), keys.as_str())));
    let mut stage = Stage::start(bench, name, mode, &disks)?;
    stage.connect("busy", FORM)?;
    for name in &names {
        stage.connect(name, IDLE)?;
    }
    Ok(stage)
}

/// Memory of a process, bytes.
struct Memory {
    /// Proportional set size: a page that n processes map counts as 1/n page. Pages of a guest that the daemon has touched are in it.
    bytes: f64,
    resident: f64,
}

fn pss(stage: &Stage) -> Result<Memory> {
    let pid = *stage.pids().first().context("a daemon without a process")?;
    parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?)
}

/// What a `smaps_rollup` says.
fn parse(text: &str) -> Result<Memory> {
    let field = |name: &str| -> Result<f64> {
        let line =
            text.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("no {name}"))?;
        let kib: f64 = line.trim().trim_end_matches("kB").trim_end().parse()?;
        ensure!(line.ends_with("kB"), "{name} is not in kB");
        Ok(kib * 1024.0)
    };
    Ok(Memory { bytes: field("Pss:")?, resident: field("Rss:")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rollup_is_read() {
        let text = "5600-7fff ---p 00000000 00:00 0  [rollup]\nRss:    1524 kB\nPss:     700 kB\nPss_Dirty:  12 kB\n";
        let memory = parse(text).unwrap();
        assert_eq!((memory.bytes, memory.resident), (700.0 * 1024.0, 1524.0 * 1024.0));
        assert!(parse("Rss: 1 kB\n").is_err());
        assert!(parse("Rss: 1 kB\nPss: 2\n").is_err());
    }
}
