//! The disks of a VM that moves: whether they can go along, and who has them afterwards.

use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::{ClaimWord, DiskReport, RemoteReport, RemoteWord, ServedState, StatusReport};
use ioplane_cli::client::Client;
use ioplane_cli::output::hint;

use super::{failed, refused};

/// For the claims to change hands when the guest has gone.
const HANDED_OVER: Duration = Duration::from_secs(60);
/// Between two looks at them.
const LOOK: Duration = Duration::from_millis(200);

/// The part of a disk's report that says how it stands with its server.
pub(crate) fn remote(disk: &DiskReport) -> Result<&RemoteReport> {
    let name = &disk.name;
    disk.backing.remote.as_ref().ok_or_else(|| {
        let (error, remedy) = match disk.backing.kind.as_str() {
            "memory" => (
                format!("disk {name} is memory of this host's daemon, and would not go along"),
                format!(
                    "put it where the other host can reach it: ioplane swap {name} --to nbds://HOST/EXPORT"
                ),
            ),
            _ => (
                format!("disk {name} is an image of this host, and would not go along"),
                format!(
                    "publish it first, for the other host: ioplane move prepare --publish, or ioplane publish disk EXPORT --disk {name} --allow HOST; or \
                     swap it to a disk of another machine: ioplane swap {name} --to nbds://HOST/EXPORT"
                ),
            ),
        };
        refused(error, remedy)
    })
}

/// Whether a disk is served, and nothing is being done with it.
pub(crate) fn is_settled(disk: &DiskReport) -> Result<()> {
    let name = &disk.name;
    if disk.state != ServedState::Served {
        return Err(refused(format!("disk {name} is not served"), format!("see `ioplane disk show {name}`")));
    }
    if disk.swap.as_ref().is_some_and(|swap| swap.state.is_under_way()) {
        return Err(refused(
            format!("disk {name} is being swapped"),
            format!("wait for it, or cancel it: ioplane swap {name} --cancel"),
        ));
    }
    Ok(())
}

/// Whether the guest may stop using this disk here and go on with it elsewhere.
pub(crate) fn may_go(disk: &DiskReport) -> Result<()> {
    is_settled(disk)?;
    let name = &disk.name;
    let remote = remote(disk)?;
    let why = remote.why.as_ref().map_or(String::new(), |why| format!(": {why}"));
    if remote.state != RemoteWord::Connected {
        return Err(refused(
            format!("the server of disk {name} is {}{why}", remote.state.words()),
            "requests that have no answer cannot go along: wait until it is connected again",
        ));
    }
    match remote.claim {
        ClaimWord::Held => Ok(()),
        ClaimWord::None if disk.read_only => Ok(()),
        ClaimWord::None => {
            hint(format!("the server of disk {name} keeps no claims: that one host writes is up to QEMU"));
            Ok(())
        }
        _ => Err(refused(
            format!("disk {name} does not hold its export: nobody uses it, or another one does"),
            format!("see `ioplane disk show {name}`"),
        )),
    }
}

/// Whether a disk of the other daemon is the same disk for a guest, and another importer of the same image.
pub(crate) fn is_same(disk: &DiskReport, other: &DiskReport) -> Result<()> {
    let name = &disk.name;
    let here = remote(disk)?;
    let same = |remote: &RemoteReport| {
        // The boot of the exporter's host is behind the `@`, and may have changed between two looks.
        let image = |remote: &RemoteReport| {
            let instance = remote.instance.clone()?;
            instance.split_once('@').map(|(image, _)| image.to_owned())
        };
        image(remote) == image(here)
    };
    if other.size != disk.size || !other.backing.remote.as_ref().is_some_and(same) {
        return Err(refused(
            format!("disk {name} of the other host is another one"),
            format!("compare `ioplane disk show {name}` on both hosts"),
        ));
    }
    if other.read_only != disk.read_only || other.queues.len() != disk.queues.len() {
        return Err(refused(
            format!("disk {name} of the other host has other options"),
            "give it the same queues and the same --read-only on both hosts",
        ));
    }
    Ok(())
}

/// Whether the other daemon has the same disks, with a QEMU that waits for them.
pub(super) fn is_ready(there: &Client, disks: &[DiskReport]) -> Result<()> {
    let status: StatusReport = there.get("/v1/status")?;
    for disk in disks {
        let name = &disk.name;
        let Some(other) = status.disks.iter().find(|other| other.name == *name) else {
            return Err(refused(
                format!("the other host has no disk {name}"),
                "add it there: ioplane move prepare, then start QEMU with -incoming",
            ));
        };
        is_same(disk, other)?;
        if !other.connected {
            return Err(refused(
                format!("no QEMU of the other host uses disk {name} yet"),
                format!("start it there with -incoming, and what `ioplane qemu-args {name}` prints there"),
            ));
        }
    }
    Ok(())
}

/// Waits until all disks are so, of which there may be reports; says which is not, and why.
pub(crate) fn until(
    client: &Client,
    disks: &[DiskReport],
    met: impl Fn(&RemoteReport) -> bool,
) -> Result<(), (String, String)> {
    let end = Instant::now() + HANDED_OVER;
    loop {
        let now: Vec<DiskReport> =
            client.get("/v1/disks").map_err(|error| (String::new(), format!("{error:#}")))?;
        let mut late = disks.iter().filter_map(|disk| {
            let report = now.iter().find(|now| now.name == disk.name)?.backing.remote.as_ref()?;
            (!met(report)).then(|| {
                let why = report.claim_why.clone().or_else(|| report.why.clone());
                (disk.name.clone(), why.unwrap_or_else(|| "it is still under way".to_owned()))
            })
        });
        match late.next() {
            None => return Ok(()),
            Some(late) if Instant::now() >= end => return Err(late),
            Some(_) => std::thread::sleep(LOOK),
        }
    }
}

/// Until this host holds none of the disks any more.
pub(super) fn given_back(client: &Client, disks: &[DiskReport]) -> Result<()> {
    let free = |remote: &RemoteReport| !matches!(remote.claim, ClaimWord::Held | ClaimWord::Releasing);
    until(client, disks, free).map_err(|(disk, why)| {
        failed(
            format!("the VM has moved, and this host still holds disk {disk}: {why}"),
            format!("its requests wait there; see `ioplane disk show {disk}` here"),
        )
    })
}

/// Until the other one does.
pub(super) fn taken(there: &Client, disks: &[DiskReport]) -> Result<()> {
    let held = |remote: &RemoteReport| matches!(remote.claim, ClaimWord::Held | ClaimWord::None);
    until(there, disks, held).map_err(|(disk, why)| {
        failed(
            format!("the VM has moved, and the other host does not hold disk {disk}: {why}"),
            format!("see `ioplane disk show {disk}` there"),
        )
    })
}
