//! The daemon's log: standard error, levels by `--log`. No guest's data is ever in it.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use tracing_subscriber::EnvFilter;

/// Starts it, once a process.
pub fn start(level: &str) -> Result<()> {
    let filter = EnvFilter::try_new(level)
        .with_context(|| format!("--log {level}: write a level such as info or debug"))?;
    let journal = std::env::var_os("JOURNAL_STREAM").is_some();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // The journal has the time already.
    let started = if journal { log.without_time().try_init() } else { log.try_init() };
    started.map_err(|error| anyhow::anyhow!("the log: {error}"))
}
