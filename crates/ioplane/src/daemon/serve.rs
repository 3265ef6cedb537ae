//! `ioplane serve`: from the configuration file to the last signal.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use sd_notify::NotifyState;
use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};

use super::{Daemon, SOCKET, api, metrics};
use crate::config::{Config, Problems};
use crate::spec::Flaw;

/// How long the control socket waits for the disks, so that who sees it usually finds them served.
const GRACE: Duration = Duration::from_secs(1);
/// How long threads that still wait for an image may hold up the end of the process.
const LINGER: Duration = Duration::from_secs(1);

/// Serves `config` until SIGTERM or SIGINT. `socket` goes before what the configuration says.
pub fn serve(config: &Path, socket: Option<PathBuf>) -> Result<()> {
    let config = Config::read(config)?;
    // Few: the work is done by the I/O cores.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("ioplane-control")
        .enable_all()
        .build()
        .context("start the control plane's threads")?;
    let outcome = runtime.block_on(run(config, socket));
    runtime.shutdown_timeout(LINGER);
    outcome
}

async fn run(config: Config, socket: Option<PathBuf>) -> Result<()> {
    let control = socket.or(config.daemon.socket.clone()).unwrap_or_else(|| SOCKET.into());
    let control = std::path::absolute(&control).context("the control socket's path")?;
    let folder = control.parent().unwrap_or(Path::new("/")).to_owned();
    let run_dir = config.daemon.run_dir.clone().unwrap_or_else(|| folder.clone());
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("make {} for the control socket", folder.display()))?;
    if let Some(flaw) = crate::spec::socket_flaw(&control) {
        anyhow::bail!("{}\n  to do: {}", flaw.reason, flaw.remedy);
    }

    // Before anything is served: from here on a signal ends us cleanly.
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    let mut hup = signal(SignalKind::hangup())?;

    let lock = super::take(&run_dir, &control)?;
    let metrics = listen_metrics(&config).await?;
    let (daemon, start) = Daemon::start(config, control.clone(), run_dir, lock)?;
    let mut opening = tokio::spawn(daemon.clone().open_all(start));
    let mut opened = false;
    if let Ok(outcome) = tokio::time::timeout(GRACE, &mut opening).await {
        finish(&daemon, outcome?).await?;
        opened = true;
    }
    let listener = bind(&control).with_context(|| format!("the control socket {}", control.display()))?;
    let api = tokio::spawn(axum::serve(listener, api::router(daemon.clone())).into_future());
    let metrics = metrics
        .map(|listener| tokio::spawn(axum::serve(listener, metrics::router(daemon.clone())).into_future()));
    if opened {
        ready(&control);
    } else {
        tracing::info!("some images are not free yet; the others are served");
    }

    let outcome = loop {
        tokio::select! {
            _ = term.recv() => break Ok(()),
            _ = int.recv() => break Ok(()),
            _ = hup.recv() => {
                tokio::spawn(reload(daemon.clone()));
            }
            outcome = &mut opening, if !opened => {
                opened = true;
                match finish(&daemon, outcome?).await {
                    Ok(()) => ready(&control),
                    Err(error) => break Err(error),
                }
            }
        }
    };
    let _ = sd_notify::notify(&[NotifyState::Stopping]);
    tracing::info!("stopping");
    let stop = async {
        daemon.stop().await;
        api.abort();
        metrics.iter().for_each(|task| task.abort());
        let _ = std::fs::remove_file(&control);
    };
    // Who asks twice does not want to wait: the journals have what is in flight.
    tokio::select! {
        () = stop => tracing::info!("stopped"),
        _ = int.recv() => tracing::warn!("stopped at once: guests replay what was in flight"),
    }
    outcome
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
    match daemon.reload().await {
        Ok(done) if done.is_empty() => tracing::info!("the configuration was read again: nothing to do"),
        Ok(done) => tracing::info!(done = done.join(", "), "the configuration was read again"),
        Err(problems) => {
            tracing::error!(
                "the configuration was refused; what was being served is still served:\n{problems}"
            );
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

/// Binds the control socket, for this user alone. Whoever holds the run directory may replace what was left behind.
fn bind(path: &Path) -> std::io::Result<UnixListener> {
    // Bound beside and renamed, so that it is never there with the wrong mode.
    let fresh = path.with_extension("new");
    let _ = std::fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh)?;
    std::fs::set_permissions(&fresh, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    std::fs::rename(&fresh, path)?;
    Ok(listener)
}
