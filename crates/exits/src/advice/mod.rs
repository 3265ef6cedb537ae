//! What to do about a profile: findings, each with its evidence, what it would gain, a remedy, and how sure it is.
//!
//! A finding is made from what is in the report and nothing else. What a rule cannot see there (what the guest has configured, what
//! its VMM can do) makes it less certain, and the remedy says what to look at.

mod host;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use host::HostFacts;

use crate::event::Detail;
use crate::reason::Kind;
use crate::report::{Report, SiteRow};

/// Rarer exits are not worth a word: neither so many a second, nor such a share of all.
const RATE: f64 = 10.0;
const PERCENT: f64 = 0.5;

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
    /// What the exits in question are about.
    pub about: Vec<Detail>,
    /// So many exits a second fewer, if the remedy is applied.
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
        let Finding { id, title, evidence, gain, remedy, certainty, action, .. } = self;
        writeln!(f, "{id}: {title}")?;
        writeln!(f, "    seen      {evidence}")?;
        writeln!(f, "    expected  {gain:.0} exits a second fewer ({certainty})")?;
        writeln!(f, "    remedy    {remedy}")?;
        if action.is_some() {
            writeln!(f, "    apply     ioplane exits apply {id} --ssh GUEST")?;
        }
        Ok(())
    }
}

/// Some of the sites, added up.
#[derive(Default)]
struct Part<'a> {
    sites: Vec<&'a SiteRow>,
    rate: f64,
    percent: f64,
}

