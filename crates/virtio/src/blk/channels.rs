//! What a queue does I/O with: a channel, and those before it that have yet to end what they have begun.
//!
//! A backing is exchanged while requests of the guest are under way, and none of them waits for that: what was submitted ends by the channel that took
//! it, and what is submitted from then on goes by the new one.
//!
//! ```text
//!   owner: FreshChannel::open, one per queue -> Blk::exchange_backing -> ChannelExchange --Change::Own--> poller
//!                                                                            |  fresh: by queue ---------> current
//!   owner drops what has left <----------- left ----------------------------<-+-- leaving: in flight, until none is
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use crossbeam_queue::ArrayQueue;
use ioplane_device::{Change, CoreContext};
use ioplane_memory::{GuestRange, GuestView};
use ioplane_storage::{Backing, IoChannel, Op, Outcome, StorageError, Submitted, Tag};
use rustix::event::epoll::{self, EventData, EventFlags};

/// A channel for a queue that runs, opened before the queue gets it.
pub struct FreshChannel {
    queue: u16,
    depth: u16,
    channel: Box<dyn IoChannel>,
    /// An epoll set, in which this channel's descriptor is.
    set: OwnedFd,
}

impl FreshChannel {
    /// For `queue`, which has `depth` entries. May block.
    pub fn open(backing: &dyn Backing, queue: u16, depth: u16) -> Result<Self, StorageError> {
        let os = |source: std::io::Error| StorageError::Os {
            image: backing.info().name,
            doing: "making the events of a channel",
            source,
        };
        let channel = backing.channel(depth)?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| os(errno.into()))?;
        watch(&set, &*channel).map_err(|errno| os(errno.into()))?;
        Ok(FreshChannel { queue, depth, channel, set })
    }
}

fn watch(set: &OwnedFd, channel: &dyn IoChannel) -> Result<(), rustix::io::Errno> {
    channel.waker().map_or(Ok(()), |waker| epoll::add(set, waker, EventData::new_u64(0), EventFlags::IN))
}

/// A channel that a queue uses no more, or has not taken.
pub enum LeftChannel {
    /// All that it had begun has ended.
    Ended(Box<dyn IoChannel>),
    /// The queue could not take it, and goes on as it was.
    NotTaken(Box<dyn IoChannel>),
}

/// New channels on their way to the queues that run, and old ones on their way back. Whoever made it drops what comes back: closing may block.
pub struct ChannelExchange {
    /// By queue; each queue looks at its own place only.
    fresh: Vec<(u16, ArrayQueue<FreshChannel>)>,
    left: ArrayQueue<LeftChannel>,
}

impl ChannelExchange {
    pub(super) fn new(fresh: Vec<FreshChannel>) -> Arc<Self> {
        let left = ArrayQueue::new(fresh.len().max(1));
        let one = |fresh: FreshChannel| {
            let (queue, place) = (fresh.queue, ArrayQueue::new(1));
            let _ = place.push(fresh);
            (queue, place)
        };
        Arc::new(ChannelExchange { fresh: fresh.into_iter().map(one).collect(), left })
    }

    /// Whether there is a channel for `queue`, with room for `depth` operations.
    pub(super) fn has(fresh: &[FreshChannel], queue: u16, depth: u16) -> bool {
        fresh.iter().any(|one| one.queue == queue && one.depth >= depth)
    }

    /// What the queues are told.
    pub fn change(self: &Arc<Self>) -> Change {
        Change::Own(self.clone())
    }

    /// The next channel that has left, if one has.
    pub fn next_left(&self) -> Option<LeftChannel> {
        self.left.pop()
    }

    /// Whether no queue has anything to do for it any more: all channels that will leave have.
    pub fn is_over(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1
    }

    fn take(&self, queue: u16) -> Option<FreshChannel> {
        self.fresh.iter().find(|(of, _)| *of == queue).and_then(|(_, place)| place.pop())
    }
}

impl std::fmt::Debug for ChannelExchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChannelExchange").field("left", &self.left.len()).finish_non_exhaustive()
    }
}

struct Leaving {
    channel: Box<dyn IoChannel>,
    exchange: Arc<ChannelExchange>,
}

