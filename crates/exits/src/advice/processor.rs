//! Interrupts, waiting and memory: what vCPUs do with no device.

use super::{Certainty, Finding, Part};
use crate::devices::DeviceModel::{LocalApic, VirtioBalloon, X2Apic};
use crate::devices::RegisterRole::{EndOfInterrupt, InterruptCommand, QueueNotification};
use crate::event::{Detail, FaultCause};
use crate::reason::{Isa, Kind, Reason};
use crate::report::Report;

/// The guest's access to the APIC's page, told by Intel. The other exits of that kind come where the APIC is virtualised already.
const APIC_ACCESS: Reason = Reason { isa: Isa::Vmx, code: 44 };

pub(super) fn apic(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| {
        let by_memory = site.place.as_ref().is_some_and(|place| place.model == LocalApic);
        (by_memory && site.kind == Kind::Memory) || site.reason == APIC_ACCESS
    });
    let host = match report.host.virtual_apic() {
        Some((true, name)) => {
            format!(
                "{name} is on here, which should end most of these exits: KVM has it inhibited for this VM, or the processor can \
                 do a part of it only; {INHIBITED}"
            )
        }
        Some((false, name)) => match report.host.apic_capable {
            Some(true) => format!("{name} is off here, and the processor can do it: that ends most of these exits"),
            Some(false) => "this processor cannot virtualise the APIC".into(),
            None => format!("{name} is off here: if the processor can do it, that ends most of these exits"),
        },
        None => "whether this host virtualises the APIC (kvm_intel.enable_apicv, kvm_amd.avic), which ends most of these exits, \
                 cannot be read here"
            .into(),
    };
    part.matters().then(|| Finding {
        id: "x2apic".into(),
        title: "the guest uses the local APIC through memory".into(),
        about: part.about(),
        evidence: part.evidence("local APIC, by MMIO, each access decoded and emulated"),
        gain: 0.0,
        remedy: format!(
            "offer x2APIC (QEMU: -cpu host or +x2apic): an access is an exit still, but a cheaper one (cost, not count); ends of \
             interrupts can go with -cpu +kvm-pv-eoi. {host}"
        ),
        certainty: Certainty::Low,
        action: None,
        sequence: None,
    })
}

const INHIBITED: &str = "see whether the PIT makes up for lost ticks (AMD; QEMU: -global kvm-pit.lost_tick_policy=discard), Hyper-V's \
     AutoEOI is offered, or QEMU emulates the APIC itself (kernel-irqchip=off)";

pub(super) fn end_of_interrupt(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| {
        let by_msr = site.place.as_ref().is_some_and(|place| {
            place.model == X2Apic && matches!(place.role, EndOfInterrupt | InterruptCommand)
        });
        by_msr || (site.kind == Kind::Apic && site.reason != APIC_ACCESS)
    });
    let virtualised = part.sites.iter().any(|site| site.kind == Kind::Apic);
    let (gain, certainty, remedy) = match report.host.virtual_apic() {
        Some((true, name)) if virtualised => (
            0.0,
            Certainty::Low,
            format!(
                "{name} is on here, and these are what it leaves: ends of level-triggered interrupts (MSI has none), IPIs to vCPUs \
                 that do not run (pin them, let them sleep less), timers (TSC deadline)"
            ),
        ),
        Some((true, name)) => (
            part.rate,
            Certainty::Low,
            format!(
                "{name} is on here, and yet these exits come: KVM has it inhibited for this VM; {INHIBITED}"
            ),
        ),
        Some((false, _)) if report.host.apic_capable == Some(false) => (
            0.0,
            Certainty::Fair,
            "the processor has no APIC virtualisation: paravirtual EOI and IPIs (-cpu +kvm-pv-eoi,+kvm-pv-ipi) save some".into(),
        ),
        Some((false, name)) => {
            let sure = report.host.apic_capable == Some(true);
            let remedy = format!("turn on {name} on this host, which is off; {PARAVIRTUAL}");
            (part.rate, if sure { Certainty::High } else { Certainty::Fair }, remedy)
        }
        None => (
            part.rate,
            Certainty::Low,
            format!(
                "on the host turn on APIC virtualisation with posted interrupts (kvm_intel.enable_apicv, kvm_amd.avic; neither can be \
                 read here); {PARAVIRTUAL}"
            ),
        ),
    };
    part.matters().then(|| Finding {
        id: "posted-interrupts".into(),
        title: "ends of interrupts and IPIs cause exits".into(),
        about: part.about(),
        evidence: part.evidence("EOI, interrupt command, and what a virtual APIC leaves"),
        gain,
        remedy,
        certainty,
        action: None,
        sequence: None,
    })
}