impl<'a> Part<'a> {
    fn of(report: &'a Report, belongs: impl Fn(&SiteRow) -> bool) -> Part<'a> {
        let sites: Vec<&SiteRow> = report.sites.iter().filter(|site| belongs(site)).collect();
        // A sum of nothing is minus zero.
        let sum = |of: fn(&SiteRow) -> f64| sites.iter().map(|site| of(site)).sum::<f64>() + 0.0;
        Part { rate: sum(|site| site.row.rate), percent: sum(|site| site.row.percent), sites }
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

    fn details(&self) -> Vec<Detail> {
        let mut details: Vec<Detail> = self.sites.iter().map(|site| site.detail).collect();
        details.sort_unstable();
        details.dedup();
        details.truncate(256);
        details
    }

    fn matters(&self) -> bool {
        self.rate >= RATE && self.percent >= PERCENT
    }

    /// `1234 exits a second (56.7 %), most from acpi_pm_read`.
    fn evidence(&self, what: &str) -> String {
        let mut text = format!("{what}: {:.0} exits a second ({:.1} % of all)", self.rate, self.percent);
        if let Some(first) = self.sites.first() {
            let function = first.function.as_deref().map(|name| name.split('+').next().unwrap_or(name));
            match (function, first.rip) {
                (Some(name), _) => text += &format!(", most from {name}"),
                (None, Some(rip)) => text += &format!(", most from {rip:#x}"),
                (None, None) => {}
            }
        }
        text
    }
}

impl Finding {
    /// How many such exits a second another report has: to compare before and after.
    pub fn rate_in(&self, report: &Report) -> f64 {
        Part::of(report, |site| self.about.contains(&site.detail)).rate
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
    let rules: [fn(&Report) -> Option<Finding>; 16] = [
        pm_timer,
        hpet,
        serial,
        ide,
        nic,
        moderation,
        tick,
        apic,
        end_of_interrupt,
        pit,
        delay,
        halts,
        spinning,
        faults,
        notifications,
        scheduler,
    ];
    let mut findings: Vec<Finding> = rules.iter().filter_map(|rule| rule(report)).collect();
    findings.extend(sequences(report));
    findings.sort_by(|a, b| b.gain.total_cmp(&a.gain).then_with(|| a.id.cmp(&b.id)));
    findings
}

const CLOCK: &str = "let the guest use kvm-clock or the TSC: /sys/devices/system/clocksource/clocksource0/current_clocksource, and \
     no clocksource= on its command line; a guest that refuses needs a stable TSC on the host (constant_tsc, nonstop_tsc)";

fn pm_timer(report: &Report) -> Option<Finding> {
    let part = Part::register(report, "ACPI power management", &["PM timer"]);
    part.matters().then(|| Finding {
        id: "pm-timer".into(),
        title: "the guest reads the time from the ACPI PM timer".into(),
        about: part.details(),
        evidence: part.evidence("reads of the PM timer"),
        gain: part.rate,
        remedy: CLOCK.into(),
        certainty: Certainty::High,
        action: Some(Action::Clocksource),
    })
}

fn hpet(report: &Report) -> Option<Finding> {
    let part = Part::register(report, "HPET", &["main counter"]);
    part.matters().then(|| Finding {
        id: "hpet".into(),
        title: "the guest reads the time from the HPET".into(),
        about: part.details(),
        evidence: part.evidence("reads of the HPET's counter"),
        gain: part.rate,
        remedy: format!("{CLOCK}; or take the HPET away (QEMU: -machine hpet=off)"),
        certainty: Certainty::High,
        action: Some(Action::Clocksource),
    })
}

fn serial(report: &Report) -> Option<Finding> {
    let part = Part::device(report, &["serial port"]);
    part.matters().then(|| Finding {
        id: "serial".into(),
        title: "somebody talks on an emulated serial port, an exit or two for each letter".into(),
        about: part.details(),
        evidence: part.evidence("serial port"),
        gain: part.rate,
        remedy:
            "lower the kernel's console level (dmesg -n 1), take console=ttyS0 from the command line or use \
                 console=hvc0 on virtio-console, which moves whole lines"
                .into(),
        certainty: Certainty::Fair,
        action: Some(Action::Console),
    })
}

fn ide(report: &Report) -> Option<Finding> {
    let part = Part::device(report, &["IDE"]);
    // One command a request; virtio would need one notification for it.
    let commands =
        Part::of(report, |site| matches!(site.detail, Detail::Port { port: 0x1f7 | 0x177, write: true, .. }));
    part.matters().then(|| Finding {
        id: "ide".into(),
        title: "the guest's disk is an emulated IDE disk".into(),
        about: part.details(),
        evidence: format!("{}, for {:.0} commands", part.evidence("IDE"), commands.rate),
        gain: (part.rate - commands.rate).max(0.0),
        remedy: "give the disk as virtio-blk: one exit a request, or none with ioplane (ioplane qemu-args)"
            .into(),
        certainty: Certainty::High,
        action: None,
    })
}

const NICS: [&str; 6] = ["e1000", "rtl8139", "ne2k", "pcnet", "igb", "vmxnet3"];

fn nic(report: &Report) -> Option<Finding> {
    let part = Part::device(report, &NICS[..4]);
    let tails = Part::of(report, |site| {
        site.place.as_ref().is_some_and(|place| {
            NICS.iter().any(|nic| place.device.starts_with(nic)) && place.register.contains("transmit")
        })
    });
    part.matters().then(|| Finding {
        id: "nic".into(),
        title: "the guest's NIC is an emulated one".into(),
        about: part.details(),
        evidence: part.evidence("the NIC's registers"),
        gain: (part.rate - tails.rate).max(0.0),
        remedy: "give it as virtio-net: at most one exit for each frame sent and none for interrupts; or ioplane's \
                 (ioplane qemu-args)"
            .into(),
        certainty: Certainty::High,
        action: None,
    })
}

fn moderation(report: &Report) -> Option<Finding> {
    let causes = Part::of(report, |site| {
        site.place.as_ref().is_some_and(|place| {
            NICS.iter().any(|nic| place.device.starts_with(nic))
                && ["ICR", "ISR"].iter().any(|register| place.register.starts_with(register))
        })
    });
    (causes.matters() && causes.rate > 2000.0).then(|| Finding {
        id: "moderation".into(),
        title: "an emulated NIC interrupts very often".into(),
        about: causes.details(),
        evidence: causes.evidence("reads of its interrupt cause"),
        gain: causes.rate / 2.0,
        remedy: "ethtool -C NIC rx-usecs 250 in the guest; virtio-net instead is better".into(),
        certainty: Certainty::Low,
        action: None,
    })
}

fn tick(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| {
        site.place.as_ref().is_some_and(|place| {
            place.register == "IA32_TSC_DEADLINE"
                || (["local APIC", "x2APIC"].contains(&place.device.as_str())
                    && place.register == "timer initial count")
        })
    });
    let each = part.rate / report.vcpus.max(1) as f64;
    (part.matters() && each > 90.0).then(|| Finding {
        id: "tick".into(),
        title: "the guest arms its timer often".into(),
        about: part.details(),
        evidence: format!("{}; {each:.0} for each vCPU", part.evidence("the local timer")),
        // At a hundred a second it would still keep time.
        gain: part.rate - 100.0 * report.vcpus.max(1) as f64,
        remedy: "a kernel with HZ=100 or 250 rather than 1000, nohz=on (idle vCPUs then have no tick), nohz_full= for busy \
                 ones; look for programs that sleep for very short times"
            .into(),
        certainty: Certainty::Low,
        action: None,
    })
    .filter(|finding| finding.gain > 0.0)
}

fn apic(report: &Report) -> Option<Finding> {
    let part = Part::device(report, &["local APIC"]);
    part.matters().then(|| Finding {
        id: "x2apic".into(),
        title: "the guest uses the local APIC through memory".into(),
        about: part.details(),
        evidence: part.evidence("local APIC, by MMIO, each access decoded and emulated"),
        gain: part.rate / 2.0,
        remedy: "offer x2APIC (QEMU: -cpu host or +x2apic); on the host see that APIC virtualisation is on: \
                 /sys/module/kvm_intel/parameters/enable_apicv or kvm_amd's avic, which end most of these exits"
            .into(),
        certainty: Certainty::Fair,
        action: None,
    })
}

fn end_of_interrupt(report: &Report) -> Option<Finding> {
    let part = Part::register(report, "x2APIC", &["EOI", "interrupt command"]);
    part.matters().then(|| Finding {
        id: "posted-interrupts".into(),
        title: "ends of interrupts and IPIs cause exits".into(),
        about: part.details(),
        evidence: part.evidence("x2APIC EOI and interrupt command"),
        gain: part.rate,
        remedy: "on the host turn on APIC virtualisation with posted interrupts (kvm_intel enable_apicv, kvm_amd avic); where the \
                 processor has none, paravirtual EOI (-cpu +kvm-pv-eoi,+kvm-pv-ipi) saves most"
            .into(),
        certainty: Certainty::Fair,
        action: None,
    })
}

fn pit(report: &Report) -> Option<Finding> {
    let part = Part::device(report, &["PIT"]);
    part.matters().then(|| Finding {
        id: "pit".into(),
        title: "the guest uses the PIT".into(),
        about: part.details(),
        evidence: part.evidence("PIT"),
        gain: part.rate,
        remedy: "a guest with a local APIC timer leaves the PIT alone: no noapic or nolapic on its command line; polling of \
                 counter 2 is calibration, which tsc=reliable or kvm-clock spares"
            .into(),
        certainty: Certainty::Fair,
        action: None,
    })
}

fn delay(report: &Report) -> Option<Finding> {
    let part = Part::device(report, &["POST", "delay"]);
    part.matters().then(|| Finding {
        id: "io-delay".into(),
        title: "the guest waits by writing to port 0x80 or 0xed".into(),
        about: part.details(),
        evidence: part.evidence("writes that only wait"),
        gain: part.rate,
        remedy: "io_delay=none on the guest's command line".into(),
        certainty: Certainty::High,
        action: None,
    })
}

fn halts(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| site.kind == Kind::Halt);
    let (ns, count) = part.sites.iter().fold((0u64, 0u64), |(ns, count), site| {
        (ns.saturating_add(site.row.host_ns), count + site.row.count)
    });
    let each = part.rate / report.vcpus.max(1) as f64;
    let mean_us = ns as f64 / count.max(1) as f64 / 1e3;
    (part.matters() && each > 1000.0 && ns > 0 && mean_us < 200.0).then(|| Finding {
        id: "halt-polling".into(),
        title: "the guest halts often and for moments".into(),
        about: part.details(),
        evidence: format!("{}; each for {mean_us:.0} us", part.evidence("HLT")),
        gain: part.rate / 2.0,
        remedy: "poll before halting: cpuidle-haltpoll in the guest, or a higher kvm.halt_poll_ns on the host (costs host CPU)"
            .into(),
        certainty: Certainty::Low,
        action: None,
    })
}

fn spinning(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| site.kind == Kind::Pause);
    (part.matters() && part.rate > 200.0).then(|| Finding {
        id: "pause-loops".into(),
        title: "vCPUs spin for locks whose holders do not run".into(),
        about: part.details(),
        evidence: part.evidence("PAUSE in loops"),
        gain: part.rate,
        remedy: "too few host CPUs for these vCPUs: give fewer vCPUs or pin them; let the guest use paravirtual spinlocks \
                 (-cpu +kvm-pv-unhalt)"
            .into(),
        certainty: Certainty::Fair,
        action: None,
    })
}

