//! The image of a disk that a guest uses is published, and the disk becomes the first client: so it is a disk of another machine's for whoever takes the
//! VM over, and nothing is copied (docs/decisions/0069-publishing-a-disk-in-use.md).
//!
//! ```text
//!   guest -- disk -- image            guest -- disk -- import -- NAME.sock -- export -- image     (opened once, all the time)
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ioplane_api::spec::{BackingSpec, ExportForm, ExportSpec};
use ioplane_storage::Backing;

use super::PublishedDisk;
use crate::Daemon;
use crate::disk::{Beside, Changing, Disk};
use crate::ledger;
use crate::refusal::Refusal;
use crate::registry::Registry;
use crate::served::{ServedKind, Service, StateRecord, blocking};
use crate::state_file::{ExportRecord, Record};

/// Clients of other machines that may be connected besides the disk itself.
const OTHERS: u64 = 16;

impl Daemon {
    /// Publishes the image of disk `disk` as `name`.
    pub async fn publish_in_use(&self, name: &str, disk: &str, form: ExportForm) -> Result<(), Refusal> {
        let served = self.disks.served(disk)?;
        // From the first look to the end.
        let changing = served.changing().await;
        let record = served.may_be_published(&changing)?;
        let other =
            [form.path.is_some(), form.memory.is_some(), form.remote.is_some(), form.format.is_some()];
        let other = other.contains(&true) || form.direct.is_some() || form.engine.is_some();
        if other || form.read_only == Some(true) {
            let error = "disk stands in place of path, memory, remote, format, direct, engine and read_only";
            return Err(Refusal::invalid(error, "leave these out").at("disk"));
        }
        let BackingSpec::File { path, format, direct, engine } = record.now.backing else {
            return Err(Refusal::bug(format!("disk {disk} is no image")));
        };
        let queues = u64::from(record.now.queues);
        let connections = form.connections.unwrap_or(queues + OTHERS.max(queues));
        if connections < queues {
            let error = format!("disk {disk} has {queues} queues, each of which is a connection");
            return Err(Refusal::invalid(error, format!("give {queues} at least")).at("connections"));
        }
        let form = ExportForm {
            path: Some(path),
            format,
            direct: Some(direct),
            engine: Some(engine),
            connections: Some(connections),
            ..form
        };
        let wanted = form.spec(name).map_err(|flaws| Refusal::flaws(&flaws))?;
        self.exports.publish_in_use(wanted, &served, &changing).await
    }
}

impl Registry<PublishedDisk> {
    async fn publish_in_use(
        &self,
        wanted: ExportSpec,
        disk: &Disk,
        changing: &Changing<'_>,
    ) -> Result<(), Refusal> {
        let name = wanted.name.clone();
        let record = Record::added(wanted);
        self.reserve_new(&record)?;
        match self.lend(record, disk, changing).await {
            Ok((published, flushed)) => {
                self.opened(name, published).await?;
                flushed
            }
            Err(refused) => {
                self.drop_slot(&name);
                Err(refused)
            }
        }
    }

    /// Serves an export of what the disk has open, and has the disk use that. Beside it, whether what the guest has written before is durable.
    async fn lend(
        &self,
        record: ExportRecord,
        disk: &Disk,
        changing: &Changing<'_>,
    ) -> Result<(PublishedDisk, Result<(), Refusal>), Refusal> {
        let (context, opened) = (self.context(), disk.lent().await?);
        let image = opened.backing.clone();
        // A disk that cannot be flushed stays as it is.
        flush(&image).await.map_err(|error| {
            let remedy =
                "see to the disk below: nothing was published, and its guest is told by its own next flush";
            Refusal::failed(format!("the image cannot be flushed: {error}"), remedy)
        })?;
        let begin = |record| Ok(StateRecord::written_elsewhere(record, &context.state_file));
        // For this host only, and once the disk has its claim nobody else can write.
        let published =
            Arc::new(PublishedDisk::publish(record, opened, (context, self.below()), begin).await?);
        let socket = published.service.socket().to_owned();
        let (entering, leaving) = (published.clone(), published.clone());
        let (listeners, note) = (self.below().clone(), published.note().read());
        let (name, arrived) = (note.now.name.clone(), Arc::new(AtomicBool::new(false)));
        let beside = Beside {
            opened: Box::new(move || entering.listen(&listeners)),
            failed: Box::new(move || leaving.close_to_others()),
            entries: Box::new({
                let name = name.clone();
                move |entries| {
                    entries.removed_exports.remove(&name);
                    entries.exports.insert(name, note);
                }
            }),
            arrived: arrived.clone(),
        };
        let switched = disk.become_client(changing, &name, &socket, beside, context).await;
        let published = Arc::into_inner(published).ok_or_else(|| Refusal::bug("an export is held twice"))?;
        match switched {
            Ok(()) => {}
            Err(refused) if arrived.load(Ordering::SeqCst) => {
                let why = refused.error;
                tracing::warn!(export = name, why, "published, but a part of the disk has yet to follow");
            }
            Err(refused) => {
                let _ = published.service().stop(true).await;
                return Err(refused);
            }
        }
        // What the guest has written since and not flushed no import knows of. The disk is a client by now, and cannot go back: whoever asked is told.
        let flushed = flush(&image).await.map_err(|error| {
            tracing::error!(export = name, %error, "published, but the image could not be flushed");
            let error = format!("{name} is published, but its image could not be flushed ({error}): what the guest wrote before may not be durable");
            let remedy = "see to the disk below, have the guest flush (sync) and see that this succeeds before the VM moves; its next flush tells it what was lost";
            Refusal::failed(error, remedy)
        });
        Ok((published, flushed))
    }
}

/// Makes durable what was written to an image before, if it is a file or a device. By a description of its own: the guest hears of a write-back that failed by its
/// own next flush all the same.
async fn flush(image: &Arc<dyn Backing>) -> Result<(), String> {
    let image = image.clone();
    let flushed = blocking(move || {
        let sync = |file| ledger::beside(file).and_then(|file| Ok(rustix::fs::fdatasync(file)?));
        let synced = image.file().map_or(Ok(()), sync);
        Ok(synced.map_err(|error| error.to_string()))
    });
    flushed.await.map_err(|refused| refused.error).and_then(|flushed| flushed)
}
