//! Clocks, timers, and waiting by I/O.

use std::collections::BTreeSet;

use super::{Action, Certainty, Finding, Part};
use crate::devices::DeviceModel::{AcpiPowerManagement, DelayPort, Hpet, Pit};
use crate::devices::RegisterRole::{Counter, TimerDeadline};
use crate::event::Detail;
use crate::report::{Report, SiteRow};

const CLOCK: &str = "let the guest use kvm-clock or the TSC: /sys/devices/system/clocksource/clocksource0/current_clocksource, and \
     no clocksource= on its command line; a guest that refuses needs a stable TSC on the host (constant_tsc, nonstop_tsc)";

fn pm_timer_reads(report: &Report) -> Part<'_> {
    Part::register(report, AcpiPowerManagement, Counter)
}

pub(super) fn pm_timer(report: &Report) -> Option<Finding> {
    let part = pm_timer_reads(report);
    part.matters().then(|| Finding {
        id: "pm-timer".into(),
        title: "the guest reads the time from the ACPI PM timer".into(),
        about: part.about(),
        evidence: part.evidence("reads of the PM timer"),
        gain: part.rate,
        remedy: CLOCK.into(),
        certainty: Certainty::High,
        action: Some(Action::Clocksource),
        sequence: None,
    })
}

pub(super) fn hpet(report: &Report) -> Option<Finding> {
    let part = Part::register(report, Hpet, Counter);
    part.matters().then(|| Finding {
        id: "hpet".into(),
        title: "the guest reads the time from the HPET".into(),
        about: part.about(),
        evidence: part.evidence("reads of the HPET's counter"),
        gain: part.rate,
        remedy: format!("{CLOCK}; or take the HPET away (QEMU: -machine hpet=off)"),
        certainty: Certainty::High,
        action: Some(Action::Clocksource),
        sequence: None,
    })
}

/// Bit 5 of port 0x61 is the output of the PIT's counter 2: whoever waits for that counter reads it over and over.
fn polls_counter_2(site: &SiteRow) -> bool {
    matches!(site.detail, Detail::Port { port: 0x61, write: false, .. })
}

/// Where Linux compares the PM timer with the PIT (drivers/clocksource/acpi_pm.c), inlined or not.
const CHECK: [&str; 3] = ["verify_pmtmr_rate", "mach_countup", "init_acpi_pm_clocksource"];
/// Where it measures the TSC with the PIT (arch/x86/kernel/tsc.c).
const CALIBRATION: [&str; 3] = ["pit_calibrate_tsc", "pit_hpet_ptimer_calibrate_cpu", "native_calibrate_cpu"];

/// Polls of the PIT that belong to a check of the PM timer, and how sure that is.
fn check<'a>(report: &'a Report) -> Option<(Part<'a>, Certainty)> {
    let timer = pm_timer_reads(report);
    let polls = Part::of(report, polls_counter_2);
    if !polls.matters() || timer.sites.is_empty() {
        return None;
    }
    let functions = |part: &Part<'a>| -> BTreeSet<&'a str> {
        part.sites.iter().filter_map(|site| Some(site.function.as_ref()?.name.as_str())).collect()
    };
    let (of_timer, of_polls) = (functions(&timer), functions(&polls));
    let is = |names: &[&str]| names.iter().any(|name| of_polls.contains(*name));
    if is(&CHECK) {
        Some((polls, Certainty::High))
    } else if is(&CALIBRATION) {
        None
    } else if of_timer.intersection(&of_polls).next().is_some() {
        Some((polls, Certainty::Fair))
    } else {
        Some((polls, Certainty::Low))
    }
}

pub(super) fn pm_timer_check(report: &Report) -> Option<Finding> {
    let (part, certainty) = check(report)?;
    Some(Finding {
        id: "pm-timer-check".into(),
        title: "the guest checks the PM timer against the PIT (Linux: verify_pmtmr_rate)".into(),
        about: part.about(),
        evidence: format!(
            "{}; and reads of the PM timer",
            part.evidence("polls of port 0x61 for the end of the PIT's counter 2")
        ),
        gain: part.rate,
        remedy: "a 32-bit Linux does this each time it boots, whatever its clock source; it ends by itself. pmtmr=0 on the guest's \
                 command line takes the PM timer away, and the check with it, if kvm-clock or the TSC is there; 64-bit kernels \
                 do not check. Where it is the TSC that is measured, kvm-clock spares it"
            .into(),
        certainty,
        action: None,
        sequence: None,
    })
}

pub(super) fn pit(report: &Report) -> Option<Finding> {
    let checks = check(report).is_some();
    let part = Part::of(report, |site| {
        site.place.as_ref().is_some_and(|place| place.model == Pit) || (!checks && polls_counter_2(site))
    });
    part.matters().then(|| Finding {
        id: "pit".into(),
        title: "the guest uses the PIT".into(),
        about: part.about(),
        evidence: part.evidence("PIT"),
        gain: part.rate,
        remedy: "a guest with a local APIC timer leaves the PIT alone: no noapic or nolapic on its command line; polling of \
                 counter 2 (ports 0x42 and 0x61) measures the TSC while the guest boots, which kvm-clock spares"
            .into(),
        certainty: Certainty::Fair,
        action: None,
        sequence: None,
    })
}

pub(super) fn delay(report: &Report) -> Option<Finding> {
    let part = Part::device(report, DelayPort);
    part.matters().then(|| Finding {
        id: "io-delay".into(),
        title: "the guest waits by writing to port 0x80 or 0xed".into(),
        about: part.about(),
        evidence: part.evidence("writes that only wait"),
        gain: part.rate,
        remedy: "io_delay=none on the guest's command line".into(),
        certainty: Certainty::High,
        action: None,
        sequence: None,
    })
}

pub(super) fn tick(report: &Report) -> Option<Finding> {
    let part = Part::at(report, |place| place.role == TimerDeadline);
    let each = part.rate / report.vcpus.max(1) as f64;
    (part.matters() && each > 90.0).then(|| Finding {
        id: "tick".into(),
        title: "the guest arms its timer often".into(),
        about: part.about(),
        evidence: format!("{}; {each:.0} for each vCPU", part.evidence("the local timer")),
        // At a hundred a second it would still keep time.
        gain: part.rate - 100.0 * report.vcpus.max(1) as f64,
        remedy: "a kernel with HZ=100 or 250 rather than 1000, nohz=on (idle vCPUs then have no tick), nohz_full= for busy \
                 ones; look for programs that sleep for very short times"
            .into(),
        certainty: Certainty::Low,
        action: None,
        sequence: None,
    })
    .filter(|finding| finding.gain > 0.0)
}
