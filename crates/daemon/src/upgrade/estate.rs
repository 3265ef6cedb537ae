//! What can be taken over: one trait for each side to see a kind by.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use ioplane_api::spec::ServedSpec;
use ioplane_host::vhost_user::{self, Adopted, Handle, Held, Lease, Parcel, STOP_PATIENCE};
use tokio::sync::oneshot;

use super::super::Daemon;
use super::super::context::DaemonContext;
use super::super::registry::{Registry, Shelved};
use super::super::served::{self, Queued, Served};
use super::super::state_file::Record;
use super::words::{DeviceV1, NameV1};
use crate::refusal::Refusal;

/// A kind of thing that a successor can take over while a guest uses it.
pub trait Heritable: Queued + Shelved {
    /// What the successor keeps beside the model.
    type Heir: Send;

    /// What the successor needs to open the same.
    fn luggage(&self) -> impl Future<Output = Result<Luggage, Refusal>> + Send;

    /// Opens what is below one a second time, from its luggage. May block; nothing may be changed by it.
    fn prepare(
        record: &Record<Self::Spec>,
        ground: &DaemonContext,
        below: &Self::Below,
        files: Vec<OwnedFd>,
    ) -> Result<(Self::Model, Self::Heir), Refusal>;

    /// What the predecessor says beside the device: [`Luggage::beside`]. It may come from another version.
    fn hears(heir: &Self::Heir, beside: &[u8]) -> Result<(), Refusal>;

    /// One that is served here now.
    fn succeed(heir: Self::Heir, served: Served<Self>) -> Self;
}

/// What can be handed over, and what is broken already.
pub type Estate = (Vec<Bequest>, Vec<(NameV1, Refusal)>);

/// What goes ahead of a device.
pub struct Luggage {
    /// Descriptors, in an order that the kind knows.
    pub files: Vec<OwnedFd>,
    /// What there is to say beside it when everything stands still.
    pub beside: Box<dyn Fn() -> Vec<u8> + Send + Sync>,
}

/// Something that stands still until it is decided whose it is. Dropped, it goes on here.
pub trait Stopped: Send {
    /// The device, for the successor.
    fn parcel(&self) -> (&[u8], &[OwnedFd]);

    /// Requests are recorded in flight.
    fn suspended(&self) -> bool;

    /// A guest waits for it.
    fn has_guest(&self) -> bool;

    /// It goes on here. Done when it does.
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

/// What stands still behind each socket of one device, in their order.
pub type AllStopped = Vec<Box<dyn Stopped>>;
/// What comes to rest, or why it does not.
pub type Holding = Pin<Box<dyn Future<Output = Result<Box<dyn Stopped>, vhost_user::Refusal>> + Send>>;
/// Brings a device to rest behind one of its sockets, within the time given.
pub type HoldFn = Box<dyn Fn(Duration) -> Holding + Send + Sync>;

/// One thing that is to be handed over.
pub struct Bequest {
    /// What it is called.
    pub name: NameV1,
    /// What goes ahead.
    pub luggage: Luggage,
    doors: Vec<HoldFn>,
}

impl Bequest {
    /// One that comes to rest behind each of `doors`.
    pub fn new(name: NameV1, luggage: Luggage, doors: Vec<HoldFn>) -> Self {
        Bequest { name, luggage, doors }
    }

