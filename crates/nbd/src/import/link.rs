//! What the two halves of a connection share: atomics, two short queues and two eventfds, no lock.
//!
//! ```text
//!   keeper (control half) --mail: a new socket, refuse-->  channel (I/O core)     wakes it by `wake`
//!                         <-- losses: why it is gone ----                         wakes it by `report`
//! ```
//! The keeper wakes the channel only while something is in flight: without, nobody reaps, and a raised event would keep the core
//! awake. Each side stores first and looks afterwards, so one of them sees the other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

use arc_swap::ArcSwap;
use crossbeam_queue::ArrayQueue;
use ioplane_memory::GuestMap;
use rustix::event::{EventfdFlags, epoll};

use super::facts::Facts;
use super::locker::Locker;
use super::quiet::{Leave, Quiet};
use super::retained::Retained;
use super::size::ExportSize;
use super::socket::Socket;
use super::status::{ConnectionState, ConnectionStatus, Loss};
use super::writes::Writes;

/// Guest maps that may wait for the keeper to unmap them.
const RETIRED: usize = 16;

/// A connection that has passed the handshake.
#[derive(Debug, Clone)]
pub(super) struct Delivery {
    pub socket: Arc<Socket>,
    /// Structured replies were negotiated.
    pub structured: bool,
    /// Numbers the connections of a link.
    pub generation: u32,
}

/// Counted by the channel, which alone stores; read by anybody.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub requests: AtomicU64,
    pub replays: AtomicU64,
    pub bytes_read: AtomicU64,
    pub bytes_written: AtomicU64,
    pub device_errors: AtomicU64,
    /// Requests that the server has answered.
    pub replies: AtomicU64,
    /// Grows while the server makes headway: with replies, and with every 4 KiB or more that it takes or sends.
    pub progress: AtomicU64,
}

/// Adds to a counter of which the caller is the only writer.
#[inline]
pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}

/// One channel and its keeper.
#[derive(Debug)]
pub(super) struct Link {
    pub facts: Facts,
    pub size: Arc<ExportSize>,
    /// Requests that may have been carried out are sent again.
    pub replays: bool,
    pub writes: Arc<Writes>,
    /// Copies of the channel's writes, where they are kept.
    pub retained: Option<Locker<Retained>>,
    pub counters: Counters,
    /// What the core sleeps on: holds `wake` and the socket.
    pub waker: OwnedFd,
    wake: OwnedFd,
    woken: AtomicBool,
    mail: ArrayQueue<Delivery>,
    has_mail: AtomicBool,
    refuse: AtomicBool,
    losses: ArrayQueue<(u32, Loss)>,
    /// Readable when the keeper has something to look at.
    pub report: Arc<OwnedFd>,
    closing: AtomicBool,
    /// The channel's copies are on the shelf.
    shelved: AtomicBool,
    /// The channel has counted itself in `quiet`.
    leaving: AtomicBool,
    quiet: Arc<Quiet>,
    in_flight: AtomicUsize,
    retired: ArrayQueue<Arc<GuestMap>>,
    /// As the keeper sees it.
    state: ArcSwap<ConnectionState>,
    network_failures: AtomicU64,
    changed: AtomicU64,
}

/// Of `wake` in the epoll set, and of a socket.
const WAKE: u64 = 0;
const SOCKET: u64 = 1;

