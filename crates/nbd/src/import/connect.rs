//! From an address to a connection that has passed the handshake.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use ioplane_identity::{CertificateFacts, IdentityDirectory, PeerConnection, TlsFault};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;

use super::address::ServerAddress;
use super::facts::Facts;
use super::options::ImportOptions;
use super::places;
use super::socket::Socket;
use crate::claim::{CLAIM, ClaimReply};
use crate::error::{NbdError, Violation};
use crate::handshake::client::{ClientHandshake, ClientOptions, ClientStep, ClientTls, Connected};
use crate::protection::Protection;
use crate::records::Records;
use crate::reserve::{RESERVE, ReserveReply, order_query};
use crate::session::SESSIONS;
use crate::sums::{self, HEADER, RecordReader, RecordWriter, Spoken, StreamSum};
use crate::tls;

/// The metadata context by which an exporter of ours says which instance it is: what follows the sign of equality in the reply's name.
pub const INSTANCE: &str = "ioplane:instance";
/// The metadata context by which an import of ours says whose connection this is, and how often it was tried:
/// `ioplane:epoch=HOLDER/SESSION/CHANNEL/EPOCH`, and `/GENERATION` if it has a claim ([`CLAIM`]). An exporter of ours selects it when the connections of older sessions of the holder, and older ones of the
/// channel, are read no more and all that was begun for them has ended; never after a later session has come. Without `=` it is selected at once, and claims
/// nothing: the exporter knows of epochs.
pub const EPOCH: &str = "ioplane:epoch";
/// Of an instance `IMAGE@START` the image: another one is another disk. Empty if the instance says none. One that nobody may write has its content with it,
/// `IMAGE~CONTENT`: what was read from another one must not be used any more.
pub(super) fn image_of(instance: &str) -> &str {
    instance.rsplit_once('@').map_or("", |(image, _)| image)
}

/// Whether two instances are of one image that was written meanwhile, although nobody may write it while it is published.
pub(super) fn differ_in_content(known: &str, now: &str) -> bool {
    let split = |instance| image_of(instance).split_once('~');
    split(known).zip(split(now)).is_some_and(|(known, now)| known.0 == now.0 && known.1 != now.1)
}

/// In an error: there was no connection yet.
pub(super) const CONNECTING: &str = "connecting";
const SETTING_UP: &str = "setting up the socket";

/// Longest name of an instance.
pub(super) const LONGEST_INSTANCE: usize = 128;

/// A server that has been reached.
#[derive(Debug, Clone)]
pub(super) struct Reached {
    pub socket: Arc<Socket>,
    pub facts: Facts,
    /// Structured replies were negotiated.
    pub structured: bool,
    /// Which instance of an exporter of ours it is; `None` for others.
    pub instance: Option<String>,
    /// It has confirmed the epoch.
    pub fenced: bool,
    /// It keeps claims for this export, and was asked whether it does.
    pub keeps_claims: bool,
    /// What it says of the claim.
    pub claim: Option<ClaimReply>,
    /// What it says of the reservation.
    pub reserved: Option<ReserveReply>,
    /// It knows reservations, and was asked for one, or whether it does.
    pub knows_reservations: bool,
    /// It has sessions, and was asked whether it has.
    pub has_sessions: bool,
}

/// The number of a question about reservations: later questions of this host have greater ones, also those of a later process, unless its clock is set back
/// in between.
fn next_order() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let now = u64::try_from(since_1970).unwrap_or(u64::MAX);
    let next = |last: u64| Some(now.max(last.saturating_add(1)));
    LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next)
        .map_or(now, |last| now.max(last.saturating_add(1)))
}

/// Connects, within [`ImportOptions::connect_timeout`]. `epoch`: the query of [`EPOCH`], one of [`CLAIM`], or one of [`RESERVE`].
pub(super) async fn reach(options: &ImportOptions, epoch: String) -> Result<Reached, NbdError> {
    let limit = options.connect_timeout;
    let turn = options.turn.load(Ordering::Relaxed);
    let reached = match tokio::time::timeout(limit, connect(options, epoch, turn)).await {
        Ok(reached) => reached.and_then(|reached| has_sums_still(options, reached)),
        Err(_) => Err(NbdError::Slow(limit)),
    };
    if reached.is_err() {
        // Several that began with one address and failed make one step.
        let next = turn.wrapping_add(1);
        let _ = options.turn.compare_exchange(turn, next, Ordering::Relaxed, Ordering::Relaxed);
    }
    reached
}

