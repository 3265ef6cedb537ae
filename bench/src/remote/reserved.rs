//! A reservation under flood: an export that does so many requests per second, of which one host has reserved a part, while two others ask for as much as
//! they can get.
//!
//! ```text
//!   guest that always asks --> importer, RESERVED of CAPACITY ----\
//!   guest that floods      --> importer ---------------------------TCP--> exporter: CAPACITY requests per second, an image on a tmpfs
//!   guest that floods      --> importer --------------------------/
//! ```
//!
//! The same once more with an importer that has reserved nothing in place of the first: what it gets is what the reservation is worth.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::Bench;
use super::contender::Listener;
use crate::core::drive::{Flow, drive, ns};
use crate::core::offered::Offered;
use crate::core::stage::FORM;
use crate::daemon::Configuration;
use crate::exitless::backend::Backing;
use crate::exitless::check::{fill, read};
use crate::exitless::load::BLOCK;
use crate::guest::Guest;
use crate::measured::Figure;
use crate::served::{Served, ioplane};

/// Requests per second that the export does.
const CAPACITY: u64 = 10_000;
/// Of these one host has reserved so many.
const RESERVED: u64 = 6_000;
/// Hosts that take what they can.
const FLOODS: usize = 2;
/// Requests in flight of the one that is watched, and of each of the others.
const DEPTH: u16 = 32;
const FLOOD_DEPTH: u16 = 64;
/// The rate is that of so long.
const WATCHED: Duration = Duration::from_secs(10);
const WARM: Duration = Duration::from_secs(1);
/// All together get so much of the capacity, or the processors were others' and the run is repeated: so often at most, in all.
const UNDISTURBED: f64 = 0.98;
const REPEATS: u32 = 6;
/// Of its blocks each guest checks so many, before anything is timed and afterwards.
const CHECKED: u64 = 512;
const SALT: u64 = 19;

/// Measures: the least of the runs.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let runs: usize = if bench.pace.rounds > 8 { 3 } else { 1 };
    eprintln!(
        "{RESERVED} of {CAPACITY} requests per second reserved, {FLOODS} others, {runs} runs of {WATCHED:?}"
    );
    let backing = bench.folders.backing("reserved", false, bench.pace.memory)?;
    let (Backing::Memory { file: image, .. } | Backing::File { file: image, .. }) = &backing;
    fill(image, SALT)?;
    let folder = bench.folders.run("reserved-exporter");
    let listener = Listener::tcp()?;
    let keys = format!(
        "path = {image:?}\nread_only = true\niops_limit = {CAPACITY}\nlisten = \"{}\"\nplain = true",
        listener.address().context("an address")?
    );
    let configuration = Configuration::new(bench.mode).export("data", &folder.join("nbd.sock"), &keys);
    let mut exporter = configuration.start(&ioplane()?, &folder, &bench.place)?;
    listener.wait(&mut exporter)?;
    let reserve = format!("\nreserve_iops = {RESERVED}");
    let mut has = Host::start(bench, "reserved", &listener, &reserve)?;
    let mut has_not = Host::start(bench, "reserved-nothing", &listener, "")?;
    let mut floods = (0..FLOODS)
        .map(|number| Host::start(bench, &format!("reserved-flood{number}"), &listener, ""))
        .collect::<Result<Vec<Host>>>()?;
    let (mut rates, mut worst, mut repeated) = (Vec::new(), f64::INFINITY, 0);
    while rates.len() < runs && repeated <= REPEATS {
        let seed = 100 * (rates.len() as u64 + u64::from(repeated)) + 1;
        let [got, others] = watch(&mut has, &mut floods, seed).with_context(|| exporter.log_tail())?;
        let [without, _] = watch(&mut has_not, &mut floods, seed + 50)?;
        worst = worst.min(got + others);
        match got + others >= UNDISTURBED * CAPACITY as f64 {
            true => rates.push([got, others, without]),
            false => repeated += 1,
        }
    }
    for host in [&mut has, &mut has_not].into_iter().chain(&mut floods) {
        host.check()?;
    }
    if rates.len() < runs {
        let why = format!(
            "{repeated} of {} runs were disturbed: all together got as little as {worst:.0} of {CAPACITY} requests per second",
            rates.len() + repeated as usize
        );
        return Ok(vec![("reservation_held", Figure::missing(why))]);
    }
    let least = rates.iter().copied().min_by(|one, other| one[0].total_cmp(&other[0]));
    let [got, others, without] = least.context("a run")?;
    let figure = Figure::of(got / RESERVED as f64)
        .beside("got_per_s", got)
        .beside("all_others_per_s", others)
        .beside("reserved_per_s", RESERVED)
        .beside("capacity_per_s", CAPACITY)
        .beside("without_a_reservation_per_s", without)
        .beside("runs", runs)
        .beside("disturbed_runs_repeated", repeated)
        .beside("seconds", WATCHED.as_secs());
    Ok(vec![("reservation_held", figure)])
}

/// What `watched` gets beside the others, and what these get together, requests per second.
fn watch(watched: &mut Host, floods: &mut [Host], seed: u64) -> Result<[f64; 2]> {
    let mut flows = vec![Flow::new(&mut watched.guest, 0, Offered::Backlog(DEPTH), BLOCK, seed)];
    for (seed, host) in (seed + 1..).zip(floods) {
        flows.push(Flow::new(&mut host.guest, 0, Offered::Backlog(FLOOD_DEPTH), BLOCK, seed));
    }
    let mut counts = [0u64; 2];
    drive(&mut flows, WARM + WATCHED, |completion| {
        counts[usize::from(completion.flow > 0)] += u64::from(completion.at >= ns(WARM));
    })?;
    let rates = counts.map(|count| count as f64 / WATCHED.as_secs_f64());
    // Bursts of a bucket are a second of its rate at most.
    let most = CAPACITY as f64 * (1.0 + 2.0 / WATCHED.as_secs_f64());
    ensure!(rates[0] + rates[1] <= most, "{rates:?} per second of an export that does {CAPACITY}");
    Ok(rates)
}

/// A host with one disk, which is the export.
struct Host {
    served: Served,
    guest: Guest,
}

impl Host {
    fn start(bench: &Bench, name: &str, exporter: &Listener, more: &str) -> Result<Self> {
        let folder = bench.folders.run(name);
        let socket: &Path = &folder.join("disk.sock");
        let keys = format!("remote = \"{}\"{more}", exporter.uri());
        let configuration = Configuration::new(bench.mode).disk("disk", socket, &keys);
        let mut served = configuration.start(&ioplane()?, &folder, &bench.place)?;
        served.await_socket(socket)?;
        let guest = Guest::connect(socket, FORM).with_context(|| served.log_tail())?;
        let mut host = Host { served, guest };
        host.check()?;
        Ok(host)
    }

    /// Its reads are right.
    fn check(&mut self) -> Result<()> {
        let blocks = self.guest.capacity / u64::from(BLOCK);
        read(&mut self.guest, blocks, CHECKED.min(blocks), SALT).with_context(|| self.served.log_tail())
    }
}
