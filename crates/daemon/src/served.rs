//! What is the same of disks, NICs and PCI functions while they are served: a device behind a socket, and its record; of disks and NICs
//! also the queues on cores.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ioplane_api::report::{RetryReport, ServedState};
use ioplane_api::spec::ServedSpec;
use ioplane_host::vhost_user::{self, Handle, RingLease, STOP_PATIENCE, ServerOptions, Status};
use ioplane_memory::Limits;
use ioplane_virtio::VirtioDevice;

use super::context::DaemonContext;
use super::groups::Groups;
use super::lower::Lower;
use super::retry_state::RetryState;
use super::state_file::{Entries, Record, StateFile};
use crate::config::{Config, Place};
use crate::refusal::Refusal;

/// How long a report waits for what a device that is busy with a change says; all are asked at once.
pub(super) const GLANCE: Duration = Duration::from_secs(1);

/// One kind of thing that is served on a socket of its own.
pub trait ServedKind: Send + Sync + Sized + 'static {
    type Spec: ServedSpec;
    type Report: Send;
    /// What one needs besides the context.
    type Below: Send + Sync;
    /// What serves one.
    type Service: Service<Self>;

    /// What people call it.
    const NAME: &'static str;
    /// The command that deals with them.
    const COMMAND: &'static str;
    /// What to do before a change of the configuration can take one away that a guest uses.
    const LET_GO: &'static str;

    /// What the configuration says of this kind.
    fn configured(config: &Config) -> &[(Self::Spec, Place)];

    fn records(entries: &mut Entries) -> &mut BTreeMap<String, Record<Self::Spec>>;

    /// Configured ones that were removed at run time.
    fn removed(entries: &mut Entries) -> &mut BTreeMap<String, Self::Spec>;

    /// Opens what is behind it and serves it. Waits as long as that takes.
    fn open(
        record: Record<Self::Spec>,
        context: &Arc<DaemonContext>,
        below: &Arc<Self::Below>,
    ) -> impl Future<Output = Result<Self, Refusal>> + Send;

    /// Why changing one would lose what a guest left in it: the reason, and what to do.
    fn loses(_record: &Record<Self::Spec>) -> Option<(&'static str, &'static str)> {
        None
    }

    /// Whether one can become the other while a guest uses it, by [`Kind::become_next`].
    fn lives_on(_now: &Self::Spec, _next: &Self::Spec) -> bool {
        false
    }

    /// Whether one that cannot be opened when it is added is kept and tried again.
    fn waits_when_added(_spec: &Self::Spec) -> bool {
        false
    }

    /// Makes that change.
    fn become_next(&self, next: Record<Self::Spec>) -> impl Future<Output = Result<(), Refusal>> + Send;

    /// Goes by its group as that is now, if it can be in one.
    fn rejoin(&self) -> impl Future<Output = Result<(), Refusal>> + Send {
        async { Ok(()) }
    }

    /// Refuses while something is being done with it that has to end first.
    fn may_be_removed(&self) -> Result<(), Refusal> {
        Ok(())
    }

    /// It is served no more: what is behind it is left as it should be found, and given back unless `next`, which is served in its place, or by the
    /// next daemon, needs it.
    fn leave(&self, _next: Option<&Self::Spec>) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// What serves it.
    fn service(&self) -> &Self::Service;

    /// What is written down of it.
    fn note(&self) -> &StateRecord<Self> {
        self.service().note()
    }

    /// How it is.
    fn report(&self) -> impl Future<Output = Self::Report> + Send;

    /// A report of one that is served and does not answer.
    fn busy(&self) -> Self::Report {
        let (record, socket) = (self.note().read(), self.service().socket().to_owned());
        Self::blank(&record, Standing::new(&record, socket, ServedState::Busy, None))
    }

    /// A report of one of which only the record is known, and how it stands.
    fn blank(record: &Record<Self::Spec>, standing: Standing) -> Self::Report;
}

/// What a report says of one of any kind, whether it is served or not.
pub struct Standing {
    pub name: String,
    /// Whether it is there.
    pub state: ServedState,
    /// Why it is not.
    pub error: Option<String>,
    /// What to do about that.
    pub remedy: Option<String>,
    /// When it is tried again.
    pub retry: Option<RetryReport>,
    /// Where it comes from, in a word.
    pub origin: String,
    /// Where its front end connects.
    pub socket: PathBuf,
}

