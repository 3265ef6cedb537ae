//! The host's side of a power cut, run in L1 by `tests/power.rs`, where the sockets and devices are.
//!
//! ```text
//!   stamps write PORT ROUNDS COUNT DISK=MAPPER...    the guest stamps each disk; each acknowledged flush is a mark in its log
//!   stamps check LOG BYTES DISK COUNT MINIMUM [DEVICE]  the power fails at each mark: is everything there? with DEVICE, on its ext4
//! ```

use anyhow::{Context, Result, bail, ensure};
use ioplane_e2e::Agent;
use ioplane_e2e::logwrites::Log;
use ioplane_e2e::process::run;
use ioplane_e2e::protocol::{StampSpec, Stamps};
use std::path::Path;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(180);
/// Blocks between two flushes.
const EVERY: u64 = 2;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["write", port, rounds, count, ref disks @ ..] => write(port, rounds.parse()?, count.parse()?, disks),
        ["check", log, bytes, disk, count, least, ref device @ ..] => {
            check(log, bytes.parse()?, disk, count.parse()?, least.parse()?, device.first().copied())
        }
        _ => bail!(
            "stamps write PORT ROUNDS COUNT DISK=MAPPER... | check LOG BYTES DISK COUNT MINIMUM [DEVICE]"
        ),
    }
}

fn spec(device: &str, count: u64, round: u32) -> StampSpec {
    StampSpec { device: device.into(), count, flush_every: EVERY, round, ..StampSpec::default() }
}

fn write(port: &str, rounds: u32, count: u64, disks: &[&str]) -> Result<()> {
    let end = Instant::now() + LIMIT;
    while !Path::new(port).exists() {
        ensure!(Instant::now() < end, "no port {port}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let agent = Agent::connect(Path::new(port))?;
    agent.hello(LIMIT, || Ok(()))?;
    for round in 1..=rounds {
        for disk in disks {
            let (disk, mapper) = disk.split_once('=').context("DISK=MAPPER")?;
            let mut marked = Ok(String::new());
            agent.write_stamp(spec(&format!("serial:{disk}"), count, round), LIMIT, |flushed| {
                if marked.is_ok() {
                    let mark = format!("{round}.{flushed}");
                    marked = run("dmsetup", &["message", mapper, "0", "mark", &mark]);
                }
            })?;
            marked?;
        }
        println!("round {round}");
    }
    agent.poweroff()
}

fn check(log: &str, bytes: usize, disk: &str, count: u64, least: u64, device: Option<&str>) -> Result<()> {
    let (mut log, mut image, mut marks) = (Log::open(log)?, vec![0; bytes], 0u64);
    while let Some(mark) = log.replay(&mut image)? {
        let Some((round, flushed)) = mark.split_once('.') else { continue };
        let (round, flushed) = (round.parse::<u32>()?, flushed.parse::<usize>()?);
        let found = after_the_cut(&image, disk, count, device).with_context(|| format!("at mark {mark}"))?;
        for (block, holds) in found.rounds.iter().enumerate() {
            let safe = if block < flushed { round } else { round - 1 };
            ensure!(
                *holds >= safe,
                "LOST: the power fails at mark {mark}: block {block} holds round {holds}, and {safe} was acknowledged"
            );
        }
        ensure!(found.broken.is_empty(), "BROKEN at mark {mark}: {:?}", found.broken);
        marks += 1;
    }
    println!("{marks} marks, {} flushes, nothing lost", log.flushes);
    ensure!(marks >= least, "{marks} marks, and {least} at least were to come");
    ensure!(log.flushes >= marks, "{} flushes for {marks} marks", log.flushes);
    Ok(())
}

/// What the machine finds when the power is back: on the bare disk, or in the file of that name on its ext4, which recovers first.
fn after_the_cut(image: &[u8], disk: &str, count: u64, device: Option<&str>) -> Result<Stamps> {
    let folder = format!("/tmp/after-{disk}");
    std::fs::create_dir_all(&folder)?;
    // By its name the reader knows whose stamps it looks for.
    let file = format!("{folder}/{disk}");
    let Some(device) = device else {
        std::fs::write(&file, image)?;
        return ioplane_guest_load::journal::read(&spec(&file, count, 1));
    };
    std::fs::write(device, image)?;
    run("mount", &["-t", "ext4", device, &folder])?;
    let found = ioplane_guest_load::journal::read(&spec(&file, count, 1));
    run("umount", &[&folder])?;
    found
}
