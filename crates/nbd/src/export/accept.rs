//! Handshakes with clients, on the control side: any stream, any number of exports, bounded in time and number.

use std::future::Future;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::error::NbdError;
use crate::handshake::ExportInfo;
use crate::handshake::server::{ExportRefusal, Negotiated, ServerHandshake, ServerStep, TlsPolicy};

/// Bytes read at a time.
const INPUT: usize = 4096;

/// What is exported, as handshakes ask for it. The futures may take as long as a handshake may.
pub trait Exports: Sync {
    /// The export of that name; the empty name asks for the default one. `enters`: the client begins with that, if it is told
    /// of one; otherwise it only asks.
    fn find(
        &self,
        name: &str,
        enters: bool,
    ) -> impl Future<Output = Result<ExportInfo, ExportRefusal>> + Send;

    /// Names and descriptions of those that a client may know of.
    fn list(&self) -> impl Future<Output = Vec<(String, String)>> + Send;

    /// The name of the metadata context that a query of [`crate::handshake::server::NAMESPACE`] finds. `selects`: it is to be in force;
    /// otherwise the client only asks.
    fn context(
        &self,
        export: &str,
        query: &str,
        selects: bool,
    ) -> impl Future<Output = Option<String>> + Send {
        let _ = (export, query, selects);
        std::future::ready(None)
    }
}

/// A client in the transmission phase.
#[derive(Debug)]
pub struct AcceptedClient<S> {
    /// Its stream.
    pub stream: S,
    /// What was agreed.
    pub negotiated: Negotiated,
    /// What it has sent beyond the handshake.
    pub ahead: Vec<u8>,
}

/// Places for handshakes: a client that says nothing, or a byte a minute, loses its place in time, and however many come, no more than
/// that wait.
#[derive(Debug)]
pub struct Handshakes {
    places: Semaphore,
    most: usize,
    patience: Duration,
}

impl Handshakes {
    /// At most `most` at a time, each for `patience` at most, from its first byte to its last.
    pub fn new(most: usize, patience: Duration) -> Handshakes {
        Handshakes { places: Semaphore::new(most), most, patience }
    }

    /// One handshake without TLS. `None` when the client has ended it, which is no error: it may have asked what there is. Dropping the
    /// future closes the stream and gives the place back.
    pub async fn accept<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        exports: &impl Exports,
    ) -> Result<Option<AcceptedClient<S>>, NbdError> {
        let _place = self.places.try_acquire().map_err(|_| NbdError::Handshakes(self.most))?;
        let whole = tokio::time::timeout(self.patience, handshake(stream, exports));
        whole.await.map_err(|_| NbdError::Slow(self.patience))?
    }
}

async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    exports: &impl Exports,
) -> Result<Option<AcceptedClient<S>>, NbdError> {
    let os = |source| NbdError::Os { doing: "a handshake", source };
    let mut handshake = ServerHandshake::new(TlsPolicy::Unsupported);
    let mut buffer = [0; INPUT];
    let (mut start, mut end) = (0, 0);
    let mut output = Vec::new();
    loop {
        let mut input = &buffer[start..end];
        let step = handshake.next(&mut input, &mut output);
        start = end - input.len();
        // Also what was said before a violation.
        stream.write_all(&output).await.map_err(os)?;
        output.clear();
        match step? {
            ServerStep::Read => {
                let read = stream.read(&mut buffer).await.map_err(os)?;
                (start, end) = (0, read);
                if read == 0 {
                    return Ok(None);
                }
            }
            ServerStep::Send => {}
            ServerStep::Find { name, enters } => {
                let found = exports.find(&name, enters).await;
                handshake.answer(found, &mut output);
            }
            ServerStep::List => {
                let list = exports.list().await;
                let list = list.iter().map(|(name, description)| (&name[..], &description[..]));
                handshake.list(list, &mut output);
            }
            ServerStep::Query { export, query, selects } => {
                let found = exports.context(&export, &query, selects).await;
                handshake.context(found.as_deref());
            }
            ServerStep::Transmission(negotiated) => {
                stream.flush().await.map_err(os)?;
                let ahead = buffer[start..end].to_vec();
                return Ok(Some(AcceptedClient { stream, negotiated, ahead }));
            }
            // There is no TLS here, so it is never asked for.
            ServerStep::StartTls | ServerStep::End => {
                let _ = stream.shutdown().await;
                return Ok(None);
            }
        }
    }
}
