//! Emulated devices, and virtio's queues.

use std::collections::BTreeMap;

use super::{Action, Certainty, Finding, Part};
use crate::devices::DeviceModel::{self, Ahci, Ide, Lsi53c895a, SerialPort, VirtioBlk};
use crate::devices::RegisterRole::{InterruptCause, InterruptMask, QueueNotification, Transmit};
use crate::event::Detail;
use crate::report::{Report, SiteRow};

pub(super) fn serial(report: &Report) -> Option<Finding> {
    let part = Part::device(report, SerialPort);
    part.matters().then(|| Finding {
        id: "serial".into(),
        title: "somebody talks on an emulated serial port, an exit or two for each letter".into(),
        about: part.about(),
        evidence: part.evidence("serial port"),
        gain: part.rate,
        remedy:
            "lower the kernel's console level (dmesg -n 1), take console=ttyS0 from the command line or use \
                 console=hvc0 on virtio-console, which moves whole lines"
                .into(),
        certainty: Certainty::Fair,
        action: Some(Action::Console),
        sequence: None,
    })
}

const VIRTIO_BLK: &str =
    "give the disk as virtio-blk: one exit a request, or none with ioplane (ioplane qemu-args)";

/// An emulated disk: all of its exits but one a request would be spared.
fn disk(id: &str, title: &str, what: &str, part: &Part<'_>, requests: f64) -> Finding {
    Finding {
        id: id.into(),
        title: title.into(),
        about: part.about(),
        evidence: format!("{}, for {requests:.0} commands", part.evidence(what)),
        gain: (part.rate - requests).max(0.0),
        remedy: VIRTIO_BLK.into(),
        certainty: Certainty::High,
        action: None,
        sequence: None,
    }
}

pub(super) fn ide(report: &Report) -> Option<Finding> {
    let part = Part::device(report, Ide);
    let commands = Part::of(report, |site| starts_request(Ide, site));
    let title = "the guest's disk is an emulated IDE disk";
    part.matters().then(|| disk("ide", title, "IDE", &part, commands.rate))
}

/// Writes to a register of a device's BAR whose offset is such a one.
fn writes(site: &SiteRow, at: impl Fn(u64) -> bool) -> bool {
    let writes = matches!(site.detail, Detail::Memory { write: true, .. } | Detail::Port { write: true, .. });
    writes && site.place.as_ref().is_some_and(|place| at(place.offset))
}

/// A port's registers begin at 0x100, 0x80 bytes each; 0x38 is PxCI, where commands are issued (AHCI 1.3.1, chapter 3.3).
fn issues_command(offset: u64) -> bool {
    offset >= 0x100 && offset % 0x80 == 0x38
}

/// Whether such a disk is given a command by that: one a request.
fn starts_request(model: DeviceModel, site: &SiteRow) -> bool {
    match model {
        Ide => matches!(site.detail, Detail::Port { port: 0x1f7 | 0x177, write: true, .. }),
        Ahci => writes(site, issues_command),
        // ISTAT, by which Linux' driver says that there is a command.
        Lsi53c895a => writes(site, |offset| offset == 0x14),
        VirtioBlk => site.place.as_ref().is_some_and(|place| place.role == QueueNotification),
        _ => false,
    }
}

pub(super) fn ahci(report: &Report) -> Option<Finding> {
    let part = Part::device(report, Ahci);
    let commands = part.rate_of(|site| starts_request(Ahci, site));
    let title = "the guest's disk is an emulated SATA disk";
    part.matters().then(|| disk("ahci", title, "AHCI", &part, commands))
}

pub(super) fn lsi(report: &Report) -> Option<Finding> {
    let part = Part::device(report, Lsi53c895a);
    let commands = part.rate_of(|site| starts_request(Lsi53c895a, site));
    let title = "the guest's disk is behind an emulated SCSI adapter";
    part.matters()
        .then(|| Finding { certainty: Certainty::Fair, ..disk("lsi", title, "lsi53c895a", &part, commands) })
}

pub(super) fn nic(report: &Report) -> Option<Finding> {
    let part = Part::at(report, |place| place.model.is_emulated_nic());
    let tails = part.rate_of(|site| site.place.as_ref().is_some_and(|place| place.role == Transmit));
    part.matters().then(|| Finding {
        id: "nic".into(),
        title: "the guest's NIC is an emulated one".into(),
        about: part.about(),
        evidence: part.evidence("the NIC's registers"),
        gain: (part.rate - tails).max(0.0),
        remedy: "give it as virtio-net: at most one exit for each frame sent and none for interrupts; or ioplane's \
                 (ioplane qemu-args)"
            .into(),
        certainty: Certainty::High,
        action: None,
        sequence: None,
    })
}

