//! All disks, by name: each is being opened, served, or could not be.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::cores::{Cores, Seating};
use super::disk::{self, Disk};
use super::ledger::{DiskRecord, Ledger};
use crate::refusal::Refusal;
use crate::report::{DiskReport, DiskState};
use crate::spec::socket_flaw;

/// How long stopping waits for the disks; then what is in flight stays in the journals, for the next daemon to replay.
const STOP: Duration = Duration::from_secs(40);

#[derive(Clone)]
enum Slot {
    Opening(DiskRecord),
    Served(Arc<Disk>),
    Failed(DiskRecord, Refusal),
}

impl Slot {
    fn record(&self) -> DiskRecord {
        match self {
            Slot::Opening(record) | Slot::Failed(record, _) => record.clone(),
            Slot::Served(disk) => disk.record(),
        }
    }
}

/// What to do with a disk that cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// It was asked for just now: forget it.
    Forget,
    /// It was being served before the daemon died, and a guest may be waiting for it: keep it, as failed.
    Keep,
}

/// All disks of the daemon.
pub struct Disks {
    slots: Mutex<BTreeMap<String, Slot>>,
    cores: Arc<Cores>,
    ledger: Arc<Ledger>,
    run_dir: PathBuf,
    control: PathBuf,
}

impl Disks {
    /// None yet. Their sockets are in `run_dir`; `control` is the daemon's own.
    pub fn new(cores: Arc<Cores>, ledger: Arc<Ledger>, run_dir: PathBuf, control: PathBuf) -> Self {
        Disks { slots: Mutex::default(), cores, ledger, run_dir, control }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn socket(&self, record: &DiskRecord) -> PathBuf {
        record.now.socket_in(&self.run_dir)
    }

    /// Opens a disk and serves it. Waits as long as opening does.
    pub async fn add(&self, record: DiskRecord, on_failure: OnFailure) -> Result<(), Refusal> {
        let name = record.now.name.clone();
        // A core that has gone since is no reason to leave a guest without its disk.
        if let Some(core) = record.now.core.filter(|_| on_failure == OnFailure::Forget) {
            self.cores.check(core)?;
        }
        self.reserve(&record)?;
        match self.open(&record).await {
            Ok(disk) => {
                self.slots().insert(name, Slot::Served(Arc::new(disk)));
                Ok(())
            }
            Err(refused) if on_failure == OnFailure::Keep => {
                tracing::error!(
                    disk = name,
                    error = refused.error,
                    remedy = refused.remedy,
                    "a disk is not served"
                );
                self.slots().insert(name, Slot::Failed(record, refused.clone()));
                Err(refused)
            }
            Err(refused) => {
                self.slots().remove(&name);
                self.ledger.change(|entries| {
                    entries.disks.remove(&name);
                })?;
                Err(refused)
            }
        }
    }

    /// Takes the name and the socket.
    fn reserve(&self, record: &DiskRecord) -> Result<(), Refusal> {
        let spec = &record.now;
        let socket = self.socket(record);
        if let Some(flaw) = socket_flaw(&socket) {
            return Err(Refusal::flaws(&[flaw]));
        }
        if socket == self.control {
            return Err(Refusal::conflict(
                format!("{} is the daemon's control socket", socket.display()),
                "give the disk another name, or a socket of its own",
            ));
        }
        let mut slots = self.slots();
        for (name, slot) in slots.iter() {
            if *name == spec.name {
                return match slot {
                    Slot::Failed(..) => Err(Refusal::conflict(
                        format!("disk {name} is there, and could not be served"),
                        format!("see `ioplane disk list`; `ioplane disk remove {name}` forgets it"),
                    )),
                    _ => Err(Refusal::conflict(format!("disk {name} is there already"), "give another name")),
                };
            }
            if self.socket(&slot.record()) == socket {
                return Err(Refusal::conflict(
                    format!("{} is the socket of disk {name}", socket.display()),
                    "give the disk another socket",
                ));
            }
        }
        slots.insert(spec.name.clone(), Slot::Opening(record.clone()));
        Ok(())
    }

    async fn open(&self, record: &DiskRecord) -> Result<Disk, Refusal> {
        let socket = self.socket(record);
        let (spec, bytes, owner) = (record.now.clone(), record.bytes, socket.clone());
        let opened = disk::blocking(move || disk::open(&spec, &spec.backing, bytes, &owner)).await?;
        let seating = self.seating(record);
        let disk = Disk::serve(record.clone(), opened, socket.clone(), seating, self.ledger.clone())?;
        tracing::info!(
            disk = record.now.name,
            socket = %socket.display(),
            backing = record.now.backing.name(),
            "serving"
        );
        Ok(disk)
    }

    fn seating(&self, record: &DiskRecord) -> Seating {
        Seating { pool: self.cores.pool().clone(), core: record.now.core, moved: record.moved.clone() }
    }

    /// One that is being served.
    pub fn served(&self, name: &str) -> Result<Arc<Disk>, Refusal> {
        match self.slots().get(name) {
            Some(Slot::Served(disk)) => Ok(disk.clone()),
            Some(Slot::Opening(_)) => Err(Refusal::busy(
                format!("disk {name} is still being opened"),
                "wait: I/O of a daemon that died may be landing in its image",
            )),
            Some(Slot::Failed(_, refused)) => Err(Refusal::conflict(
                format!("disk {name} is not served: {refused}"),
                refused.remedy.clone(),
            )),
            None => Err(Refusal::missing(format!("there is no disk {name}"), "see `ioplane disk list`")),
        }
    }

    /// Every record, by name.
    pub fn records(&self) -> BTreeMap<String, DiskRecord> {
        self.slots().iter().map(|(name, slot)| (name.clone(), slot.record())).collect()
    }

    /// Those that could not be served.
    pub fn failed(&self) -> Vec<String> {
        self.slots()
            .iter()
            .filter(|(_, slot)| matches!(slot, Slot::Failed(..)))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Ends the service of a disk and forgets it; `lasting` is to remember that a configured disk is not wanted.
    pub async fn remove(&self, name: &str, force: bool, lasting: bool) -> Result<(), Refusal> {
        if !self.failed().iter().any(|failed| failed == name) {
            let disk = self.served(name)?;
            disk.stop(force).await?;
        }
        let slot = self.slots().remove(name);
        tracing::info!(disk = name, "no longer served");
        let configured = slot.and_then(|slot| slot.record().configured);
        Ok(self.ledger.change(|entries| {
            entries.disks.remove(name);
            if let Some(configured) = configured.filter(|_| lasting) {
                entries.removed.insert(name.to_owned(), configured);
            }
        })?)
    }

    /// Moves a queue of a disk to a core.
    pub async fn move_queue(&self, name: &str, queue: u16, core: u32) -> Result<(), Refusal> {
        self.cores.check(core)?;
        let disk = self.served(name)?;
        let seating = self.seating(&disk.record());
        disk.move_queue(queue, core, seating).await
    }

    /// How one is.
    pub async fn report_of(&self, name: &str) -> Result<DiskReport, Refusal> {
        let slot = self.slots().get(name).cloned();
        match slot {
            Some(slot) => Ok(self.report_slot(&slot).await),
            None => Err(Refusal::missing(format!("there is no disk {name}"), "see `ioplane disk list`")),
        }
    }

    /// How all are, by name.
    pub async fn report(&self) -> Vec<DiskReport> {
        let slots: Vec<Slot> = self.slots().values().cloned().collect();
        let mut reports = Vec::with_capacity(slots.len());
        // Asked one after the other: each answers at once, unless it is busy.
        for slot in &slots {
            reports.push(self.report_slot(slot).await);
        }
        reports
    }

    async fn report_slot(&self, slot: &Slot) -> DiskReport {
        match slot {
            Slot::Served(disk) => disk.report().await,
            Slot::Opening(record) => disk::blank(record, self.socket(record), DiskState::Opening),
            Slot::Failed(record, refused) => DiskReport {
                error: Some(refused.error.clone()),
                remedy: Some(refused.remedy.clone()),
                ..disk::blank(record, self.socket(record), DiskState::Failed)
            },
        }
    }

    /// Ends the service of all disks, at once and whoever is connected. The ledger keeps them: the next daemon serves them
    /// again, and their front ends reconnect.
    pub async fn stop(&self) {
        let slots = std::mem::take(&mut *self.slots());
        let mut stopping = tokio::task::JoinSet::new();
        for (name, slot) in slots {
            if let Slot::Served(disk) = slot {
                stopping.spawn(async move {
                    if let Err(error) = disk.stop(true).await {
                        tracing::warn!(disk = name, %error, "stopping a disk");
                    }
                });
            }
        }
        let all = async { while stopping.join_next().await.is_some() {} };
        if tokio::time::timeout(STOP, all).await.is_err() {
            tracing::warn!(
                "a disk below does not answer: what is in flight stays in the journal of its guest"
            );
        }
    }
}
