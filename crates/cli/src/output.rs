//! What commands print: answers on standard output, complaints and hints on standard error.

use std::io::Write;
use std::sync::atomic::{AtomicI8, Ordering};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::client::Refused;

/// How much is said: below zero with `-q`, above with each `-v`. Set once, before anything is printed.
static VERBOSITY: AtomicI8 = AtomicI8::new(0);

/// Says how much is to be said.
pub fn set_verbosity(verbosity: i8) {
    VERBOSITY.store(verbosity, Ordering::Relaxed);
}

/// Only answers and errors are wanted.
pub fn quiet() -> bool {
    VERBOSITY.load(Ordering::Relaxed) < 0
}

/// A line that is no answer and no error: what else to do, what changes. Not with `-q`.
pub fn hint(line: impl std::fmt::Display) {
    if !quiet() {
        eprintln!("ioplane: {line}");
    }
}

/// What is done to answer. Only with `-v`.
pub fn detail(line: impl std::fmt::Display) {
    if VERBOSITY.load(Ordering::Relaxed) > 0 {
        eprintln!("ioplane: {line}");
    }
}

/// Why a command of this program has failed, and what to do. Those of the daemon are [`Refused`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CommandError {
    /// What is wrong.
    pub error: String,
    /// What to do; empty if nothing is known.
    pub remedy: String,
}

/// What stands between what is wrong and what to do, in texts of errors.
const TO_DO: &str = "\n  to do: ";

impl CommandError {
    /// What is wrong, and what to do.
    pub fn new(error: impl Into<String>, remedy: impl Into<String>) -> Self {
        CommandError { error: error.into(), remedy: remedy.into() }
    }

    /// The same from a text that has both.
    fn parted(text: &str) -> Self {
        let (error, remedy) = text.split_once(TO_DO).unwrap_or((text, ""));
        CommandError::new(error, remedy)
    }
}

impl std::fmt::Display for CommandError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.error)?;
        if self.remedy.is_empty() { Ok(()) } else { write!(f, "{TO_DO}{}", self.remedy) }
    }
}

impl std::error::Error for CommandError {}

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

/// The same of what has been changed: with `-q` the exit code says that it worked.
pub fn print_done<T: Serialize>(json: bool, report: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
    if quiet() && !json { Ok(()) } else { print(json, report, text) }
}

/// Says why a command has failed; as JSON as well, if that was asked for.
pub fn complain(error: &anyhow::Error, json: bool) {
    let text = format!("{error}{}", causes(error));
    eprintln!("ioplane: {text}");
    if json {
        // A program reads it there, and the exit code says that it is no answer.
        let _ = match error.downcast_ref() {
            Some(Refused(refusal)) => print_json(refusal),
            None => print_json(&CommandError::parted(&text)),
        };
    }
}

/// What is below an error, in one line.
fn causes(error: &anyhow::Error) -> String {
    error.chain().skip(1).map(|cause| format!(": {cause}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_errors_are_parted() {
        let text = "there is no model x\n  to do: name one of a, b";
        let failure = CommandError::parted(text);
        assert_eq!(failure, CommandError::new("there is no model x", "name one of a, b"));
        assert_eq!(failure.to_string(), text);
        assert_eq!(CommandError::parted("broken").to_string(), "broken");
    }
}
