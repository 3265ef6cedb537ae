//! One disk: opened, served, changed, reported.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_device::MeterReading;
use ioplane_host::vhost_user::{self, Handle, ServerOptions};
use ioplane_storage::{Backing, FileBacking, FileOptions, MemoryBacking};
use ioplane_virtio::blk::{Blk, BlkOptions};

use super::cores::Seating;
use super::ledger::{DiskRecord, Ledger};
use crate::refusal::Refusal;
use crate::report::{BackingReport, Counts, DiskReport, DiskState, FaultReport, QueueReport};
use crate::size::Size;
use crate::spec::{BackingSpec, DiskSpec, QUEUE_SIZE_MAX};

/// How long a report waits for a device that is busy with a change.
const GLANCE: Duration = Duration::from_secs(1);
/// How often the log says that an image is still being waited for.
const NEWS: Duration = Duration::from_secs(2);

/// A backing and what is known about it that the guest does not see.
pub struct Opened {
    backing: Arc<dyn Backing>,
    report: BackingReport,
}

/// Opens what is behind a disk. Blocks: while I/O of a daemon that died is still landing there, up to a minute.
pub fn open(
    spec: &DiskSpec,
    backing: &BackingSpec,
    bytes: Option<u64>,
    owner: &Path,
) -> Result<Opened, Refusal> {
    let (path, direct, engine) = match backing {
        BackingSpec::Memory { bytes } => {
            let report = BackingReport {
                kind: "memory".to_owned(),
                path: None,
                engine: None,
                why_threads: None,
                direct: None,
            };
            return Ok(Opened { backing: MemoryBacking::new(*bytes)?, report });
        }
        BackingSpec::File { path, direct, engine } => (path, direct, engine),
    };
    let options = FileOptions {
        read_only: spec.read_only,
        direct: direct.below(),
        engine: engine.below(),
        logical_block: spec.block_size,
        owner: Some(owner.display().to_string()),
        ..FileOptions::new(path)
    };
    let mut said = Instant::now();
    let file = FileBacking::open_watched(options, &mut |waiting| {
        if said.elapsed() >= NEWS {
            said = Instant::now();
            tracing::info!(
                disk = spec.name,
                image = %path.display(),
                "waited {} s of at most {} s for the image: somebody has it, or I/O of a daemon that died is still landing",
                waiting.waited.as_secs(),
                waiting.patience.as_secs()
            );
        }
    })?;
    let info = file.info();
    let unit = u64::from(spec.block_size.unwrap_or(info.logical_block).max(info.logical_block));
    if !info.bytes.is_multiple_of(unit) {
        return Err(Refusal::invalid(
            format!("{} has {} bytes, which is no multiple of {unit}", path.display(), info.bytes),
            format!("truncate -s {} {}", info.bytes.next_multiple_of(unit), path.display()),
        ));
    }
    if let Some(bytes) = bytes.filter(|bytes| *bytes < info.bytes) {
        file.resize(bytes)?;
    }
    let report = BackingReport {
        kind: "file".to_owned(),
        path: Some(path.clone()),
        engine: Some(file.engine().to_string()),
        why_threads: file.why_threads().map(str::to_owned),
        direct: Some(file.is_direct()),
    };
    Ok(Opened { backing: file, report })
}

/// What of a disk changes while it is served.
struct Current {
    record: DiskRecord,
    backing: BackingReport,
}

/// A disk that is being served. Its device is owned by a task of its own; this is the daemon's hold on it.
pub struct Disk {
    handle: Handle<Blk>,
    current: Arc<Mutex<Current>>,
    ledger: Arc<Ledger>,
    /// One change at a time.
    changing: tokio::sync::Mutex<()>,
}

