//! What hosts with a session are told of an export (docs/decisions/0072-the-session-of-two-hosts.md).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use ioplane_netbus::control::{DevicePresence, DeviceState};
use tokio::sync::watch;

use crate::devices::DISK;

/// How long after its last error the disk below counts as failing.
const TROUBLED: Duration = Duration::from_secs(30);
/// Hosts that are named when a person asks for something that they prevent.
const NAMED: usize = 8;

/// How an export is, as others are told. Clones are of the same export.
#[derive(Clone)]
pub struct ToldState {
    state: watch::Sender<DeviceState>,
    /// Whose sessions have asked for it; those that are over are taken out when another one asks.
    watchers: Arc<Mutex<Vec<Weak<str>>>>,
}

impl ToldState {
    /// One that is served.
    pub fn new(instance: &str, bytes: u64) -> ToldState {
        let state = DeviceState {
            kind: DISK.to_owned(),
            incarnation: instance.to_owned(),
            units: bytes,
            presence: DevicePresence::Served,
            trouble: None,
            holder: None,
        };
        ToldState { state: watch::Sender::new(state), watchers: Arc::default() }
    }

    fn change<T: PartialEq>(&self, of: impl FnOnce(&mut DeviceState) -> &mut T, value: T) {
        self.state.send_if_modified(|state| {
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

    /// It is another instance from now on.
    pub fn incarnation(&self, instance: &str) {
        self.change(|state| &mut state.incarnation, instance.to_owned());
    }

    /// What is wrong with the disk below.
    pub fn trouble(&self, what: Option<String>) {
        self.change(|state| &mut state.trouble, what);
    }

    /// It is served no more; `stopping`: since the whole daemon ends.
    pub fn leave(&self, stopping: bool) {
        let presence = if stopping { DevicePresence::Stopping } else { DevicePresence::Withdrawn };
        self.change(|state| &mut state.presence, presence);
    }

    /// Who is told, in words, if anybody is.
    pub fn watchers(&self) -> Option<String> {
        if self.state.receiver_count() == 0 {
            return None;
        }
        let watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        let names: BTreeSet<Arc<str>> = watchers.iter().filter_map(Weak::upgrade).collect();
        let names: Vec<&str> = names.iter().map(|name| &**name).take(NAMED).collect();
        Some(names.join(", "))
    }

    /// What is wrong with it, if anything.
    pub fn troubled(&self) -> Option<String> {
        self.state.borrow().trouble.clone()
    }

    /// For who is told: `client` in words, which lives as long as its session.
    pub fn watch(&self, client: &Arc<str>) -> watch::Receiver<DeviceState> {
        let mut watchers = self.watchers.lock().unwrap_or_else(PoisonError::into_inner);
        let client = Arc::downgrade(client);
        watchers.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&client));
        watchers.push(client);
        self.state.subscribe()
    }
}

/// Whether requests below an export fail, from the requests that have failed so far.
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
            format!("requests below it fail: {errors} requests have had I/O errors since it was published")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_told_is_named_while_the_session_lasts() {
        let told = ToldState::new("7@boot", 1 << 20);
        assert_eq!(told.watchers(), None);
        let [b, c] = ["host-b", "host-c"].map(Arc::<str>::from);
        let (watch_b, watch_c) = (told.watch(&b), (told.watch(&c), told.watch(&c)));
        assert_eq!(told.watchers().as_deref(), Some("host-b, host-c"));
        drop((b, watch_b));
        assert_eq!(told.watchers().as_deref(), Some("host-c"));
        drop((c, watch_c));
        assert_eq!(told.watchers(), None);
    }

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
}
