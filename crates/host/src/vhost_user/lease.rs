//! One device behind several sockets: which of them may run its rings.
//!
//! ```text
//!   source        rings run: holds --- GET_VRING_BASE of the last: drained, lets go ---.      starts again if the migration
//!   destination   connected, reads the configuration --- first ring start: claims -----+--> holds   fails: claims
//! ```
//!
//! A live migration's destination connects and reads long before the source stops, and a migration that fails resumes
//! the source. So neither connecting nor disconnecting moves the ownership, but the start of a ring; and since it is let go only
//! when the last ring of the holder has stopped, drained or suspended, no two sockets ever have requests of their own in flight.
//!
//! Requests that were suspended go with the lease: the next holder does them, if its ring goes on where that one stopped. Its
//! own in-flight region does not know them, and QEMU does not migrate the source's.

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ioplane_device::Meter;
use ioplane_virtio::InFlightRequest;
use tokio::sync::{Mutex, OwnedMutexGuard};

use super::fault::PeerFault;

/// How long a front end that starts its rings waits for the other to stop: longer than a stop takes before it suspends.
const PATIENCE: Duration = Duration::from_secs(30);

/// The right to run a device's rings, of which there is one. Every socket of the device has a clone.
#[derive(Debug, Clone)]
pub struct RingLease {
    suspended: Arc<Mutex<SuspendedRings>>,
    /// A queue is counted in one place, whichever socket it runs behind.
    meters: Arc<OnceLock<Vec<Arc<Meter>>>>,
    patience: Duration,
}

impl Default for RingLease {
    fn default() -> Self {
        RingLease { suspended: Arc::default(), meters: Arc::default(), patience: PATIENCE }
    }
}

impl RingLease {
    /// With another patience than thirty seconds for a holder that does not stop.
    pub fn with_patience(self, patience: Duration) -> Self {
        RingLease { patience, ..self }
    }

    /// The meters of the first socket's queues; `own`, if this is the first.
    pub(super) fn meters(&self, own: &[Arc<Meter>]) -> &[Arc<Meter>] {
        self.meters.get_or_init(|| own.to_vec())
    }
}

/// What a holder leaves to the next: the requests of rings that had to be suspended.
#[derive(Debug, Default)]
struct SuspendedRings {
    rings: BTreeMap<u16, SuspendedRing>,
}

/// Requests of one ring that were taken and not answered.
#[derive(Debug, PartialEq, Eq)]
struct SuspendedRing {
    /// Where the ring goes on, as GET_VRING_BASE said.
    base: Option<u32>,
    /// They, in the order in which they were taken.
    flights: Vec<InFlightRequest>,
}

type Claim = Pin<Box<dyn Future<Output = Option<OwnedMutexGuard<SuspendedRings>>> + Send>>;

enum State {
    Idle,
    Waiting(Claim),
    Holding(OwnedMutexGuard<SuspendedRings>),
}

/// One socket's part in a lease.
pub(super) struct LeaseClaim {
    lease: RingLease,
    state: State,
}

impl LeaseClaim {
    pub fn new(lease: RingLease) -> Self {
        LeaseClaim { lease, state: State::Idle }
    }

    /// Whether rings may run: at once if nobody else's do. If not, the claim is made, and [`LeaseClaim::granted`] says when.
    pub fn claim(&mut self) -> bool {
        if let State::Idle = self.state {
            self.state = match self.lease.suspended.clone().try_lock_owned() {
                Ok(suspended) => State::Holding(suspended),
                Err(_) => {
                    let (lock, patience) = (self.lease.suspended.clone().lock_owned(), self.lease.patience);
                    State::Waiting(Box::pin(async move { tokio::time::timeout(patience, lock).await.ok() }))
                }
            };
        }
        self.holds()
    }

