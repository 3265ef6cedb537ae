//! Exports, and the connections of disks of other machines.

use ioplane_api::report::{ExportReport, RemoteReport, RemoteWord, ServedState, StatusReport};

use super::families::{Families, Family, Labels};

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
    let mut counter = |family, of: fn(&RemoteReport) -> u64| {
        families.counters(family, all().map(|(labels, remote)| (labels, of(&remote))))
    };
    counter(Family::new("ioplane_remote_requests", "Requests sent to another machine"), |one| one.requests)?;
    counter(
        Family::new("ioplane_remote_replayed_requests", "Requests sent again after a connection was lost"),
        |one| one.replays,
    )?;
    counter(Family::new("ioplane_remote_lost_connections", "Connections lost"), |one| one.losses)?;
    counter(Family::new("ioplane_remote_errors", "Requests that the other machine has failed"), |one| {
        one.device_errors
    })
}

fn exports(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let labels = |export: &ExportReport| -> Labels { vec![("device", export.name.clone())] };
    let all = || status.exports.iter();
    let mut gauge = |family, of: fn(&ExportReport) -> i64| {
        families.gauges(family, all().map(|one| (labels(one), of(one))))
    };
    gauge(Family::new("ioplane_export_connections", "Connections of clients"), |one| {
        i64::try_from(one.connections).unwrap_or(i64::MAX)
    })?;
    gauge(Family::new("ioplane_export_failed", "1 while the export cannot be served"), |one| {
        (one.state == ServedState::Failed).into()
    })?;
    gauge(Family::new("ioplane_export_held", "1 while one host alone may use the export"), |one| {
        one.claim.as_ref().is_some_and(|claim| claim.held).into()
    })?;
    gauge(Family::new("ioplane_export_generation", "The claim that was granted last"), |one| {
        one.claim.as_ref().map_or(0, |claim| i64::try_from(claim.generation).unwrap_or(i64::MAX))
    })?;
    let mut counter = |family, of: fn(&ExportReport) -> u64| {
        families.counters(family, all().map(|one| (labels(one), of(one))))
    };
    counter(Family::new("ioplane_export_requests", "Requests answered"), |one| one.totals.requests)?;
    counter(Family::bytes("ioplane_export_read", "Bytes read by clients"), |one| one.totals.bytes_read)?;
    counter(Family::bytes("ioplane_export_written", "Bytes written by clients"), |one| {
        one.totals.bytes_written
    })
}
