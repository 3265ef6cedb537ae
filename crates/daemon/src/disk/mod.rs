//! One disk: opened, served, changed, reported.

mod commit;
mod converge;
mod ends;
mod held;
mod mark;
mod migration_socket;
mod passage;
mod remote;
mod replace;
mod reserve;
mod settings;
mod swap;
mod swap_kill;
mod swap_rule;
mod switch;
mod verify;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_api::refusal::Code;
use ioplane_api::report::{
    BackingReport, Counts, DiskReport, DiskSocket, QueueReport, ServedState, VmPauseReport, VmPauseWord,
};
use ioplane_api::size::Size;
use ioplane_api::spec::{
    BackingSpec, DirectWord, DiskSpec, EngineWord, FormatWord, LimitsSpec, OnTimeout, QUEUE_SIZE_MAX,
    StartWord, TimeoutSpec,
};
use ioplane_device::QuiescenceProof;
use ioplane_nbd::import::{ClaimWish, Import};
use ioplane_storage::{Backing, FileBacking, FileOptions, ImageId, MemoryBacking, Raw};
use ioplane_virtio::DeviceLimits;
use ioplane_virtio::blk::{Blk, BlkOptions};

use super::Daemon;
use super::context::{DaemonContext, Opener};
use super::groups::Membership;
use super::lower::{Lower, limit};
use super::readings;
use super::registry::{Registered, Registry};
use super::served::{Queued, Served, ServedKind, Standing, blocking};
use super::state_file::{DiskRecord, Entries};
use crate::config::{Config, Place};
use crate::refusal::Refusal;
use held::Opening;

pub use remote::exporter_news;
pub use replace::{Beside, Changing};

/// How long a disk that is closed is flushed, and then gives back what it has at an exporter.
const LEAVE: Duration = Duration::from_secs(3);
/// How long a disk that goes waits for a change of its settings: longer than an exporter may take to answer.
const SETTINGS: Duration = Duration::from_secs(12);
/// How long a disk that is busy keeps others waiting for what is the same for all.
const OTHERS_WAIT: Duration = Duration::from_millis(100);
/// How often the log says that an image is still being waited for.
const NEWS: Duration = Duration::from_secs(2);

/// A backing and what is known about it that the guest does not see.
pub struct Opened {
    pub backing: Arc<dyn Backing>,
    /// What is said of it.
    pub report: BackingReport,
    /// Which image it is.
    pub image: Option<ImageId>,
    /// The same backing, where it is another machine's.
    pub import: Option<Arc<Import>>,
}

/// What is said of a backing of which only the kind is known.
pub fn plain_report(kind: &str) -> BackingReport {
    BackingReport {
        kind: kind.to_owned(),
        path: None,
        engine: None,
        why_threads: None,
        direct: None,
        remote: None,
    }
}

impl Opened {
    fn memory(backing: Arc<MemoryBacking>) -> Self {
        Opened { backing, report: plain_report("memory"), image: None, import: None }
    }

    fn remote(import: Arc<Import>) -> Self {
        let backing = import.clone();
        Opened { backing, report: plain_report("remote"), image: None, import: Some(import) }
    }

    fn file(backing: Arc<FileBacking>, path: &Path) -> Self {
        let report = BackingReport {
            path: Some(path.to_owned()),
            engine: Some(backing.engine().to_string()),
            why_threads: backing.why_threads().map(str::to_owned),
            direct: Some(backing.is_direct()),
            ..plain_report("file")
        };
        let image = backing.id();
        Opened { backing, report, image, import: None }
    }
}

/// How an image is opened; `known` is the one that was served as raw before.
fn file_options(
    (read_only, logical_block): (bool, Option<u32>),
    path: &Path,
    (format, direct, engine): (Option<FormatWord>, DirectWord, EngineWord),
    known: Option<ImageId>,
    owner: &Path,
) -> FileOptions {
    let raw = match format {
        Some(FormatWord::Raw) => Raw::Stated,
        None => known.map_or(Raw::Probed, Raw::Remembered),
    };
    FileOptions {
        read_only,
        raw,
        direct: direct.lower(),
        engine: engine.lower(),
        logical_block,
        owner: Some(owner.display().to_string()),
        ..FileOptions::new(path)
    }
}

