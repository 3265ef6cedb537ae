//! The image of a disk that a guest uses is published, and the disk becomes the first client: so it is a disk of another machine's for whoever takes the
//! VM over, and nothing is copied (docs/decisions/0069-publishing-a-disk-in-use.md).
//!
//! ```text
//!   guest -- disk -- image            guest -- disk -- import -- NAME.sock -- export -- image     (opened once, all the time)
//! ```

use std::sync::Arc;

use ioplane_api::spec::{BackingSpec, ExportForm, ExportSpec};

use super::PublishedDisk;
use crate::Daemon;
use crate::disk::{Beside, Disk};
use crate::refusal::Refusal;
use crate::registry::Registry;
use crate::served::{ServedKind, Service, StateRecord};
use crate::state_file::{ExportRecord, Record};

impl Daemon {
    /// Publishes the image of disk `disk` as `name`.
    pub async fn publish_in_use(&self, name: &str, disk: &str, form: ExportForm) -> Result<(), Refusal> {
        let served = self.disks.served(disk)?;
        let (backing, bytes) = served.published_backing()?;
        let BackingSpec::File { path, format, direct, engine } = backing else {
            let error = format!("disk {disk} is no image of this host");
            return Err(
                Refusal::conflict(error, "what is elsewhere already goes along with its VM").at("disk")
            );
        };
        if bytes.is_some() {
            let error = format!("disk {disk} is shorter than the device that it is on");
            return Err(Refusal::conflict(error, "swap it to one of its size first: ioplane swap").at("disk"));
        }
        let form = ExportForm {
            disk: None,
            path: Some(path),
            format,
            direct: Some(direct),
            engine: Some(engine),
            ..form
        };
        let wanted = form.spec(name).map_err(|flaws| Refusal::flaws(&flaws))?;
        self.exports.publish_in_use(wanted, &served).await
    }
}

impl Registry<PublishedDisk> {
    async fn publish_in_use(&self, wanted: ExportSpec, disk: &Arc<Disk>) -> Result<(), Refusal> {
        let name = wanted.name.clone();
        let record = Record::added(wanted);
        self.reserve_new(&record)?;
        let published = match self.lend(record, disk).await {
            Ok(published) => published,
            Err(refused) => {
                self.forget(&name);
                return Err(refused);
            }
        };
        self.opened(name, published).await
    }

    /// Serves an export of what the disk has open, and has the disk use that.
    async fn lend(&self, record: ExportRecord, disk: &Arc<Disk>) -> Result<PublishedDisk, Refusal> {
        let (context, opened) = (self.context(), disk.lent().await?);
        let begin = |record| Ok(StateRecord::written_elsewhere(record, &context.state_file));
        // For this host only, and once the disk has its claim nobody else can write.
        let published = Arc::new(PublishedDisk::publish(record, opened, context, begin).await?);
        let socket = published.service.socket().to_owned();
        let (entering, listeners) = (published.clone(), self.below().clone());
        let note = published.note().read();
        let name = note.now.name.clone();
        let beside = Beside {
            opened: Box::new(move || entering.listen(&listeners)),
            entries: Box::new(move |entries| {
                entries.removed_exports.remove(&name);
                entries.exports.insert(name, note);
            }),
        };
        let switched = disk.become_client(&published.note().read().now.name, &socket, beside, context).await;
        let published = Arc::into_inner(published).ok_or_else(|| Refusal::bug("an export is held twice"))?;
        if let Err(refused) = switched {
            let _ = published.service().stop(true).await;
            return Err(refused);
        }
        Ok(published)
    }
}
