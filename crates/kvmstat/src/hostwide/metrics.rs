//! KVM's counters for Prometheus, in OpenMetrics' text format: `/proc` and debugfs --> [`HostLook`] --> text.
//!
//! Names and labels follow docs/decisions/0030. Counters are KVM's own, since each VM began: whoever scrapes them makes rates of them.

use std::collections::BTreeMap;
use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::{Counted, HALTED, HostLook};

/// Family, KVM's counter, help.
const FAMILIES: [(&str, &str, &str); 11] = [
    ("ioplane_vm_exits", "exits", "Exits"),
    ("ioplane_vm_port_exits", "io_exits", "Exits by port instructions"),
    ("ioplane_vm_mmio_exits", "mmio_exits", "Exits by MMIO that the VMM has answered"),
    ("ioplane_vm_halt_exits", "halt_exits", "Exits by HLT"),
    ("ioplane_vm_host_interrupt_exits", "irq_exits", "Exits by interrupts of the host"),
    (
        "ioplane_vm_interrupt_window_exits",
        "irq_window_exits",
        "Exits because the guest can take an interrupt now",
    ),
    ("ioplane_vm_signal_exits", "signal_exits", "Exits by signals to the VMM"),
    ("ioplane_vm_hypercalls", "hypercalls", "Hypercalls"),
    (
        "ioplane_vm_injected_interrupts",
        "irq_injections",
        "Interrupts injected, none where the processor delivers them",
    ),
    ("ioplane_vm_emulated_instructions", "insn_emulation", "Instructions emulated"),
    ("ioplane_vm_page_faults", "pf_taken", "Page faults that KVM has handled"),
];

impl HostLook {
    /// All VMs, in OpenMetrics' text format. A counter that this kernel lacks is left out.
    pub fn open_metrics(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Scrape(self.vms.clone())));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

#[derive(Debug)]
struct Scrape(BTreeMap<u32, Counted>);

impl Scrape {
    /// The name, and the process number too where several VMs have that name: a series must not appear twice, whatever VMs call themselves.
    fn labels(&self, pid: u32, vm: &Counted) -> Vec<(&'static str, String)> {
        let same = self.0.values().filter(|other| other.name == vm.name).count();
        let pid = (same > 1).then(|| ("pid", pid.to_string()));
        [("vm", vm.name.clone())].into_iter().chain(pid).collect()
    }

    /// One family: of each VM what `value` says.
    fn each<M: EncodeMetric>(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help, unit): (&str, &str, Option<&Unit>),
        value: impl Fn(&Counted) -> Option<M>,
    ) -> fmt::Result {
        let samples = self.0.iter().filter_map(|(pid, vm)| Some((self.labels(*pid, vm), value(vm)?)));
        let mut samples = samples.peekable();
        let Some((_, first)) = samples.peek() else { return Ok(()) };
        let mut encoder = encoder.encode_descriptor(name, help, unit, first.metric_type())?;
        samples.try_for_each(|(labels, metric)| metric.encode(encoder.encode_family(&labels)?))
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, counter, help) in FAMILIES {
            self.each(&mut encoder, (name, help, None), |vm| {
                vm.counters.get(counter).map(|count| ConstCounter::new(*count))
            })?;
        }
        let halted = ("ioplane_vm_halted", "Time in which its vCPUs were halted", Some(&Unit::Seconds));
        self.each(&mut encoder, halted, |vm| {
            let parts: Vec<u64> = HALTED.iter().filter_map(|name| vm.counters.get(*name).copied()).collect();
            let ns = parts.iter().fold(0u64, |sum, part| sum.saturating_add(*part));
            (!parts.is_empty()).then(|| ConstCounter::new(ns as f64 / 1e9))
        })?;
        let vcpus = ("ioplane_vm_vcpus", "vCPUs", None);
        self.each(&mut encoder, vcpus, |vm| {
            Some(ConstGauge::new(i64::try_from(vm.vcpus).unwrap_or(i64::MAX)))
        })
    }
}
