//! The daemon: control plane of disks, NICs, PCI functions, exports, switches and I/O cores.
//!
//! ```text
//!   CLI, programs --HTTP over control.sock--> api --+--> Registry<Disk>, Registry<Nic> --Handle--> one task per device
//!                                                   |--> Registry<Card> --Handle--> one thread per function (host::vfio_user)
//!                                                   |--> Registry<PublishedDisk> --Ask--> one task per export (nbd::export)
//!   SIGHUP ------------------------------> reload --+--> Switches --> ports of NICs, uplinks     (host::vhost_user)
//!   Prometheus --HTTP on loopback----> metrics -----+--> Cores --> Pool    (I/O cores) <-- pool: how many, and which queue is where
//!                                                   \--> StateFile: state.json, for the daemon after a crash
//! ```
//!
//! Must not know: the command line, how anything is printed; rings, guests, what a backing does.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only the binary uses it: a comment says what a name does not")]

mod access;
mod api;
mod arrivals;
mod capture;
mod check;
mod choices;
mod claim_folder;
pub mod config;
mod context;
mod cores;
mod devices;
mod disk;
mod events;
mod exporters;
mod exports;
mod flush_ledger;
mod follow;
mod functions;
mod groups;
#[cfg(feature = "kill-points")]
mod kill;
mod ledger;
mod listen;
mod lower;
mod metrics;
mod nic;
mod paths;
mod pausing;
mod pcapng;
mod peers;
mod pool;
mod readings;
mod refusal;
mod registry;
mod reload;
mod retry;
mod retry_state;
mod revocations;
mod save;
mod serve;
mod served;
mod small_file;
mod state_file;
mod switches;
mod taps;
#[cfg(test)]
mod tests;
mod upgrade;

use std::collections::BTreeMap;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ioplane_api::refusal::Code;
use ioplane_api::report::{CoreReport, EventWord, StatusReport, UpgradeReport};
use ioplane_api::spec::{CoreSpec, Flaw, ServedSpec, SpecFields};
use ioplane_identity::IdentityDirectory;

use crate::config::{Config, Problems};
use arrivals::Arrivals;
use choices::{Choices, WithChoices};
use context::{DaemonContext, DaemonPaths};
use cores::Cores;
use devices::DirectoryClient;
use disk::Disk;
use exports::{Listeners, PublishedDisk};
use functions::{Card, Functions};
use groups::Groups;
use nic::Nic;
use peers::Peers;
use pool::ElasticPool;
use registry::{OnFailure, Registered, Registry};
use served::ServedKind;
use state_file::{DiskRecord, ExportRecord, FunctionRecord, NicRecord, Record, StateFile};
use switches::Switches;

pub use check::{Checked, check};
pub use functions::model_of;
pub use paths::Invocation;
pub use refusal::Refusal;
pub use serve::serve;

/// How long a daemon that is dying may keep the run directory.
const INHERIT: Duration = Duration::from_secs(10);

/// One in a process.
pub struct Daemon {
    disks: Registry<Disk>,
    nics: Registry<Nic>,
    functions: Registry<Card>,
    exports: Registry<PublishedDisk>,
    switches: Arc<Switches>,
    groups: Arc<Groups>,
    cores: Arc<Cores>,
    pool: ElasticPool,
    /// VMs that other hosts may move here.
    arrivals: Arrivals,
    /// Hosts to which VMs of this one move.
    peers: Peers,
    state_file: Arc<StateFile>,
    config: Mutex<Arc<Config>>,
    reloading: tokio::sync::Mutex<()>,
    started: Instant,
    /// What changes something has a share of this; an upgrade has all of it.
    changes: Arc<tokio::sync::RwLock<()>>,
    /// What an upgrade needs beside the devices: set once the sockets are open.
    handover: OnceLock<upgrade::HandoverContext>,
    /// How everything came here, if from another process.
    upgraded: Mutex<Option<UpgradeReport>>,
    /// Held as long as the process lives.
    lock: std::fs::File,
}

/// Everything that is to be served from the beginning.
struct Starts {
    disks: Vec<DiskRecord>,
    nics: Vec<NicRecord>,
    functions: Vec<FunctionRecord>,
    exports: Vec<ExportRecord>,
}

