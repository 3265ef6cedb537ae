//! `ioplane serve`: from the configuration file to the last signal.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use ioplane_api::spec::Flaw;
use ioplane_host::socket::{self, SocketPath};
use sd_notify::NotifyState;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::paths::{Invocation, control_path, run_dir};
use super::upgrade::{self, HandoverContext, Succession};
use super::{Daemon, api, metrics};
use crate::config::{Config, Problems};

/// How long the control socket waits for the disks, so that who sees it usually finds them served.
const GRACE: Duration = Duration::from_secs(1);
/// How long threads that still wait for an image may hold up the end of the process.
const LINGER: Duration = Duration::from_secs(1);

/// How long a daemon that has handed everything over stays for its last answers.
const LAST_WORDS: Duration = Duration::from_secs(6);

/// Serves a configuration until SIGTERM or SIGINT, or until another binary has taken everything over. With `inherit` it is that other
/// binary.
pub fn serve(invocation: Invocation, inherit: bool) -> Result<()> {
    raise_descriptor_limit();
    // Few: the work is done by the I/O cores.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("ioplane-control")
        .enable_all()
        .build()
        .context("start the control plane's threads")?;
    let outcome = runtime.block_on(async {
        if inherit {
            succeed(invocation).await
        } else {
            run(Config::read(&invocation.config)?, invocation).await
        }
    });
    runtime.shutdown_timeout(LINGER);
    outcome
}

/// As many descriptors as the system allows: each region of a guest's memory takes one, and who is short of them is short of them
/// for all guests.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "raising the limit on open files");
    }
}

/// Signals that end or change a daemon, instead of killing it.
struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
    /// Heard so that it kills nobody: a write beyond the limit of file sizes is an error of its request.
    _file_size: Signal,
}

impl Signals {
    fn catch() -> Result<Self> {
        Ok(Signals {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
            _file_size: signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?,
        })
    }
}

/// A daemon and the sockets on which it answers.
struct RunningDaemon {
    invocation: Invocation,
    daemon: Arc<Daemon>,
    control: PathBuf,
    run_dir: PathBuf,
    listener: UnixListener,
    metrics: Option<TcpListener>,
}

async fn run(config: Config, invocation: Invocation) -> Result<()> {
    config.log_warnings();
    let control = control_path(&config, invocation.socket.clone())?;
    let (folder, run_dir) = (control.parent().unwrap_or(Path::new("/")), run_dir(&config, &control));
    std::fs::create_dir_all(folder)
        .with_context(|| format!("make {} for the control socket", folder.display()))?;
    if let Some(flaw) = ioplane_api::spec::socket_flaw(&control) {
        anyhow::bail!("{}\n  hint: {}", flaw.reason, flaw.remedy);
    }

    // Before anything is served: from here on a signal ends us cleanly.
    let signals = Signals::catch()?;

    let lock = super::take(&run_dir, &control)?;
    let metrics = listen_metrics(&config).await?;
    let (daemon, start) = Daemon::start(config, control.clone(), run_dir.clone(), lock)?;
    let mut opening = tokio::spawn(daemon.clone().open_all(start));
    let mut opened = false;
    if let Ok(outcome) = tokio::time::timeout(GRACE, &mut opening).await {
        finish(&daemon, outcome?).await?;
        opened = true;
    }
    let listener = socket::bind(&control)
        .and_then(UnixListener::from_std)
        .with_context(|| format!("the control socket {}", control.display()))?;
    let opening = (!opened).then_some(opening);
    let running = RunningDaemon { invocation, daemon, control, run_dir, listener, metrics };
    attend(running, signals, opening, None).await
}

/// Takes over from the daemon that started this process.
async fn succeed(invocation: Invocation) -> Result<()> {
    let signals = Signals::catch()?;
    let Succession { daemon, control, run_dir, listener, metrics, report } =
        upgrade::inherit(&invocation.config, invocation.socket.clone()).await?;
    tokio::spawn(daemon.clone().open_others());
    let running = RunningDaemon { invocation, daemon, control, run_dir, listener, metrics };
    attend(running, signals, None, Some(report)).await
}

