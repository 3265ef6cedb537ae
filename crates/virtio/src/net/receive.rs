//! The receive queue: frames out of the port's buffers into the guest's buffers.
//!
//! ```text
//!   PortRx::deliver -> Ring::take_plain: as many buffers as there are frames -> header, bytes -> used; the rest put back
//!        \-- a frame that does not fit one, a buffer that is several:
//!   PortRx::front -> how much room? -> Ring::take, chain by chain, until it fits -> header, bytes -> used, together
//!                                           \-- too little: all put back, and the frame waits (or can never fit: dropped)
//! ```
//!
//! What the driver makes available here is room, not work: it is asked to kick only while a frame waits for more.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use ioplane_device::{Armed, CoreContext, PollCost};
use ioplane_memory::GuestRange;
use ioplane_network::{DropReason, FrameBytes, LentFrame, PortRx, RxOffloads};

use super::Shared;
use super::header;
use super::poller::{COST_OF_BUFFER, Work};
use super::spec::{HEADER_BYTES, VIRTIO_NET_F_MRG_RXBUF};
use crate::buffers::Writer;
use crate::queue::Queue;
use crate::ring::{Batch, BufferAccess, Chain, MAX_BUFFERS, MOST_PLAIN, Ring, RingFault, RingRequest};
use ioplane_memory::GuestFault;

/// Most chains that one frame is spread over: 64 KiB in buffers of 256 bytes.
const MOST_CHAINS: usize = 256;
/// Most buffers of all of them.
const MOST_RANGES: usize = MOST_CHAINS + MAX_BUFFERS;

/// Whether a frame has room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fits {
    /// It has.
    Yes,
    /// Not yet: the driver has to make more available.
    NotYet,
    /// Whatever the driver does, it would have to do it otherwise.
    Never,
}

/// Buffers taken for one frame, and not used yet. Empty between two polls.
#[derive(Debug)]
struct Room {
    /// Each chain, with how many bytes it holds.
    chains: Vec<(RingRequest, u32)>,
    ranges: Vec<GuestRange>,
    bytes: usize,
    /// Descriptors that were read since this was last asked, in vain or not.
    walked: usize,
    /// Bytes of the last buffer of one descriptor, zero before the first: the next ones are expected to be as long.
    usual: usize,
    batch: Batch,
}

impl Room {
    fn new() -> Self {
        let (chains, ranges) = (Vec::with_capacity(MOST_CHAINS), Vec::with_capacity(MOST_RANGES));
        Room { chains, ranges, bytes: 0, walked: 0, usual: 0, batch: Batch::default() }
    }

    /// Takes buffers of one descriptor each, as many as `need` bytes are expected to fill.
    #[inline]
    fn gather_plain(&mut self, ring: &mut Ring, header: usize, need: usize) {
        let most = if self.usual > 0 { need.div_ceil(self.usual) } else { 0 };
        if most < 2 {
            return;
        }
        ring.take_plain(BufferAccess::StoreLong, most, &mut self.batch);
        self.walked += self.batch.buffers().len();
        // One that is too short is a fault, for who takes it alone; and none is taken behind the frame's end.
        let (mut count, mut bytes) = (0, 0);
        for buffer in self.batch.buffers() {
            if (buffer.len as usize) < header || bytes >= need {
                break;
            }
            bytes += buffer.len as usize;
            count += 1;
        }
        self.batch.keep(ring, count);
        for (taken, buffer) in self.batch.take() {
            self.usual = buffer.len as usize;
            self.bytes += buffer.len as usize;
            self.ranges.push(buffer);
            self.chains.push((taken, buffer.len));
        }
    }

