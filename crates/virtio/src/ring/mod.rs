//! Virtqueues, device side: split (virtio 1.3, section 2.7) and packed (2.8), behind one type.
//!
//! ```text
//!   Ring --+-- Split   descriptor table, available ring, used ring     journal::split (in-flight region)
//!          +-- Packed  one ring of descriptors, two event structures   journal::packed (in-flight table, region)
//!                \-- both: Chain (buffers), InFlightSet (what is taken), Replay (what is to be taken again)
//! ```
//!
//! A request is [`Ring::take`]n, and goes back by [`Ring::complete`]; the driver sees it after [`Ring::publish`]. Between
//! the two it is known by its head: the first descriptor's number in a split ring, the buffer ID in a packed one.

mod ahead;
mod batch;
mod chain;
mod fault;
mod in_flight;
mod packed;
mod position;
mod split;

use ioplane_memory::{GuestFault, GuestView, Window};

use crate::spec::feature::VIRTIO_F_RING_PACKED;

pub use ahead::{Ahead, AheadRequest, GROUP};
pub use batch::{Batch, BufferAccess, MOST_PLAIN};
pub use chain::{Chain, Descriptor, MAX_BUFFERS};
pub use fault::RingFault;
pub use packed::Packed;
pub use position::Position;
pub use split::Split;

/// Where a driver put a ring: guest addresses and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingLayout {
    /// Entries: a power of two for a split ring, anything up to 32768 for a packed one.
    pub size: u16,
    /// Descriptor table or ring, 16-byte aligned.
    pub desc: u64,
    /// Driver area: available ring, 2-byte aligned, or event suppression structure, 4-byte aligned.
    pub avail: u64,
    /// Device area: used ring or event suppression structure, 4-byte aligned.
    pub used: u64,
}

/// A request that has been taken from a ring and must go back to it. Linear: dropped without [`Ring::complete`] or
/// [`RingRequest::abandon`], it panics where debug assertions are on.
#[derive(Debug)]
#[must_use = "a request taken must be completed or abandoned"]
pub struct RingRequest {
    head: u16,
    replayed: bool,
    open: bool,
}

impl RingRequest {
    fn new(head: u16, replayed: bool) -> Self {
        RingRequest { head, replayed, open: true }
    }

    /// Its number, below the ring's size: unique among those in flight.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Lets go of a request without using it: the ring (see [`Ring::flights`]) and the journal keep it as in flight, for
    /// whoever comes next.
    pub fn abandon(mut self) {
        self.open = false;
    }
}

impl Drop for RingRequest {
    fn drop(&mut self) {
        debug_assert!(
            !self.open || std::thread::panicking(),
            "request {} was dropped, neither completed nor abandoned",
            self.head
        );
    }
}

/// A request in flight, as whoever goes on with the ring needs it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InFlightRequest {
    /// Its number.
    pub head: u16,
    /// Of a packed ring: its descriptors, since used ones overwrite them in the ring. Of a split ring: none.
    pub descriptors: Vec<Descriptor>,
}

/// What the driver has been told about kicks. Kept, so that a ring on which nothing happens is not written to: firmware
/// leaves rings behind whose memory a kernel may use for something else before it resets the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KickSuppression {
    /// Nothing yet: the driver may have wiped what was said before (2.7.10).
    Unsaid,
    /// Kick when the driver passes this (with EVENT_IDX), or at any request.
    Kick(u16),
    /// Do not kick.
    NoKick,
}

/// How a ring is used, whatever its format.
#[derive(Debug, Clone, Copy)]
struct Mode {
    event_idx: bool,
    indirect: bool,
    /// Somebody looks at this ring by itself: kicks are refused from the next request taken on.
    polled: bool,
    suppression: KickSuppression,
}

impl Mode {
    fn of(features: u64) -> Self {
        use crate::spec::feature::*;
        Mode {
            event_idx: features & VIRTIO_F_EVENT_IDX != 0,
            indirect: features & VIRTIO_F_INDIRECT_DESC != 0,
            polled: false,
            suppression: KickSuppression::Unsaid,
        }
    }
}

