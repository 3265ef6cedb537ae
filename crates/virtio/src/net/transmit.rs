//! The transmit queue: frames out of the guest's buffers into the switch, without a copy in between.

use ioplane_network::{Drop, HEAD, Outlet, Sent, Takes};

use super::header;
use super::poller::{COST_OF_BUFFER, Work};
use super::spec::HEADER_BYTES;
use crate::buffers::Reader;
use crate::queue::Queue;
use crate::ring::{Chain, RingFault};

/// Sends what a driver makes available.
pub(super) struct Transmit {
    outlet: Outlet,
    chain: Chain,
    header: usize,
    may: Takes,
}

impl Transmit {
    /// A driver that accepted `features` sends by `outlet`.
    pub(super) fn new(outlet: Outlet, features: u64) -> Self {
        let (header, may) = (header::header_bytes(features), header::taken_from_driver(features));
        Transmit { outlet, chain: Chain::new(), header, may }
    }

    #[inline]
    fn cost(&self) -> usize {
        let bytes = usize::try_from(self.chain.readable_bytes()).unwrap_or(usize::MAX);
        bytes.saturating_add(self.chain.readable().len() * COST_OF_BUFFER)
    }

    /// Sends the frame of the chain just read, or drops it; says how many of its bytes were sent. A fault: some of it is not
    /// in memory.
    #[inline]
    fn send(&mut self, queue: &Queue) -> Result<usize, RingFault> {
        let Transmit { outlet, chain, header: skip, may } = self;
        let bytes = usize::try_from(chain.readable_bytes()).unwrap_or(usize::MAX);
        if chain.overlong() || bytes < *skip {
            outlet.count(Drop::Malformed);
            return Ok(0);
        }
        let len = bytes - *skip;
        let mut reader = Reader::new(queue.ring.view(), chain.readable());
        let mut header = [0; HEADER_BYTES];
        reader.read(&mut header[..*skip])?;
        let offload = match header::parse(&header, len, may) {
            Ok(offload) => offload,
            Err(cause) => {
                outlet.count(cause);
                return Ok(0);
            }
        };
        let mut head = [0; HEAD];
        let head = &mut head[..len.min(HEAD)];
        reader.clone().read(head)?;
        let mut fault = None;
        let sent = outlet.send(head, len, offload, &mut |out| {
            reader.clone().read(out).map_err(|why| fault = Some(why)).is_ok()
        });
        match sent {
            Sent::Delivered(_) => Ok(len),
            Sent::Dropped(_) => Ok(0),
            Sent::Fault => fault.map_or(Ok(0), |fault| Err(fault.into())),
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
            let Some((taken, replayed)) = queue.ring.take(&mut self.chain)? else { break };
            count += 1;
            queue.tally.replayed += u64::from(replayed);
            *left = left.saturating_sub(self.cost());
            match self.send(queue) {
                Ok(bytes) => queue.tally.bytes_written += bytes as u64,
                Err(fault) => {
                    taken.abandon();
                    return Err(fault);
                }
            }
            queue.ring.complete(taken, 0);
        }
        Ok(count)
    }

    /// Frames of this poll are with their receivers from here on.
    fn finish(&mut self) {
        self.outlet.flush();
    }
}
