//! The exporter at the far end of a link: what goes over it, how much of it a disk gets, and what others on it leave to the disk.
//!
//! ```text
//!   generator (front) -- importer (back) -- veth pair, tbf on both ends -- exporter (back, in a namespace)
//!                        iperf3 (back)                                     iperf3 (back)
//! ```

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use ioplane_figures::cable::{Cable, FAR};
use ioplane_figures::machine;
use ioplane_testkit::driver::DiskOp;
use serde_json::{Value, json};

use super::contender::{Contender, Exporter, Importer, Way, Wire};
use super::{Bench, DEEP};
use crate::daemon::within;
use crate::exitless::load::{BLOCK, Load, Outcome, Scatter, Waiting};
use crate::exitless::session::Session;
use crate::measured::Figure;
use crate::served::{Place, Served};

/// What others send on a link of 1 Gbit/s towards the importer, Mbit/s.
const OTHERS: [u32; 6] = [0, 250, 500, 750, 900, 1000];
/// Of these, the one by which the figure goes: the paper's throughput "drops more rapidly" from there on.
const HALF: u32 = 500;
const FIGURES: [&str; 5] = [
    "wire_overhead_percent",
    "wire_overhead_tls_percent",
    "link_1g_vs_iperf3",
    "link_10g_vs_iperf3",
    "congestion",
];

/// All of it, or figures that say why not.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let name = format!("iob{}", std::process::id() % 1_000_000);
    let cable = match Cable::lay(&name) {
        Ok(cable) => cable,
        Err(why) => {
            let why = format!("no network namespace: {why}");
            return Ok(FIGURES.map(|figure| (figure, Figure::missing(&why))).into());
        }
    };
    let link = Link { bench, cable };
    let [fast, tenth] = [link.against_iperf(10_000)?, link.against_iperf(1_000)?];
    let congestion = link.congestion()?;
    // Last: it stays so.
    link.cable.frame_by_frame()?;
    Ok(vec![
        ("wire_overhead_percent", link.overhead(false)?),
        ("wire_overhead_tls_percent", link.overhead(true)?),
        ("link_1g_vs_iperf3", tenth),
        ("link_10g_vs_iperf3", fast),
        ("congestion", congestion),
    ])
}

struct Link<'a> {
    bench: &'a Bench,
    cable: Cable,
}