impl Standing {
    /// Of one with this record; `why` it is not served.
    pub fn new<S: ServedSpec>(
        record: &Record<S>,
        socket: PathBuf,
        state: ServedState,
        why: Option<&RetryState>,
    ) -> Self {
        Standing {
            name: record.now.name().to_owned(),
            state,
            error: why.map(|retry| retry.why.error.clone()),
            remedy: why.map(|retry| retry.why.remedy.clone()),
            retry: why.map(RetryState::report),
            origin: record.origin().to_owned(),
            socket,
        }
    }
}

/// What serves one device on its socket: the daemon's hold on the device's owner, and the record.
pub trait Service<K: ServedKind>: Send + Sync {
    /// What is written down of it.
    fn note(&self) -> &StateRecord<K>;

    /// Where its front end connects.
    fn socket(&self) -> &Path;

    /// Whether a front end is connected; one that does not answer is in use.
    fn in_use(&self) -> impl Future<Output = bool> + Send;

    /// Ends the service, unless a front end is connected and it is not to be by force. Nothing of the device is left when it
    /// returns well; the state file is the caller's business.
    fn stop(&self, force: bool) -> impl Future<Output = Result<(), Refusal>> + Send;
}

/// A kind whose queues run on I/O cores, behind vhost-user.
pub trait Queued: ServedKind<Service = Served<Self>> {
    type Model: VirtioDevice;

    /// The same device for a second front end, the destination of a migration, if there can be one.
    fn second_instance(_model: &Self::Model) -> Option<Self::Model> {
        None
    }
}

/// The record of one thing, in memory and in the state file.
pub struct StateRecord<K: ServedKind> {
    record: Mutex<Record<K::Spec>>,
    state_file: Arc<StateFile>,
}

impl<K: ServedKind> StateRecord<K> {
    /// Writes down that it is being served.
    pub fn begin(record: Record<K::Spec>, state_file: &Arc<StateFile>) -> Result<Self, Refusal> {
        state_file.change(|entries| {
            K::removed(entries).remove(record.now.name());
        })?;
        write::<K>(state_file, &record)?;
        Ok(Self::written_elsewhere(record, state_file))
    }