/// The device side of one ring.
#[derive(Debug)]
pub enum Ring {
    /// VIRTIO_F_RING_PACKED was not negotiated.
    Split(Split),
    /// VIRTIO_F_RING_PACKED was negotiated.
    Packed(Packed),
}

macro_rules! either {
    ($self:expr, $ring:ident => $does:expr) => {
        match $self {
            Ring::Split($ring) => $does,
            Ring::Packed($ring) => $does,
        }
    };
}

impl Ring {
    /// Opens the ring at `layout`, to go on at `base` (see [`Ring::base`]; `None`: at its beginning). With a journal, that
    /// decides instead, and what was in flight is taken first, in its old order; without, `in_flight` says so.
    pub fn open(
        view: GuestView,
        layout: &RingLayout,
        features: u64,
        base: Option<u32>,
        journal: Option<Window>,
        in_flight: &[InFlightRequest],
    ) -> Result<Self, RingFault> {
        if features & VIRTIO_F_RING_PACKED != 0 {
            Packed::open(view, layout, features, base, journal, in_flight).map(Ring::Packed)
        } else {
            Split::open(view, layout, features, base, journal, in_flight).map(Ring::Split)
        }
    }

    /// Entries of the ring.
    #[inline]
    pub fn size(&self) -> u16 {
        either!(self, ring => ring.size())
    }

    /// The guest's memory.
    #[inline]
    pub fn view(&self) -> &GuestView {
        either!(self, ring => ring.view())
    }

    /// The guest's memory, to change its log or its map.
    pub fn view_mut(&mut self) -> &mut GuestView {
        either!(self, ring => ring.view_mut())
    }

    /// Where to go on, for [`Ring::open`], in the form of vhost-user's SET_VRING_BASE: of a split ring the available index, of
    /// a packed one the available position in the low half and the used one in the high half, wrap counters on top of each.
    pub fn base(&self) -> u32 {
        either!(self, ring => ring.base())
    }

    /// Whether requests wait to be replayed.
    pub fn replays(&self) -> bool {
        either!(self, ring => ring.replays())
    }

    /// Whether every request taken and not used is one of those to be replayed: a saved ring must be so. Asked before
    /// anything is taken.
    pub fn accounts_for_all(&self) -> bool {
        either!(self, ring => ring.accounts_for_all())
    }

    /// Heads taken and not returned, those still to be replayed included, in the order to replay them in. Allocates:
    /// control plane only.
    pub fn in_flight_heads(&self) -> Vec<u16> {
        either!(self, ring => ring.in_flight_heads())
    }

    /// As [`Ring::in_flight_heads`], with all that is needed to replay them without a journal.
    pub fn flights(&self) -> Vec<InFlightRequest> {
        match self {
            Ring::Split(ring) => {
                let flight = |head| InFlightRequest { head, descriptors: Vec::new() };
                ring.in_flight_heads().into_iter().map(flight).collect()
            }
            Ring::Packed(ring) => ring.flights(),
        }
    }

