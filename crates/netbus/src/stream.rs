//! Connections, in plain text or with TLS 1.3.

use std::net::IpAddr;
use std::time::Duration;

use ioplane_identity::{
    CertificateFacts, HostIdentity, IdentityDirectory, TlsFault, WatchedStream, let_hear,
};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::address::DirectoryAddress;
use crate::error::NetbusError;

/// How long a client that was refused may take to hear why.
const HEARS: Duration = Duration::from_secs(1);

/// How long a peer may be silent: longer than a route takes to change.
const SILENCE: Duration = Duration::from_secs(15);

/// How a host speaks with a directory.
#[derive(Debug, Clone)]
pub enum Security {
    /// In plain text, under a name that nobody checks.
    Plain {
        /// How this host is called.
        host: String,
    },
    /// With TLS 1.3 and certificates on both sides, whose names count. The identity is read anew for each connection.
    Tls(IdentityDirectory),
}

/// Either kind of connection.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Has a connection end when its peer neither sends nor acknowledges anything for [`SILENCE`]. Answers of a few bytes do not wait for each other.
fn notice_silence(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, SILENCE / 3)?;
    sockopt::set_tcp_keepintvl(stream, SILENCE / 3)?;
    sockopt::set_tcp_keepcnt(stream, 2)?;
    sockopt::set_tcp_user_timeout(stream, SILENCE.as_millis() as u32)?;
    Ok(())
}

/// Reads the identity of this host: a few small files.
async fn load(directory: &IdentityDirectory) -> Result<HostIdentity, NetbusError> {
    let directory = directory.clone();
    let loaded = tokio::task::spawn_blocking(move || directory.load()).await;
    let gone = |error: tokio::task::JoinError| NetbusError::Os {
        doing: "reading an identity",
        source: error.into(),
    };
    Ok(loaded.map_err(gone)??)
}

/// As a client. Says also by which address of this host the directory was reached, and how this host calls itself.
pub(crate) async fn connect(
    address: &DirectoryAddress,
    security: &Security,
) -> Result<(Box<dyn Stream>, IpAddr, String), NetbusError> {
    let failed = NetbusError::stream("connecting");
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await.map_err(&failed)?;
    notice_silence(&stream).map_err(&failed)?;
    let local = stream.local_addr().map_err(&failed)?.ip();
    match security {
        Security::Plain { host } => Ok((Box::new(stream), local, host.clone())),
        Security::Tls(directory) => {
            let identity = load(directory).await?;
            let name = address.tls_hostname.as_ref().unwrap_or(&address.host);
            let name = ServerName::try_from(name.clone()).map_err(|_| NetbusError::Host(name.clone()))?;
            let started = TlsConnector::from(identity.client()).connect(name, stream).await;
            let stream = started.map_err(NetbusError::stream("starting TLS"))?;
            let (tcp, session) = stream.get_ref();
            // Certificates of etcd may have no name; who is revoked is refused by each handshake.
            let peer = session.peer_certificates().and_then(<[_]>::first);
            let peer = peer.and_then(|peer| CertificateFacts::of(peer).ok());
            let peer = peer.map(|peer| directory.watch(&peer, tcp)).transpose().map_err(&failed)?;
            Ok((Box::new(WatchedStream::new(stream, peer)), local, identity.name().to_string()))
        }
    }
}

/// As a server. Says who the client is if there is TLS; without, it says so itself.
pub(crate) async fn accept(
    stream: TcpStream,
    identity: Option<&IdentityDirectory>,
) -> Result<(Box<dyn Stream>, Option<String>), NetbusError> {
    notice_silence(&stream).map_err(NetbusError::stream("taking a connection"))?;
    let Some(directory) = identity else { return Ok((Box::new(stream), None)) };
    let identity = load(directory).await?;
    let accepted = TlsAcceptor::from(identity.server()).accept(stream).into_fallible().await;
    let stream = match accepted {
        Ok(stream) => stream,
        Err((error, stream)) => {
            let_hear(stream, HEARS).await;
            return Err(NetbusError::stream("starting TLS")(error));
        }
    };
    let (tcp, session) = stream.get_ref();
    let certificate = session.peer_certificates().and_then(<[_]>::first);
    let facts = CertificateFacts::of(certificate.ok_or(TlsFault::Missing)?).map_err(TlsFault::Certificate)?;
    let name = facts.host().map_err(TlsFault::Certificate)?.to_string();
    let peer = directory.watch(&facts, tcp).map_err(NetbusError::stream("taking a connection"))?;
    Ok((Box::new(WatchedStream::new(stream, Some(peer))), Some(name)))
}
