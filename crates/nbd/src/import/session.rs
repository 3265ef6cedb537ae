//! A session with the host of an export, in place of the export ([`crate::session`]).

use std::sync::atomic::Ordering;

use ioplane_identity::WatchedStream;
use tokio::net::UnixStream;

use super::address::ServerAddress;
use super::connect::{CONNECTING, Talked, start_tls, talk, tcp};
use super::options::ImportOptions;
use crate::error::NbdError;
use crate::handshake::client::{ClientHandshake, ClientOptions, ClientTls, Connected};
use crate::session::{SESSION, SessionStream};

/// Connects as a connection of an import would, with the same security, within [`ImportOptions::connect_timeout`].
///
/// # Errors
/// The server cannot be reached or refuses; or it knows no sessions: one of others, or an older one.
pub async fn open_session(options: &ImportOptions) -> Result<SessionStream, NbdError> {
    let limit = options.connect_timeout;
    let opened = tokio::time::timeout(limit, connect(options)).await;
    let opened = opened.map_err(|_| NbdError::Slow(limit)).flatten();
    if opened.is_err() {
        options.turn.fetch_add(1, Ordering::Relaxed);
    }
    opened
}

async fn connect(options: &ImportOptions) -> Result<SessionStream, NbdError> {
    let address = &options.address;
    let mut handshake = ClientHandshake::new(ClientOptions {
        export: address.export.clone(),
        tls: if address.tls.is_some() { ClientTls::Required } else { ClientTls::Never },
        structured: true,
        contexts: vec![SESSION.to_owned()],
    })?;
    match &address.endpoint {
        ServerAddress::Tcp { .. } => {
            let mut stream = tcp(options, options.turn.load(Ordering::Relaxed)).await?;
            match (talk(&mut stream, &mut handshake, &mut Vec::new()).await?, &address.tls) {
                (Talked::Connected(connected, _), None) => begun(&connected, Box::pin(stream)),
                (Talked::StartTls, Some(name)) => {
                    let (stream, watched) = start_tls(stream, name, &options.identity).await?;
                    let mut stream = WatchedStream::new(stream, Some(watched));
                    let mut output = Vec::new();
                    handshake.tls_started(&mut output);
                    match talk(&mut stream, &mut handshake, &mut output).await? {
                        Talked::Connected(connected, _) => begun(&connected, Box::pin(stream)),
                        Talked::StartTls => Err(NbdError::TlsRequired),
                    }
                }
                (Talked::Connected(..), Some(_)) => Err(NbdError::TlsRefused(String::new())),
                (Talked::StartTls, None) => Err(NbdError::TlsRequired),
            }
        }
        ServerAddress::Unix { path } => {
            let connected = UnixStream::connect(path).await;
            let mut stream = connected.map_err(|source| NbdError::Os { doing: CONNECTING, source })?;
            match talk(&mut stream, &mut handshake, &mut Vec::new()).await? {
                Talked::Connected(connected, _) => begun(&connected, Box::pin(stream)),
                Talked::StartTls => Err(NbdError::TlsRequired),
            }
        }
    }
}

/// What is said on `stream` from here on is the session's, if the server has selected it.
fn begun(connected: &Connected, stream: SessionStream) -> Result<SessionStream, NbdError> {
    if connected.contexts.iter().any(|context| context.name == SESSION) {
        return Ok(stream);
    }
    Err(NbdError::Unsuitable("it has no sessions: it is no ioplane exporter, or an older one".to_owned()))
}
