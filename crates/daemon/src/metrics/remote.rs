//! Exports, and the connections of disks of other machines.

use ioplane_api::report::{ExportReport, RemoteReport, RemoteWord, ServedState, StatusReport, VmPauseWord};

use ioplane_nbd::export::WRONG_SUM;

use super::families::{BYTES_PER_SECOND, Families, Family, Labels, REQUESTS_PER_SECOND};

/// Everything about them.
pub fn write(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    exports(status, families)?;
    let all = || {
        let remote = |disk: &'_ ioplane_api::report::DiskReport| {
            Some((vec![("device", disk.name.clone())], disk.backing.remote.clone()?))
        };
        status.disks.iter().filter_map(remote)
    };
    families.gauges(
        Family::new("ioplane_remote_connected", "1 while a disk of another machine can be reached"),
        all().map(|(labels, remote)| (labels, (remote.state == RemoteWord::Connected).into())),
    )?;
    families.gauges(
        Family::new(
            "ioplane_remote_claim_refused",
            "1 while another host has taken the disk over, or its claim was released",
        ),
        all().map(|(labels, remote)| (labels, (remote.state == RemoteWord::Refused).into())),
    )?;
    let pauses = || {
        let pause = |disk: &ioplane_api::report::DiskReport| {
            Some((vec![("device", disk.name.clone())], disk.vm_pause.as_ref()?.state))
        };
        status.disks.iter().filter_map(pause)
    };
    let paused = |word| matches!(word, VmPauseWord::Paused | VmPauseWord::CannotContinue);
    families.gauges(
        Family::new("ioplane_remote_vm_paused", "1 while ioplane has paused the VM of the disk"),
        pauses().map(|(labels, word)| (labels, paused(word).into())),
    )?;
    let failed = |word| matches!(word, VmPauseWord::CannotPause | VmPauseWord::CannotContinue);
    families.gauges(
        Family::new("ioplane_remote_vm_pause_failed", "1 while that VM could not be paused or continued"),
        pauses().map(|(labels, word)| (labels, failed(word).into())),
    )?;
    let mut reserved = |unit, of: fn(&RemoteReport) -> u64| {
        let help = "What the other machine keeps for the disk; 0 if nothing";
        families.gauges(
            Family::rates("ioplane_remote_reserved", unit, help),
            all().map(|(labels, remote)| (labels, number(of(&remote)))),
        )
    };
    reserved(REQUESTS_PER_SECOND, |one| one.reserved_iops)?;
    reserved(BYTES_PER_SECOND, |one| one.reserved_bandwidth)?;
    let mut counter = |family, of: fn(&RemoteReport) -> u64| {
        families.counters(family, all().map(|(labels, remote)| (labels, of(&remote))))
    };
    counter(Family::new("ioplane_remote_requests", "Requests sent to another machine"), |one| one.requests)?;
    counter(
        Family::new("ioplane_remote_replayed_requests", "Requests sent again after a connection was lost"),
        |one| one.replays,
    )?;
    counter(Family::new("ioplane_remote_lost_connections", "Connections lost"), |one| one.losses)?;
    counter(
        Family::new(
            "ioplane_remote_changed_connections",
            "Connections lost since data were changed on the way",
        ),
        |one| one.changed,
    )?;
    counter(Family::new("ioplane_remote_errors", "Requests that the other machine has failed"), |one| {
        one.device_errors
    })
}

fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn exports(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let labels = |export: &ExportReport| -> Labels { vec![("device", export.name.clone())] };
    let all = || status.exports.iter();
    let mut gauge = |family, of: fn(&ExportReport) -> i64| {
        families.gauges(family, all().map(|one| (labels(one), of(one))))
    };
    gauge(Family::new("ioplane_export_connections", "Connections of clients"), |one| {
        number(one.connections)
    })?;
    gauge(Family::new("ioplane_export_failed", "1 while the export cannot be served"), |one| {
        (one.state == ServedState::Failed).into()
    })?;
    gauge(Family::new("ioplane_export_held", "1 while one host alone may use the export"), |one| {
        one.claim.as_ref().is_some_and(|claim| claim.held).into()
    })?;
    gauge(Family::new("ioplane_export_generation", "The claim that was granted last"), |one| {
        one.claim.as_ref().map_or(0, |claim| number(claim.generation))
    })?;
    capacities(status, families)?;
    let mut counter = |family, of: fn(&ExportReport) -> u64| {
        families.counters(family, all().map(|one| (labels(one), of(one))))
    };
    counter(Family::new("ioplane_export_requests", "Requests answered"), |one| one.totals.requests)?;
    counter(
        Family::new(
            "ioplane_export_changed_connections",
            "Connections of clients that ended since data were changed on the way",
        ),
        |one| one.ends.get(WRONG_SUM).copied().unwrap_or(0),
    )?;
    counter(Family::bytes("ioplane_export_read", "Bytes read by clients"), |one| one.totals.bytes_read)?;
    counter(Family::bytes("ioplane_export_written", "Bytes written by clients"), |one| {
        one.totals.bytes_written
    })
}

/// What is declared, and what of it is reserved, of exports that declare something.
fn capacities(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    type Rate = (Option<u64>, u64);
    let mut rates = |unit, of: fn(&ExportReport) -> Rate| {
        let declared = || {
            status.exports.iter().filter_map(move |one| {
                let (capacity, reserved) = of(one);
                Some((vec![("device", one.name.clone())], capacity?, one.state, reserved))
            })
        };
        families.gauges(
            Family::rates("ioplane_export_capacity", unit, "What all clients may do together"),
            declared().map(|(labels, capacity, ..)| (labels, number(capacity))),
        )?;
        // What is reserved is known once it is served.
        let served = declared().filter(|(.., state, _)| *state == ServedState::Served);
        families.gauges(
            Family::rates("ioplane_export_reserved", unit, "How much of its capacity is reserved"),
            served.map(|(labels, .., reserved)| (labels, number(reserved))),
        )
    };
    rates(REQUESTS_PER_SECOND, |one| (one.iops_limit, one.reserved_iops))?;
    rates(BYTES_PER_SECOND, |one| (one.bandwidth_limit.map(|size| size.0), one.reserved_bandwidth.0))
}