    /// Takes chains until `need` bytes have room, in one chain unless they may be merged. Otherwise all are put back.
    #[inline]
    fn gather(
        &mut self,
        ring: &mut Ring,
        chain: &mut Chain,
        header: usize,
        need: usize,
        mergeable: bool,
    ) -> Result<Fits, RingFault> {
        if mergeable {
            self.gather_plain(ring, header, need);
        }
        while self.bytes < need {
            let spread = self.chains.len();
            if spread > 0 && (!mergeable || spread == MOST_CHAINS || spread == usize::from(ring.size())) {
                self.put_back(ring);
                return Ok(Fits::Never);
            }
            let taken = match ring.take(chain) {
                Ok(Some((taken, _))) => taken,
                Ok(None) => {
                    self.put_back(ring);
                    // Suspects are tried one at a time: as long as there are any, no frame gets two of them.
                    return Ok(if spread > 0 && ring.replays() { Fits::Never } else { Fits::NotYet });
                }
                Err(fault) => {
                    // What could not be read stays taken, and only what was taken last can be given back.
                    self.abandon();
                    return Err(fault);
                }
            };
            self.walked += chain.descriptors() as usize;
            let (ranges, bytes) = writable(chain);
            if let [only] = ranges {
                self.usual = only.len as usize;
            }
            // 5.1.6.3.1: every buffer has room for a header at least.
            if bytes < header {
                let head = taken.head();
                ring.rewind(taken);
                self.put_back(ring);
                return Err(RingFault::NoStatus(head));
            }
            if self.ranges.len() + ranges.len() > MOST_RANGES {
                ring.rewind(taken);
                self.put_back(ring);
                return Ok(Fits::Never);
            }
            self.ranges.extend_from_slice(ranges);
            self.bytes += bytes;
            self.chains.push((taken, u32::try_from(bytes).unwrap_or(u32::MAX)));
        }
        Ok(Fits::Yes)
    }

    /// Gives everything back to the ring, as if it had not been taken.
    #[cold]
    fn put_back(&mut self, ring: &mut Ring) {
        while let Some((taken, _)) = self.chains.pop() {
            ring.rewind(taken);
        }
        self.clear();
    }

    /// Leaves everything in flight, in a ring that has stopped.
    #[cold]
    fn abandon(&mut self) {
        self.chains.drain(..).for_each(|(taken, _)| taken.abandon());
        self.clear();
    }

    /// Uses the chains for `bytes` bytes, which fill all but the last.
    #[inline]
    fn complete(&mut self, ring: &mut Ring, bytes: usize) {
        let mut left = u32::try_from(bytes).unwrap_or(u32::MAX);
        for (taken, room) in self.chains.drain(..) {
            let written = room.min(left);
            ring.complete(taken, written);
            left -= written;
        }
        self.clear();
    }

    #[inline]
    fn clear(&mut self) {
        self.ranges.clear();
        self.bytes = 0;
    }
}

/// The buffers of a chain that can be written, and their bytes. Of an overlong one those that were kept in order.
#[inline]
fn writable(chain: &Chain) -> (&[GuestRange], usize) {
    let ranges = chain.writable();
    if chain.overlong() {
        let kept = ranges.get(..MAX_BUFFERS - 1).unwrap_or_default();
        return (kept, kept.iter().map(|range| range.len as usize).sum());
    }
    (ranges, usize::try_from(chain.writable_bytes()).unwrap_or(usize::MAX))
}

/// Delivers what comes for a driver.
pub(super) struct Receive {
    port_rx: PortRx,
    shared: Arc<Shared>,
    chain: Chain,
    room: Room,
    header: usize,
    mergeable: bool,
    /// The frame at the front waits until the driver has made more available.
    starved: bool,
    /// Frames completed and not yet published.
    fresh: u64,
    /// Bytes of the buffer that was looked at last and was too small, or in which the last frame of several began: what is
    /// longer is not expected to fit one.
    usual: u32,
    batch: Batch,
    /// Of the buffers of `batch`, the bytes written.
    written: [u32; MOST_PLAIN],
}