    /// Of one that others write down, together with something else.
    pub fn written_elsewhere(record: Record<K::Spec>, state_file: &Arc<StateFile>) -> Self {
        StateRecord { record: Mutex::new(record), state_file: state_file.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Record<K::Spec>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn read(&self) -> Record<K::Spec> {
        self.lock().clone()
    }

    /// Looks at what else is in the state file.
    pub fn look<R>(&self, look: impl FnOnce(&Entries) -> R) -> R {
        self.state_file.look(look)
    }

    /// Changes it, in the state file first: if that fails nothing has changed. Callers may be at a quiescent point.
    pub fn change(&self, change: impl FnOnce(&mut Record<K::Spec>)) -> Result<(), Refusal> {
        let mut record = self.lock();
        let mut next = record.clone();
        change(&mut next);
        write::<K>(&self.state_file, &next)?;
        *record = next;
        Ok(())
    }

    /// As [`StateRecord::change`], together with a change of what else is in the state file: both or neither.
    pub fn change_beside(
        &self,
        change: impl FnOnce(&mut Record<K::Spec>),
        beside: impl FnOnce(&mut Entries),
    ) -> Result<(), Refusal> {
        let mut record = self.lock();
        let mut next = record.clone();
        change(&mut next);
        self.state_file.change(|entries| {
            K::records(entries).insert(next.now.name().to_owned(), next.clone());
            beside(entries);
        })?;
        *record = next;
        Ok(())
    }

    /// The configuration says the same as before, in another file perhaps: notes that.
    pub fn adopt(&self, configured: Option<K::Spec>) -> Result<(), Refusal> {
        self.change(|record| record.configured = configured)
    }
}

fn write<K: ServedKind>(state_file: &StateFile, record: &Record<K::Spec>) -> Result<(), Refusal> {
    Ok(state_file.change(|entries| {
        K::records(entries).insert(record.now.name().to_owned(), record.clone());
    })?)
}

/// A device that is being served. It is owned by a task of its own; this is the daemon's hold on it.
pub struct Served<K: Queued> {
    /// To talk to that task.
    pub handle: Handle<K::Model>,
    /// To talk to the task of its migration socket, if it has one.
    pub(super) second: Mutex<Option<Handle<K::Model>>>,
    /// Behind which of the two its rings run.
    pub(super) lease: RingLease,
    /// What is written down of it.
    pub note: Arc<StateRecord<K>>,
    /// The groups that it may be in.
    pub groups: Arc<Groups>,
    /// One change at a time.
    pub changing: tokio::sync::Mutex<()>,
}

impl<K: Queued> Served<K> {
    /// Serves `model` on its socket, and writes down that it does.
    pub fn start(model: K::Model, record: Record<K::Spec>, context: &DaemonContext) -> Result<Self, Refusal> {
        let socket = context.socket(&record.now);
        let note = StateRecord::begin(record.clone(), &context.state_file)?;
        let lease = RingLease::default();
        let second = record.now.migration_socket().map(Path::to_owned).zip(K::second_instance(&model));
        let handle = serve(model, socket, &record, context, &lease)?;
        let second =
            second.map(|(socket, model)| serve(model, socket, &record, context, &lease)).transpose()?;
        Ok(Served::with(handle, second, lease, note, context))
    }

    /// One that is being served already, and written down.
    pub fn of(
        handle: Handle<K::Model>,
        second: Option<Handle<K::Model>>,
        lease: RingLease,
        record: Record<K::Spec>,
        context: &DaemonContext,
    ) -> Self {
        Served::with(
            handle,
            second,
            lease,
            StateRecord { record: Mutex::new(record), state_file: context.state_file.clone() },
            context,
        )
    }

    fn with(
        handle: Handle<K::Model>,
        second: Option<Handle<K::Model>>,
        lease: RingLease,
        note: StateRecord<K>,
        context: &DaemonContext,
    ) -> Self {
        let (second, changing) = (Mutex::new(second), tokio::sync::Mutex::default());
        Served { handle, second, lease, note: Arc::new(note), groups: context.groups.clone(), changing }
    }

    /// What is seen of it, unless it is busy with a change; `look` sees the model.
    pub async fn glance<R: Send + 'static>(
        &self,
        look: impl FnOnce(&mut K::Model) -> R + Send + 'static,
    ) -> Option<(Status, R)> {
        let both = async {
            let status = self.handle.status().await.ok()?;
            let seen = self.handle.change(|model| (look(model), false)).await.ok()?;
            Some((status, seen))
        };
        tokio::time::timeout(GLANCE, both).await.ok().flatten()
    }

    /// The holds on all instances.
    pub fn handles(&self) -> Vec<Handle<K::Model>> {
        [Some(self.handle.clone()), self.second()].into_iter().flatten().collect()
    }

    /// The hold on the instance behind the migration socket.
    pub fn second(&self) -> Option<Handle<K::Model>> {
        self.second.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How the second instance is, if there is one and it answers.
    pub async fn second_status(&self) -> Option<Status> {
        let second = self.second()?;
        tokio::time::timeout(GLANCE, second.status()).await.ok()?.ok()
    }

    /// The process whose front end uses it, if that is known.
    pub async fn front_end(&self) -> Option<u32> {
        for handle in self.handles() {
            let status = tokio::time::timeout(GLANCE, handle.status()).await;
            if let Some(pid) = status.ok().and_then(Result::ok).and_then(|status| status.peer) {
                return Some(pid);
            }
        }
        None
    }

    /// Moves a queue to a core, and remembers it: it is pinned there.
    pub async fn move_queue(&self, queue: u16, core: u32, context: &DaemonContext) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        let record = self.queue_record(queue)?;
        self.shift(record, queue, core, None, context).await?;
        self.note.change(|record| {
            record.moved.insert(queue, core);
        })
    }

    /// Moves a queue to a core, where it stays until it is moved again or starts anew. Its requests in flight have `patience` to end.
    pub async fn relocate(
        &self,
        queue: u16,
        core: u32,
        patience: Duration,
        context: &DaemonContext,
    ) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        let record = self.queue_record(queue)?;
        self.shift(record, queue, core, Some(patience), context).await
    }

