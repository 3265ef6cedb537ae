//! How the control plane sends messages to a core: a lock-free queue, a flag to read while polling, an eventfd to wake by.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crossbeam_queue::SegQueue;
use ioplane_device::clock::{Clock, since_epoch};
use ioplane_device::{CoreEnded, CoreId, CoreMessage, CoreSender};
use rustix::event::{EventfdFlags, eventfd};

use crate::meters::MeterTable;

/// Bit of `gate`: closed for good, or for as long as it takes to see whether the core may end.
const CLOSED: u32 = 1;
/// What one sender adds to `gate` while it sends.
const SENDER: u32 = 2;

/// The mailbox of one core. Sending waits for nothing that the core does; while nothing comes the core pays one relaxed load per turn.
///
/// No message is lost: a sender pushes, sets the flag, then writes the eventfd; the core clears the flag, empties the eventfd, then
/// pops. A message that is pushed too late for the pop sets the flag and the eventfd again after that. If the core's steps fall
/// between a sender's last two, the eventfd stays readable with the flag clear: a core that the eventfd has woken sets the flag
/// itself, and reads its mailbox once more than necessary.
pub struct Mailbox {
    core: CoreId,
    messages: SegQueue<CoreMessage>,
    pending: AtomicBool,
    event: OwnedFd,
    /// The core's.
    clock: Arc<dyn Clock>,
    /// When the eventfd was written last, by the core's clock, ns since the epoch of limits.
    asked_ns: AtomicU64,
    gate: AtomicU32,
    /// Queues that are attached or about to be.
    queues: AtomicU32,
    /// Of the slots that have been sent.
    pub(crate) meters: Arc<MeterTable>,
}

impl Mailbox {
    pub(crate) fn new(core: CoreId, clock: Arc<dyn Clock>) -> Result<Self, rustix::io::Errno> {
        Ok(Mailbox {
            core,
            messages: SegQueue::new(),
            pending: AtomicBool::new(false),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            clock,
            asked_ns: AtomicU64::new(0),
            gate: AtomicU32::new(0),
            queues: AtomicU32::new(0),
            meters: Arc::default(),
        })
    }

    /// Makes the core read its mailbox and its settings. Any thread.
    pub(crate) fn wake(&self) {
        self.pending.store(true, Ordering::Release);
        self.asked_ns.store(since_epoch(self.clock.now()), Ordering::Relaxed);
        // Fails only if the counter is full, and then the core is awake anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Queues that are attached or about to be.
    pub(crate) fn queues(&self) -> u32 {
        self.queues.load(Ordering::Relaxed)
    }

    /// The core's side: whether the flag is set. One relaxed load.
    #[inline]
    pub(crate) fn pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// The core's side: clears the flag and empties the eventfd; every message after this sets both again.
    pub(crate) fn clear(&self) {
        self.pending.swap(false, Ordering::AcqRel);
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }

    /// The core's side: there may be messages. The core does not sleep before it has looked.
    pub(crate) fn mark_pending(&self) {
        self.pending.store(true, Ordering::Relaxed);
    }

    /// The core's side: when it was woken last, ns since the epoch of limits.
    pub(crate) fn asked_ns(&self) -> u64 {
        self.asked_ns.load(Ordering::Relaxed)
    }

    /// The core's side: the next message.
    pub(crate) fn next(&self) -> Option<CoreMessage> {
        self.messages.pop()
    }

    /// The core's side: a queue has gone.
    pub(crate) fn detached(&self) {
        self.queues.fetch_sub(1, Ordering::Relaxed);
    }

    /// The core's side: accepts no more messages. When it returns, every accepted one can be popped.
    pub(crate) fn close(&self) {
        self.gate.fetch_or(CLOSED, Ordering::SeqCst);
        while self.gate.load(Ordering::SeqCst) >= SENDER {
            std::thread::yield_now();
        }
    }

    /// The core's side: goes on after all.
    pub(crate) fn reopen(&self) {
        self.gate.fetch_and(!CLOSED, Ordering::SeqCst);
    }

    /// Readable when the core is to read its mailbox.
    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl CoreSender for Mailbox {
    fn core(&self) -> CoreId {
        self.core
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        // The gate counts the senders inside, so that a core that ends knows when the queue has got its last message.
        let inside = self.gate.fetch_add(SENDER, Ordering::SeqCst);
        if inside & CLOSED != 0 {
            self.gate.fetch_sub(SENDER, Ordering::SeqCst);
            return Err(CoreEnded(message));
        }
        if let CoreMessage::Attach(slot) = &message {
            self.queues.fetch_add(1, Ordering::Relaxed);
            self.meters.enter(slot.meter());
        }
        self.messages.push(message);
        self.wake();
        self.gate.fetch_sub(SENDER, Ordering::SeqCst);
        Ok(())
    }
}

impl fmt::Debug for Mailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mailbox")
            .field("core", &self.core)
            .field("queues", &self.queues())
            .finish_non_exhaustive()
    }
}

/// In place of a core that has ended: returns every message.
#[derive(Debug, Clone, Copy)]
pub struct EndedCore(pub CoreId);

impl CoreSender for EndedCore {
    fn core(&self) -> CoreId {
        self.0
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        Err(CoreEnded(message))
    }
}
