//! Another backing behind a disk whose guest uses it, and what an export needs that takes over the one before.

use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ioplane_api::refusal::Code;
use ioplane_api::size::Size;
use ioplane_api::spec::{BackingSpec, DiskSpec, RemoteSpec, ServedSpec};
use ioplane_nbd::import::LentReservation;
use ioplane_virtio::blk::Blk;

use super::held::Opening;
use super::mark::{self, Mark};
use super::{Disk, Opened, Shown, lock, open, remote, reserve};
use crate::context::DaemonContext;
use crate::refusal::Refusal;
use crate::served::blocking;
use crate::state_file::{DiskRecord, Entries};

/// What is done when a disk gets another backing.
pub struct Beside {
    /// Once that is open, and claimed; if this fails the disk stays as it is.
    pub opened: Box<dyn FnOnce() -> Result<(), Refusal> + Send>,
    /// The disk stays as it is: before the claim is given back.
    pub failed: Box<dyn FnOnce() + Send>,
    /// Written down together with it.
    pub entries: Box<dyn FnOnce(&mut Entries) + Send>,
    /// Set when that is written down: from then on the disk does not go back, whatever else fails.
    pub arrived: Arc<AtomicBool>,
}

impl Default for Beside {
    fn default() -> Self {
        Beside {
            opened: Box::new(|| Ok(())),
            failed: Box::new(|| {}),
            entries: Box::new(|_| {}),
            arrived: Arc::default(),
        }
    }
}

/// One change of a disk is under way.
pub struct Changing<'a>(#[expect(dead_code, reason = "held")] tokio::sync::MutexGuard<'a, ()>);

/// The size of an image or a device.
fn whole(path: &Path) -> Option<u64> {
    std::fs::File::open(path).and_then(|mut file| file.seek(SeekFrom::End(0))).ok()
}

impl Disk {
    /// Puts another backing behind the disk while the guest uses it. The caller has made the content equal. The state file is
    /// written at the quiescent point, before the guest's next request can reach the new backing: whenever we are killed, we
    /// come back with the one that has everything.
    pub async fn replace(&self, backing: BackingSpec, context: &DaemonContext) -> Result<(), Refusal> {
        let changing = self.changing().await;
        self.replace_while(&changing, backing, Beside::default(), context).await
    }