    /// Forgets where a queue was moved to. It stays there until it is moved.
    pub async fn unpin(&self, queue: u16) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        let record = self.queue_record(queue)?;
        if let Some(core) = record.now.core() {
            let (kind, name) = (K::NAME, record.now.name());
            let remedy = format!("leave `core` out of the {kind}, then reload");
            return Err(Refusal::conflict(
                format!("{kind} {name} has core = {core} for all of its queues"),
                remedy,
            ));
        }
        self.note.change(|record| {
            record.moved.remove(&queue);
        })
    }

    /// The record, if the device has that queue.
    fn queue_record(&self, queue: u16) -> Result<Record<K::Spec>, Refusal> {
        let record = self.note.read();
        let queues = record.now.queues();
        if queue >= queues {
            return Err(Refusal::missing(
                format!("{} {} has no queue {queue}", K::NAME, record.now.name()),
                format!("it has queues 0 to {}", queues - 1),
            )
            .at("queue"));
        }
        Ok(record)
    }

    /// Moves a queue; the caller sees to it that nobody else changes the device meanwhile. `patience`: other than the usual.
    async fn shift(
        &self,
        mut record: Record<K::Spec>,
        queue: u16,
        core: u32,
        patience: Option<Duration>,
        context: &DaemonContext,
    ) -> Result<(), Refusal> {
        let brief = |handle: Handle<K::Model>| match patience {
            Some(patience) => handle.with_patience(patience),
            None => handle,
        };
        let old = context.placement(&record);
        record.moved.insert(queue, core);
        let new = context.placement(&record);
        let handle = brief(self.handle.clone());
        handle.move_queue(queue, Arc::new(new.clone())).await?;
        if let Some(second) = self.second()
            && let Err(refused) = brief(second).move_queue(queue, Arc::new(new)).await
        {
            // It runs there, so it does not run here, and here it moves back at once.
            handle.move_queue(queue, Arc::new(old)).await?;
            return Err(refused.into());
        }
        Ok(())
    }
}

impl<K: Queued> Service<K> for Served<K> {
    fn note(&self) -> &StateRecord<K> {
        &self.note
    }

    fn socket(&self) -> &Path {
        self.handle.socket()
    }

    /// To either socket.
    async fn in_use(&self) -> bool {
        for handle in self.handles() {
            let status = tokio::time::timeout(GLANCE, handle.status()).await;
            if status.ok().and_then(Result::ok).is_none_or(|status| status.connected) {
                return true;
            }
        }
        false
    }

    async fn stop(&self, force: bool) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        let refused = |refused| match refused {
            vhost_user::HandleError::Connected => Refusal::guest_uses(K::NAME),
            refused => refused.into(),
        };
        if let Some(second) = self.second() {
            if !force && self.in_use().await {
                return Err(Refusal::guest_uses(K::NAME));
            }
            second.stop(force).await.map_err(refused)?;
        }
        self.handle.stop(force).await.map_err(refused)
    }
}

/// No front end can connect to `socket`.
pub(super) fn no_socket(socket: &Path, error: impl std::fmt::Display) -> Refusal {
    let remedy = "is its directory there and writable, and does no other daemon listen there?";
    Refusal::failed(format!("the socket {}: {error}", socket.display()), remedy)
}

/// Serves one instance of a device on a socket.
pub(super) fn serve<V: VirtioDevice, S: ServedSpec>(
    model: V,
    socket: PathBuf,
    record: &Record<S>,
    context: &DaemonContext,
    lease: &RingLease,
) -> Result<Handle<V>, Refusal> {
    let handle = vhost_user::serve_leased(
        model,
        options(socket.clone(), record, context),
        STOP_PATIENCE,
        lease.clone(),
    )
    .map_err(|error| no_socket(&socket, error))?;
    context.access().open(&socket)?;
    Ok(handle)
}

/// Where and how one instance of a device is served.
pub(super) fn options<S: ServedSpec>(
    socket: PathBuf,
    record: &Record<S>,
    context: &DaemonContext,
) -> ServerOptions {
    let limits = Limits { files: record.now.guest_memory().lower(), ..Limits::default() };
    ServerOptions {
        dirty_log: true,
        limits,
        ..ServerOptions::new(socket, Arc::new(context.placement(record)))
    }
}

/// Does what may block on a thread for that.
pub async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, Refusal> + Send + 'static,
) -> Result<R, Refusal> {
    // In a box, so that tokio's task is compiled once for each result, and not once for each caller.
    let work: Box<dyn FnOnce() -> Result<R, Refusal> + Send> = Box::new(work);
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(Refusal::bug(error.to_string())))
}
