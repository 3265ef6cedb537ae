//! Exports: disks of this host that other machines use over NBD.
//!
//! ```text
//!   listener (a unix socket for each, one TCP socket for each address) --handshake--> Door --Ask--> owner: one task for each export
//!                                                                                                       | Running<Export>
//!                                                                                  I/O cores: one queue for each connection
//! ```

mod capacity;
mod content;
mod door;
mod flushes;
mod image_watch;
mod in_use;
mod instance;
mod listener;
mod owner;
mod random;
mod resize;
mod session;
mod told;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use ioplane_api::report::{ClaimReport, Counts, ExportReport, ServedState};
use ioplane_api::size::Size;
use ioplane_api::spec::{BackingSpec, ExportSpec, HostList, LimitsSpec, ListenAddress, ServedSpec};
use ioplane_device::Quiescent;
use ioplane_host::socket::{SocketPath, bind};
use ioplane_identity::IdentityDirectory;
use ioplane_nbd::export::{Export, ExportOptions};
use tokio::sync::oneshot;

use super::Daemon;
use super::context::{DaemonContext, Opener};
use super::disk::{Opened, Shown, open_backing, plain_report};
use super::registry::{Registered, Registry};
use super::served::{GLANCE, ServedKind, Service, Standing, StateRecord, blocking};
use super::state_file::{Entries, ExportRecord, Record};
use crate::config::{Config, Place};
use crate::flush_ledger;
use crate::ledger;
use crate::refusal::Refusal;
use capacity::{ExportCapacity, ReservationFile};
use door::{Admission, Door, Doors};
use image_watch::ImageWatch;
use instance::ExportInstance;
pub use listener::Listeners;
use owner::{Ask, Look, Unreleased};
use told::ToldState;

/// An export that is served.
pub struct PublishedDisk {
    service: ServedExport,
    shown: Arc<Mutex<Shown>>,
    read_only: bool,
}

/// The daemon's hold on one export.
pub struct ServedExport {
    note: StateRecord<PublishedDisk>,
    door: Door,
    socket: SocketPath,
    /// Where clients come in; dropped when it is stopped.
    entrances: Mutex<Vec<listener::Entrance>>,
    /// Held while it is changed.
    changing: tokio::sync::Mutex<()>,
    reservations: ReservationFile,
    context: Arc<DaemonContext>,
}

fn no_nbd(error: ioplane_nbd::NbdError) -> Refusal {
    Refusal::failed(error.to_string(), "see the log of the daemon")
}

/// An export that nobody could connect to is not there. Whether the identity is still good is seen at each connection.
async fn check_identity(directory: &IdentityDirectory) -> Result<(), Refusal> {
    let directory = directory.clone();
    let loaded = tokio::task::spawn_blocking(move || directory.load()).await;
    let remedy = "make one: ioplane identity create THIS-HOST; or, if another host has made the authority: ioplane identity join TOKEN";
    let refused = |error: String| {
        Refusal::failed(format!("TLS needs an identity of this host: {error}"), remedy).at("tls")
    };
    match loaded {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(refused(error.to_string())),
        Err(error) => Err(refused(error.to_string())),
    }
}

impl PublishedDisk {
    async fn start(
        mut record: ExportRecord,
        context: &Arc<DaemonContext>,
        listeners: &Arc<Listeners>,
    ) -> Result<PublishedDisk, Refusal> {
        let wanted = record.now.clone();
        let owner = Opener { wish: std::mem::take(&mut record.claim), ..context.opener(&wanted) };
        let known = record.image;
        let opened = blocking(move || {
            open_backing(&wanted.name, &wanted.backing, (wanted.read_only, None), known, &owner)
        })
        .await?;
        let begin = |record| StateRecord::begin(record, &context.state_file);
        let published = PublishedDisk::publish(record, opened, (context, listeners), begin).await?;
        if let Err(refused) = published.listen(listeners) {
            let _ = published.service.stop(true).await;
            return Err(refused);
        }
        Ok(published)
    }