/// After so many handshakes in a row in which an instance that has had sums has none, it has none: bits that flip by chance do not hit the same words every time.
const SUMS_ARE_GONE: u32 = 4;

/// An instance that has had sums has them for as long as its program runs: if it seems to have none, the words by which it says so were changed on the way.
fn has_sums_still(options: &ImportOptions, reached: Reached) -> Result<Reached, NbdError> {
    let Some(instance) = &reached.instance else { return Ok(reached) };
    let is_known = options.summed.load().as_deref() == Some(instance);
    match reached.socket.protection() {
        Protection::Sums => {
            options.without_sums.store(0, Ordering::Relaxed);
            if !is_known {
                options.summed.store(Some(Arc::new(instance.clone())));
            }
        }
        Protection::None if is_known => {
            if options.without_sums.fetch_add(1, Ordering::Relaxed) + 1 < SUMS_ARE_GONE {
                return Err(Violation::SumsGone.into());
            }
            tracing::warn!(address = %options.address, "an exporter has no CRC32C any more: an older ioplane?");
            options.summed.store(None);
            options.without_sums.store(0, Ordering::Relaxed);
        }
        Protection::None | Protection::Tls => {}
    }
    Ok(reached)
}

/// A connection to one of the server's addresses. Where the last one came to nothing another one is the first, since the one before may be that of another server by now.
pub(super) async fn tcp(options: &ImportOptions, turn: usize) -> Result<TcpStream, NbdError> {
    let os = |source| NbdError::Os { doing: CONNECTING, source };
    let mut addresses = places::addresses(options.address.places()).await.map_err(os)?;
    addresses.rotate_left(turn % addresses.len().max(1));
    let stream = places::connect(addresses).await.map_err(os)?;
    stream.set_nodelay(true).map_err(os)?;
    Ok(stream)
}

/// Whether a client without a claim is let in now; if not, the exporter's words say why. The connection ends with that.
pub async fn lets_in(options: &ImportOptions) -> Result<(), NbdError> {
    // Without a word about claims, which an exporter of ours would take for one who has a claim to show.
    reach(options, INSTANCE.to_owned()).await.map(drop)
}

async fn connect(options: &ImportOptions, epoch: String, turn: usize) -> Result<Reached, NbdError> {
    let os = |doing| move |source| NbdError::Os { doing, source };
    let (address, dead_after) = (&options.address, options.dead_after);
    let mut handshake = handshake(options, &epoch)?;
    let (fd, records, connected) = match &address.endpoint {
        ServerAddress::Tcp { .. } => {
            let (stream, records, connected) =
                shake(tcp(options, turn).await?, &mut handshake, options).await?;
            (OwnedFd::from(stream.into_std().map_err(os(SETTING_UP))?), records, connected)
        }
        ServerAddress::Unix { path } => {
            let stream = UnixStream::connect(path).await.map_err(os(CONNECTING))?;
            let (stream, records, connected) = shake(stream, &mut handshake, options).await?;
            (OwnedFd::from(stream.into_std().map_err(os(SETTING_UP))?), records, connected)
        }
    };
    let socket = Socket::new(fd, records, dead_after).map_err(os(SETTING_UP))?;
    let facts = facts(&connected)?;
    let name = |name: &String| Some(name.strip_prefix(INSTANCE)?.strip_prefix('=')?.to_owned());
    let instance = connected.contexts.iter().find_map(|context| name(&context.name));
    let fenced = connected.contexts.iter().any(|context| context.name == epoch);
    if let Some(long) = instance.as_ref().filter(|name| name.len() > LONGEST_INSTANCE) {
        return Err(NbdError::Unsuitable(format!("its instance has a name of {} bytes", long.len())));
    }
    let structured = connected.structured;
    let keeps_claims = connected.contexts.iter().any(|context| context.name == CLAIM);
    let claim = connected.contexts.iter().find_map(|context| ClaimReply::of(&context.name));
    let reserved = connected.contexts.iter().find_map(|context| ReserveReply::of(&context.name));
    let has_sessions = connected.contexts.iter().any(|context| context.name == SESSIONS);
    let knows_reservations = connected.contexts.iter().any(|context| context.name.starts_with(RESERVE));
    Ok(Reached {
        socket: Arc::new(socket),
        facts,
        structured,
        instance,
        fenced,
        keeps_claims,
        claim,
        reserved,
        knows_reservations,
        has_sessions,
    })
}

