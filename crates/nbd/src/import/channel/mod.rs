//! The data half of an import: what one queue submits operations to.
//!
//! ```text
//!   submit -> Noted -> outbound: one sendmsg for many requests and the guest's data, or copies of them (keeping.rs)
//!   reap   <- ended <- inbound:  one recvmsg for the data of a read, straight into guest memory, and what follows them; with TLS or sums into a buffer
//!   lost:  Sent becomes Noted again, in the order of submission; the next connection comes by mail
//! ```
//! Runs on an I/O core: no call blocks, allocates, locks or logs, and each is bounded in bytes. Of connections with TLS, `crate::records` allocates.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::CoreContext;
use ioplane_memory::GuestView;
use ioplane_storage::{Fault, IoChannel, Op, Outcome, Submitted, Tag};

use super::link::{Delivery, Link, add};
use super::operation::{Kind, Operation, Stage};
use super::overlap::WriteRanges;
use super::retained::Retained;
use super::seat::Seat;
use super::socket::IoTable;
use super::status::Loss;
use crate::mutation::{Rule, removed};
use crate::transmission::ReplyReader;

mod inbound;
mod keeping;
mod outbound;

/// Bytes of the buffer for headers, and for what comes with them.
const BUFFER: usize = 16 << 10;
/// Entries of one call.
const ENTRIES: usize = 512;
/// How long a socket that is full is left alone by a core that polls.
const RETRY: Duration = Duration::from_micros(50);
/// Writes that one reap lets go after they have waited.
const MOST_LET_GO: usize = 64;

/// See the module.
pub(super) struct ImportChannel {
    link: Arc<Link>,
    connection: Option<Delivery>,
    operations: Box<[Operation]>,
    depth: usize,
    writes: WriteRanges,
    /// Operations taken on and not yet reaped.
    in_flight: usize,
    /// Ended, to be reaped.
    ended: Vec<(u16, Outcome)>,
    /// Makes cookies unique.
    serial: u64,
    /// Counts submissions.
    order: u64,
    outbound: Outbound,
    inbound: Inbound,
    /// Copies of writes, during a turn.
    retained: Option<Box<Retained>>,
    /// Writes that wait for room for their copies, in order.
    roomless: VecDeque<u16>,
    /// Requests were given up while the copies were out of reach.
    gave_up: bool,
    /// On this connection the last flush of the channel's own has failed.
    own_failed: bool,
    /// On this connection a flush has been sent for what a predecessor has left unflushed.
    caught_up: bool,
    /// Acknowledged writes may have been lost with a connection: the next flush fails.
    doubt: bool,
    /// Something is left that nobody is woken for.
    left: bool,
    #[cfg(feature = "mutations")]
    next_ghost: usize,
    _seat: Seat,
}

/// What is to be sent.
struct Outbound {
    /// Operations in stage Noted, in order.
    noted: VecDeque<u16>,
    /// Bytes of the first one that are sent.
    head: usize,
    table: IoTable,
    /// When the socket took no more.
    full: Option<Instant>,
    /// One entry a call: some guest memory cannot be read.
    careful: bool,
    /// Why the socket takes nothing more: the connection is lost when all that has come is read.
    broken: Option<i32>,
}

/// What is being received.
struct Inbound {
    reader: ReplyReader,
    buffer: Box<[u8; BUFFER]>,
    /// Of `buffer`, what has not been read.
    start: usize,
    end: usize,
    table: IoTable,
    /// The chunk that is being received is in its request's books.
    claimed: bool,
}

/// Answered writes that a test has sent again.
#[cfg(feature = "mutations")]
const GHOSTS: usize = 16;
#[cfg(not(feature = "mutations"))]
const GHOSTS: usize = 0;
/// The flush that the channel sends by itself, behind all other operations.
const OWN: usize = 1;

impl ImportChannel {
    /// Allocates all that it will ever need. It has no connection yet.
    pub fn new(link: Arc<Link>, depth: u16, seat: Seat) -> Self {
        let depth = usize::from(depth.max(1));
        let all = depth + GHOSTS + OWN;
        let buffer = vec![0; BUFFER].into_boxed_slice().try_into();
        ImportChannel {
            link,
            connection: None,
            operations: (0..all).map(|_| Operation::new()).collect(),
            depth,
            writes: WriteRanges::new(depth),
            in_flight: 0,
            ended: Vec::with_capacity(depth),
            serial: 0,
            order: 0,
            outbound: Outbound {
                noted: VecDeque::with_capacity(all),
                head: 0,
                table: IoTable::with_room(ENTRIES),
                full: None,
                careful: false,
                broken: None,
            },
            inbound: Inbound {
                reader: ReplyReader::new(false),
                buffer: buffer.unwrap_or_else(|_| unreachable!("made that long")),
                start: 0,
                end: 0,
                table: IoTable::with_room(ENTRIES),
                claimed: false,
            },
            retained: None,
            roomless: VecDeque::with_capacity(depth),
            gave_up: false,
            own_failed: false,
            caught_up: false,
            doubt: false,
            left: false,
            #[cfg(feature = "mutations")]
            next_ghost: 0,
            _seat: seat,
        }
    }

