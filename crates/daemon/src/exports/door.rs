//! What a listener knows of exports: whom it may let in, and whom to hand clients to.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_nbd::export::{Exports, PublishedExport};
use ioplane_nbd::handshake::ExportInfo;
use ioplane_nbd::handshake::server::{ExportRefusal, Negotiated};
use ioplane_nbd::import::{EPOCH, INSTANCE};
use tokio::sync::{mpsc, oneshot};

use super::owner::{Ask, ChannelEpoch};

/// One export, as its listeners see it.
#[derive(Clone)]
pub struct Door(Arc<Shared>);

struct Shared {
    published: PublishedExport,
    instance: String,
    owner: mpsc::Sender<Ask>,
    refused: AtomicU64,
}

impl Door {
    pub fn new(published: PublishedExport, instance: String, owner: mpsc::Sender<Ask>) -> Self {
        Door(Arc::new(Shared { published, instance, owner, refused: AtomicU64::new(0) }))
    }

    pub fn published(&self) -> &PublishedExport {
        &self.0.published
    }

    pub fn instance(&self) -> &str {
        &self.0.instance
    }

    /// Clients that were let in and could not be taken.
    pub fn refused(&self) -> u64 {
        self.0.refused.load(Ordering::Relaxed)
    }

    /// Fails if the export is gone.
    pub async fn ask(&self, ask: Ask) -> Result<(), mpsc::error::SendError<Ask>> {
        self.0.owner.send(ask).await
    }

    /// Hands over a client whose handshake has ended.
    pub async fn take(&self, socket: OwnedFd, negotiated: Negotiated, ahead: Vec<u8>) {
        let client = negotiated.contexts.iter().find_map(|context| ChannelEpoch::of(&context.name));
        let taken = Ask::Connect { socket, negotiated, ahead, client };
        if self.ask(taken).await.is_err() {
            self.0.refused.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The name of the context that a query of ours finds, once what it asks for holds.
    async fn context(&self, query: &str, selects: bool) -> Option<String> {
        if query == INSTANCE {
            return Some(format!("{INSTANCE}={}", self.instance()));
        }
        if query == EPOCH {
            return Some(EPOCH.to_owned());
        }
        let client = ChannelEpoch::of(query)?;
        if !selects {
            return Some(EPOCH.to_owned());
        }
        // An older connection of the same client is read no more, and all that was begun for it has ended.
        let (answer, fenced) = oneshot::channel();
        self.ask(Ask::Fence { client, answer }).await.ok()?;
        fenced.await.ok()?.then(|| query.to_owned())
    }
}

/// The exports behind one listener, by name.
#[derive(Clone, Default)]
pub struct Doors(Arc<Mutex<BTreeMap<String, Door>>>);

impl Doors {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Door>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// With one more.
    pub fn enter(&self, door: Door) -> Doors {
        self.lock().insert(door.published().info().name.clone(), door);
        self.clone()
    }

    /// Without that one; says whether it was the last.
    pub fn leave(&self, name: &str) -> bool {
        let mut doors = self.lock();
        doors.remove(name);
        doors.is_empty()
    }

    /// The one of that name; without a name, the only one.
    pub fn door(&self, name: &str) -> Option<Door> {
        let doors = self.lock();
        match name {
            "" if doors.len() == 1 => doors.values().next().cloned(),
            name => doors.get(name).cloned(),
        }
    }
}

impl Exports for Doors {
    async fn find(&self, name: &str, enters: bool) -> Result<ExportInfo, ExportRefusal> {
        let door = self.door(name).ok_or(ExportRefusal::Unknown)?;
        if enters {
            door.published().enter()?;
        }
        Ok(door.published().info().clone())
    }

    async fn list(&self) -> Vec<(String, String)> {
        let doors = self.lock();
        let listed = doors.values().map(|door| door.published().info());
        listed.map(|info| (info.name.clone(), info.description.clone())).collect()
    }

    async fn context(&self, export: &str, query: &str, selects: bool) -> Option<String> {
        self.door(export)?.context(query, selects).await
    }
}