fn lock(current: &Mutex<Current>) -> MutexGuard<'_, Current> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// Serves a disk on its socket, and writes down that it does.
    pub fn serve(
        record: DiskRecord,
        opened: Opened,
        socket: PathBuf,
        seating: Seating,
        ledger: Arc<Ledger>,
    ) -> Result<Disk, Refusal> {
        let spec = &record.now;
        let options = BlkOptions {
            name: spec.name.clone(),
            serial: spec.serial.clone(),
            queues: spec.queues,
            queue_size: QUEUE_SIZE_MAX,
            read_only: spec.read_only,
            logical_block: spec.block_size,
        };
        ledger.change(|entries| {
            entries.removed.remove(&spec.name);
            entries.disks.insert(spec.name.clone(), record.clone());
        })?;
        let model = Blk::new(options, opened.backing);
        let options = ServerOptions { socket: socket.clone(), pool: Arc::new(seating), dirty_log: false };
        let handle = vhost_user::serve(model, options).map_err(|error| {
            let remedy = "is its folder there and writable, and does no other daemon listen there?";
            Refusal::failed(format!("the socket {}: {error}", socket.display()), remedy)
        })?;
        let current = Arc::new(Mutex::new(Current { record, backing: opened.report }));
        Ok(Disk { handle, current, ledger, changing: tokio::sync::Mutex::default() })
    }

    /// What it is now.
    pub fn record(&self) -> DiskRecord {
        lock(&self.current).record.clone()
    }

    /// Whether a front end is connected; a disk that does not answer is.
    pub async fn in_use(&self) -> bool {
        let status = tokio::time::timeout(GLANCE, self.handle.status()).await;
        status.ok().and_then(Result::ok).is_none_or(|status| status.connected)
    }

    /// Ends the service. Nothing of the disk is left when it returns; the ledger is the caller's business.
    pub async fn stop(&self, force: bool) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        Ok(self.handle.stop(force).await?)
    }

    /// The configuration says the same as before, in another file perhaps: notes that.
    pub fn adopt(&self, configured: Option<DiskSpec>) -> Result<(), Refusal> {
        let mut current = lock(&self.current);
        let record = DiskRecord { configured, ..current.record.clone() };
        write(&self.ledger, &record)?;
        current.record = record;
        Ok(())
    }

    /// Changes the size while the guest uses the disk, and tells the guest.
    pub async fn resize(&self, Size(bytes): Size, shrink: bool) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        let (current, ledger) = (self.current.clone(), self.ledger.clone());
        let change = move |model: &mut Blk| {
            let before = model.bytes();
            if bytes < before && !shrink {
                let (old, new) = (Size(before), Size(bytes));
                let remedy = "shrink the file system in the guest first, then say --shrink";
                return Err(Refusal::conflict(
                    format!("from {old} to {new}: the guest would lose what lies beyond"),
                    remedy,
                ));
            }
            model.resize(bytes)?;
            let mut current = lock(&current);
            let mut record = current.record.clone();
            match &mut record.now.backing {
                BackingSpec::Memory { bytes: size } => *size = bytes,
                // A file remembers by itself; a device does not.
                BackingSpec::File { path, .. } => {
                    let device = std::fs::metadata(path).is_ok_and(|meta| !meta.is_file());
                    record.bytes = device.then_some(bytes);
                }
            }
            write(&ledger, &record)?;
            current.record = record;
            Ok(())
        };
        self.handle
            .change(move |model| {
                // The file system may take its time.
                let before = model.bytes();
                let outcome = tokio::task::block_in_place(|| change(model));
                (outcome, before != model.bytes())
            })
            .await?
    }

    /// Puts another backing behind the disk while the guest uses it. The caller has made the content equal. The ledger is
    /// written at the quiescent point, before the guest's next request can reach the new backing: whenever we are killed, we
    /// come back with the one that has everything.
    pub async fn replace(&self, backing: BackingSpec) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        let mut record = self.record();
        record.now.backing = backing;
        record.bytes = None;
        if let Some(flaw) = record.now.flaws().first() {
            return Err(Refusal::flaws(std::slice::from_ref(flaw)));
        }
        let (spec, owner) = (record.now.clone(), self.handle.socket().to_owned());
        let opened = blocking(move || open(&spec, &spec.backing, None, &owner)).await?;
        let (current, ledger) = (self.current.clone(), self.ledger.clone());
        let exchange = move |model: &mut Blk, still: &ioplane_device::Still| {
            let (before, bytes) = (model.bytes(), opened.backing.info().bytes);
            if bytes < before {
                return Err(Refusal::conflict(
                    format!(
                        "it has {}, and the guest has a disk of {}: it would lose what lies beyond",
                        Size(bytes),
                        Size(before)
                    ),
                    format!(
                        "make it as large: truncate -s {before} IMAGE; or shrink the disk first, by resize --shrink"
                    ),
                ));
            }
            let old = model.replace_backing(still, opened.backing).map_err(|why| {
                Refusal::conflict(why, "give a backing that keeps what the guest was promised")
            })?;
            let mut current = lock(&current);
            if let Err(refused) = write(&ledger, &record) {
                return match model.replace_backing(still, old) {
                    Ok(_) => Err(refused),
                    Err(why) => Err(Refusal::failed(
                        format!("{refused}; and the old backing would not come back: {why}"),
                        "the guest uses the new backing: write it into the configuration",
                    )),
                };
            }
            *current = Current { record, backing: opened.report };
            Ok((old, before != model.bytes()))
        };
        let old = self
            .handle
            .at_quiescence(move |model, still| match tokio::task::block_in_place(|| exchange(model, still)) {
                Ok((old, told)) => (Ok(old), told),
                Err(refused) => (Err(refused), false),
            })
            .await??;
        // Closing an image may wait for its last I/O.
        blocking(move || {
            drop(old);
            Ok(())
        })
        .await
    }

    /// Moves a queue to a core, and remembers it.
    pub async fn move_queue(&self, queue: u16, core: u32, mut seating: Seating) -> Result<(), Refusal> {
        let _changing = self.changing.lock().await;
        let mut record = self.record();
        if queue >= record.now.queues {
            return Err(Refusal::missing(
                format!("disk {} has no queue {queue}", record.now.name),
                format!("it has queues 0 to {}", record.now.queues - 1),
            ));
        }
        record.moved.insert(queue, core);
        seating.moved = record.moved.clone();
        self.handle.move_queue(queue, Arc::new(seating)).await?;
        write(&self.ledger, &record)?;
        lock(&self.current).record = record;
        Ok(())
    }

    /// How it is.
    pub async fn report(&self) -> DiskReport {
        let look = async {
            let status = self.handle.status().await.ok()?;
            let shape = self.handle.change(|model| ((model.bytes(), model.read_only()), false)).await.ok()?;
            Some((status, shape))
        };
        let seen = tokio::time::timeout(GLANCE, look).await.ok().flatten();
        let current = lock(&self.current);
        let mut report = blank(&current.record, self.handle.socket().to_owned(), DiskState::Busy);
        report.backing = current.backing.clone();
        drop(current);
        let Some((status, (size, read_only))) = seen else { return report };
        let meters: Vec<(MeterReading, Vec<u64>)> =
            status.queues.iter().map(|queue| (queue.counts, queue.latency.clone())).collect();
        report.state = DiskState::Served;
        report.connected = status.connected;
        report.connections = status.connections;
        (report.size, report.read_only) = (size, read_only);
        report.features = status.features;
        report.front_end_faults =
            status.faults.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        report.last_front_end_fault = status.last_fault;
        report.totals = Counts::sum(meters.iter().map(|(meter, latency)| (meter, latency.as_slice())));
        report.queues = status
            .queues
            .into_iter()
            .map(|queue| QueueReport {
                index: queue.index,
                size: queue.size,
                core: queue.core,
                fault: queue.fault.map(|(name, text)| FaultReport { name: name.to_owned(), text }),
                counts: Counts::new(&queue.counts, queue.latency),
            })
            .collect();
        report
    }
}