impl Link {
    pub fn new(
        facts: Facts,
        size: Arc<ExportSize>,
        replays: bool,
        writes: Arc<Writes>,
        retained: Option<Locker<Retained>>,
        quiet: Arc<Quiet>,
    ) -> std::io::Result<Arc<Link>> {
        let event = || rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (wake, report) = (event()?, event()?);
        let waker = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&waker, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Arc::new(Link {
            facts,
            size,
            replays,
            writes,
            retained,
            counters: Counters::default(),
            waker,
            wake,
            woken: AtomicBool::new(false),
            mail: ArrayQueue::new(1),
            has_mail: AtomicBool::new(false),
            refuse: AtomicBool::new(false),
            losses: ArrayQueue::new(4),
            report: Arc::new(report),
            closing: AtomicBool::new(false),
            shelved: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            quiet,
            in_flight: AtomicUsize::new(0),
            retired: ArrayQueue::new(RETIRED),
            state: ArcSwap::from_pointee(ConnectionState::Connecting),
            network_failures: AtomicU64::new(0),
            changed: AtomicU64::new(0),
        }))
    }

    // ---- the channel's side

    /// Says how many operations are in flight, in a way that [`Link::news`] may follow.
    #[inline]
    pub fn publish(&self, in_flight: usize) {
        self.in_flight.store(in_flight, Ordering::SeqCst);
    }

    /// Whether the keeper has something for the channel.
    #[inline]
    pub fn news(&self) -> bool {
        self.has_mail.load(Ordering::SeqCst) || self.refuse.load(Ordering::SeqCst)
    }

    /// Whether a connection has come.
    #[inline]
    pub fn has_mail(&self) -> bool {
        self.has_mail.load(Ordering::Relaxed)
    }

    /// The newest connection, if one has come.
    pub fn take_mail(&self) -> Option<Delivery> {
        if self.has_mail.swap(false, Ordering::AcqRel) { self.mail.pop() } else { None }
    }

    /// Whether requests without a connection fail instead of waiting for one.
    #[inline]
    pub fn refuses(&self) -> bool {
        self.refuse.load(Ordering::Relaxed)
    }

    /// Nothing is left to be woken for. The event is emptied after the note is, so one that is raised meanwhile is seen the next time.
    #[inline]
    pub fn lower(&self) {
        if self.woken.load(Ordering::Relaxed) && self.woken.swap(false, Ordering::AcqRel) {
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    /// The core sleeps on `socket` from now on; with `writable` also until it takes more.
    pub fn watch(&self, socket: &Socket, writable: bool, fresh: bool) -> rustix::io::Result<()> {
        let out = if writable { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        let (data, events) = (epoll::EventData::new_u64(SOCKET), epoll::EventFlags::IN | out);
        if fresh {
            epoll::add(&self.waker, socket, data, events)
        } else {
            epoll::modify(&self.waker, socket, data, events)
        }
    }

    /// The core sleeps on `socket` no more. Both halves may call it, and one that comes second changes nothing.
    pub fn unwatch(&self, socket: &Socket) {
        let _ = epoll::delete(&self.waker, socket);
    }

    /// Tells the keeper that a connection is gone. A wake-up that it does not hear of is made up for by its next look.
    pub fn lost(&self, generation: u32, loss: Loss) {
        let _ = self.losses.force_push((generation, loss));
        self.ring();
    }

    /// The channel leaves a connection on which the server may still work.
    pub fn leave(&self) {
        if !self.leaving.swap(true, Ordering::AcqRel) {
            self.quiet.begin();
        }
    }

    /// The channel is dropped.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Release);
        self.ring();
    }

    /// Gives up a map. The last holder's share is left to the keeper, since unmapping takes time.
    #[inline]
    pub fn retire(&self, map: Arc<GuestMap>) {
        if Arc::strong_count(&map) == 1 {
            // If the keeper has not come by for a while the map is unmapped right here.
            let _ = self.retired.push(map);
        }
    }

    // ---- the keeper's side

    /// Hands a connection over. It takes the place of the one before, which is thereby known to be lost.
    pub fn deliver(&self, delivery: Delivery) {
        let _ = self.mail.force_push(delivery);
        self.has_mail.store(true, Ordering::SeqCst);
        self.set_refuse(false);
        self.wake_if_busy();
    }

    /// Whether requests without a connection fail from now on.
    pub fn set_refuse(&self, refuse: bool) {
        if self.refuse.swap(refuse, Ordering::SeqCst) != refuse && refuse {
            self.wake_if_busy();
        }
    }

    /// The connection on its way to the channel, if there is one, is of another time.
    pub fn take_back(&self) {
        if let Some(delivery) = self.take_mail() {
            self.lost(delivery.generation, Loss::Instance);
        }
    }

    /// Makes the channel look, if anything is in flight.
    pub fn wake_if_busy(&self) {
        fence(Ordering::SeqCst);
        if self.in_flight.load(Ordering::SeqCst) > 0 {
            let _ = rustix::io::write(self.wake.as_fd(), &1u64.to_ne_bytes());
            self.woken.store(true, Ordering::Release);
        }
    }

    /// Takes back a wake-up that came as the last operation ended. Unmaps what was retired.
    pub fn tidy(&self) {
        if self.in_flight.load(Ordering::SeqCst) == 0 {
            self.lower();
        }
        while self.retired.pop().is_some() {}
    }

    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }

    pub fn progress(&self) -> u64 {
        self.counters.progress.load(Ordering::Relaxed)
    }

    /// Why the connection of that generation is gone, if the channel has said so.
    pub fn loss(&self, generation: u32) -> Option<Loss> {
        let mut found = None;
        while let Some((of, loss)) = self.losses.pop() {
            found = (of == generation).then_some(loss).or(found);
        }
        found
    }

    /// What the channel has left, if it has: to be dropped when nothing more is to be waited for.
    pub fn take_leave(&self) -> Option<Leave> {
        self.leaving.swap(false, Ordering::AcqRel).then(|| Leave(self.quiet.clone()))
    }

    pub fn closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// The channel is gone, and its copies are on the shelf.
    pub fn set_shelved(&self) {
        self.shelved.store(true, Ordering::Release);
    }

    pub fn shelved(&self) -> bool {
        self.shelved.load(Ordering::Acquire)
    }

    /// Publishes how the connection stands.
    pub fn set_state(&self, state: ConnectionState) {
        self.state.store(Arc::new(state));
    }

    /// Counts a lost connection.
    pub fn count_loss(&self, loss: Loss) {
        add(&self.network_failures, 1);
        if matches!(loss, Loss::Violation(violation) if violation.is_of_sums()) {
            add(&self.changed, 1);
        }
    }

    /// All that can be told of it. Takes no lock.
    pub fn status(&self) -> ConnectionStatus {
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &self.counters;
        ConnectionStatus {
            state: ConnectionState::clone(&self.state.load()),
            in_flight: self.in_flight(),
            requests: counted(&counters.requests),
            replays: counted(&counters.replays),
            bytes_read: counted(&counters.bytes_read),
            bytes_written: counted(&counters.bytes_written),
            device_errors: counted(&counters.device_errors),
            losses: counted(&self.network_failures),
            changed: counted(&self.changed),
        }
    }

    /// Makes the keeper look.
    pub fn ring(&self) {
        let _ = rustix::io::write(self.report.as_fd(), &1u64.to_ne_bytes());
    }
}
