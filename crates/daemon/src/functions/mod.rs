//! PCI functions: opened, served by vfio-user, brought to rest, reported.
//!
//! ```text
//!   FunctionSpec --open--> emulated: a NIC, its port or TAP --\
//!                          host: lease, VFIO, monitor --------+--> Body --> vfio_user: a thread that owns it and a socket each
//! ```
//!
//! Host functions that a daemon had taken when it died are given back first of all: [`recover`].

mod ahead;
mod announce;
mod around;
mod body;
mod carry;
mod emulated;
mod exchange;
mod guard;
mod hold;
mod host;
mod lending;
mod physical;
mod service;
mod state;
mod step;
mod vcpus;
mod vectors;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
pub(crate) use vcpus::are_held;

use ioplane_api::report::{FunctionReport, ServedState, Stage, TrafficReport};
use ioplane_api::spec::{FunctionSpec, ModeWord, SourceSpec};
use ioplane_device::{Access as RegisterAccess, Device, Lifecycle, Presence, Quiescent, RegisterAddress};
use ioplane_hardware::lease::{self, Accepted};
use ioplane_hardware::{Keeper, recover_settings};
use ioplane_host::vfio_user::{self, Handle};

use self::around::FramesFrom;
use self::body::Body;
use self::lending::Lender;
use self::service::{After, ServedFunction};
use super::Daemon;
use super::access::SocketAccess;
use super::context::DaemonContext;
use super::lower::limits;
use super::readings;
use super::registry::{Registered, Registry};
use super::served::{GLANCE, ServedKind, Standing, StateRecord, blocking, no_socket};
use super::state_file::{Entries, FunctionRecord};
use super::switches::Switches;
use crate::config::{Config, Place};
use crate::refusal::Refusal;

pub use host::model_of;

/// Where the host's PCI functions are found.
const SYSFS: &str = "/sys";
/// Where it is remembered, in the run directory, what the host's functions were before they were taken.
const LEASES: &str = "leases";
/// The same of what their physical functions had for them.
const PHYSICAL: &str = "physical";

/// What functions stand on besides the context.
pub struct Functions {
    switches: Arc<Switches>,
    run_dir: PathBuf,
}

impl Functions {
    /// In the daemon's run directory.
    pub fn new(switches: Arc<Switches>, run_dir: PathBuf) -> Self {
        Functions { switches, run_dir }
    }

    /// Where it is remembered what the host's functions were before they were taken.
    pub fn leases(&self) -> PathBuf {
        self.run_dir.join(LEASES)
    }

    /// Where it is remembered what their physical functions had for them before it was changed.
    pub fn physical(&self) -> PathBuf {
        self.run_dir.join(PHYSICAL)
    }
}

/// Gives back what a daemon had taken that died, and writes the image that keeps QEMU from migrating. Before anything is opened.
pub fn recover(run_dir: &Path, access: SocketAccess) -> Result<(), Refusal> {
    for (address, outcome) in recover_settings(Path::new(SYSFS), &run_dir.join(PHYSICAL)) {
        let function = address.to_string();
        match outcome {
            Ok(()) => tracing::info!(function, "a daemon that died had set it up: as it was before"),
            Err(error) => tracing::warn!(function, %error, "a daemon that died had set it up: not put back"),
        }
    }
    for one in lease::recover(Path::new(SYSFS), &run_dir.join(LEASES)) {
        let function = one.address.to_string();
        match one.outcome {
            Ok(()) => tracing::info!(function, "a daemon that died had it: given back to the host"),
            Err(error) => tracing::warn!(function, %error, "a daemon that died had it: not given back"),
        }
    }
    guard::write(run_dir, access)
}

/// A function that has been opened: what is served, and what has to be ended after it.
struct Opened {
    body: Body,
    /// Done when nothing of the function is left, in that order. May block.
    after: Vec<After>,
}

/// A PCI function that is being served.
pub struct Card {
    served: ServedFunction,
    id: String,
    guard: PathBuf,
    /// What its physical function has for it, of one that can be moved.
    keeper: Option<Arc<Keeper>>,
    /// One look at a time.
    looking: Arc<tokio::sync::Semaphore>,
}

/// Opens what a specification says. May block.
fn open(spec: &FunctionSpec, context: &DaemonContext, below: &Functions) -> Result<Opened, Refusal> {
    match &spec.source {
        SourceSpec::Emulated { chip, cable, mac } => {
            emulated::open(&spec.name, *chip, cable, *mac, context, &below.switches)
        }
        SourceSpec::Host { address, mode, on_fault, forced, unsafe_interrupts, mapped, uplink, .. } => {
            let accepted = Accepted { in_use: *forced, unsafe_interrupts: *unsafe_interrupts };
            let frames = FramesFrom { address: *address, uplink: uplink.clone() };
            let pages = lending::path_beside(&context.socket(spec));
            let mapped = mapped.then_some(pages.as_path());
            host::open(&spec.name, frames, *mode, *on_fault, mapped, accepted, below)
        }
    }
}

