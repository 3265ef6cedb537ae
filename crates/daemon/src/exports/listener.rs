//! Listeners: where clients of exports come in.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ioplane_identity::IdentityDirectory;
use ioplane_nbd::NbdError;
use ioplane_nbd::export::{AcceptedClient, Arrival, ClientSocket, Handshakes};
use rustix::io::Errno;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::AbortHandle;

use super::door::{ClientOrigin, Door, Doors};
use super::session::Sessions;
use crate::listen;
use crate::refusal::Refusal;

/// Handshakes at a time, of one listener.
const HANDSHAKES: usize = 64;
/// How long one may take: as long as a client of ours waits.
const PATIENCE: Duration = Duration::from_secs(10);
/// After an error of `accept`, which most often is a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// One export's place behind one listener. Dropped, no further client comes in by it.
pub struct Entrance(Box<dyn FnMut() + Send>);

impl Drop for Entrance {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// The TCP listeners, by address. Each serves all exports that name its address.
pub struct Listeners {
    all: Arc<Mutex<BTreeMap<SocketAddr, (Doors, AbortHandle)>>>,
    /// Of all addresses: one session is about any of them.
    reachable: Doors,
    /// Who this host is to clients with TLS.
    identity: IdentityDirectory,
    sessions: Arc<Sessions>,
}

impl Listeners {
    /// None yet.
    pub fn new(identity: IdentityDirectory) -> Listeners {
        let (reachable, sessions) = (Doors::default(), Arc::default());
        Listeners { all: Arc::default(), reachable, identity, sessions }
    }

    /// The sessions with hosts that use the exports.
    pub fn sessions(&self) -> &Arc<Sessions> {
        &self.sessions
    }

    /// Has clients of `address` find this export. Must be called in the runtime.
    pub fn enter(&self, address: SocketAddr, door: Door) -> Result<Entrance, Refusal> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let name = door.published().name().to_owned();
        match all.get(&address) {
            Some((doors, _)) => drop(doors.enter(door.clone())),
            None => {
                if let Some(other) = all.keys().find(|other| overlap(**other, address)) {
                    return Err(Refusal::conflict(
                        format!("other exports of this daemon listen at {other}, and {address} overlaps with that"),
                        format!(
                            "publish it at {other} as well, or at another port: --listen; or remove what is there and publish all at the wider one: see `ioplane publish list`"
                        ),
                    )
                    .at("listen"));
                }
                let refused = |error: std::io::Error| {
                    let no_family = Errno::from_io_error(&error) == Some(Errno::AFNOSUPPORT);
                    let remedy = match no_family {
                        true => "this host has no IPv6: listen at 0.0.0.0:PORT",
                        false => "is it an address of this host, and the port free?",
                    };
                    Refusal::failed(format!("listening on {address}: {error}"), remedy).at("listen")
                };
                let listener = listen::tcp(address).map_err(refused)?;
                listener.set_nonblocking(true).map_err(refused)?;
                let listener = tokio::net::TcpListener::from_std(listener).map_err(refused)?;
                let doors = Doors::default().enter(door.clone());
                let behind = Behind {
                    doors: doors.clone(),
                    reachable: self.reachable.clone(),
                    identity: self.identity.clone(),
                    sessions: self.sessions.clone(),
                };
                let task = tokio::spawn(listen_tcp(listener, Arc::new(behind)));
                all.insert(address, (doors, task.abort_handle()));
            }
        }
        let (listeners, reachable) = (self.all.clone(), self.reachable.enter(door));
        Ok(Entrance(Box::new(move || {
            reachable.leave(&name);
            let mut all = listeners.lock().unwrap_or_else(PoisonError::into_inner);
            if all.get(&address).is_some_and(|(doors, _)| doors.leave(&name))
                && let Some((_, task)) = all.remove(&address)
            {
                task.abort();
            }
        })))
    }
}

/// Whether the system does not let both be listened at, which differ.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let is_all = |all: SocketAddr, of: SocketAddr| {
        all.ip().is_unspecified() && (all.is_ipv6() || of.is_ipv4() || of.ip().is_unspecified())
    };
    one.port() == other.port() && (is_all(one, other) || is_all(other, one))
}