    /// Makes the request for the next piece of an operation, and notes it down to be sent.
    fn note(&mut self, tag: u16) {
        self.serial += 1;
        let operation = &mut self.operations[usize::from(tag)];
        operation.next_piece(&self.link.facts, self.serial << 16 | u64::from(tag));
        if self.link.retained.is_some() && operation.writes().is_some() && usize::from(tag) < self.depth {
            operation.stage = Stage::Waiting;
            self.roomless.push_back(tag);
        } else {
            self.outbound.noted.push_back(tag);
        }
    }

    /// An operation has ended: the next reap says so.
    fn end(&mut self, tag: u16, outcome: Outcome) {
        let operation = &mut self.operations[usize::from(tag)];
        let writes = operation.writes().is_some();
        if let (Some(copy), Some(retained)) = (operation.copy.take(), &mut self.retained) {
            retained.void(copy);
        }
        if let Some(map) = operation.end() {
            self.link.retire(map);
        }
        if usize::from(tag) < self.depth {
            if writes {
                self.writes.end(tag);
            }
            self.ended.push((tag, outcome));
        } else if usize::from(tag) == self.own() {
            self.own_flush_ended(outcome);
        }
    }

    /// Lets writes go that have waited for others.
    fn let_go(&mut self) {
        for _ in 0..MOST_LET_GO {
            let Some(tag) = self.writes.next() else { return };
            self.note(tag);
        }
        self.left = true;
    }

    /// Looks at what the keeper has sent.
    #[cold]
    fn take_news(&mut self) {
        if let Some(delivery) = self.link.take_mail() {
            self.connect(delivery);
        } else if self.link.refuses() {
            self.leave_connection();
            self.settle();
            self.fail_all();
        }
    }

    /// Goes on with another connection: everything in flight is sent, in the order of submission.
    fn connect(&mut self, delivery: Delivery) {
        // The keeper has found out first.
        self.leave_connection();
        self.settle();
        self.raise_ghosts();
        self.inbound.reader.restart(delivery.structured);
        self.outbound.noted.clear();
        for tag in 0..self.operations.len() as u16 {
            if matches!(self.operations[usize::from(tag)].stage, Stage::Noted | Stage::Sent) {
                self.outbound.noted.push_back(tag);
            }
        }
        let operations = &self.operations;
        let noted = self.outbound.noted.make_contiguous();
        noted.sort_unstable_by_key(|tag| operations[usize::from(*tag)].order);
        for place in 0..self.outbound.noted.len() {
            let tag = self.outbound.noted[place];
            self.serial += 1;
            let operation = &mut self.operations[usize::from(tag)];
            if operation.begun {
                add(&self.link.counters.replays, 1);
            }
            operation.next_piece(&self.link.facts, self.serial << 16 | u64::from(tag));
        }
        let (socket, generation) = (delivery.socket.clone(), delivery.generation);
        self.connection = Some(delivery);
        if let Err(errno) = self.link.watch(&socket, false, true) {
            self.leave_connection();
            self.link.lost(generation, Loss::System(errno.raw_os_error()));
        }
    }

    /// The connection is gone: what is in flight waits for another.
    #[cold]
    fn disconnect(&mut self, loss: Loss) {
        let Some(generation) = self.leave_connection() else { return };
        self.settle();
        self.link.lost(generation, loss);
    }

    /// Forgets the connection and what was half sent or half received on it.
    fn leave_connection(&mut self) -> Option<u32> {
        let connection = self.connection.take()?;
        self.link.unwatch(&connection.socket);
        (self.outbound.head, self.outbound.full, self.outbound.careful) = (0, None, false);
        self.outbound.broken = None;
        (self.inbound.start, self.inbound.end, self.inbound.claimed) = (0, 0, false);
        self.forget_own_flush();
        Some(connection.generation)
    }

    /// What a lost connection has left: requests that are sent again, or end here if that has not been asked for.
    fn settle(&mut self) {
        if !self.link.replays && self.link.writes.dirty() {
            self.doubt = true;
        }
        for tag in 0..self.depth as u16 {
            let operation = &mut self.operations[usize::from(tag)];
            if !operation.begun || !matches!(operation.stage, Stage::Noted | Stage::Sent) {
                continue;
            }
            operation.stage = Stage::Noted;
            if removed(Rule::Replay) {
                self.end(tag, Ok(()));
            } else if !self.link.replays && operation.kind != Kind::Read {
                self.end(tag, Err(Fault::Io(libc::EIO)));
            }
        }
    }