/// Answers until the last signal.
async fn attend(
    running: RunningDaemon,
    mut signals: Signals,
    mut opening: Option<JoinHandle<Result<()>>>,
    report: Option<upgrade::HandoverReport>,
) -> Result<()> {
    let RunningDaemon { invocation, daemon, control, run_dir, listener, metrics } = running;
    let place = SocketPath::of(&control);
    let (left, mut leaving) = watch::channel(None);
    let copies = (listener.as_fd().try_clone_to_owned()?, metrics.as_ref().map(metrics_socket).transpose()?);
    let (control_copy, metrics_copy) = copies;
    let context = HandoverContext {
        invocation,
        control: control.clone(),
        run_dir,
        listener: control_copy,
        metrics: metrics_copy,
        left,
    };
    let _ = daemon.handover.set(context);
    let until = || {
        let mut leaving = leaving.clone();
        async move {
            let _ = leaving.wait_for(Option::is_some).await;
        }
    };
    tokio::spawn(daemon.clone().retry());
    tokio::spawn(daemon.clone().pause_vms());
    tokio::spawn(daemon.clone().run_pool());
    tokio::spawn(daemon.clone().watch_nodes());
    tokio::spawn(daemon.clone().run_devices());
    tokio::spawn(daemon.clone().watch_revocations());
    tokio::spawn(daemon.clone().follow_exporters());
    tokio::spawn(daemon.clone().watch_choices());
    let router = api::router(daemon.clone());
    let mut api = tokio::spawn(axum::serve(listener, router).with_graceful_shutdown(until()).into_future());
    let metrics = metrics.map(|listener| {
        let router = metrics::router(daemon.clone());
        tokio::spawn(axum::serve(listener, router).with_graceful_shutdown(until()).into_future())
    });
    match &opening {
        None => ready(&control),
        Some(_) => tracing::info!("some images are not free yet; the others are served"),
    }
    if let Some(report) = report {
        let daemon = daemon.clone();
        tokio::spawn(async move { report.tell(&daemon).await });
    }

    let outcome = loop {
        tokio::select! {
            _ = signals.term.recv() => break Ok(()),
            _ = signals.int.recv() => break Ok(()),
            _ = signals.hup.recv() => {
                tokio::spawn(reload(daemon.clone()));
            }
            outcome = opened(&mut opening) => {
                match finish(&daemon, outcome?).await {
                    Ok(()) => ready(&control),
                    Err(error) => break Err(error),
                }
            }
            _ = leaving.wait_for(Option::is_some) => {
                // Who asked for the upgrade is to hear how it went. Nothing may run that unlinks or unlocks what is another
                // process's now, so this one ends without its destructors.
                let _ = tokio::time::timeout(LAST_WORDS, &mut api).await;
                tracing::info!("everything has been handed over: leaving");
                std::process::exit(0);
            }
        }
    };
    // Not in the middle of an upgrade: if that comes to its end, it is the successor that is to stop.
    let (alone, mut successor) = (daemon.changes.try_read(), None);
    if alone.is_err() {
        tracing::info!("waiting for the upgrade that is under way");
        tokio::select! {
            _ = daemon.changes.read() => {}
            left = leaving.wait_for(Option::is_some) => successor = left.ok().and_then(|left| *left),
            _ = signals.int.recv() => {}
        }
    }
    if let Some(pid) = successor.and_then(|pid| rustix::process::Pid::from_raw(pid as i32)) {
        tracing::info!("everything has been handed over: telling the successor to stop, and leaving");
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        std::process::exit(0);
    }
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    tracing::info!("stopping");
    let stop = async {
        daemon.stop().await;
        api.abort();
        metrics.iter().for_each(|task| task.abort());
        place.clear();
    };
    // Who asks twice does not want to wait: the journals have what is in flight.
    tokio::select! {
        () = stop => tracing::info!("stopped"),
        _ = signals.int.recv() => tracing::warn!("stopped at once: guests replay what was in flight"),
    }
    outcome
}

/// Address and a duplicate of a socket.
fn metrics_socket(listener: &TcpListener) -> std::io::Result<(SocketAddr, OwnedFd)> {
    Ok((listener.local_addr()?, listener.as_fd().try_clone_to_owned()?))
}

/// What became of the disks, once; never if they were all there from the beginning.
async fn opened(
    opening: &mut Option<JoinHandle<Result<()>>>,
) -> std::result::Result<Result<()>, tokio::task::JoinError> {
    match opening {
        Some(task) => {
            let outcome = task.await;
            *opening = None;
            outcome
        }
        None => std::future::pending().await,
    }
}

/// Nothing stays served of a configuration that is refused.
async fn finish(daemon: &Daemon, outcome: Result<()>) -> Result<()> {
    if outcome.is_err() {
        daemon.stop().await;
    }
    outcome
}

fn ready(control: &Path) {
    tracing::info!(socket = %control.display(), "ready");
    let _ = sd_notify::notify(&[NotifyState::Ready]);
}

async fn reload(daemon: Arc<Daemon>) {
    let _leave = match daemon.may_change() {
        Ok(leave) => leave,
        Err(refused) => return tracing::warn!(%refused, "the configuration was not read again"),
    };
    match daemon.reload().await {
        Ok(done) if done.is_empty() => tracing::info!("the configuration was read again: nothing to do"),
        Ok(done) => tracing::info!(done = done.join(", "), "the configuration was read again"),
        Err(problems) => {
            let hint = problems.after_reload();
            tracing::error!("the configuration was refused:\n{problems}\n  hint: {hint}");
        }
    }
}

async fn listen_metrics(config: &Config) -> Result<Option<TcpListener>> {
    let Some(address) = config.daemon.metrics else { return Ok(None) };
    match TcpListener::bind(address).await {
        Ok(listener) => Ok(Some(listener)),
        Err(error) => {
            let flaw = Flaw::new(
                "metrics",
                format!("metrics = {address}: {error}"),
                "give a free port of 127.0.0.1",
            );
            Err(Problems::new(&config.file, vec![config.daemon_place.problem(flaw)]).into())
        }
    }
}
