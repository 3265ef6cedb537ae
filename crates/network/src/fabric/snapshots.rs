//! How a change of ports reaches the cores: the control side publishes a new [`SwitchSnapshot`], each port TX takes it with its next batch.
//!
//! A port TX looks at one counter for each batch, and at its own mailbox only when that has changed. Old snapshots are kept here
//! until no port TX goes by them, so that no core frees one.

// CONTROL: publishing and subscribing take a lock; going by a snapshot does not.
#![expect(clippy::disallowed_types, reason = "snapshots are published by threads of the control plane only")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crossbeam_queue::ArrayQueue;

use super::snapshot::{PortEntry, SwitchSnapshot};

/// How a port TX gets a new snapshot.
type SnapshotInbox = ArrayQueue<Arc<SwitchSnapshot>>;

/// The snapshot in force, and those before it that some port TX may still go by.
#[derive(Debug)]
pub(crate) struct Snapshots {
    /// Counts snapshots.
    version: AtomicU64,
    // CONTROL: threads of the control plane.
    published: Mutex<Published>,
}

#[derive(Debug)]
struct Published {
    snapshot: Arc<SwitchSnapshot>,
    /// Dropped here, so that no poller frees memory.
    old: Vec<Arc<SwitchSnapshot>>,
    port_txs: Vec<Weak<SnapshotInbox>>,
}

/// A snapshot to come: nothing until it is published. Holds the lock, so that no other change comes between.
#[derive(Debug)]
pub(crate) struct SnapshotChange<'a> {
    version: &'a AtomicU64,
    published: MutexGuard<'a, Published>,
    /// By slot.
    pub entries: Vec<Option<PortEntry>>,
}

/// One port TX's place among those that get new snapshots.
#[derive(Debug)]
pub(crate) struct Subscription {
    version: u64,
    inbox: Arc<SnapshotInbox>,
}

impl Snapshots {
    /// Of a switch without ports.
    pub fn new() -> Self {
        let published =
            Published { snapshot: Arc::new(SwitchSnapshot::empty()), old: Vec::new(), port_txs: Vec::new() };
        Snapshots { version: AtomicU64::new(0), published: Mutex::new(published) }
    }

    /// The snapshot in force. Control side.
    pub fn current(&self) -> Arc<SwitchSnapshot> {
        self.published().snapshot.clone()
    }

    /// Begins a change of the snapshot in force. Control side.
    pub fn change(&self) -> SnapshotChange<'_> {
        let published = self.published();
        let entries = published.snapshot.entries();
        SnapshotChange { version: &self.version, published, entries }
    }

    /// Enters a port TX: the snapshot in force, and where it gets the next ones. Control side.
    pub fn subscribe(&self) -> (Arc<SwitchSnapshot>, Subscription) {
        let mut published = self.published();
        let inbox = Arc::new(SnapshotInbox::new(1));
        published.port_txs.push(Arc::downgrade(&inbox));
        let version = self.version.load(Ordering::Acquire);
        (published.snapshot.clone(), Subscription { version, inbox })
    }

    fn published(&self) -> MutexGuard<'_, Published> {
        self.published.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<'a> SnapshotChange<'a> {
    /// Makes this the snapshot that everybody goes by: port TXs from their next batch on. The next change waits until what this returns is
    /// dropped.
    pub fn publish(mut self) -> impl Sized + use<'a> {
        let snapshot = Arc::new(SwitchSnapshot::new(self.entries));
        let Published { snapshot: current, old, port_txs } = &mut *self.published;
        old.push(std::mem::replace(current, snapshot.clone()));
        port_txs.retain(|inbox| match inbox.upgrade() {
            Some(inbox) => {
                drop(inbox.force_push(snapshot.clone()));
                true
            }
            None => false,
        });
        self.version.fetch_add(1, Ordering::Release);
        old.retain(|snapshot| Arc::strong_count(snapshot) > 1);
        self.published
    }
}

impl Subscription {
    /// Whether there is one that [`Subscription::newer`] would give.
    #[inline]
    pub fn is_newer(&self, snapshots: &Snapshots) -> bool {
        snapshots.version.load(Ordering::Acquire) != self.version
    }

    /// The snapshot in force, if it has changed since the last time. On a core, once a batch.
    #[inline]
    pub fn newer(&mut self, snapshots: &Snapshots) -> Option<Arc<SwitchSnapshot>> {
        let version = snapshots.version.load(Ordering::Acquire);
        if version == self.version {
            return None;
        }
        self.version = version;
        self.inbox.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_nothing_until_it_is_published() {
        let snapshots = Snapshots::new();
        let (snapshot, mut subscription) = snapshots.subscribe();
        drop(snapshots.change());
        assert!(subscription.newer(&snapshots).is_none());
        snapshots.change().publish();
        let newer = subscription.newer(&snapshots).unwrap();
        assert!(!Arc::ptr_eq(&newer, &snapshot) && Arc::ptr_eq(&newer, &snapshots.current()));
        assert!(subscription.newer(&snapshots).is_none());
    }

    #[test]
    fn old_plans_go_when_nobody_goes_by_them_and_not_before() {
        let snapshots = Snapshots::new();
        let (snapshot, mut subscription) = snapshots.subscribe();
        snapshots.change().publish();
        snapshots.change().publish();
        assert_eq!(Arc::strong_count(&snapshot), 2, "here and there");
        // What the port TX skipped has gone; what it comes to is the last.
        let newest = subscription.newer(&snapshots).unwrap();
        assert!(Arc::ptr_eq(&newest, &snapshots.current()));
        let weak = Arc::downgrade(&snapshot);
        drop(snapshot);
        assert!(weak.upgrade().is_some(), "the core did not free it");
        snapshots.change().publish();
        assert!(weak.upgrade().is_none());
    }
}
