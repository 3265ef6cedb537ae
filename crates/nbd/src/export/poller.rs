//! A connection on an I/O core.
//!
//! ```text
//!   socket --recvmsg--> staging, memory --> check --> IoChannel (piece by piece) --> reply --sendmsg--> socket
//!                                            \------------ refused ---------------->/
//! ```
//! A poll costs what its budget allows, system calls included, and never blocks. A request has a slot from its header to the last byte of
//! its reply, so a client that reads no replies is soon out of slots, and no more is read from it.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use ioplane_device::mutation::{Invariant, bound};
use ioplane_device::{Armed, Budget, Change, CoreContext, Meter, PollOutcome, Poller, Tally, Wakers};
use ioplane_memory::GuestRange;
use ioplane_scheduler::LARGEST_SLICE;
use ioplane_storage::{Fault, IoChannel, MAX_RANGES, Op, Outcome, Submitted, Tag};

use super::check::{Ask, Refused, error_of};
use super::connection::{Connection, Intake, Phase, ReplyPart, Stage};
use super::ended::{ConnectionEnd, Ended, EndedQueue};
use super::memory::Chain;
use super::readiness::{Interest, Readiness};
use super::socket::{self, Moved, ReceiveError, Sending};
use crate::error::Violation;
use crate::spec::*;
use crate::transmission::Request;

/// What a system call costs beside the bytes that it moves.
const COST_OF_CALL: u64 = 8 << 10;
/// What a request costs beside its data.
const COST_OF_REQUEST: u64 = 256;
/// How many bytes are freed in the time in which one is copied.
const FREED_PER_COPIED: u64 = 4;
/// Most bytes that the core frees by itself for one request.
const MOST_FREED: u64 = 1 << 20;
/// Requests ended by the storage that one poll answers.
const MOST_ENDED: u32 = 128;
/// Most polls between two looks at a socket that had nothing: a look is a system call, and the other queues of the core wait for it.
const MOST_SKIPPED: u32 = 16;
/// The same while something is in flight: a core that sleeps for its end is woken by the socket, too, and polls without a word.
const MOST_SKIPPED_WAITING: u32 = 2;
/// Longest payload of a refused write that is read over; a client that sends more is cut off (section "Size constraints").
const MOST_DISCARDED: u32 = DEFAULT_MAX_PAYLOAD;

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
    pub ended: Arc<EndedQueue>,
    pub meter: Arc<Meter>,
}

