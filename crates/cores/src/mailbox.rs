//! How the control plane speaks to a core: a lock-free queue, a flag to look at while polling, an eventfd to wake by.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crossbeam_queue::SegQueue;
use ioplane_device::{CoreEnded, CoreId, CoreMessage, CoreSender};
use rustix::event::{EventfdFlags, eventfd};

/// Bit of `gate`: closed for good, or for as long as it takes to see whether the core may end.
const CLOSED: u32 = 1;
/// What one poster adds to `gate` while it posts.
const POSTER: u32 = 2;

/// The mailbox of one core. Posting never blocks; the core pays one relaxed load a turn while nothing comes.
///
/// No order is lost: a poster pushes, raises the flag, then writes the eventfd; the core lowers the flag, empties the
/// eventfd, then pops. Whatever is pushed too late for the pop raises the flag and the eventfd again after that. A poster whose
/// two steps have the core's between them leaves the eventfd up with the flag lowered: a core that the eventfd has woken
/// raises the flag itself, and reads its mail once more than it need.
pub struct Mailbox {
    core: CoreId,
    orders: SegQueue<CoreMessage>,
    raised: AtomicBool,
    bell: OwnedFd,
    gate: AtomicU32,
    /// Seats here or on their way here.
    seats: AtomicU32,
}

impl Mailbox {
    pub(crate) fn new(core: CoreId) -> Result<Self, rustix::io::Errno> {
        Ok(Mailbox {
            core,
            orders: SegQueue::new(),
            raised: AtomicBool::new(false),
            bell: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            gate: AtomicU32::new(0),
            seats: AtomicU32::new(0),
        })
    }

    /// Makes the core read its mailbox, and its panel with it. Any thread.
    pub(crate) fn ring(&self) {
        self.raised.store(true, Ordering::Release);
        // Fails only if the counter is full, and then the core is awake anyway.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Seats that sit here or are on their way.
    pub(crate) fn seats(&self) -> u32 {
        self.seats.load(Ordering::Relaxed)
    }

    /// The core's side: whether somebody rang. One relaxed load.
    #[inline]
    pub(crate) fn raised(&self) -> bool {
        self.raised.load(Ordering::Relaxed)
    }

    /// The core's side: lowers the flag and empties the eventfd; from here on every order rings anew.
    pub(crate) fn lower(&self) {
        self.raised.swap(false, Ordering::AcqRel);
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.bell, &mut count);
    }

    /// The core's side: there is mail, or it has yet to see that there is none. Lets nobody sleep before it has looked.
    pub(crate) fn expect(&self) {
        self.raised.store(true, Ordering::Relaxed);
    }

    /// The core's side: the next order.
    pub(crate) fn next(&self) -> Option<CoreMessage> {
        self.orders.pop()
    }

    /// The core's side: a seat has gone.
    pub(crate) fn vacated(&self) {
        self.seats.fetch_sub(1, Ordering::Relaxed);
    }

    /// The core's side: accepts no more orders. When it returns, every accepted one can be popped.
    pub(crate) fn close(&self) {
        self.gate.fetch_or(CLOSED, Ordering::SeqCst);
        while self.gate.load(Ordering::SeqCst) >= POSTER {
            std::thread::yield_now();
        }
    }

    /// The core's side: goes on after all.
    pub(crate) fn reopen(&self) {
        self.gate.fetch_and(!CLOSED, Ordering::SeqCst);
    }

    /// Readable when somebody rang.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

impl CoreSender for Mailbox {
    fn core(&self) -> CoreId {
        self.core
    }

    fn send(&self, order: CoreMessage) -> Result<(), CoreEnded> {
        // The gate counts who is inside, so that a core that ends knows when the queue has got its last order.
        let inside = self.gate.fetch_add(POSTER, Ordering::SeqCst);
        if inside & CLOSED != 0 {
            self.gate.fetch_sub(POSTER, Ordering::SeqCst);
            return Err(CoreEnded(order));
        }
        if matches!(order, CoreMessage::Attach(_)) {
            self.seats.fetch_add(1, Ordering::Relaxed);
        }
        self.orders.push(order);
        self.ring();
        self.gate.fetch_sub(POSTER, Ordering::SeqCst);
        Ok(())
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox")
            .field("core", &self.core)
            .field("seats", &self.seats())
            .finish_non_exhaustive()
    }
}

/// Where a core was: gives every order back.
#[derive(Debug, Clone, Copy)]
pub struct EndedCore(pub CoreId);

impl CoreSender for EndedCore {
    fn core(&self) -> CoreId {
        self.0
    }

    fn send(&self, order: CoreMessage) -> Result<(), CoreEnded> {
        Err(CoreEnded(order))
    }
}