    /// Nothing else changes the disk until this is dropped.
    pub async fn changing(&self) -> Changing<'_> {
        Changing(self.served.changing.lock().await)
    }

    async fn replace_while(
        &self,
        _changing: &Changing<'_>,
        backing: BackingSpec,
        beside: Beside,
        context: &DaemonContext,
    ) -> Result<(), Refusal> {
        self.not_swapping()?;
        let spec = DiskSpec { backing, ..self.served.note.read().now };
        if let Some(flaw) = spec.flaws().first() {
            return Err(Refusal::flaws(std::slice::from_ref(flaw)));
        }
        let owner = context.opener(&spec);
        let next = spec.backing.clone();
        // The same export has one claim, and one reservation, whichever of the two it was opened by.
        let stays = self.served.note.read().now.backing.same_content(&next);
        let (before, same) = match lock(&self.backing).import.clone() {
            Some(import) if stays => (None, Some(import)),
            import => (import, None),
        };
        let reserved = reserve::rates(next.reserved());
        // If the disk stays as it is, what it had is asked for again: the exporter may have granted what the new one reserves.
        let lent = match same {
            Some(same) => Some(same.lend_reservation(reserved).await),
            None => None,
        };
        let opened = blocking(move || open(&DiskRecord::added(spec), Opening::InPlace, &owner)).await?;
        let image = opened.image;
        let fresh_import = opened.import.clone();
        let came = fresh_import.clone().filter(|_| !stays);
        let (note, shown) = (self.served.note.clone(), self.backing.clone());
        let fresh = opened.backing.clone();
        let (field, size) = (next.field(), fresh.info().bytes);
        let allowed = move |model: &Blk| {
            let before = model.bytes();
            if size < before {
                return Err(Refusal::conflict(
                    format!(
                        "it has {}, and the guest has a disk of {}: it would lose what lies beyond",
                        Size(size),
                        Size(before)
                    ),
                    format!(
                        "make it as large: truncate -s {before} IMAGE; or shrink the disk first, by resize --shrink"
                    ),
                )
                .coded(Code::LosesData)
                .at(field));
            }
            Ok(())
        };
        let (arrived, has_arrived) = (beside.arrived.clone(), beside.arrived);
        let noted = move || {
            let change = |record: &mut DiskRecord| {
                record.now.backing = next;
                (record.bytes, record.image) = (None, image);
            };
            note.change_beside(change, beside.entries)?;
            arrived.store(true, Ordering::SeqCst);
            *lock(&shown) = Shown { report: opened.report, import: opened.import };
            Ok(())
        };
        let exchanged = match (beside.opened)() {
            Ok(()) => self.exchange(fresh, allowed, noted).await,
            Err(refused) => Err(refused),
        };
        let old = match exchanged {
            Ok(old) => old,
            // The disk is on it, by one of its sockets.
            Err(refused) if has_arrived.load(Ordering::SeqCst) => return Err(refused),
            Err(refused) => {
                (beside.failed)();
                if let Some(came) = came {
                    remote::leave(&came, true).await;
                }
                return Err(refused);
            }
        };
        let taken_over = lent.map(LentReservation::pass_on).is_some();
        // Closing an image may wait for its last I/O.
        blocking(move || {
            drop(old);
            Ok(())
        })
        .await?;
        if let Some(before) = before {
            remote::leave(&before, true).await;
        }
        if let Some(import) = fresh_import.as_ref().filter(|_| taken_over && reserved.is_none()) {
            reserve::reserve_nothing(import).await;
        }
        if let Some(import) = fresh_import {
            import.rest_if_unused();
        }
        Ok(())
    }

    /// Its record, if an export may use what it is on.
    pub fn may_be_published(&self, _changing: &Changing<'_>) -> Result<DiskRecord, Refusal> {
        self.not_swapping()?;
        let record = self.served.note.read();
        let (name, refused) =
            (
                &record.now.name,
                |error: String, remedy: &str| Err(Refusal::conflict(error, remedy).at("disk")),
            );
        if record.now.read_only {
            let remedy = "publish the image beside it: ioplane publish disk NAME --path IMAGE --read-only";
            return refused(
                format!("disk {name} is read-only, so others can read its image as well"),
                remedy,
            );
        }
        if record.now.block_size.is_some() {
            let remedy = "swap it to a disk of another machine: ioplane swap";
            return refused(
                format!("disk {name} has a block size of its own, which an export has not"),
                remedy,
            );
        }
        match &record.now.backing {
            BackingSpec::File { path, .. } => {
                let shorter = |bytes| whole(path).is_some_and(|whole| whole != bytes);
                match record.bytes.is_some_and(shorter) {
                    false => Ok(record),
                    true => refused(
                        format!("disk {name} is shorter than the device that it is on"),
                        "swap it to an image, or to a device of its size: ioplane swap",
                    ),
                }
            }
            BackingSpec::Memory { .. } | BackingSpec::Remote { .. } => {
                let remedy =
                    "what is on another machine goes along with its VM; memory goes there by ioplane swap";
                refused(format!("disk {name} is no image of this host"), remedy)
            }
        }
    }

    /// What it has open, for an export that uses the same.
    pub async fn lent(&self) -> Result<Opened, Refusal> {
        let image = self.served.note.read().image;
        let report = lock(&self.backing).report.clone();
        let backing = self.served.handle.change(|model| (model.backing().clone(), false)).await?;
        Ok(Opened { backing, report, image, import: None })
    }

    /// Goes on as the client of this daemon's export `name`, which has what the disk has.
    pub async fn become_client(
        &self,
        changing: &Changing<'_>,
        name: &str,
        socket: &Path,
        beside: Beside,
        context: &DaemonContext,
    ) -> Result<(), Refusal> {
        let refused = || {
            let error = format!("{} cannot stand in a URI", socket.display());
            Refusal::conflict(error, "give another --nbd-socket")
        };
        let path = socket.to_str().filter(|path| !path.contains(['%', '&', '+', '#', '?', ' ']));
        let uri = format!("nbd+unix:///{name}?socket={}", path.ok_or_else(refused)?);
        let remote = uri.parse().map_err(|_| refused())?;
        let backing = BackingSpec::Remote(RemoteSpec::new(remote));
        // It has what the disk has, whatever was said of an earlier one of that name.
        let (cleared, state_file) = (backing.clone(), context.state_file.clone());
        blocking(move || {
            mark::clear(&cleared, Mark::Superseded, &state_file)?;
            mark::clear(&cleared, Mark::Unfinished, &state_file)
        })
        .await?;
        self.replace_while(changing, backing, beside, context).await
    }
}
