//! The load program, built for the guest: static, so that any guest's libraries will do.

use super::News;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Path of the program; `IOPLANE_GUEST_LOAD` names a finished one, otherwise cargo builds it (once a process).
pub fn program(news: News<'_>) -> Result<PathBuf> {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    if let Some(path) = BUILT.get() {
        return Ok(path.clone());
    }
    let path = match std::env::var_os("IOPLANE_GUEST_LOAD") {
        Some(path) => PathBuf::from(path),
        None => build(news)?,
    };
    if !path.is_file() {
        bail!("{} is not there; unset IOPLANE_GUEST_LOAD to have it built", path.display());
    }
    Ok(BUILT.get_or_init(|| path).clone())
}

fn build(news: News<'_>) -> Result<PathBuf> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("e2e lies in the workspace")?;
    // A folder of its own: whoever runs the tests may hold the lock of the usual one.
    let base = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace.join("target"), PathBuf::from);
    let target = base.join("guest");
    if !target.exists() {
        news("guest: building the load program");
    }
    let mut command = Command::new(workspace.join("script/guest-load"));
    let output = command.arg(&target).stdin(Stdio::null()).output().context("run script/guest-load")?;
    if !output.status.success() {
        bail!("the load program does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let program = PathBuf::from(String::from_utf8(output.stdout)?.trim_end());
    Ok(program)
}
