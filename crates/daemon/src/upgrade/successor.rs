//! The daemon that takes over: from the socket on its standard input to the first request that it serves.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ioplane_api::report::{PauseReport, UpgradeReport};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;
use tokio::task::block_in_place;

use super::super::Daemon;
use super::super::disk::Disk;
use super::super::nic::Nic;
use super::super::paths;
use super::super::served::ServedKind;
use super::handover::{HandoverTarget, keep_failed, prepare};
use super::kill::{self, HandoverKillPoint};
use super::switch;
use super::wire::HandoverSocket;
use super::words::{AnswerV1, DaemonV1, NameV1, OrderV1};
use super::{HOLD, NEWS, PATIENCE, SLOW_NEWS};
use crate::config::Config;
use crate::refusal::Refusal;

/// How long a successor waits for its predecessor's next step: longer than that one waits for anything.
const SILENCE: Duration = Duration::from_secs(120);

/// A daemon that has taken over, and its sockets.
pub struct Succession {
    pub daemon: Arc<Daemon>,
    pub control: PathBuf,
    /// Where state.json is.
    pub run_dir: PathBuf,
    /// The control socket.
    pub listener: UnixListener,
    pub metrics: Option<TcpListener>,
    /// Tells the predecessor, and the status, how it went. Once the API is there.
    pub report: HandoverReport,
}

/// What is still to be said.
pub struct HandoverReport {
    wire: HandoverSocket,
    from: DaemonV1,
    waiting: Vec<(NameV1, bool, Vec<oneshot::Receiver<Duration>>)>,
}

/// The socket to the predecessor, which is this process's standard input. From then on that is empty.
fn socket() -> Result<HandoverSocket> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().context("the standard input")?;
    if rustix::net::sockopt::socket_domain(&socket) != Ok(rustix::net::AddressFamily::UNIX) {
        bail!("--inherit is for `ioplane upgrade`\n  hint: start the daemon without it");
    }
    let nothing = std::fs::File::open("/dev/null").context("/dev/null")?;
    rustix::stdio::dup2_stdin(&nothing).context("the standard input")?;
    Ok(HandoverSocket::on(socket.into())?)
}

/// Takes over from the daemon that started this process, or fails and has touched nothing.
pub async fn inherit(config: &std::path::Path, socket_wanted: Option<PathBuf>) -> Result<Succession> {
    let mut wire = socket()?;
    let outcome = block_in_place(|| take_over(&mut wire, config, socket_wanted));
    match outcome {
        Ok((daemon, from, targets, listener, metrics)) => {
            kill::here(HandoverKillPoint::Committed);
            block_in_place(|| wire.within(HOLD).send(&AnswerV1::Mine, &[])).context("taking over")?;
            kill::here(HandoverKillPoint::Mine);
            // From here on everything is ours, and nobody else's.
            // Uplinks last: what comes in by them finds the guests' NICs.
            let (uplinks, devices): (Vec<_>, Vec<_>) =
                targets.into_iter().partition(|target| target.name().kind == switch::KIND);
            let waiting = devices.into_iter().chain(uplinks).map(|target| {
                let (name, replays) = (target.name().clone(), target.replays());
                (name, replays, target.start(&daemon))
            });
            let waiting = waiting.collect();
            let (control, run_dir) = (from.control.clone(), from.run_dir.clone());
            let pid = format!("{}\n", std::process::id());
            if let Err(error) = std::fs::write(run_dir.join("ioplane.lock"), pid) {
                tracing::warn!(%error, "writing down who has the run directory");
            }
            let report = HandoverReport { wire, from, waiting };
            Ok(Succession { daemon, control, run_dir, listener, metrics, report })
        }
        Err(error) => {
            let refused = match error.downcast_ref::<Refusal>() {
                Some(refused) => AnswerV1::Refused(refused.error.clone(), refused.remedy.clone()),
                None => AnswerV1::Refused(format!("{error:#}"), "correct that, then try again".to_owned()),
            };
            let _ = wire.within(HOLD).send(&refused, &[]);
            Err(error)
        }
    }
}

type TakenOver = (Arc<Daemon>, DaemonV1, Vec<Box<dyn HandoverTarget>>, UnixListener, Option<TcpListener>);

