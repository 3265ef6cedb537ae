//! A VM in QEMU whose disks another host publishes moves between two hosts, by `ioplane move vm`: for how long nothing completes.
//!
//! The guest's clock stands still with it, so it cannot tell. The exporter can: it is asked every millisecond how many requests of the guest's data disk
//! it has answered. Where the processor has no virtualisation the guest is translated (TCG), and QEMU is most of what is measured; what the disk has of it is
//! `moving.rs`.

use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use ioplane_e2e::assets::{Guest, host_version};
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::hosts::{self, DISKS, holds, holds_none, three};
use ioplane_e2e::migration::{BANDWIDTH, DOWNTIME};
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MEMORY_MIB, MINUTE, Stage, expect_right, finish, mixed, play};
use ioplane_e2e::{Accelerator, Qemu, Version, Vm};
use ioplane_figures::machine;
use ioplane_figures::report::median;

use super::Bench;
use super::swap::p99;
use crate::control::call;
use crate::measured::Figure;

const CONFIG: &str = "[[core]]\nspin_us = 200\n";
/// What the guest works on.
const BYTES: u64 = 16 << 20;
/// Between two looks.
const LOOK: Duration = Duration::from_millis(1);
/// Of work without a move, before each.
const STAY: Duration = Duration::from_secs(1);

/// Moves a VM so often; says why not where there is no QEMU, or no guest for it.
pub fn measure(bench: &Bench, moves: usize) -> Result<Vec<(&'static str, Figure)>> {
    let ready = host_version().and_then(|_| Guest::prepare(&|line| eprintln!("{line}")));
    let figure = match ready {
        Err(why) => {
            eprintln!("a VM that moves: {why:#}");
            Figure::missing(format!("no VM: {why:#}"))
        }
        Ok(_) => {
            // Translation needs a processor of its own, beside the daemons.
            machine::spread(bench.place.cpus)?;
            let moved = moved(moves);
            machine::pin(bench.place.cpus.front)?;
            moved?
        }
    };
    Ok(vec![("move_downtime_ms", figure)])
}

/// One move; ms.
struct Moved {
    /// The longest time without an answer from the command on.
    still: f64,
    /// The same before it.
    quiet: f64,
    /// What QEMU says.
    qemu: f64,
}

fn moved(moves: usize) -> Result<Figure> {
    eprintln!("{moves} moves of a VM in QEMU");
    let mut all = Vec::new();
    play(CONFIG, |stage| {
        let (exporter, other) = three(stage, CONFIG)?;
        let mut vm = stage.boot(stage.qemu("place0", Version::Host, &DISKS)?.machine(&hosts::machine()?))?;
        let agent = vm.share_agent();
        let mix = Mix { read: 60, write: 38, sync: 2, discard: 0, zero: 0 };
        let load = LoadSpec { mix, direct: true, block_sizes: vec![4096], ..mixed("data", BYTES) };
        let load = agent.load(load)?;
        load.progress(MINUTE)?;
        for number in 1..=moves {
            let hosts = [&stage.daemon, &other];
            let (here, there) = (hosts[(number + 1) % 2], hosts[number % 2]);
            let (next, moved) = travel(stage, vm, number, (here, there), &exporter.socket())?;
            vm = next;
            load.progress(MINUTE).map_err(|error| vm.explain(error))?;
            expect_right(&load.mark()?).map_err(|error| vm.explain(error))?;
            stage.say(format!("move {number}: {:.0} ms, QEMU says {:.0} ms", moved.still, moved.qemu));
            all.push(moved);
        }
        finish(&agent, load).map_err(|error| vm.explain(error))?;
        vm.poweroff()
    })?;
    let of = |part: fn(&Moved) -> f64| all.iter().map(part).collect::<Vec<f64>>();
    let (still, quiet, qemu) = (of(|moved| moved.still), of(|moved| moved.quiet), of(|moved| moved.qemu));
    Ok(Figure::median(&still)
        .beside("p99_ms", p99(&still))
        .beside("longest_ms", still.iter().copied().fold(0.0, f64::max))
        .beside("qemu_says_ms", median(qemu))
        .beside("longest_gap_without_a_move_ms", median(quiet))
        .beside("guest", format!("{}, {MEMORY_MIB} MiB", Accelerator::detect()))
        .beside("resolution", "the exporter is asked every millisecond"))
}

