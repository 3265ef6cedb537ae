//! Swaps of a busy disk that is slow: each read and each write takes [`DELAY`], however many there are. It is on nbdkit's `memory` behind its filter `delay`, and so is
//! each backing that it is swapped to.
//!
//! Beside the pause of a swap stands the longest gap in as many windows of the same length in which nothing is swapped: requests of such a disk
//! end in bursts.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ioplane_figures::report::median;
use serde_json::json;

use super::Bench;
use super::swap::{p99, swap};
use crate::control::call;
use crate::core::stage::FORM;
use crate::daemon::Configuration;
use crate::gaps::{DEPTH, while_busy};
use crate::guest::{Guest, PATIENCE};
use crate::measured::Figure;
use crate::served::{Served, ioplane};

/// What nbdkit adds to each request.
const DELAY: Duration = Duration::from_millis(5);
/// Of the disk: four steps of a copy.
const BYTES: u64 = 1 << 20;
/// Swaps at most: each copies, which takes long on such a disk.
const MOST: usize = 500;

/// Measures, or says why not.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let servers = [Slow::start(bench, "even"), Slow::start(bench, "odd")];
    let figure = match servers {
        [Ok(even), Ok(odd)] => swapped(bench, &[even, odd])?,
        [Err(why), _] | [_, Err(why)] => {
            eprintln!("slow disks: {why:#}");
            Figure::missing(format!("nbdkit with its filter delay: {why:#}"))
        }
    };
    Ok(vec![("swap_pause_slow_p99_ms", figure)])
}

/// nbdkit, at a Unix socket.
struct Slow {
    socket: PathBuf,
    _served: Served,
}

impl Slow {
    fn start(bench: &Bench, name: &str) -> Result<Self> {
        let folder = bench.folders.run(&format!("slow-{name}"));
        std::fs::create_dir_all(&folder)?;
        let socket = folder.join("nbd.sock");
        let delay = format!("{}ms", DELAY.as_millis());
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--exit-with-parent", "--filter=delay", "--threads", "64", "--unix"]);
        command.arg(&socket).arg("memory").arg(BYTES.to_string());
        command.arg(format!("rdelay={delay}")).arg(format!("wdelay={delay}"));
        let mut served = bench.place.spawn(&command, &folder.join("log"))?;
        served.await_socket(&socket)?;
        Ok(Slow { socket, _served: served })
    }

    fn uri(&self) -> String {
        format!("nbd+unix:///data?socket={}", self.socket.display())
    }
}

fn swapped(bench: &Bench, servers: &[Slow; 2]) -> Result<Figure> {
    let swaps = bench.pace.swaps.min(MOST);
    eprintln!("{swaps} swaps from a slow disk to a slow disk");
    let folder = bench.folders.run("swap-slow");
    let socket = folder.join("disk.sock");
    let configuration =
        Configuration::new(bench.mode).disk("disk", &socket, &format!("remote = \"{}\"", servers[0].uri()));
    let mut served = configuration.start(&ioplane()?, &folder, &bench.place)?;
    served.await_socket(&socket)?;
    let mut guest = Guest::connect(&socket, FORM)?;
    let figure = swaps_and_silence(bench, &mut guest, &folder.join("control"), servers, swaps);
    figure.with_context(|| served.log_tail())
}

/// Waits until requests complete again: the new backing's server is connected to after the switch.
fn goes_on(control: &Path) -> Result<()> {
    let requests = || -> Result<u64> {
        let disk = call(control, "GET", "/v1/disks/disk", "")?;
        disk["totals"]["requests"].as_u64().context("no totals of a disk")
    };
    let (before, begun) = (requests()?, Instant::now());
    while requests()? < before + 2 * u64::from(DEPTH) {
        ensure!(begun.elapsed() < PATIENCE, "nothing completes after a swap");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn swaps_and_silence(
    bench: &Bench,
    guest: &mut Guest,
    control: &Path,
    servers: &[Slow; 2],
    swaps: usize,
) -> Result<Figure> {
    let cpu = bench.place.cpus.back;
    let (busy, took) = while_busy(guest, cpu, swaps, |windows| {
        let one = |number: usize| {
            let target = json!({"remote": servers[(number + 1) % 2].uri(), "overwrite": true});
            let begun = Instant::now();
            windows.during(|| swap(control, &target).and_then(|_| goes_on(control)))?;
            Ok(begun.elapsed())
        };
        (0..swaps).map(one).collect::<Result<Vec<Duration>>>()
    })?;
    let each = median(took.iter().map(Duration::as_secs_f64));
    let (quiet, ()) = while_busy(guest, cpu, swaps, |windows| {
        let silence = || -> Result<()> {
            std::thread::sleep(Duration::from_secs_f64(each));
            Ok(())
        };
        (0..swaps).try_for_each(|_| windows.during(silence))
    })?;
    let ms = |gaps: Vec<f64>| -> Vec<f64> { gaps.into_iter().map(|us| us / 1e3).collect() };
    let (pauses, gaps) = (ms(busy.us(true)), ms(quiet.us(true)));
    Ok(Figure::of(p99(&pauses))
        .beside("median_ms", median(pauses.iter().copied()))
        .beside("longest_gap_without_a_swap_p99_ms", p99(&gaps))
        .beside("longest_gap_without_a_swap_median_ms", median(gaps))
        .beside("a_request_takes_ms", DELAY.as_millis() as u64)
        .beside("a_swap_takes_ms", each * 1e3)
        .beside("swaps", swaps)
        .beside("depth", DEPTH))
}