/// Listens on the socket of one export. Must be called in the runtime.
pub fn local(listener: UnixListener, doors: Doors, sessions: Arc<Sessions>) -> Result<Entrance, Refusal> {
    let listener = tokio::net::UnixListener::from_std(listener)
        .map_err(|error| Refusal::failed(format!("listening: {error}"), "see the log of the daemon"))?;
    let task = tokio::spawn(async move {
        let handshakes = Arc::new(Handshakes::new(HANDSHAKES, PATIENCE));
        loop {
            match listener.accept().await {
                Ok((stream, _)) => {
                    tokio::spawn(admit_local(stream, doors.clone(), handshakes.clone(), sessions.clone()));
                }
                Err(error) => pause(&error).await,
            }
        }
    });
    let task = task.abort_handle();
    Ok(Entrance(Box::new(move || task.abort())))
}

/// What is behind a listener by TCP.
struct Behind {
    doors: Doors,
    /// All exports that other machines reach, at whichever address.
    reachable: Doors,
    identity: IdentityDirectory,
    sessions: Arc<Sessions>,
}

async fn listen_tcp(listener: tokio::net::TcpListener, behind: Arc<Behind>) {
    let handshakes = Arc::new(Handshakes::new(HANDSHAKES, PATIENCE));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Answers of a few bytes are not to wait for each other.
                let _ = stream.set_nodelay(true);
                tokio::spawn(admit(stream, behind.clone(), handshakes.clone()));
            }
            Err(error) => pause(&error).await,
        }
    }
}

async fn pause(error: &std::io::Error) {
    tracing::warn!(%error, "a client of an export could not be accepted");
    tokio::time::sleep(PAUSE).await;
}

/// The handshake of one client of this host; then it is its export's.
async fn admit_local(stream: UnixStream, doors: Doors, handshakes: Arc<Handshakes>, sessions: Arc<Sessions>) {
    match handshakes.accept(stream, &doors.seen_by(ClientOrigin::Local)).await {
        Ok(Some(AcceptedClient { negotiated, ahead, .. }))
            if negotiated.is_session() && !ahead.is_empty() =>
        {
            refused(&NbdError::Ahead(ahead.len()));
        }
        Ok(Some(AcceptedClient { stream, negotiated, .. })) if negotiated.is_session() => {
            sessions.attend(Box::pin(stream), doors, ClientOrigin::Local).await;
        }
        Ok(Some(AcceptedClient { stream, negotiated, ahead })) => match stream.into_std() {
            Ok(stream) => {
                let stream = OwnedFd::from(stream).into();
                hand_over(&doors, &ClientOrigin::Local, AcceptedClient { stream, negotiated, ahead }).await;
            }
            Err(source) => refused(&NbdError::Os { doing: "taking a client over", source }),
        },
        // It has asked what there is.
        Ok(None) => {}
        Err(error) => refused(&error),
    }
}

/// The same for a client of any machine.
async fn admit(stream: TcpStream, behind: Arc<Behind>, handshakes: Arc<Handshakes>) {
    let Behind { doors, reachable, identity, sessions } = &*behind;
    let mut client = ClientOrigin::Anybody;
    let known = |host: &str| {
        client = ClientOrigin::Host(host.to_owned());
        doors.seen_by(client.clone())
    };
    let plain = doors.seen_by(ClientOrigin::Anybody);
    match handshakes.accept_tls(stream, doors.policy(), identity, &plain, known).await {
        Ok(Some(Arrival::Client(accepted))) => hand_over(doors, &client, accepted).await,
        Ok(Some(Arrival::Session(stream))) => sessions.attend(stream, reachable.clone(), client).await,
        Ok(None) => {}
        Err(error) => refused(&error),
    }
}

async fn hand_over(doors: &Doors, client: &ClientOrigin, accepted: AcceptedClient<ClientSocket>) {
    let AcceptedClient { stream, negotiated, ahead } = accepted;
    if let Some(door) = doors.door(&negotiated.info.name) {
        door.take(client, stream, negotiated, ahead).await;
    }
}

fn refused(error: &NbdError) {
    tracing::warn!(%error, "a handshake with a client of an export came to nothing");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_addresses_overlap_with_each_of_them() {
        let both = |one: &str, other: &str| {
            let (one, other) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(overlap(one, other), overlap(other, one));
            overlap(one, other)
        };
        assert!(both("[::]:1", "127.0.0.1:1") && both("[::]:1", "0.0.0.0:1") && both("[::]:1", "[::1]:1"));
        assert!(both("0.0.0.0:1", "127.0.0.1:1"));
        assert!(!both("0.0.0.0:1", "[::1]:1") && !both("[::]:1", "127.0.0.1:2"));
        assert!(!both("10.0.0.1:1", "10.0.0.2:1"));
    }
}