/// Opens what is behind a disk that another process serves, beside it. `file` is that one's; a disk of another machine has none.
pub fn adopt(record: &DiskRecord, owner: &Opener, file: Option<OwnedFd>) -> Result<Opened, Refusal> {
    match (&record.now.backing, file) {
        (BackingSpec::Memory { bytes }, Some(file)) => {
            Ok(Opened::memory(MemoryBacking::adopt(file, *bytes)?))
        }
        // A connection of its own, by which nothing is asked for until the predecessor is done with its own.
        (BackingSpec::Remote { .. }, None) => {
            let owner = Opener { wish: ClaimWish::Inherit, ..owner.clone() };
            Ok(Opened::remote(remote::open(&record.now.backing, &owner)?))
        }
        (BackingSpec::File { path, format, direct, engine }, Some(file)) => {
            let how = (*format, *direct, *engine);
            let shape = (record.now.read_only, record.now.block_size);
            let options = file_options(shape, path, how, record.image, &owner.socket);
            let backing = FileBacking::adopt(&options, file)?;
            if let Some(bytes) = record.bytes.filter(|bytes| *bytes < backing.info().bytes) {
                backing.resize(bytes)?;
            }
            Ok(Opened::file(backing, path))
        }
        (backing, file) => {
            let came = if file.is_some() { "came with a descriptor" } else { "came without a descriptor" };
            let what = format!("{} {came}", backing.name());
            Err(Refusal::failed(what, "this is a bug: report it with the log"))
        }
    }
}

/// The device that a disk is to its guest, in a group.
pub fn model(spec: &DiskSpec, backing: Arc<dyn Backing>, membership: Membership) -> Blk {
    let options = BlkOptions {
        name: spec.name.clone(),
        serial: spec.serial.clone(),
        queues: spec.queues,
        queue_size: QUEUE_SIZE_MAX,
        read_only: spec.read_only,
        logical_block: spec.block_size,
    };
    let (mut blk, mut limits) = (Blk::new(options, backing), DeviceLimits::default());
    limit(&mut limits, &spec.limits());
    let Membership { share, limits: [shared, ..] } = membership;
    limits.join(shared);
    blk.set_limits(limits);
    blk.set_share(share);
    blk
}

/// Opens what is behind a disk, or is to be, as its record has it. Blocks: while I/O of a daemon that died is still in flight there, up to a minute.
pub fn open(record: &DiskRecord, opening: Opening, owner: &Opener) -> Result<Opened, Refusal> {
    let spec = &record.now;
    let owner = &Opener { wish: record.claim, ..owner.clone() };
    let opened =
        open_backing(&spec.name, &spec.backing, (spec.read_only, spec.block_size), record.image, owner)?;
    let info = opened.backing.info();
    let unit = u64::from(spec.block_size.unwrap_or(info.logical_block).max(info.logical_block));
    if let BackingSpec::File { path, .. } = &spec.backing
        && !info.bytes.is_multiple_of(unit)
    {
        return Err(Refusal::invalid(
            format!("{} has {} bytes, which is no multiple of {unit}", path.display(), info.bytes),
            format!("truncate -s {} {}", info.bytes.next_multiple_of(unit), path.display()),
        ));
    }
    held::check(&opened, &spec.backing, opening, owner)?;
    if let Some(bytes) = record.bytes.filter(|bytes| *bytes < info.bytes) {
        opened.backing.resize(bytes)?;
    }
    Ok(opened)
}

/// Opens a backing for `device`, on whose behalf `owner` is written into locks, unless it says that it is not to be used. Blocks as
/// [`open`] does.
pub fn open_backing(
    device: &str,
    backing: &BackingSpec,
    shape: (bool, Option<u32>),
    known: Option<ImageId>,
    owner: &Opener,
) -> Result<Opened, Refusal> {
    mark::check(backing, &owner.state_file)?;
    open_unchecked(device, backing, shape, known, owner)
}

