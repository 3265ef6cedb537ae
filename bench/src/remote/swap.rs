//! A disk that is swapped again and again while it is busy: for how long nothing completes, and, where it comes to rest, for how long the daemon lets nothing begin.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ioplane_figures::report::median;
use serde_json::{Value, json};

use super::Bench;
use crate::control::call;
use crate::core::stage::FORM;
use crate::daemon::Configuration;
use crate::gaps::{DEPTH, Gaps, while_busy};
use crate::guest::Guest;
use crate::measured::Figure;

/// Of the disk.
const BYTES: &str = "8M";
/// How often it is asked whether it is done.
const LOOK: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_secs(60);

/// Between two memories, and between two images on a disk.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let swaps = bench.pace.swaps;
    eprintln!("{swaps} swaps from memory to memory");
    let memory = json!({"memory": BYTES, "overwrite": true});
    let (gaps, _) = swapped(bench, "memory", &format!("memory = {BYTES:?}"), swaps, |_| memory.clone())?;
    eprintln!("{swaps} swaps of a disk with a migration socket, which comes to rest for them");
    let socket = bench.folders.run("swap-resting").join("migration.sock");
    let keys = format!("memory = {BYTES:?}\nmigration_socket = {socket:?}");
    let (resting, pauses) = swapped(bench, "resting", &keys, swaps, |_| memory.clone())?;
    ensure!(pauses.iter().all(|pause| *pause > 0.0), "it did not come to rest");
    let overhead = Figure::of(p99(&pauses)).beside("median_ms", median(pauses.iter().copied()));
    let figures = [
        ("swap_pause_p99_ms", pause(&gaps)),
        ("quiesce_overhead_p99_ms", overhead.beside("longest_gap_p99_ms", pause(&resting).value())),
    ];
    eprintln!("{swaps} swaps from image to image");
    let folder = bench.folders.run("images");
    std::fs::create_dir_all(&folder)?;
    let image = |number: usize| folder.join(if number.is_multiple_of(2) { "even.img" } else { "odd.img" });
    std::fs::File::create(image(0))?.set_len(8 << 20)?;
    let (gaps, _) = swapped(
        bench,
        "image",
        &format!("path = {:?}", image(0)),
        swaps,
        |number| json!({"path": image(number), "overwrite": true}),
    )?;
    Ok(figures.into_iter().chain([("swap_pause_image_p99_ms", pause(&gaps))]).collect())
}

/// The pauses of swaps, in ms, beside the gaps without any.
pub fn pause(gaps: &Gaps) -> Figure {
    let ms = |happens| -> Vec<f64> { gaps.us(happens).into_iter().map(|us| us / 1e3).collect() };
    let (swaps, quiet) = (ms(true), ms(false));
    Figure::of(p99(&swaps))
        .beside("median_ms", median(swaps.iter().copied()))
        .beside("longest_gap_without_a_swap_p99_ms", p99(&quiet))
        .beside("swaps", swaps.len())
        .beside("depth", DEPTH)
}

/// The value that one in a hundred exceeds.
pub fn p99(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() * 99).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// Swaps a disk with these keys so often, each time to what `target` says, under load. The gaps, and the daemon's own pauses in ms.
fn swapped(
    bench: &Bench,
    name: &str,
    keys: &str,
    swaps: usize,
    target: impl Fn(usize) -> Value + Sync,
) -> Result<(Gaps, Vec<f64>)> {
    let folder = bench.folders.run(&format!("swap-{name}"));
    let socket = folder.join("disk.sock");
    let configuration = Configuration::new(bench.mode).disk("disk", &socket, keys);
    let mut served = configuration.start(&crate::served::ioplane()?, &folder, &bench.place)?;
    served.await_socket(&socket)?;
    let mut guest = Guest::connect(&socket, FORM)?;
    let control = folder.join("control");
    let swapped = while_busy(&mut guest, bench.place.cpus.back, swaps, |windows| {
        (0..swaps).map(|number| windows.during(|| swap(&control, &target(number + 1)))).collect()
    });
    swapped.with_context(|| served.log_tail())
}

/// Swaps the disk; for how long the daemon let nothing begin at the switch, ms.
pub fn swap(control: &Path, target: &Value) -> Result<f64> {
    call(control, "POST", "/v1/disks/disk/swap", &target.to_string())?;
    let begun = Instant::now();
    let report = loop {
        let report = call(control, "GET", "/v1/disks/disk", "")?["swap"].take();
        match report["state"].as_str() {
            Some("done") => break report,
            Some("copying" | "mirroring" | "switching") => {}
            _ => bail!("a swap came to nothing: {report}"),
        }
        ensure!(begun.elapsed() < PATIENCE, "a swap has no end: {report}");
        std::thread::sleep(LOOK);
    };
    Ok(report["pause_us"].as_f64().context("a pause")? / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_in_a_hundred_is_longer() {
        let values: Vec<f64> = (1..=500).rev().map(f64::from).collect();
        assert_eq!(p99(&values), 495.0);
        assert_eq!(p99(&[3.0]), 3.0);
        assert!(p99(&[]).is_nan());
    }
}