/// The handshake, in TLS if the address says so, and only then. Without TLS the server may have sums.
async fn shake<S: AsyncRead + AsyncWrite + AsFd + Unpin>(
    mut stream: S,
    handshake: &mut ClientHandshake,
    options: &ImportOptions,
) -> Result<(S, Option<Records>, Connected), NbdError> {
    match (talk(&mut stream, handshake, &mut Vec::new()).await?, &options.address.tls) {
        (Talked::Connected(connected, None), None) => Ok((stream, None, connected)),
        (Talked::Connected(connected, Some(spoken)), None) => {
            let records = begin_sums(&mut stream, spoken).await?;
            Ok((stream, Some(records), connected))
        }
        (Talked::StartTls, Some(name)) => {
            let (mut stream, watched) = start_tls(stream, name, &options.identity).await?;
            let mut output = Vec::new();
            handshake.tls_started(&mut output);
            let Talked::Connected(connected, _) = talk(&mut stream, handshake, &mut output).await? else {
                return Err(NbdError::TlsRequired);
            };
            let (stream, records) = Records::of(stream);
            Ok((stream, Some(records.watched(watched)), connected))
        }
        // The handshake starts TLS where it is asked for, and nowhere else.
        (Talked::Connected(..), Some(_)) => Err(NbdError::TlsRefused(String::new())),
        (Talked::StartTls, None) => Err(NbdError::TlsRequired),
    }
}

/// Goes on with records with sums. The server's first one says whether what it has said so far came as it was sent.
async fn begin_sums<S: AsyncRead + Unpin>(stream: &mut S, spoken: Spoken) -> Result<Records, NbdError> {
    let Spoken { sent, mut received, ahead } = spoken;
    let mut opening = [0; HEADER];
    let (here, missing) = opening.split_at_mut_checked(ahead.len()).ok_or(Violation::Unasked)?;
    here.copy_from_slice(&ahead);
    stream.read_exact(missing).await.map_err(tls::stream_error("in the handshake"))?;
    received.check_opening(opening)?;
    Ok(Records::summed(RecordReader::new(received), RecordWriter::new(sent)))
}

/// Starts TLS as its client, with the host of that name and nobody else, whose certificate is watched from then on.
pub(super) async fn start_tls<S: AsyncRead + AsyncWrite + AsFd + Unpin>(
    stream: S,
    name: &str,
    directory: &IdentityDirectory,
) -> Result<(TlsStream<S>, PeerConnection), NbdError> {
    let identity = tls::load(directory).await?;
    let name = ServerName::try_from(name.to_owned()).map_err(|_| NbdError::Name(name.to_owned()))?;
    let started = TlsConnector::from(identity.client()).connect(name, stream).await;
    let stream = started.map_err(tls::stream_error("starting TLS"))?;
    let (socket, session) = stream.get_ref();
    let server = session.peer_certificates().and_then(<[_]>::first);
    let server = server.ok_or(NbdError::Tls(TlsFault::Missing))?;
    let server = CertificateFacts::of(server).map_err(|why| NbdError::Tls(TlsFault::Certificate(why)))?;
    let watched = directory.watch(&server, socket);
    let watched = watched.map_err(|source| NbdError::Os { doing: SETTING_UP, source })?;
    Ok((stream, watched))
}

