//! Handshakes with clients, on the control side: any stream, any number of exports, bounded in time and number.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::time::Duration;

use ioplane_identity::{CertificateFacts, IdentityDirectory, TlsFault, WatchedStream, let_hear};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::socket::ClientSocket;
use crate::error::NbdError;
use crate::handshake::ExportInfo;
use crate::handshake::server::{ExportRefusal, Negotiated, ServerHandshake, ServerStep, TlsPolicy};
use crate::records::Records;
use crate::session::{Bytes, SessionStream};
use crate::sums::{self, CRC32C, RecordReader, RecordWriter, Spoken, StreamSum};
use crate::tls::{self, load};

/// Bytes read at a time.
const INPUT: usize = 4096;
/// How long a client that was refused has to hear of it.
const HEARS: Duration = Duration::from_secs(2);

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

/// What has come by TCP.
pub enum Arrival {
    /// A client of an export.
    Client(AcceptedClient<ClientSocket>),
    /// A host that wants a session ([`SESSION`](crate::session::SESSION)).
    Session(SessionStream),
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
        let mut stream = stream;
        let mut handshake = ServerHandshake::new(TlsPolicy::Unsupported);
        let talk = talk(&mut stream, &mut handshake, exports, false);
        match self.in_time(talk).await? {
            Talked::Transmission(negotiated, Spoken { ahead, .. }) => {
                Ok(Some(AcceptedClient { stream, negotiated, ahead }))
            }
            // There is no TLS here, so it is never asked for.
            Talked::StartTls | Talked::End => Ok(None),
        }
    }

    /// The same for a client by TCP that may start TLS, or must, by `policy`; one that does not is served with sums if it asks for them. What it is told without TLS is that of `plain`; with TLS `known` is asked
    /// once who it is, by the name in its certificate. This host's own identity is read anew for each client.
    pub async fn accept_tls<E: Exports>(
        &self,
        mut stream: TcpStream,
        policy: TlsPolicy,
        identity: &IdentityDirectory,
        plain: &impl Exports,
        known: impl FnOnce(&str) -> E,
    ) -> Result<Option<Arrival>, NbdError> {
        let _place = self.places.try_acquire().map_err(|_| NbdError::Handshakes(self.most))?;
        let os = |source| NbdError::Os { doing: "taking a client over", source };
        self.in_time(async {
            let mut handshake = ServerHandshake::new(policy);
            let (socket, negotiated, ahead) = match talk(&mut stream, &mut handshake, plain, true).await? {
                Talked::End => return Ok(None),
                Talked::Transmission(negotiated, spoken) if negotiated.is_session() => {
                    return session(stream, &spoken.ahead);
                }
                Talked::Transmission(negotiated, spoken) if negotiated.has_sums() => {
                    let records = begin_sums(&mut stream, spoken).await?;
                    let fd = OwnedFd::from(stream.into_std().map_err(os)?);
                    (ClientSocket::with_records(fd, records), negotiated, Vec::new())
                }
                Talked::Transmission(negotiated, spoken) => {
                    (OwnedFd::from(stream.into_std().map_err(os)?).into(), negotiated, spoken.ahead)
                }
                Talked::StartTls => {
                    let (mut stream, peer) = start_tls(stream, identity).await?;
                    handshake.tls_started();
                    let Talked::Transmission(negotiated, Spoken { ahead, .. }) =
                        talk(&mut stream, &mut handshake, &known(&peer.name), false).await?
                    else {
                        return Ok(None);
                    };
                    let watched = identity.watch(&peer, stream.get_ref().0).map_err(os)?;
                    if negotiated.is_session() {
                        return session(WatchedStream::new(stream, Some(watched)), &ahead);
                    }
                    let (stream, records) = Records::of(stream);
                    let fd = OwnedFd::from(stream.into_std().map_err(os)?);
                    (ClientSocket::with_records(fd, records.watched(watched)), negotiated, ahead)
                }
            };
            Ok(Some(Arrival::Client(AcceptedClient { stream: socket, negotiated, ahead })))
        })
        .await
    }

    async fn in_time<T>(&self, work: impl Future<Output = Result<T, NbdError>>) -> Result<T, NbdError> {
        let limited = tokio::time::timeout(self.patience, work);
        limited.await.map_err(|_| NbdError::Slow(self.patience))?
    }
}