/// Vendor and device, as people write them.
fn id_of(body: &mut Body) -> String {
    let mut bytes = [0; 4];
    body.access(RegisterAddress::Config(0), RegisterAccess::Read(&mut bytes));
    let [a, b, c, d] = bytes;
    format!("{b:02x}{a:02x}:{d:02x}{c:02x}")
}

/// How a function is, but for what only its device knows.
fn look(record: &FunctionRecord, handle: &Handle<Body>, id: &str, guard: PathBuf) -> FunctionReport {
    let standing = Standing::new(record, handle.socket().to_owned(), ServedState::Served, None);
    let mut report = Card::blank(record, standing);
    let status = handle.status();
    report.connected = status.connected;
    report.connections = status.connections;
    report.vm = status.peer.map(readings::vm);
    report.front_end_faults =
        status.faults.into_iter().map(|(name, count)| (name.into_owned(), count)).collect();
    report.last_front_end_fault = status.last_fault;
    report.traffic = TrafficReport {
        reads: status.region_reads,
        writes: status.region_writes,
        interrupts: status.irqs,
        memory_bytes: status.dma_shared_bytes,
        memory_ranges: status.dma_shared,
        forced: status.forced,
    };
    report.stage = stage(handle.presence());
    let resumes_by_itself = handle.held().filter(|left| *left < Duration::MAX);
    report.held_ms = resumes_by_itself.map(|left| left.as_millis() as u64);
    report.id = Some(id.to_owned()).filter(|id| !id.is_empty());
    report.step = step::now(record, report.connections, report.connected);
    report.guard = guard;
    report
}

fn stage(presence: Presence) -> Stage {
    match presence {
        Presence::Running => Stage::Running,
        Presence::Quiescing => Stage::Quiescing,
        Presence::Held => Stage::Held,
        Presence::Away | Presence::Closed => Stage::Away,
    }
}

impl Card {
    fn start(
        record: FunctionRecord,
        context: &Arc<DaemonContext>,
        below: &Functions,
    ) -> Result<Card, Refusal> {
        let record = step::restarted(record);
        let Opened { mut body, after } = open(&record.now, context, below)?;
        let placement = Arc::new(context.placement(&record));
        let name = record.now.name.clone();
        let (id, keeper) = (id_of(&mut body), body.keeper().cloned());
        let served = || -> Result<(Handle<Body>, Option<Lender>), Refusal> {
            let running = Quiescent::new(body).resume(&*placement).map_err(|refused| {
                Refusal::failed(format!("{name}: {}", refused.error), "see the log of the daemon")
            })?;
            let socket = context.socket(&record.now);
            let options = vfio_user::Options {
                name: name.clone(),
                limits: limits(&record.now),
                ..vfio_user::Options::new(&socket)
            };
            let handle =
                vfio_user::serve(running, placement, options).map_err(|error| no_socket(&socket, error))?;
            context.access().open(&socket)?;
            let lender = match record.now.source {
                SourceSpec::Host { mode: ModeWord::Migratable, mapped: true, .. } => {
                    Some(Lender::begin(&socket, context.access(), &handle)?)
                }
                _ => None,
            };
            Ok((handle, lender))
        };
        let written = |(handle, lender)| -> Result<_, Refusal> {
            Ok((StateRecord::begin(record.clone(), &context.state_file)?, handle, lender))
        };
        match served().and_then(written) {
            Ok((note, handle, lender)) => Ok(Card {
                served: ServedFunction::new(handle, note, after, lender),
                id,
                keeper,
                guard: guard::path(&below.run_dir),
                looking: Arc::new(tokio::sync::Semaphore::new(1)),
            }),
            Err(refused) => {
                for end in after {
                    if let Err(more) = end() {
                        tracing::warn!(function = name, error = more.error, "giving it back");
                    }
                }
                Err(refused)
            }
        }
    }

    /// What could not be done when it was stopped.
    pub fn complaint(&self) -> Option<String> {
        self.served.complaint()
    }
}

impl Registered for Card {
    fn registry(daemon: &Daemon) -> &Registry<Card> {
        &daemon.functions
    }
}

impl ServedKind for Card {
    type Spec = FunctionSpec;
    type Report = FunctionReport;
    type Below = Functions;
    type Service = ServedFunction;