/// A report of a disk of which only the record is known.
pub fn blank(record: &DiskRecord, socket: PathBuf, state: DiskState) -> DiskReport {
    let spec = &record.now;
    let (kind, path, size) = match &spec.backing {
        BackingSpec::File { path, .. } => ("file", Some(path.clone()), 0),
        BackingSpec::Memory { bytes } => ("memory", None, *bytes),
    };
    DiskReport {
        name: spec.name.clone(),
        state,
        error: None,
        remedy: None,
        origin: if record.configured.is_some() { "config" } else { "added" }.to_owned(),
        connected: false,
        connections: 0,
        socket,
        backing: BackingReport { kind: kind.to_owned(), path, engine: None, why_threads: None, direct: None },
        size,
        read_only: spec.read_only,
        serial: spec.serial.clone(),
        queue_size: spec.queue_size,
        core: spec.core,
        features: 0,
        front_end_faults: Default::default(),
        last_front_end_fault: None,
        totals: Counts::default(),
        queues: (0..spec.queues)
            .map(|index| QueueReport { index, size: 0, core: None, fault: None, counts: Counts::default() })
            .collect(),
    }
}

fn write(ledger: &Ledger, record: &DiskRecord) -> Result<(), Refusal> {
    let name = record.now.name.clone();
    Ok(ledger.change(|entries| {
        entries.disks.insert(name, record.clone());
    })?)
}

/// Does what may block on a thread for that.
pub async fn blocking<R: Send + 'static>(
    work: impl FnOnce() -> Result<R, Refusal> + Send + 'static,
) -> Result<R, Refusal> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Refusal::failed(error.to_string(), "this is a bug: report it with the log"))
    })
}
