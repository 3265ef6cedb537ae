//! Messages between hosts and a directory: the length in four bytes, the most significant first, then JSON.
//!
//! Whoever reads passes over fields that it does not know, so that later programs can say more. Programs of version 1 refuse them: they are told of
//! no rates. A host says the highest version that it speaks, and the directory answers with the lower one of both; a directory of version 1 refuses
//! any other, so the host then comes again with that.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::device::{DeviceRecord, ListedDevice};
use crate::directory::{Forgotten, Taken};
use crate::error::NetbusError;
use crate::limits::LONGEST_MESSAGE;

/// The version of what is said here.
pub(crate) const VERSION: u32 = 2;
/// The oldest one that is spoken, too.
pub(crate) const OLDEST: u32 = 1;
/// The first one in which devices have rates, and unknown fields are passed over.
pub(crate) const RATES: u32 = 2;
/// The list of all devices may be longer: it is sent in parts of at most so many devices.
pub(crate) const PART: usize = 512;

/// What a host says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(crate) enum Request {
    /// The first one. Where there is TLS the name in the certificate counts, not this one.
    Hello {
        /// The highest that the host speaks.
        version: u32,
        /// How the host is called.
        host: String,
        /// Which of its daemons speaks: the same after a restart.
        daemon: String,
    },
    /// All that the host publishes. Renews its lease.
    Report { devices: Vec<DeviceRecord> },
    /// What is published everywhere.
    List,
    /// Frees a name whose host does not come back.
    Forget { name: String },
    /// The host ends.
    Leave,
}

/// What a directory answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub(crate) enum Reply {
    /// To a hello.
    Welcome {
        /// What is spoken from here on: the lower of both.
        version: u32,
        /// How the directory calls the host.
        host: String,
    },
    /// To a report: names that are others'.
    Reported { taken: Vec<Taken> },
    /// To a list: a part of it, and whether there are more.
    Listed { entries: Vec<ListedDevice>, more: bool },
    /// To a forget.
    Forgotten { outcome: Forgotten },
    /// To a leave.
    Left,
    /// To anything that cannot be done. After a hello the connection ends.
    Refused { why: String },
}

/// Writes a message, within `limit`.
pub(crate) async fn send<S: AsyncWrite + Unpin>(
    stream: &mut S,
    message: &impl Serialize,
    limit: Duration,
) -> Result<(), NetbusError> {
    let text = serde_json::to_vec(message).map_err(|error| NetbusError::Malformed(error.to_string()))?;
    if text.len() > LONGEST_MESSAGE {
        return Err(NetbusError::Long(text.len()));
    }
    let sent = async {
        stream.write_all(&(text.len() as u32).to_be_bytes()).await?;
        stream.write_all(&text).await?;
        stream.flush().await
    };
    let sent = tokio::time::timeout(limit, sent).await.map_err(|_| NetbusError::Slow(limit))?;
    sent.map_err(NetbusError::stream("writing to the peer"))
}

/// Reads a message of at most [`LONGEST_MESSAGE`]; see [`receive_within`].
pub(crate) async fn receive<S: AsyncRead + Unpin, M: DeserializeOwned>(
    stream: &mut S,
    silence: Duration,
    limit: Duration,
) -> Result<Option<M>, NetbusError> {
    receive_within(stream, LONGEST_MESSAGE, (silence, limit)).await
}

/// Reads a message of at most `longest` bytes. `None`: the peer has closed the connection between two messages. The first byte may take
/// `silence`, the rest `limit`: a peer that sends a byte a minute does not keep its place.
pub(crate) async fn receive_within<S: AsyncRead + Unpin, M: DeserializeOwned>(
    stream: &mut S,
    longest: usize,
    (silence, limit): (Duration, Duration),
) -> Result<Option<M>, NetbusError> {
    let failed = NetbusError::stream("reading from the peer");
    let mut length = [0; 4];
    let first = tokio::time::timeout(silence, stream.read(&mut length[..1])).await;
    if first.map_err(|_| NetbusError::Slow(silence))?.map_err(&failed)? == 0 {
        return Ok(None);
    }
    let rest = async {
        stream.read_exact(&mut length[1..]).await.map_err(&failed)?;
        let bytes = u32::from_be_bytes(length) as usize;
        if bytes > longest {
            return Err(NetbusError::Long(bytes));
        }
        // Grows with what comes, so that a length alone takes no memory.
        let mut text = Vec::new();
        stream.take(bytes as u64).read_to_end(&mut text).await.map_err(&failed)?;
        if text.len() < bytes {
            return Err(NetbusError::Closed);
        }
        Ok(text)
    };
    let text = tokio::time::timeout(limit, rest).await.map_err(|_| NetbusError::Slow(limit))??;
    serde_json::from_slice(&text).map(Some).map_err(|error| NetbusError::Malformed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn lengths_and_texts_that_lie_are_refused() {
        let read = async |bytes: &[u8]| {
            let mut input = bytes;
            receive::<_, Request>(&mut input, LIMIT, LIMIT).await
        };
        assert!(matches!(read(&[]).await, Ok(None)));
        assert!(matches!(read(&[0, 0]).await, Err(NetbusError::Closed)));
        assert!(matches!(read(&[0, 0, 0, 9, b'{']).await, Err(NetbusError::Closed)));
        assert!(matches!(read(&u32::MAX.to_be_bytes()).await, Err(NetbusError::Long(_))));
        assert!(matches!(read(b"\0\0\0\x02{}").await, Err(NetbusError::Malformed(_))));
        let extra = br#"{"say":"list","x":1}"#;
        let mut message = (extra.len() as u32).to_be_bytes().to_vec();
        message.extend(extra);
        // A later program may say more.
        assert!(matches!(read(&message).await, Ok(Some(Request::List))));
    }

    #[tokio::test]
    async fn what_is_sent_is_received() {
        let (mut a, mut b) = tokio::io::duplex(64);
        let message = Request::Forget { name: "x".repeat(4000) };
        let (sent, received) =
            tokio::join!(send(&mut a, &message, LIMIT), receive::<_, Request>(&mut b, LIMIT, LIMIT));
        sent.unwrap();
        assert!(matches!(received.unwrap(), Some(Request::Forget { name }) if name.len() == 4000));
    }

    #[tokio::test]
    async fn a_message_that_does_not_end_is_too_slow() {
        let (mut slow, mut reader) = tokio::io::duplex(64);
        slow.write_all(&[0, 0, 0]).await.unwrap();
        let read = receive::<_, Request>(&mut reader, LIMIT, Duration::from_millis(20)).await;
        assert!(matches!(read, Err(NetbusError::Slow(_))), "{read:?}");
    }
}
