//! What a QEMU's monitor and a guest's agent have in common: `{"execute": ...}` goes, `{"return": ...}` or `{"error": ...}` comes.

use std::io;

use serde_json::{Value, json};

use crate::error::{QemuError, Result};
use crate::socket::Lines;
use ioplane_plain::excerpt;

/// Sends a command. What answers it may say so by the number.
pub(crate) fn send(lines: &mut Lines, command: &str, arguments: &Value, id: Option<u64>) -> Result<()> {
    let mut request = json!({"execute": command, "arguments": arguments});
    if let Some(id) = id {
        request["id"] = id.into();
    }
    send_object(lines, &request)
}

/// Sends a whole request.
pub(crate) fn send_object(lines: &mut Lines, request: &Value) -> Result<()> {
    lines.send(format!("{request}\n").as_bytes()).map_err(QemuError::Peer)
}

/// The next object.
pub(crate) fn receive(lines: &mut Lines) -> Result<Value> {
    let line = lines.line().map_err(QemuError::Peer)?;
    let other = || QemuError::Peer(io::Error::other("it does not answer with JSON"));
    serde_json::from_slice(&line).map_err(|_| other())
}

/// What a command has returned.
pub(crate) fn outcome(command: &str, mut answer: Value) -> Result<Value> {
    if let Some(error) = answer.get("error") {
        // The class says no more than the words, where there are any.
        let why = error["desc"].as_str().map_or_else(|| excerpt(error), |why| excerpt(&why));
        return Err(QemuError::Refused { command: command.to_owned(), why });
    }
    if let Some(value) = answer.get_mut("return") {
        return Ok(value.take());
    }
    let what = format!("it answers {command} with {}", excerpt(&answer));
    Err(QemuError::Peer(io::Error::other(what)))
}
