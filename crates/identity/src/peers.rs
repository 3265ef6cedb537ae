//! What a process knows of revocations, and the connections that end when it learns of more.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use rustix::net::Shutdown;
use rustls::pki_types::CertificateDer;

use crate::certificate::CertificateFacts;
use crate::error::IdentityError;
use crate::revocation::RevocationList;

/// A connection with a peer whose certificate was good. Kept as long as the connection: dropped, it is not ended any more.
#[derive(Debug, Clone)]
pub struct PeerConnection {
    _entry: Arc<Entry>,
}

#[derive(Debug)]
struct Entry {
    name: String,
    serial: String,
    socket: OwnedFd,
}

/// A connection that was ended, because its peer's certificate is on the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedPeer {
    /// The peer, as its certificate says.
    pub name: String,
    /// The number of the certificate.
    pub serial: String,
}

/// What all who use one directory in a process share.
#[derive(Debug, Default)]
pub(crate) struct Peers(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// The newest list that was read.
    list: Option<Arc<RevocationList>>,
    connections: Vec<Weak<Entry>>,
    /// Above so many those that are gone are dropped.
    clean: usize,
    /// Ended and not told of yet.
    ended: Vec<EndedPeer>,
}

/// What became of a list that was read.
#[derive(Debug)]
pub(crate) struct Heard {
    /// The list that counts.
    pub list: Option<Arc<RevocationList>>,
    /// It is another one than before.
    pub changed: bool,
    /// Why what was read does not count, although there is one that does.
    pub refused: Option<IdentityError>,
}

impl Peers {
    /// Takes what was read from a file, for hosts of `authority`. A list that is gone, is bad or older does not take the place of one that was good.
    pub fn hear(
        &self,
        read: Result<Option<RevocationList>, IdentityError>,
        authority: &CertificateDer<'_>,
        path: &Path,
    ) -> Result<Heard, IdentityError> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let present = state.list.clone().filter(|list| list.is_of(authority));
        let mut heard = Heard { list: present.clone(), changed: false, refused: None };
        match (read, present) {
            (Err(error), None) => return Err(error),
            (Err(error), Some(_)) => heard.refused = Some(error),
            (Ok(None), Some(present)) => {
                let why = format!("it is gone; list {} still counts in this process", present.number());
                heard.refused = Some(IdentityError::RevocationList { path: path.to_owned(), why });
            }
            (Ok(None), None) => state.list = None,
            (Ok(Some(new)), Some(present)) if new.number() < present.number() => {
                let (number, present) = (new.number(), present.number());
                let path = path.to_owned();
                heard.refused = Some(IdentityError::OlderRevocationList { path, number, present });
            }
            (Ok(Some(new)), Some(present)) if new.number() == present.number() && !new.is_same(&present) => {
                let why =
                    format!("it is another list {} than the one that counts in this process", new.number());
                heard.refused = Some(IdentityError::RevocationList { path: path.to_owned(), why });
            }
            (Ok(Some(new)), present) => {
                heard.changed = present.is_none_or(|present| *present != new);
                let new = Arc::new(new);
                state.list = Some(new.clone());
                heard.list = Some(new);
            }
        }
        if heard.changed {
            let list = heard.list.clone();
            let entries: Vec<_> = state.connections.iter().filter_map(Weak::upgrade).collect();
            for entry in entries {
                if list.as_ref().is_some_and(|list| list.revokes(&entry.serial)) {
                    state.end(&entry);
                }
            }
        }
        Ok(heard)
    }

    /// Keeps a connection in mind; ends it at once if its peer was revoked during the handshake.
    pub fn enter(&self, peer: &CertificateFacts, socket: OwnedFd) -> PeerConnection {
        let entry = Arc::new(Entry { name: peer.name.clone(), serial: peer.serial.clone(), socket });
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.connections.len() >= state.clean {
            state.connections.retain(|entry| entry.strong_count() > 0);
            state.clean = state.connections.len() * 2 + 16;
        }
        state.connections.push(Arc::downgrade(&entry));
        if state.list.as_ref().is_some_and(|list| list.revokes(&entry.serial)) {
            state.end(&entry);
        }
        PeerConnection { _entry: entry }
    }

    /// Those that were ended since this was last asked.
    pub fn ended(&self) -> Vec<EndedPeer> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).ended)
    }
}

impl State {
    fn end(&mut self, entry: &Entry) {
        // Whoever has the connection finds its end, as if the peer had gone. One that is gone already is no matter.
        let _ = rustix::net::shutdown(&entry.socket, Shutdown::Both);
        self.ended.push(EndedPeer { name: entry.name.clone(), serial: entry.serial.clone() });
    }
}
