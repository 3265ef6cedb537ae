//! The same load over one device and over eight of as many guests: what it costs a core to go round.
//!
//! It costs the generator something, too, to go round eight rings. So it is measured over eight queues of one device beside that: there
//! the generator has as much to do as with eight devices.

use anyhow::Result;
use ioplane_figures::report::median;

use super::drive::{Flow, drive, ns};
use super::stage::{FORM, Stage};
use super::{Bench, SECOND};
use crate::exitless::load::BLOCK;
use crate::guest::Form;
use crate::measured::Figure;

/// Devices, each of a guest with memory of its own.
const DEVICES: u16 = 8;
/// Requests in flight, over all devices.
const DEPTH: u16 = 32;

/// Requests per second over eight devices, as a part of those over one, in pairs of runs; between the two, over eight queues of one device.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!(
        "{DEPTH} requests in flight over {DEVICES} devices, over one, and over {DEVICES} queues of one"
    );
    let mut stages =
        [stage(bench, "eight", DEVICES, 1)?, stage(bench, "one", 1, 1)?, stage(bench, "queues", 1, DEVICES)?];
    let mut pairs = Vec::new();
    for number in 0..bench.pace.pairs {
        let mut rates = [0.0; 3];
        let [first, last] = Bench::order(number);
        for side in [first, 2, last] {
            rates[side] = stages[side].turn(|stage| {
                let seed = u64::from(number) + 1;
                let rings: usize = stage.guests.iter().map(|guest| guest.queues.len()).sum();
                let depth = DEPTH / rings as u16;
                let flows = stage.guests.iter_mut();
                let mut flows: Vec<_> =
                    flows.flat_map(|guest| Flow::each_queue(guest, depth, BLOCK, seed)).collect();
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
    let ratio = |one: usize, other: usize| {
        Figure::ratio(&pairs.iter().map(|pair| [pair[one], pair[other]]).collect::<Vec<_>>())
    };
    let figure = ratio(0, 1)
        .beside("requests_per_s", of(0))
        .beside("one_requests_per_s", of(1))
        .beside("queues8_requests_per_s", of(2))
        .beside("devices8_against_queues8", ratio(0, 2).brief())
        .beside("queues8_against_one", ratio(2, 1).brief());
    Ok(vec![("devices8_ratio", figure)])
}

/// A daemon with so many disks of so many queues each, together as large as those of every other one.
fn stage(bench: &Bench, name: &str, devices: u16, queues: u16) -> Result<Stage> {
    let names: Vec<String> = (0..devices).map(|number| format!("disk{number}")).collect();
    let keys = format!("memory = \"{}M\"\nqueues = {queues}", 64 / devices);
    let disks: Vec<_> = names.iter().map(|name| (name.as_str(), keys.as_str())).collect();
    let mut stage = Stage::start(bench, name, bench.mode, &disks)?;
    for name in &names {
        stage.connect(name, Form { queues, ..FORM })?;
    }
    Ok(stage)
}
