//! NICs and ports of switches.

use ioplane_api::report::{FrameCounts, NicQueueReport, NicReport, PortReport, ServedState, StatusReport};
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::{Labels, each, times};

fn queue_labels(nic: &NicReport, queue: &NicQueueReport) -> Labels {
    let core = queue.core.map_or("none".to_owned(), |core| core.to_string());
    vec![
        ("nic", nic.name.clone()),
        ("queue", queue.index.to_string()),
        ("role", queue.role.word().to_owned()),
        ("core", core),
    ]
}

/// Everything about them.
pub fn encode(status: &StatusReport, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let queues = || status.nics.iter().flat_map(|nic| nic.queues.iter().map(move |queue| (nic, queue)));
    let counter = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&FrameCounts) -> u64| {
        let metrics = queues().map(|(nic, q)| (queue_labels(nic, q), ConstCounter::new(of(&q.counts))));
        each(encoder, name, help, metrics)
    };
    counter(encoder, "ioplane_nic_frames", "Frames received or transmitted by the guest", |c| c.frames)?;
    counter(encoder, "ioplane_nic_bytes", "Their bytes", |c| c.bytes)?;
    counter(encoder, "ioplane_nic_kicks", "Kicks of the guest, each an exit", |c| c.kicks)?;
    counter(encoder, "ioplane_nic_kicks_avoided", "Batches that were found without a kick", |c| {
        c.kicks_avoided
    })?;
    counter(encoder, "ioplane_nic_interrupts", "Interrupts sent to the guest", |c| c.interrupts)?;
    counter(encoder, "ioplane_nic_interrupts_avoided", "Batches shown without an interrupt", |c| {
        c.interrupts_avoided
    })?;
    counter(encoder, "ioplane_nic_guest_faults", "Faults of the guest, each stopping a queue", |c| c.faults)?;
    let help = "Device time of a frame; the sum is reckoned from the buckets";
    let all = queues().map(|(nic, q)| (queue_labels(nic, q), q.counts.latency.as_slice()));
    times(encoder, "ioplane_nic_frame_seconds", help, all)?;
    let help = "How long a frame may have waited for the core; see docs/guide/status.md";
    let all = queues().map(|(nic, q)| (queue_labels(nic, q), q.counts.wait.as_slice()));
    times(encoder, "ioplane_nic_wait_seconds", help, all)?;

    let gauge = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&NicReport) -> bool| {
        let metrics = status
            .nics
            .iter()
            .map(|nic| (vec![("nic", nic.name.clone())], ConstGauge::new(i64::from(of(nic)))));
        each(encoder, name, help, metrics)
    };
    gauge(encoder, "ioplane_nic_connected", "1 while a front end is connected", |nic| nic.connected)?;
    gauge(encoder, "ioplane_nic_up", "1 while the link is up and its driver runs", |nic| nic.port.up)?;
    gauge(encoder, "ioplane_nic_failed", "1 while the NIC cannot be served", |nic| {
        nic.state == ServedState::Failed
    })?;
    ports(status, encoder)
}

/// Both directions of each port, seen from its owner.
fn ports(status: &StatusReport, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let ports =
        || status.switches.iter().flat_map(|switch| switch.ports.iter().map(move |port| (switch, port)));
    let labels = |switch: &str, port: &PortReport, direction: &str| -> Labels {
        vec![("switch", switch.to_owned()), ("port", port.name.clone()), ("direction", direction.to_owned())]
    };
    let both = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&PortReport) -> [u64; 2]| {
        let metrics = ports().flat_map(|(switch, port)| {
            let [sent, received] = of(port).map(ConstCounter::new);
            [(labels(&switch.name, port, "sent"), sent), (labels(&switch.name, port, "received"), received)]
        });
        each(encoder, name, help, metrics)
    };
    both(encoder, "ioplane_port_frames", "Frames from and to the owner of a port", |port| {
        [port.sent_frames, port.received_frames]
    })?;
    both(encoder, "ioplane_port_bytes", "Their bytes", |port| [port.sent_bytes, port.received_bytes])?;
    let drops = ports().flat_map(|(switch, port)| {
        let sides = [("sent", &port.sent_drops), ("received", &port.received_drops)];
        sides.into_iter().flat_map(move |(direction, drops)| {
            drops.iter().map(move |(cause, count)| {
                let mut labels = labels(&switch.name, port, direction);
                labels.push(("cause", cause.clone()));
                (labels, ConstCounter::new(*count))
            })
        })
    });
    each(encoder, "ioplane_port_drops", "Frames dropped, by cause", drops)
}

/// Which VM uses which device, to join the others with.
pub fn vms(status: &StatusReport, encoder: &mut DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
    let disks = status.disks.iter().map(|disk| ("disk", &disk.name, &disk.vm));
    let nics = status.nics.iter().map(|nic| ("nic", &nic.name, &nic.vm));
    let functions = status.functions.iter().map(|one| ("pci", &one.name, &one.vm));
    let metrics = disks.chain(nics).chain(functions).filter_map(|(kind, name, vm)| {
        let vm = vm.as_ref()?;
        let labels = vec![
            ("device", name.clone()),
            ("kind", kind.to_owned()),
            ("vm", vm.name.clone()),
            ("pid", vm.pid.to_string()),
        ];
        Some((labels, ConstGauge::new(1i64)))
    });
    each(encoder, "ioplane_device_vm", "1 for the VM that a device is connected to", metrics)
}