    /// Brings its device to a quiescent point and holds it there: behind each of its sockets, in their order.
    pub async fn hold(&self, patience: Duration) -> Result<AllStopped, vhost_user::Refusal> {
        let mut all = Vec::with_capacity(self.doors.len());
        for hold in &self.doors {
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
pub async fn bequests<K: Heritable>(shelf: &Registry<K>) -> Result<Estate, Refusal> {
    let name = |name: String| NameV1 { kind: K::NAME.to_owned(), name };
    let (served, failed) = shelf.settled()?;
    let mut all = Vec::with_capacity(served.len());
    for (of, one) in served {
        let luggage = one.luggage().await?;
        let door = |handle: Handle<K::Model>| {
            Box::new(move |patience| {
                let handle = handle.clone();
                Box::pin(async move {
                    let held = handle.hand_over(patience).await?;
                    Ok(Box::new(held) as Box<dyn Stopped>)
                }) as Holding
            }) as HoldFn
        };
        let doors = one.service().handles().into_iter().map(door).collect();
        all.push(Bequest::new(name(of), luggage, doors));
    }
    Ok((all, failed.into_iter().map(|(of, why)| (name(of), why)).collect()))
}

/// One thing on its way to being served here.
pub trait Heir: Send {
    /// What it is called.
    fn name(&self) -> &NameV1;
    /// Requests that were in flight are to be done again.
    fn replays(&self) -> bool;
    /// How many sockets it has.
    fn doors(&self) -> usize;
    /// Takes its device in, checked and not started: behind each of its sockets, in their order.
    fn adopt(&mut self, device: DeviceV1, files: Vec<OwnedFd>) -> Result<(), Refusal>;
    /// Serves it. Tells of each socket how long the guest has waited, when it does no longer.
    fn start(self: Box<Self>, daemon: &Daemon) -> Vec<oneshot::Receiver<Duration>>;
}

struct Prepared<K: Heritable> {
    name: NameV1,
    record: Record<K::Spec>,
    ground: Arc<DaemonContext>,
    lease: Lease,
    /// Socket and model of each instance that has not come yet, the last one first.
    doors: Vec<(PathBuf, K::Model)>,
    heir: K::Heir,
    replays: bool,
    adopted: Vec<Adopted<K::Model>>,
}

/// Opens what is below one a second time.
pub fn prepare<K: Heritable>(
    daemon: &Daemon,
    name: NameV1,
    files: Vec<OwnedFd>,
) -> Result<Box<dyn Heir>, Refusal> {
    let record = record::<K>(daemon, &name)?;
    let (ground, below) = (K::shelf(daemon).ground().clone(), K::shelf(daemon).below());
    ground.claim(K::NAME, &record.now)?;
    let (model, heir) = K::prepare(&record, &ground, below, files)?;
    let second = record.now.twin().map(Path::to_owned).zip(K::twin_of(&model));
    let doors = second.into_iter().chain([(ground.socket(&record.now), model)]).collect();
    let (lease, adopted) = (Lease::default(), Vec::new());
    Ok(Box::new(Prepared::<K> { name, record, ground, lease, doors, heir, replays: false, adopted }))
}

/// Keeps one that could not be served, as the predecessor kept it.
pub fn keep_failed<K: Heritable>(daemon: &Daemon, name: &NameV1, why: Refusal) -> Result<(), Refusal> {
    let (record, shelf) = (record::<K>(daemon, name)?, K::shelf(daemon));
    shelf.ground().claim(K::NAME, &record.now)?;
    shelf.take_failed(record, why);
    Ok(())
}

fn record<K: Heritable>(daemon: &Daemon, name: &NameV1) -> Result<Record<K::Spec>, Refusal> {
    let mut entries = daemon.ledger.entries();
    K::records(&mut entries).remove(&name.name).ok_or_else(|| {
        Refusal::failed(
            format!("state.json does not know {} {}", name.kind, name.name),
            "this is a bug: report it with the log",
        )
    })
}

impl<K: Heritable> Heir for Prepared<K> {
    fn name(&self) -> &NameV1 {
        &self.name
    }

    fn replays(&self) -> bool {
        self.replays
    }

    fn doors(&self) -> usize {
        self.doors.len()
    }

    fn adopt(&mut self, device: DeviceV1, files: Vec<OwnedFd>) -> Result<(), Refusal> {
        let twice = || Refusal::failed("a device came twice", "this is a bug: report it with the log");
        let (socket, model) = self.doors.pop().ok_or_else(twice)?;
        self.replays |= device.suspended;
        let parcel = Parcel { bytes: device.bytes, files };
        let options = served::options(socket, &self.record, &self.ground);
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
        K::hears(&self.heir, &device.beside)
    }

    fn start(self: Box<Self>, daemon: &Daemon) -> Vec<oneshot::Receiver<Duration>> {
        let Prepared { record, ground, lease, heir, adopted, .. } = *self;
        let (mut handles, mut waits) = (Vec::new(), Vec::new());
        for (handle, waited) in adopted.into_iter().map(Adopted::start) {
            handles.push(handle);
            waits.push(waited);
        }
        let mut handles = handles.into_iter();
        if let Some(first) = handles.next() {
            let name = record.now.name().to_owned();
            let served = Served::of(first, handles.next(), lease, record, &ground);
            K::shelf(daemon).take_in(name, K::succeed(heir, served));
        }
        waits
    }
}
