//! What commands print: answers on standard output, complaints on standard error.

use std::io::Write;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::client::Refused;

/// Writes to standard output; that nobody reads it any more is no error.
pub fn out(bytes: &[u8]) -> Result<()> {
    match std::io::stdout().lock().write_all(bytes) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("write the answer")
        }
        _ => Ok(()),
    }
}

/// Prints a report as JSON.
pub fn print_json(report: &impl Serialize) -> Result<()> {
    out((serde_json::to_string_pretty(report)? + "\n").as_bytes())
}

/// Prints a report as JSON, or as `text` has it.
pub fn print<T: Serialize>(json: bool, report: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
    if json { print_json(report) } else { out(text(report).as_bytes()) }
}

/// Says why a command has failed; a refusal by the daemon also as JSON, if that was asked for.
pub fn complain(error: &anyhow::Error, json: bool) {
    eprintln!("ioplane: {error}{}", causes(error));
    if json && let Some(Refused(refusal)) = error.downcast_ref() {
        // A program reads it there, and the exit code says that it is no answer.
        let _ = print_json(refusal);
    }
}

/// What is below an error, in one line.
fn causes(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(|cause| format!(": {cause}")).collect()
}