/// The same, whatever it says.
fn open_unchecked(
    device: &str,
    backing: &BackingSpec,
    shape: (bool, Option<u32>),
    known: Option<ImageId>,
    owner: &Opener,
) -> Result<Opened, Refusal> {
    let (path, how) = match backing {
        BackingSpec::Memory { bytes } => return Ok(Opened::memory(MemoryBacking::new(*bytes)?)),
        BackingSpec::Remote { .. } => return Ok(Opened::remote(remote::open(backing, owner)?)),
        BackingSpec::File { path, format, direct, engine } => (path, (*format, *direct, *engine)),
    };
    let options = file_options(shape, path, how, known, &owner.socket);
    let mut said = Instant::now();
    let file = FileBacking::open_watched(options, &mut |waiting| {
        if said.elapsed() >= NEWS {
            said = Instant::now();
            tracing::info!(
                device,
                image = %path.display(),
                "waited {} s of at most {} s for the image: somebody has it, or I/O of a daemon that died is still in flight",
                waiting.waited.as_secs(),
                waiting.timeout.as_secs()
            );
        }
    })?;
    Ok(Opened::file(file, path))
}

/// A disk that is being served.
pub struct Disk {
    pub(super) served: Served<Disk>,
    pub(super) backing: Arc<Mutex<Shown>>,
    /// The swap that is under way, or the last one.
    pub(super) swap: Mutex<Option<Arc<swap::Swap>>>,
    /// The comparison that is under way, or the last one.
    pub(super) verify: Mutex<Option<Arc<verify::Verify>>>,
    /// One change of limits, group and reservation at a time. Held while an exporter is asked, so nothing else waits for it.
    settings: tokio::sync::Mutex<()>,
    exchanges: passage::Exchanges,
    left: Mutex<Option<Leaving>>,
    /// How it stands with the pause of its VM, and why its server is not reachable, if it was asked while no queue has a connection.
    vm_pause: Mutex<Option<(VmPauseReport, Option<String>)>>,
}

/// What becomes of the backing of a disk that is served no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaving {
    ForGood,
    /// The next disk of that name has it, or the next daemon.
    BackingStays,
}

/// What a report says of a disk's backing.
pub(super) struct Shown {
    report: BackingReport,
    import: Option<Arc<Import>>,
}

impl Shown {
    /// Of one that has been opened.
    pub(super) fn new(opened: &Opened) -> Arc<Mutex<Self>> {
        Arc::new(Mutex::new(Shown { report: opened.report.clone(), import: opened.import.clone() }))
    }

    pub(super) fn report(&self) -> BackingReport {
        BackingReport { remote: self.import.as_deref().map(remote::report), ..self.report.clone() }
    }

    /// What it has reserved at an exporter is for others, although the disk stays.
    async fn give_back_reservation(shown: &Mutex<Shown>) {
        let import = lock(shown).import.clone();
        if let Some(import) = import {
            reserve::give_back(&import).await;
        }
    }

    /// Another import of the same export will say what is reserved.
    async fn end_reservation(shown: &Mutex<Shown>) {
        let import = lock(shown).import.clone();
        if let Some(import) = import {
            let _ = tokio::time::timeout(LEAVE, import.end_reservation()).await;
        }
    }

    /// Nobody uses the backing any more; `gives_back`: nor will.
    pub(super) async fn leave(shown: &Mutex<Shown>, gives_back: bool) {
        let import = lock(shown).import.clone();
        if let Some(import) = import {
            remote::leave(&import, gives_back).await;
        }
    }
}