/// What a NIC has left that interrupts every 250 us.
const MODERATED: f64 = 4000.0;

/// Only Intel's drivers can moderate: those of the other NICs have no such setting.
pub(super) fn moderation(report: &Report) -> Option<Finding> {
    let causes = Part::at(report, |place| place.model.moderates_interrupts() && place.role == InterruptCause);
    // Each NIC by where its BAR begins.
    let mut nics: BTreeMap<u64, f64> = BTreeMap::new();
    for site in &causes.sites {
        if let (Detail::Memory { address, .. }, Some(place)) = (site.detail, &site.place) {
            *nics.entry(address.wrapping_sub(place.offset)).or_default() += site.row.rate;
        }
    }
    let gain: f64 = nics.values().map(|rate| (rate - MODERATED).max(0.0)).sum();
    (causes.matters() && gain > 0.0).then(|| Finding {
        id: "moderation".into(),
        title: "an emulated NIC interrupts very often".into(),
        about: causes.about(),
        evidence: causes.evidence("reads of its interrupt cause, one or more an interrupt"),
        gain,
        remedy: "at most 4000 interrupts a second: in the guest ethtool -C NIC rx-usecs 250 (e1000e), or \
                 InterruptThrottleRate=4000 for the module e1000, whose usual model (82540EM) refuses ethtool; virtio-net \
                 instead is better"
            .into(),
        certainty: Certainty::Low,
        action: None,
        sequence: None,
    })
}

/// From this share of all exits on.
const NAPI_PERCENT: f64 = 5.0;

/// After each interrupt the driver turns the NIC's interrupts on again as soon as there is nothing to do. The guest's kernel can wait for a
/// timer instead, which finds what has come meanwhile without an interrupt.
pub(super) fn napi(report: &Report) -> Option<Finding> {
    let part = Part::at(report, |place| {
        place.model.is_polled_by_napi() && matches!(place.role, InterruptCause | InterruptMask)
    });
    (part.matters() && part.percent >= NAPI_PERCENT).then(|| Finding {
        id: "napi".into(),
        title: "each interrupt of a NIC causes further exits".into(),
        about: part.about(),
        evidence: part.evidence("reads of its interrupt cause, and writes of its interrupt mask"),
        // The timer that stands in for an interrupt takes exits itself.
        gain: 0.0,
        remedy: "let the guest's kernel (Linux 5.8 or later) wait for a timer before it turns the NIC's interrupts on again: \
                 napi_defer_hard_irqs and gro_flush_timeout in /sys/class/net/NIC. The timer takes exits itself, and delays what arrives \
                 meanwhile by up to its time; virtio-net instead is better"
            .into(),
        certainty: Certainty::Low,
        action: Some(Action::Napi),
        sequence: None,
    })
}

pub(super) fn notifications(report: &Report) -> Option<Finding> {
    let part = Part::at(report, |place| place.model.is_virtio() && place.role == QueueNotification);
    (part.matters() && part.rate > 1000.0).then(|| Finding {
        id: "virtio-notifications".into(),
        title: "virtio queues are notified very often".into(),
        about: part.about(),
        evidence: format!(
            "{}; whether EVENT_IDX is negotiated, which is usual, cannot be seen from here",
            part.evidence("queue notifications")
        ),
        gain: part.rate,
        remedy: "a backend that polls needs no notification while it does (ioplane); otherwise see that EVENT_IDX was not turned off \
                 (QEMU: event_idx=off), and that vhost or an iothread serves the queue, so that each notification costs less"
            .into(),
        certainty: Certainty::Low,
        action: None,
        sequence: None,
    })
}

/// So many requests a second make the guest's scheduler worth a word, or such a share of all exits where each takes long.
const REQUESTS: f64 = 200.0;
const REQUESTS_PERCENT: f64 = 10.0;

pub(super) fn scheduler(report: &Report) -> Option<Finding> {
    let part =
        Part::of(report, |site| site.place.as_ref().is_some_and(|place| starts_request(place.model, site)));
    (part.matters() && (part.rate > REQUESTS || part.percent >= REQUESTS_PERCENT)).then(|| Finding {
        id: "scheduler".into(),
        about: part.about(),
        title: "the guest may sort requests that the host sorts again".into(),
        evidence: format!(
            "{}; which scheduler the guest has cannot be seen from here",
            part.evidence("requests to disks")
        ),
        // It may even merge requests; mostly it costs the guest time.
        gain: 0.0,
        remedy: "none in /sys/block/vd*/queue/scheduler in the guest, or sd* for disks of IDE, SATA and SCSI; this is about cost, more than \
                 about the count of exits"
            .into(),
        certainty: Certainty::Low,
        action: Some(Action::Scheduler),
        sequence: None,
    })
}
