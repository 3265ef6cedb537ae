//! The transmit queue: frames out of the guest's buffers into the switch, of which the first bytes are copied beforehand,
//! to be judged, and the rest once.

use ioplane_device::{Armed, CoreContext, PollCost};
use ioplane_memory::{GuestFault, GuestRange, GuestView};
use ioplane_network::{DropReason, HEAD, LEND_FROM, PortTx, RxOffloads, Sent};

use super::header;
use super::lent::LentRequests;
use super::poller::{COST_OF_BUFFER, Work};
use super::spec::HEADER_BYTES;
use crate::buffers::Reader;
use crate::queue::Queue;
use crate::ring::{Batch, BufferAccess, Chain, RingFault, RingRequest};

/// Bytes of the longest frame.
const LONGEST: usize = 64 << 10;

/// Sends what a driver makes available.
pub(super) struct Transmit {
    sender: Sender,
    chain: Chain,
    batch: Batch,
    /// A flood that not all of its receivers have yet, and its bytes. In flight until they have: suspended, it is sent again, to
    /// all of them.
    begun: Option<(RingRequest, usize)>,
    lent: LentRequests,
}

/// How far a frame has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SendProgress {
    /// All the way: so many of its bytes were sent.
    Out(usize),
    /// To some of its receivers, with so many bytes.
    Partly(usize),
    /// To its receiver, who copies it from where it is.
    Lent,
}

/// What sending takes, beside the frame.
struct Sender {
    port_tx: PortTx,
    /// Bytes of the header.
    skip: usize,
    may: RxOffloads,
    /// The first bytes of the frame in hand.
    head: [u8; HEAD],
}

impl Transmit {
    /// A driver that accepted `features` sends by `port_tx`.
    pub(super) fn new(port_tx: PortTx, features: u64) -> Self {
        let (skip, may) = (header::header_bytes(features), header::taken_from_driver(features));
        let sender = Sender { port_tx, skip, may, head: [0; HEAD] };
        Transmit {
            sender,
            chain: Chain::new(),
            batch: Batch::default(),
            begun: None,
            lent: LentRequests::new(),
        }
    }

    /// Sends frames of one buffer each, at most `most`, as long as the driver offers nothing else; says how many. `LIMITED`: whether the
    /// queue has limits. Without any not even a branch per frame is left of them.
    #[inline]
    fn send_plain<const LIMITED: bool>(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        most: u32,
        cost: &mut PollCost,
    ) -> Result<u32, RingFault> {
        let Transmit { sender, batch, begun, .. } = self;
        queue.ring.take_plain(BufferAccess::Load, most as usize, batch);
        let (mut sent, mut outcome, mut partly) = (0, Ok(()), None);
        for buffer in batch.buffers() {
            if cost.is_used_up() {
                break;
            }
            if LIMITED && context.admit(sender.frame_bytes(buffer.len as usize)).is_err() {
                break;
            }
            cost.spend((buffer.len as usize + COST_OF_BUFFER) as u64);
            match sender.send_buffer(queue.ring.view(), buffer, cost) {
                Ok(SendProgress::Out(bytes)) => queue.tally.bytes_written += bytes as u64,
                Ok(SendProgress::Partly(bytes)) => {
                    partly = Some(bytes);
                    break;
                }
                // Frames of one buffer are copied.
                Ok(SendProgress::Lent) => break,
                Err(fault) => {
                    outcome = Err(fault);
                    break;
                }
            }
            sent += 1;
        }
        let done = std::iter::repeat_n(0, sent);
        match outcome {
            Ok(()) if partly.is_some() => {
                *begun = hold(batch.settle_begun(&mut queue.ring, done), partly, queue);
                sent += 1;
            }
            Ok(()) => batch.settle(&mut queue.ring, done),
            Err(fault) => {
                batch.settle_fault(&mut queue.ring, done);
                return Err(fault.into());
            }
        }
        Ok(sent as u32)
    }

