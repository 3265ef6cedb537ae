//! What hosts with a session are told of an export (docs/decisions/0072-the-session-of-two-hosts.md).

use std::time::{Duration, Instant};

use ioplane_netbus::control::{DevicePresence, DeviceState};
use tokio::sync::watch;

use crate::devices::DISK;

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
            presence: DevicePresence::Served,
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
        let presence = if stopping { DevicePresence::Stopping } else { DevicePresence::Withdrawn };
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
}