fn lock(backing: &Mutex<Shown>) -> MutexGuard<'_, Shown> {
    backing.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// One that is served from now on.
    pub(super) fn new(served: Served<Disk>, backing: Arc<Mutex<Shown>>) -> Disk {
        let (swap, verify, settings, exchanges, left, vm_pause) = Default::default();
        Disk { served, backing, swap, verify, settings, exchanges, left, vm_pause }
    }

    /// Set once it is served no more. Whoever writes its record holds that.
    pub(super) fn left(&self) -> MutexGuard<'_, Option<Leaving>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is behind it, where that is another machine's.
    pub(super) fn import(&self) -> Option<Arc<Import>> {
        lock(&self.backing).import.clone()
    }

    /// Says how it stands with the pause of its VM.
    pub(super) fn show_vm_pause(&self, report: VmPauseReport, lost: Option<String>) {
        *self.vm_pause.lock().unwrap_or_else(PoisonError::into_inner) = Some((report, lost));
    }

    /// What was said of it does not hold any more.
    fn hide_vm_pause(&self) {
        *self.vm_pause.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Adds how it stands with the pause of its VM, while that is its policy.
    fn report_vm_pause(&self, report: &mut DiskReport) {
        let record = self.note().read();
        let backing = &record.now.backing;
        if let Some(remote) = &mut report.backing.remote {
            remote::add_policy(remote, backing);
        }
        let OnTimeout::Pause(time, qmp) = backing.on_timeout() else { return };
        let said = self.vm_pause.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (pause, lost) = said.filter(|(said, _)| said.qmp == qmp).unwrap_or_else(|| {
            let (state, timeout_s, qmp) = (VmPauseWord::Armed, time.as_secs(), qmp.to_owned());
            (VmPauseReport { state, why: None, for_ms: None, timeout_s, qmp }, None)
        });
        if let (Some(remote), Some(why)) = (&mut report.backing.remote, lost) {
            remote::add_loss(remote, why);
        }
        report.vm_pause = Some(pause);
    }

    /// A person takes the export as it is: requests that failed are sent to it again.
    pub fn accept(&self) -> Result<(), Refusal> {
        match &lock(&self.backing).import {
            Some(import) => remote::accept(import),
            None => Err(Refusal::conflict("it is no disk of another machine", "there is nothing to accept")),
        }
    }

    /// Changes the size while the guest uses the disk, and tells the guest.
    pub async fn resize(&self, size: Size, shrink: bool) -> Result<(), Refusal> {
        let _changing = self.served.changing.lock().await;
        self.change_size(size, shrink).await
    }

    /// The export behind it has that size by now: so has the disk, if nothing else is being changed at this moment, and `import` is still what it is on.
    pub async fn follow_size(&self, import: &Arc<Import>, size: Size) -> Result<(), Refusal> {
        let busy =
            || Refusal::busy("something else of it is being changed", "wait a second: that is retried");
        let _changing = self.served.changing.try_lock().map_err(|_| busy())?;
        if !self.import().is_some_and(|now| Arc::ptr_eq(&now, import)) {
            return Err(busy());
        }
        self.change_size(size, false).await
    }

    /// Says to front ends that have come since that the configuration has changed, once their rings run. They may know it from before this daemon was
    /// started, and a VMM reads it when it makes the device, and after that only when it is told. `told`: the last one of each socket.
    pub async fn tell_new_front_ends(&self, told: &mut [u64; 2]) {
        for (handle, told) in self.served.handles().iter().zip(told) {
            let Ok(Ok(status)) = tokio::time::timeout(OTHERS_WAIT, handle.status()).await else { continue };
            let runs = status.connected && status.queues.iter().any(|queue| queue.core.is_some());
            if runs && status.connections != *told && handle.change(|_| ((), true)).await.is_ok() {
                *told = status.connections;
            }
        }
    }

    async fn change_size(&self, Size(bytes): Size, shrink: bool) -> Result<(), Refusal> {
        self.not_swapping()?;
        let note = self.served.note.clone();
        let change = move |model: &mut Blk| {
            let before = model.bytes();
            if bytes < before && !shrink {
                let (old, new) = (Size(before), Size(bytes));
                let remedy = "shrink the file system in the guest first, then say --shrink";
                return Err(Refusal::conflict(
                    format!("from {old} to {new}: the guest would lose what lies beyond"),
                    remedy,
                )
                .coded(Code::LosesData)
                .at("size"));
            }
            model.resize(bytes)?;
            note.change(|record| match &mut record.now.backing {
                BackingSpec::Memory { bytes: size } => *size = bytes,
                // A file remembers by itself; a device does not.
                BackingSpec::File { path, .. } => {
                    let device = std::fs::metadata(path).is_ok_and(|meta| !meta.is_file());
                    record.bytes = device.then_some(bytes);
                }
                BackingSpec::Remote { .. } => {}
            })
        };
        let outcome = self
            .served
            .handle
            .change(move |model| {
                // The file system may take its time.
                let before = model.bytes();
                let outcome = tokio::task::block_in_place(|| change(model));
                (outcome, before != model.bytes())
            })
            .await?;
        if let Some(second) = self.served.second().filter(|_| outcome.is_ok()) {
            // The size is one; who is connected there wants to know.
            second.change(|_| ((), true)).await?;
        }
        outcome
    }

    /// Puts `fresh` behind the disk at a quiescent point, if `allowed` has nothing against it there, and gives the one before. `noted` writes
    /// down that it is there, before the guest's next request; if that fails, the one before comes back.
    async fn exchange(
        &self,
        fresh: Arc<dyn Backing>,
        allowed: impl FnOnce(&Blk) -> Result<(), Refusal> + Send + 'static,
        noted: impl FnOnce() -> Result<(), Refusal> + Send + 'static,
    ) -> Result<Arc<dyn Backing>, Refusal> {
        let new = fresh.clone();
        let exchange = move |model: &mut Blk, proof: &QuiescenceProof| {
            let before = model.bytes();
            allowed(model)?;
            let old = model.replace_backing(proof, new).map_err(|why| {
                Refusal::conflict(why, "give a backing that keeps what the guest was promised")
            })?;
            if let Err(refused) = noted() {
                return match model.replace_backing(proof, old) {
                    Ok(_) => Err(refused),
                    Err(why) => Err(Refusal::failed(
                        format!("{refused}; and the old backing would not come back: {why}"),
                        "the guest uses the new backing: write it into the configuration",
                    )),
                };
            }
            Ok((old, before != model.bytes()))
        };
        let exchange =
            move |model: &mut Blk, proof: &QuiescenceProof| match tokio::task::block_in_place(|| {
                exchange(model, proof)
            }) {
                Ok((old, told)) => (Ok(old), told),
                Err(refused) => (Err(refused), false),
            };
        let first = &self.served.handle;
        match self.served.second() {
            None => first.at_quiescence(exchange).await?,
            Some(second) => migration_socket::exchange_both(first, &second, fresh, exchange).await,
        }
    }
}

