//! The paper's figures 8 and 9: two settings of the guest in turn, each with the same tests. How much more gets done, and how many exits
//! and interrupts that takes.

use super::{Done, E1000, Follower, LIMIT, Nic, Test, VIRTIO};
use anyhow::{Context, Result};
use ioplane_e2e::pairs::{Compared, alternate_each};
use ioplane_e2e::{L1, L2};
use ioplane_figures::goals::UNRESOLVED;
use ioplane_figures::report::median;
use serde::Serialize;
use serde_json::Value;

/// What the interval has to be narrower than, in per cent.
const BOUND: f64 = 5.0;
const SIZES: [u32; 9] =
    [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20];
/// What both writers write of each size: so many blocks, and fewer if that is more bytes than these.
const BLOCKS: u32 = 8;
const BYTES: u32 = 512 << 10;

/// One test, in both settings: first without the remedy, then with it.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub test: String,
    pub bytes: u32,
    pub unit: &'static str,
    /// By how many per cent more of it is done in the same time.
    pub more_percent: Value,
    pub interval_percent: Option<[f64; 2]>,
    pub pairs: usize,
    /// Medians of all runs.
    pub us: [f64; 2],
    pub exits: [f64; 2],
    pub interrupts: [f64; 2],
}

/// All tests of two settings.
pub struct Ways {
    title: &'static str,
    pub rows: Vec<Row>,
    /// Of the geometric mean of all tests.
    pub all: Compared,
}

/// Two writers of an IDE disk, with mq-deadline and without a scheduler.
pub fn scheduler(l1: &L1, guest: &L2<'_>, disk: &str, say: &dyn Fn(&str)) -> Result<Ways> {
    // The NIC that disturbs least carries what is asked for.
    let follower = Follower::start(l1, guest, Nic { interrupts: Some("ata_piix"), ..VIRTIO })?;
    let tests = SIZES.map(|bytes| {
        let units = (BYTES / bytes).clamp(2, BLOCKS);
        ("block", Test { kind: format!("write=/dev/{disk}"), bytes, units })
    });
    let ways = compare(
        "Two writers of an IDE disk past the cache, mq-deadline and none: throughput with none is higher by",
        &follower,
        &tests,
        |first| {
            let to = if first { "mq-deadline" } else { "none" };
            guest.run(&format!("echo {to} >/sys/block/{disk}/queue/scheduler")).map(drop)
        },
    )?;
    say(&format!("scheduler: {}", ways.all.words()));
    follower.end()?;
    Ok(ways)
}

/// An e1000 as it is, and with the interrupts of NAPI put off as `ioplane exits apply napi` does it.
pub fn napi(l1: &L1, guest: &L2<'_>, say: &dyn Fn(&str)) -> Result<Ways> {
    let follower = Follower::start(l1, guest, E1000)?;
    let tests =
        [("tcp-stream", 16384, 16), ("udp-stream", 1400, 128), ("tcp-rr", 64, 24), ("udp-rr", 64, 24)]
            .map(|(kind, bytes, units)| ("message", Test { kind: kind.into(), bytes, units }));
    let ways = compare(
        "An e1000 as it is, and with napi_defer_hard_irqs: throughput with it is higher by",
        &follower,
        &tests,
        |first| {
            let word = if first { "undo" } else { "apply" };
            guest.run(&format!("sh /folder/tune.sh {word} napi")).map(drop)
        },
    )?;
    guest.run("sh /folder/tune.sh undo napi")?;
    say(&format!("NAPI: {}", ways.all.words()));
    follower.end()?;
    Ok(ways)
}

fn compare(
    title: &'static str,
    follower: &Follower<'_>,
    tests: &[(&'static str, Test)],
    switch: impl Fn(bool) -> Result<()>,
) -> Result<Ways> {
    let only: Vec<Test> = tests.iter().map(|(_, test)| test.clone()).collect();
    let mut runs: [Vec<Vec<Done>>; 2] = Default::default();
    let run = |first: bool| -> Result<Vec<f64>> {
        switch(first)?;
        let done = follower.tests(&only)?;
        let each: Vec<f64> = done.iter().map(|done| done.ns / done.units).collect();
        let mean = (each.iter().map(|ns| ns.ln()).sum::<f64>() / each.len() as f64).exp();
        runs[usize::from(!first)].push(done);
        Ok(each.into_iter().chain([mean]).collect())
    };
    let mut compared = alternate_each(BOUND, LIMIT, run)?;
    let all = compared.pop().context("the mean is the last")?;
    let rows = tests.iter().zip(compared).enumerate().map(|(index, ((unit, test), compared))| {
        let each = |count: fn(&Done) -> f64| {
            [0, 1].map(|way: usize| median(runs[way].iter().map(|run| count(&run[index]) / run[index].units)))
        };
        Row {
            test: test.kind.split('=').next().unwrap_or_default().to_owned(),
            bytes: test.bytes,
            unit,
            more_percent: compared.percent,
            interval_percent: compared.interval,
            pairs: compared.pairs,
            us: each(|done| done.ns / 1000.0),
            exits: each(|done| done.exits),
            interrupts: each(|done| done.interrupts),
        }
    });
    Ok(Ways { title, rows: rows.collect(), all })
}

impl Ways {
    pub fn table(&self) -> String {
        let mut text = format!(
            "\n{} {}. Times are of a translated processor:\n\n\
             | test | bytes | per | more, % | 95 % interval | us before | after | exits before | after | interrupts before | after |\n\
             |---|---|---|---|---|---|---|---|---|---|---|\n",
            self.title,
            self.all.words()
        );
        for row in &self.rows {
            let more = row.more_percent.as_f64().map_or(UNRESOLVED.into(), |more| format!("{more:.1}"));
            let ends =
                row.interval_percent.map_or("none".into(), |[low, high]| format!("{low:.1} to {high:.1}"));
            text += &format!(
                "| {} | {} | {} | {more} | {ends} | {:.0} | {:.0} | {:.1} | {:.1} | {:.2} | {:.2} |\n",
                row.test,
                row.bytes,
                row.unit,
                row.us[0],
                row.us[1],
                row.exits[0],
                row.exits[1],
                row.interrupts[0],
                row.interrupts[1]
            );
        }
        text
    }
}
