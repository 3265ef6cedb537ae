//! Moves between models of the silicon, counted by an example of ioplane-moving.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::process::Command;

/// At least so many moves of each card: `vf82576` and `vf82599`.
pub fn counted(moves: u32) -> Result<Value> {
    let own = std::env::current_exe()?;
    let path = own.with_file_name("examples").join("count_moves");
    ensure!(path.is_file(), "no {}: cargo build -p ioplane-moving --examples", path.display());
    let output = Command::new(&path)
        .arg(moves.to_string())
        .output()
        .with_context(|| format!("run {}", path.display()))?;
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{}: {errors}", path.display());
    serde_json::from_str(&said).with_context(|| said.into_owned())
}
