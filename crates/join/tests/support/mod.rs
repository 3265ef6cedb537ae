//! An authority that answers over loopback, its hosts, and clients that say what they like.
#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::Arc;

use ioplane_identity::{ANSWERING, HostName, IdentityDirectory, TokenOrder, Validity};
use ioplane_join::{AuthorityPlace, JoinServer, JoinToken, join};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

/// For how long renewed certificates are valid.
pub const DAYS: u32 = 20;

pub fn name(text: &str) -> HostName {
    text.parse().unwrap()
}

pub struct Rig {
    pub folder: TempDir,
    pub authority: IdentityDirectory,
    pub server: JoinServer,
}

pub fn listener() -> std::net::TcpListener {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap()
}

pub fn place(address: SocketAddr) -> AuthorityPlace {
    address.to_string().parse().unwrap()
}

pub fn now() -> i64 {
    time::OffsetDateTime::now_utc().unix_timestamp()
}

impl Rig {
    pub fn new() -> Rig {
        let folder = tempfile::tempdir().unwrap();
        let authority = IdentityDirectory::new(folder.path().join("a"));
        authority.create(&name("host-a"), Validity::default()).unwrap();
        // Its own view of the files, as another process has.
        let own = IdentityDirectory::new(authority.path());
        let server = JoinServer::start(listener(), own, DAYS).unwrap();
        Rig { folder, authority, server }
    }

    pub fn places(&self) -> Vec<AuthorityPlace> {
        vec![place(self.server.address())]
    }

    pub fn fingerprint(&self) -> [u8; 32] {
        self.authority.authority_facts().unwrap().sha256().unwrap()
    }

    pub fn host(&self, host: &str) -> IdentityDirectory {
        IdentityDirectory::new(self.folder.path().join(host))
    }

    pub fn token(&self, host: Option<&str>) -> JoinToken {
        let name = host.map(name);
        self.token_of(&TokenOrder { name, replaces: false, days: 10, until: now() + 60 })
    }

    pub fn token_of(&self, order: &TokenOrder) -> JoinToken {
        let secret = self.authority.make_token(order).unwrap();
        let name = order.name.as_ref().map(ToString::to_string);
        JoinToken { places: self.places(), authority: self.fingerprint(), secret, until: order.until, name }
    }

    /// A host of that name, with a certificate of this authority.
    pub async fn member(&self, host: &str) -> IdentityDirectory {
        let directory = self.host(host);
        join(&directory, &self.token(Some(host)), None, false).await.unwrap();
        directory
    }

    /// A client that says what it likes, once TLS has started.
    pub async fn raw(&self, tls: Arc<ClientConfig>) -> std::io::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(self.server.address()).await?;
        TlsConnector::from(tls).connect(ServerName::try_from(ANSWERING).unwrap(), stream).await
    }
}

/// What is answered to a message.
pub async fn said(stream: &mut TlsStream<TcpStream>, text: &[u8]) -> serde_json::Value {
    stream.write_all(&(text.len() as u32).to_be_bytes()).await.unwrap();
    stream.write_all(text).await.unwrap();
    answered(stream).await
}

/// What is answered, to the end.
pub async fn answered(stream: &mut TlsStream<TcpStream>) -> serde_json::Value {
    stream.flush().await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    serde_json::from_slice(&answer[4..]).unwrap()
}
