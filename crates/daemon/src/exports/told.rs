//! What hosts with a session are told of an export, and that sessions come in by the exports' own ports
//! (docs/decisions/0072-the-session-of-two-hosts.md).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ioplane_nbd::session::SessionStream;
use ioplane_netbus::control::{DeviceState, Presence, Publications, SessionTiming, serve};
use tokio::sync::{Semaphore, watch};

use super::door::{ClientOrigin, Doors};

/// The kind of device that an export is. Its units are bytes.
pub const DISK: &str = "disk";
/// Sessions at a time, and of these those of one host.
const SESSIONS: u32 = 512;
const OF_ONE_HOST: usize = 16;
/// How long sessions have to tell their last when the daemon ends.
const LAST: Duration = Duration::from_millis(300);
/// How long after its last error the disk below counts as failing.
const TROUBLED: Duration = Duration::from_secs(30);

/// How an export is, as others are told. Clones are of the same export.
#[derive(Clone)]
pub struct ToldState(watch::Sender<DeviceState>);

impl ToldState {
    /// One that is served.
    pub fn new(instance: &str, bytes: u64) -> ToldState {
        let state = DeviceState {
            kind: DISK.to_owned(),
            incarnation: instance.to_owned(),
            units: bytes,
            presence: Presence::Served,
            trouble: None,
            holder: None,
        };
        ToldState(watch::Sender::new(state))
    }

    fn change<T: PartialEq>(&self, of: impl FnOnce(&mut DeviceState) -> &mut T, value: T) {
        self.0.send_if_modified(|state| {
            let place = of(state);
            let differs = *place != value;
            *place = value;
            differs
        });
    }

    /// Who may write it.
    pub fn holder(&self, name: Option<String>) {
        self.change(|state| &mut state.holder, name);
    }

    /// It has so many bytes.
    pub fn resized(&self, bytes: u64) {
        self.change(|state| &mut state.units, bytes);
    }

    /// What is wrong with the disk below.
    pub fn trouble(&self, what: Option<String>) {
        self.change(|state| &mut state.trouble, what);
    }

    /// It is served no more; `stopping`: since the whole daemon ends.
    pub fn leave(&self, stopping: bool) {
        let presence = if stopping { Presence::Stopping } else { Presence::Withdrawn };
        self.change(|state| &mut state.presence, presence);
    }

    /// Whether somebody is told.
    pub fn is_watched(&self) -> bool {
        self.0.receiver_count() > 0
    }

    /// What is wrong with it, if anything.
    pub fn troubled(&self) -> Option<String> {
        self.0.borrow().trouble.clone()
    }

    /// For who is told.
    pub fn watch(&self) -> watch::Receiver<DeviceState> {
        self.0.subscribe()
    }
}

/// Whether the disk below fails, from the requests that have failed so far.
#[derive(Debug, Default)]
pub struct TroubleWatch {
    errors: u64,
    last: Option<Instant>,
}

impl TroubleWatch {
    /// What is wrong, when so many requests have failed.
    pub fn look(&mut self, errors: u64, now: Instant) -> Option<String> {
        if errors > self.errors {
            (self.errors, self.last) = (errors, Some(now));
        }
        self.last.is_some_and(|last| now.duration_since(last) < TROUBLED).then(|| {
            let errors = self.errors;
            format!("the disk below fails: {errors} requests have had I/O errors since it was published")
        })
    }
}

/// The sessions of this daemon with hosts that use its exports.
pub struct Sessions {
    places: Semaphore,
    /// Of hosts with a certificate.
    of_hosts: Mutex<BTreeMap<String, usize>>,
    ending: watch::Sender<bool>,
}

impl Default for Sessions {
    fn default() -> Self {
        let (places, ending) = (Semaphore::new(SESSIONS as usize), watch::Sender::new(false));
        Sessions { places, of_hosts: Mutex::default(), ending }
    }
}

/// What one host may be told.
struct Audience {
    /// Exports that it can reach.
    doors: Doors,
    client: ClientOrigin,
}

impl Publications for Audience {
    fn subscribe(&self, device: &str) -> Result<watch::Receiver<DeviceState>, String> {
        // Whoever may not use it is not told that it is there.
        let door = self.doors.door(device).filter(|door| door.admits(&self.client).is_ok());
        let door = door.ok_or_else(|| format!("no export called {device:?} is served"))?;
        Ok(door.told().watch())
    }
}

/// The place of a session among those of its host.
struct HostPlace<'a>(&'a Sessions, String);

impl Drop for HostPlace<'_> {
    fn drop(&mut self) {
        let mut of_hosts = self.0.of_hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = of_hosts.get_mut(&self.1) {
            *count -= 1;
        }
        of_hosts.retain(|_, count| *count > 0);
    }
}

impl Sessions {
    fn place_of(&self, host: &str) -> Option<HostPlace<'_>> {
        let mut of_hosts = self.of_hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = of_hosts.entry(host.to_owned()).or_default();
        if *count >= OF_ONE_HOST {
            return None;
        }
        *count += 1;
        Some(HostPlace(self, host.to_owned()))
    }

    /// Tells a host what it asks for of the exports behind `doors`, until it goes.
    pub async fn attend(self: &Arc<Self>, stream: SessionStream, doors: Doors, client: ClientOrigin) {
        let refused = |why: &str| tracing::warn!(?client, why, "a session with a host was refused");
        let Ok(_place) = self.places.try_acquire() else { return refused("there are too many") };
        let _of_host = match &client {
            ClientOrigin::Host(host) => match self.place_of(host) {
                Some(place) => Some(place),
                None => return refused("it has too many"),
            },
            ClientOrigin::Local | ClientOrigin::Anybody => None,
        };
        tracing::info!(?client, "a session with a host has begun");
        let mut ending = self.ending.subscribe();
        let end = async move {
            let _ = ending.wait_for(|ending| *ending).await;
        };
        let audience = Audience { doors, client: client.clone() };
        match serve(stream, &audience, SessionTiming::default(), end).await {
            Ok(()) => tracing::info!(?client, "a session with a host has ended"),
            Err(error) => tracing::warn!(?client, %error, "a session with a host is lost"),
        }
    }

    /// Tells all what they have not been told yet, and ends. Takes [`LAST`] at most.
    pub async fn end(&self) {
        self.ending.send_replace(true);
        let _ = tokio::time::timeout(LAST, self.places.acquire_many(SESSIONS)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_fails_while_its_errors_grow_and_for_a_while_after() {
        let (mut watch, start) = (TroubleWatch::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(watch.look(0, at(0)), None);
        assert!(watch.look(3, at(1)).unwrap().contains("3 requests"));
        assert!(watch.look(3, at(29)).is_some());
        assert_eq!(watch.look(3, at(31)), None);
        assert!(watch.look(4, at(32)).is_some());
    }

    #[test]
    fn one_host_takes_no_more_than_its_places() {
        let sessions = Sessions::default();
        let mut places: Vec<_> = (0..OF_ONE_HOST).map(|_| sessions.place_of("host-b").unwrap()).collect();
        assert!(sessions.place_of("host-b").is_none());
        assert!(sessions.place_of("host-c").is_some());
        places.pop();
        assert!(sessions.place_of("host-b").is_some());
    }
}
