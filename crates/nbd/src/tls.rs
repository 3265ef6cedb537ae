//! TLS for the transmission phase: records on one side, plain bytes on the other.
//!
//! ```text
//!   I/O core: poller, channel <--socket pair--> relay, a task on the control side <--TLS--> the peer
//! ```
//!
//! The relay holds bytes as a network does: what it has not passed on when one of its ends is gone is never passed on. That is why fences
//! and replays hold with it as without (docs/decisions/0048-identity-and-tls.md).

use std::io::{Error, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use ioplane_identity::{HostIdentity, IdentityDirectory, TlsFault};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::Instant;
use tokio_rustls::TlsStream;

use crate::error::NbdError;

/// Bytes that are passed on at a time, in each direction: four records.
const BUFFER: usize = 64 << 10;

/// What has become of a relay's connection.
#[derive(Debug, Default)]
pub(crate) struct RelayEnd(AtomicI32);

impl RelayEnd {
    /// Why it was lost, by errno; `None` while it is there, and after an orderly end.
    pub fn failure(&self) -> Option<i32> {
        Some(self.0.load(Ordering::Acquire)).filter(|errno| *errno != 0)
    }
}

/// One end of a relay, and its connection.
#[derive(Debug)]
pub(crate) struct Relayed {
    /// The plain end: what a poller or a channel has in place of the connection.
    pub plain: OwnedFd,
    /// The connection itself, to be reset: what is under way in it is thrown away then.
    pub wire: OwnedFd,
    /// What became of it.
    pub end: Arc<RelayEnd>,
}

/// Starts a relay for a connection whose handshakes have ended. When the plain end is closed the peer is told, and has `limit` to end as well.
/// Must be called in a runtime.
pub(crate) fn relay(stream: TlsStream<TcpStream>, limit: Duration) -> std::io::Result<Relayed> {
    let (ours, plain) = UnixStream::pair()?;
    let wire = stream.get_ref().0.as_fd().try_clone_to_owned()?;
    let end = Arc::new(RelayEnd::default());
    let plain = plain.into_std()?.into();
    let (told, peer) = (end.clone(), stream.get_ref().0.peer_addr().ok());
    tokio::spawn(async move {
        let mut ours = ours;
        if let Err(error) = pass_on(stream, &mut ours, limit).await {
            let errno = match error.raw_os_error() {
                Some(errno) => errno,
                None if error.kind() == ErrorKind::TimedOut => libc::ETIMEDOUT,
                // Cut off without the peer's word, or changed on its way.
                None if error.kind() == ErrorKind::UnexpectedEof => libc::ECONNRESET,
                None => libc::EBADMSG,
            };
            told.0.store(errno, Ordering::Release);
            tracing::info!(?peer, %error, "a TLS connection is lost");
        }
        // The plain end reads to its end now; before that it could not know why.
        drop(ours);
    });
    Ok(Relayed { plain, wire, end })
}

/// Until both directions have ended, or the connection is lost.
async fn pass_on(
    stream: TlsStream<TcpStream>,
    plain: &mut UnixStream,
    limit: Duration,
) -> std::io::Result<()> {
    let (mut records_in, mut records_out) = tokio::io::split(stream);
    let (mut plain_in, mut plain_out) = plain.split();
    let outgoing = async {
        let mut buffer = vec![0; BUFFER];
        loop {
            match plain_in.read(&mut buffer).await {
                // An error: it was closed with something unread.
                Ok(0) | Err(_) => break,
                Ok(bytes) => {
                    records_out.write_all(&buffer[..bytes]).await?;
                    records_out.flush().await?;
                }
            }
        }
        records_out.shutdown().await
    };
    let incoming = async {
        let mut buffer = vec![0; BUFFER];
        let mut wanted = true;
        loop {
            let bytes = records_in.read(&mut buffer).await?;
            if bytes == 0 {
                let _ = plain_out.shutdown().await;
                return Ok::<(), Error>(());
            }
            // Nobody reads any more: the peer is read to its end, so that it gets what was sent to it.
            wanted = wanted && plain_out.write_all(&buffer[..bytes]).await.is_ok();
        }
    };
    tokio::pin!(outgoing, incoming);
    let (mut sent, mut received, mut until) = (false, false, None);
    while !(sent && received) {
        tokio::select! {
            done = &mut outgoing, if !sent => {
                done?;
                sent = true;
                until = Some(Instant::now() + limit);
            }
            done = &mut incoming, if !received => {
                // Once this side has ended the peer may end as it likes.
                if !sent {
                    done?;
                }
                received = true;
            }
            () = tokio::time::sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
    Ok(())
}

/// An error of a stream that TLS may have a part in.
pub(crate) fn stream_error(doing: &'static str) -> impl Fn(Error) -> NbdError {
    move |source| match TlsFault::of(&source) {
        Some(fault) => NbdError::Tls(fault),
        None => NbdError::Os { doing, source },
    }
}

/// Reads the identity of this host: a few small files.
pub(crate) async fn load(directory: &IdentityDirectory) -> Result<HostIdentity, NbdError> {
    let directory = directory.clone();
    let loaded = tokio::task::spawn_blocking(move || directory.load()).await;
    let gone =
        |error: tokio::task::JoinError| NbdError::Os { doing: "reading an identity", source: error.into() };
    Ok(loaded.map_err(gone)??)
}

#[cfg(test)]
mod tests;
