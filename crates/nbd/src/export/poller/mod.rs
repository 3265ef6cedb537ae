//! A connection on an I/O core.
//!
//! ```text
//!   socket --recvmsg--> staging, memory --> check --> IoChannel (piece by piece) --> reply --sendmsg--> socket
//!                                            \------------ refused ---------------->/
//! ```
//! A poll costs what its budget allows, system calls included, and never blocks. A request has a slot from its header to the last byte of
//! its reply, so a client that reads no replies is soon out of slots, and no more is read from it.

mod intake;
mod replies;
mod storage;

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use ioplane_device::mutation::{Invariant, bound};
use ioplane_device::{
    Armed, Budget, Change, CoreContext, Meter, PollCost, PollOutcome, Poller, Tally, Wakers,
};
use ioplane_memory::GuestRange;
use ioplane_storage::{IoChannel, MAX_RANGES, Outcome, Tag};

use super::bell::Bell;
use super::check::Refused;
use super::connection::Connection;
use super::ended::{ConnectionEnd, Ended, EndedQueue};
use super::failures::FailedFlushes;
use super::published::PublishedExport;
use super::readiness::{Interest, Readiness};
use super::status::StatusPlace;

/// What a system call costs beside the bytes that it moves.
const COST_OF_CALL: u64 = 8 << 10;
/// How many bytes are freed in the time in which one is copied.
const FREED_PER_COPIED: u64 = 4;
/// Most bytes that the core frees by itself for one request.
const MOST_FREED: u64 = 1 << 20;
/// Most polls between two looks at a socket that had nothing: a look is a system call, and the other queues of the core wait for it.
const MOST_SKIPPED: u32 = 16;
/// The same while something is in flight: a core that sleeps for its end is woken by the socket, too, and polls without a word.
const MOST_SKIPPED_WAITING: u32 = 2;

/// What the owner wants of the poller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Serving,
    Draining,
    Suspending,
}

/// What a poller has beside its connection.
pub(super) struct Provided {
    pub channel: Box<dyn IoChannel>,
    pub readiness: Readiness,
    pub bell: Arc<Bell>,
    pub ended: Arc<EndedQueue>,
    pub failed: Arc<FailedFlushes>,
    /// [`ioplane_storage::Backing::fails_on`].
    pub fails_on: bool,
    pub status: Option<StatusPlace>,
    pub meter: Arc<Meter>,
    pub published: PublishedExport,
}

/// The data half of one connection.
pub struct ExportPoller {
    connection: Connection,
    channel: Box<dyn IoChannel>,
    readiness: Readiness,
    /// The control side has something for it.
    bell: Arc<Bell>,
    ended: Arc<EndedQueue>,
    failed: Arc<FailedFlushes>,
    /// The failures that the client goes by, unless no flush succeeds after one.
    told_failures: Option<u64>,
    /// For a client that may ask for holes.
    status: Option<StatusPlace>,
    meter: Arc<Meter>,
    /// Knows the size of this moment.
    published: PublishedExport,
    tally: Tally,
    wanted: Wanted,
    /// [`IoChannel::slice`].
    slice: u32,
    /// What the channel has said and nobody has acted on: never longer than the connection's depth.
    finished: VecDeque<(Tag, Outcome)>,
    /// Flushes that have failed and are not answered before that is recorded: number of the failure, slot, answer.
    unrecorded: VecDeque<(u64, u16, Refused)>,
    /// Memory for lists of ranges.
    ranges: Vec<GuestRange>,
    /// What this poll may cost, and has cost.
    cost: PollCost,
    /// What is left of what it may hand to the storage; `None` without a bound.
    room: Option<u64>,
    /// A piece did not fit into that.
    roomless: bool,
    /// The socket takes no replies now.
    blocked: bool,
    /// A request has come that there is no slot or no memory for, or that a limit holds back.
    held: bool,
    /// This poll ended because its budget did.
    more: bool,
    /// Nothing more is to be received in this poll.
    dry: bool,
    /// Something was received in this poll.
    received: bool,
    /// Polls to let pass before the next look at the socket, and how many it was last time.
    skip: u32,
    skipped: u32,
}

impl ExportPoller {
    pub(super) fn new(connection: Connection, provided: Provided) -> ExportPoller {
        let Provided { channel, readiness, bell, ended, failed, fails_on, status, meter, published } =
            provided;
        let depth = usize::from(connection.depth());
        let slice = channel.slice().max(connection.terms.block);
        ExportPoller {
            readiness,
            slice: bound(Invariant::BoundsPolls, slice.into()) as u32,
            told_failures: connection.told_failures.filter(|_| !fails_on),
            connection,
            channel,
            bell,
            ended,
            failed,
            status,
            tally: meter.tally(),
            meter,
            published,
            wanted: Wanted::Serving,
            finished: VecDeque::with_capacity(depth),
            unrecorded: VecDeque::with_capacity(depth),
            ranges: Vec::with_capacity(MAX_RANGES),
            cost: PollCost::default(),
            room: None,
            roomless: false,
            blocked: false,
            held: false,
            more: false,
            dry: false,
            received: false,
            skip: 0,
            skipped: 0,
        }
    }

    /// Takes it apart. What is in flight is the storage's to see to its end, and the connection's to submit again.
    pub(super) fn into_connection(self: Box<Self>) -> Connection {
        let ExportPoller { mut connection, channel, meter, mut tally, .. } = *self;
        drop(channel);
        tally.replayed += connection.fence();
        meter.publish(&tally);
        connection
    }

