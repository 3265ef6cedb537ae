//! What is said in a session: messages as those of directories ([`crate::wire`]), but shorter.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::AsyncRead;
use tokio::sync::mpsc;

use super::SessionTiming;
use super::state::DeviceState;
use crate::error::NetbusError;
use crate::wire;

/// The version of what is said here. Whoever reads passes over fields that it does not know; the lower version of both is spoken.
pub(super) const VERSION: u32 = 1;
/// Longest message, bytes.
const LONGEST: usize = 16 << 10;
/// Messages that have been read and not answered yet.
const UNANSWERED: usize = 16;

/// What a subscriber says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(super) enum Say {
    /// The first one.
    Hello { version: u32 },
    /// Tell how this device is, now and whenever that changes.
    Subscribe { device: String },
    /// Not any more.
    Unsubscribe { device: String },
    /// Is anybody there?
    Ping { number: u64 },
}

/// What a publisher says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(super) enum Answer {
    /// To a hello: what is spoken from here on.
    Welcome { version: u32 },
    /// How a device is.
    State { device: String, state: DeviceState },
    /// There is no such device for this host, or no more: nothing further is said of it.
    Refused { device: String, why: String },
    /// To a ping.
    Pong { number: u64 },
    /// The session ends.
    Bye,
}

/// Reads one message; see [`wire::receive`].
pub(super) async fn receive<S: AsyncRead + Unpin, M: serde::de::DeserializeOwned>(
    stream: &mut S,
    silence: Duration,
    patience: Duration,
) -> Result<Option<M>, NetbusError> {
    wire::receive_within(stream, LONGEST, (silence, patience)).await
}

/// Reads until the peer closes the connection, is silent or says nonsense, and hands on what it says. A message that is waited for is read by nobody else, so
/// this may be raced with answering.
pub(super) async fn read_all<S: AsyncRead + Unpin, M: serde::de::DeserializeOwned>(
    stream: &mut S,
    timing: &SessionTiming,
    said: mpsc::Sender<M>,
) -> Result<(), NetbusError> {
    while let Some(message) = receive(stream, timing.silence, timing.patience).await? {
        if said.send(message).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// For [`read_all`].
pub(super) fn heard<M>() -> (mpsc::Sender<M>, mpsc::Receiver<M>) {
    mpsc::channel(UNANSWERED)
}
