//! What can be taken over: one trait for each side to see a kind by.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ioplane_api::spec::ServedSpec;
use ioplane_host::vhost_user::{self, Adopted, Handle, Held, Parcel, RingLease, STOP_PATIENCE};
use tokio::sync::oneshot;

use super::super::Daemon;
use super::super::context::DaemonContext;
use super::super::registry::{Registered, Registry};
use super::super::served::{self, Queued, Served};
use super::super::state_file::Record;
use super::words::{DeviceV1, NameV1};
use crate::refusal::Refusal;

/// A kind of thing that a successor can take over while a guest uses it.
pub trait HandoverKind: Queued + Registered {
    /// What the successor keeps beside the model.
    type Kept: Send;

    /// What the successor needs to open the same.
    fn extras(&self) -> impl Future<Output = Result<HandoverExtras, Refusal>> + Send;

    /// Opens what is below one a second time, from its extras. May block; nothing may be changed by it.
    fn prepare(
        record: &Record<Self::Spec>,
        context: &DaemonContext,
        below: &Self::Below,
        files: Vec<OwnedFd>,
    ) -> Result<(Self::Model, Self::Kept), Refusal>;

    /// What the predecessor says beside the device: [`HandoverExtras::beside`]. It may come from another version.
    fn take_extras(kept: &Self::Kept, beside: &[u8]) -> Result<(), Refusal>;

    /// One that is served here now.
    fn succeed(kept: Self::Kept, served: Served<Self>) -> Self;
}

/// What can be handed over, and what is broken already.
pub type HandoverSet = (Vec<HandoverSource>, Vec<(NameV1, Refusal)>);

/// What goes ahead of a device.
pub struct HandoverExtras {
    /// Descriptors, in an order that the kind knows.
    pub files: Vec<OwnedFd>,
    /// What there is to say beside it when everything is quiescent.
    pub beside: Box<dyn Fn() -> Vec<u8> + Send + Sync>,
}

/// Something that is quiescent until it is decided whose it is. Dropped, it resumes here.
pub trait Stopped: Send {
    /// The device, for the successor.
    fn parcel(&self) -> (&[u8], &[OwnedFd]);

    /// Requests are recorded in flight.
    fn suspended(&self) -> bool;

    /// A guest waits for it.
    fn has_guest(&self) -> bool;

    /// It resumes here. Done when it has.
    fn take_back(self: Box<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>>;

    /// The successor has it: nothing here touches it any more.
    fn give_away(self: Box<Self>);
}

/// A device, behind one of its sockets.
impl Stopped for Held {
    fn parcel(&self) -> (&[u8], &[OwnedFd]) {
        (&self.parcel.bytes, &self.parcel.files)
    }

    fn suspended(&self) -> bool {
        self.suspended
    }

    fn has_guest(&self) -> bool {
        true
    }

    fn take_back(self: Box<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin((*self).take_back())
    }

    fn give_away(self: Box<Self>) {
        (*self).give_away();
    }
}

/// What is quiescent behind each socket of one device, in their order.
pub type AllStopped = Vec<Box<dyn Stopped>>;
/// What becomes quiescent, or why it does not.
pub type Holding = Pin<Box<dyn Future<Output = Result<Box<dyn Stopped>, vhost_user::HandleError>> + Send>>;
/// Quiesces a device behind one of its sockets, within the time given.
pub type HoldFn = Box<dyn Fn(Duration) -> Holding + Send + Sync>;

/// One thing that is to be handed over.
pub struct HandoverSource {
    /// What it is called.
    pub name: NameV1,
    /// What goes ahead.
    pub extras: HandoverExtras,
    sockets: Vec<HoldFn>,
}

impl HandoverSource {
    /// One that is quiesced behind each of `sockets`.
    pub fn new(name: NameV1, extras: HandoverExtras, sockets: Vec<HoldFn>) -> Self {
        HandoverSource { name, extras, sockets }
    }

