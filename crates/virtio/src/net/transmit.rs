//! The transmit queue: frames out of the guest's buffers into the switch, of which the first bytes are copied beforehand,
//! to be judged, and the rest once.

use ioplane_memory::{GuestFault, GuestRange, GuestView};
use ioplane_network::{Drop, HEAD, Outlet, Sent, Takes};

use super::header;
use super::poller::{COST_OF_BUFFER, Work};
use super::spec::HEADER_BYTES;
use crate::buffers::Reader;
use crate::queue::Queue;
use crate::ring::{Batch, Chain, RingFault, Touch};

/// Sends what a driver makes available.
pub(super) struct Transmit {
    sender: Sender,
    chain: Chain,
    batch: Batch,
}

/// What sending takes, beside the frame.
struct Sender {
    outlet: Outlet,
    /// Bytes of the header.
    skip: usize,
    may: Takes,
    /// The first bytes of the frame in hand.
    head: [u8; HEAD],
}

impl Transmit {
    /// A driver that accepted `features` sends by `outlet`.
    pub(super) fn new(outlet: Outlet, features: u64) -> Self {
        let (skip, may) = (header::header_bytes(features), header::taken_from_driver(features));
        let sender = Sender { outlet, skip, may, head: [0; HEAD] };
        Transmit { sender, chain: Chain::new(), batch: Batch::default() }
    }

    /// Sends frames of one buffer each, at most `most`, as long as the driver offers nothing else; says how many.
    #[inline]
    fn send_plain(&mut self, queue: &mut Queue, most: u32, left: &mut usize) -> Result<u32, RingFault> {
        let Transmit { sender, batch, .. } = self;
        queue.ring.take_plain(Touch::Load, most as usize, batch);
        let (mut sent, mut outcome) = (0, Ok(()));
        for buffer in batch.buffers() {
            if *left == 0 {
                break;
            }
            *left = left.saturating_sub(buffer.len as usize + COST_OF_BUFFER);
            match sender.send_buffer(queue.ring.view(), buffer) {
                Ok(bytes) => queue.tally.bytes_written += bytes as u64,
                Err(fault) => {
                    outcome = Err(fault);
                    break;
                }
            }
            sent += 1;
        }
        let done = std::iter::repeat_n(0, sent);
        match outcome {
            Ok(()) => batch.settle(&mut queue.ring, done),
            Err(fault) => {
                batch.settle_fault(&mut queue.ring, done);
                return Err(fault.into());
            }
        }
        Ok(sent as u32)
    }

    /// Sends the next frame, of however many buffers; says whether there was one.
    fn send_next(&mut self, queue: &mut Queue, left: &mut usize) -> Result<bool, RingFault> {
        let Some((taken, replayed)) = queue.ring.take(&mut self.chain)? else { return Ok(false) };
        queue.tally.replayed += u64::from(replayed);
        let bytes = usize::try_from(self.chain.readable_bytes()).unwrap_or(usize::MAX);
        let cost = bytes.saturating_add(self.chain.readable().len() * COST_OF_BUFFER);
        *left = left.saturating_sub(cost);
        match self.sender.send_chain(queue.ring.view(), &self.chain, bytes) {
            Ok(bytes) => queue.tally.bytes_written += bytes as u64,
            Err(fault) => {
                taken.abandon();
                return Err(fault.into());
            }
        }
        queue.ring.complete(taken, 0);
        Ok(true)
    }
}

impl Sender {
    /// Sends the frame in one buffer, or drops it; says how many of its bytes were sent.
    #[inline]
    fn send_buffer(&mut self, view: &GuestView, buffer: GuestRange) -> Result<usize, GuestFault> {
        let bytes = buffer.len as usize;
        if bytes < self.skip {
            self.outlet.count(Drop::Malformed);
            return Ok(0);
        }
        let header =
            if bytes >= HEADER_BYTES { view.bytes::<HEADER_BYTES>(buffer.gpa)? } else { [0; HEADER_BYTES] };
        let (gpa, len) = (buffer.gpa.wrapping_add(self.skip as u64), bytes - self.skip);
        if len > 0 {
            view.read(gpa, &mut self.head[..len.min(HEAD)])?;
        }
        self.send(&header, len, &mut |out| view.read(gpa, out))
    }

    /// As [`Sender::send_buffer`], of a whole chain of `bytes` bytes.
    fn send_chain(&mut self, view: &GuestView, chain: &Chain, bytes: usize) -> Result<usize, GuestFault> {
        if chain.overlong() || bytes < self.skip {
            self.outlet.count(Drop::Malformed);
            return Ok(0);
        }
        let len = bytes - self.skip;
        let mut reader = Reader::new(view, chain.readable());
        let mut header = [0; HEADER_BYTES];
        reader.read(&mut header[..self.skip])?;
        reader.clone().read(&mut self.head[..len.min(HEAD)])?;
        self.send(&header, len, &mut |out| reader.clone().read(out).map(|_| ()))
    }

    /// Sends a frame of `len` bytes whose beginning is in `head`; `copy` gives all of it.
    #[inline]
    fn send(
        &mut self,
        header: &[u8; HEADER_BYTES],
        len: usize,
        copy: &mut dyn FnMut(&mut [u8]) -> Result<(), GuestFault>,
    ) -> Result<usize, GuestFault> {
        let Sender { outlet, may, head, .. } = self;
        let offload = match header::parse(header, len, may) {
            Ok(offload) => offload,
            Err(cause) => {
                outlet.count(cause);
                return Ok(0);
            }
        };
        let mut fault = None;
        let sent = outlet.send(&head[..len.min(HEAD)], len, offload, &mut |out| {
            copy(out).map_err(|why| fault = Some(why)).is_ok()
        });
        match sent {
            Sent::Delivered(_) => Ok(len),
            Sent::Dropped(_) => Ok(0),
            Sent::Fault => fault.map_or(Ok(0), Err),
        }
    }
}

impl Work for Transmit {
    #[inline]
    fn ready(&mut self, queue: &mut Queue) -> bool {
        queue.ring.has_work()
    }

    #[inline]
    fn batch(&mut self, queue: &mut Queue, budget: u32, left: &mut usize) -> Result<u32, RingFault> {
        let mut count = 0;
        while count < budget && *left > 0 {
            let plain = self.send_plain(queue, budget - count, left)?;
            count += plain;
            if plain == 0 {
                if !self.send_next(queue, left)? {
                    break;
                }
                count += 1;
            }
        }
        Ok(count)
    }

    /// Frames of this poll are with their receivers from here on.
    fn finish(&mut self) {
        self.sender.outlet.flush();
    }
}
