//! The authority's host: answers hosts that join, renew, or ask for the list of revoked certificates.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_identity::{
    CertificateFacts, FileVersion, HostName, IdentityDirectory, IdentityError, JoinRefusal, SECRET,
    SignedCertificate, SigningRequest, TlsFault, let_hear,
};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex as Turns, OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;

use crate::error::JoinError;
use crate::kill::{self, KillPoint};
use crate::limits::{AddressLimits, Allowed};
use crate::wire::{Answer, Ask, LONGEST_ANSWER, LONGEST_REQUEST, Request, VERSION, receive, send};

/// How long one connection may take, from when it is taken to its last byte.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long its handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// For how long one certificate of the authority's answers for it, at most: it ends in a day.
const KEEPS: Duration = Duration::from_secs(3600);
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
    /// What the handshake needs, of the files as they were.
    tls: Arc<Turns<Option<Handshakes>>>,
    /// Whoever works with the ledger has it: the others wait here, and hold no thread.
    turn: Arc<Turns<()>>,
}

#[derive(Debug)]
struct Handshakes {
    of: [Option<FileVersion>; 3],
    since: Instant,
    tls: Arc<ServerConfig>,
}

/// A place among the connections, until it is dropped: with what is carried out for it.
#[derive(Debug)]
struct Place {
    shared: Arc<Shared>,
    peer: SocketAddr,
    /// When the connection is given up.
    end: Instant,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.limits().end(self.peer.ip());
    }
}

