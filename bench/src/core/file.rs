//! 4 KiB random reads of a file, 32 in flight: requests per CPU second against qemu-storage-daemon, in its best way.

use anyhow::{Context, Result};
use ioplane_figures::report::{median, rounded};
use ioplane_testkit::driver::DiskOp;
use serde_json::{Map, json};

use super::Bench;
use crate::exitless::backend::Backend;
use crate::exitless::ioplane::Ioplane;
use crate::exitless::load::{Load, Outcome, Scatter, Waiting};
use crate::exitless::qsd::{Aio, Qsd};
use crate::exitless::session::Session;
use crate::measured::Figure;

const DEPTH: u16 = 32;

/// Every way of the peer with O_DIRECT, as ioplane has: both engines, its iothread polling as it does by default and not at all.
const WAYS: [Qsd; 4] = [
    way(Aio::UringDirect, None),
    way(Aio::UringDirect, Some(0)),
    way(Aio::NativeDirect, None),
    way(Aio::NativeDirect, Some(0)),
];

const fn way(file: Aio, poll_max_ns: Option<u32>) -> Qsd {
    Qsd { memory: file, file, poll_max_ns }
}

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!("file: which way of qemu-storage-daemon is the cheapest");
    let mut costs = Vec::new();
    let mut probes = Map::new();
    for (number, qsd) in WAYS.into_iter().enumerate() {
        let name = format!("{:?}, poll-max-ns {:?}", qsd.file, qsd.poll_max_ns);
        match probe(bench, &qsd, number) {
            Ok(cost) => {
                probes.insert(name, json!(rounded(cost)));
                costs.push((qsd, cost));
            }
            Err(error) => {
                eprintln!("{name}: {error:#}");
                probes.insert(name, format!("{error:#}").into());
            }
        }
    }
    let Some((best, _)) = costs.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)) else {
        let why = "qemu-storage-daemon serves no file here: is it installed (qemu-system-common)?";
        return Ok(vec![("file_depth32_per_cpu_vs_qsd", Figure::missing(why))]);
    };
    eprintln!("file: against {best:?}");
    let ioplane = Ioplane { mode: bench.mode, binary: Some(bench.binary.clone()) };
    let mut sessions = [open(bench, &ioplane, "file-ioplane")?, open(bench, &best, "file-qsd")?];
    let (mut pairs, mut iops) = (Vec::new(), [Vec::new(), Vec::new()]);
    for number in 0..bench.pace.pairs {
        let mut per_second = [0.0; 2];
        for side in Bench::order(number) {
            let outcome = round(bench, &mut sessions[side], number)?;
            per_second[side] = 1e6 / cpu_us(&outcome);
            iops[side].push(outcome.requests as f64 / outcome.seconds);
        }
        pairs.push(per_second);
    }
    let [ours, peers] = iops.map(median);
    let figure = Figure::ratio(&pairs)
        .beside("iops", ours)
        .beside("qsd_iops", peers)
        .beside("cpu_us_per_request", median(pairs.iter().map(|pair| 1e6 / pair[0])))
        .beside("qsd_cpu_us_per_request", median(pairs.iter().map(|pair| 1e6 / pair[1])))
        .beside("qsd", sessions[1].how.clone())
        .beside("qsd_cpu_us_per_request_by_way", probes);
    for session in sessions {
        session.close()?;
    }
    Ok(vec![("file_depth32_per_cpu_vs_qsd", figure)])
}

fn open(bench: &Bench, backend: &dyn Backend, name: &str) -> Result<Session> {
    let backing = bench.folders.backing(name, true, bench.pace.file_bytes)?;
    Session::open(backend, &backing, &bench.folders.run(name), &bench.place, true)
}

/// Processor time per request of one way, us.
fn probe(bench: &Bench, qsd: &Qsd, number: usize) -> Result<f64> {
    let mut session = open(bench, qsd, &format!("file-probe-{number}"))?;
    let costs: Result<Vec<f64>> =
        (0..3).map(|round_number| Ok(cpu_us(&round(bench, &mut session, round_number)?))).collect();
    Ok(median(costs?))
}

fn round(bench: &Bench, session: &mut Session, number: u32) -> Result<Outcome> {
    let (warm, time) = (bench.pace.round / 4, bench.pace.round);
    let load = Load { op: DiskOp::Read, depth: DEPTH, blocks: 0, waiting: Waiting::Polling, warm, time };
    // Both go to the same places.
    session.round(load, &mut Scatter::new(u64::from(number) + 1)).context("reading a file")
}

fn cpu_us(outcome: &Outcome) -> f64 {
    outcome.cpu_ns as f64 / 1e3 / (outcome.requests as f64).max(1.0)
}
