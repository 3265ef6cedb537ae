//! All things of one kind, by name: each is being opened, served, or could not be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::ground::Ground;
use super::ledger::Record;
use super::served::{Kind, Queued};
use crate::refusal::Refusal;
use crate::report::ServedState;
use crate::spec::ServedSpec;

/// How long stopping waits for the devices; then what is in flight stays in the journals, for the next daemon to replay.
const STOP: Duration = Duration::from_secs(40);

enum Slot<K: Kind> {
    Opening(Record<K::Spec>),
    Served(Arc<K>),
    Failed(Record<K::Spec>, Refusal),
}

impl<K: Kind> Clone for Slot<K> {
    fn clone(&self) -> Self {
        match self {
            Slot::Opening(record) => Slot::Opening(record.clone()),
            Slot::Served(one) => Slot::Served(one.clone()),
            Slot::Failed(record, refused) => Slot::Failed(record.clone(), refused.clone()),
        }
    }
}

impl<K: Kind> Slot<K> {
    fn record(&self) -> Record<K::Spec> {
        match self {
            Slot::Opening(record) | Slot::Failed(record, _) => record.clone(),
            Slot::Served(one) => one.note().read(),
        }
    }
}

/// What to do with one that cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// It was asked for just now: forget it.
    Forget,
    /// It was being served before the daemon died, and a guest may be waiting for it: keep it, as failed.
    Keep,
}

/// Those that are served by name, and those that could not be with the reason.
pub type Settled<K> = (Vec<(String, Arc<K>)>, Vec<(String, Refusal)>);

/// All of one kind.
pub struct Shelf<K: Kind> {
    slots: Mutex<BTreeMap<String, Slot<K>>>,
    pub(super) ground: Arc<Ground>,
    below: Arc<K::Below>,
}