    /// Nothing is in flight below, and nothing waits to be.
    fn is_still(&self) -> bool {
        self.channel.in_flight() == 0
            && self.finished.is_empty()
            && self.connection.waiting.is_empty()
            && !self.awaits_control()
    }

    /// A thread of the control side has something to do before a request can be answered.
    fn awaits_control(&self) -> bool {
        !self.unrecorded.is_empty() || self.status.as_ref().is_some_and(|status| !status.is_idle())
    }

    /// A flush of the export has failed since the client was told which instance it is.
    #[inline]
    fn is_outdated(&self) -> bool {
        self.told_failures.is_some_and(|told| self.failed.count() > told)
    }

    /// Tells the owner of a connection that has ended, once nothing is in flight and all is sent.
    fn settle(&mut self) -> bool {
        let Some(end) = self.connection.end else { return false };
        if self.connection.announced || !self.is_still() || self.connection.has_output() {
            return false;
        }
        self.connection.socket.finish();
        if self.connection.has_output() && !self.flush() {
            return false;
        }
        self.connection.announced = true;
        // The client waits for it.
        self.connection.socket.end();
        self.ended.push(Ended { queue: self.connection.queue, end });
        true
    }

    /// What a core that sleeps is to be woken for.
    fn interest(&self) -> Interest {
        if self.blocked && self.connection.has_output() {
            Interest::Send
        } else if self.connection.end.is_some() || self.held || self.wanted != Wanted::Serving {
            Interest::Nothing
        } else {
            Interest::Receive
        }
    }
}

/// What freeing or zeroing so many bytes costs, in bytes copied.
fn cost_of_freeing(length: u32) -> u64 {
    COST_OF_CALL + u64::from(length).min(MOST_FREED) / FREED_PER_COPIED
}

impl Poller for ExportPoller {
    fn poll(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        if self.wanted == Wanted::Suspending {
            self.channel.detach(context);
            return PollOutcome::PARKED;
        }
        let whole = bound(Invariant::BoundsPolls, budget.bytes.into());
        self.cost = PollCost::of(whole);
        self.room = (budget.room != Budget::UNBOUNDED).then_some(budget.room.into());
        (self.roomless, self.more, self.received) = (false, false, false);
        let look = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        self.dry = !look;
        self.blocked &= !look;
        let mut done = self.reap(context);
        if self.is_outdated() {
            // Before the failure is answered: what the client asks for then is not read here.
            self.connection.end(ConnectionEnd::FlushFailed);
        }
        if self.bell.heard() {
            done += self.answer_recorded(context) + self.answer_looked_up(context);
        }
        // Requests that are being sliced get a half, so that neither they nor new ones stand still.
        done += self.go_on(context, whole / 2);
        if self.wanted == Wanted::Serving && !self.blocked {
            done += self.take(context, budget.requests);
        }
        done += self.go_on(context, 0);
        let waits = self.channel.in_flight() > 0;
        if waits {
            self.channel.push(context);
        }
        let sent = self.send();
        let settled = self.settle();
        if self.wanted == Wanted::Draining && self.is_still() {
            // Replies that the client does not take are sent when it is resumed: nothing waits for a peer.
            self.channel.detach(context);
            return PollOutcome::PARKED;
        }
        // A part of a write is work too.
        if done > 0 || sent || settled || self.received {
            (self.skip, self.skipped) = (0, 0);
            let more = (self.more || !self.connection.waiting.is_empty()) && !self.roomless;
            let more = (more && context.limited().is_none()) || !self.finished.is_empty();
            return PollOutcome::busy(done, self.cost.spent()).with_more(more);
        }
        if look {
            let most = if waits { MOST_SKIPPED_WAITING } else { MOST_SKIPPED };
            self.skipped = (self.skipped * 2 + 1).min(most);
            self.skip = self.skipped;
        }
        self.readiness.want(&self.connection.socket, self.interest());
        match context.limited() {
            // What nobody is woken for is polled for.
            _ if self.channel.held_back() => PollOutcome::IDLE.with_more(true),
            Some(at) => PollOutcome::limited(at, context),
            None if waits || self.awaits_control() => PollOutcome::WAITING,
            None => PollOutcome::IDLE,
        }
    }

    fn drain(&mut self) {
        self.wanted = Wanted::Draining;
    }

    fn undrain(&mut self) {
        self.wanted = Wanted::Serving;
        self.skip = 0;
    }

    fn suspend(&mut self) {
        self.wanted = Wanted::Suspending;
    }

    fn resume(&mut self) {
        self.skip = 0;
    }

    fn arm(&mut self) -> Armed {
        self.skip = 0;
        self.readiness.want(&self.connection.socket, self.interest());
        // What others of its group have in flight tells only them when it ends.
        let waits_for_others = self.roomless && self.channel.in_flight() == 0;
        let unsubmitted = !self.connection.waiting.is_empty() && !self.roomless;
        let unsent = self.connection.has_output() && !self.blocked;
        let unread = self.connection.socket.has_received() && self.interest() == Interest::Receive;
        let left =
            self.more || unsubmitted || waits_for_others || unsent || unread || !self.finished.is_empty();
        if left || self.channel.held_back() { Armed::WorkLeft } else { Armed::Armed }
    }

    fn disarm(&mut self, _context: &CoreContext, _polling: bool) {
        self.skip = 0;
    }

    fn apply(&mut self, _change: Change) {}

    fn wakers(&self) -> Wakers<'_> {
        Wakers { kick: None, completion: Some(self.readiness.as_fd()) }
    }

    fn tidy(&mut self) {
        self.meter.publish(&self.tally);
    }
}
