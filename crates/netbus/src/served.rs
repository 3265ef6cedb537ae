//! A host's session with a directory that a daemon serves.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use crate::address::DirectoryAddress;
use crate::device::{DeviceRecord, ListedDevice};
use crate::directory::{Forgotten, Taken};
use crate::error::NetbusError;
use crate::limits::MOST_NAMES;
use crate::names::{is_host, is_name, printable, shown};
use crate::stream::{Security, Stream, connect};
use crate::wire::{OLDEST, RATES, Reply, Request, VERSION, receive, send};

/// How long a directory may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// A session: what is asked is answered in order, within ten seconds. After an error it is of no use any more: connect again. Dropping a call
/// before it has ended leaves a half-finished message, so the session has to be dropped, too.
pub(crate) struct ServedSession {
    stream: Box<dyn Stream>,
    host: String,
    local: IpAddr,
    version: u32,
}

impl fmt::Debug for ServedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServedSession").field("host", &self.host).field("local", &self.local).finish()
    }
}

impl ServedSession {
    /// Connects. `daemon` tells the daemons of one host from each other, and is the same after a restart.
    ///
    /// # Errors
    /// The directory cannot be reached, is none, or does not want this host.
    pub async fn connect(
        address: &DirectoryAddress,
        security: &Security,
        daemon: &str,
    ) -> Result<ServedSession, NetbusError> {
        match ServedSession::begin(address, security, daemon, VERSION).await {
            // An older one says so of a version that it does not know.
            Err(NetbusError::Refused(why)) if why.contains("version") => {
                ServedSession::begin(address, security, daemon, OLDEST).await
            }
            begun => begun,
        }
    }

    /// Connects, and speaks `highest` at most.
    async fn begin(
        address: &DirectoryAddress,
        security: &Security,
        daemon: &str,
        highest: u32,
    ) -> Result<ServedSession, NetbusError> {
        let opened = tokio::time::timeout(PATIENCE, connect(address, security)).await;
        let (stream, local, host) = opened.map_err(|_| NetbusError::Slow(PATIENCE))??;
        let mut session = ServedSession { stream, host, local, version: highest };
        let hello =
            Request::Hello { version: highest, host: session.host.clone(), daemon: daemon.to_owned() };
        match session.ask(&hello).await? {
            Reply::Welcome { version, .. } if !(OLDEST..=highest).contains(&version) => {
                return Err(NetbusError::Version(version));
            }
            Reply::Welcome { host, .. } if !is_host(&host) => return Err(NetbusError::Host(shown(&host))),
            Reply::Welcome { version, host } => (session.version, session.host) = (version, host),
            other => return Err(unexpected(&other)),
        }
        Ok(session)
    }

    /// How the directory calls this host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// By which of this host's addresses the directory was reached.
    pub fn local(&self) -> IpAddr {
        self.local
    }

    /// Says all that this host publishes. Answers which names are others'.
    ///
    /// # Errors
    /// The session is lost, or the directory refuses.
    pub async fn report(&mut self, mut devices: Vec<DeviceRecord>) -> Result<Vec<Taken>, NetbusError> {
        if self.version < RATES {
            devices.iter_mut().for_each(|device| device.rates.clear());
        }
        match self.ask(&Request::Report { devices }).await? {
            Reply::Reported { taken } => {
                match taken.iter().find(|one| !is_name(&one.name) || !is_host(&one.by)) {
                    None => Ok(taken),
                    Some(Taken { name, .. }) => Err(NetbusError::Malformed(shown(name))),
                }
            }
            other => Err(unexpected(&other)),
        }
    }

    /// All devices, by name.
    ///
    /// # Errors
    /// The session is lost, the directory refuses, or says what it cannot mean.
    pub async fn list(&mut self) -> Result<Vec<ListedDevice>, NetbusError> {
        send(&mut self.stream, &Request::List, PATIENCE).await?;
        let mut all: Vec<ListedDevice> = Vec::new();
        loop {
            match self.answer().await? {
                Reply::Listed { entries, more } => {
                    for entry in &entries {
                        entry.device.check()?;
                        if !is_host(&entry.host) {
                            return Err(NetbusError::Host(shown(&entry.host)));
                        }
                    }
                    // A part without devices would go on for ever.
                    if all.len() + entries.len() > MOST_NAMES || (more && entries.is_empty()) {
                        return Err(NetbusError::Malformed("its list does not end".to_owned()));
                    }
                    all.extend(entries);
                    if !more {
                        return Ok(all);
                    }
                }
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Frees the name of a device whose host does not come back.
    ///
    /// # Errors
    /// The session is lost, or the directory refuses.
    pub async fn forget(&mut self, name: &str) -> Result<Forgotten, NetbusError> {
        match self.ask(&Request::Forget { name: name.to_owned() }).await? {
            Reply::Forgotten { outcome } => Ok(outcome),
            other => Err(unexpected(&other)),
        }
    }

    /// Says that this host ends: it keeps its names.
    ///
    /// # Errors
    /// The session is lost.
    pub async fn leave(mut self) -> Result<(), NetbusError> {
        match self.ask(&Request::Leave).await? {
            Reply::Left => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    async fn ask(&mut self, request: &Request) -> Result<Reply, NetbusError> {
        send(&mut self.stream, request, PATIENCE).await?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<Reply, NetbusError> {
        let reply = receive(&mut self.stream, PATIENCE, PATIENCE).await?.ok_or(NetbusError::Closed)?;
        match reply {
            Reply::Refused { why } => Err(NetbusError::Refused(printable(&why))),
            other => Ok(other),
        }
    }
}

fn unexpected(reply: &Reply) -> NetbusError {
    let what = match reply {
        Reply::Welcome { .. } => "a welcome",
        Reply::Reported { .. } => "the answer to a report",
        Reply::Listed { .. } => "a list",
        Reply::Forgotten { .. } => "the answer to a forget",
        Reply::Left => "a goodbye",
        Reply::Refused { .. } => "a refusal",
    };
    NetbusError::Malformed(format!("{what} was not asked for"))
}