impl Registered for Disk {
    fn registry(daemon: &Daemon) -> &Registry<Disk> {
        &daemon.disks
    }
}

impl ServedKind for Disk {
    type Spec = DiskSpec;
    type Report = DiskReport;
    type Below = ();
    type Service = Served<Disk>;

    const NAME: &'static str = "disk";
    const COMMAND: &'static str = "disk";
    const LET_GO: &'static str =
        "unplug it or shut the guest down first; a backing is exchanged by `ioplane disk replace`";

    fn configured(config: &Config) -> &[(DiskSpec, Place)] {
        &config.disks
    }

    fn loses(record: &DiskRecord) -> Option<(&'static str, &'static str)> {
        let memory = matches!(record.now.backing, BackingSpec::Memory { .. });
        let remedy = "if it may be lost, `ioplane disk remove` it first; or put the configuration back";
        memory.then_some(("changing a disk in memory would lose its content", remedy))
    }

    /// Only its limits, its reservation, its group and what happens when its server cannot be reached differ, and what is said of the image's format: what is open is raw.
    fn lives_on(now: &DiskSpec, next: &DiskSpec) -> bool {
        let without = |spec: &DiskSpec| {
            let mut spec = spec.clone();
            spec.set_limits(LimitsSpec::default());
            spec.group = None;
            spec.backing.set_reserved(LimitsSpec::default());
            spec.backing.set_on_timeout(&TimeoutSpec::none());
            spec.at_start = None;
            if let BackingSpec::File { format, .. } = &mut spec.backing {
                *format = None;
            }
            spec
        };
        without(now) == without(next)
    }

    fn waits_when_added(spec: &DiskSpec) -> bool {
        spec.at_start == Some(StartWord::Wait)
    }

    async fn become_next(&self, next: DiskRecord) -> Result<(), Refusal> {
        self.follow_configuration(next).await
    }

    async fn rejoin(&self) -> Result<(), Refusal> {
        let _changing = self.served.changing.lock().await;
        self.follow(&self.note().read()).await
    }

    fn records(entries: &mut Entries) -> &mut BTreeMap<String, DiskRecord> {
        &mut entries.disks
    }

    fn removed(entries: &mut Entries) -> &mut BTreeMap<String, DiskSpec> {
        &mut entries.removed
    }

    async fn open(
        mut record: DiskRecord,
        context: &Arc<DaemonContext>,
        _below: &Arc<()>,
    ) -> Result<Disk, Refusal> {
        let (wanted, owner) = (record.clone(), context.disk_opener(&record.now));
        let state_file = context.state_file.clone();
        let opened = blocking(move || {
            swap::recover(&wanted, &state_file)?;
            open(&wanted, Opening::Itself, &owner)
        })
        .await;
        let opened = opened.map_err(|refused| match record.now.at_start {
            Some(StartWord::Refuse) => Refusal { retry: false, ..refused },
            _ => refused,
        })?;
        // From here on its guest may write whatever it likes into this image.
        record.image = opened.image;
        if let (ClaimWish::New, Some(import)) = (record.claim, &opened.import) {
            // A claim that an earlier disk could not give back: nobody uses this one yet.
            import.rest_if_unused();
        }
        record.claim = ClaimWish::Own;
        let backing = Shown::new(&opened);
        let model = model(&record.now, opened.backing, context.groups.membership(&record.now));
        let served = match Served::start(model, record, context) {
            Ok(served) => served,
            Err(refused) => {
                Shown::give_back_reservation(&backing).await;
                return Err(refused);
            }
        };
        Ok(Disk::new(served, backing))
    }

