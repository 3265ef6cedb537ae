//! The authority's host: answers hosts that join, renew, or ask for the list of revoked certificates.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ioplane_identity::{
    CertificateFacts, HostName, IdentityDirectory, IdentityError, JoinRefusal, SECRET, SignedCertificate,
    SigningRequest, TlsFault,
};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::error::JoinError;
use crate::kill::{self, KillPoint};
use crate::limits::{AddressLimits, Allowed};
use crate::wire::{Answer, Ask, LONGEST_ANSWER, LONGEST_REQUEST, Request, VERSION, receive, send};

/// How long one connection may take, from its first byte to its last.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections at a time.
const MOST_CONNECTIONS: usize = 64;
/// How long a client may take to hear why it is refused.
const HEARS: Duration = Duration::from_secs(2);
/// After an error of `accept`, which most often is a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// An authority that answers. Dropped, it ends.
#[derive(Debug)]
pub struct JoinServer {
    address: SocketAddr,
    task: AbortHandle,
}

#[derive(Debug)]
struct Shared {
    identity: IdentityDirectory,
    /// For how many days a renewed certificate is valid.
    days: u32,
    limits: Mutex<AddressLimits>,
}

impl JoinServer {
    /// Answers on `listener`. Must be called in a runtime. `days`: for how long renewed certificates are valid.
    ///
    /// # Errors
    /// There is no authority in `identity`, or the listener cannot be used.
    pub fn start(
        listener: std::net::TcpListener,
        identity: IdentityDirectory,
        days: u32,
    ) -> Result<JoinServer, JoinError> {
        // Each connection reads the files anew; what is wrong with them is to be known at the start.
        identity.answering()?;
        let failed = |source| JoinError::Os { doing: "listening", source };
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared { identity, days, limits: Mutex::default() });
        Ok(JoinServer { address, task: tokio::spawn(listen(listener, shared)).abort_handle() })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for JoinServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listen(listener: TcpListener, shared: Arc<Shared>) {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let allowed = shared
                    .limits
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .allow(peer.ip(), Instant::now());
                match allowed {
                    Allowed::Yes => {}
                    Allowed::NoMore => {
                        tracing::warn!(%peer, error = %JoinError::TooOften(peer.ip()), "not answered");
                        continue;
                    }
                    Allowed::No => continue,
                }
                // Who finds no place is closed at once, and comes again.
                let Ok(place) = places.clone().try_acquire_owned() else { continue };
                let shared = shared.clone();
                tokio::spawn(async move {
                    let served = tokio::time::timeout(PATIENCE, serve(stream, peer, &shared)).await;
                    let served = served.unwrap_or(Err(JoinError::Slow(PATIENCE)));
                    drop(place);
                    if let Err(error) = served {
                        tracing::warn!(%peer, %error, "a host was not answered");
                    }
                });
            }
            Err(error) => {
                tracing::warn!(%error, "a host could not be accepted");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// From the first byte of one connection to its end.
async fn serve(stream: TcpStream, peer: SocketAddr, shared: &Arc<Shared>) -> Result<(), JoinError> {
    stream.set_nodelay(true).map_err(JoinError::stream("taking a connection"))?;
    let identity = shared.identity.clone();
    let tls = tokio::task::spawn_blocking(move || identity.answering()).await.map_err(JoinError::gone)??;
    let accepted = TlsAcceptor::from(tls).accept(stream).into_fallible().await;
    let mut stream = match accepted {
        Ok(stream) => stream,
        Err((error, stream)) => {
            let_hear(stream).await;
            return Err(JoinError::stream("starting TLS")(error));
        }
    };
    let shown = shown(&stream)?;
    let answer = match receive::<_, Request>(&mut stream, LONGEST_REQUEST).await {
        Ok(Request { version: VERSION, ask }) => answer(ask, shown, peer, shared).await?,
        Ok(_) => Answer::Refused(JoinRefusal::NotUnderstood),
        Err(error @ (JoinError::Malformed(_) | JoinError::Long { .. })) => {
            send(&mut stream, &Answer::Refused(JoinRefusal::NotUnderstood), LONGEST_ANSWER).await?;
            finish(stream).await;
            return Err(error);
        }
        Err(error) => return Err(error),
    };
    if let Answer::Refused(refusal) = &answer {
        tracing::warn!(%peer, %refusal, "a request is refused");
    }
    send(&mut stream, &answer, LONGEST_ANSWER).await?;
    finish(stream).await;
    Ok(())
}

/// What the certificate of the client says, if it has shown one. It is good then.
fn shown(stream: &TlsStream<TcpStream>) -> Result<Option<CertificateFacts>, JoinError> {
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let facts = certificate.map(|certificate| CertificateFacts::of(certificate)).transpose();
    facts.map_err(|why| TlsFault::Certificate(why).into())
}

/// Ends a connection such that what was sent arrives: a close with something unread resets it.
async fn finish(mut stream: TlsStream<TcpStream>) {
    let _ = stream.shutdown().await;
    let (stream, _) = stream.into_inner();
    let_hear(stream).await;
}

async fn let_hear(mut stream: TcpStream) {
    let ended = async {
        let _ = stream.shutdown().await;
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    };
    let _ = tokio::time::timeout(HEARS, ended).await;
}

async fn answer(
    ask: Ask,
    shown: Option<CertificateFacts>,
    peer: SocketAddr,
    shared: &Arc<Shared>,
) -> Result<Answer, JoinError> {
    let shared = shared.clone();
    let answered = tokio::task::spawn_blocking(move || {
        let answered = match ask {
            Ask::Join { secret, name, request } => join(&shared, &secret, name.as_deref(), &request),
            Ask::Renew { request } => renew(&shared, shown.as_ref(), &request),
            Ask::Revocations => revocations(&shared, shown.as_ref()),
        };
        match answered {
            Ok((answer, None)) => answer,
            Ok((answer, Some((done, facts)))) => {
                let CertificateFacts { name, serial, fingerprint, .. } = facts;
                tracing::info!(%peer, name, serial, fingerprint, done);
                answer
            }
            Err(IdentityError::Refused(refusal)) => Answer::Refused(refusal),
            Err(error) => {
                tracing::error!(%peer, %error, "the authority cannot be used");
                Answer::Refused(JoinRefusal::Unable)
            }
        }
    });
    answered.await.map_err(JoinError::gone)
}

/// An answer, and what the log says of it.
type Answered = Result<(Answer, Option<(&'static str, CertificateFacts)>), IdentityError>;

fn join(shared: &Shared, secret: &str, name: Option<&str>, request: &str) -> Answered {
    let name: Option<HostName> = name.map(str::parse).transpose().map_err(|_| JoinRefusal::BadName)?;
    // A request that cannot be used does not use the token up.
    let request = SigningRequest::parse(request)?;
    let secret = unhex(secret).ok_or(JoinRefusal::UnknownToken)?;
    let admission = shared.identity.use_token(&secret, name.as_ref())?;
    kill::here(KillPoint::Consumed);
    let signed = shared.identity.sign_admitted(&request, &admission)?;
    kill::here(KillPoint::Signed);
    issued(shared, signed, "a host has joined")
}

fn renew(shared: &Shared, shown: Option<&CertificateFacts>, request: &str) -> Answered {
    let shown = shown.ok_or(JoinRefusal::NoCertificate)?;
    let request = SigningRequest::parse(request)?;
    let signed = shared.identity.sign_renewal(&request, shown, shared.days)?;
    issued(shared, signed, "a host has renewed its certificate")
}

fn revocations(shared: &Shared, shown: Option<&CertificateFacts>) -> Answered {
    shown.ok_or(JoinRefusal::NoCertificate)?;
    let list = shared.identity.authority_revocations()?.map(|list| list.text().to_owned());
    Ok((Answer::Revocations { list }, None))
}

fn issued(shared: &Shared, signed: SignedCertificate, done: &'static str) -> Answered {
    let SignedCertificate { certificate, authority, facts } = signed;
    let revocations = shared.identity.authority_revocations()?.map(|list| list.text().to_owned());
    Ok((Answer::Issued { certificate, authority, revocations }, Some((done, facts))))
}

fn unhex(text: &str) -> Option<[u8; SECRET]> {
    let mut bytes = [0; SECRET];
    if text.len() != 2 * SECRET || !text.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}