    /// Sends the next frame, of however many buffers; says whether there was one that might be.
    fn send_next(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        cost: &mut PollCost,
    ) -> Result<bool, RingFault> {
        let Some((taken, replayed)) = queue.ring.take(&mut self.chain)? else { return Ok(false) };
        let bytes = usize::try_from(self.chain.readable_bytes()).unwrap_or(usize::MAX);
        if context.admit(self.sender.frame_bytes(bytes)).is_err() {
            queue.ring.rewind(taken);
            return Ok(false);
        }
        queue.tally.replayed += u64::from(replayed);
        // What is longer than a frame is not copied, however long the driver says that it is.
        cost.spend((bytes.min(LONGEST) + self.chain.descriptors() as usize * COST_OF_BUFFER) as u64);
        // A request that somebody died of is carried out in hand, and a frame is lent only where both sides look all the time.
        let lends = queue.polls() && !replayed && self.begun.is_none();
        match self.sender.send_chain(queue.ring.view(), &self.chain, bytes, cost, lends) {
            Ok(SendProgress::Out(bytes)) => {
                queue.tally.bytes_written += bytes as u64;
                queue.ring.complete(taken, 0);
            }
            Ok(SendProgress::Partly(bytes)) => self.begun = hold(Some(taken), Some(bytes), queue),
            Ok(SendProgress::Lent) => self.lent.push(taken, context.now(), queue),
            Err(fault) => {
                taken.abandon();
                return Err(fault.into());
            }
        }
        Ok(true)
    }

    /// Goes on with the frame that was begun.
    #[cold]
    fn go_on(&mut self, queue: &mut Queue, cost: &mut PollCost) {
        let Some((taken, bytes)) = self.begun.take() else { return };
        queue.ring.touch(&taken);
        let port_tx = &mut self.sender.port_tx;
        port_tx.allow(cost.left() as usize);
        let sent = port_tx.go_on();
        cost.spend(port_tx.spent() as u64);
        if sent == Some(Sent::Begun) {
            self.begun = hold(Some(taken), Some(bytes), queue);
            return;
        }
        if let Some(Sent::Delivered(_)) = sent {
            queue.tally.bytes_written += bytes as u64;
        }
        queue.ring.complete(taken, 0);
    }
}

/// A frame that is not done with in this poll: nobody has it in hand until the next.
fn hold(taken: Option<RingRequest>, bytes: Option<usize>, queue: &mut Queue) -> Option<(RingRequest, usize)> {
    let taken = taken?;
    queue.ring.release(&taken);
    Some((taken, bytes.unwrap_or(0)))
}

impl std::ops::Drop for Transmit {
    /// What was begun stays in flight in the ring and its journal.
    fn drop(&mut self) {
        if let Some((taken, _)) = self.begun.take() {
            taken.abandon();
        }
    }
}

impl Sender {
    /// Bytes by which a frame counts, in a buffer or a chain of so many: one that is longer than any is dropped.
    #[inline]
    fn frame_bytes(&self, bytes: usize) -> u64 {
        bytes.saturating_sub(self.skip).min(LONGEST) as u64
    }

    /// Sends the frame in one buffer, or drops it. What it costs beyond its bytes is added to `cost`.
    #[inline]
    fn send_buffer(
        &mut self,
        view: &GuestView,
        buffer: GuestRange,
        cost: &mut PollCost,
    ) -> Result<SendProgress, GuestFault> {
        let bytes = buffer.len as usize;
        if bytes < self.skip {
            self.port_tx.count(DropReason::Malformed);
            return Ok(SendProgress::Out(0));
        }
        let len = bytes - self.skip;
        if self.skip == HEADER_BYTES && self.port_tx.send_alike(len, |out| view.read(buffer.gpa, out).is_ok())
        {
            return Ok(SendProgress::Out(len));
        }
        let header =
            if bytes >= HEADER_BYTES { view.bytes::<HEADER_BYTES>(buffer.gpa)? } else { [0; HEADER_BYTES] };
        let gpa = buffer.gpa.wrapping_add(self.skip as u64);
        if len > 0 {
            view.read(gpa, &mut self.head[..len.min(HEAD)])?;
        }
        self.send(&header, len, cost, &mut |out| view.read(gpa, out))
    }

