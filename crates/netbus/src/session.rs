//! A host's session with a directory, whoever keeps that.

use std::net::IpAddr;

use crate::address::DirectoryAddress;
use crate::device::{DeviceRecord, ListedDevice};
use crate::directory::{Forgotten, Taken};
use crate::error::NetbusError;
use crate::etcd::{EtcdEndpoint, EtcdSession};
use crate::served::ServedSession;
use crate::stream::Security;

/// A session: what is asked is answered in order. Each message has 10 s for its answer (8 s with etcd); a list takes several, and so does a report to
/// etcd. After an error a session is of no use any more: connect again. Dropping a call before it has ended leaves a half-finished message, so the session has to be dropped, too.
#[derive(Debug)]
pub struct DirectorySession(Keeper);

/// Who keeps the names.
#[derive(Debug)]
enum Keeper {
    /// A daemon.
    Served(ServedSession),
    /// etcd.
    Etcd(EtcdSession),
}

impl DirectorySession {
    /// Connects to a directory that a daemon serves. `daemon` tells the daemons of one host from each other, and is the same after a restart.
    ///
    /// # Errors
    /// The directory cannot be reached, is none, or does not want this host.
    pub async fn connect(
        address: &DirectoryAddress,
        security: &Security,
        daemon: &str,
    ) -> Result<DirectorySession, NetbusError> {
        Ok(DirectorySession(Keeper::Served(ServedSession::connect(address, security, daemon).await?)))
    }

    /// Connects to a directory in etcd: to the first of `members` that answers a linearizable read within 3 s. `daemon` as in
    /// [`DirectorySession::connect`].
    ///
    /// # Errors
    /// No member answers, another daemon of this host has a session, or etcd has what cannot be read.
    pub async fn connect_etcd(
        members: &[EtcdEndpoint],
        security: &Security,
        daemon: &str,
    ) -> Result<DirectorySession, NetbusError> {
        Ok(DirectorySession(Keeper::Etcd(EtcdSession::connect(members, security, daemon).await?)))
    }

    /// How the directory calls this host.
    pub fn host(&self) -> &str {
        match &self.0 {
            Keeper::Served(session) => session.host(),
            Keeper::Etcd(session) => session.host(),
        }
    }

    /// By which of this host's addresses the directory was reached.
    pub fn local(&self) -> IpAddr {
        match &self.0 {
            Keeper::Served(session) => session.local(),
            Keeper::Etcd(session) => session.local(),
        }
    }

    /// Says all that this host publishes. Answers which names are others'.
    ///
    /// # Errors
    /// The session is lost, or the directory refuses.
    pub async fn report(&mut self, devices: Vec<DeviceRecord>) -> Result<Vec<Taken>, NetbusError> {
        match &mut self.0 {
            Keeper::Served(session) => session.report(devices).await,
            Keeper::Etcd(session) => session.report(devices).await,
        }
    }

    /// All devices, by name.
    ///
    /// # Errors
    /// The session is lost, the directory refuses, or says what it cannot mean.
    pub async fn list(&mut self) -> Result<Vec<ListedDevice>, NetbusError> {
        match &mut self.0 {
            Keeper::Served(session) => session.list().await,
            Keeper::Etcd(session) => session.list().await,
        }
    }

    /// Frees the name of a device whose host does not come back.
    ///
    /// # Errors
    /// The session is lost, or the directory refuses.
    pub async fn forget(&mut self, name: &str) -> Result<Forgotten, NetbusError> {
        match &mut self.0 {
            Keeper::Served(session) => session.forget(name).await,
            Keeper::Etcd(session) => session.forget(name).await,
        }
    }

    /// Says that this host ends: it keeps its names.
    ///
    /// # Errors
    /// The session is lost.
    pub async fn leave(self) -> Result<(), NetbusError> {
        match self.0 {
            Keeper::Served(session) => session.leave().await,
            Keeper::Etcd(session) => session.leave().await,
        }
    }
}
