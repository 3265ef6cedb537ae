//! The daemon that hands over: starts its successor, and gives it everything or nothing.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_api::LOG_VARIABLE;
use ioplane_api::report::{PauseReport, UpgradeReport};
use ioplane_api::request::UpgradeForm;
use tokio::sync::watch;
use tokio::task::block_in_place;

use super::super::Daemon;
use super::super::state_file::{ExportRecord, FunctionRecord};
use super::handover::{AllStopped, HandoverSource, sources};
use super::switch;
use super::wire::{HandoverSocket, HandoverSocketError};
use super::words::{AnswerV1, DaemonV1, DeviceV1, NameV1, OrderV1};
use super::{DRAIN, HOLD, NEWS, PATIENCE};
use crate::paths::Invocation;
use crate::refusal::Refusal;

/// What a daemon needs to be able to leave: its sockets, and a way to tell the main task.
#[derive(Debug)]
pub struct HandoverContext {
    /// How it was started.
    pub invocation: Invocation,
    /// Path of the control socket.
    pub control: PathBuf,
    /// Where state.json is.
    pub run_dir: PathBuf,
    /// The control socket.
    pub listener: OwnedFd,
    /// The metrics' address and socket.
    pub metrics: Option<(SocketAddr, OwnedFd)>,
    /// The process whose everything is, once it is.
    pub left: watch::Sender<Option<u32>>,
}

/// What a successor opens itself.
#[derive(Default)]
struct SetAside {
    functions: Vec<FunctionRecord>,
    exports: Vec<ExportRecord>,
}

/// A successor on its way. Dropped before it has taken over, it is killed and buried.
struct Successor {
    child: Option<Child>,
    binary: PathBuf,
}

impl Successor {
    /// As this one was started, by words that every version knows: an older one has no `-q` and no `-v`.
    fn start(binary: PathBuf, invocation: &Invocation, socket: UnixStream) -> Result<Self, Refusal> {
        let mut command = Command::new(&binary);
        command.args(["serve", "--config"]).arg(&invocation.config);
        if let Some(socket) = &invocation.socket {
            command.arg("--socket").arg(socket);
        }
        command.arg("--inherit").env(LOG_VARIABLE, &invocation.log);
        command.stdin(OwnedFd::from(socket)).stdout(Stdio::null());
        let child = command.spawn().map_err(|error| {
            let remedy = "name the new binary: ioplane upgrade --binary PATH";
            Refusal::invalid(format!("{} cannot be started: {error}", binary.display()), remedy)
        })?;
        Ok(Successor { child: Some(child), binary })
    }

    fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Ends it, and says how it has ended if it had by itself.
    fn end(&mut self) -> Option<String> {
        let mut child = self.child.take()?;
        // It closes its end of the socket a moment before it is dead.
        let end = Instant::now() + Duration::from_millis(200);
        while Instant::now() < end {
            if let Ok(Some(status)) = child.try_wait() {
                return Some(status.to_string());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = child.kill();
        let _ = child.wait();
        None
    }

    /// It is on its own from now on.
    fn release(mut self) -> u32 {
        let pid = self.pid();
        self.child = None;
        pid
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.end();
    }
}

/// The binary that this process was started from, as it is now: a package manager has put another file in its place.
fn own_binary() -> io::Result<PathBuf> {
    let binary = std::env::current_exe()?;
    let text = binary.to_string_lossy();
    Ok(text.strip_suffix(" (deleted)").map_or_else(|| binary.clone(), PathBuf::from))
}

fn refuse(binary: &Path, why: impl std::fmt::Display) -> Refusal {
    Refusal::conflict(
        format!("{} does not take over: {why}", binary.display()),
        "the old daemon keeps serving; its log has the new one's output",
    )
}

/// What stood in the way: the successor's own words, if it had any.
enum Obstacle {
    Wire(HandoverSocketError),
    Said(String, String),
    Ours(Refusal),
}

impl From<HandoverSocketError> for Obstacle {
    fn from(error: HandoverSocketError) -> Self {
        Obstacle::Wire(error)
    }
}

impl From<Refusal> for Obstacle {
    fn from(refused: Refusal) -> Self {
        Obstacle::Ours(refused)
    }
}

/// Waits for an answer that `wanted` knows.
fn answer<T>(
    wire: &mut HandoverSocket,
    wanted: impl FnOnce(AnswerV1) -> Result<T, AnswerV1>,
) -> Result<T, Obstacle> {
    match wire.receive::<AnswerV1>()?.0 {
        AnswerV1::Refused(error, remedy) => Err(Obstacle::Said(error, remedy)),
        other => wanted(other)
            .map_err(|other| HandoverSocketError::Garbled(format!("{other:?}, out of turn")).into()),
    }
}

macro_rules! wait_for {
    ($wire:expr, $pattern:pat => $value:expr) => {
        answer($wire, |answer| match answer {
            $pattern => Ok($value),
            other => Err(other),
        })
    };
}

impl Daemon {
    /// Hands everything over to `form`'s binary. When this returns well the main task has been told to leave; otherwise
    /// everything is as it was.
    pub async fn upgrade(self: &Arc<Self>, form: UpgradeForm) -> Result<UpgradeReport, Refusal> {
        let Ok(alone) = self.changes.try_write() else {
            return Err(Refusal::busy("something is being changed", "try again when that is done"));
        };
        let context =
            self.handover.get().ok_or_else(|| Refusal::busy("the daemon is only starting", "try again"))?;
        let binary = match form.binary {
            Some(binary) => binary,
            None => own_binary().map_err(|error| {
                let remedy = "name it: ioplane upgrade --binary PATH";
                Refusal::failed(format!("where this binary is: {error}"), remedy)
            })?,
        };
        self.functions_are_free().await?;
        self.exports_are_free().await?;
        self.no_disk_is_swapped()?;
        // Switches first: NICs are plugged into them.
        let patience = form.patience_s.map_or(PATIENCE, Duration::from_secs);
        let (mut all, mut failed) = switch::sources(&self.switches)?;
        let rest = async { Ok([sources(&self.nics).await?, sources(&self.disks).await?]) };
        let rest = tokio::time::timeout(patience, rest).await.unwrap_or_else(|_| {
            let remedy =
                "see `ioplane status`: which one does not answer? or try again with a longer --deadline";
            Err(Refusal::busy("a device does not answer", remedy))
        });
        for (more, broken) in rest? {
            all.extend(more);
            failed.extend(broken);
        }
        let (ours, theirs) =
            UnixStream::pair().map_err(|error| Refusal::failed(error.to_string(), "try again"))?;
        let mut successor = block_in_place(|| Successor::start(binary, &context.invocation, theirs))?;
        let mut wire =
            HandoverSocket::on(ours).map_err(|error| Refusal::failed(error.to_string(), "try again"))?;
        tracing::info!(binary = %successor.binary.display(), pid = successor.pid(), "handing over");
        let prepared = block_in_place(|| self.prepare(context, &mut wire, patience, &all, &failed));
        // Nobody uses these; the successor opens them itself.
        let mut aside = SetAside::default();
        let outcome = match prepared {
            Ok(version) => match self.set_aside(&mut aside).await {
                Ok(()) => self.hand_all(&mut wire, &mut successor, all).await.map(|held| (version, held)),
                Err(refused) => Err(Obstacle::Ours(refused)),
            },
            Err(obstacle) => Err(obstacle),
        };
        let (version, held) = match outcome {
            Ok(done) => done,
            Err(obstacle) => {
                let refused = block_in_place(|| explain(&mut successor, obstacle));
                self.bring_back(aside).await;
                tracing::error!(
                    error = refused.error,
                    "the hand-over has failed; everything is served as before"
                );
                return Err(refused);
            }
        };

        // From here on nothing may touch what is the successor's: no destructor, no state file, no unlinking.
        std::mem::forget(alone);
        let devices: Vec<(NameV1, bool)> = held
            .into_iter()
            .filter_map(|(name, held)| {
                let guests = held.iter().any(|held| held.has_guest());
                let suspended = held.iter().any(|held| held.suspended());
                held.into_iter().for_each(|held| held.give_away());
                guests.then_some((name, suspended))
            })
            .collect();
        let pid = successor.release();
        if pid == 0 {
            // Killed because it said nothing, and then it had. Nobody serves; what is written down is as after a crash.
            tracing::error!("the successor has taken over and is dead: leaving, to be started again");
            std::process::exit(1);
        }
        let _ = context.left.send(Some(pid));
        let _ = sd_notify::notify(&[sd_notify::NotifyState::MainPid(pid)]);
        tracing::info!(pid, version, devices = devices.len(), "handed over");
        let pauses =
            block_in_place(|| wait_for!(wire.within(HOLD + NEWS), AnswerV1::Report(pauses) => pauses));
        if let Err(Obstacle::Wire(HandoverSocketError::Closed)) = pauses {
            // What it told systemd makes it start another.
            let error = format!("the successor, pid {pid}, has taken everything over and is dead");
            tracing::error!(error, "leaving, to be started again");
            return Err(Refusal::failed(
                error,
                "start ioplane again, unless systemd does: guests reconnect as after a crash",
            ));
        }
        let pauses = pauses.unwrap_or_default();
        let devices = devices.into_iter().enumerate().map(|(index, (name, suspended))| PauseReport {
            kind: name.kind,
            name: name.name,
            pause_us: pauses.get(index).copied().flatten().map(|ns| ns / 1000),
            suspended,
        });
        Ok(UpgradeReport {
            from_pid: std::process::id(),
            from_version: env!("CARGO_PKG_VERSION").to_owned(),
            pid,
            version,
            devices: devices.collect(),
        })
    }

    /// Functions cannot be handed over while a guest uses them.
    async fn functions_are_free(&self) -> Result<(), Refusal> {
        for name in self.functions.records().into_keys() {
            if self.functions.in_use(&name).await {
                return Err(Refusal::conflict(
                    format!("a guest is using PCI function {name}, and functions cannot be handed over yet"),
                    "shut its guest down or unplug the function first, then upgrade; this daemon keeps serving",
                ));
            }
        }
        Ok(())
    }

    /// A swap has two backings and a copier, which are not handed over.
    fn no_disk_is_swapped(&self) -> Result<(), Refusal> {
        for name in self.disks.records().into_keys() {
            if let Ok(disk) = self.disks.served(&name) {
                disk.not_swapping()?;
            }
        }
        Ok(())
    }

    /// Nor can the connections of exports' clients.
    async fn exports_are_free(&self) -> Result<(), Refusal> {
        for name in self.exports.records().into_keys() {
            if self.exports.in_use(&name).await {
                return Err(Refusal::conflict(
                    format!("clients use export {name}, and their connections cannot be handed over yet"),
                    "disconnect them first, then upgrade; this daemon keeps serving",
                ));
            }
        }
        Ok(())
    }

    /// Ends the service of what is not handed over. What has been ended is in `aside`, also after an error.
    async fn set_aside(&self, aside: &mut SetAside) -> Result<(), Refusal> {
        aside.functions = self.functions.set_aside().await?;
        aside.exports = self.exports.set_aside().await?;
        Ok(())
    }

    async fn bring_back(&self, aside: SetAside) {
        tokio::join!(self.functions.bring_back(aside.functions), self.exports.bring_back(aside.exports));
    }

    /// Everything that needs no guest to wait.
    fn prepare(
        &self,
        context: &HandoverContext,
        wire: &mut HandoverSocket,
        patience: Duration,
        sources: &[HandoverSource],
        failed: &[(NameV1, Refusal)],
    ) -> Result<String, Obstacle> {
        wire.within(patience).greet()?;
        let own = DaemonV1 {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            control: context.control.clone(),
            run_dir: context.run_dir.clone(),
            metrics: context.metrics.as_ref().map(|(address, _)| address.to_string()),
        };
        let files = [self.lock.as_fd(), context.listener.as_fd()];
        let files: Vec<_> =
            files.into_iter().chain(context.metrics.as_ref().map(|(_, it)| it.as_fd())).collect();
        wire.send(&OrderV1::Daemon(own), &files)?;
        let version = wait_for!(wire, AnswerV1::Ready(version) => version)?;
        for (name, why) in failed {
            let order = OrderV1::Failed(name.clone(), why.error.clone(), why.remedy.clone());
            wire.send(&order, &[])?;
        }
        for source in sources {
            let files: Vec<_> = source.extras.files.iter().map(AsFd::as_fd).collect();
            wire.send(&OrderV1::Prepare(source.name.clone()), &files)?;
        }
        wire.send(&OrderV1::PreparedAll, &[])?;
        wait_for!(wire, AnswerV1::Prepared => ())?;
        Ok(version)
    }

    /// The part for which guests wait. On an error all devices are back here and run.
    async fn hand_all(
        &self,
        wire: &mut HandoverSocket,
        successor: &mut Successor,
        sources: Vec<HandoverSource>,
    ) -> Result<Vec<(NameV1, AllStopped)>, Obstacle> {
        // For everything, from the first guest that waits. A task that is given up puts back what it holds.
        let end = Instant::now() + HOLD;
        let mut holding = tokio::task::JoinSet::new();
        for (index, source) in sources.into_iter().enumerate() {
            holding.spawn(async move { (index, source.hold(DRAIN).await, source) });
        }
        let (mut all, mut obstacle) = (Vec::new(), None);
        loop {
            let next = tokio::time::timeout_at(end.into(), holding.join_next());
            let Ok(Some(done)) = next.await.map_err(|_| {
                let remedy = "this daemon keeps serving; see `ioplane status`: which one does not answer?";
                obstacle = Some(Refusal::conflict("a device does not become quiescent", remedy).into());
            }) else {
                break;
            };
            match done {
                Ok((index, Ok(held), source)) => all.push((index, held, source)),
                Ok((_, Err(refused), source)) => {
                    let NameV1 { kind, name } = &source.name;
                    let remedy = "this daemon keeps serving; try again";
                    obstacle = Some(Refusal::conflict(format!("{kind} {name}: {refused}"), remedy).into());
                }
                Err(error) => {
                    obstacle = Some(
                        Refusal::failed(error.to_string(), "this is a bug: report it with the log").into(),
                    );
                }
            }
        }
        drop(holding);
        all.sort_by_key(|(index, ..)| *index);
        let outcome = match obstacle {
            Some(obstacle) => Err(obstacle),
            None => block_in_place(|| give(wire, successor, &all, end)),
        };
        match outcome {
            Ok(()) => Ok(all.into_iter().map(|(_, held, source)| (source.name, held)).collect()),
            Err(obstacle) => {
                for held in all.into_iter().flat_map(|(_, held, _)| held) {
                    held.take_back().await;
                }
                Err(obstacle)
            }
        }
    }
}

/// Sends the devices and waits for the one word that decides.
fn give(
    wire: &mut HandoverSocket,
    successor: &mut Successor,
    all: &[(usize, AllStopped, HandoverSource)],
    end: Instant,
) -> Result<(), Obstacle> {
    wire.within(end.saturating_duration_since(Instant::now()).max(DRAIN));
    let held = all.iter().flat_map(|(_, held, source)| held.iter().map(move |held| (held, source)));
    for (held, source) in held {
        let (bytes, files) = held.parcel();
        let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let (name, suspended) = (source.name.clone(), held.suspended());
        let (bytes, beside) = (bytes.to_vec(), (source.extras.beside)());
        wire.send(&OrderV1::Device(DeviceV1 { name, suspended, beside, bytes }), &files)?;
    }
    wait_for!(wire, AnswerV1::Loaded => ())?;
    wire.send(&OrderV1::Commit, &[])?;
    // A time of its own: only one that is stuck says nothing now.
    match wait_for!(wire.within(HOLD), AnswerV1::Mine => ()) {
        // It may be about to say it: only a dead one says nothing more.
        Err(Obstacle::Wire(late @ HandoverSocketError::Late(_))) => {
            successor.end();
            match wait_for!(wire.within(HOLD), AnswerV1::Mine => ()) {
                Ok(()) => Ok(()),
                Err(_) => Err(late.into()),
            }
        }
        outcome => outcome,
    }
}

fn explain(successor: &mut Successor, obstacle: Obstacle) -> Refusal {
    let ended = successor.end();
    match obstacle {
        Obstacle::Ours(refused) => refused,
        Obstacle::Said(error, remedy) => {
            Refusal::conflict(format!("{} does not take over: {error}", successor.binary.display()), remedy)
        }
        Obstacle::Wire(error) => match ended {
            Some(status) => refuse(&successor.binary, format!("{error} ({status})")),
            None => refuse(&successor.binary, error),
        },
    }
}
