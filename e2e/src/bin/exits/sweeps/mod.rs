//! `--sweeps`: what the paper shows as figures. Block sizes, round trips and streams by message size, and rates of the tick.
//!
//! ```text
//!   L1: sweep.pl lead --- a NIC of the guest --- sweep.pl follow: Debian with IDE, e1000, rtl8139, virtio-net
//!       reads KVM's counters before and after         its own clock, its own count of interrupts
//!   L1: tiny-guest tick HZ, with and without the library's clamp
//! ```

mod messages;
mod ticks;
mod ways;

use super::MINUTE;
use super::remedies::{self, NETS};
use anyhow::{Context, Result, ensure};
use ioplane_e2e::{L1, L2};
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::Duration;

const PORT: u16 = 7007;
/// How long pairs are run for one comparison.
const LIMIT: Duration = Duration::from_secs(150);

/// What the sweeps have found.
#[derive(Serialize)]
pub struct Outcome {
    /// By how many per cent more two writers of an IDE disk get written without a scheduler than with mq-deadline, over all sizes of blocks.
    scheduler_none_percent: Value,
    scheduler_none_interval_percent: Option<[f64; 2]>,
    scheduler_none_pairs: usize,
    /// By how many per cent more messages an e1000 carries with `napi_defer_hard_irqs` than without.
    napi_percent: Value,
    napi_interval_percent: Option<[f64; 2]>,
    napi_pairs: usize,
    scheduler: Vec<ways::Row>,
    napi: Vec<ways::Row>,
    messages: Vec<messages::Row>,
    ticks: Vec<ticks::Row>,
}

/// Boots an L1 for them.
pub fn all(say: &dyn Fn(&str)) -> Result<(Outcome, String)> {
    let l1 = L1::boot(2048, "", say)?;
    let ticks = ticks::rows(&l1, say).context("rates of the tick")?;
    remedies::serve(&l1).context("the other end of the network in L1")?;
    let kind = remedies::every();
    let guest = remedies::boot_after(&l1, &l1.interposed()?, &kind, "")?;
    say("a guest with IDE, e1000, rtl8139 and virtio-net is up");
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/sweeps/sweep.pl");
    fs::copy(program, guest.folder().join("sweep.pl"))?;
    let messages = messages::rows(&l1, &guest, kind.name, say).context("messages")?;
    l1.clustering(&format!("off --vm {}", kind.name))?;
    let scheduler = ways::scheduler(&l1, &guest, kind.disk, say).context("the scheduler")?;
    let napi = ways::napi(&l1, &guest, say).context("NAPI")?;
    guest.kill()?;
    let text = [messages::table(&messages), scheduler.table(), napi.table(), ticks::table(&ticks)].concat();
    let outcome = Outcome {
        scheduler_none_percent: scheduler.all.percent,
        scheduler_none_interval_percent: scheduler.all.interval,
        scheduler_none_pairs: scheduler.all.pairs,
        napi_percent: napi.all.percent,
        napi_interval_percent: napi.all.interval,
        napi_pairs: napi.all.pairs,
        scheduler: scheduler.rows,
        napi: napi.rows,
        messages,
        ticks,
    };
    Ok((outcome, text))
}

/// A NIC of the guest.
#[derive(Clone, Copy, Debug)]
struct Nic {
    name: &'static str,
    driver: &'static str,
    net: &'static str,
    /// Which lines of `/proc/interrupts` are its own, if not those with the interface's name.
    interrupts: Option<&'static str>,
}

const E1000: Nic = Nic { name: NETS[0].0, driver: "e1000", net: NETS[0].1, interrupts: None };
const RTL8139: Nic = Nic { name: NETS[1].0, driver: "8139cp", net: NETS[1].1, interrupts: None };
const VIRTIO: Nic = Nic {
    name: "virtio-net",
    driver: "virtio_net",
    net: NETS[2].1,
    interrupts: Some("virtio[0-9]+-(in|out)put"),
};

/// What the guest is asked for.
#[derive(Clone, Debug)]
struct Test {
    /// As `sweep.pl` has them.
    kind: String,
    bytes: u32,
    units: u32,
}

/// What it took.
#[derive(Clone, Copy, Debug)]
struct Done {
    /// By the guest's clock, of all units.
    ns: f64,
    units: f64,
    interrupts: f64,
    exits: f64,
    port_exits: f64,
    /// Those that QEMU answers.
    mmio_exits: f64,
}

/// A guest that does what L1 asks for, through one of its NICs.
struct Follower<'a> {
    l1: &'a L1,
    guest: &'a L2<'a>,
    stop: String,
    /// Which lines of `/proc/interrupts` count.
    interrupts: String,
}

impl<'a> Follower<'a> {
    fn start(l1: &'a L1, guest: &'a L2<'a>, nic: Nic) -> Result<Follower<'a>> {
        let name = remedies::raise(guest, nic.driver, nic.net)?;
        let stop = remedies::start(guest, &format!("perl /folder/sweep.pl follow {}.1 {PORT}", nic.net))?;
        Ok(Follower { l1, guest, stop, interrupts: nic.interrupts.unwrap_or(&name).to_owned() })
    }

    /// One after the other, over one connection.
    fn tests(&self, tests: &[Test]) -> Result<Vec<Done>> {
        let words: Vec<String> =
            tests.iter().map(|test| format!("{}:{}:{}", test.kind, test.bytes, test.units)).collect();
        let folder = self.guest.folder().display();
        let said = self.l1.run(
            &format!("perl {folder}/sweep.pl lead {PORT} '{}' {}", self.interrupts, words.join(" ")),
            2 * MINUTE,
        )?;
        let done: Vec<Done> = said.lines().map(Done::of).collect::<Result<_>>()?;
        ensure!(done.len() == tests.len(), "{} tests, and {said}", tests.len());
        Ok(done)
    }

    fn end(self) -> Result<()> {
        self.guest.run(&self.stop).map(drop)
    }
}

impl Done {
    fn of(line: &str) -> Result<Done> {
        let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [ns, units, interrupts, exits, port_exits, mmio_exits, _] = numbers[..] else {
            anyhow::bail!("seven numbers: {line}");
        };
        ensure!(units > 0.0, "nothing has arrived: {line}");
        Ok(Done { ns, units, interrupts, exits, port_exits, mmio_exits })
    }
}