impl Daemon {
    /// Reads the state file and starts cores and switches; disks and NICs come by [`Daemon::open_all`], and what they need may be
    /// missing. `lock` is [`take`]'s.
    fn start(
        config: Config,
        control: PathBuf,
        run_dir: PathBuf,
        lock: std::fs::File,
    ) -> Result<(Arc<Daemon>, Starts)> {
        let recovered = run_dir.clone();
        let daemon = Daemon::idle(config, control, run_dir, lock)?;
        functions::recover(&recovered, daemon.config().daemon.access)?;
        daemon.start_cores()?;
        daemon.start_groups()?;
        daemon.start_pool()?;
        daemon.start_switches()?;
        let start = Starts {
            disks: daemon.to_serve::<Disk>()?,
            nics: daemon.to_serve::<Nic>()?,
            functions: daemon.to_serve::<Card>()?,
            exports: daemon.to_serve::<PublishedDisk>()?,
        };
        daemon.settle(&daemon.config());
        taps::sweep(&daemon.state_file);
        Ok((Arc::new(daemon), start))
    }

    /// As [`Daemon::start`], for a successor: exactly what the state file says, whatever has been written into the
    /// configuration since it was read; the next reload finds that. Nothing is written.
    fn succeed(
        config: Config,
        control: PathBuf,
        run_dir: PathBuf,
        lock: std::fs::File,
    ) -> Result<Arc<Daemon>> {
        let daemon = Daemon::idle(config, control, run_dir, lock)?;
        for record in daemon.state_file.entries().cores.into_values() {
            if let Some(now) = record.now {
                daemon.cores.start(now, true, record.configured)?;
            }
        }
        Ok(Arc::new(daemon))
    }

    /// One that serves nothing yet.
    fn idle(config: Config, control: PathBuf, run_dir: PathBuf, lock: std::fs::File) -> Result<Daemon> {
        let state_file = Arc::new(StateFile::open(&run_dir.join("state.json"))?);
        let cores = Arc::new(Cores::new(state_file.clone()));
        let groups = Arc::new(Groups::new(state_file.clone()));
        let (access, folder) = (config.daemon.access, run_dir.clone());
        let identity = config.daemon.identity.clone();
        let identity = identity.unwrap_or_else(|| ioplane_identity::DEFAULT_DIRECTORY.into());
        let identity = IdentityDirectory::new(identity);
        let state_dir = paths::state_dir(&config, &run_dir);
        let directory = config.directory.as_ref().map(|(spec, _)| spec.clone());
        let devices = Arc::new(DirectoryClient::new(directory, identity.clone(), &run_dir, &state_dir));
        let claim_wait = config.daemon.claim_wait_s.map(Duration::from_secs);
        let (arrivals, peers) = (Arrivals::new(identity.clone()), Peers::new(identity.clone(), &run_dir));
        let paths = DaemonPaths { run_dir, control, state_dir };
        let context =
            DaemonContext::new(cores.clone(), groups.clone(), state_file.clone(), paths, access, devices);
        let context = Arc::new(context.with_claim_wait(claim_wait));
        let listeners = Arc::new(Listeners::new(identity));
        let switches = Arc::new(Switches::new(context.clone()));
        Ok(Daemon {
            disks: Registry::new(context.clone(), Arc::new(())),
            nics: Registry::new(context.clone(), switches.clone()),
            functions: Registry::new(context.clone(), Arc::new(Functions::new(switches.clone(), folder))),
            exports: Registry::new(context, listeners),
            switches,
            groups,
            cores,
            pool: ElasticPool::new(),
            arrivals,
            peers,
            state_file,
            config: Mutex::new(Arc::new(config)),
            reloading: tokio::sync::Mutex::default(),
            started: Instant::now(),
            changes: Arc::default(),
            handover: OnceLock::new(),
            upgraded: Mutex::default(),
            lock,
        })
    }

    /// Leave to change something, until it is dropped; none while everything is being handed over.
    fn may_change(&self) -> Result<tokio::sync::OwnedRwLockReadGuard<()>, Refusal> {
        self.changes.clone().try_read_owned().map_err(|_| {
            let remedy = "try again: the new one answers in a moment";
            Refusal::new(Code::Upgrading, "the daemon is being upgraded", remedy)
        })
    }

    /// Says to those who listen what has happened.
    fn tell(&self, event: EventWord, kind: &str, name: &str, text: &str) {
        self.disks.context().events.tell(event, kind, name, text);
    }

    /// Everything came from another process.
    fn upgraded(&self, report: UpgradeReport) {
        *self.upgraded.lock().unwrap_or_else(PoisonError::into_inner) = Some(report);
    }