fn faults(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| site.detail == Detail::Fault);
    (part.matters() && part.rate > 500.0).then(|| Finding {
        id: "page-faults".into(),
        title: "the guest's memory is not there yet, or is taken away".into(),
        about: part.details(),
        evidence: part.evidence("pages mapped"),
        gain: part.rate * 0.9,
        remedy: "huge pages and preallocation for the guest's memory; see whether a balloon, KSM, swapping or dirty logging \
                 (a migration) takes pages away; after start-up it goes away by itself"
            .into(),
        certainty: Certainty::Low,
        action: None,
    })
}

fn notifications(report: &Report) -> Option<Finding> {
    let part = Part::register(report, "virtio", &["queue notification"]);
    (part.matters() && part.rate > 1000.0).then(|| Finding {
        id: "virtio-notifications".into(),
        title: "virtio queues are notified very often".into(),
        about: part.details(),
        evidence: part.evidence("queue notifications"),
        gain: part.rate * 0.9,
        remedy: "see that EVENT_IDX is negotiated (QEMU: event_idx=on), and that vhost or an iothread serves the queue; a back end \
                 that polls needs no notification at all (ioplane)"
            .into(),
        certainty: Certainty::Fair,
        action: None,
    })
}

fn scheduler(report: &Report) -> Option<Finding> {
    let part = Part::register(report, "virtio-blk", &["queue notification"]);
    (part.matters() && part.rate > 200.0).then(|| Finding {
        id: "scheduler".into(),
        about: part.details(),
        title: "the guest may sort requests that the host sorts again".into(),
        evidence: format!(
            "{}; which scheduler the guest has cannot be seen from here",
            part.evidence("virtio-blk")
        ),
        gain: part.rate * 0.05,
        remedy: "none in /sys/block/vd*/queue/scheduler in the guest".into(),
        certainty: Certainty::Low,
        action: Some(Action::Scheduler),
    })
}

