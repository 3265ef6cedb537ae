//! What commands print: answers on standard output, complaints and hints on standard error.

use std::io::Write;
use std::sync::atomic::{AtomicI8, Ordering};

use anyhow::{Context, Result};
use ioplane_api::refusal::{Code, RefusalBody};
use serde::Serialize;

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
        eprintln!("ioplane: {}", harmless(&line.to_string()));
    }
}

/// As a terminal may have it: a daemon of another host, or a program beside it, may have said it.
fn harmless(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// What is done to answer. Only with `-v`.
pub fn detail(line: impl std::fmt::Display) {
    if VERBOSITY.load(Ordering::Relaxed) > 0 {
        eprintln!("ioplane: {line}");
    }
}

/// Why a command has failed: what the daemon refused, or the command line by itself. For a person; for a program it is the JSON of
/// docs/guide/errors.md. Its remedy is empty where none is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct CommandError(pub RefusalBody);

/// What stands between what is wrong and what to do, in texts of errors.
const HINT: &str = "\n  hint: ";

impl CommandError {
    /// What the command line refuses by itself: what is wrong, and what to do.
    pub fn new(code: Code, error: impl Into<String>, remedy: impl Into<String>) -> Self {
        CommandError(RefusalBody::new(code, error, remedy))
    }

    /// Of any error. One that has no code of its own is a failure on this host; its text may have both parts.
    fn of(error: &anyhow::Error) -> Self {
        error.downcast_ref().cloned().unwrap_or_else(|| {
            let text = text(error);
            let (error, remedy) = text.split_once(HINT).unwrap_or((text.as_str(), ""));
            CommandError::new(Code::CommandFailed, error, remedy)
        })
    }
}

impl std::fmt::Display for CommandError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let CommandError(RefusalBody { error, remedy, .. }) = self;
        f.write_str(error)?;
        if remedy.is_empty() { Ok(()) } else { write!(f, "{HINT}{remedy}") }
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

pub fn print_json(report: &impl Serialize) -> Result<()> {
    out((serde_json::to_string_pretty(report)? + "\n").as_bytes())
}

/// Prints a report as JSON, or as `text` has it.
pub fn print<T: Serialize>(json: bool, report: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
    if json { print_json(report) } else { out(text(report).as_bytes()) }
}

/// Prints one of a series, as a line of JSON (NDJSON) or as `text` has it. False: nobody reads any more, and the series may end.
pub fn print_next<T: Serialize>(json: bool, report: &T, text: impl FnOnce(&T) -> String) -> Result<bool> {
    let line = if json { serde_json::to_string(report)? + "\n" } else { text(report) };
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error).context("write the answer"),
    }
}

/// The same as [`print`] of what has been changed: with `-q` the exit code says that it worked.
pub fn print_done<T: Serialize>(json: bool, report: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
    if quiet() && !json { Ok(()) } else { print(json, report, text) }
}

/// Says why a command has failed; as JSON as well, if that was asked for.
pub fn complain(error: &anyhow::Error, json: bool) {
    eprintln!("ioplane: {}", harmless(&text(error)));
    if json {
        // A program reads it there, and the exit code says that it is no answer.
        let _ = print_json(&CommandError::of(error));
    }
}

/// An error and what is below it.
fn text(error: &anyhow::Error) -> String {
    format!("{error:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_commands_a_terminal() {
        assert_eq!(harmless("a\u{1b}[2J\u{9b}H\r\u{7}b\n\tc"), "a[2JHb\n\tc");
    }

    #[test]
    fn every_error_has_a_code() {
        let refused = CommandError::new(Code::NotFound, "there is no model x", "name one of a, b");
        let text = "there is no model x\n  hint: name one of a, b";
        assert_eq!(refused.to_string(), text);
        assert_eq!(CommandError::of(&refused.clone().into()), refused);
        // Of a crate that knows no codes: in two parts, or one.
        let parted = CommandError::of(&anyhow::anyhow!(text));
        assert_eq!(parted, CommandError::new(Code::CommandFailed, "there is no model x", "name one of a, b"));
        let below = anyhow::anyhow!("no space").context("write a.pcapng");
        let CommandError(body) = CommandError::of(&below);
        assert_eq!((body.error.as_str(), body.remedy.as_str()), ("write a.pcapng: no space", ""));
        assert_eq!((body.code.as_str(), body.status), ("command_failed", 500));
        assert_eq!(CommandError(body).to_string(), "write a.pcapng: no space");
    }
}
