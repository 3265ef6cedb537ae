//! Two recordings side by side: what has changed, most first.
//!
//! Rates are compared, so the recordings may have different lengths. A site is a function of the guest (without the offset, which another build of its
//! kernel moves), a reason, and a register; where no function is known, the instruction's address stands for it.

mod limit;
mod text;

use std::collections::BTreeMap;

use ioplane_exits::{ExitRecording, ExitRow, Kind, Report, SiteRow};
use ioplane_plain::plain;
use serde::Serialize;

pub use limit::{ExitLimit, ExitMeasure};

/// Where so many percent of the exits are at places that the other recording does not have, something is said of it.
const STRANGE: f64 = 20.0;

/// What is to be known of one of the two.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExitDiffSide {
    /// The VM.
    pub vm: String,
    /// The host: its name.
    pub machine: String,
    /// The model of its processors.
    pub processor: String,
    /// Its Linux' release.
    pub kernel: String,
    /// When it ended: seconds since 1970.
    pub recorded: u64,
    /// How long it lasted.
    pub seconds: f64,
    /// All exits.
    pub exits: u64,
    /// One part in so many of the time was recorded.
    pub sample: u64,
}

/// Exits a second, before and after.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ExitChange {
    /// Exits a second.
    pub before: f64,
    /// The same.
    pub after: f64,
    /// After less before.
    pub change: f64,
    /// After by before; nothing where there were none before.
    pub ratio: Option<f64>,
    /// How many a second went on to the VMM.
    pub user_before: f64,
    /// The same.
    pub user_after: f64,
    /// Host time of one exit in microseconds, where times are known.
    pub us_before: Option<f64>,
    /// The same.
    pub us_after: Option<f64>,
}

/// What has changed about one reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExitDiffReason {
    /// In words.
    pub reason: String,
    /// How much.
    #[serde(flatten)]
    pub change: ExitChange,
}

/// What has changed at one site.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExitDiffSite {
    /// The guest's function, or the address of the instruction.
    pub function: String,
    /// Why.
    pub reason: String,
    /// About which register; empty where it is about none.
    pub register: String,
    /// How much.
    #[serde(flatten)]
    pub change: ExitChange,
}

/// What came of one limit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExitCheck {
    /// As it was typed.
    pub limit: String,
    /// The value before; nothing where that is not known and not needed.
    pub before: Option<f64>,
    /// The value after.
    pub after: f64,
    /// What it was compared with.
    pub threshold: f64,
    /// It is what must not be.
    pub failed: bool,
    /// Neither recording has exits of that name.
    pub absent: bool,
}

/// The comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExitDiff {
    /// The first recording.
    pub before: ExitDiffSide,
    /// The second.
    pub after: ExitDiffSide,
    /// All exits.
    pub all: ExitChange,
    /// By reason.
    pub reasons: Vec<ExitDiffReason>,
    /// By site.
    pub sites: Vec<ExitDiffSite>,
    /// What came of the limits.
    pub checks: Vec<ExitCheck>,
    /// What the reader must know to trust the numbers.
    pub notes: Vec<String>,
}

/// One side's exits of a row, added up.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    rate: f64,
    user: f64,
    host_ns: f64,
    /// How many of them have a time.
    timed: f64,
}

impl Sum {
    fn add(&mut self, row: &ExitRow, seconds: f64) {
        self.rate += row.rate;
        self.user += row.user as f64 / seconds;
        if let Some(each) = row.ns_each.filter(|each| *each > 0) {
            self.host_ns += row.host_ns as f64;
            self.timed += row.host_ns as f64 / each as f64;
        }
    }

    fn of<'r>(rows: impl IntoIterator<Item = &'r ExitRow>, report: &Report) -> Sum {
        rows.into_iter().fold(Sum::default(), |mut sum, row| {
            sum.add(row, report.seconds);
            sum
        })
    }

    fn us_each(self) -> Option<f64> {
        (self.timed > 0.0).then(|| self.host_ns / self.timed / 1e3)
    }

    fn value(self, measure: ExitMeasure) -> Option<f64> {
        match measure {
            ExitMeasure::Exits => Some(self.rate),
            ExitMeasure::User => Some(self.user),
            ExitMeasure::Time => self.us_each(),
        }
    }
}

/// Before and after.
type Pair = [Sum; 2];

fn change([before, after]: Pair) -> ExitChange {
    ExitChange {
        before: before.rate,
        after: after.rate,
        change: after.rate - before.rate,
        ratio: (before.rate > 0.0).then(|| after.rate / before.rate),
        user_before: before.user,
        user_after: after.user,
        us_before: before.us_each(),
        us_after: after.us_each(),
    }
}

/// Function, reason, register.
type SiteKey = (String, String, String);

fn key(site: &SiteRow) -> SiteKey {
    let function = site.function.as_ref().map_or(&site.row.name, |function| &function.name);
    (plain(function), plain(&site.reason_name), plain(&site.register()))
}

fn side(recording: &ExitRecording) -> ExitDiffSide {
    let ExitRecording { recorded, machine, report, .. } = recording;
    ExitDiffSide {
        vm: plain(&report.vm),
        machine: plain(&machine.name),
        processor: plain(&machine.processor),
        kernel: plain(&machine.kernel),
        recorded: *recorded,
        seconds: report.seconds,
        exits: report.exits,
        sample: report.sample,
    }
}