    /// Publishes what is open, for clients of this host; `begin` writes down that it is published.
    async fn publish(
        mut record: ExportRecord,
        opened: Opened,
        (context, listeners): (&Arc<DaemonContext>, &Listeners),
        begin: impl FnOnce(ExportRecord) -> Result<StateRecord<PublishedDisk>, Refusal>,
    ) -> Result<PublishedDisk, Refusal> {
        let spec = record.now.clone();
        let (state_dir, backing) = (context.opener(&spec).state_dir, spec.backing.clone());
        // What nobody can write nobody claims.
        let writable = !spec.read_only && !opened.backing.info().read_only;
        let folder = state_dir.clone();
        let (opened, kept, content) = blocking(move || {
            let open = || {
                let book = ledger::open(&backing, opened.backing.file(), &folder)?;
                Ok::<_, Refusal>((book, flush_ledger::open(&backing, opened.backing.file(), &folder)?))
            };
            let kept = writable.then(open).transpose()?;
            let image = opened.backing.file().filter(|_| !writable && opened.image.is_some());
            let content = image.map(content::of).transpose()?;
            Ok((opened, kept, content))
        })
        .await?;
        let (book, flushes) = kept.unzip();
        // From here on its clients may write whatever they like into this image.
        record.image = opened.image;
        let shown = Shown::new(&opened);
        let (info, image) = (opened.backing.info(), opened.image);
        let options = ExportOptions {
            read_only: spec.read_only,
            connections: spec.connections,
            ..ExportOptions::default()
        };
        let mut export = Export::new(&spec.name, opened.backing, options).map_err(no_nbd)?;
        let failed = export.failed_flushes().clone();
        let flushes = flushes.map(|(count, flushes)| {
            failed.begin_at(count);
            flushes
        });
        let written = content.as_ref().and_then(|content| content.written);
        let content = content.map(|content| content.name);
        let instance = ExportInstance::of(opened.image, content, &failed)?;
        export.set_share(context.groups.membership(&spec).share);
        let (published, ended) = (export.published(), export.ended());
        let placement = context.placement(&record);
        let running = Quiescent::new(export).resume(&placement).map_err(|refused| {
            Refusal::failed(format!("{}: {}", spec.name, refused.error), "see the log of the daemon")
        })?;
        if spec.tls {
            check_identity(context.identity()).await?;
        }
        let admission = Admission { tls: spec.tls, allow: spec.allow.clone() };
        let path = context.socket(&spec);
        let reservations = ReservationFile::new(&state_dir, &path, &spec.name);
        let (declared, exclusive, file) = (spec.limits(), book.is_some(), reservations.clone());
        let capacity = blocking(move || Ok(ExportCapacity::open(&declared, exclusive, file))).await?;
        let told = ToldState::new(&instance.now(), published.bytes());
        let (alive, gone) = oneshot::channel();
        let watched = ImageWatch::new(&spec.backing, image, written);
        let below = (told.clone(), shown.clone(), instance.clone(), alive, watched);
        let owner = owner::start(running, ended, placement, book, capacity, below);
        if let Some(flushes) = flushes {
            let recorder = failed.recorder();
            // Who can ask nobody any more ends.
            let owner = (owner.0.downgrade(), gone);
            tokio::spawn(flushes::keep(instance.clone(), recorder, flushes, told.clone(), owner));
        }
        let door = Door::new(published, instance, admission, owner, told);
        let socket = bind(&path).map_err(|error| {
            Refusal::failed(
                format!("{}: {error}", path.display()),
                "is the directory there, and the path free?",
            )
        })?;
        let ours = SocketPath::of(&path);
        let served = || -> Result<_, Refusal> {
            context.access().open(&path)?;
            let alone = Doors::default();
            let entrances =
                vec![listener::local(socket, alone.enter(door.clone()), listeners.sessions().clone())?];
            Ok((begin(record)?, entrances))
        };
        match served() {
            Ok((note, entrances)) => {
                let (entrances, changing) = (Mutex::new(entrances), tokio::sync::Mutex::default());
                let context = context.clone();
                let service =
                    ServedExport { note, door, socket: ours, entrances, changing, reservations, context };
                Ok(PublishedDisk { service, shown, read_only: info.read_only || spec.read_only })
            }
            Err(refused) => {
                ours.clear();
                Err(refused)
            }
        }
    }

    /// Lets in clients of other machines, if it is for them. Must be called in the runtime.
    fn listen(&self, listeners: &Listeners) -> Result<(), Refusal> {
        let Some(listen) = self.note().read().now.listen() else { return Ok(()) };
        let entrance = listeners.enter(listen, self.service.door.clone())?;
        self.service.entrances.lock().unwrap_or_else(PoisonError::into_inner).push(entrance);
        Ok(())
    }

    /// Lets in nobody of other machines any more.
    fn close_to_others(&self) {
        self.service.entrances.lock().unwrap_or_else(PoisonError::into_inner).truncate(1);
    }