impl Receive {
    /// A driver that accepted `features` receives by `port_rx`.
    pub(super) fn new(mut port_rx: PortRx, shared: Arc<Shared>, features: u64) -> Self {
        port_rx.take_lent_frames();
        Receive {
            port_rx,
            shared,
            chain: Chain::new(),
            room: Room::new(),
            header: header::header_bytes(features),
            mergeable: features & VIRTIO_NET_F_MRG_RXBUF != 0,
            starved: false,
            fresh: 0,
            usual: u32::MAX,
            batch: Batch::default(),
            written: [0; MOST_PLAIN],
        }
    }

    /// Delivers frames that have room in one buffer each, at most `most`, until there is another kind of either; says how
    /// many. `LIMITED`: whether the queue has limits. Without any not even a branch per frame is left of them.
    #[inline]
    fn receive_plain<const LIMITED: bool>(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        takes: &RxOffloads,
        most: u32,
        cost: &mut PollCost,
    ) -> Result<u32, RingFault> {
        let Receive { port_rx, header, batch, fresh, written, usual, .. } = self;
        let Some(frame) = port_rx.front() else { return Ok(0) };
        if *header + frame.len() > *usual as usize || !header::covers(takes, &frame.offload()) {
            return Ok(0);
        }
        if port_rx.front_is_lent() {
            return Ok(0);
        }
        queue.ring.take_plain(BufferAccess::Store, port_rx.together().min(most as usize), batch);
        let (mut outcome, mut places) = (Ok(()), batch.buffers().zip(written.iter_mut()));
        let view = queue.ring.view();
        let count = port_rx.deliver(|frame| {
            let Some((buffer, written)) = places.next() else { return false };
            let (offload, bytes) = (frame.offload(), frame.bytes());
            let need = *header + bytes.len();
            if need > buffer.len as usize {
                *usual = buffer.len;
                return false;
            }
            if cost.is_used_up() || !header::covers(takes, &offload) {
                return false;
            }
            if LIMITED && context.admit(bytes.len() as u64).is_err() {
                return false;
            }
            // Header and frame at once, where they stand together and the buffer is in one region.
            let at_once = frame.header_and_frame().filter(|_| *header == HEADER_BYTES);
            let stored = at_once.map(|all| view.write(buffer.gpa, all)).filter(Result::is_ok);
            let stored = stored.unwrap_or_else(|| {
                let (first, behind) = (header::emit(&offload, 1), buffer.gpa.wrapping_add(*header as u64));
                view.write(buffer.gpa, &first[..*header]).and_then(|()| view.write(behind, bytes))
            });
            if let Err(fault) = stored {
                outcome = Err(fault);
                return false;
            }
            cost.spend((need + COST_OF_BUFFER) as u64);
            queue.tally.bytes_read += bytes.len() as u64;
            *written = need as u32;
            true
        });
        drop(places);
        // What was taken in vain is work, too.
        cost.spend(((batch.buffers().len() - count) * COST_OF_BUFFER) as u64);
        *fresh += count as u64;
        let done = written[..count].iter().copied();
        // After a fault, too: the frame stays, and so does its buffer, for whoever starts the queue again.
        batch.settle(&mut queue.ring, done);
        outcome?;
        Ok(count as u32)
    }

