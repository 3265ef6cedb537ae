//! A disk's share of a hand-over: its image or its memory, opened once more.

use std::os::fd::OwnedFd;
use std::time::Instant;

use ioplane_virtio::blk::Blk;

use super::super::context::DaemonContext;
use super::super::disk::{self, Disk, Opened, Shown};
use super::super::served::Served;
use super::super::state_file::DiskRecord;
use super::handover::{HandoverExtras, HandoverKind};
use crate::refusal::Refusal;

impl HandoverKind for Disk {
    type Kept = Opened;

    async fn extras(&self) -> Result<HandoverExtras, Refusal> {
        let backing = self.served.handle.change(|model| (model.backing().clone(), false)).await?;
        let info = backing.info();
        let file = backing.file().map(|file| file.try_clone_to_owned());
        let file = file.transpose().map_err(|error| {
            Refusal::failed(format!("{}: {error}", info.name), "is the limit on open files too low?")
        })?;
        // Whether nothing of its I/O is under way.
        let quiet = move || vec![u8::from(backing.wait_quiet(Instant::now()))];
        Ok(HandoverExtras { files: file.into_iter().collect(), beside: Box::new(quiet) })
    }

    fn prepare(
        record: &DiskRecord,
        context: &DaemonContext,
        _below: &(),
        mut files: Vec<OwnedFd>,
    ) -> Result<(Blk, Opened), Refusal> {
        let file = files.pop();
        if !files.is_empty() {
            return Err(Refusal::failed(
                "a disk comes with one descriptor",
                "this is a bug: report it with the log",
            ));
        }
        let opened = disk::adopt(record, &context.disk_opener(&record.now), file)?;
        let membership = context.groups.membership(&record.now);
        Ok((disk::model(&record.now, opened.backing.clone(), membership), opened))
    }

    fn take_extras(opened: &Opened, beside: &[u8]) -> Result<(), Refusal> {
        if beside == [1] {
            opened.backing.trust_quiet();
        }
        Ok(())
    }

    fn succeed(opened: Opened, served: Served<Disk>) -> Disk {
        let (note, image) = (served.note.clone(), opened.image);
        // A predecessor of an older version has not written it down.
        if note.read().image != image
            && let Err(error) = note.change(|record| record.image = image)
        {
            tracing::warn!(%error, "writing down which image it is");
        }
        Disk::new(served, Shown::new(&opened))
    }
}
