//! What to do about a profile: findings, each with its evidence, what it would gain, a remedy, and how sure it is.
//!
//! A finding is made from what is in the report and nothing else. Rules match its types (`DeviceModel`, `RegisterRole`, `Detail`, `Kind`), never
//! words that are made for readers. What a rule cannot see there (what the guest has configured, what its VMM can do) makes it less certain, and
//! the remedy says what to look at.

mod clocks;
mod devices;
mod processor;
mod sequence;

use crate::devices::{DeviceModel, DevicePlace, RegisterRole};
use crate::event::Detail;
use crate::reason::Kind;
use crate::report::{Action, Certainty, Finding, Report, SiteRow};

/// Rarer exits are not worth a word: neither so many a second, nor such a share of all.
const RATE: f64 = 10.0;
const PERCENT: f64 = 0.5;
/// In a sample so many must have been recorded.
const OBSERVED: f64 = 9.5;

/// Whether so many exits, of a sample, are more than a few that were recorded.
fn enough(report: &Report, exits: f64) -> bool {
    let recorded = report.recorded as f64 / report.exits.saturating_sub(report.lost).max(1) as f64;
    report.sample == 1 || exits * recorded >= OBSERVED
}

/// Some of the sites, added up.
#[derive(Default)]
struct Part<'a> {
    sites: Vec<&'a SiteRow>,
    rate: f64,
    percent: f64,
    /// Whether so many were recorded that they say something.
    enough: bool,
}

impl<'a> Part<'a> {
    fn of(report: &'a Report, belongs: impl Fn(&SiteRow) -> bool) -> Part<'a> {
        let sites: Vec<&SiteRow> = report.sites.iter().filter(|site| belongs(site)).collect();
        // A sum of nothing is minus zero.
        let sum = |of: fn(&SiteRow) -> f64| sites.iter().map(|site| of(site)).sum::<f64>() + 0.0;
        let enough = enough(report, sum(|site| site.row.count as f64));
        Part { rate: sum(|site| site.row.rate), percent: sum(|site| site.row.percent), enough, sites }
    }

    /// The sites about such a register.
    fn at(report: &'a Report, belongs: impl Fn(&DevicePlace) -> bool) -> Part<'a> {
        Part::of(report, |site| site.place.as_ref().is_some_and(&belongs))
    }

    /// The sites about any register of such a device.
    fn device(report: &'a Report, model: DeviceModel) -> Part<'a> {
        Part::at(report, |place| place.model == model)
    }

    /// The sites about such a register of such a device.
    fn register(report: &'a Report, model: DeviceModel, role: RegisterRole) -> Part<'a> {
        Part::at(report, |place| (place.model, place.role) == (model, role))
    }

    /// Of these, those that belong: how many a second.
    fn rate_of(&self, belongs: impl Fn(&SiteRow) -> bool) -> f64 {
        // A sum of nothing is minus zero.
        self.sites.iter().filter(|site| belongs(site)).map(|site| site.row.rate).sum::<f64>() + 0.0
    }

    fn about(&self) -> Vec<(Kind, Detail)> {
        about(self.sites.iter().map(|site| (site.kind, site.detail)))
    }

    /// Host time of one exit in ns, of those that were timed.
    fn ns_each(&self) -> Option<u64> {
        let (mut ns, mut timed) = (0u64, 0);
        for row in self.sites.iter().map(|site| &site.row) {
            if let Some(count) = row.ns_each.and_then(|each| row.host_ns.checked_div(each)) {
                ns = ns.saturating_add(row.host_ns);
                timed += count;
            }
        }
        ns.checked_div(timed)
    }

    fn matters(&self) -> bool {
        self.enough && self.rate >= RATE && self.percent >= PERCENT
    }

    /// `1234 exits a second (56.7 %), most from acpi_pm_read`.
    fn evidence(&self, what: &str) -> String {
        let mut text = format!("{what}: {:.0} exits a second ({:.1} % of all)", self.rate, self.percent);
        if let Some(first) = self.sites.first() {
            match (first.function.as_ref().map(|function| &function.name), first.rip) {
                (Some(name), _) => text += &format!(", most from {name}"),
                (None, Some(rip)) => text += &format!(", most from {rip:#x}"),
                (None, None) => {}
            }
        }
        text
    }
}

/// Without repetition, and not too many.
fn about(exits: impl Iterator<Item = (Kind, Detail)>) -> Vec<(Kind, Detail)> {
    let mut exits: Vec<_> = exits.collect();
    exits.sort_unstable();
    exits.dedup();
    exits.truncate(256);
    exits
}

impl Finding {
    /// How many such exits a second another report has: to compare before and after.
    pub fn rate_in(&self, report: &Report) -> f64 {
        if let Some(start) = &self.sequence {
            return sequence::rate(start, report);
        }
        Part::of(report, |site| self.about.contains(&(site.kind, site.detail))).rate
    }
}

/// What undoes it, whether the finding is still there or not.
pub fn action_of(id: &str) -> Option<Action> {
    match id {
        "pm-timer" | "hpet" => Some(Action::Clocksource),
        "serial" => Some(Action::Console),
        "scheduler" => Some(Action::Scheduler),
        "napi" => Some(Action::Napi),
        _ => None,
    }
}

/// All findings, the one that gains most first.
pub fn advise(report: &Report) -> Vec<Finding> {
    let rules: [fn(&Report) -> Option<Finding>; 20] = [
        clocks::pm_timer,
        clocks::hpet,
        clocks::pm_timer_check,
        clocks::pit,
        clocks::delay,
        clocks::tick,
        devices::serial,
        devices::ide,
        devices::ahci,
        devices::lsi,
        devices::nic,
        devices::moderation,
        devices::napi,
        devices::notifications,
        devices::scheduler,
        processor::apic,
        processor::end_of_interrupt,
        processor::halts,
        processor::spinning,
        processor::faults,
    ];
    let mut findings: Vec<Finding> = rules.iter().filter_map(|rule| rule(report)).collect();
    findings.extend(sequence::all(report, &findings));
    findings.sort_by(|a, b| b.gain.total_cmp(&a.gain).then_with(|| a.id.cmp(&b.id)));
    findings
}

#[cfg(test)]
mod tests;
