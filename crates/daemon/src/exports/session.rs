//! The sessions with hosts that use exports: they come in by the exports' own ports (docs/decisions/0072-the-session-of-two-hosts.md).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ioplane_nbd::session::SessionStream;
use ioplane_netbus::control::{DeviceState, Publications, SessionTiming, serve};
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use super::door::{ClientOrigin, Doors};

/// Sessions at a time: of each host with a certificate, whatever others take; of strangers in plain text; and of programs of this host.
const OF_ONE_HOST: usize = 16;
const IN_PLAIN_TEXT: usize = 128;
const LOCAL: usize = 128;
/// More than there can be.
const ALL: u32 = u32::MAX;
/// How long sessions have to tell their last when the daemon ends.
const LAST: Duration = Duration::from_millis(300);

/// The sessions of this daemon with hosts that use its exports.
pub struct Sessions {
    in_plain_text: Semaphore,
    local: Semaphore,
    /// Each session has one of its [`ALL`] permits.
    all: Semaphore,
    /// Of hosts with a certificate.
    of_hosts: Mutex<BTreeMap<String, usize>>,
    ending: watch::Sender<bool>,
}

impl Default for Sessions {
    fn default() -> Self {
        Sessions {
            in_plain_text: Semaphore::new(IN_PLAIN_TEXT),
            local: Semaphore::new(LOCAL),
            all: Semaphore::new(ALL as usize),
            of_hosts: Mutex::default(),
            ending: watch::Sender::new(false),
        }
    }
}

/// What one host may be told.
struct Audience {
    /// Exports that it can reach.
    doors: Doors,
    client: ClientOrigin,
    /// The same for people.
    name: Arc<str>,
}

impl Publications for Audience {
    fn subscribe(&self, device: &str) -> Result<watch::Receiver<DeviceState>, String> {
        // Whoever may not use it is not told that it is there.
        let door = self.doors.door(device).filter(|door| door.admits(&self.client).is_ok());
        let door = door.ok_or_else(|| format!("no export called {device:?} is served"))?;
        Ok(door.told().watch(&self.name))
    }
}

/// The place of a session among those of its kind.
enum SessionPlace<'a> {
    Shared { _permit: SemaphorePermit<'a> },
    OfHost { _place: HostPlace<'a> },
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

    fn place(&self, client: &ClientOrigin) -> Option<SessionPlace<'_>> {
        match client {
            ClientOrigin::Host(host) => self.place_of(host).map(|_place| SessionPlace::OfHost { _place }),
            ClientOrigin::Anybody => {
                self.in_plain_text.try_acquire().ok().map(|_permit| SessionPlace::Shared { _permit })
            }
            ClientOrigin::Local => {
                self.local.try_acquire().ok().map(|_permit| SessionPlace::Shared { _permit })
            }
        }
    }

    /// Tells a host what it asks for of the exports behind `doors`, until it goes.
    pub async fn attend(self: &Arc<Self>, stream: SessionStream, doors: Doors, client: ClientOrigin) {
        let (Some(_place), Ok(_one)) = (self.place(&client), self.all.try_acquire()) else {
            tracing::warn!(?client, "a session with a host was refused: there are too many like it");
            return;
        };
        let name = match &client {
            ClientOrigin::Local => "a program of this host",
            ClientOrigin::Anybody => "a host in plain text",
            ClientOrigin::Host(host) => host.as_str(),
        };
        let name = Arc::from(name);
        tracing::info!(?client, "a session with a host has begun");
        let mut ending = self.ending.subscribe();
        let end = async move {
            let _ = ending.wait_for(|ending| *ending).await;
        };
        let audience = Audience { doors, client: client.clone(), name };
        match serve(stream, &audience, SessionTiming::default(), end).await {
            Ok(()) => tracing::info!(?client, "a session with a host has ended"),
            Err(error) => tracing::warn!(?client, %error, "a session with a host is lost"),
        }
    }

    /// Tells all what they have not been told yet, and ends. Takes [`LAST`] at most.
    pub async fn end(&self) {
        self.ending.send_replace(true);
        let _ = tokio::time::timeout(LAST, self.all.acquire_many(ALL)).await;
    }
}

#[cfg(test)]
mod tests {
    use ioplane_nbd::export::{Export, ExportOptions};
    use ioplane_storage::MemoryBacking;
    use tokio::sync::mpsc;

    use super::super::door::{Admission, Door};
    use super::super::instance::ExportInstance;
    use super::super::owner::ShownClaim;
    use super::super::told::ToldState;
    use super::*;

    /// An export as a session finds it: nobody owns it.
    fn door(name: &str, admission: Admission) -> Door {
        let backing = MemoryBacking::new(1 << 20).unwrap();
        let published = Export::new(name, backing, ExportOptions::default()).unwrap().published();
        let told = ToldState::new("7@boot", 1 << 20);
        let owner = (mpsc::channel(1).0, ShownClaim::default());
        let instance = ExportInstance::new("7@boot", &Arc::default());
        Door::new(published, instance, admission, owner, told)
    }

    /// Whichever export it was opened by, a session is about those that its client may use.
    #[test]
    fn what_a_client_may_not_use_is_not_there_for_its_session() {
        let doors = Doors::default();
        let only_b = Admission { tls: true, allow: Some("host-b".parse().unwrap()) };
        let all =
            [("open", Admission::default()), ("tls", Admission { tls: true, allow: None }), ("b", only_b)];
        for (name, admission) in all {
            doors.enter(door(name, admission));
        }
        let host = |name: &str| ClientOrigin::Host(name.to_owned());
        for (client, may) in [
            (ClientOrigin::Anybody, &["open"][..]),
            (host("host-c"), &["open", "tls"]),
            (host("host-b"), &["open", "tls", "b"]),
        ] {
            let audience = Audience { doors: doors.clone(), client, name: Arc::from("somebody") };
            for name in ["open", "tls", "b", "absent"] {
                let told = audience.subscribe(name);
                assert_eq!(told.is_ok(), may.contains(&name), "{name} for {:?}", audience.client);
                if let Err(why) = told {
                    assert_eq!(why, format!("no export called {name:?} is served"));
                }
            }
        }
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

    #[test]
    fn strangers_in_plain_text_take_nobody_elses_places() {
        let sessions = Sessions::default();
        let stranger = || sessions.place(&ClientOrigin::Anybody);
        let mut places: Vec<_> = (0..IN_PLAIN_TEXT).map(|_| stranger().unwrap()).collect();
        assert!(stranger().is_none());
        assert!(sessions.place(&ClientOrigin::Host("host-b".to_owned())).is_some());
        assert!(sessions.place(&ClientOrigin::Local).is_some());
        places.pop();
        assert!(stranger().is_some());
    }
}
