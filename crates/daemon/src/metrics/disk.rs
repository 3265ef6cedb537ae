//! Disks.

use ioplane_api::report::{Counts, DiskReport, ServedState, StatusReport};

use super::families::{Families, Family, Labels};

/// Everything about them.
pub fn write(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let queues = || {
        status.disks.iter().flat_map(|disk| {
            disk.queues.iter().map(move |queue| -> (Labels, &Counts) {
                let labels = vec![("device", disk.name.clone()), ("queue", queue.index.to_string())];
                (labels, &queue.counts)
            })
        })
    };
    let mut counter = |family, of: fn(&Counts) -> u64| {
        families.counters(family, queues().map(|(labels, counts)| (labels, of(counts))))
    };
    counter(Family::new("ioplane_disk_requests", "Requests answered"), |c| c.requests)?;
    counter(Family::bytes("ioplane_disk_read", "Bytes read by the guest"), |c| c.bytes_read)?;
    counter(Family::bytes("ioplane_disk_written", "Bytes written by the guest"), |c| c.bytes_written)?;
    counter(Family::new("ioplane_disk_kicks", "Kicks of the guest, each an exit"), |c| c.kicks)?;
    counter(Family::new("ioplane_disk_kicks_avoided", "Batches of requests found without a kick"), |c| {
        c.kicks_avoided
    })?;
    counter(Family::new("ioplane_disk_interrupts", "Interrupts sent to the guest"), |c| c.interrupts)?;
    counter(Family::new("ioplane_disk_interrupts_avoided", "Batches answered without an interrupt"), |c| {
        c.interrupts_avoided
    })?;
    counter(Family::new("ioplane_disk_guest_faults", "Faults of the guest, each stopping a queue"), |c| {
        c.faults
    })?;
    counter(
        Family::new("ioplane_disk_replayed_requests", "Requests done again after a crash of the daemon"),
        |c| c.replayed,
    )?;
    let errors = queues().flat_map(|(labels, counts)| {
        let errors = counts.errors;
        let causes = [
            ("io", errors.io),
            ("space", errors.space),
            ("request", errors.request),
            ("unsupported", errors.unsupported),
        ];
        causes.map(|(cause, count)| {
            let mut labels = labels.clone();
            labels.push(("cause", cause.to_owned()));
            (labels, count)
        })
    });
    families.counters(Family::new("ioplane_disk_errors", "Requests that failed, by cause"), errors)?;
    families.durations(
        "ioplane_disk_request_duration",
        "Time from taking a request to having its result; the sum is computed from the buckets",
        queues().map(|(labels, counts)| (labels, counts.latency.as_slice())),
    )?;
    families.durations(
        "ioplane_disk_wait_duration",
        "Time that a request may have waited for the core; see docs/guide/status.md",
        queues().map(|(labels, counts)| (labels, counts.wait.as_slice())),
    )?;
    families.durations(
        "ioplane_disk_interrupt_duration",
        "Time from having results to having sent the interrupt for them; see docs/guide/status.md",
        queues().map(|(labels, counts)| (labels, counts.interrupt.as_slice())),
    )?;
    let mut gauge = |family, of: fn(&DiskReport) -> i64| {
        families
            .gauges(family, status.disks.iter().map(|disk| (vec![("device", disk.name.clone())], of(disk))))
    };
    gauge(Family::new("ioplane_disk_connected", "1 while a front end is connected"), |disk| {
        disk.connected.into()
    })?;
    gauge(Family::bytes("ioplane_disk_size", "Size of the disk"), |disk| disk.size as i64)?;
    gauge(Family::new("ioplane_disk_failed", "1 while the disk cannot be served"), |disk| {
        (disk.state == ServedState::Failed).into()
    })
}