/// Ports that one function uses equally often: one after the other, each time.
fn sequences(report: &Report) -> Vec<Finding> {
    let mut groups: BTreeMap<&str, Vec<&SiteRow>> = BTreeMap::new();
    for site in report.sites.iter().filter(|site| site.kind == Kind::Port && site.row.rate >= RATE) {
        if let Some(function) = &site.function {
            groups.entry(function.split('+').next().unwrap_or(function)).or_default().push(site);
        }
    }
    let mut found = Vec::new();
    for (function, sites) in groups {
        let Some(most) = sites.iter().map(|site| site.row.count).max() else { continue };
        let alike: Vec<_> = sites.iter().filter(|site| site.row.count * 50 >= most * 49).collect();
        if alike.len() < 3 {
            continue;
        }
        let rate: f64 = alike.iter().map(|site| site.row.rate).sum();
        let each = rate / alike.len() as f64;
        found.push(Finding {
            id: format!("sequence-{function}"),
            title: format!("{function} makes {} port accesses in a row", alike.len()),
            about: alike.iter().map(|site| site.detail).collect(),
            evidence: format!("{} instructions with {each:.0} exits a second each", alike.len()),
            gain: rate - each,
            remedy: "a paravirtual device instead of this one; a VMM that looks ahead can answer the run in one exit".into(),
            certainty: Certainty::Fair,
            action: None,
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::event::Event;
    use crate::profile::{Profile, Thread};
    use crate::reason::Reason;
    use crate::report::{Names, Subject};
    use crate::vm::Vm;
    use crate::watch::Seen;

    /// A second of these: SVM's code, address, detail, how many.
    fn report(exits: &[(u64, u64, Detail, u64)]) -> Report {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        for (code, rip, detail, count) in exits {
            for at in 0..*count {
                let reason = Reason::from_kvm(2, *code);
                profile.take(
                    &mut thread,
                    at,
                    Event::Exit { reason, rip: *rip, vcpu: Some(0), detail: *detail },
                );
            }
        }
        profile.end(&mut thread);
        let vm = Vm {
            pid: 1,
            name: "a".into(),
            program: "b".into(),
            vcpus: 1,
            vm_fds: vec![3],
            command: Vec::new(),
        };
        let function = |rip: u64| Some(format!("f{:x}+{:#x}", rip >> 8, rip & 0xff));
        let names = Names { function: Some(&function), ..Names::default() };
        let seen = Seen { counted: profile.total().count, ..Seen::default() };
        let subject = Subject { vm: &vm, time: Duration::from_secs(1), seen, sample: 1 };
        Report::new(subject, &profile, None, &names)
    }

    fn port(port: u16, width: u8, write: bool) -> Detail {
        Detail::Port { port, width, write }
    }

    fn ids(report: &Report) -> Vec<String> {
        advise(report).into_iter().map(|finding| finding.id).collect()
    }

    #[test]
    fn clocks_are_found() {
        let report =
            report(&[(0x7b, 0x105, port(0x608, 4, false), 3000), (0x78, 0x200, Detail::Nothing, 100)]);
        let findings = advise(&report);
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].id.as_str(), findings[0].action), ("pm-timer", Some(Action::Clocksource)));
        assert!((findings[0].gain - 3000.0).abs() < 1.0);
        assert!(findings[0].evidence.contains("most from f1"), "{}", findings[0].evidence);
        assert_eq!(report.findings, findings);
        assert_eq!(action_of(&findings[0].id), findings[0].action);
        assert!((findings[0].rate_in(&report) - 3000.0).abs() < 1.0);
        let hpet = Detail::Memory { address: 0xfed0_00f0, width: 4, write: false };
        assert_eq!(ids(&self::report(&[(0x400, 1, hpet, 50)])), ["hpet"]);
    }

    #[test]
    fn rare_exits_are_not_worth_a_word() {
        let quiet = report(&[(0x7b, 1, port(0x608, 4, false), 5), (0x78, 2, Detail::Nothing, 100)]);
        assert!(ids(&quiet).is_empty());
    }

    #[test]
    fn disks_sequences_and_consoles() {
        let disk = report(&[
            (0x7b, 0x101, port(0x1f2, 1, true), 400),
            (0x7b, 0x102, port(0x1f3, 1, true), 400),
            (0x7b, 0x103, port(0x1f4, 1, true), 400),
            (0x7b, 0x104, port(0x1f7, 1, true), 399),
            (0x7b, 0x205, port(0x3f8, 1, true), 300),
        ]);
        assert_eq!(ids(&disk), ["ide", "sequence-f1", "serial"]);
        let ide = &advise(&disk)[0];
        assert!((ide.gain - 1200.0).abs() < 1.0 && ide.evidence.contains("399 commands"), "{ide:?}");
    }

    #[test]
    fn storms() {
        let storm = report(&[(0x400, 1, Detail::Fault, 5000), (0x77, 2, Detail::Nothing, 1000)]);
        assert_eq!(ids(&storm), ["page-faults", "pause-loops"]);
    }
}