    /// Ready when a claim has been granted, or was in vain. Never, if nothing was claimed. Dropping the future loses nothing.
    pub async fn granted(&mut self) -> Result<(), PeerFault> {
        let State::Waiting(claim) = &mut self.state else { return pending().await };
        match claim.await {
            Some(suspended) => {
                self.state = State::Holding(suspended);
                Ok(())
            }
            None => {
                self.state = State::Idle;
                Err(PeerFault::NotOwner)
            }
        }
    }

    /// Lets go: no ring of this socket has a poller any more.
    pub fn release(&mut self) {
        self.state = State::Idle;
    }

    /// Rings of this socket may run.
    pub fn holds(&self) -> bool {
        matches!(self.state, State::Holding(_))
    }

    /// Rings of this socket are to run, and wait for those of another.
    pub fn waits(&self) -> bool {
        matches!(self.state, State::Waiting(_))
    }

    /// Whether requests of rings that have stopped wait for the next holder.
    pub fn owes(&self) -> bool {
        match &self.state {
            State::Holding(suspended) => !suspended.rings.is_empty(),
            _ => self.lease.suspended.try_lock().is_ok_and(|suspended| !suspended.rings.is_empty()),
        }
    }

    /// A ring has stopped at `base`, with these requests suspended.
    pub fn leave(&mut self, ring: u16, base: Option<u32>, flights: &[InFlightRequest]) {
        let State::Holding(suspended) = &mut self.state else { return };
        if flights.is_empty() {
            suspended.rings.remove(&ring);
        } else {
            suspended.rings.insert(ring, SuspendedRing { base, flights: flights.to_vec() });
        }
    }

    /// The requests that the last holder left in `ring`, if it goes on where that one stopped. One that goes on elsewhere is
    /// another guest's.
    pub fn inherit(&mut self, ring: u16, base: Option<u32>) -> Vec<InFlightRequest> {
        let State::Holding(suspended) = &mut self.state else { return Vec::new() };
        let left = suspended.rings.remove(&ring).filter(|left| left.base == base);
        left.map_or_else(Vec::new, |left| left.flights)
    }
}

impl fmt::Debug for LeaseClaim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.state {
            State::Idle => "idle",
            State::Waiting(_) => "waiting",
            State::Holding(_) => "holding",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_holds_the_next_waits_and_a_wait_ends() {
        let lease = RingLease::default().with_patience(Duration::from_millis(20));
        let (mut a, mut b) = (LeaseClaim::new(lease.clone()), LeaseClaim::new(lease));
        assert!(a.claim() && a.claim() && !b.claim() && b.waits());
        assert!(matches!(b.granted().await, Err(PeerFault::NotOwner)));
        assert!(!b.waits() && !b.claim());
        a.release();
        b.granted().await.unwrap();
        assert!(b.holds() && !a.claim());
        // A claim that is given up does not keep anybody waiting.
        a.release();
        b.release();
        assert!(b.claim());
    }

    #[test]
    fn what_was_suspended_is_the_next_holders_where_the_ring_goes_on() {
        let lease = RingLease::default();
        let (mut a, mut b) = (LeaseClaim::new(lease.clone()), LeaseClaim::new(lease));
        let flights = |heads: &[u16]| -> Vec<InFlightRequest> {
            heads.iter().map(|head| InFlightRequest { head: *head, descriptors: Vec::new() }).collect()
        };
        assert!(a.claim());
        a.leave(0, Some(7), &flights(&[3, 1]));
        a.leave(1, Some(9), &flights(&[2]));
        a.leave(2, Some(4), &flights(&[5]));
        a.leave(2, Some(4), &[]);
        a.release();
        assert!(b.claim());
        assert_eq!(b.inherit(0, Some(7)), flights(&[3, 1]));
        assert_eq!(b.inherit(0, Some(7)), [], "once");
        assert_eq!(b.inherit(1, Some(0)), [], "another guest");
        assert_eq!(b.inherit(2, Some(4)), [], "drained");
    }
}