    /// A person says that whoever holds it does so no more.
    pub async fn release(&self, force: bool) -> Result<(), Refusal> {
        let name = &self.note().read().now.name;
        let (answer, released) = oneshot::channel();
        let asked = self.service.door.ask(Ask::Release { force, answer }).await.is_ok();
        let gone = || Refusal::busy(format!("export {name} has just ended"), "try again");
        if !asked {
            return Err(gone());
        }
        released.await.map_err(|_| gone())?.map_err(|why| match why {
            Unreleased::Free => {
                Refusal::conflict(format!("nobody holds export {name}"), "there is nothing to release")
            }
            Unreleased::InUse(connections) => Refusal::conflict(
                format!("its holder uses it: {connections} connections are open"),
                "remove the disk there first; or give --force: what its guest has not flushed is then lost, and its requests fail",
            )
            .at("force"),
            Unreleased::Failed(why) => Refusal::failed(why, "see to the disk below, then try again"),
        })
    }

    /// Changes what all clients may do together: what is left out stays.
    pub async fn set_limits(&self, change: LimitsSpec) -> Result<(), Refusal> {
        let _changing = self.service.changing.lock().await;
        let mut next = self.note().read();
        next.now.set_limits(next.now.limits().changed(change));
        let flaws = [next.now.flaws(), next.now.limit_flaws()].concat();
        if !flaws.is_empty() {
            return Err(Refusal::flaws(&flaws));
        }
        self.limit(next).await
    }

    /// Has its clients limited as the record says, unless more is reserved, and writes it down.
    async fn limit(&self, next: ExportRecord) -> Result<(), Refusal> {
        let before = self.note().read().now.limits();
        self.declare(next.now.limits()).await?;
        if let Err(refused) = self.note().change(|record| *record = next) {
            self.declare(before).await?;
            return Err(refused);
        }
        Ok(())
    }

    async fn declare(&self, declared: LimitsSpec) -> Result<(), Refusal> {
        let (answer, limited) = oneshot::channel();
        let asked = self.service.door.ask(Ask::Limit { declared, answer }).await.is_ok();
        let ended =
            || Refusal::busy(format!("export {} has just ended", self.note().read().now.name), "try again");
        if !asked {
            return Err(ended());
        }
        limited.await.map_err(|_| ended())?.map_err(|why| {
            let remedy = "remove disks that have reserved, or `ioplane publish release --reservations` for hosts that are gone";
            Refusal::conflict(why, remedy)
        })
    }

    /// A person says that what hosts have reserved that are not connected is for others.
    pub async fn unreserve(&self, force: bool) -> Result<usize, Refusal> {
        let name = &self.note().read().now.name;
        let ended = || Refusal::busy(format!("export {name} has just ended"), "try again");
        let (answer, released) = oneshot::channel();
        let asked = self.service.door.ask(Ask::Unreserve { force, answer }).await.is_ok();
        if !asked {
            return Err(ended());
        }
        let see_to = |why| Refusal::failed(why, "see to the state directory, then try again");
        match released.await.map_err(|_| ended())?.map_err(see_to)? {
            0 => Err(Refusal::conflict(
                format!("no host that is not connected has reserved anything of export {name}"),
                "see `ioplane publish show`; --force takes it from those that are connected, too",
            )),
            released => Ok(released),
        }
    }

    async fn look(&self) -> Option<Look> {
        let (answer, look) = oneshot::channel();
        self.service.door.ask(Ask::Look(answer)).await.ok()?;
        tokio::time::timeout(GLANCE, look).await.ok()?.ok()
    }
}

impl Service<PublishedDisk> for ServedExport {
    fn note(&self) -> &StateRecord<PublishedDisk> {
        &self.note
    }

    fn socket(&self) -> &Path {
        self.socket.path()
    }

    async fn in_use(&self) -> bool {
        self.door.published().connections() > 0
    }

    async fn stop(&self, force: bool) -> Result<(), Refusal> {
        if !force && self.in_use().await {
            let count = self.door.published().connections();
            return Err(Refusal::conflict(
                format!("clients use it: {count} connections are open"),
                "disconnect them first, or give --force: their requests then fail or wait",
            ));
        }
        // Before its connections end, so that nobody takes that for a failure of the network.
        self.door.told().leave(self.context.is_ending());
        self.entrances.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.socket.clear();
        let (answer, ended) = oneshot::channel();
        if self.door.ask(Ask::Stop(answer)).await.is_ok() {
            let _ = ended.await;
        }
        Ok(())
    }
}

impl Registered for PublishedDisk {
    fn registry(daemon: &Daemon) -> &Registry<PublishedDisk> {
        &daemon.exports
    }
}