    fn may_be_removed(&self) -> Result<(), Refusal> {
        self.not_swapping()
    }

    async fn leave(&self, next: Option<&DiskSpec>) {
        let stays = next.is_some_and(|next| next.backing.same_content(&self.note().read().now.backing));
        *self.left() = Some(if stays { Leaving::BackingStays } else { Leaving::ForGood });
        if let Some(import) = self.import() {
            import.stop_reserving();
        }
        // A change of settings that waited for an exporter finds that, and gives back what it was granted before a disk of this name comes again.
        let _settled = tokio::time::timeout(SETTINGS, self.settings.lock()).await;
        Shown::leave(&self.backing, !stays).await;
        match next.filter(|_| stays) {
            // The next one does not ask for any.
            Some(next) if next.backing.reserved() == LimitsSpec::default() => {
                Shown::give_back_reservation(&self.backing).await;
            }
            Some(_) => Shown::end_reservation(&self.backing).await,
            None => {}
        }
    }

    fn service(&self) -> &Served<Disk> {
        &self.served
    }

    async fn report(&self) -> DiskReport {
        let mut report = self.busy();
        report.backing = lock(&self.backing).report();
        self.report_vm_pause(&mut report);
        report.swap = self.swap_report();
        report.verify = self.verify_report();
        let shape = |model: &mut Blk| (model.bytes(), model.read_only());
        let (second, seen) = tokio::join!(self.served.second_status(), self.served.glance(shape));
        let Some((mut status, (size, read_only))) = seen else { return report };
        report.owner = status.owner.then_some(DiskSocket::Socket);
        report.waiting = status.waiting.then_some(DiskSocket::Socket);
        if let Some(theirs) = second {
            migration_socket::add(&mut report, theirs, &mut status);
        }
        (report.size, report.read_only) = (size, read_only);
        report.state = ServedState::Served;
        report.connected = status.connected;
        report.connections = status.connections;
        report.vm = status.peer.map(readings::vm);
        report.features = status.features;
        (report.front_end_faults, report.last_front_end_fault) = readings::faults_of(&status);
        report.mappings = status.mappings;
        report.totals = readings::sum(&status.queues);
        report.queues = status.queues.into_iter().map(readings::queue).collect();
        report
    }

    fn blank(record: &DiskRecord, standing: Standing) -> DiskReport {
        let spec = &record.now;
        let Standing { name, state, error, remedy, retry, origin, socket } = standing;
        let (kind, path, size) = match &spec.backing {
            BackingSpec::File { path, .. } => ("file", Some(path.clone()), 0),
            BackingSpec::Memory { bytes } => ("memory", None, *bytes),
            BackingSpec::Remote { .. } => ("remote", None, 0),
        };
        let backing = BackingReport { path, ..plain_report(kind) };
        DiskReport {
            name,
            state,
            error,
            remedy,
            retry,
            origin,
            connected: false,
            connections: 0,
            vm: None,
            socket,
            migration_socket: spec.migration_socket.clone(),
            owner: None,
            waiting: None,
            backing,
            swap: None,
            verify: None,
            vm_pause: None,
            size,
            read_only: spec.read_only,
            serial: spec.serial.clone(),
            queue_size: spec.queue_size,
            core: spec.core,
            group: spec.group.clone(),
            iops_limit: spec.iops_limit,
            iops_burst: spec.iops_burst,
            bandwidth_limit: spec.bandwidth_limit,
            bandwidth_burst: spec.bandwidth_burst,
            features: 0,
            front_end_faults: Default::default(),
            last_front_end_fault: None,
            mappings: 0,
            totals: Counts::default(),
            queues: (0..spec.queues).map(QueueReport::blank).collect(),
        }
    }
}

impl Queued for Disk {
    type Model = Blk;

    fn second_instance(model: &Blk) -> Option<Blk> {
        Some(model.second_instance())
    }
}