/// Everything up to the commit, which has come when this returns.
fn take_over(
    wire: &mut HandoverSocket,
    config: &std::path::Path,
    socket: Option<PathBuf>,
) -> Result<TakenOver> {
    wire.within(PATIENCE).greet()?;
    kill::here(HandoverKillPoint::Greeted);
    let (OrderV1::Daemon(theirs), files) = wire.receive()? else {
        bail!("the predecessor does not say who it is")
    };
    let config = Config::read(config)?;
    config.log_warnings();
    same_daemon(&config, &theirs, socket)?;
    let mut files = files.into_iter();
    let mut file = |what: &str| files.next().with_context(|| format!("the predecessor has sent no {what}"));
    let lock = std::fs::File::from(file("lock")?);
    let listener = unix_listener(file("control socket")?)?;
    let metrics = theirs.metrics.as_ref().map(|_| tcp_listener(file("metrics socket")?)).transpose()?;
    let daemon = Daemon::succeed(config, theirs.control.clone(), theirs.run_dir.clone(), lock)?;
    wire.send(&AnswerV1::Ready(env!("CARGO_PKG_VERSION").to_owned()), &[])?;
    kill::here(HandoverKillPoint::Ready);

    let mut targets: Vec<Box<dyn HandoverTarget>> = Vec::new();
    loop {
        match wire.within(SILENCE).receive()? {
            (OrderV1::Prepare(name), files) if name.kind == switch::KIND => {
                targets.push(switch::prepare(&daemon, name, files)?);
            }
            (OrderV1::Prepare(name), files) if name.kind == Nic::NAME => {
                targets.push(prepare::<Nic>(&daemon, name, files)?);
            }
            (OrderV1::Prepare(name), files) if name.kind == Disk::NAME => {
                targets.push(prepare::<Disk>(&daemon, name, files)?);
            }
            (OrderV1::Failed(name, error, remedy), _) if name.kind == switch::KIND => {
                switch::keep_failed(&daemon, &name, Refusal::failed(error, remedy))?;
            }
            (OrderV1::Failed(name, error, remedy), _) if name.kind == Nic::NAME => {
                keep_failed::<Nic>(&daemon, &name, Refusal::failed(error, remedy))?;
            }
            (OrderV1::Failed(name, error, remedy), _) if name.kind == Disk::NAME => {
                keep_failed::<Disk>(&daemon, &name, Refusal::failed(error, remedy))?;
            }
            (OrderV1::PreparedAll, _) => break,
            (order, _) => bail!("an order that this version does not carry out: {order:?}"),
        }
    }
    kill::here(HandoverKillPoint::Prepared);
    wire.send(&AnswerV1::Prepared, &[])?;

    for target in &mut targets {
        for _ in 0..target.sockets() {
            let (OrderV1::Device(device), files) = wire.within(SILENCE).receive()? else {
                bail!("not a device")
            };
            kill::here(HandoverKillPoint::Device);
            if *target.name() != device.name {
                bail!("{:?} out of turn", device.name);
            }
            target.adopt(device, files)?;
        }
    }
    wire.send(&AnswerV1::Loaded, &[])?;
    kill::here(HandoverKillPoint::Loaded);
    match wire.within(SILENCE).receive()? {
        (OrderV1::Commit, _) => Ok((daemon, theirs, targets, listener, metrics)),
        (order, _) => bail!("{order:?} in place of the last word"),
    }
}

/// What cannot change while front ends are connected.
fn same_daemon(config: &Config, theirs: &DaemonV1, socket: Option<PathBuf>) -> Result<()> {
    let wanted = paths::control_path(config, socket)?;
    let run_dir = paths::run_dir(config, &wanted);
    let metrics = config.daemon.metrics.map(|address| address.to_string());
    for (field, same) in [
        ("socket", wanted == theirs.control),
        ("run_dir", run_dir == theirs.run_dir),
        ("metrics", metrics == theirs.metrics),
    ] {
        if !same {
            let remedy = "put it back, or restart the daemon in place of upgrading it";
            return Err(Refusal::conflict(format!("{field} in [daemon] is another now"), remedy).into());
        }
    }
    Ok(())
}

fn unix_listener(file: OwnedFd) -> Result<UnixListener> {
    let listener = std::os::unix::net::UnixListener::from(file);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener).context("the control socket")
}

fn tcp_listener(file: OwnedFd) -> Result<TcpListener> {
    let listener = std::net::TcpListener::from(file);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener).context("the metrics socket")
}

impl HandoverReport {
    /// Waits a moment for every device, tells the predecessor, and writes down for `ioplane status` how it went. What is to be
    /// replayed is not waited for first: it starts when the predecessor, which waits for this, has gone.
    pub async fn tell(self, daemon: &Daemon) {
        let HandoverReport { mut wire, from, waiting } = self;
        // A switch has no guest of its own.
        let mut waiting: Vec<_> = waiting.into_iter().filter(|one| !one.2.is_empty()).collect();
        let end = tokio::time::Instant::from_std(Instant::now() + NEWS);
        let mut devices = Vec::new();
        for (NameV1 { kind, name }, suspended, waits) in &mut waiting {
            let pause = if *suspended { None } else { pause_of(waits, end).await };
            devices.push(PauseReport {
                kind: kind.clone(),
                name: name.clone(),
                pause_us: pause.map(|pause| pause.as_micros() as u64),
                suspended: *suspended,
            });
        }
        let pauses = devices.iter().map(|device| device.pause_us.map(|us| us * 1000)).collect();
        let mut report = UpgradeReport {
            from_pid: from.pid,
            from_version: from.version,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            devices,
        };
        daemon.upgraded(report.clone());
        if let Err(error) = block_in_place(|| wire.within(HOLD).send(&AnswerV1::Report(pauses), &[])) {
            tracing::warn!(%error, "telling the predecessor");
        }
        drop(wire);
        let end = tokio::time::Instant::from_std(Instant::now() + SLOW_NEWS);
        for (device, (.., waits)) in report.devices.iter_mut().zip(&mut waiting) {
            if device.suspended {
                device.pause_us = pause_of(waits, end).await.map(|pause| pause.as_micros() as u64);
            }
            let PauseReport { kind, name, pause_us, .. } = &*device;
            match pause_us {
                Some(pause_us) => tracing::info!(kind, name, pause_us, "taken over"),
                None => tracing::warn!(kind, name, "taken over; its disk does not answer yet"),
            }
        }
        daemon.upgraded(report);
    }
}

/// How long a guest has waited: the longest of its device's sockets; none if one has not answered.
async fn pause_of(
    waits: &mut Vec<oneshot::Receiver<Duration>>,
    end: tokio::time::Instant,
) -> Option<Duration> {
    let mut pause = Some(Duration::ZERO);
    for waited in waits.drain(..) {
        let one = tokio::time::timeout_at(end, waited).await.ok().and_then(Result::ok);
        pause = pause.zip(one).map(|(all, one)| all.max(one));
    }
    pause
}