impl Link<'_> {
    fn open(&self, name: &'static str, tls: bool) -> Result<Session> {
        let way = Way::Remote(Importer::Ioplane, Wire::Cable { tls }, Exporter::Ioplane);
        let space = Some(self.cable.space().to_owned());
        self.bench.open(&Contender { space, ..self.bench.contender(name, way) })
    }

    /// Reads for `time`; nothing that is not counted but what is in flight at the end.
    fn read(session: &mut Session, depth: u16, time: Duration) -> Result<Outcome> {
        let (warm, waiting) = (Duration::ZERO, Waiting::Polling);
        session.round(Load { op: DiskOp::Read, depth, blocks: 0, waiting, warm, time }, &mut Scatter::new(1))
    }

    /// Bytes on the wire beside those of the disk, in percent of the latter.
    fn overhead(&self, tls: bool) -> Result<Figure> {
        let name = if tls { "link_tls" } else { "link" };
        let mut session = self.open(name, tls)?;
        let mut of = |depth| -> Result<[f64; 2]> {
            let before = self.cable.carried()?;
            // What is in flight at the end is carried and not counted: of so many, one in a thousand.
            let outcome = Self::read(&mut session, depth, Duration::from_secs(1))?;
            let after = self.cable.carried()?;
            let [bytes, frames] = [0, 1].map(|at| (after[at] - before[at]) as f64 / outcome.requests as f64);
            Ok([(bytes / f64::from(BLOCK) - 1.0) * 100.0, frames])
        };
        let ([deep, frames], [single, frames_of_one]) = (of(DEEP)?, of(1)?);
        session.close()?;
        Ok(Figure::of(deep)
            .beside("frames_per_request", frames)
            .beside("depth_1_percent", single)
            .beside("depth_1_frames_per_request", frames_of_one)
            .beside("counted", "Ethernet headers included; no preamble, checksum, gap; MTU of 1500"))
    }

    /// Bytes of the disk per second, over those of one connection of iperf3, on a link of so many Mbit/s.
    fn against_iperf(&self, mbit: u32) -> Result<Figure> {
        eprintln!("a link of {mbit} Mbit/s");
        self.cable.limit(mbit)?;
        let name = if mbit == 1_000 { "link_1g" } else { "link_10g" };
        let mut session = self.open(name, false)?;
        let mut pairs = Vec::new();
        for _ in 0..self.bench.pace.rounds.min(8) {
            let outcome = Self::read(&mut session, DEEP, self.bench.pace.time)?;
            let disk = outcome.requests as f64 * f64::from(BLOCK) / outcome.seconds;
            match self.iperf() {
                Ok(stream) => pairs.push([disk, stream]),
                Err(why) => return Ok(Figure::missing(format!("{why:#}"))),
            }
        }
        session.close()?;
        let mib = |side: usize| {
            let mean = pairs.iter().map(|pair| pair[side]).sum::<f64>() / pairs.len() as f64;
            mean / f64::from(1 << 20)
        };
        Ok(Figure::ratio(&pairs).beside("disk_mib_per_s", mib(0)).beside("iperf3_mib_per_s", mib(1)))
    }

    /// What one connection of iperf3 gets in the direction of reads, bytes per second.
    fn iperf(&self) -> Result<f64> {
        let _server = self.iperf_server("iperf3")?;
        iperf_client(&self.bench.place, None, FAR, &["-R", "-t", "1"])
    }

    fn iperf_server(&self, name: &str) -> Result<Served> {
        iperf_server(&self.bench.place, self.cable.space(), &self.bench.folders.run(name))
    }

    /// The disk on a link of 1 Gbit/s on which others send UDP in the same direction, as in Figure 8 of the paper: what it has beside [`HALF`], over what
    /// it has alone.
    fn congestion(&self) -> Result<Figure> {
        self.cable.limit(1_000)?;
        let mut session = self.open("link_congested", false)?;
        let mut points = Vec::new();
        for others in OTHERS {
            let flood = match others {
                0 => None,
                others => Some(self.flood(others)?),
            };
            let outcome = Self::read(&mut session, DEEP, Duration::from_secs(2))?;
            drop(flood);
            points.push((others, outcome.requests as f64 * f64::from(BLOCK) / outcome.seconds));
        }
        // Every byte once more: none was lost to the flood.
        session.close()?;
        let at =
            |wanted| points.iter().find(|(others, _)| *others == wanted).map_or(f64::NAN, |point| point.1);
        let shown: Vec<Value> = points
            .iter()
            .map(|(others, bytes)| json!({"others_mbit_per_s": others, "disk_mbit_per_s": (bytes * 8e-6).round()}))
            .collect();
        Ok(Figure::of(at(HALF) / at(0)).beside("points", shown))
    }

    /// Others send so many Mbit/s of UDP from the far end until this is dropped.
    fn flood(&self, mbit: u32) -> Result<Flood> {
        let folder = self.bench.folders.run("flood");
        let mut server = self.iperf_server("flood")?;
        let mut command = Command::new("iperf3");
        command.args(["-c", &FAR.to_string(), "-R", "-u", "-t", "60", "-b", &format!("{mbit}M")]);
        let client = self.bench.place.spawn(&command, &folder.join("client"))?;
        let before = self.cable.carried()?[0];
        server.await_listener(&"the flood", || {
            self.cable.carried().is_ok_and(|now| now[0] > before + 1_000_000)
        })?;
        Ok(Flood { _client: client, _server: server })
    }
}

/// What a client of iperf3 in that namespace, or here, measures with these words, bytes per second that arrived.
pub fn iperf_client(place: &Place, space: Option<&str>, server: Ipv4Addr, words: &[&str]) -> Result<f64> {
    let mut command = within(space, "iperf3");
    command.args(["-c", &server.to_string(), "-J"]).args(words);
    machine::pin(place.cpus.back)?;
    let output = command.stdin(Stdio::null()).output();
    machine::pin(place.cpus.front)?;
    let output = output.context("iperf3: is it installed?")?;
    let said: Value = serde_json::from_slice(&output.stdout).context("what iperf3 said")?;
    let bits = said["end"]["sum_received"]["bits_per_second"].as_f64();
    bits.map(|bits| bits / 8.0).ok_or_else(|| anyhow!("iperf3: {}", said["error"]))
}

/// A server of iperf3 in that namespace, for one client; its log is in `folder`.
pub fn iperf_server(place: &Place, space: &str, folder: &Path) -> Result<Served> {
    std::fs::create_dir_all(folder)?;
    let mut command = within(Some(space), "iperf3");
    command.args(["-s", "--one-off", "--forceflush"]);
    let log = folder.join("iperf3_server");
    let mut server = place.spawn(&command, &log)?;
    // A connection would be its one.
    server.await_listener(&"its port", || {
        std::fs::read_to_string(&log).is_ok_and(|said| said.contains("listening"))
    })?;
    Ok(server)
}

struct Flood {
    _client: Served,
    _server: Served,
}
