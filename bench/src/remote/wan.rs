//! The exporter far away: 200 ms there and back, and one packet in a hundred is lost each way. What the disk gets, against iperf3 with as many connections.
//!
//! ```text
//!   generator (sleeps) -- importer, in a namespace -- TAP, tbf -- relay -- tbf, TAP -- exporter, in another
//!                         iperf3                                                       iperf3
//! ```
//!
//! The relay is a thread of this process, on the generator's processor. Disk and iperf3 take turns, with the same congestion control.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ioplane_testkit::driver::{DiskOp, DiskPlan, Shape};
use ioplane_testkit::relay::{BOTH, Conditions, Relay, RelayDirection};
use ioplane_testkit::space::{NetworkSpace, run};
use serde_json::Map;

use super::link::{iperf_client, iperf_server};
use super::{Bench, Options};
use crate::daemon::Configuration;
use crate::exitless::load::Scatter;
use crate::guest::{Form, Guest, PATIENCE};
use crate::measured::Figure;
use crate::served::{Served, ioplane};

const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 8, 1);
const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 8, 2);
const NETWORK: &str = "198.18.8.0/30";
const PORT: u16 = 10809;
/// Of each direction.
const DELAY: Duration = Duration::from_millis(100);
const LOSS_PERCENT: f64 = 1.0;
/// What either side may send at most, Mbit/s: more than a wide area has, and less than a relay and both sides need two processors for.
const MBIT: u32 = 200;
/// Of the disk, and of iperf3.
const CONNECTIONS: u16 = 8;
/// Of requests, bytes.
const LARGE: u32 = 64 << 10;
/// In flight on each connection: 2 MiB, of which the link takes 0.6, and as much again for each round trip in which the receiver waits for a packet that was
/// lost.
const DEPTH: u16 = 32;
const DISK: u64 = 64 << 20;
/// Which others have on their hosts; the one of this host is measured too.
const USUAL: &str = "cubic";
const SYSCTL: &str = "/proc/sys/net/ipv4";

/// How much.
struct Pace {
    rounds: u32,
    warm: Duration,
    time: Duration,
}

/// All of it, or a figure that says why not.
pub fn measure(bench: &Bench, options: &Options) -> Result<Vec<(&'static str, Figure)>> {
    let seconds = Duration::from_secs;
    let pace = match options.quick {
        true => Pace { rounds: 3, warm: seconds(4), time: seconds(10) },
        false => Pace { rounds: 3, warm: seconds(5), time: seconds(20) },
    };
    let figure = match Wan::new(bench) {
        Ok(wan) => wan.against_iperf(&pace)?,
        Err(why) => Figure::missing(format!("no network namespaces, or no TAP devices: {why:#}")),
    };
    Ok(vec![("wan_vs_iperf3", figure)])
}

/// The relay goes first.
struct Wan<'a> {
    bench: &'a Bench,
    relay: Relay,
    near: NetworkSpace,
    far: NetworkSpace,
}

impl<'a> Wan<'a> {
    fn new(bench: &'a Bench) -> Result<Self> {
        let (near, far) = (NetworkSpace::new()?, NetworkSpace::new()?);
        let relay = Relay::join([(&near, NEAR), (&far, FAR)], 17)?;
        for (space, way) in [(&near, RelayDirection::There), (&far, RelayDirection::Back)] {
            let (space, device) = (space.name(), relay.device(way));
            run(
                "tc",
                &format!(
                    "-n {space} qdisc replace dev {device} root tbf rate {MBIT}mbit burst 256k latency 50ms"
                ),
            )?;
        }
        // From the first packet on: BBR goes by the shortest way that it has seen.
        relay.set_both(|conditions| {
            *conditions = Conditions { delay: DELAY, loss_percent: LOSS_PERCENT, ..*conditions };
        });
        Ok(Wan { bench, relay, near, far })
    }

    /// Nobody learns from connections before.
    fn forget(&self) -> Result<()> {
        for space in [&self.near, &self.far] {
            let written = space.inside(|| std::fs::write(format!("{SYSCTL}/tcp_no_metrics_save"), "1"))?;
            written.context("tcp_no_metrics_save")?;
        }
        Ok(())
    }

    /// By their route: a namespace may not have every control as its default.
    fn control(&self, control: &str) -> Result<()> {
        for (space, way, own) in
            [(&self.near, RelayDirection::There, NEAR), (&self.far, RelayDirection::Back, FAR)]
        {
            let device = self.relay.device(way);
            space.ip(&format!(
                "route replace {NETWORK} dev {device} proto kernel scope link src {own} congctl {control}"
            ))?;
        }
        Ok(())
    }

    /// Reads and writes with each congestion control: the worst of them, and all beside it.
    fn against_iperf(&self, pace: &Pace) -> Result<Figure> {
        self.forget()?;
        let of_host = std::fs::read_to_string(format!("{SYSCTL}/tcp_congestion_control"))?;
        let mut controls = vec![USUAL, of_host.trim()];
        controls.dedup();
        let (mut worst, mut all) = (None::<Figure>, Map::new());
        for control in controls {
            self.control(control)?;
            for (name, op) in [("reads", DiskOp::Read), ("writes", DiskOp::Write)] {
                eprintln!("{name} over a link of 200 ms and 1 % loss, {control}");
                let pairs = self.pairs(op, control, pace)?;
                let mib = |side: usize| {
                    let mean = pairs.iter().map(|pair| pair[side]).sum::<f64>() / pairs.len() as f64;
                    (mean / f64::from(1 << 20) * 100.0).round() / 100.0
                };
                let figure = Figure::ratio(&pairs);
                let mut brief = figure.brief();
                brief["disk_mib_per_s"] = mib(0).into();
                brief["iperf3_mib_per_s"] = mib(1).into();
                eprintln!("  {brief}");
                all.insert(format!("{name}_{control}"), brief);
                if worst.as_ref().is_none_or(|worst| figure.value() < worst.value()) {
                    worst = Some(figure);
                }
            }
        }
        let [there, back] = BOTH.map(|way| self.relay.counts(way));
        let overflowed = there.overflowed + back.overflowed;
        let mut figure = worst.unwrap_or_default();
        for (name, brief) in all {
            figure = figure.beside(&name, brief);
        }
        Ok(figure.beside("connections", CONNECTIONS).beside("frames_that_found_the_relay_full", overflowed))
    }

