//! One request and one answer: the length in four bytes, the most significant first, then JSON.
//!
//! Whoever reads passes over fields that it does not know. A request of a later version is answered with a refusal, so the version is said first.

use ioplane_identity::JoinRefusal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::error::JoinError;

/// The version of what is said here.
pub(crate) const VERSION: u32 = 1;
/// Longest request, bytes.
pub(crate) const LONGEST_REQUEST: usize = 16 << 10;
/// Longest answer, bytes: certificates, and the list of revoked ones.
pub(crate) const LONGEST_ANSWER: usize = 4 << 20;

/// What a host asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Request {
    pub version: u32,
    #[serde(flatten)]
    pub ask: Ask,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub(crate) enum Ask {
    /// A certificate, by a token.
    Join {
        /// In hexadecimal.
        secret: String,
        name: Option<String>,
        /// PKCS #10 (PEM).
        request: String,
    },
    /// Another certificate, by the one that was shown in the handshake.
    Renew { request: String },
    /// The list of revoked certificates, by the same.
    Revocations,
}

impl std::fmt::Debug for Ask {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Ask::Join { .. } => "Join",
            Ask::Renew { .. } => "Renew",
            Ask::Revocations => "Revocations",
        })
    }
}

/// What the authority's host answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub(crate) enum Answer {
    /// PEM, each.
    Issued {
        certificate: String,
        authority: String,
        revocations: Option<String>,
    },
    /// PEM.
    Revocations {
        list: Option<String>,
    },
    Refused(JoinRefusal),
}

pub(crate) async fn send<S: AsyncWrite + Unpin>(
    stream: &mut S,
    message: &impl Serialize,
    longest: usize,
) -> Result<(), JoinError> {
    let text = serde_json::to_vec(message).map_err(JoinError::malformed)?;
    if text.len() > longest {
        return Err(JoinError::Long { bytes: text.len(), most: longest });
    }
    let sent = async {
        stream.write_all(&(text.len() as u32).to_be_bytes()).await?;
        stream.write_all(&text).await?;
        stream.flush().await
    };
    sent.await.map_err(JoinError::stream("writing to the peer"))
}

/// Reads a message of at most `longest` bytes. The caller limits the time.
pub(crate) async fn receive<S: AsyncRead + Unpin, M: DeserializeOwned>(
    stream: &mut S,
    longest: usize,
) -> Result<M, JoinError> {
    let failed = JoinError::stream("reading from the peer");
    let mut length = [0; 4];
    stream.read_exact(&mut length).await.map_err(&failed)?;
    let bytes = u32::from_be_bytes(length) as usize;
    if bytes > longest {
        return Err(JoinError::Long { bytes, most: longest });
    }
    // Grows with what comes, so that a length alone takes no memory.
    let mut text = Vec::new();
    stream.take(bytes as u64).read_to_end(&mut text).await.map_err(&failed)?;
    if text.len() < bytes {
        return Err(JoinError::Closed);
    }
    serde_json::from_slice(&text).map_err(JoinError::malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lengths_and_texts_that_lie_are_refused() {
        let read = async |bytes: &[u8]| {
            let mut input = bytes;
            receive::<_, Request>(&mut input, LONGEST_REQUEST).await
        };
        assert!(matches!(read(&[]).await, Err(JoinError::Closed)));
        assert!(matches!(read(&[0, 0]).await, Err(JoinError::Closed)));
        assert!(matches!(read(&[0, 0, 0, 9, b'{']).await, Err(JoinError::Closed)));
        assert!(matches!(read(&u32::MAX.to_be_bytes()).await, Err(JoinError::Long { .. })));
        assert!(matches!(read(b"\0\0\0\x02{}").await, Err(JoinError::Malformed(_))));
        let said = br#"{"version":1,"ask":"revocations","later":1}"#;
        let mut message = (said.len() as u32).to_be_bytes().to_vec();
        message.extend(said);
        let read = read(&message).await;
        assert!(matches!(read, Ok(Request { version: 1, ask: Ask::Revocations })), "{read:?}");
    }

    #[tokio::test]
    async fn what_is_said_is_read_back() {
        let mut bytes = Vec::new();
        let ask = Ask::Join { secret: "ff".to_owned(), name: None, request: "x".to_owned() };
        send(&mut bytes, &Request { version: VERSION, ask }, LONGEST_REQUEST).await.unwrap();
        let read: Request = receive(&mut &bytes[..], LONGEST_REQUEST).await.unwrap();
        assert!(matches!(read.ask, Ask::Join { secret, name: None, .. } if secret == "ff"));
        let mut bytes = Vec::new();
        send(&mut bytes, &Answer::Refused(JoinRefusal::UsedToken), LONGEST_ANSWER).await.unwrap();
        let read: Answer = receive(&mut &bytes[..], LONGEST_ANSWER).await.unwrap();
        assert!(matches!(read, Answer::Refused(JoinRefusal::UsedToken)));
    }
}
