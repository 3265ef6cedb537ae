//! The report as a table for a terminal.

use std::fmt;

use super::{ExitRow, Report, SiteRow, access, address};
use crate::times::SiteTimes;
use crate::vmm::VmmTime;

/// So many lines a table has.
const LINES: usize = 20;

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { vm, pid, program, vcpus, seconds, exits, .. } = self;
        writeln!(f, "{vm} ({program}, process {pid}, {vcpus} vCPUs), {seconds:.1} s")?;
        let rate = *exits as f64 / self.seconds.max(1e-9);
        write!(f, "{exits} exits, {rate:.0}/s; {} recorded, {} lost", self.recorded, self.lost)?;
        if let Some((kernel, count)) = self.kernel.as_ref().and_then(|kernel| Some((kernel, kernel.exits()?)))
        {
            write!(f, "; KVM itself counted {count} ({})", kernel.source)?;
        }
        writeln!(f)?;
        for note in &self.notes {
            writeln!(f, "note: {note}")?;
        }
        table(f, "reason", &self.reasons)?;
        if !self.functions.is_empty() {
            table(f, "guest function", &self.functions)?;
        }
        table(f, "device and register", &self.registers)?;
        sites(f, &self.sites)?;
        parts(f, &self.sites)?;
        if let Some(time) = &self.vmm {
            vmm(f, time)?;
        }
        if self.by_vcpu.len() > 1 {
            table(f, "vCPU", &self.by_vcpu)?;
        }
        if !self.interrupts.is_empty() {
            let all: u64 = self.interrupts.iter().map(|(_, count)| count).sum();
            let first = self.interrupts.iter().take(6).map(|(vector, count)| format!("{vector:#x} {count}"));
            writeln!(f, "\n{all} interrupts injected; by vector: {}", first.collect::<Vec<_>>().join(", "))?;
        }
        Ok(())
    }
}

fn head(f: &mut fmt::Formatter<'_>, title: &str) -> fmt::Result {
    writeln!(
        f,
        "\n{:>10} {:>9} {:>6} {:>10} {:>6} {:>8}  {title}",
        "exits", "a second", "%", "host ms", "%", "us each"
    )
}

fn numbers(f: &mut fmt::Formatter<'_>, row: &ExitRow) -> fmt::Result {
    let each = row.ns_each.map_or("-".into(), |ns| format!("{:.1}", ns as f64 / 1e3));
    let timed = |text: String| if row.ns_each.is_some() { text } else { "-".into() };
    let ms = timed(format!("{:.1}", row.host_ns as f64 / 1e6));
    let host_percent = timed(format!("{:.2}", row.host_percent));
    let ExitRow { count, rate, percent, .. } = row;
    write!(f, "{count:>10} {rate:>9.1} {percent:>6.2} {ms:>10} {host_percent:>6} {each:>8}  ")
}

fn table(f: &mut fmt::Formatter<'_>, title: &str, rows: &[ExitRow]) -> fmt::Result {
    head(f, title)?;
    for row in rows.iter().take(LINES) {
        numbers(f, row)?;
        writeln!(f, "{}", row.name)?;
    }
    rest(f, rows.len())
}

fn sites(f: &mut fmt::Formatter<'_>, rows: &[SiteRow]) -> fmt::Result {
    head(f, "where, why, about what")?;
    for site in rows.iter().take(LINES) {
        numbers(f, &site.row)?;
        about(f, site)?;
    }
    rest(f, rows.len())
}

fn about(f: &mut fmt::Formatter<'_>, site: &SiteRow) -> fmt::Result {
    write!(f, "{}  {}", site.row.name, site.reason_name)?;
    match (&site.place, address(site.detail)) {
        (Some(place), address) => {
            write!(f, "  {}: {}{}", place.device, place.register, access(site.detail))?;
            if let Some(address) = address {
                write!(f, " ({address})")?;
            }
        }
        (None, Some(address)) => write!(f, "  {address}{}", access(site.detail))?,
        (None, None) => {}
    }
    writeln!(f)
}

/// Where the host's time went, the sites with most of it first.
fn parts(f: &mut fmt::Formatter<'_>, rows: &[SiteRow]) -> fmt::Result {
    let mut rows: Vec<&SiteRow> = rows.iter().filter(|site| site.row.parts.is_some()).collect();
    if rows.is_empty() {
        return Ok(());
    }
    rows.sort_by_key(|site| std::cmp::Reverse(site.row.host_ns));
    writeln!(
        f,
        "\n{:>10} {:>6} {:>6} {:>9} {:>9} {:>9} {:>9} {:>9}  host time of",
        "host ms", "KVM %", "VMM %", "preempt %", "blocked %", "median us", "p99 us", "max us"
    )?;
    for site in rows.iter().take(LINES) {
        let parts = site.row.parts.unwrap_or_default();
        let percent = |ns: u64| ns as f64 * 100.0 / site.row.host_ns.max(1) as f64;
        let us = |ns: fn(&SiteTimes) -> u64| {
            site.times.as_ref().map_or("-".into(), |times| format!("{:.1}", ns(times) as f64 / 1e3))
        };
        write!(
            f,
            "{:>10.1} {:>6.1} {:>6.1} {:>9.1} {:>9.1} {:>9} {:>9} {:>9}  ",
            site.row.host_ns as f64 / 1e6,
            percent(parts.kvm_ns),
            percent(parts.vmm_ns),
            percent(parts.preempted_ns),
            percent(parts.blocked_ns),
            us(|times| times.median_ns),
            us(|times| times.p99_ns),
            us(|times| times.max_ns),
        )?;
        about(f, site)?;
    }
    rest(f, rows.len())
}

/// Where the VMM worked for its guest.
fn vmm(f: &mut fmt::Formatter<'_>, time: &VmmTime) -> fmt::Result {
    writeln!(f, "\n{:>10} {:>6}  in the VMM: {}", "samples", "%", time.words())?;
    for row in time.functions.iter().take(LINES) {
        writeln!(f, "{:>10} {:>6.2}  {}", row.samples, row.percent, row.name)?;
    }
    rest(f, time.functions.len())
}

fn rest(f: &mut fmt::Formatter<'_>, rows: usize) -> fmt::Result {
    if rows > LINES { writeln!(f, "{:>10} {} more", "...", rows - LINES) } else { Ok(()) }
}