impl Shared {
    fn limits(&self) -> MutexGuard<'_, AddressLimits> {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server's part of TLS. It is made anew when one of its files has changed.
    async fn tls(&self) -> Result<Arc<ServerConfig>, JoinError> {
        let mut kept = self.tls.clone().lock_owned().await;
        let identity = self.identity.clone();
        let made = move || -> Result<_, IdentityError> {
            let of = identity.answering_version();
            match &*kept {
                Some(kept) if kept.of == of && kept.since.elapsed() < KEEPS => Ok(kept.tls.clone()),
                _ => {
                    let tls = identity.answering()?;
                    *kept = Some(Handshakes { of, since: Instant::now(), tls: tls.clone() });
                    Ok(tls)
                }
            }
        };
        Ok(tokio::task::spawn_blocking(made).await.map_err(JoinError::gone)??)
    }
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
        // Whatever is wrong with the files is to be known at the start. A list that lacks something is written again here.
        identity.answering()?;
        let failed = |source| JoinError::Os { doing: "listening", source };
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = TcpListener::from_std(listener).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let shared = Arc::new(Shared {
            identity,
            days,
            limits: Mutex::default(),
            tls: Arc::default(),
            turn: Arc::default(),
        });
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
                let now = Instant::now();
                let allowed = shared.limits().allow(peer.ip(), now);
                match allowed {
                    Allowed::Yes => {}
                    Allowed::NoMore => {
                        tracing::warn!(%peer, error = %JoinError::TooOften(peer.ip()), "not answered");
                        continue;
                    }
                    Allowed::No => continue,
                }
                // Who finds no place is closed at once, and comes again.
                let Ok(_permit) = places.clone().try_acquire_owned() else { continue };
                if !shared.limits().begin(peer.ip()) {
                    continue;
                }
                let place = Place { shared: shared.clone(), peer, end: now + PATIENCE, _permit };
                tokio::spawn(async move {
                    let served = tokio::time::timeout(PATIENCE, serve(stream, Arc::new(place))).await;
                    let served = served.unwrap_or(Err(JoinError::Slow(PATIENCE)));
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

/// All of one connection.
async fn serve(stream: TcpStream, place: Arc<Place>) -> Result<(), JoinError> {
    stream.set_nodelay(true).map_err(JoinError::stream("taking a connection"))?;
    let (tls, peer) = (place.shared.tls().await?, place.peer);
    let accepted = TlsAcceptor::from(tls).accept(stream).into_fallible();
    let accepted = tokio::time::timeout(HANDSHAKE, accepted).await;
    let mut stream = match accepted.map_err(|_| JoinError::Slow(HANDSHAKE))? {
        Ok(stream) => stream,
        Err((error, stream)) => {
            let_hear(stream, HEARS).await;
            return Err(JoinError::stream("starting TLS")(error));
        }
    };
    let shown = shown(&stream)?;
    let answer = match receive::<_, Request>(&mut stream, LONGEST_REQUEST).await {
        Ok(Request { version: VERSION, ask }) => answer(ask, shown, place).await?,
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
    let_hear(stream, HEARS).await;
}

async fn answer(ask: Ask, shown: Option<CertificateFacts>, place: Arc<Place>) -> Result<Answer, JoinError> {
    let here = place.clone();
    // Whoever has no token and no certificate is refused without waiting for the others.
    let wanted = tokio::task::spawn_blocking(move || wanted(&here.shared, ask, shown));
    let wanted = match wanted.await.map_err(JoinError::gone)? {
        Ok(wanted) => wanted,
        Err(error) => return Ok(refused(error, place.peer)),
    };
    let turn = place.shared.turn.clone().lock_owned().await;
    let answered = tokio::task::spawn_blocking(move || {
        let (_turn, shared, peer) = (turn, &place.shared, place.peer);
        // Nobody waits for the answer any more.
        if Instant::now() >= place.end {
            return Err(JoinError::Slow(PATIENCE));
        }
        let answered = match wanted {
            Wanted::Join { secret, name, request } => join(shared, peer, &secret, name.as_ref(), &request),
            Wanted::Renew { shown, request } => renew(shared, &shown, &request),
            Wanted::Revocations => revocations(shared),
        };
        Ok(match answered {
            Ok((answer, None)) => answer,
            Ok((answer, Some((done, facts)))) => {
                let CertificateFacts { name, serial, fingerprint, .. } = facts;
                tracing::info!(%peer, name, serial, fingerprint, done);
                answer
            }
            Err(error) => refused(error, peer),
        })
    });
    answered.await.map_err(JoinError::gone)?
}

fn refused(error: IdentityError, peer: SocketAddr) -> Answer {
    match error {
        IdentityError::Refused(refusal) => Answer::Refused(refusal),
        error => {
            tracing::error!(%peer, %error, "the authority cannot be used");
            Answer::Refused(JoinRefusal::Unable)
        }
    }
}

/// What is asked for, read and checked as far as that can be done without the ledger's lock.
enum Wanted {
    Join { secret: [u8; SECRET], name: Option<HostName>, request: SigningRequest },
    Renew { shown: CertificateFacts, request: SigningRequest },
    Revocations,
}

fn wanted(shared: &Shared, ask: Ask, shown: Option<CertificateFacts>) -> Result<Wanted, IdentityError> {
    Ok(match ask {
        Ask::Join { secret, name, request } => {
            let name = name.as_deref().map(str::parse).transpose().map_err(|_| JoinRefusal::BadName)?;
            // A request that cannot be used does not use the token up.
            let request = SigningRequest::parse(&request)?;
            let secret = unhex(&secret).ok_or(JoinRefusal::UnknownToken)?;
            shared.identity.knows_token(&secret)?;
            Wanted::Join { secret, name, request }
        }
        Ask::Renew { request } => {
            let shown = shown.ok_or(JoinRefusal::NoCertificate)?;
            Wanted::Renew { shown, request: SigningRequest::parse(&request)? }
        }
        Ask::Revocations => {
            shown.ok_or(JoinRefusal::NoCertificate)?;
            Wanted::Revocations
        }
    })
}

/// An answer, and what the log says of it.
type Answered = Result<(Answer, Option<(&'static str, CertificateFacts)>), IdentityError>;

fn join(
    shared: &Shared,
    peer: SocketAddr,
    secret: &[u8; SECRET],
    name: Option<&HostName>,
    request: &SigningRequest,
) -> Answered {
    let admission = shared.identity.use_token(secret, name)?;
    kill::here(KillPoint::Consumed);
    let signed = shared.identity.sign_admitted(request, &admission).and_then(|signed| {
        kill::here(KillPoint::Signed);
        issued(shared, signed, "a host has joined")
    });
    signed.map_err(|error| {
        tracing::error!(%peer, %error, host = %admission.name, "nothing came of a token that was used up");
        JoinRefusal::Spent.into()
    })
}

fn renew(shared: &Shared, shown: &CertificateFacts, request: &SigningRequest) -> Answered {
    let signed = shared.identity.sign_renewal(request, shown, shared.days)?;
    issued(shared, signed, "a host has renewed its certificate")
}

fn revocations(shared: &Shared) -> Answered {
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