/// All channels of one queue.
pub(super) struct Channels {
    current: Box<dyn IoChannel>,
    leaving: Vec<Leaving>,
    /// Readable when one of them has something, once the first was exchanged.
    set: Option<OwnedFd>,
    draining: bool,
}

impl Channels {
    pub fn new(channel: Box<dyn IoChannel>) -> Self {
        // More than one is rare, and a core's loop does not allocate.
        Channels { current: channel, leaving: Vec::with_capacity(4), set: None, draining: false }
    }

    /// From now on `queue` submits to its channel of `exchange`; says whether it does. The channel before is let go when nothing of it is in flight
    /// any more.
    #[cold]
    pub fn exchange(&mut self, exchange: Arc<ChannelExchange>, queue: u16) -> bool {
        let Some(FreshChannel { mut channel, set, .. }) = exchange.take(queue) else { return false };
        let all = self.leaving.iter().map(|leaving| &*leaving.channel).chain([&*self.current]);
        if all.map(|channel| watch(&set, channel)).any(|watched| watched.is_err()) {
            let _ = exchange.left.push(LeftChannel::NotTaken(channel));
            return false;
        }
        channel.set_draining(self.draining);
        let channel = std::mem::replace(&mut self.current, channel);
        self.leaving.push(Leaving { channel, exchange });
        self.set = Some(set);
        true
    }

    /// Lets go of channels before the current one that have nothing in flight.
    #[inline]
    pub fn let_go(&mut self, context: &mut CoreContext) {
        if !self.leaving.is_empty() {
            self.let_go_now(context);
        }
    }

    #[cold]
    fn let_go_now(&mut self, context: &mut CoreContext) {
        let set = &self.set;
        for mut left in self.leaving.extract_if(.., |leaving| leaving.channel.in_flight() == 0) {
            left.channel.detach(context);
            if let (Some(set), Some(waker)) = (set, left.channel.waker()) {
                let _ = epoll::delete(set, waker);
            }
            // There is room for one of each queue. The channel before the exchange itself.
            let _ = left.exchange.left.push(LeftChannel::Ended(left.channel));
        }
    }

    #[inline]
    pub fn slice(&self) -> u32 {
        self.current.slice()
    }

    #[inline]
    pub fn expect(&self, view: &GuestView, read: bool, offset: u64, buffer: GuestRange) {
        self.current.expect(view, read, offset, buffer);
    }

    #[inline]
    pub fn submit(
        &mut self,
        context: &mut CoreContext,
        view: &GuestView,
        op: &Op<'_>,
        tag: Tag,
    ) -> Submitted {
        self.current.submit(context, view, op, tag)
    }

    #[inline]
    pub fn push(&mut self, context: &mut CoreContext) {
        self.leaving.iter_mut().for_each(|leaving| leaving.channel.push(context));
        self.current.push(context);
    }

    #[inline]
    pub fn held_back(&self) -> bool {
        self.current.held_back() || self.leaving.iter().any(|leaving| leaving.channel.held_back())
    }

    #[inline]
    pub fn held_until(&self) -> Option<Instant> {
        let leaving = self.leaving.iter().map(|leaving| leaving.channel.held_until());
        leaving.chain([self.current.held_until()]).flatten().min()
    }

    pub fn set_draining(&mut self, draining: bool) {
        self.draining = draining;
        self.leaving.iter_mut().for_each(|leaving| leaving.channel.set_draining(draining));
        self.current.set_draining(draining);
    }

    /// As [`IoChannel::reap`], of all of them.
    #[inline]
    pub fn reap(&mut self, context: &mut CoreContext, done: &mut dyn FnMut(Tag, Outcome)) {
        self.leaving.iter_mut().for_each(|leaving| {
            leaving.channel.reap(context, done);
        });
        self.current.reap(context, done);
    }

    #[inline]
    pub fn in_flight(&self) -> usize {
        self.current.in_flight()
            + self.leaving.iter().map(|leaving| leaving.channel.in_flight()).sum::<usize>()
    }

    pub fn waker(&self) -> Option<BorrowedFd<'_>> {
        self.set.as_ref().map(AsFd::as_fd).or_else(|| self.current.waker())
    }

    pub fn detach(&mut self, context: &mut CoreContext) {
        self.leaving.iter_mut().for_each(|leaving| leaving.channel.detach(context));
        self.current.detach(context);
    }
}