fn handshake(options: &ImportOptions, epoch: &str) -> Result<ClientHandshake, NbdError> {
    let address = &options.address;
    // Whoever only looks asks whether there are claims and sessions, too, and reserves.
    let looks = (epoch == EPOCH)
        .then(|| [Some(CLAIM.to_owned()), Some(SESSIONS.to_owned()), options.opening_query()]);
    let asks: Vec<String> =
        [epoch.to_owned()].into_iter().chain(looks.into_iter().flatten().flatten()).collect();
    let reserves = asks.iter().any(|query| query.starts_with(RESERVE) && query != RESERVE);
    let order = reserves.then(|| order_query(next_order()));
    let mut contexts: Vec<String> = [INSTANCE.to_owned()].into_iter().chain(order).chain(asks).collect();
    // By a socket of this host nothing is changed on the way, and TLS notices by itself.
    if matches!(address.endpoint, ServerAddress::Tcp { .. }) && address.tls.is_none() {
        // Twice: where one is changed on the way, the other says so.
        let query = sums::query(&address.export, contexts.iter().map(String::as_str));
        contexts.extend([query.clone(), query]);
    }
    ClientHandshake::new(ClientOptions {
        export: address.export.clone(),
        tls: if address.tls.is_some() { ClientTls::Required } else { ClientTls::Never },
        structured: true,
        contexts,
    })
}

/// What a handshake, or its part before TLS, came to.
pub(super) enum Talked {
    StartTls,
    /// What was said until then, if the server has sums.
    Connected(Connected, Option<Spoken>),
}

/// Drives the handshake over `stream`. `output`: what is to be sent first.
pub(super) async fn talk<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    handshake: &mut ClientHandshake,
    output: &mut Vec<u8>,
) -> Result<Talked, NbdError> {
    let os = tls::stream_error("in the handshake");
    let mut buffer = [0; 4096];
    let mut got = 0;
    let (mut sent, mut received) = (StreamSum::default(), StreamSum::default());
    loop {
        let mut input = &buffer[..got];
        // What is to be said first is all there is to say.
        let step = if output.is_empty() { handshake.next(&mut input, output)? } else { ClientStep::Read };
        let unread = input.len();
        received.add(&buffer[..got - unread]);
        sent.add(output);
        stream.write_all(output).await.map_err(&os)?;
        // TLS keeps records until it is told.
        stream.flush().await.map_err(&os)?;
        output.clear();
        match step {
            ClientStep::Read => {}
            ClientStep::StartTls => return Ok(Talked::StartTls),
            ClientStep::Transmission(connected) if handshake.has_sums() => {
                let ahead = buffer[got - unread..got].to_vec();
                return Ok(Talked::Connected(connected, Some(Spoken { sent, received, ahead })));
            }
            // A server speaks when it is asked.
            ClientStep::Transmission(_) if unread > 0 => return Err(Violation::Unasked.into()),
            ClientStep::Transmission(connected) => return Ok(Talked::Connected(connected, None)),
        }
        got = stream.read(&mut buffer).await.map_err(&os)?;
        if got == 0 {
            return Err(os(std::io::ErrorKind::UnexpectedEof.into()));
        }
    }
}

fn facts(connected: &Connected) -> Result<Facts, NbdError> {
    let info = &connected.info;
    let blocks = info.blocks.unwrap_or_default().checked()?;
    let mut facts = Facts {
        bytes: info.bytes,
        flags: info.flags,
        minimum_block: blocks.minimum,
        preferred_block: blocks.preferred,
        maximum_payload: blocks.maximum,
    };
    if facts.logical_block() > 4096 {
        let why = format!("its blocks of {} bytes are larger than those of any disk (4096)", blocks.minimum);
        return Err(NbdError::Unsuitable(why));
    }
    facts.bytes -= facts.bytes % u64::from(facts.logical_block());
    if facts.bytes == 0 {
        return Err(NbdError::Unsuitable(format!("it has {} bytes, less than a block", info.bytes)));
    }
    if facts.bytes > i64::MAX as u64 {
        return Err(NbdError::Unsuitable(format!("its {} bytes are more than a disk can have", info.bytes)));
    }
    Ok(facts)
}
