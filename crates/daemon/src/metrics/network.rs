//! NICs, ports of switches, and uplinks.

use ioplane_api::report::{FrameCounts, NicReport, PortReport, ServedState, StatusReport};

use super::core_label;
use super::families::{Families, Family, Labels};

/// Everything about them.
pub fn write(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let queues = || {
        status.nics.iter().flat_map(|nic| {
            nic.queues.iter().map(move |queue| -> (Labels, &FrameCounts) {
                let labels = vec![
                    ("device", nic.name.clone()),
                    ("queue", queue.index.to_string()),
                    ("role", queue.role.word().to_owned()),
                ];
                (labels, &queue.counts)
            })
        })
    };
    let mut counter = |family, of: fn(&FrameCounts) -> u64| {
        families.counters(family, queues().map(|(labels, counts)| (labels, of(counts))))
    };
    counter(Family::new("ioplane_nic_frames", "Frames received or transmitted by the guest"), |c| c.frames)?;
    counter(Family::bytes("ioplane_nic", "Bytes of frames received or transmitted by the guest"), |c| {
        c.bytes
    })?;
    counter(Family::new("ioplane_nic_kicks", "Kicks of the guest, each an exit"), |c| c.kicks)?;
    counter(Family::new("ioplane_nic_kicks_avoided", "Batches of frames found without a kick"), |c| {
        c.kicks_avoided
    })?;
    counter(Family::new("ioplane_nic_interrupts", "Interrupts sent to the guest"), |c| c.interrupts)?;
    counter(
        Family::new("ioplane_nic_interrupts_avoided", "Batches shown to the driver without an interrupt"),
        |c| c.interrupts_avoided,
    )?;
    counter(Family::new("ioplane_nic_guest_faults", "Faults of the guest, each stopping a queue"), |c| {
        c.faults
    })?;
    families.durations(
        "ioplane_nic_frame_duration",
        "Time from taking a frame to having done it; the sum is computed from the buckets",
        queues().map(|(labels, counts)| (labels, counts.latency.as_slice())),
    )?;
    families.durations(
        "ioplane_nic_wait_duration",
        "Time that a frame may have waited for the core; see docs/guide/status.md",
        queues().map(|(labels, counts)| (labels, counts.wait.as_slice())),
    )?;
    families.durations(
        "ioplane_nic_interrupt_duration",
        "Time from having done frames to having sent the interrupt for them; see docs/guide/status.md",
        queues().map(|(labels, counts)| (labels, counts.interrupt.as_slice())),
    )?;
    let mut gauge = |family, of: fn(&NicReport) -> bool| {
        let samples = status.nics.iter().map(|nic| (vec![("device", nic.name.clone())], of(nic).into()));
        families.gauges(family, samples)
    };
    gauge(Family::new("ioplane_nic_connected", "1 while a front end is connected"), |nic| nic.connected)?;
    gauge(Family::new("ioplane_nic_up", "1 while the link is up and its driver runs"), |nic| nic.port.up)?;
    gauge(Family::new("ioplane_nic_failed", "1 while the NIC cannot be served"), |nic| {
        nic.state == ServedState::Failed
    })?;
    ports(status, families)?;
    let uplinks = status.switches.iter().filter_map(|switch| {
        Some(vec![
            ("switch", switch.name.clone()),
            ("interface", switch.uplink.clone()?),
            ("core", core_label(switch.uplink_core)),
        ])
    });
    families.infos(Family::new("ioplane_uplink", "I/O core that the uplink of a switch runs on"), uplinks)
}

/// Both directions of each port, seen from its owner.
fn ports(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let ports =
        || status.switches.iter().flat_map(|switch| switch.ports.iter().map(move |port| (switch, port)));
    let labels = |switch: &str, port: &PortReport, direction: &str| -> Labels {
        vec![("switch", switch.to_owned()), ("port", port.name.clone()), ("direction", direction.to_owned())]
    };
    let mut both = |family, of: fn(&PortReport) -> [u64; 2]| {
        let samples = ports().flat_map(|(switch, port)| {
            let [sent, received] = of(port);
            [(labels(&switch.name, port, "sent"), sent), (labels(&switch.name, port, "received"), received)]
        });
        families.counters(family, samples)
    };
    both(Family::new("ioplane_port_frames", "Frames from and to the owner of a port"), |port| {
        [port.sent_frames, port.received_frames]
    })?;
    both(Family::bytes("ioplane_port", "Bytes of frames from and to the owner of a port"), |port| {
        [port.sent_bytes, port.received_bytes]
    })?;
    let drops = ports().flat_map(|(switch, port)| {
        let sides = [("sent", &port.sent_drops), ("received", &port.received_drops)];
        sides.into_iter().flat_map(move |(direction, drops)| {
            drops.iter().map(move |(cause, count)| {
                let mut labels = labels(&switch.name, port, direction);
                labels.push(("cause", cause.clone()));
                (labels, *count)
            })
        })
    });
    families.counters(Family::new("ioplane_port_drops", "Frames dropped, by cause"), drops)
}
