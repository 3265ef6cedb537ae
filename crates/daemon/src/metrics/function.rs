//! PCI functions.

use ioplane_api::report::{FunctionReport, ServedState, Stage, StatusReport, WatchReport};

use super::families::{Families, Family, Labels};

fn labels(function: &FunctionReport) -> Labels {
    vec![("device", function.name.clone())]
}

/// Everything about them.
pub fn write(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let all = || status.functions.iter();
    let infos = all().map(|one| {
        let mut labels = labels(one);
        labels.push(("mode", one.mode.clone()));
        labels.push(("model", one.model.clone().unwrap_or("none".to_owned())));
        labels
    });
    families.infos(
        Family::new("ioplane_pci", "How a PCI function is served, and its state model or chip"),
        infos,
    )?;
    let mut gauge = |family, of: fn(&FunctionReport) -> bool| {
        families.gauges(family, all().map(|one| (labels(one), of(one).into())))
    };
    gauge(Family::new("ioplane_pci_connected", "1 while a VMM is connected"), |one| one.connected)?;
    gauge(Family::new("ioplane_pci_failed", "1 while the function cannot be served"), |one| {
        one.state == ServedState::Failed
    })?;
    gauge(Family::new("ioplane_pci_held", "1 while the function is quiescent and its guest waits"), |one| {
        one.stage != Stage::Running && one.stage != Stage::Quiescing
    })?;
    let mut counter = |family, of: fn(&FunctionReport) -> u64| {
        families.counters(family, all().map(|one| (labels(one), of(one))))
    };
    counter(
        Family::new("ioplane_pci_reads", "Register reads that came to the daemon, each an exit"),
        |one| one.traffic.reads,
    )?;
    counter(
        Family::new("ioplane_pci_writes", "Register writes that came to the daemon, each an exit"),
        |one| one.traffic.writes,
    )?;
    counter(Family::new("ioplane_pci_interrupts", "Interrupts that the daemon sent to the guest"), |one| {
        one.traffic.interrupts
    })?;
    mediated(status, families)
}

/// What the monitor saw.
fn mediated(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let all = || status.functions.iter().filter_map(|one| Some((labels(one), one.watch.as_ref()?)));
    let mut counter = |family, of: fn(&WatchReport) -> u64| {
        families.counters(family, all().map(|(labels, watch)| (labels, of(watch))))
    };
    counter(Family::new("ioplane_pci_accesses", "Register accesses to a mediated function"), |w| w.accesses)?;
    counter(
        Family::new("ioplane_pci_hooked", "Register accesses that the state model was asked about"),
        |w| w.hooked,
    )?;
    counter(
        Family::new("ioplane_pci_updates", "Times that the state model was asked or told of something"),
        |w| w.updates,
    )?;
    counter(Family::new("ioplane_pci_dma_vetted", "Descriptors and blocks checked and translated"), |w| {
        w.dma_vetted
    })?;
    counter(
        Family::bytes("ioplane_pci_dma", "Bytes of the descriptors and blocks checked and translated"),
        |w| w.dma_bytes,
    )?;
    counter(Family::new("ioplane_pci_device_interrupts", "Interrupts of the hardware"), |w| w.interrupts)?;
    let faults = all().flat_map(|(labels, watch)| {
        watch.faults.iter().map(move |fault| {
            let mut labels = labels.clone();
            labels.extend([("cause", fault.cause.clone()), ("fault", fault.name.clone())]);
            (labels, fault.count)
        })
    });
    let help = "Accesses denied to a guest, and faults of the hardware (cause hardware)";
    families.counters(Family::new("ioplane_pci_faults", help), faults)?;
    let mut gauge = |family, of: fn(&WatchReport) -> bool| {
        families.gauges(family, all().map(|(labels, watch)| (labels, of(watch).into())))
    };
    gauge(Family::new("ioplane_pci_reusable", "1 while the function could change hands"), |w| w.reusable)?;
    gauge(Family::new("ioplane_pci_stopped", "1 after a fault has stopped the function"), |w| w.stopped)
}
