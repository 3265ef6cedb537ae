//! All things of one kind, by name: each is being opened, served, or could not be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_api::refusal::{Code, GET_SHOWS};
use ioplane_api::report::{EventWord, ServedState};
use ioplane_api::spec::{ServedSpec, SpecFields};
use ioplane_nbd::import::ClaimWish;
use tokio::sync::Notify;

use super::Daemon;
use super::context::DaemonContext;
use super::retry_state::RetryState;
use super::served::{GLANCE, Queued, ServedKind, Service, Standing};
use super::state_file::Record;
use crate::refusal::Refusal;

/// How long stopping waits for the devices; then what is in flight stays in the journals, for the next daemon to replay.
const STOP: Duration = Duration::from_secs(40);
/// How long a change waits for one that is being tried again just now.
const TURN: Duration = Duration::from_secs(2);

enum Slot<K: ServedKind> {
    /// For the first time, or again.
    Opening(Record<K::Spec>, Option<RetryState>),
    Served(Arc<K>),
    Failed(Record<K::Spec>, RetryState),
}

impl<K: ServedKind> Clone for Slot<K> {
    fn clone(&self) -> Self {
        match self {
            Slot::Opening(record, retry) => Slot::Opening(record.clone(), retry.clone()),
            Slot::Served(one) => Slot::Served(one.clone()),
            Slot::Failed(record, retry) => Slot::Failed(record.clone(), retry.clone()),
        }
    }
}

impl<K: ServedKind> Slot<K> {
    fn record(&self) -> Record<K::Spec> {
        match self {
            Slot::Opening(record, _) | Slot::Failed(record, _) => record.clone(),
            Slot::Served(one) => one.note().read(),
        }
    }
}

/// What to do with one that cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// It was asked for just now: forget it.
    Forget,
    /// It is to be served as long as it is configured, and a guest may be waiting for it: keep it, as failed, and try again.
    Keep,
    /// It was asked for just now, and is to wait for what will come: keep it if trying again may help.
    Wait,
}

impl OnFailure {
    fn keeps(self, refused: &Refusal) -> bool {
        match self {
            OnFailure::Forget => false,
            OnFailure::Keep => true,
            OnFailure::Wait => refused.retry,
        }
    }
}

/// Those that are served by name, and those that could not be with the reason.
pub type Settled<K> = (Vec<(String, Arc<K>)>, Vec<(String, Refusal)>);

/// A kind that a daemon has a registry of.
pub trait Registered: ServedKind {
    /// All of this kind.
    fn registry(daemon: &Daemon) -> &Registry<Self>;
}

/// Everything of one kind that the daemon serves, or is to serve and cannot yet, by name.
pub struct Registry<K: ServedKind> {
    slots: Mutex<BTreeMap<String, Slot<K>>>,
    /// A try has come to its end.
    turned: Notify,
    pub(super) context: Arc<DaemonContext>,
    below: Arc<K::Below>,
}

