//! A boot storm: many front ends that connect at once, and how long the slowest of them waits for its first read.

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use ioplane_figures::report::median;
use ioplane_testkit::driver::DiskOp;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::Bench;
use super::stage::{FORM, Stage};
use crate::exitless::load::BLOCK;
use crate::guest::{Guest, PATIENCE};
use crate::measured::Figure;

/// Front ends, each of a guest with a disk of its own.
const GUESTS: usize = 200;

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let rounds = bench.pace.boots;
    eprintln!("{GUESTS} front ends connect at once, {rounds} times");
    // A front end has about ten files open.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })?;
    let names: Vec<String> = (0..GUESTS).map(|guest| format!("disk{guest}")).collect();
    let disks: Vec<_> = names.iter().map(|name| (name.as_str(), "memory = \"1M\"")).collect();
    let mut rounds_seconds: Vec<Vec<f64>> = Vec::new();
    for round in 0..rounds {
        // A daemon that has served nobody yet.
        let mut stage = Stage::start(bench, &format!("boot{round}"), bench.mode, &disks)?;
        rounds_seconds.push(stage.turn(|stage| {
            let sockets: Vec<_> = names.iter().map(|name| stage.socket(name)).collect();
            storm(&sockets)
        })?);
    }
    Ok(vec![("boot_storm_s", figure(&rounds_seconds))])
}

/// The slowest of all first reads, since the goal is one for each of them.
fn figure(rounds: &[Vec<f64>]) -> Figure {
    let slowest: Vec<f64> =
        rounds.iter().map(|seconds| seconds.iter().copied().fold(0.0, f64::max)).collect();
    Figure::of(slowest.iter().copied().fold(0.0, f64::max))
        .beside("front_ends", GUESTS)
        .beside("rounds", rounds.len())
        .beside("slowest_of_a_median_round_s", median(slowest))
        .beside("median_first_read_s", median(rounds.iter().flatten().copied()))
}

/// Connects a guest to each of `sockets` at the same time. Returns when each has had its first read, s after that time. All stay connected until
/// the last of them has read.
fn storm(sockets: &[impl AsRef<Path> + Sync]) -> Result<Vec<f64>> {
    let (ready, go) = (Barrier::new(sockets.len() + 1), Barrier::new(sockets.len() + 1));
    std::thread::scope(|scope| {
        let guests: Vec<_> = sockets
            .iter()
            .map(|socket| {
                let (ready, go, socket) = (&ready, &go, socket.as_ref());
                scope.spawn(move || {
                    ready.wait();
                    go.wait();
                    let guest = first_read(socket).with_context(|| socket.display().to_string())?;
                    anyhow::Ok((Instant::now(), guest))
                })
            })
            .collect();
        ready.wait();
        // Before the first of them goes on.
        let began = Instant::now();
        go.wait();
        let done: Result<Vec<(Instant, Guest)>> = guests
            .into_iter()
            .map(|guest| guest.join().map_err(|_| anyhow!("the thread of a guest panicked"))?)
            .collect();
        Ok(done?.iter().map(|(at, _)| (*at - began).as_secs_f64()).collect())
    })
}

/// Connects a guest that sleeps until it is interrupted, as Linux does, and has it read its first block.
fn first_read(socket: &Path) -> Result<Guest> {
    let mut guest = Guest::connect(socket, FORM)?;
    guest.queues[0].ring().enable_interrupts();
    guest.queues[0].submit(DiskOp::Read, 0, BLOCK).context("a free slot")?;
    guest.kick_if_needed(0);
    let begin = Instant::now();
    loop {
        if let Some(done) = guest.queues[0].reap()? {
            ensure!(done.ok(), "a first read ended with status {:#x}", done.status);
            return Ok(guest);
        }
        ensure!(begin.elapsed() < PATIENCE, "a first read was never completed");
        let (_, call) = guest.front.events(0).context("a queue that was started")?;
        call.wait(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slowest_of_all_rounds_counts() {
        let figure = figure(&[vec![0.1, 0.2, 0.4], vec![0.3, 2.5, 0.1]]);
        assert_eq!(figure.value(), Some(2.5));
    }

    #[test]
    fn a_front_end_that_cannot_connect_fails_the_measurement() {
        let folder = tempfile::tempdir().unwrap();
        let sockets = [folder.path().join("a.sock"), folder.path().join("b.sock")];
        let error = storm(&sockets).unwrap_err();
        assert!(format!("{error:#}").contains("a.sock"), "{error:#}");
    }
}
