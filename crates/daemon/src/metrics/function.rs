//! PCI functions.

use ioplane_api::report::{FunctionReport, ServedState, Stage, StatusReport, WatchReport};
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{Labels, each};

fn labels(function: &FunctionReport) -> Labels {
    vec![("function", function.name.clone()), ("mode", function.mode.clone())]
}

/// Everything about them.
pub fn encode(status: &StatusReport, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let all = || status.functions.iter();
    let gauge = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&FunctionReport) -> bool| {
        each(encoder, name, help, all().map(|one| (labels(one), ConstGauge::new(i64::from(of(one))))))
    };
    gauge(encoder, "ioplane_pci_connected", "1 while a VMM is connected", |one| one.connected)?;
    gauge(encoder, "ioplane_pci_failed", "1 while the function cannot be served", |one| {
        one.state == ServedState::Failed
    })?;
    gauge(encoder, "ioplane_pci_held", "1 while the function is at rest and its guest waits", |one| {
        one.stage != Stage::Running && one.stage != Stage::Quiescing
    })?;
    let counter = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&FunctionReport) -> u64| {
        each(encoder, name, help, all().map(|one| (labels(one), ConstCounter::new(of(one)))))
    };
    counter(
        encoder,
        "ioplane_pci_reads",
        "Reads of registers that came to the daemon, each an exit",
        |one| one.traffic.reads,
    )?;
    counter(
        encoder,
        "ioplane_pci_writes",
        "Writes of registers that came to the daemon, each an exit",
        |one| one.traffic.writes,
    )?;
    counter(encoder, "ioplane_pci_interrupts", "Interrupts that the daemon sent to the guest", |one| {
        one.traffic.interrupts
    })?;
    watched(status, encoder)
}

/// What the monitor saw.
fn watched(status: &StatusReport, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let all = || status.functions.iter().filter_map(|one| Some((labels(one), one.watch.as_ref()?)));
    let counter = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&WatchReport) -> u64| {
        each(encoder, name, help, all().map(|(labels, watch)| (labels, ConstCounter::new(of(watch)))))
    };
    counter(encoder, "ioplane_pci_accesses", "Accesses to registers of a watched function", |w| w.accesses)?;
    counter(encoder, "ioplane_pci_hooked", "Those that the state model was asked about", |w| w.hooked)?;
    counter(
        encoder,
        "ioplane_pci_updates",
        "Times that the state model was asked or told of something",
        |w| w.updates,
    )?;
    counter(encoder, "ioplane_pci_dma_vetted", "Descriptors and blocks checked and translated", |w| {
        w.dma_vetted
    })?;
    counter(encoder, "ioplane_pci_dma_bytes", "Their bytes", |w| w.dma_bytes)?;
    counter(encoder, "ioplane_pci_device_interrupts", "Interrupts of the hardware", |w| w.interrupts)?;
    let denied = all().flat_map(|(labels, watch)| {
        watch.faults.iter().map(move |fault| {
            let mut labels = labels.clone();
            labels.extend([("cause", fault.cause.clone()), ("name", fault.name.clone())]);
            (labels, ConstCounter::new(fault.count))
        })
    });
    each(encoder, "ioplane_pci_faults", "What a guest was denied, and what the hardware did wrong", denied)?;
    let gauge = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&WatchReport) -> bool| {
        each(
            encoder,
            name,
            help,
            all().map(|(labels, watch)| (labels, ConstGauge::new(i64::from(of(watch))))),
        )
    };
    gauge(encoder, "ioplane_pci_reusable", "1 while the function could change hands", |w| w.reusable)?;
    gauge(encoder, "ioplane_pci_stopped", "1 after a fault has stopped the function", |w| w.stopped)
}