impl<K: ServedKind> Registry<K> {
    /// None yet.
    pub fn new(context: Arc<DaemonContext>, below: Arc<K::Below>) -> Self {
        Registry { slots: Mutex::default(), turned: Notify::new(), context, below }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot<K>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens one and serves it. Waits as long as opening does.
    pub async fn add(&self, record: Record<K::Spec>, on_failure: OnFailure) -> Result<(), Refusal> {
        let name = record.now.name().to_owned();
        // A core that has gone since is no reason to leave a guest without its device.
        if on_failure == OnFailure::Forget {
            self.check_names(&record.now)?;
        }
        self.reserve(&record, false)?;
        self.open(name, record, on_failure).await
    }

    /// Makes one as somebody asks for it, and says whether it is new: one that is served so already stays as it is. One of this
    /// name that differs is refused.
    pub async fn put(&self, wanted: K::Spec) -> Result<bool, Refusal> {
        self.put_claiming(wanted, ClaimWish::New).await
    }

    /// The same of one that may be on an export of others, and how it comes by the claim to that.
    pub async fn put_claiming(&self, wanted: K::Spec, claim: ClaimWish) -> Result<bool, Refusal> {
        let name = wanted.name().to_owned();
        let there = self.slots().get(&name).cloned();
        match there {
            Some(Slot::Served(one)) => {
                let differing = wanted.differing(&one.note().read().now);
                let Some(first) = differing.first() else { return Ok(false) };
                let remedy = format!(
                    "give another name, or `ioplane {} remove {name}` first; {GET_SHOWS}",
                    K::COMMAND
                );
                let error =
                    format!("{} {name} is there already, with another {}", K::NAME, differing.join(", "));
                return Err(Refusal::new(Code::Exists, error, remedy).at(first));
            }
            // It may turn out to be so: not yet.
            Some(Slot::Opening(_, None)) => drop(self.served(&name)?),
            _ => {}
        }
        let record = Record { claim, ..Record::added(wanted) };
        self.reserve_new(&record)?;
        let on_failure = if K::waits_when_added(&record.now) { OnFailure::Wait } else { OnFailure::Forget };
        match self.open(name, record, on_failure).await {
            // What it waits for is in its report.
            Err(refused) if on_failure == OnFailure::Wait && refused.retry => Ok(true),
            outcome => outcome.map(|()| true),
        }
    }

    /// Whether the core and the group are there that it names.
    fn check_names(&self, spec: &K::Spec) -> Result<(), Refusal> {
        let check = |core| self.context.cores.check(core).map_err(|refused| refused.at("core"));
        spec.core().map_or(Ok(()), check)?;
        spec.group().map_or(Ok(()), |group| self.context.groups.check(group))
    }

    /// Opens one whose place is reserved.
    async fn open(
        &self,
        name: String,
        record: Record<K::Spec>,
        on_failure: OnFailure,
    ) -> Result<(), Refusal> {
        match K::open(record.clone(), &self.context, &self.below).await {
            Ok(one) => self.opened(name, one).await,
            Err(refused) if on_failure.keeps(&refused) => {
                let (error, remedy) = (&refused.error, &refused.remedy);
                tracing::error!(kind = K::NAME, name, error, remedy, "not served");
                self.tell(EventWord::Failed, &name, error);
                self.keep(record, RetryState::new(refused.clone()));
                Err(refused)
            }
            Err(refused) => {
                self.drop_slot(&name);
                self.context.state_file.change(|entries| {
                    K::records(entries).remove(&name);
                })?;
                Err(refused)
            }
        }
    }

    /// Takes the place of one that is asked for just now, and is opened by somebody else: [`Registry::opened`] or [`Registry::drop_slot`] is to follow.
    pub fn reserve_new(&self, record: &Record<K::Spec>) -> Result<(), Refusal> {
        self.check_names(&record.now)?;
        self.reserve(record, true)
    }

    /// It has been opened. Whoever has taken its place away meanwhile does not want it.
    pub async fn opened(&self, name: String, one: K) -> Result<(), Refusal> {
        let socket = one.service().socket().display().to_string();
        let one = Arc::new(one);
        let wanted = match self.slots().get_mut(&name) {
            Some(slot @ Slot::Opening(..)) => {
                *slot = Slot::Served(one.clone());
                true
            }
            _ => false,
        };
        if !wanted {
            return one.service().stop(true).await;
        }
        // Its group may have changed since its membership was taken, when nobody saw it as served.
        if one.note().read().now.group().is_some()
            && let Err(refused) = one.rejoin().await
        {
            tracing::error!(kind = K::NAME, name, error = refused.error, "has not joined its group");
        }
        tracing::info!(kind = K::NAME, name, socket, "serving");
        self.tell(EventWord::Served, &name, &format!("on {socket}"));
        self.turned.notify_waiters();
        Ok(())
    }

    /// Says to those who listen what has happened to one.
    pub fn tell(&self, event: EventWord, name: &str, text: &str) {
        self.context.events.tell(event, K::COMMAND, name, text);
    }

    /// It could not be opened and stays, in the state file too: a successor has to know it.
    fn keep(&self, record: Record<K::Spec>, retry: RetryState) {
        let name = record.now.name().to_owned();
        let noted = self.context.state_file.change(|entries| {
            K::records(entries).insert(name.clone(), record.clone());
        });
        if let Err(error) = noted {
            tracing::error!(%error, "the state file");
        }
        let mut slots = self.slots();
        if let Some(slot @ Slot::Opening(..)) = slots.get_mut(&name) {
            *slot = Slot::Failed(record, retry);
        }
        drop(slots);
        self.turned.notify_waiters();
        self.context.failed.notify_one();
    }

    /// When the next of those that could not be served is to be tried again.
    pub fn next(&self) -> Option<Instant> {
        let slots = self.slots();
        let next = slots.values().filter_map(|slot| match slot {
            Slot::Failed(_, retry) => retry.next(),
            _ => None,
        });
        next.min()
    }

    /// Begins to try those again whose time has come: [`Registry::retry`] or [`Registry::later`] is to follow for each.
    pub fn due(&self) -> Vec<String> {
        let mut slots = self.slots();
        let due = slots.iter_mut().filter(|(_, slot)| matches!(slot, Slot::Failed(_, why) if why.is_due()));
        due.filter_map(|(name, slot)| slot.begin().then(|| name.clone())).collect()
    }

    /// Tries one again that could not be served, whether its time has come or not; the outcome.
    pub async fn retry_now(&self, name: &str) -> Result<(), Refusal> {
        if self.slots().get_mut(name).is_some_and(Slot::begin) {
            return self.carry_on(name, RetryState::asked).await;
        }
        self.turn(name).await;
        self.served(name).map(drop)
    }

    /// Goes on with a try that has begun. Others see it as failed meanwhile.
    pub async fn retry(&self, name: &str) -> Result<(), Refusal> {
        self.carry_on(name, RetryState::again).await
    }

    async fn carry_on(
        &self,
        name: &str,
        failed: impl FnOnce(&RetryState, Refusal) -> RetryState,
    ) -> Result<(), Refusal> {
        let (record, retry) = match self.slots().get(name) {
            Some(Slot::Opening(record, Some(retry))) => (record.clone(), retry.clone()),
            _ => return Err(Self::missing(name)),
        };
        match K::open(record.clone(), &self.context, &self.below).await {
            Ok(one) => self.opened(name.to_owned(), one).await,
            Err(refused) => {
                // The same reason again is no news.
                let (error, remedy) = (&refused.error, &refused.remedy);
                match *error == retry.why.error {
                    true => tracing::debug!(kind = K::NAME, name, error, "still not served"),
                    false => {
                        tracing::error!(kind = K::NAME, name, error, remedy, "not served");
                        self.tell(EventWord::Failed, name, error);
                    }
                }
                self.keep(record, failed(&retry, refused.clone()));
                Err(refused)
            }
        }
    }

    /// Notes what the configuration says now of one that could not be served.
    pub fn configure(&self, name: &str, configured: Option<K::Spec>) {
        if let Some(Slot::Failed(record, _)) = self.slots().get_mut(name) {
            record.configured = configured;
        }
    }

    /// One that was to be tried is not, now.
    pub fn later(&self, name: &str) {
        if let Some(slot) = self.slots().get_mut(name)
            && let Slot::Opening(record, Some(retry)) = slot
        {
            *slot = Slot::Failed(record.clone(), retry.postponed());
        }
        self.turned.notify_waiters();
        self.context.failed.notify_one();
    }

    /// Waits until one is not being tried again any more, for a moment.
    async fn turn(&self, name: &str) {
        let end = tokio::time::Instant::now() + TURN;
        loop {
            let turned = self.turned.notified();
            if !matches!(self.slots().get(name), Some(Slot::Opening(_, Some(_)))) {
                return;
            }
            if tokio::time::timeout_at(end, turned).await.is_err() {
                return;
            }
        }
    }

    /// What all of them stand on.
    pub fn context(&self) -> &Arc<DaemonContext> {
        &self.context
    }

    /// What they need besides.
    pub fn below(&self) -> &Arc<K::Below> {
        &self.below
    }

    /// Those that are served, and those that could not be; refuses while one is being opened.
    pub fn settled(&self) -> Result<Settled<K>, Refusal> {
        let (mut served, mut failed) = (Vec::new(), Vec::new());
        for (name, slot) in self.slots().iter() {
            match slot {
                Slot::Served(one) => served.push((name.clone(), one.clone())),
                Slot::Failed(_, retry) => failed.push((name.clone(), retry.why.clone())),
                Slot::Opening(..) => {
                    let why = format!("{} {name} is still being opened", K::NAME);
                    return Err(Refusal::busy(why, "try again when it is served"));
                }
            }
        }
        Ok((served, failed))
    }

    /// Ends the service of all for a while, if nobody uses any: what a successor has to open itself. What has been ended comes
    /// back by [`Registry::bring_back`]. On an error all are served as before.
    pub async fn set_aside(&self) -> Result<Vec<Record<K::Spec>>, Refusal> {
        let (served, failed) = self.settled()?;
        let mut aside = Vec::new();
        for (name, one) in served {
            if let Err(refused) = one.service().stop(false).await {
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

    /// Its name, its place and its socket are free.
    pub fn drop_slot(&self, name: &str) {
        self.slots().remove(name);
        self.context.release(name);
    }

    /// Takes in one that another process has served. Its name has been claimed.
    pub fn take_in(&self, name: String, one: K) {
        self.slots().insert(name, Slot::Served(Arc::new(one)));
    }

    /// Takes in one that another process could not serve. Its name has been claimed.
    pub fn take_failed(&self, record: Record<K::Spec>, why: Refusal) {
        self.slots().insert(record.now.name().to_owned(), Slot::Failed(record, RetryState::new(why)));
    }

    /// Takes the name and the socket; for what somebody asks for just now the address as well.
    fn reserve(&self, record: &Record<K::Spec>, asked: bool) -> Result<(), Refusal> {
        let name = record.now.name();
        let mut slots = self.slots();
        if let Some(Slot::Failed(..) | Slot::Opening(_, Some(_))) = slots.get(name) {
            let (kind, command) = (K::NAME, K::COMMAND);
            return Err(Refusal::conflict(
                format!("{kind} {name} is there, and could not be served"),
                format!("see `ioplane {command} list`; `ioplane {command} remove {name}` forgets it"),
            )
            .coded(Code::NotServed));
        }
        match asked {
            true => self.context.claim_new(K::NAME, &record.now)?,
            false => self.context.claim(K::NAME, &record.now)?,
        }
        slots.insert(name.to_owned(), Slot::Opening(record.clone(), None));
        Ok(())
    }

    /// One that is being served.
    pub fn served(&self, name: &str) -> Result<Arc<K>, Refusal> {
        let kind = K::NAME;
        match self.slots().get(name) {
            Some(Slot::Served(one)) => Ok(one.clone()),
            Some(Slot::Opening(_, None)) => Err(Refusal::busy(
                format!("{kind} {name} is still being opened"),
                "wait: I/O of a daemon that died may still be in flight to its image",
            )),
            Some(Slot::Opening(_, Some(retry)) | Slot::Failed(_, retry)) => Err(Refusal::conflict(
                format!("{kind} {name} is not served: {}", retry.why),
                retry.why.remedy.clone(),
            )
            .coded(Code::NotServed)),
            None => Err(Self::missing(name)),
        }
    }

    fn missing(name: &str) -> Refusal {
        Refusal::missing(
            format!("there is no {} {name}", K::NAME),
            format!("see `ioplane {} list`", K::COMMAND),
        )
    }

    pub fn records(&self) -> BTreeMap<String, Record<K::Spec>> {
        self.slots().iter().map(|(name, slot)| (name.clone(), slot.record())).collect()
    }

    /// Those that could not be served.
    pub fn failed(&self) -> Vec<String> {
        let slots = self.slots();
        let failed =
            slots.iter().filter(|(_, slot)| matches!(slot, Slot::Failed(..) | Slot::Opening(_, Some(_))));
        failed.map(|(name, _)| name.clone()).collect()
    }

    /// Whether a front end uses it.
    pub async fn in_use(&self, name: &str) -> bool {
        match self.served(name) {
            Ok(one) => one.service().in_use().await,
            Err(_) => false,
        }
    }

    /// Ends the service of one and forgets it; `lasting` is to remember that a configured one is not wanted.
    pub async fn remove(&self, name: &str, force: bool, lasting: bool) -> Result<(), Refusal> {
        self.take_away(name, force, lasting, None).await
    }

    /// The same of one in whose place `next` will be served.
    pub async fn make_way(&self, name: &str, next: &K::Spec) -> Result<(), Refusal> {
        self.take_away(name, false, false, Some(next)).await
    }

    async fn take_away(
        &self,
        name: &str,
        force: bool,
        lasting: bool,
        next: Option<&K::Spec>,
    ) -> Result<(), Refusal> {
        self.turn(name).await;
        if matches!(self.slots().get(name), Some(Slot::Opening(_, Some(_)))) {
            let why = format!("{} {name} is being tried again just now", K::NAME);
            return Err(Refusal::busy(why, "try again in a moment"));
        }
        if !self.failed().iter().any(|failed| failed == name) {
            let one = self.served(name)?;
            one.may_be_removed()?;
            one.service().stop(force).await?;
            one.leave(next).await;
        }
        let slot = self.slots().remove(name);
        self.context.release(name);
        tracing::info!(kind = K::NAME, name, "no longer served");
        self.tell(EventWord::Removed, name, "no longer served");
        let configured = slot.and_then(|slot| slot.record().configured);
        Ok(self.context.state_file.change(|entries| {
            K::records(entries).remove(name);
            if let Some(configured) = configured.filter(|_| lasting) {
                K::removed(entries).insert(name.to_owned(), configured);
            }
        })?)
    }

    pub async fn report_of(&self, name: &str) -> Result<K::Report, Refusal> {
        let slot = self.slots().get(name).cloned();
        match slot {
            Some(slot) => Ok(report_slot(slot, &self.context).await),
            None => Err(Self::missing(name)),
        }
    }

    pub async fn report(&self) -> Vec<K::Report> {
        let slots: Vec<Slot<K>> = self.slots().values().cloned().collect();
        // All are asked at once: one that is stuck costs the others nothing, and all of them together as much as one.
        let mut asking = tokio::task::JoinSet::new();
        for (index, slot) in slots.into_iter().enumerate() {
            let context = self.context.clone();
            asking.spawn(async move { (index, report_slot(slot, &context).await) });
        }
        let mut reports = Vec::with_capacity(asking.len());
        while let Some(report) = asking.join_next().await {
            match report {
                Ok(report) => reports.push(report),
                Err(error) => tracing::error!(%error, "a report: this is a bug"),
            }
        }
        reports.sort_by_key(|(index, _)| *index);
        reports.into_iter().map(|(_, report)| report).collect()
    }

    /// Ends the service of all, at once and whoever is connected. The state file keeps them: the next daemon serves them
    /// again, and their front ends reconnect.
    pub async fn stop(&self) {
        let slots = std::mem::take(&mut *self.slots());
        let mut stopping = tokio::task::JoinSet::new();
        for (name, slot) in slots {
            self.context.release(&name);
            if let Slot::Served(one) = slot {
                stopping.spawn(async move {
                    match one.service().stop(true).await {
                        Ok(()) => one.leave(Some(&one.note().read().now)).await,
                        Err(error) => tracing::warn!(kind = K::NAME, name, %error, "stopping"),
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

impl<K: ServedKind> Slot<K> {
    /// Begins to try again one that has failed, and says whether it did.
    fn begin(&mut self) -> bool {
        let Slot::Failed(record, retry) = self else { return false };
        *self = Slot::Opening(record.clone(), Some(retry.clone()));
        true
    }
}

async fn report_slot<K: ServedKind>(slot: Slot<K>, context: &DaemonContext) -> K::Report {
    let (record, state, retry) = match slot {
        Slot::Served(one) => {
            let report = tokio::time::timeout(GLANCE + GLANCE / 4, one.report()).await;
            match report {
                Ok(report) => return report,
                // It is served, and does not answer.
                Err(_) => return one.busy(),
            }
        }
        Slot::Opening(record, None) => (record, ServedState::Opening, None),
        Slot::Opening(record, Some(retry)) | Slot::Failed(record, retry) => {
            (record, ServedState::Failed, Some(retry))
        }
    };
    K::blank(&record, Standing::new(&record, context.socket(&record.now), state, retry.as_ref()))
}

impl<K: Queued> Registry<K> {
    pub async fn move_queue(&self, name: &str, queue: u16, core: u32) -> Result<(), Refusal> {
        self.context.cores.check(core).map_err(|refused| refused.at("core"))?;
        self.served(name)?.service().move_queue(queue, core, &self.context).await
    }

    /// Moves a queue without pinning it: [`Served::relocate`](crate::served::Served::relocate).
    pub async fn relocate(
        &self,
        name: &str,
        queue: u16,
        core: u32,
        patience: Duration,
    ) -> Result<(), Refusal> {
        self.context.cores.check(core)?;
        self.served(name)?.service().relocate(queue, core, patience, &self.context).await
    }

    /// The processes of front ends, by the names of the devices that they use.
    pub async fn front_ends(&self) -> Vec<(String, u32)> {
        let names: Vec<String> = self.slots().keys().cloned().collect();
        let mut found = Vec::new();
        for name in names {
            let Ok(one) = self.served(&name) else { continue };
            if let Some(pid) = one.service().front_end().await {
                found.push((name, pid));
            }
        }
        found
    }

    /// Lets a queue be on any core again.
    pub async fn unpin(&self, name: &str, queue: u16) -> Result<(), Refusal> {
        self.served(name)?.service().unpin(queue).await
    }
}
