//! The sessions with hosts that use exports: they come in by the exports' own ports (docs/decisions/0072-the-session-of-two-hosts.md).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ioplane_nbd::session::SessionStream;
use ioplane_netbus::control::{DeviceState, Publications, SessionTiming, serve};
use tokio::sync::{Semaphore, watch};

use super::door::{ClientOrigin, Doors};

/// Sessions at a time, and of these those of one host.
const SESSIONS: u32 = 512;
const OF_ONE_HOST: usize = 16;
/// How long sessions have to tell their last when the daemon ends.
const LAST: Duration = Duration::from_millis(300);

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
    fn one_host_takes_no_more_than_its_places() {
        let sessions = Sessions::default();
        let mut places: Vec<_> = (0..OF_ONE_HOST).map(|_| sessions.place_of("host-b").unwrap()).collect();
        assert!(sessions.place_of("host-b").is_none());
        assert!(sessions.place_of("host-c").is_some());
        places.pop();
        assert!(sessions.place_of("host-b").is_some());
    }
}
