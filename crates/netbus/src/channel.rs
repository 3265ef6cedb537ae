//! A channel to a daemon of another host, for one purpose: TLS with certificates on both sides, versions, then bytes that this crate does not look at.
//!
//! ```text
//!   Channel::open  --TLS 1.3--> ChannelRequest::receive
//!                  Hello: version, subject, part -->
//!                  <-- Welcome: version, or why not
//!                  bytes, both ways
//! ```

use std::time::Duration;

use ioplane_identity::IdentityDirectory;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;

use crate::address::DirectoryAddress;
use crate::error::NetbusError;
use crate::names::{printable, shown};
use crate::stream::{Security, Stream, accept, connect};
use crate::wire::{receive_within, send};

/// The version of what is said by a channel, the bytes behind the greeting included.
pub const VERSION: u32 = 1;
/// The port of a host that expects channels, if nothing else is said.
pub const CHANNEL_PORT: u16 = 10806;
/// For the connection with its TLS, and for each message.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest greeting, bytes.
const LONGEST: usize = 16 << 10;

/// What whoever opens a channel says.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    version: u32,
    /// What it is about.
    subject: String,
    /// Which part of that.
    part: String,
}

/// The answer.
#[derive(Debug, Serialize, Deserialize)]
struct Welcome {
    version: u32,
    /// Why the channel ends here.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

/// The bytes of a channel. The connection ends when the certificate of the peer is revoked.
pub trait ChannelIo: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send {}
impl<S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send> ChannelIo for S {}

/// A channel that is open.
pub type Channel = Box<dyn ChannelIo>;

/// Opens a channel. Ends after 30 s at the latest.
///
/// # Errors
/// The host is not reached, is another one, speaks another version, or refuses.
pub async fn open(
    address: &DirectoryAddress,
    identity: &IdentityDirectory,
    subject: &str,
    part: &str,
) -> Result<Channel, NetbusError> {
    let security = Security::Tls(identity.clone());
    let connected = tokio::time::timeout(PATIENCE, connect(address, &security)).await;
    let (mut stream, _, _) = connected.map_err(|_| NetbusError::Slow(PATIENCE))??;
    let hello = Hello { version: VERSION, subject: subject.to_owned(), part: part.to_owned() };
    send(&mut stream, &hello, PATIENCE).await?;
    let answer = receive_within(&mut stream, LONGEST, (PATIENCE, PATIENCE)).await?;
    let Welcome { version, refused } = answer.ok_or(NetbusError::Closed)?;
    match refused {
        // Whatever it says then is of a version that is not known here.
        _ if version != VERSION => Err(NetbusError::OtherVersion { here: VERSION, there: version }),
        Some(why) => Err(NetbusError::TurnedAway(printable(&why))),
        None => Ok(Box::new(stream)),
    }
}

/// A channel that somebody wants to open.
pub struct ChannelRequest {
    host: String,
    hello: Hello,
    stream: Box<dyn Stream>,
}

impl ChannelRequest {
    /// The greeting of a connection. Ends after 30 s at the latest.
    ///
    /// # Errors
    /// The client shows no certificate of this host's authority, speaks another version, which it is told, or says something else.
    pub async fn receive(
        stream: TcpStream,
        identity: &IdentityDirectory,
    ) -> Result<ChannelRequest, NetbusError> {
        let accepted = tokio::time::timeout(PATIENCE, accept(stream, Some(identity))).await;
        let (mut stream, host) = accepted.map_err(|_| NetbusError::Slow(PATIENCE))??;
        let host = host.ok_or(NetbusError::Closed)?;
        let hello: Hello =
            receive_within(&mut stream, LONGEST, (PATIENCE, PATIENCE)).await?.ok_or(NetbusError::Closed)?;
        let arrival = ChannelRequest { host, hello, stream };
        match arrival.hello.version {
            VERSION => Ok(arrival),
            there => {
                arrival.refuse("another version").await?;
                Err(NetbusError::OtherVersion { here: VERSION, there })
            }
        }
    }

    /// Who it is, as its certificate says.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// What the channel is to be about. Anything may be in it.
    pub fn subject(&self) -> &str {
        &self.hello.subject
    }

    /// Which part of that. Anything may be in it.
    pub fn part(&self) -> &str {
        &self.hello.part
    }

    /// Both as they may be logged.
    pub fn shown(&self) -> String {
        format!("{:?} of {:?}", shown(&self.hello.part), shown(&self.hello.subject))
    }

    /// Lets it in.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn admit(mut self) -> Result<Channel, NetbusError> {
        let welcome = Welcome { version: VERSION, refused: None };
        send(&mut self.stream, &welcome, PATIENCE).await?;
        Ok(Box::new(self.stream))
    }

    /// Says why not.
    ///
    /// # Errors
    /// The connection is lost.
    pub async fn refuse(mut self, why: &str) -> Result<(), NetbusError> {
        let welcome = Welcome { version: VERSION, refused: Some(printable(why)) };
        send(&mut self.stream, &welcome, PATIENCE).await?;
        // What was sent arrives before the end.
        tokio::io::AsyncWriteExt::shutdown(&mut self.stream)
            .await
            .map_err(NetbusError::stream("writing to the peer"))
    }
}