const PARAVIRTUAL: &str =
    "where the processor has none, paravirtual EOI and IPIs (-cpu +kvm-pv-eoi,+kvm-pv-ipi) save some";

/// So long a guest polls at most before it halts (Linux, drivers/cpuidle/governors/haltpoll.c: guest_halt_poll_ns).
const POLL_NS: f64 = 200e3;

pub(super) fn halts(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| site.kind == Kind::Halt);
    let each = part.rate / report.vcpus.max(1) as f64;
    let mean_ns = part.ns_each()? as f64;
    let polls = report.host.halt_poll_ns.map_or(String::new(), |ns| {
        format!(", kvm.halt_poll_ns is {ns} here: with it waking costs less, but a halt is an exit still")
    });
    (part.matters() && each > 1000.0 && mean_ns < POLL_NS).then(|| Finding {
        id: "halt-polling".into(),
        title: "the guest halts often and for moments".into(),
        about: part.about(),
        evidence: format!("{}; each for {:.0} us{polls}", part.evidence("HLT"), mean_ns / 1e3),
        // Of numbers with this mean, so many at least are below the limit (Markov).
        // A sample's mean is too small.
        gain: if report.sample == 1 { part.rate * (1.0 - mean_ns / POLL_NS) } else { 0.0 },
        remedy: "poll in the guest before halting: the cpuidle driver haltpoll (module cpuidle_haltpoll; costs host CPU)".into(),
        certainty: Certainty::Low,
        action: None,
        sequence: None,
    })
}

pub(super) fn spinning(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| site.kind == Kind::Pause);
    let mut evidence = part.evidence("PAUSE in loops");
    if report.spin_windows > 0 {
        evidence += &format!("; KVM changed how long they may spin {} times", report.spin_windows);
    }
    if let (Some(gap), Some(window)) = (report.host.ple_gap, report.host.ple_window) {
        evidence += &format!("; this host's ple_gap is {gap}, its ple_window {window}");
    }
    (part.matters() && part.rate > 200.0).then(|| Finding {
        id: "pause-loops".into(),
        title: "vCPUs spin for locks whose holders do not run".into(),
        about: part.about(),
        evidence,
        gain: part.rate,
        remedy: "too few host CPUs for these vCPUs: give fewer vCPUs or pin them; let the guest use paravirtual spinlocks \
                 (-cpu +kvm-pv-unhalt)"
            .into(),
        certainty: Certainty::Fair,
        action: None,
        sequence: None,
    })
}

/// The processor says of each fault whether the page was missing or only protected.
pub(super) fn faults(report: &Report) -> Option<Finding> {
    let part = Part::of(report, |site| matches!(site.detail, Detail::Fault(_)));
    let of = |cause: FaultCause| part.rate_of(|site| site.detail == Detail::Fault(cause));
    let (missing, noted, unknown) =
        (of(FaultCause::Missing), of(FaultCause::WriteProtected), of(FaultCause::Unknown));
    let balloon = Part::register(report, VirtioBalloon, QueueNotification);
    let mut evidence = part.evidence("page faults");
    evidence += &format!("; {missing:.0} a second not mapped, {noted:.0} write-protected");
    let mut suspects = "a balloon, KSM or swapping takes";
    if let Some(place) = balloon.sites.first().and_then(|site| site.place.as_ref()) {
        evidence += &format!("; meanwhile {} was notified {:.0} times a second", place.device, balloon.rate);
        suspects = "that balloon (what it gives back is mapped again), KSM or swapping takes";
    }
    let protected = noted * 2.0 > part.rate;
    let (title, gain, remedy) = if protected {
        (
            "the guest writes to pages that are write-protected",
            0.0,
            "a migration, a snapshot or a VMM's screen notes which pages are dirty (it ends with that); KSM shares pages, or a fork of the VMM does: \
             turn KSM off for this VM"
                .into(),
        )
    } else {
        (
            "the guest's memory is not there yet, or is taken away",
            // A huge page is 512 of them.
            (part.rate - noted) * 511.0 / 512.0,
            format!(
                "huge pages and preallocation for the guest's memory; see whether {suspects} pages away; after start-up it goes away by \
                 itself"
            ),
        )
    };
    (part.matters() && part.rate > 500.0).then(|| Finding {
        id: "page-faults".into(),
        title: title.into(),
        about: part.about(),
        evidence,
        gain,
        remedy,
        certainty: if unknown * 2.0 > part.rate { Certainty::Low } else { Certainty::Fair },
        action: None,
        sequence: None,
    })
}
