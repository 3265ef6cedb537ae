//! What to do about a profile: findings, each with its evidence, what it would gain, a remedy, and how sure it is.
//!
//! A finding is made from what is in the report and nothing else. What a rule cannot see there (what the guest has configured, what
//! its VMM can do) makes it less certain, and the remedy says what to look at.

mod clocks;
mod devices;
mod host;
mod processor;
mod sequence;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use host::HostFacts;

use crate::event::Detail;
use crate::reason::Kind;
use crate::report::{Report, SiteRow};

/// Rarer exits are not worth a word: neither so many a second, nor such a share of all.
const RATE: f64 = 10.0;
const PERCENT: f64 = 0.5;
/// In a sample so many must have been recorded.
const OBSERVED: f64 = 9.5;

/// How sure a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Certainty {
    /// Worth a try; measure.
    Low,
    /// Usually so.
    Fair,
    /// The exits say so themselves.
    High,
}

impl fmt::Display for Certainty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Certainty::Low => "not very sure, measure it",
            Certainty::Fair => "fairly sure",
            Certainty::High => "sure",
        })
    }
}

/// What `guest/tune` can do and undo in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Another clock source.
    Clocksource,
    /// No chatter of the kernel on the console.
    Console,
    /// No I/O scheduler on virtio disks.
    Scheduler,
}

impl Action {
    /// The script's word for it.
    pub fn word(self) -> &'static str {
        match self {
            Action::Clocksource => "clocksource",
            Action::Console => "console",
            Action::Scheduler => "scheduler",
        }
    }
}

/// Something that could be better.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// For the command line.
    pub id: String,
    /// In a few words.
    pub title: String,
    /// What was seen.
    pub evidence: String,
    /// The exits in question: of which sort, about what.
    pub about: Vec<(Kind, Detail)>,
    /// So many exits a second fewer, if the remedy is applied. Zero where it makes exits cheaper rather than fewer, or where nothing
    /// that was seen says how many.
    pub gain: f64,
    /// What to do.
    pub remedy: String,
    /// How sure it is.
    pub certainty: Certainty,
    /// What can be done by `ioplane exits apply`.
    pub action: Option<Action>,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding { id, title, evidence, remedy, certainty, action, .. } = self;
        writeln!(f, "{id}: {title}")?;
        writeln!(f, "    seen      {evidence}")?;
        writeln!(f, "    expected  {} ({certainty})", self.expected())?;
        writeln!(f, "    remedy    {remedy}")?;
        if action.is_some() {
            writeln!(f, "    apply     ioplane exits apply {id} --ssh GUEST")?;
        }
        Ok(())
    }
}

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

    fn device(report: &'a Report, words: &[&str]) -> Part<'a> {
        Part::of(report, |site| {
            site.place.as_ref().is_some_and(|place| words.iter().any(|word| place.device.starts_with(word)))
        })
    }

    fn register(report: &'a Report, device: &str, registers: &[&str]) -> Part<'a> {
        Part::of(report, |site| {
            site.place.as_ref().is_some_and(|place| {
                place.device.starts_with(device)
                    && registers.iter().any(|word| place.register.starts_with(word))
            })
        })
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
            match (first.function.as_deref().map(bare), first.rip) {
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

/// A function's name without the offset in it.
fn bare(function: &str) -> &str {
    function.split_once('+').map_or(function, |(name, _)| name)
}

impl Finding {
    /// How many such exits a second another report has: to compare before and after.
    pub fn rate_in(&self, report: &Report) -> f64 {
        if let Some(rate) = sequence::rate(&self.id, report) {
            return rate;
        }
        Part::of(report, |site| self.about.contains(&(site.kind, site.detail))).rate
    }

    /// What the remedy is worth, in words.
    pub fn expected(&self) -> String {
        if self.gain > 0.0 {
            format!("{:.0} exits a second fewer", self.gain)
        } else {
            "no number of exits can be promised".into()
        }
    }
}

/// What undoes it, whether the finding is still there or not.
pub fn action_of(id: &str) -> Option<Action> {
    match id {
        "pm-timer" | "hpet" => Some(Action::Clocksource),
        "serial" => Some(Action::Console),
        "scheduler" => Some(Action::Scheduler),
        _ => None,
    }
}

/// All findings, the one that gains most first.
pub fn advise(report: &Report) -> Vec<Finding> {
    let rules: [fn(&Report) -> Option<Finding>; 19] = [
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