    /// Brings its device to a quiescent point and holds it there: behind each of its sockets, in their order.
    pub async fn hold(&self, patience: Duration) -> Result<AllStopped, vhost_user::HandleError> {
        let mut all = Vec::with_capacity(self.sockets.len());
        for hold in &self.sockets {
            match hold(patience).await {
                Ok(held) => all.push(held),
                Err(refused) => {
                    for held in all {
                        held.take_back().await;
                    }
                    return Err(refused);
                }
            }
        }
        Ok(all)
    }
}

/// All that is served of one kind, and what could not be. Refuses while one is being opened.
pub async fn sources<K: HandoverKind>(registry: &Registry<K>) -> Result<HandoverSet, Refusal> {
    let name = |name: String| NameV1 { kind: K::NAME.to_owned(), name };
    let (served, failed) = registry.settled()?;
    let mut all = Vec::with_capacity(served.len());
    for (of, one) in served {
        let extras = one.extras().await?;
        let hold_fn = |handle: Handle<K::Model>| {
            Box::new(move |patience| {
                let handle = handle.clone();
                Box::pin(async move {
                    let held = handle.hand_over(patience).await?;
                    Ok(Box::new(held) as Box<dyn Stopped>)
                }) as Holding
            }) as HoldFn
        };
        let sockets = one.service().handles().into_iter().map(hold_fn).collect();
        all.push(HandoverSource::new(name(of), extras, sockets));
    }
    Ok((all, failed.into_iter().map(|(of, why)| (name(of), why)).collect()))
}

/// One thing on its way to being served here.
pub trait HandoverTarget: Send {
    /// What it is called.
    fn name(&self) -> &NameV1;
    /// Requests that were in flight are to be done again.
    fn replays(&self) -> bool;
    /// How many sockets it has.
    fn sockets(&self) -> usize;
    /// Takes its device in, checked and not started: behind each of its sockets, in their order.
    fn adopt(&mut self, device: DeviceV1, files: Vec<OwnedFd>) -> Result<(), Refusal>;
    /// Serves it. Tells of each socket how long the guest has waited, when it does no longer.
    fn start(self: Box<Self>, daemon: &Daemon) -> Vec<oneshot::Receiver<Duration>>;
}

struct Prepared<K: HandoverKind> {
    name: NameV1,
    record: Record<K::Spec>,
    context: Arc<DaemonContext>,
    lease: RingLease,
    /// Socket and model of each instance that has not come yet, the last one first.
    sockets: Vec<(PathBuf, K::Model)>,
    kept: K::Kept,
    replays: bool,
    adopted: Vec<Adopted<K::Model>>,
}

/// Opens what is below one a second time.
pub fn prepare<K: HandoverKind>(
    daemon: &Daemon,
    name: NameV1,
    files: Vec<OwnedFd>,
) -> Result<Box<dyn HandoverTarget>, Refusal> {
    let record = record::<K>(daemon, &name)?;
    let (context, below) = (K::registry(daemon).context().clone(), K::registry(daemon).below());
    context.claim(K::NAME, &record.now)?;
    let (model, kept) = K::prepare(&record, &context, below, files)?;
    let second = record.now.migration_socket().map(Path::to_owned).zip(K::second_instance(&model));
    let sockets = second.into_iter().chain([(context.socket(&record.now), model)]).collect();
    let (lease, adopted) = (RingLease::default(), Vec::new());
    Ok(Box::new(Prepared::<K> { name, record, context, lease, sockets, kept, replays: false, adopted }))
}

/// Keeps one that could not be served, as the predecessor kept it.
pub fn keep_failed<K: HandoverKind>(daemon: &Daemon, name: &NameV1, why: Refusal) -> Result<(), Refusal> {
    let (record, registry) = (record::<K>(daemon, name)?, K::registry(daemon));
    registry.context().claim(K::NAME, &record.now)?;
    registry.take_failed(record, why);
    Ok(())
}

fn record<K: HandoverKind>(daemon: &Daemon, name: &NameV1) -> Result<Record<K::Spec>, Refusal> {
    let mut entries = daemon.state_file.entries();
    K::records(&mut entries).remove(&name.name).ok_or_else(|| {
        Refusal::failed(
            format!("state.json does not know {} {}", name.kind, name.name),
            "this is a bug: report it with the log",
        )
    })
}

impl<K: HandoverKind> HandoverTarget for Prepared<K> {
    fn name(&self) -> &NameV1 {
        &self.name
    }

    fn replays(&self) -> bool {
        self.replays
    }

    fn sockets(&self) -> usize {
        self.sockets.len()
    }

    fn adopt(&mut self, device: DeviceV1, files: Vec<OwnedFd>) -> Result<(), Refusal> {
        let twice = || Refusal::failed("a device came twice", "this is a bug: report it with the log");
        let (socket, model) = self.sockets.pop().ok_or_else(twice)?;
        self.replays |= device.suspended;
        let parcel = Parcel { bytes: device.bytes, files };
        let options = served::options(socket, &self.record, &self.context);
        let adopted = vhost_user::adopt(model, options, STOP_PATIENCE, self.lease.clone(), parcel);
        let adopted = adopted.map_err(|error| {
            let name = self.record.now.name();
            Refusal::failed(
                format!("{} {name}: {error}", K::NAME),
                "restart the daemon instead of upgrading it, or stop what uses this one first",
            )
        })?;
        self.adopted.push(adopted);
        // After that: a device that is loaded is reset first.
        K::take_extras(&self.kept, &device.beside)
    }

    fn start(self: Box<Self>, daemon: &Daemon) -> Vec<oneshot::Receiver<Duration>> {
        let Prepared { record, context, lease, kept, adopted, .. } = *self;
        let (mut handles, mut waits) = (Vec::new(), Vec::new());
        for (handle, waited) in adopted.into_iter().map(Adopted::start) {
            handles.push(handle);
            waits.push(waited);
        }
        let mut handles = handles.into_iter();
        if let Some(first) = handles.next() {
            let name = record.now.name().to_owned();
            let served = Served::of(first, handles.next(), lease, record, &context);
            K::registry(daemon).take_in(name, K::succeed(kept, served));
        }
        waits
    }
}
