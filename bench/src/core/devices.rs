//! The same load over one device and over eight of as many guests: what it costs a core to go round.

use anyhow::Result;
use ioplane_figures::report::median;

use super::drive::{Flow, drive, ns};
use super::offered::Offered;
use super::stage::{FORM, Stage};
use super::{Bench, SECOND};
use crate::exitless::load::BLOCK;
use crate::measured::Figure;

/// Devices, each of a guest with memory of its own.
const DEVICES: u16 = 8;
/// Requests in flight, over all devices.
const DEPTH: u16 = 32;

/// Requests per second over eight devices, as a part of those over one, in pairs of runs.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!("{DEPTH} requests in flight over {DEVICES} devices, and over one");
    let mut stages = [stage(bench, "eight", DEVICES)?, stage(bench, "one", 1)?];
    let mut pairs = Vec::new();
    for number in 0..bench.pace.pairs {
        let mut rates = [0.0; 2];
        for side in Bench::order(number) {
            rates[side] = stages[side].turn(|stage| {
                let depth = DEPTH / stage.guests.len() as u16;
                let seed = u64::from(number) + 1;
                let flow = |guest| Flow::new(guest, 0, Offered::Backlog(depth), BLOCK, seed);
                let mut flows: Vec<_> = stage.guests.iter_mut().map(flow).collect();
                let (time, mut count) = (bench.pace.round, 0u64);
                // An eighth of the time to warm up.
                let warm = ns(time) / 8;
                drive(&mut flows, time, |completion| count += u64::from(completion.at >= warm))?;
                Ok(count as f64 / (ns(time) - warm) as f64 * SECOND as f64)
            })?;
        }
        pairs.push(rates);
    }
    let of = |side: usize| median(pairs.iter().map(|pair| pair[side]));
    let figure = Figure::ratio(&pairs).beside("requests_per_s", of(0)).beside("one_requests_per_s", of(1));
    Ok(vec![("devices8_ratio", figure)])
}

/// A daemon with so many disks, together as large as those of every other one.
fn stage(bench: &Bench, name: &str, devices: u16) -> Result<Stage> {
    let names: Vec<String> = (0..devices).map(|number| format!("disk{number}")).collect();
    let keys = format!("memory = \"{}M\"", 64 / devices);
    let disks: Vec<_> = names.iter().map(|name| (name.as_str(), keys.as_str())).collect();
    let mut stage = Stage::start(bench, name, bench.mode, &disks)?;
    for name in &names {
        stage.connect(name, FORM)?;
    }
    Ok(stage)
}