    const NAME: &'static str = "PCI function";
    const COMMAND: &'static str = "pci";
    const LET_GO: &'static str = "unplug it or shut the guest down first";

    fn configured(config: &Config) -> &[(FunctionSpec, Place)] {
        &config.functions
    }

    fn records(entries: &mut Entries) -> &mut BTreeMap<String, FunctionRecord> {
        &mut entries.functions
    }

    fn removed(entries: &mut Entries) -> &mut BTreeMap<String, FunctionSpec> {
        &mut entries.removed_functions
    }

    /// Only its policies differ.
    fn lives_on(now: &FunctionSpec, next: &FunctionSpec) -> bool {
        match (&now.source, &next.source) {
            (
                SourceSpec::Host { mode: ModeWord::Virtual, .. },
                SourceSpec::Host { on_fault: policies, .. },
            ) => {
                let mut like = now.clone();
                if let SourceSpec::Host { on_fault, .. } = &mut like.source {
                    *on_fault = *policies;
                }
                *next == like
            }
            _ => false,
        }
    }

    async fn become_next(&self, next: FunctionRecord) -> Result<(), Refusal> {
        let _changing = self.served.changing.lock().await;
        if let SourceSpec::Host { on_fault, .. } = next.now.source {
            let name = self.name();
            let set = self.served.handle.with(move |device| device.with(|body| body.set_policies(on_fault)));
            set.await
                .map_err(|_| hold::gone(&name))?
                .map_err(|error| Refusal::busy(format!("{name}: {error}"), "try again in a moment"))?;
        }
        self.note().change(|record| *record = next)
    }

    async fn open(
        record: FunctionRecord,
        context: &Arc<DaemonContext>,
        below: &Arc<Functions>,
    ) -> Result<Card, Refusal> {
        let (context, below) = (context.clone(), below.clone());
        blocking(move || Card::start(record, &context, &below)).await
    }

    fn service(&self) -> &ServedFunction {
        &self.served
    }

    async fn report(&self) -> FunctionReport {
        // Its thread answers when the device lets it: one question a function waits for that.
        let (handle, id, guard) = (self.served.handle.clone(), self.id.clone(), self.guard.clone());
        let (record, turn) = (self.note().read(), self.looking.clone().acquire_owned());
        let frames = match &record.now.source {
            SourceSpec::Host { address, mode: ModeWord::Migratable, uplink, .. } => {
                Some(FramesFrom { address: *address, uplink: uplink.clone() })
            }
            _ => None,
        };
        let keeper = self.keeper.clone();
        let outside = blocking(move || {
            Ok((frames.and_then(|frames| frames.obstacle()), physical::shown(keeper.as_deref())))
        });
        let look = async {
            let (no_replay, physical) = outside.await.ok()?;
            let turn = turn.await.ok()?;
            let mut report = look(&record, &handle, &id, guard);
            (report.no_replay, report.physical) = (no_replay, physical);
            let looked = handle.with(move |device: &mut Lifecycle<Body>| {
                // One that is being exchanged shows nothing this time.
                let _ = device.with(|body| body.report(&mut report));
                drop(turn);
                report
            });
            looked.await.ok()
        };
        tokio::time::timeout(GLANCE, look).await.ok().flatten().unwrap_or_else(|| self.busy())
    }

    fn blank(record: &FunctionRecord, standing: Standing) -> FunctionReport {
        let spec = &record.now;
        let Standing { name, state, error, remedy, retry, origin, socket } = standing;
        let (model, on_fault) = match &spec.source {
            SourceSpec::Emulated { chip, .. } => (Some(chip.word().to_owned()), None),
            SourceSpec::Host { on_fault, .. } if spec.mode() == "virtual" => {
                (None, Some(on_fault.to_string()))
            }
            SourceSpec::Host { .. } => (None, None),
        };
        FunctionReport {
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
            mode: spec.mode().to_owned(),
            host: spec.address().map(|address| address.to_string()),
            model,
            id: None,
            on_fault,
            switch: spec.switch().map(str::to_owned),
            tap: spec.tap().map(str::to_owned),
            mac: spec.mac().map(|mac| mac.to_string()),
            guard: PathBuf::new(),
            stage: Stage::Running,
            held_ms: None,
            front_end_faults: BTreeMap::new(),
            last_front_end_fault: None,
            traffic: TrafficReport::default(),
            watch: None,
            chip: None,
            hardware_faults: BTreeMap::new(),
            not_reset: None,
            unusable: None,
            no_replay: None,
            physical: None,
            step: None,
            port: None,
            cooperation: None,
            mapped_pages: None,
        }
    }
}