/// All exits. Lost ones are in the count only; of the rest no part is known for them. Waiting in HLT is no time that an exit takes.
fn whole(report: &Report) -> Sum {
    let working = report.sites.iter().filter(|site| site.kind != Kind::Halt).map(|site| &site.row);
    Sum {
        rate: report.exits as f64 / report.seconds,
        user: Sum::of(&report.reasons, report).user,
        ..Sum::of(working, report)
    }
}

impl ExitDiff {
    /// Compares two recordings; an error says which limit cannot be checked, and why.
    pub fn new(
        before: &ExitRecording,
        after: &ExitRecording,
        limits: &[ExitLimit],
    ) -> std::result::Result<ExitDiff, String> {
        let reports = [&before.report, &after.report];
        let mut reasons: BTreeMap<String, Pair> = BTreeMap::new();
        let mut sites: BTreeMap<SiteKey, Pair> = BTreeMap::new();
        for (index, report) in reports.iter().enumerate() {
            for row in &report.reasons {
                reasons.entry(plain(&row.name)).or_default()[index].add(row, report.seconds);
            }
            for site in &report.sites {
                sites.entry(key(site)).or_default()[index].add(&site.row, report.seconds);
            }
        }
        let notes = notes([before, after], &sites);
        let reason = |(reason, pair)| ExitDiffReason { reason, change: change(pair) };
        let site = |((function, reason, register), pair)| ExitDiffSite {
            function,
            reason,
            register,
            change: change(pair),
        };
        let mut reasons: Vec<_> = reasons.into_iter().map(reason).collect();
        reasons.sort_by(|a, b| most(&a.change, &b.change));
        let mut sites: Vec<_> = sites.into_iter().map(site).collect();
        sites.sort_by(|a, b| most(&a.change, &b.change));
        Ok(ExitDiff {
            before: side(before),
            after: side(after),
            all: change(reports.map(whole)),
            reasons,
            sites,
            checks: limits
                .iter()
                .map(|limit| check(limit, reports))
                .collect::<std::result::Result<_, _>>()?,
            notes,
        })
    }

    /// Whether a limit is exceeded.
    pub fn failed(&self) -> bool {
        self.checks.iter().any(|check| check.failed)
    }
}

/// What has changed most comes first.
fn most(a: &ExitChange, b: &ExitChange) -> std::cmp::Ordering {
    b.change.abs().total_cmp(&a.change.abs())
}

fn check(limit: &ExitLimit, reports: [&Report; 2]) -> std::result::Result<ExitCheck, String> {
    let (pair, absent) = match &limit.name {
        None => (reports.map(whole), false),
        Some(name) => named(name, reports).map_or_else(|| (Pair::default(), true), |pair| (pair, false)),
    };
    let [before, after] = pair.map(|sum| sum.value(limit.measure));
    let unknown = |which: &str| format!("{limit} cannot be checked: {which} has no times of these exits");
    let after = after.ok_or_else(|| unknown("the second recording"))?;
    if before.is_none() && limit.is_relative() {
        return Err(unknown("the first recording"));
    }
    let from = before.unwrap_or_default();
    Ok(ExitCheck {
        limit: limit.to_string(),
        before,
        after,
        threshold: limit.threshold(from),
        failed: limit.is_met(from, after),
        absent,
    })
}

/// The exits of a reason, a function, a register or a device of that name, in this order.
fn named(name: &str, reports: [&Report; 2]) -> Option<Pair> {
    let tables: [fn(&Report) -> &[ExitRow]; 4] = [
        |report| &report.reasons,
        |report| &report.functions,
        |report| &report.registers,
        |report| &report.devices,
    ];
    tables.into_iter().find_map(|table| {
        let rows = |report| table(report).iter().filter(|row| row.name == name);
        let found = reports.iter().any(|report| rows(report).next().is_some());
        found.then(|| reports.map(|report| Sum::of(rows(report), report)))
    })
}

fn notes(recordings: [&ExitRecording; 2], sites: &BTreeMap<SiteKey, Pair>) -> Vec<String> {
    let mut notes = Vec::new();
    let [before, after] = recordings.map(|recording| &recording.machine);
    if before.processor != after.processor {
        notes.push("the two are of different processors: compare counts, not times".into());
    } else if before.kernel != after.kernel {
        notes.push("the hosts' kernels differ".into());
    }
    for (which, recording) in ["first", "second"].into_iter().zip(recordings) {
        let report = &recording.report;
        if report.sample > 1 {
            notes.push(format!("the {which} is a sample: small differences are chance"));
        }
        if report.lost > 0 {
            notes.push(format!(
                "of the {which} {} of {} exits were lost: they are in the total only",
                report.lost, report.exits
            ));
        }
    }
    // Of exits at bare addresses, those whose address only one of the two has.
    let bare = sites.iter().filter(|(key, _)| key.0.starts_with("0x")).map(|(_, pair)| pair);
    let (mut all, mut alone) = (0.0, 0.0);
    for [before, after] in bare {
        all += before.rate + after.rate;
        if before.rate == 0.0 || after.rate == 0.0 {
            alone += before.rate + after.rate;
        }
    }
    if all > 0.0 && alone * 100.0 / all > STRANGE {
        notes.push(format!(
            "{:.0} % of the exits without a function's name are at addresses that only one recording has: a guest that has booted in \
             between is at other addresses; record with --symbols",
            alone * 100.0 / all
        ));
    }
    notes
}

#[cfg(test)]
mod tests;
