//! How connections end, and how their owner hears of it.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use atomic_waker::AtomicWaker;
use crossbeam_queue::ArrayQueue;

use crate::error::Violation;

/// Why a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionEnd {
    /// The client said so by `NBD_CMD_DISC`, and has got all replies.
    Disconnected,
    /// The client closed the connection without a word, between two requests.
    Closed,
    /// The client closed the connection in the middle of a request.
    CutOff,
    /// The connection is lost, by errno.
    Lost(i32),
    /// The client broke the protocol.
    Violation(Violation),
    /// The host has no memory left for the connection's data.
    Memory,
    /// A flush of the export has failed, on this connection or another one, and the client was told of an instance before that ([`super::Export::bind`]). It
    /// has got all replies.
    FlushFailed,
    /// Its owner closed it.
    ByOwner,
}

/// [`ConnectionEnd::name`] of a connection whose data were changed on the way.
pub const WRONG_SUM: &str = "wrong-sum";

impl ConnectionEnd {
    /// Its kind, for counters.
    pub fn name(self) -> &'static str {
        match self {
            ConnectionEnd::Disconnected => "disconnected",
            ConnectionEnd::Closed => "closed",
            ConnectionEnd::CutOff => "cut-off",
            ConnectionEnd::Lost(_) => "lost",
            ConnectionEnd::Violation(Violation::RequestMagic(_)) => "request-magic",
            ConnectionEnd::Violation(Violation::PayloadLength(_)) => "payload-length",
            ConnectionEnd::Violation(violation) if violation.is_of_sums() => WRONG_SUM,
            ConnectionEnd::Violation(_) => "violation",
            ConnectionEnd::Memory => "memory",
            ConnectionEnd::FlushFailed => "flush-failed",
            ConnectionEnd::ByOwner => "by-owner",
        }
    }

    /// All kinds that [`ConnectionEnd::name`] gives.
    pub const NAMES: [&str; 11] = [
        "disconnected",
        "closed",
        "cut-off",
        "lost",
        "request-magic",
        "payload-length",
        WRONG_SUM,
        "violation",
        "memory",
        "flush-failed",
        "by-owner",
    ];
}

/// A connection that has ended: its poller has nothing in flight and does nothing more. Its owner drains the queue, and with the parked
/// poller the connection is dropped and its queue is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Its queue.
    pub queue: u16,
    /// Why.
    pub end: ConnectionEnd,
}

/// Ended connections on their way from I/O cores to their owner. Holds one for each queue, so none is lost.
#[derive(Debug)]
pub(super) struct EndedQueue {
    ended: ArrayQueue<Ended>,
    waker: AtomicWaker,
}

impl EndedQueue {
    pub fn new(connections: u16) -> Arc<EndedQueue> {
        let ended = ArrayQueue::new(usize::from(connections.max(1)));
        Arc::new(EndedQueue { ended, waker: AtomicWaker::new() })
    }

    /// Called on an I/O core, once for each connection.
    pub fn push(&self, ended: Ended) {
        let kept = self.ended.push(ended);
        debug_assert!(kept.is_ok(), "more connections have ended than there were");
        self.waker.wake();
    }

    /// The poller of a queue has parked: nobody needs to hear of its connection's end any more. Called by the owner, which also takes.
    pub fn forget(&self, queue: u16) {
        for _ in 0..self.ended.len() {
            match self.ended.pop() {
                Some(ended) if ended.queue != queue => drop(self.ended.push(ended)),
                _ => {}
            }
        }
        // Another one may have come meanwhile, for which the waiting task was woken and found nothing.
        self.waker.wake();
    }

    fn poll(&self, context: &mut Context<'_>) -> Poll<Ended> {
        self.waker.register(context.waker());
        self.ended.pop().map_or(Poll::Pending, Poll::Ready)
    }
}

/// Where the owner of an export hears of connections that have ended. One task waits at a time.
#[derive(Debug, Clone)]
pub struct EndedConnections(pub(super) Arc<EndedQueue>);

impl EndedConnections {
    /// The next connection that has ended. Dropping the future loses nothing.
    pub async fn next(&self) -> Ended {
        poll_fn(|context| self.0.poll(context)).await
    }

    /// The next one, if there is one now.
    pub fn try_next(&self) -> Option<Ended> {
        self.0.ended.pop()
    }
}