impl<K: Kind> Shelf<K> {
    /// None yet.
    pub fn new(ground: Arc<Ground>, below: Arc<K::Below>) -> Self {
        Shelf { slots: Mutex::default(), ground, below }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot<K>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens one and serves it. Waits as long as opening does.
    pub async fn add(&self, record: Record<K::Spec>, on_failure: OnFailure) -> Result<(), Refusal> {
        let name = record.now.name().to_owned();
        // A core that has gone since is no reason to leave a guest without its device.
        if let Some(core) = record.now.core().filter(|_| on_failure == OnFailure::Forget) {
            self.ground.cores.check(core)?;
        }
        self.reserve(&record)?;
        match K::open(record.clone(), &self.ground, &self.below).await {
            Ok(one) => {
                let socket = one.socket().display().to_string();
                tracing::info!(kind = K::NAME, name, socket, "serving");
                self.slots().insert(name, Slot::Served(Arc::new(one)));
                Ok(())
            }
            Err(refused) if on_failure == OnFailure::Keep => {
                let (error, remedy) = (&refused.error, &refused.remedy);
                tracing::error!(kind = K::NAME, name, error, remedy, "not served");
                self.slots().insert(name, Slot::Failed(record, refused.clone()));
                Err(refused)
            }
            Err(refused) => {
                self.slots().remove(&name);
                self.ground.release(&name);
                self.ground.ledger.change(|entries| {
                    K::records(entries).remove(&name);
                })?;
                Err(refused)
            }
        }
    }

    /// What all of them stand on.
    pub fn ground(&self) -> &Arc<Ground> {
        &self.ground
    }

    /// What they need besides.
    pub fn below(&self) -> &K::Below {
        &self.below
    }

    /// Those that are served, and those that could not be; refuses while one is being opened.
    pub fn settled(&self) -> Result<Settled<K>, Refusal> {
        let (mut served, mut failed) = (Vec::new(), Vec::new());
        for (name, slot) in self.slots().iter() {
            match slot {
                Slot::Served(one) => served.push((name.clone(), one.clone())),
                Slot::Failed(_, why) => failed.push((name.clone(), why.clone())),
                Slot::Opening(_) => {
                    let why = format!("{} {name} is still being opened", K::NAME);
                    return Err(Refusal::busy(why, "try again when it is served"));
                }
            }
        }
        Ok((served, failed))
    }

    /// Ends the service of all for a while, if nobody uses any: what a successor has to open itself. What has been ended comes
    /// back by [`Shelf::bring_back`]. On an error all are served as before.
    pub async fn set_aside(&self) -> Result<Vec<Record<K::Spec>>, Refusal> {
        let (served, failed) = self.settled()?;
        let mut aside = Vec::new();
        for (name, one) in served {
            if let Err(refused) = one.stop(false).await {
                self.bring_back(aside).await;
                return Err(Refusal { error: format!("{} {name}: {}", K::NAME, refused.error), ..refused });
            }
            aside.push(one.note().read());
            self.drop_slot(&name);
        }
        for (name, _) in failed {
            aside.extend(self.records().remove(&name));
            self.drop_slot(&name);
        }
        Ok(aside)
    }

    /// Serves again what was set aside.
    pub async fn bring_back(&self, records: Vec<Record<K::Spec>>) {
        for record in records {
            // What fails is kept as failed, and said in the log.
            let _ = self.add(record, OnFailure::Keep).await;
        }
    }

    fn drop_slot(&self, name: &str) {
        self.slots().remove(name);
        self.ground.release(name);
    }

    /// Takes in one that another process has served. Its name has been claimed.
    pub fn take_in(&self, name: String, one: K) {
        self.slots().insert(name, Slot::Served(Arc::new(one)));
    }

    /// Takes in one that another process could not serve. Its name has been claimed.
    pub fn take_failed(&self, record: Record<K::Spec>, why: Refusal) {
        self.slots().insert(record.now.name().to_owned(), Slot::Failed(record, why));
    }

    /// Takes the name and the socket.
    fn reserve(&self, record: &Record<K::Spec>) -> Result<(), Refusal> {
        let name = record.now.name();
        let mut slots = self.slots();
        if let Some(Slot::Failed(..)) = slots.get(name) {
            let (kind, command) = (K::NAME, K::COMMAND);
            return Err(Refusal::conflict(
                format!("{kind} {name} is there, and could not be served"),
                format!("see `ioplane {command} list`; `ioplane {command} remove {name}` forgets it"),
            ));
        }
        self.ground.claim(K::NAME, &record.now)?;
        slots.insert(name.to_owned(), Slot::Opening(record.clone()));
        Ok(())
    }

    /// One that is being served.
    pub fn served(&self, name: &str) -> Result<Arc<K>, Refusal> {
        let kind = K::NAME;
        match self.slots().get(name) {
            Some(Slot::Served(one)) => Ok(one.clone()),
            Some(Slot::Opening(_)) => Err(Refusal::busy(
                format!("{kind} {name} is still being opened"),
                "wait: I/O of a daemon that died may be landing in its image",
            )),
            Some(Slot::Failed(_, refused)) => Err(Refusal::conflict(
                format!("{kind} {name} is not served: {refused}"),
                refused.remedy.clone(),
            )),
            None => Err(Self::missing(name)),
        }
    }

    fn missing(name: &str) -> Refusal {
        Refusal::missing(
            format!("there is no {} {name}", K::NAME),
            format!("see `ioplane {} list`", K::COMMAND),
        )
    }

    /// Every record, by name.
    pub fn records(&self) -> BTreeMap<String, Record<K::Spec>> {
        self.slots().iter().map(|(name, slot)| (name.clone(), slot.record())).collect()
    }

    /// Those that could not be served.
    pub fn failed(&self) -> Vec<String> {
        let slots = self.slots();
        let failed = slots.iter().filter(|(_, slot)| matches!(slot, Slot::Failed(..)));
        failed.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a front end uses it.
    pub async fn in_use(&self, name: &str) -> bool {
        match self.served(name) {
            Ok(one) => one.in_use().await,
            Err(_) => false,
        }
    }

    /// Ends the service of one and forgets it; `lasting` is to remember that a configured one is not wanted.
    pub async fn remove(&self, name: &str, force: bool, lasting: bool) -> Result<(), Refusal> {
        if !self.failed().iter().any(|failed| failed == name) {
            let one = self.served(name)?;
            one.stop(force).await?;
        }
        let slot = self.slots().remove(name);
        self.ground.release(name);
        tracing::info!(kind = K::NAME, name, "no longer served");
        let configured = slot.and_then(|slot| slot.record().configured);
        Ok(self.ground.ledger.change(|entries| {
            K::records(entries).remove(name);
            if let Some(configured) = configured.filter(|_| lasting) {
                K::removed(entries).insert(name.to_owned(), configured);
            }
        })?)
    }

    /// How one is.
    pub async fn report_of(&self, name: &str) -> Result<K::Report, Refusal> {
        let slot = self.slots().get(name).cloned();
        match slot {
            Some(slot) => Ok(self.report_slot(&slot).await),
            None => Err(Self::missing(name)),
        }
    }

    /// How all are, by name.
    pub async fn report(&self) -> Vec<K::Report> {
        let slots: Vec<Slot<K>> = self.slots().values().cloned().collect();
        let mut reports = Vec::with_capacity(slots.len());
        // Asked one after the other: each answers at once, unless it is busy.
        for slot in &slots {
            reports.push(self.report_slot(slot).await);
        }
        reports
    }

    async fn report_slot(&self, slot: &Slot<K>) -> K::Report {
        let socket = |record: &Record<K::Spec>| self.ground.socket(&record.now);
        match slot {
            Slot::Served(one) => one.report().await,
            Slot::Opening(record) => K::blank(record, socket(record), ServedState::Opening, None),
            Slot::Failed(record, why) => K::blank(record, socket(record), ServedState::Failed, Some(why)),
        }
    }

    /// Ends the service of all, at once and whoever is connected. The ledger keeps them: the next daemon serves them
    /// again, and their front ends reconnect.
    pub async fn stop(&self) {
        let slots = std::mem::take(&mut *self.slots());
        let mut stopping = tokio::task::JoinSet::new();
        for (name, slot) in slots {
            self.ground.release(&name);
            if let Slot::Served(one) = slot {
                stopping.spawn(async move {
                    if let Err(error) = one.stop(true).await {
                        tracing::warn!(kind = K::NAME, name, %error, "stopping");
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

impl<K: Queued> Shelf<K> {
    /// Moves a queue to a core.
    pub async fn move_queue(&self, name: &str, queue: u16, core: u32) -> Result<(), Refusal> {
        self.ground.cores.check(core)?;
        self.served(name)?.served().move_queue(queue, core, &self.ground).await
    }
}