    /// As [`Sender::send_buffer`], of a whole chain of `bytes` bytes. `lends`: it may be lent.
    fn send_chain(
        &mut self,
        view: &GuestView,
        chain: &Chain,
        bytes: usize,
        cost: &mut PollCost,
        lends: bool,
    ) -> Result<SendProgress, GuestFault> {
        if chain.overlong() || bytes < self.skip {
            self.port_tx.count(DropReason::Malformed);
            return Ok(SendProgress::Out(0));
        }
        let len = bytes - self.skip;
        let mut reader = Reader::new(view, chain.readable());
        let mut header = [0; HEADER_BYTES];
        reader.read(&mut header[..self.skip])?;
        reader.clone().read(&mut self.head[..len.min(HEAD)])?;
        if lends && len >= LEND_FROM && self.lend(view, &header, len, &reader) {
            return Ok(SendProgress::Lent);
        }
        self.send(&header, len, cost, &mut |out| reader.clone().read(out).map(|_| ()))
    }

    /// Lends the frame of `len` bytes at `reader` whose beginning is in `head`, if it can be lent.
    fn lend(
        &mut self,
        view: &GuestView,
        header: &[u8; HEADER_BYTES],
        len: usize,
        reader: &Reader<'_>,
    ) -> bool {
        let Ok(offload) = header::parse(header, len, &self.may) else { return false };
        self.port_tx.lend(&self.head, len, offload, || {
            let mut behind = reader.clone();
            behind.skip(HEAD);
            view.lend(behind.rest())
        })
    }

    /// Sends a frame of `len` bytes whose beginning is in `head`; `copy` gives all of it.
    #[inline]
    fn send(
        &mut self,
        header: &[u8; HEADER_BYTES],
        len: usize,
        cost: &mut PollCost,
        copy: &mut dyn FnMut(&mut [u8]) -> Result<(), GuestFault>,
    ) -> Result<SendProgress, GuestFault> {
        let Sender { port_tx, may, head, .. } = self;
        let offload = match header::parse(header, len, may) {
            Ok(offload) => offload,
            Err(cause) => {
                port_tx.count(cause);
                return Ok(SendProgress::Out(0));
            }
        };
        let mut fault = None;
        port_tx.allow(cost.left() as usize);
        let sent = port_tx.send(&head[..len.min(HEAD)], len, offload, &mut |out| {
            copy(out).map_err(|why| fault = Some(why)).is_ok()
        });
        cost.spend(port_tx.spent() as u64);
        match sent {
            Sent::Delivered(_) => Ok(SendProgress::Out(len)),
            Sent::Begun => Ok(SendProgress::Partly(len)),
            Sent::Dropped(_) => Ok(SendProgress::Out(0)),
            Sent::Fault => fault.map_or(Ok(SendProgress::Out(0)), Err),
        }
    }
}

impl Work for Transmit {
    #[inline]
    fn ready(&mut self, queue: &mut Queue) -> bool {
        self.begun.is_some() || !self.lent.is_empty() || queue.ring.has_work()
    }

    fn has_begun(&self) -> bool {
        self.begun.is_some() || !self.lent.is_empty()
    }

    fn withdraw(&mut self, queue: &mut Queue) -> bool {
        self.lent.withdraw(&mut self.sender.port_tx, queue)
    }

    fn arm(&mut self, queue: &mut Queue) -> Armed {
        let armed = queue.arm();
        // After a fault nothing is completed any more: what is lent is taken back when the queue parks.
        if queue.fault().is_none() && !self.lent.may_sleep() {
            return Armed::WorkLeft;
        }
        if self.begun.is_some() && queue.fault().is_none() { Armed::WorkLeft } else { armed }
    }

    #[inline]
    fn batch<const LIMITED: bool>(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        budget: u32,
        cost: &mut PollCost,
    ) -> Result<u32, RingFault> {
        let mut count = 0;
        if !self.lent.is_empty() {
            self.lent.settle(&mut self.sender.port_tx, queue, context.now(), !queue.takes(), cost);
            if self.begun.is_none() && !queue.ring.has_work() {
                queue.found_dry(context);
            }
        }
        if self.begun.is_some() {
            self.go_on(queue, cost);
            count += 1;
        }
        while count < budget && !cost.is_used_up() && self.begun.is_none() && queue.takes() {
            let plain = self.send_plain::<LIMITED>(context, queue, budget - count, cost)?;
            count += plain;
            if LIMITED && context.limited().is_some() {
                break;
            }
            if plain == 0 {
                if !self.send_next(context, queue, cost)? {
                    break;
                }
                count += 1;
            }
        }
        Ok(count)
    }

    /// Frames of this poll are with their receivers from here on.
    fn finish(&mut self) {
        self.sender.port_tx.flush();
    }
}