/// The data half of one connection.
pub struct ExportPoller {
    connection: Connection,
    channel: Box<dyn IoChannel>,
    readiness: Readiness,
    ended: Arc<EndedQueue>,
    meter: Arc<Meter>,
    tally: Tally,
    wanted: Wanted,
    /// [`IoChannel::slice`].
    slice: u32,
    /// What the channel has said and nobody has acted on: never longer than the connection's depth.
    finished: VecDeque<(Tag, Outcome)>,
    /// Memory for lists of ranges.
    ranges: Vec<GuestRange>,
    /// What is left of what this poll may cost.
    left: u64,
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
        let Provided { channel, readiness, ended, meter } = provided;
        let depth = usize::from(connection.depth());
        let slice = channel.slice().max(connection.terms.block);
        ExportPoller {
            readiness,
            slice: bound(Invariant::BoundsPolls, slice.into()) as u32,
            connection,
            channel,
            ended,
            tally: meter.tally(),
            meter,
            wanted: Wanted::Serving,
            finished: VecDeque::with_capacity(depth),
            ranges: Vec::with_capacity(MAX_RANGES),
            left: 0,
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

    fn charge(&mut self, cost: u64) {
        self.left = self.left.saturating_sub(cost);
    }

    // From the socket.

    /// Takes up to `budget` requests on; says how many.
    fn take(&mut self, context: &mut CoreContext, budget: u32) -> u32 {
        let mut count = 0;
        self.held = false;
        while self.connection.end.is_none() {
            if count >= budget || self.left == 0 {
                self.more = true;
                break;
            }
            match self.connection.intake {
                Intake::Header => {
                    let Some(bytes) = self.connection.staging.filled().first_chunk::<{ Request::SIZE }>()
                    else {
                        if self.receive(Chain::EMPTY, 0, 0).is_some() {
                            continue;
                        }
                        break;
                    };
                    match Request::decode(bytes) {
                        Ok(request) if request.command == NBD_CMD_DISC => {
                            self.connection.end(ConnectionEnd::Disconnected)
                        }
                        Ok(request) => self.connection.intake = Intake::Held(request),
                        Err(violation) => self.connection.violated(violation),
                    }
                    self.connection.staging.consume(Request::SIZE);
                    self.charge(COST_OF_REQUEST);
                }
                Intake::Held(request) => {
                    if !self.admit(context, request) {
                        self.held = true;
                        break;
                    }
                    count += 1;
                }
                Intake::Payload { slot, got } => {
                    if !self.take_payload(context, slot, got) {
                        break;
                    }
                }
                Intake::Discard { slot, left, refused } => {
                    if !self.discard(context, slot, left, refused) {
                        break;
                    }
                }
            }
        }
        count
    }

    /// Begins a request, if there is room for it and its limits let it pass.
    fn admit(&mut self, context: &mut CoreContext, request: Request) -> bool {
        if self.connection.is_full() {
            return false;
        }
        match self.connection.terms.check(&request) {
            Ok(ask) => {
                let data = if matches!(ask, Ask::Read | Ask::Write) { request.length } else { 0 };
                let Some(chain) = self.connection.memory.take(data) else { return false };
                if context.has_limits() && !admitted(context, ask, request.length) {
                    self.connection.memory.give_back(chain);
                    return false;
                }
                let Some(slot) = self.connection.enter(request, ask, chain, context.now()) else {
                    return false;
                };
                if request.payload() > 0 {
                    self.connection.intake = Intake::Payload { slot, got: 0 };
                } else {
                    self.connection.intake = Intake::Header;
                    self.begin(context, slot);
                }
            }
            Err(_) if request.payload() > MOST_DISCARDED => {
                self.connection.violated(Violation::PayloadLength(request.length));
            }
            Err(refused) => {
                let now = context.now();
                let Some(slot) = self.connection.enter(request, Ask::Flush, Chain::EMPTY, now) else {
                    return false;
                };
                self.connection.intake = Intake::Discard { slot, left: request.payload(), refused };
            }
        }
        true
    }

    /// Goes on with the data of a write; false when they have not come.
    fn take_payload(&mut self, context: &mut CoreContext, slot: u16, mut got: u32) -> bool {
        let (chain, length) = {
            let slot = &self.connection.slots[usize::from(slot)];
            (slot.chain, slot.request.length)
        };
        let ahead = self.connection.staging.filled();
        let copied = ahead.len().min((length - got) as usize);
        if copied > 0 {
            if self.connection.memory.write(chain, got, &ahead[..copied]).is_err() {
                self.connection.end(ConnectionEnd::Memory);
                return false;
            }
            self.connection.staging.consume(copied);
            self.charge(copied as u64);
            got += copied as u32;
        } else {
            let Some(direct) = self.receive(chain, got, length - got) else { return false };
            got += direct;
        }
        if got < length {
            self.connection.intake = Intake::Payload { slot, got };
            return true;
        }
        self.connection.intake = Intake::Header;
        self.begin(context, slot);
        true
    }

    /// Reads over the data of a refused write, then answers it; false when they have not come.
    fn discard(&mut self, context: &mut CoreContext, slot: u16, left: u32, refused: Refused) -> bool {
        let passed = self.connection.staging.filled().len().min(left as usize);
        self.connection.staging.consume(passed);
        let left = left - passed as u32;
        if left == 0 {
            self.connection.intake = Intake::Header;
            self.finish(context, slot, Err(refused));
            return true;
        }
        self.connection.intake = Intake::Discard { slot, left, refused };
        self.receive(Chain::EMPTY, 0, 0).is_some()
    }

    /// Receives: up to `wanted` bytes into `chain` from `at` on, and says how many; what comes behind them goes to staging. `None` when
    /// nothing has come.
    fn receive(&mut self, chain: Chain, at: u32, wanted: u32) -> Option<u32> {
        if self.dry {
            return None;
        }
        // What this poll may still cost bounds the call; what comes behind a part must stay in the socket.
        let part = u64::from(wanted).min(self.left) as u32;
        let Connection { socket, memory, staging, .. } = &mut self.connection;
        memory.ranges(chain, at, part, &mut self.ranges);
        let room = if part == wanted { staging.room() } else { &mut [] };
        let asked = part as usize + room.len();
        let moved = socket::receive(socket, memory.view(), &self.ranges, room);
        self.left = self.left.saturating_sub(COST_OF_CALL);
        match moved {
            Ok(Moved::Bytes(bytes)) => {
                let direct = bytes.min(part as usize);
                staging.received(bytes - direct);
                self.dry = bytes < asked;
                self.received = true;
                self.charge(direct as u64);
                Some(direct as u32)
            }
            Ok(Moved::Later) => {
                self.dry = true;
                None
            }
            Ok(Moved::End) => {
                let between = matches!(self.connection.intake, Intake::Header)
                    && self.connection.staging.filled().is_empty();
                self.connection.end(if between { ConnectionEnd::Closed } else { ConnectionEnd::CutOff });
                None
            }
            Err(ReceiveError::Lost(errno)) => {
                self.connection.end(ConnectionEnd::Lost(errno.raw_os_error()));
                None
            }
            Err(ReceiveError::Memory) => {
                self.connection.end(ConnectionEnd::Memory);
                None
            }
        }
    }

    // To the storage.

    /// A request has come whole.
    fn begin(&mut self, context: &mut CoreContext, number: u16) {
        let slot = &mut self.connection.slots[usize::from(number)];
        slot.phase = Phase::Waiting;
        if slot.ask == Ask::BlockStatus || (slot.request.length == 0 && slot.ask != Ask::Flush) {
            return self.finish(context, number, Ok(()));
        }
        if self.connection.waiting.is_empty() && self.fits(number) {
            self.submit(context, number);
        } else {
            self.connection.waiting.push_back(number);
        }
    }

    /// Bytes of the next piece of a transfer of which so many are left.
    fn piece(&self, left: u32) -> u32 {
        let slice = if self.room.is_some() { self.slice.min(LARGEST_SLICE as u32) } else { self.slice };
        left.min(slice)
    }

    /// Whether the next piece of a request may be handed to the storage; if not, notes it.
    fn fits(&mut self, number: u16) -> bool {
        let slot = &self.connection.slots[usize::from(number)];
        if !slot.transfers() || slot.stage == Stage::FlushBehind {
            return true;
        }
        let piece = self.piece(slot.request.length - slot.done);
        let fits = self.room.is_none_or(|room| u64::from(piece) <= room);
        self.roomless |= !fits;
        fits
    }

    /// Submits the next piece of a request.
    fn submit(&mut self, context: &mut CoreContext, number: u16) {
        let slot = &self.connection.slots[usize::from(number)];
        let (chain, done) = (slot.chain, slot.done);
        let Request { offset, length, flags, .. } = slot.request;
        let ask = if slot.stage == Stage::FlushBehind { Ask::Flush } else { slot.ask };
        let piece = if matches!(ask, Ask::Read | Ask::Write) { self.piece(length - done) } else { 0 };
        let at = offset + u64::from(done);
        if piece > 0 {
            self.connection.memory.ranges(chain, done, piece, &mut self.ranges);
        }
        let (op, cost) = match ask {
            Ask::Read => (Op::Read { offset: at, into: &self.ranges }, piece.into()),
            Ask::Write => (Op::Write { offset: at, from: &self.ranges }, piece.into()),
            Ask::Flush | Ask::BlockStatus => (Op::Flush, 0),
            Ask::Trim => (Op::Discard { offset, len: length.into() }, cost_of_freeing(length)),
            Ask::WriteZeroes => {
                let unmap = flags & NBD_CMD_FLAG_NO_HOLE == 0;
                (Op::WriteZeroes { offset, len: length.into(), unmap }, cost_of_freeing(length))
            }
        };
        let submitted = self.channel.submit(context, self.connection.memory.view(), &op, Tag(number));
        self.charge(cost);
        let slot = &mut self.connection.slots[usize::from(number)];
        slot.piece = piece;
        match submitted {
            Submitted::Pending => {
                slot.phase = Phase::InFlight;
                context.submitted(piece.into());
                self.room = self.room.map(|room| room.saturating_sub(piece.into()));
            }
            Submitted::Done(outcome) => self.ended(context, number, outcome),
        }
    }

    /// Submits the next pieces of those that wait for it, each in its turn, until only `keep` is left of what this poll may cost; says
    /// how many.
    fn go_on(&mut self, context: &mut CoreContext, keep: u64) -> u32 {
        let mut count = 0;
        while self.left > keep
            && let Some(&number) = self.connection.waiting.front()
            && self.fits(number)
        {
            self.connection.waiting.pop_front();
            count += 1;
            self.submit(context, number);
        }
        count
    }

    /// Takes in what the storage has ended; says how many.
    fn reap(&mut self, context: &mut CoreContext) -> u32 {
        if self.channel.in_flight() > 0 {
            let finished = &mut self.finished;
            self.channel.reap(context, &mut |tag, outcome| finished.push_back((tag, outcome)));
        }
        let mut count = 0;
        while count < MOST_ENDED
            && let Some((Tag(number), outcome)) = self.finished.pop_front()
        {
            count += 1;
            let slot = &self.connection.slots[usize::from(number)];
            if slot.phase != Phase::InFlight {
                debug_assert!(false, "the channel ended {number}, which is not in flight");
                continue;
            }
            context.completed(slot.piece.into());
            self.ended(context, number, outcome);
        }
        count
    }

    /// A piece has ended: goes on with what is behind it, or answers the request.
    fn ended(&mut self, context: &mut CoreContext, number: u16, outcome: Outcome) {
        let slot = &mut self.connection.slots[usize::from(number)];
        slot.phase = Phase::Waiting;
        match outcome {
            Ok(()) => {
                slot.done += slot.piece;
                slot.piece = 0;
                if slot.transfers() && slot.done < slot.request.length {
                    self.connection.waiting.push_back(number);
                } else if slot.flushes_behind() {
                    slot.stage = Stage::FlushBehind;
                    self.submit(context, number);
                } else {
                    self.finish(context, number, Ok(()));
                }
            }
            Err(fault) => {
                match fault {
                    Fault::Io(_) | Fault::Guest(_) => self.tally.errors_io += 1,
                    Fault::NoSpace | Fault::BeyondEnd => self.tally.errors_space += 1,
                    Fault::ReadOnly => self.tally.errors_request += 1,
                }
                let refused = error_of(slot.ask, fault);
                self.finish(context, number, Err(refused));
            }
        }
    }

    // Back to the socket.

    /// The reply of a request is known.
    fn finish(&mut self, context: &CoreContext, number: u16, outcome: Result<(), Refused>) {
        let slot = &self.connection.slots[usize::from(number)];
        let length = u64::from(slot.request.length);
        match (slot.ask, outcome) {
            (Ask::Read, Ok(())) => self.tally.bytes_read += length,
            (Ask::Write, Ok(())) => self.tally.bytes_written += length,
            (_, Err(_)) if slot.phase == Phase::Receiving => self.tally.errors_request += 1,
            _ => {}
        }
        self.tally.requests += 1;
        let time = context.now().saturating_duration_since(slot.started);
        self.meter.latency.record(time.as_nanos() as u64, 1);
        self.connection.reply(number, outcome);
    }

    /// Sends what the socket takes now; says whether it took anything.
    fn send(&mut self) -> bool {
        let mut any = false;
        while self.connection.has_replies() && !self.blocked {
            if self.left == 0 {
                self.more = true;
                break;
            }
            let mut sending = Sending::new(self.connection.memory.view());
            let gathered = self.connection.each_part(&mut self.ranges, self.left, |part| match part {
                ReplyPart::Head(bytes) => Ok(sending.push(bytes)),
                ReplyPart::Range(range) => sending.push_range(range),
            });
            if gathered.is_err() {
                self.connection.end(ConnectionEnd::Memory);
                break;
            }
            let bytes = sending.bytes();
            let moved = sending.send(&self.connection.socket);
            self.charge(COST_OF_CALL);
            match moved {
                Ok(Moved::Bytes(sent)) => {
                    self.connection.advance(sent);
                    self.charge(sent as u64);
                    self.blocked = sent < bytes;
                    any = true;
                }
                Ok(Moved::Later | Moved::End) => self.blocked = true,
                Err(errno) => self.connection.end(ConnectionEnd::Lost(errno.raw_os_error())),
            }
        }
        any
    }

    /// Nothing is in flight below, and nothing waits to be.
    fn is_still(&self) -> bool {
        self.channel.in_flight() == 0 && self.finished.is_empty() && self.connection.waiting.is_empty()
    }

    /// Tells the owner of a connection that has ended, once nothing is in flight and all is sent.
    fn settle(&mut self) -> bool {
        let Some(end) = self.connection.end else { return false };
        if self.connection.announced || !self.is_still() || self.connection.has_replies() {
            return false;
        }
        self.connection.announced = true;
        // The client waits for it.
        let _ = rustix::net::shutdown(&self.connection.socket, rustix::net::Shutdown::Both);
        self.ended.push(Ended { queue: self.connection.queue, end });
        true
    }

    /// What a core that sleeps is to be woken for.
    fn interest(&self) -> Interest {
        if self.blocked && self.connection.has_replies() {
            Interest::Send
        } else if self.connection.end.is_some() || self.held || self.wanted != Wanted::Serving {
            Interest::Nothing
        } else {
            Interest::Receive
        }
    }
}

/// Whether the limits let a request pass.
fn admitted(context: &mut CoreContext, ask: Ask, length: u32) -> bool {
    let passed = match ask {
        Ask::Read | Ask::Write => context.admit(length.into()),
        Ask::Flush => context.reserve(),
        Ask::Trim | Ask::WriteZeroes => context.admit(cost_of_freeing(length)),
        Ask::BlockStatus => context.admit(0),
    };
    passed.is_ok()
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
        self.left = whole;
        self.room = (budget.room != Budget::UNBOUNDED).then_some(budget.room.into());
        (self.roomless, self.more, self.received) = (false, false, false);
        let look = self.skip == 0;
        self.skip = self.skip.saturating_sub(1);
        self.dry = !look;
        self.blocked &= !look;
        let mut done = self.reap(context);
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
            return PollOutcome::busy(done, whole - self.left).with_more(more);
        }
        if look {
            let most = if waits { MOST_SKIPPED_WAITING } else { MOST_SKIPPED };
            self.skipped = (self.skipped * 2 + 1).min(most);
            self.skip = self.skipped;
        }
        self.readiness.want(&self.connection.socket, self.interest());
        match context.limited() {
            // What nobody is woken for is polled for.
            _ if self.channel.held_back() => PollOutcome::IDLE,
            Some(at) => PollOutcome::limited(at, context),
            None if waits => PollOutcome::WAITING,
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
        let unsent = self.connection.has_replies() && !self.blocked;
        let left = self.more || unsubmitted || waits_for_others || unsent || !self.finished.is_empty();
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