/// A host speaks when its handshake has been answered.
fn session(stream: impl Bytes + 'static, ahead: &[u8]) -> Result<Option<Arrival>, NbdError> {
    match ahead {
        [] => Ok(Some(Arrival::Session(Box::pin(stream)))),
        ahead => Err(NbdError::Ahead(ahead.len())),
    }
}

/// Starts TLS as its server. Says by which certificate the client is known to the authority; its name is that of a host.
async fn start_tls(
    stream: TcpStream,
    identity: &IdentityDirectory,
) -> Result<(TlsStream<TcpStream>, CertificateFacts), NbdError> {
    let identity = load(identity).await?;
    let accepting = TlsAcceptor::from(identity.server()).accept(stream).into_fallible();
    let stream = match accepting.await {
        Ok(stream) => stream,
        Err((error, stream)) => {
            let_hear(stream, HEARS).await;
            return Err(tls::stream_error("starting TLS")(error));
        }
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let certificate = certificate.ok_or(NbdError::Tls(TlsFault::Missing))?;
    let host = |facts: CertificateFacts| Ok(CertificateFacts { name: facts.host()?.to_string(), ..facts });
    let peer = CertificateFacts::of(certificate).and_then(host);
    let peer = peer.map_err(|why| NbdError::Tls(TlsFault::Certificate(why)))?;
    Ok((stream, peer))
}

/// What a handshake, or its part before TLS, came to.
enum Talked {
    Transmission(Negotiated, Spoken),
    StartTls,
    End,
}

/// Goes on with records with sums; the first one says that what was sent so far came as it is.
async fn begin_sums(stream: &mut TcpStream, spoken: Spoken) -> Result<Records, NbdError> {
    let Spoken { mut sent, received, ahead } = spoken;
    stream.write_all(&sent.opening()).await.map_err(tls::stream_error("a handshake"))?;
    let mut reader = RecordReader::new(received);
    let room = reader.room().get_mut(..ahead.len()).ok_or(NbdError::Ahead(ahead.len()))?;
    room.copy_from_slice(&ahead);
    reader.received(ahead.len());
    Ok(Records::summed(reader, RecordWriter::new(sent)))
}

/// `has_sums`: a client that asks for them gets them.
async fn talk<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    handshake: &mut ServerHandshake,
    exports: &impl Exports,
    has_sums: bool,
) -> Result<Talked, NbdError> {
    let os = tls::stream_error("a handshake");
    let mut buffer = [0; INPUT];
    let (mut start, mut end) = (0, 0);
    let mut output = Vec::new();
    let (mut sent, mut received) = (StreamSum::default(), StreamSum::default());
    loop {
        let mut input = &buffer[start..end];
        let step = handshake.next(&mut input, &mut output);
        received.add(&buffer[start..end - input.len()]);
        start = end - input.len();
        sent.add(&output);
        // Also what was said before a violation.
        stream.write_all(&output).await.map_err(&os)?;
        // TLS keeps records until it is told.
        stream.flush().await.map_err(&os)?;
        output.clear();
        match step? {
            ServerStep::Read => {
                let read = stream.read(&mut buffer).await.map_err(&os)?;
                (start, end) = (0, read);
                if read == 0 {
                    return Ok(Talked::End);
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
            // Not the export's business.
            ServerStep::Query { query, .. } if sums::is_asked_by(&query) => {
                handshake.context(has_sums.then_some(CRC32C));
            }
            ServerStep::Query { export, query, selects } => {
                let found = exports.context(&export, &query, selects).await;
                handshake.context(found.as_deref());
            }
            ServerStep::Transmission(negotiated) => {
                stream.flush().await.map_err(&os)?;
                let ahead = buffer[start..end].to_vec();
                return Ok(Talked::Transmission(negotiated, Spoken { sent, received, ahead }));
            }
            // What came behind it in plain text would have been a violation.
            ServerStep::StartTls => return Ok(Talked::StartTls),
            ServerStep::End => {
                let _ = stream.shutdown().await;
                return Ok(Talked::End);
            }
        }
    }
}