    /// No connection is to be waited for.
    #[cold]
    fn fail_all(&mut self) {
        for tag in 0..self.depth as u16 {
            if self.operations[usize::from(tag)].stage != Stage::Free {
                self.end(tag, Err(Fault::Io(libc::EIO)));
            }
        }
        self.outbound.noted.clear();
        self.roomless.clear();
        self.writes.clear();
    }

    /// The queue leaves for good: nothing of it may store into guest memory any more.
    fn abandon(&mut self) {
        self.link.writes.leave_unanswered();
        self.give_up_copies();
        if let Some(connection) = &self.connection {
            connection.socket.finish();
            self.link.leave();
        }
        let generation = self.leave_connection();
        for operation in &mut self.operations {
            operation.copy = None;
            if let Some(map) = operation.end() {
                self.link.retire(map);
            }
        }
        self.outbound.noted.clear();
        self.roomless.clear();
        self.writes.clear();
        self.ended.clear();
        self.in_flight = 0;
        // Before the keeper hears of it: with something in flight it would connect again.
        self.link.publish(0);
        if let Some(generation) = generation {
            self.link.lost(generation, Loss::Suspended);
        }
    }
}

impl IoChannel for ImportChannel {
    /// The kernel copies what is sent and received while the core waits.
    fn slice(&self) -> u32 {
        self.link.facts.slice()
    }

    fn submit(&mut self, _context: &mut CoreContext, view: &GuestView, op: &Op<'_>, tag: Tag) -> Submitted {
        let operation = &mut self.operations[usize::from(tag.0)];
        if let Err(outcome) = operation.begin(view, op, &self.link.facts, self.link.size.now()) {
            return Submitted::Done(outcome);
        }
        let refused = self.connection.is_none() && self.link.refuses() && !self.link.has_mail();
        let doubtful = operation.kind == Kind::Flush && std::mem::take(&mut self.doubt);
        if refused || doubtful {
            operation.end();
            return Submitted::Done(Err(Fault::Io(libc::EIO)));
        }
        self.order += 1;
        operation.order = self.order;
        operation.mark = self.link.writes.mark();
        operation.stage = Stage::Waiting;
        if self.in_flight == 0 {
            // Silence is counted from here.
            add(&self.link.counters.progress, 1);
        }
        self.in_flight += 1;
        let goes = match operation.writes() {
            Some((offset, len)) if !removed(Rule::OneWriter) => self.writes.begin(tag.0, offset, len),
            _ => true,
        };
        if goes {
            self.note(tag.0);
        }
        Submitted::Pending
    }

    fn push(&mut self, context: &mut CoreContext) {
        self.link.publish(self.in_flight);
        if !self.begin_turn() {
            return;
        }
        if self.link.news() {
            self.take_news();
        }
        self.keep();
        self.send(context);
        self.end_turn();
    }

    fn held_back(&self) -> bool {
        let unsent =
            self.connection.is_some() && !self.outbound.noted.is_empty() && self.outbound.full.is_none();
        self.left || unsent || !self.ended.is_empty()
    }

    fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) -> usize {
        self.left = false;
        self.link.lower();
        if self.begin_turn() {
            if self.link.news() {
                self.take_news();
            }
            self.receive();
            self.let_go();
            self.keep();
            self.send(context);
            self.end_turn();
        }
        let count = self.ended.len();
        self.in_flight -= count;
        for (tag, outcome) in self.ended.drain(..) {
            done(Tag(tag), outcome);
        }
        self.link.publish(self.in_flight);
        count
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        Some(self.link.waker.as_fd())
    }

    fn detach(&mut self, _context: &mut CoreContext) {
        if self.in_flight > 0 {
            self.abandon();
        }
    }
}

impl Drop for ImportChannel {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            self.abandon();
        }
        if self.leave_connection().is_some() {
            self.link.leave();
        }
        self.link.close();
    }
}

/// Writes that were answered, to be sent again in spite of [`Rule::AnsweredOnce`].
#[cfg(feature = "mutations")]
impl ImportChannel {
    fn remember(&mut self, tag: u16) {
        let ghost = self.depth + self.next_ghost % GHOSTS;
        if removed(Rule::AnsweredOnce)
            && usize::from(tag) < self.depth
            && self.operations[usize::from(tag)].kind == Kind::Write
            && self.operations[ghost].stage == Stage::Free
        {
            self.operations[ghost] = self.operations[usize::from(tag)].ghost();
            self.next_ghost += 1;
        }
    }

    fn raise_ghosts(&mut self) {
        for ghost in &mut self.operations[self.depth..] {
            ghost.raise();
        }
    }
}

#[cfg(not(feature = "mutations"))]
impl ImportChannel {
    #[inline(always)]
    fn remember(&mut self, _tag: u16) {}
    #[inline(always)]
    fn raise_ghosts(&mut self) {}
}