    /// Bytes per second of the disk and of iperf3, each first in turn. Both begin with new connections.
    fn pairs(&self, op: DiskOp, control: &str, pace: &Pace) -> Result<Vec<[f64; 2]>> {
        let mut pairs = Vec::new();
        for round in 0..pace.rounds {
            let folder = self.bench.folders.run(&format!("wan_{op:?}_{control}_{round}"));
            let disk = || -> Result<f64> {
                let (served, mut guest) = self.disk(&folder)?;
                let rate = transfer(&mut guest, op, pace, &mut Scatter::new(u64::from(round) + 1));
                rate.with_context(|| format!("{op:?} with {control}\n{}", served.log_tail()))
            };
            let iperf = || self.iperf(op, pace, &folder);
            pairs.push(if round % 2 == 0 {
                let first = disk()?;
                [first, iperf()?]
            } else {
                let first = iperf()?;
                [disk()?, first]
            });
        }
        Ok(pairs)
    }

    /// Both daemons, and a guest of as many queues as there are to be connections.
    fn disk(&self, folder: &Path) -> Result<(Served, Guest)> {
        let (mode, place, binary) = (self.bench.mode, &self.bench.place, ioplane()?);
        let at = SocketAddr::from((FAR, PORT));
        let of_exporter = folder.join("exporter");
        let keys = format!("memory = \"{DISK}\"\nlisten = \"{at}\"\nplain = true");
        let exporter = Configuration::new(mode).within(Some(self.far.name()));
        let exporter = exporter.export("data", &of_exporter.join("nbd.sock"), &keys);
        let mut exporter = exporter.start(&binary, &of_exporter, place)?;
        let connects = || TcpStream::connect_timeout(&at, Duration::from_secs(1)).is_ok();
        exporter.await_listener(&at, || self.near.inside(connects).unwrap_or(false))?;
        let socket = folder.join("disk.sock");
        let keys = format!("queue_size = 256\nqueues = {CONNECTIONS}\nremote = \"nbd://{at}/data\"");
        let importer = Configuration::new(mode).within(Some(self.near.name())).disk("bench", &socket, &keys);
        let mut served = importer.start(&binary, folder, place)?.of(exporter);
        let listens = || ioplane_testkit::front::listens(&socket);
        served.await_listener(&socket.display(), || self.near.inside(listens).unwrap_or(false))?;
        let plan = DiskPlan::new(DEPTH, LARGE, Shape::Indirect);
        let guest = Guest::connect(&socket, Form { ring: 256, queues: CONNECTIONS, plan })?;
        ensure!(guest.capacity == DISK, "the disk has {} bytes", guest.capacity);
        Ok((served, guest))
    }

    fn iperf(&self, op: DiskOp, pace: &Pace, folder: &Path) -> Result<f64> {
        let place = &self.bench.place;
        let _server = iperf_server(place, self.far.name(), folder)?;
        let (time, omitted) = (pace.time.as_secs().to_string(), pace.warm.as_secs().to_string());
        let connections = CONNECTIONS.to_string();
        let mut words = vec!["-t", &time, "-O", &omitted, "-P", &connections];
        if op == DiskOp::Read {
            words.push("-R");
        }
        iperf_client(place, Some(self.near.name()), FAR, &words)
    }
}

/// Bytes per second of a closed loop on all queues. Requests are in flight when it returns.
fn transfer(guest: &mut Guest, op: DiskOp, pace: &Pace, scatter: &mut Scatter) -> Result<f64> {
    let (begin, mut moved, mut last) = (Instant::now(), 0u64, Instant::now());
    let mut counted = None;
    loop {
        let before = moved;
        for index in 0..CONNECTIONS {
            let queue = &mut guest.queues[usize::from(index)];
            queue.ring().disable_interrupts();
            while let Some(done) = queue.reap()? {
                ensure!(done.ok(), "a request ended with status {:#x}", done.status);
                moved += u64::from(LARGE);
            }
            while queue.in_flight() < DEPTH {
                let sector = scatter.below(DISK / u64::from(LARGE)) * u64::from(LARGE / 512);
                queue.submit(op, sector, LARGE).context("no free slot")?;
            }
            guest.kick_if_needed(index);
        }
        let now = Instant::now();
        if moved != before {
            last = now;
        }
        ensure!(now - last < PATIENCE, "nothing completed for {PATIENCE:?}");
        match counted {
            None if now - begin >= pace.warm => counted = Some((now, moved)),
            Some((since, had)) if now - since >= pace.time => {
                return Ok((moved - had) as f64 / (now - since).as_secs_f64());
            }
            _ => std::thread::sleep(Duration::from_micros(500)),
        }
    }
}
