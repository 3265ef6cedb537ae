//! The load program, built for the guest: static, so that any guest's libraries will do.

use super::News;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

const TARGET: &str = "x86_64-unknown-linux-gnu";

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
    let program = target.join(TARGET).join("release/ioplane-load");
    if !program.exists() {
        news("guest: building the load program");
    }
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .current_dir(workspace)
        .args([
            "build",
            "--quiet",
            "--release",
            "-p",
            "ioplane-guest-load",
            "--target",
            TARGET,
            // It is small and quick enough as it is.
            "--config",
            "profile.release.lto=\"off\"",
            "--config",
            "profile.release.codegen-units=16",
            "--config",
            "profile.release.debug=0",
            "--target-dir",
        ])
        .arg(&target)
        // With --target the flags reach the program only, not procedural macros, which cannot be static.
        .env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .stdin(Stdio::null())
        .output()
        .context("run cargo")?;
    if !output.status.success() {
        bail!("the load program does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(program)
}