/// The guest works here for [`STAY`], and moves to a QEMU of the other host, which has its disks when this returns.
fn travel(
    stage: &Stage,
    mut vm: Vm,
    number: usize,
    (here, there): (&Daemon, &Daemon),
    exporter: &Path,
) -> Result<(Vm, Moved)> {
    let args = there.qemu_args(Version::Host, MEMORY_MIB, &DISKS)?;
    let qemu = Qemu::new(&format!("place{number}")).version(Version::Host).memory_mib(MEMORY_MIB);
    let mut next = qemu.args(&args).incoming().machine(&hosts::machine()?).launch(&stage.guest)?;
    // It goes on as soon as it has arrived, and does not wait for us.
    let to = next.expect_guest()?;
    vm.pace(BANDWIDTH, DOWNTIME)?;
    let ((next, begun, qemu), answered) = watched(exporter, || {
        std::thread::sleep(STAY);
        let begun = Instant::now();
        let moved = vm.move_by_command(here, &to, &there.socket());
        let moved = moved.map_err(|error| next.explain(vm.explain(error)))?;
        next.go_on_from(vm)?;
        Ok((next, begun, moved.downtime_ms))
    })?;
    stage.until("the other host holds the disks", || holds(there, &DISKS))?;
    stage.until("this one does not", || holds_none(here, &DISKS))?;
    let still = longest(&answered, |_, to| to >= begun);
    let quiet = longest(&answered, |_, to| to < begun);
    Ok((next, Moved { still, quiet, qemu: qemu as f64 }))
}

/// The longest time between two of these moments of those that are `wanted`, ms.
fn longest(answered: &[Instant], wanted: impl Fn(Instant, Instant) -> bool) -> f64 {
    let pairs = answered.windows(2).filter(|pair| wanted(pair[0], pair[1]));
    pairs.map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).fold(0.0, f64::max)
}

/// Whether [`watched`] goes on: for ever, until the next answer, or no more.
const GO_ON: u8 = 0;
const ONE_MORE: u8 = 1;
const STOP: u8 = 2;

/// Asks the exporter all the time while `act` lasts, and until it has answered once more; the moments at which it had answered more requests than before.
fn watched<T>(exporter: &Path, act: impl FnOnce() -> Result<T>) -> Result<(T, Vec<Instant>)> {
    let state = AtomicU8::new(GO_ON);
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| -> Result<Vec<Instant>> {
            let (mut before, mut moments, mut last) = (0, Vec::new(), Instant::now());
            loop {
                let state = state.load(Ordering::Acquire);
                let report = call(exporter, "GET", "/v1/exports/data", "")?;
                let requests = report["totals"]["requests"].as_u64().context("no totals of an export")?;
                if requests != before {
                    last = Instant::now();
                    moments.push(last);
                }
                if state == STOP || state == ONE_MORE && requests != before {
                    return Ok(moments);
                }
                ensure!(last.elapsed() < MINUTE, "the exporter has answered nothing for {MINUTE:?}");
                before = requests;
                std::thread::sleep(LOOK);
            }
        });
        let done = act();
        state.store(if done.is_ok() { ONE_MORE } else { STOP }, Ordering::Release);
        let moments = watch.join().map_err(|_| anyhow!("the thread that watches panicked"))?;
        Ok((done?, moments?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_counts_for_the_move_that_it_reaches_into() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let answered = [at(0), at(3), at(13), at(20), at(25)];
        let move_at = at(15);
        assert_eq!(longest(&answered, |_, to| to < move_at), 10.0);
        assert_eq!(longest(&answered, |_, to| to >= move_at), 7.0);
        assert_eq!(longest(&[], |_, _| true), 0.0);
    }
}