    /// The configuration that holds.
    fn config(&self) -> Arc<Config> {
        self.config.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How each I/O core is.
    fn core_reports(&self) -> Vec<CoreReport> {
        self.cores.report(&self.pool.ending())
    }

    /// The configured cores as they were set at run time, and those added at run time. Those that a pool had started are gone.
    fn start_cores(&self) -> Result<()> {
        let (config, known) = (self.config(), self.state_file.entries().cores);
        let mut wanted: BTreeMap<u32, (CoreSpec, Option<CoreSpec>)> = BTreeMap::new();
        for (spec, _) in &config.cores {
            let (base, now) =
                known.get(&spec.id).map_or((None, None), |r| (r.configured.as_ref(), r.now.as_ref()));
            let merged = match (base, now) {
                (Some(base), None) if base == spec => continue,
                (Some(base), Some(now)) => CoreSpec::three_way(base, spec, now),
                _ => spec.clone(),
            };
            wanted.insert(spec.id, (merged, Some(spec.clone())));
        }
        for (id, record) in &known {
            match &record.now {
                Some(now) if record.configured.is_none() && !now.elastic => {
                    wanted.entry(*id).or_insert((now.clone(), None));
                }
                _ => {}
            }
        }
        if wanted.is_empty()
            && let Some((spec, _)) = config.cores.first()
        {
            wanted.insert(spec.id, (spec.clone(), Some(spec.clone())));
        }
        self.state_file.change(|entries| {
            entries.cores.retain(|id, record| record.now.is_none() || wanted.contains_key(id));
        })?;
        for (mut spec, configured) in wanted.into_values() {
            if let Some(cpu) = spec.cpu.filter(|_| !spec.flaws().is_empty()) {
                tracing::warn!(core = spec.id, cpu, "the processor is gone: the core runs unpinned");
                spec.cpu = None;
            }
            self.cores.start(spec, true, configured)?;
        }
        Ok(())
    }

    /// The configured switches as they were changed at run time, and those added at run time. One whose uplink cannot be had
    /// is kept without it, and it is tried again: guests may be talking over it.
    fn start_switches(&self) -> Result<()> {
        let (config, known) = (self.config(), self.state_file.entries());
        let mut problems = Vec::new();
        for (spec, place) in &config.switches {
            if known.removed_switches.get(&spec.name) == Some(spec) {
                tracing::warn!(switch = spec.name, "removed at run time, so not made; SIGHUP brings it back");
                continue;
            }
            let known = known.switches.get(&spec.name);
            if let Err(refused) = self.switches.add(switches::merged(spec, known), OnFailure::Keep) {
                let reason = format!("switch {}: {}", spec.name, refused.error);
                problems.push(place.problem(Flaw::new("uplink", reason, refused.remedy)));
            }
        }
        for (name, record) in &known.switches {
            let configured = config.switches.iter().any(|(spec, _)| spec.name == *name);
            match record.configured {
                _ if configured => {}
                None => self.switches.add(record.clone(), OnFailure::Keep)?,
                Some(_) => {
                    tracing::warn!(switch = name, "gone from the configuration: no longer there");
                    self.state_file.change(|entries| {
                        entries.switches.remove(name);
                    })?;
                }
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(Problems::new(&config.file, problems).into()) }
    }

    /// What to serve of one kind: what is configured as it was changed at run time, and what was added at run time.
    fn to_serve<K: ServedKind>(&self) -> Result<Vec<Record<K::Spec>>> {
        let (config, mut known) = (self.config(), self.state_file.entries());
        let removed = std::mem::take(K::removed(&mut known));
        let known = std::mem::take(K::records(&mut known));
        let mut start = Vec::new();
        for (spec, _) in K::configured(&config) {
            let (kind, name) = (K::NAME, spec.name());
            if removed.get(name) == Some(spec) {
                tracing::warn!(kind, name, "removed at run time, so not served; SIGHUP brings it back");
                continue;
            }
            let known = known.get(name);
            let record = Record::configured(spec, known);
            if known.is_some_and(|known| known.now != record.now) {
                tracing::warn!(
                    kind,
                    name,
                    "the configuration has another one than was served last: serving that"
                );
            }
            start.push(record);
        }
        let mut gone = Vec::new();
        for (name, record) in &known {
            let configured = K::configured(&config).iter().any(|(spec, _)| spec.name() == name);
            match &record.configured {
                _ if configured => {}
                None => start.push(record.clone()),
                Some(_) => {
                    tracing::warn!(kind = K::NAME, name, "gone from the configuration: no longer served");
                    gone.push(name.clone());
                }
            }
        }
        self.state_file.change(|entries| K::records(entries).retain(|name, _| !gone.contains(name)))?;
        Ok(start)
    }

    /// Opens all of them at once, so that a guest waits only for its own. What cannot be opened is kept as failed, and tried
    /// again: one image that is not there, after a reboot perhaps, is no reason to leave the other guests without theirs.
    async fn open_all(self: Arc<Self>, start: Starts) -> Result<()> {
        let (disks, nics, functions, exports) = tokio::join!(
            self.open::<Disk>(start.disks),
            self.open::<Nic>(start.nics),
            self.open::<Card>(start.functions),
            self.open::<PublishedDisk>(start.exports)
        );
        disks.and(nics).and(functions).and(exports)
    }

    /// Those of one kind.
    async fn open<K: Registered>(self: &Arc<Self>, start: Vec<Record<K::Spec>>) -> Result<()> {
        let mut opening = tokio::task::JoinSet::new();
        for record in start {
            let daemon = self.clone();
            // What fails is in the log, and in every report.
            opening.spawn(async move { K::registry(&daemon).add(record, OnFailure::Keep).await.is_ok() });
        }
        while let Some(opened) = opening.join_next().await {
            opened.with_context(|| format!("opening a {}", K::NAME))?;
        }
        Ok(())
    }

    /// Opens the functions and exports that a predecessor had: they are not handed over, so nobody uses them.
    async fn open_others(self: Arc<Self>) {
        let entries = self.state_file.entries();
        tokio::join!(
            self.functions.bring_back(entries.functions.into_values().collect()),
            self.exports.bring_back(entries.exports.into_values().collect())
        );
    }

    /// Ends the service of everything, at once and whoever is connected.
    async fn stop(&self) {
        let context = self.exports.context().clone();
        context.begin_end();
        self.peers.clear();
        self.devices().leave().await;
        tokio::join!(self.disks.stop(), self.nics.stop(), self.functions.stop());
        // Disks may be clients of these.
        self.exports.stop().await;
        self.exports.below().sessions().end().await;
        self.switches.stop().await;
    }

    /// Takes away what the daemon made for something that is no more.
    async fn sweep(&self) {
        let state_file = self.state_file.clone();
        let swept = served::blocking(move || {
            taps::sweep(&state_file);
            Ok(())
        });
        if let Err(error) = swept.await {
            tracing::error!(%error, "taking TAP devices away");
        }
    }

    /// How the disks, or the NICs, are.
    async fn reports<K>(&self, all: &Registry<K>) -> Vec<K::Report>
    where
        K: ServedKind,
        K::Report: WithChoices,
    {
        let mut reports = all.report().await;
        let choices = Choices::read(self.cores.pool(), |_| true);
        reports.iter_mut().for_each(|report| report.enter(&choices));
        reports
    }

    /// How one of them is.
    async fn report_of<K>(&self, all: &Registry<K>, name: &str) -> Result<K::Report, Refusal>
    where
        K: ServedKind,
        K::Report: WithChoices,
    {
        let mut report = all.report_of(name).await?;
        report.enter(&Choices::read(self.cores.pool(), |device| device == name));
        Ok(report)
    }

    /// How everything is. Everything is asked at once: it takes as long as the slowest answer, a second at most.
    async fn status(&self) -> StatusReport {
        let (mut disks, mut nics, functions, exports) = tokio::join!(
            self.disks.report(),
            self.nics.report(),
            self.functions.report(),
            self.exports.report()
        );
        let choices = Choices::read(self.cores.pool(), |_| true);
        disks.iter_mut().for_each(|disk| disk.enter(&choices));
        nics.iter_mut().for_each(|nic| nic.enter(&choices));
        StatusReport {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            config: self.config().file.clone(),
            disks,
            switches: self.switches.report(),
            nics,
            groups: self.group_reports(),
            functions,
            exports,
            cores: self.core_reports(),
            pool: self.pool.report(&self.cores),
            decisions: self.pool.last_decisions(),
            upgrade: self.upgraded.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

/// Makes the run directory and takes it for this process: two daemons in one would overwrite each other's state file.
fn take(run_dir: &Path, control: &Path) -> Result<std::fs::File> {
    std::fs::create_dir_all(run_dir)
        .with_context(|| format!("make the run directory {} (run_dir in [daemon])", run_dir.display()))?;
    if std::os::unix::net::UnixStream::connect(control).is_ok() {
        bail!(
            "another ioplane daemon listens on {}\n  hint: stop that one, or give this one another --socket",
            control.display()
        );
    }
    let path = run_dir.join("ioplane.lock");
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    let end = Instant::now() + INHERIT;
    while let Err(errno) = rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
        let holder = std::fs::read_to_string(&path).unwrap_or_default();
        let holder: u32 = holder.trim().parse().unwrap_or(0);
        let alive = alive(holder);
        if errno != rustix::io::Errno::WOULDBLOCK || alive || Instant::now() >= end {
            bail!(
                "the run directory {} is in use by another ioplane daemon (pid {holder})\n  hint: stop that one, or give this \
                 one another run_dir",
                run_dir.display()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    std::fs::write(&path, format!("{}\n", std::process::id()))
        .with_context(|| format!("write {}", path.display()))?;
    Ok(file)
}

/// Whether a process runs: neither gone, nor dead and not yet buried.
fn alive(pid: u32) -> bool {
    readings::state_of(pid).is_some_and(|state| !matches!(state, 'Z' | 'X' | 'x'))
}