    /// Delivers the frame at the front, in however many buffers, or drops it if it can never be; says whether it is gone.
    fn receive_next(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        takes: &RxOffloads,
        cost: &mut PollCost,
    ) -> Result<bool, RingFault> {
        let Receive { port_rx, chain, room, header, mergeable, starved, fresh, usual, .. } = self;
        let Some(frame) = port_rx.front() else { return Ok(false) };
        let (offload, len) = (frame.offload(), frame.len());
        // What the driver can take has changed since the switch asked.
        if !header::covers(takes, &offload) {
            port_rx.skip(DropReason::Offload);
            return Ok(true);
        }
        let need = *header + len;
        let fits = room.gather(&mut queue.ring, chain, *header, need, *mergeable)?;
        cost.spend((std::mem::take(&mut room.walked) * COST_OF_BUFFER) as u64);
        match fits {
            Fits::Yes if context.admit(len as u64).is_ok() => {}
            Fits::Yes => {
                room.put_back(&mut queue.ring);
                return Ok(false);
            }
            Fits::NotYet => {
                // What is to be replayed may have to wait for others' trials; everything else for the driver.
                *starved = !queue.ring.replays();
                return Ok(false);
            }
            Fits::Never => {
                port_rx.skip(DropReason::NoBuffer);
                return Ok(true);
            }
        }
        let first = header::emit(&offload, room.chains.len() as u16);
        let mut writer = Writer::new(queue.ring.view(), &room.ranges);
        let header = &first[..*header];
        let written = match port_rx.take_bytes() {
            FrameBytes::Whole(bytes) => writer.write(header).and_then(|_| writer.write(bytes)).map(|_| ()),
            FrameBytes::Lent(frame) => write_lent(&mut writer, header, frame),
            gone @ (FrameBytes::Soon | FrameBytes::Revoked) => {
                let revoked = matches!(gone, FrameBytes::Revoked);
                room.put_back(&mut queue.ring);
                return Ok(revoked);
            }
        };
        if let Err(fault) = written {
            room.put_back(&mut queue.ring);
            return Err(fault.into());
        }
        cost.spend(need as u64);
        queue.tally.bytes_read += len as u64;
        *usual = room.chains.first().map_or(*usual, |(_, bytes)| *bytes);
        room.complete(&mut queue.ring, need);
        port_rx.pop();
        *fresh += 1;
        Ok(true)
    }
}

/// Writes a header and a frame that is in its sender's memory, which is the sender's again afterwards. After a fault the frame stays lent.
#[inline]
fn write_lent(writer: &mut Writer<'_>, header: &[u8], frame: LentFrame<'_>) -> Result<(), GuestFault> {
    writer.write(header)?;
    writer.write(frame.head())?;
    for span in frame.spans() {
        writer.write_span(&span)?;
    }
    frame.done();
    Ok(())
}

impl Work for Receive {
    const IS_WORK: bool = false;

    #[inline]
    fn ready(&mut self, queue: &mut Queue) -> bool {
        (!self.starved || queue.ring.has_more()) && self.port_rx.front().is_some()
    }

    #[inline]
    fn batch<const LIMITED: bool>(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        budget: u32,
        cost: &mut PollCost,
    ) -> Result<u32, RingFault> {
        let takes = header::taken_by_driver(self.shared.offloads());
        let mut count = 0;
        self.starved = false;
        while count < budget && !cost.is_used_up() && self.port_rx.front().is_some() {
            let plain = self.receive_plain::<LIMITED>(context, queue, &takes, budget - count, cost)?;
            count += plain;
            if LIMITED && context.limited().is_some() {
                break;
            }
            if plain == 0 {
                if !self.receive_next(context, queue, &takes, cost)? {
                    break;
                }
                count += 1;
            }
        }
        Ok(count)
    }

    #[inline]
    fn publish(&mut self, context: &mut CoreContext, queue: &mut Queue) -> Option<Instant> {
        queue.publish_frames(context, std::mem::take(&mut self.fresh))
    }

    fn arm(&mut self, queue: &mut Queue) -> Armed {
        let armed = queue.arm_unkicked();
        if !self.port_rx.arm() || armed == Armed::WorkLeft {
            return armed;
        }
        if queue.takes() && (!self.starved || queue.ring.ask_for_more()) {
            return Armed::WorkLeft;
        }
        // Frames wait for room, or for the guest's reset: their senders need not ring.
        self.port_rx.disarm();
        if queue.takes() && queue.unannounced() { Armed::WorkLeft } else { Armed::Armed }
    }

    fn disarm(&mut self, context: &CoreContext, queue: &mut Queue, polling: bool) {
        queue.disarm(context, polling);
        // Nobody need kick for room that nothing waits for.
        queue.ring.set_polled(true);
        self.port_rx.disarm();
    }

    fn tidy(&mut self) {
        self.port_rx.tidy();
    }

    fn waker(&self) -> Option<BorrowedFd<'_>> {
        Some(self.port_rx.waker())
    }
}