    /// How many requests have been taken and not returned.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        either!(self, ring => ring.in_flight())
    }

    /// Whether the driver has made something available that has not been taken: one load when nothing has.
    #[inline]
    pub fn has_work(&mut self) -> bool {
        either!(self, ring => ring.has_work())
    }

    /// Takes the next request and reads its chain. `None` when there is none. `true` beside it: a replay.
    #[inline]
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<(RingRequest, bool)>, RingFault> {
        either!(self, ring => ring.take(chain))
    }

    /// Takes the next requests, in order, as long as each is new and of one buffer, which is `touch`ed: at most `most` of
    /// them, and as many as `batch` has room for. It stops before whatever else comes, a fault included: that is for
    /// [`Ring::take`].
    ///
    /// Half a request's time is waiting for what the driver's processor has just written. Here the descriptors, the beginnings of the buffers and
    /// the places among the used are asked for all at once.
    #[inline]
    pub fn take_plain(&mut self, touch: BufferAccess, most: usize, batch: &mut Batch) {
        either!(self, ring => ring.take_plain(touch, most, batch));
    }

    /// Looks at the next requests, at most `most` and [`GROUP`], before they are taken, and asks the processor for what taking them reads: in
    /// stages, so that what all of them wait for comes at once. What it says of them is a hint, on which nothing may depend: [`Ring::take`] reads
    /// and checks everything itself.
    #[inline]
    pub fn look_ahead(&mut self, most: usize) -> Ahead {
        let mut first = [Descriptor::default(); GROUP];
        let count = either!(self, ring => ring.first_descriptors(most, &mut first));
        // One alone is taken as fast as it is looked at.
        if count < 2 { Ahead::default() } else { Ahead::of(self.view(), &first[..count]) }
    }

    /// Gives back the request that was taken last, as if it had never been taken: it is the next again. Nothing may have
    /// been completed since. For a queue that finds that it cannot serve it yet; whoever has taken several gives the last
    /// one back first.
    #[cold]
    pub fn rewind(&mut self, taken: RingRequest) {
        either!(self, ring => ring.rewind(taken));
    }

    /// Whether the driver has made more available than has ever been looked at, given back or not.
    #[inline]
    pub fn has_more(&self) -> bool {
        either!(self, ring => ring.has_more())
    }

    /// Our code lets go of a request that the disk below has now.
    #[inline]
    pub fn release(&mut self, taken: &RingRequest) {
        either!(self, ring => ring.release(taken));
    }

    /// Our code takes a request in hand that the disk below has given back.
    #[inline]
    pub fn touch(&mut self, taken: &RingRequest) {
        either!(self, ring => ring.touch(taken));
    }

    /// Our code has no request in hand any more, since its poller is parked: whatever becomes of them later, this was
    /// no death. Control plane only.
    pub fn let_go(&mut self) {
        either!(self, ring => ring.let_go());
    }

    /// Writes the used element of a request whose buffers hold `written` bytes for the driver. Seen by the driver after
    /// [`Ring::publish`].
    #[inline]
    pub fn complete(&mut self, taken: RingRequest, written: u32) {
        either!(self, ring => ring.complete(taken, written));
    }

    /// As [`Ring::complete`], of many.
    #[inline]
    fn complete_all(&mut self, requests: impl Iterator<Item = (RingRequest, u32)>) {
        either!(self, ring => requests.for_each(|(taken, written)| ring.complete(taken, written)));
    }

    /// How many requests wait for [`Ring::publish`].
    #[inline]
    pub fn unpublished(&self) -> u16 {
        either!(self, ring => ring.unpublished())
    }

    /// Shows the driver what has been completed: all of it or, should we die, none.
    #[inline]
    pub fn publish(&mut self) {
        either!(self, ring => ring.publish());
    }

    /// Whether the driver wants to be interrupted for what was published since this was last asked (2.7.7, 2.8.10).
    #[inline]
    pub fn wants_interrupt(&mut self) -> bool {
        either!(self, ring => ring.wants_interrupt())
    }

    /// Asks for a kick at the next thing made available, then looks once more: true if something is there already.
    #[inline]
    pub fn ask_for_kick(&mut self) -> bool {
        either!(self, ring => ring.ask_for_kick())
    }

    /// As [`Ring::ask_for_kick`], where what is there has been looked at and is too little (see [`Ring::rewind`]): the kick
    /// is for more than that, and so is the look.
    #[inline]
    pub fn ask_for_more(&mut self) -> bool {
        either!(self, ring => ring.ask_for_more())
    }

    /// Whether somebody looks at this ring by itself from now on. If so, a kick that was asked for is withdrawn. Otherwise the driver is told when
    /// its next request is taken.
    #[inline]
    pub fn set_polled(&mut self, polled: bool) {
        either!(self, ring => ring.set_polled(polled));
    }

    /// Whether the memory is still all there, the guest's and the journal's: ask after each batch.
    #[inline]
    pub fn check_memory(&self) -> Result<(), RingFault> {
        if either!(self, ring => ring.journal_lost()) {
            return Err(GuestFault::MemoryShrank.into());
        }
        Ok(self.view().check()?)
    }
}