impl ServedKind for PublishedDisk {
    type Spec = ExportSpec;
    type Report = ExportReport;
    type Below = Listeners;
    type Service = ServedExport;

    const NAME: &'static str = "export";
    const COMMAND: &'static str = "publish";
    const LET_GO: &'static str = "disconnect its clients first";

    fn configured(config: &Config) -> &[(ExportSpec, Place)] {
        &config.exports
    }

    fn records(entries: &mut Entries) -> &mut BTreeMap<String, ExportRecord> {
        &mut entries.exports
    }

    fn removed(entries: &mut Entries) -> &mut BTreeMap<String, ExportSpec> {
        &mut entries.removed_exports
    }

    fn loses(record: &ExportRecord) -> Option<(&'static str, &'static str)> {
        let memory = matches!(record.now.backing, BackingSpec::Memory { .. });
        let remedy = "if it may be lost, `ioplane publish remove` it first; or put the configuration back";
        memory.then_some(("changing an export in memory would lose its content", remedy))
    }

    /// Only its limits differ.
    fn lives_on(now: &ExportSpec, next: &ExportSpec) -> bool {
        let without = |spec: &ExportSpec| {
            let mut spec = spec.clone();
            spec.set_limits(LimitsSpec::default());
            spec
        };
        without(now) == without(next)
    }

    async fn become_next(&self, next: Record<ExportSpec>) -> Result<(), Refusal> {
        let _changing = self.service.changing.lock().await;
        let record = self.note().read();
        self.limit(ExportRecord { configured: next.configured, now: next.now, ..record }).await
    }

    async fn rejoin(&self) -> Result<(), Refusal> {
        Ok(())
    }

    async fn open(
        record: ExportRecord,
        context: &Arc<DaemonContext>,
        listeners: &Arc<Listeners>,
    ) -> Result<PublishedDisk, Refusal> {
        PublishedDisk::start(record, context, listeners).await
    }

    async fn leave(&self, next: Option<&ExportSpec>) {
        if next.is_none() {
            let file = self.service.reservations.clone();
            let _ = blocking(move || {
                file.remove();
                Ok(())
            })
            .await;
        }
        let stays = next.is_some_and(|next| next.backing.same_content(&self.note().read().now.backing));
        Shown::leave(&self.shown, !stays).await;
    }

    fn service(&self) -> &ServedExport {
        &self.service
    }

    async fn report(&self) -> ExportReport {
        let mut report = self.busy();
        let Some(look) = self.look().await else { return report };
        let Look { connections, summed, ends, totals, taken, reservations } = look;
        report.state = ServedState::Served;
        report.backing = self.shown.lock().unwrap_or_else(PoisonError::into_inner).report();
        (report.size, report.read_only) = (self.service.door.published().bytes(), self.read_only);
        report.trouble = self.service.door.told().troubled();
        report.instance = Some(self.service.door.instance().now());
        report.refused = self.service.door.refused();
        report.claim = self.service.door.claim().map(|record| ClaimReport {
            generation: record.generation,
            holder: record.name,
            held: record.held,
            since_s: record.since,
        });
        (report.connections, report.summed_connections) = (connections, summed);
        (report.ends, report.totals) = (ends, totals);
        (report.reserved_iops, report.reserved_bandwidth) = (taken.requests, Size(taken.bytes));
        report.reservations = reservations;
        report
    }

    fn blank(record: &ExportRecord, standing: Standing) -> ExportReport {
        let spec = &record.now;
        let Standing { name, state, error, remedy, retry, origin, socket } = standing;
        let mut backing = plain_report(spec.backing.kind());
        if let BackingSpec::File { path, .. } = &spec.backing {
            backing.path = Some(path.clone());
        }
        ExportReport {
            name,
            state,
            error,
            remedy,
            retry,
            origin,
            socket,
            listen: spec.listen.as_ref().map(ListenAddress::to_string),
            tls: spec.tls,
            allow: spec.allow.as_ref().map(HostList::to_string),
            backing,
            size: 0,
            read_only: spec.read_only,
            trouble: None,
            instance: None,
            claim: None,
            connections: 0,
            summed_connections: 0,
            most_connections: spec.connections.into(),
            ends: BTreeMap::new(),
            refused: 0,
            core: spec.core,
            group: spec.group.clone(),
            iops_limit: spec.iops_limit,
            iops_burst: spec.iops_burst,
            bandwidth_limit: spec.bandwidth_limit,
            bandwidth_burst: spec.bandwidth_burst,
            reserved_iops: 0,
            reserved_bandwidth: Size(0),
            reservations: Vec::new(),
            totals: Counts::default(),
        }
    }
}
