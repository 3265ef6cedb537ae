//! Split virtqueues, device side (virtio 1.3, section 2.7).

mod chain;

use std::sync::atomic::{Ordering, fence};

use ioplane_memory::{GuestFault, GuestView, Window};

use crate::journal::{Journal, JournalFault};
use crate::kill::{self, KillPoint};
use crate::spec::split::*;
use crate::trial::Trial;

pub use chain::{Chain, MAX_BUFFERS};

/// What a driver did wrong with a ring. The queue stops; the name is what is counted and shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RingFault {
    /// The size is not a power of two, or too large.
    #[error("a queue of {0} entries: not a power of two, or more than the device takes")]
    BadSize(u16),
    /// Addresses outside memory, misaligned, or memory that went away.
    #[error(transparent)]
    Memory(#[from] GuestFault),
    /// The available index ran ahead of what the queue can hold.
    #[error("the available index jumped to {index}, {ahead} ahead: more than the queue's {size}")]
    IndexJump {
        /// The index found.
        index: u16,
        /// How far ahead of us it is.
        ahead: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// A descriptor number beyond the table.
    #[error("descriptor {0} is beyond the table")]
    BadDescriptor(u16),
    /// A chain longer than its table: a loop.
    #[error("descriptor chain from {0} does not end: a loop")]
    Loop(u16),
    /// The same head made available twice.
    #[error("head {0} was made available while it is in flight")]
    HeadInFlight(u16),
    /// An indirect table that is empty, ragged, too long, nested, or not negotiated.
    #[error("the indirect table of descriptor {0} is malformed")]
    BadIndirect(u16),
    /// A device-readable buffer after a device-writable one (2.7.4.2).
    #[error("a readable buffer follows a writable one in the chain of {0}")]
    ReadableAfterWritable(u16),
    /// The lengths of one chain add up to more than 4 GiB (2.7.5).
    #[error("the chain of {0} is longer than 4 GiB")]
    TooLong(u16),
    /// A request that has no place for its answer.
    #[error("the request at {0} has no room for a header or a status")]
    NoStatus(u16),
    /// The ring's indexes contradict each other at the start.
    #[error("the ring starts with available index {avail} and used index {used}: more than {size} in flight")]
    BadStart {
        /// Where the device is to go on.
        avail: u16,
        /// What the used ring shows.
        used: u16,
        /// Entries of the queue.
        size: u16,
    },
    /// The journal of a crash cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalFault),
}

impl RingFault {
    /// A short name, for counters.
    pub fn name(&self) -> &'static str {
        match self {
            RingFault::BadSize(_) => "bad_size",
            RingFault::Memory(GuestFault::OutsideMemory { .. }) => "outside_memory",
            RingFault::Memory(GuestFault::Misaligned { .. }) => "misaligned",
            RingFault::Memory(GuestFault::MemoryShrank) => "memory_shrank",
            RingFault::IndexJump { .. } => "index_jump",
            RingFault::BadDescriptor(_) => "bad_descriptor",
            RingFault::Loop(_) => "descriptor_loop",
            RingFault::HeadInFlight(_) => "head_in_flight",
            RingFault::BadIndirect(_) => "bad_indirect",
            RingFault::ReadableAfterWritable(_) => "readable_after_writable",
            RingFault::TooLong(_) => "chain_too_long",
            RingFault::NoStatus(_) => "no_status",
            RingFault::BadStart { .. } => "bad_start",
            RingFault::Journal(JournalFault::Deadly(_)) => "deadly_request",
            RingFault::Journal(_) => "bad_journal",
        }
    }
}

/// Where a driver put a split ring: guest addresses and size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingLayout {
    /// Entries: a power of two.
    pub size: u16,
    /// Descriptor table, 16-byte aligned.
    pub desc: u64,
    /// Available ring (driver area), 2-byte aligned.
    pub avail: u64,
    /// Used ring (device area), 4-byte aligned.
    pub used: u64,
}

/// A request that has been taken from a ring and must go back to it. Linear: dropped without [`Ring::complete`] or
/// [`Taken::abandon`], it panics where debug assertions are on.
#[derive(Debug)]
#[must_use = "a request taken must be completed or abandoned"]
pub struct Taken {
    head: u16,
    open: bool,
}

impl Taken {
    /// The head of its descriptor chain: unique among those in flight.
    #[inline]
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Lets go of a request without using it: the ring (see [`Ring::flying_heads`]) and the journal keep it as in flight, for
    /// whoever comes next.
    pub fn abandon(mut self) {
        self.open = false;
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        debug_assert!(
            !self.open || std::thread::panicking(),
            "request {} was dropped, neither completed nor abandoned",
            self.head
        );
    }
}

/// What the driver has been told about kicks. Kept, so that a ring on which nothing happens is not written to: firmware
/// leaves rings behind whose memory a kernel may use for something else before it resets the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    /// Nothing yet: the driver may have wiped what was said before (2.7.10).
    Unsaid,
    /// Kick when the available index passes this (with EVENT_IDX), or at any request.
    Kick(u16),
    /// Do not kick.
    NoKick,
}

/// The device side of one split ring.
#[derive(Debug)]
pub struct Ring {
    view: GuestView,
    desc: Window,
    avail: Window,
    used: Window,
    size: u16,
    /// Index of the next entry to take.
    next_avail: u16,
    /// The driver's index when last read.
    seen_avail: u16,
    /// Index of the next used element to write.
    next_used: u16,
    /// Used index as the driver sees it.
    published: u16,
    /// Used index when the driver was last considered for an interrupt.
    considered: u16,
    event_idx: bool,
    indirect: bool,
    /// Somebody looks at this ring by itself: kicks are refused from the next request taken on.
    polled: bool,
    wish: Wish,
    /// For each head: zero, or one more than the count of requests taken before it.
    in_flight: Box<[u64]>,
    taken: u64,
    flying: u16,
    journal: Option<Journal>,
    replay: std::collections::VecDeque<u16>,
    /// Those of `replay` that were in hand when the process died.
    suspects: Vec<u16>,
    /// The suspect that is being tried, and whether its used element is written.
    trial: Option<(u16, bool, Trial)>,
}

impl Ring {
    /// Opens the ring at `layout`, to go on at available index `base`. With a journal, that decides instead, and what was in
    /// flight is taken first, in its old order; without, `in_flight` says so.
    pub fn open(
        view: GuestView,
        layout: &RingLayout,
        features: u64,
        base: u16,
        journal: Option<Window>,
        in_flight: &[u16],
    ) -> Result<Self, RingFault> {
        let size = layout.size;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RingFault::BadSize(size));
        }
        let desc = view.window(layout.desc, DESC_SIZE * u64::from(size), 16)?;
        let avail = view.window(layout.avail, avail_bytes(size), 2)?;
        let used = view.window(layout.used, used_bytes(size), 4)?;
        let used_idx = used.load_u16(2);
        let mut ring = Ring {
            view,
            desc,
            avail,
            used,
            size,
            next_avail: base,
            seen_avail: base,
            next_used: used_idx,
            published: used_idx,
            considered: used_idx,
            event_idx: features & crate::spec::feature::VIRTIO_F_EVENT_IDX != 0,
            indirect: features & crate::spec::feature::VIRTIO_F_INDIRECT_DESC != 0,
            polled: false,
            wish: Wish::Unsaid,
            in_flight: vec![0; usize::from(size)].into(),
            taken: 0,
            flying: 0,
            journal: None,
            replay: in_flight.iter().copied().collect(),
            suspects: Vec::new(),
            trial: None,
        };
        let mut unrecorded = Vec::new();
        if let Some(window) = journal.filter(|_| kill::journal_kept()) {
            let (journal, recovered) = Journal::open(window, size, used_idx)?;
            let heads = recovered.heads;
            ring.suspects = recovered.suspects;
            // Whatever was taken is either used or in flight: that is where to go on (vhost-user, "Inflight I/O tracking").
            if in_flight.is_empty() {
                ring.next_avail = used_idx.wrapping_add(heads.len() as u16);
                ring.replay = heads.into();
            } else {
                unrecorded = in_flight.iter().copied().filter(|head| !heads.contains(head)).collect();
            }
            ring.journal = Some(journal);
        }
        ring.seen_avail = ring.next_avail;
        ring.check_start()?;
        // What comes from elsewhere is in flight here too, should we die before it is done.
        if let Some(journal) = &mut ring.journal {
            for head in unrecorded {
                journal.take(head);
                journal.release(head);
            }
        }
        Ok(ring)
    }

    /// Whether the indexes and the heads to replay can belong to one ring.
    fn check_start(&self) -> Result<(), RingFault> {
        let flying = self.next_avail.wrapping_sub(self.published);
        let bad = RingFault::BadStart { avail: self.next_avail, used: self.published, size: self.size };
        if flying > self.size || usize::from(flying) < self.replay.len() {
            return Err(bad);
        }
        // Whatever is to be replayed has been made available once.
        let ahead = self.avail.load_u16(2).wrapping_sub(self.next_avail);
        if !self.replay.is_empty() && ahead > self.size {
            return Err(bad);
        }
        let mut seen = vec![false; usize::from(self.size)];
        for head in &self.replay {
            match seen.get_mut(usize::from(*head)) {
                Some(seen) if !*seen => *seen = true,
                Some(_) => return Err(RingFault::HeadInFlight(*head)),
                None => return Err(RingFault::BadDescriptor(*head)),
            }
        }
        Ok(())
    }

    /// Entries of the ring.
    #[inline]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The guest's memory.
    #[inline]
    pub fn view(&self) -> &GuestView {
        &self.view
    }

    /// The guest's memory, to change its log or its map.
    pub fn view_mut(&mut self) -> &mut GuestView {
        &mut self.view
    }

    /// Where to go on, for [`Ring::open`].
    pub fn base(&self) -> u16 {
        self.next_avail
    }

    /// Index of the next used element.
    pub fn next_used(&self) -> u16 {
        self.next_used
    }

    /// Whether requests wait to be replayed.
    pub fn replays(&self) -> bool {
        !self.replay.is_empty()
    }

    /// Heads taken and not returned, those still to be replayed included, in the order to replay them in. Allocates:
    /// control plane only.
    pub fn flying_heads(&self) -> Vec<u16> {
        let mut heads: Vec<u16> = (0..self.size).filter(|h| self.in_flight[usize::from(*h)] != 0).collect();
        heads.sort_by_key(|head| self.in_flight[usize::from(*head)]);
        heads.extend(self.replay.iter());
        heads
    }

    /// How many requests have been taken and not returned.
    #[inline]
    pub fn flying(&self) -> u16 {
        self.flying
    }

    /// Whether the driver has made something available that has not been taken: one load when nothing has.
    #[inline]
    pub fn has_work(&mut self) -> bool {
        if self.next_avail != self.seen_avail || !self.replay.is_empty() {
            return true;
        }
        self.seen_avail = self.avail.load_u16(2);
        self.next_avail != self.seen_avail
    }

    /// Takes the next request and reads its chain. `None` when there is none. `true` beside it: a replay.
    #[inline]
    pub fn take(&mut self, chain: &mut Chain) -> Result<Option<(Taken, bool)>, RingFault> {
        if !self.replay.is_empty() {
            return self.take_replay(chain);
        }
        if !self.has_work() {
            return Ok(None);
        }
        let ahead = self.seen_avail.wrapping_sub(self.next_avail);
        if ahead > self.size {
            return Err(RingFault::IndexJump { index: self.seen_avail, ahead, size: self.size });
        }
        let slot = usize::from(self.next_avail & (self.size - 1));
        let head = self.avail.load_u16(4 + 2 * slot);
        if ahead > 1 {
            // The next one's first descriptor, while this one is read.
            let next = usize::from(self.next_avail.wrapping_add(1) & (self.size - 1));
            let next = self.avail.load_u16(4 + 2 * next);
            self.desc.prefetch(usize::from(next) * DESC_SIZE as usize);
        }
        kill::here(KillPoint::Seen);
        match self.in_flight.get_mut(usize::from(head)) {
            None => return Err(RingFault::BadDescriptor(head)),
            Some(0) => {}
            Some(_) => return Err(RingFault::HeadInFlight(head)),
        }
        self.mark(head);
        if self.polled {
            self.refuse_kicks();
        }
        if let Some(journal) = &mut self.journal {
            journal.take(head);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        kill::here(KillPoint::Journalled);
        self.read_chain(head, chain).map(|taken| Some((taken, false)))
    }

    /// Nothing while the next one is a suspect and another suspect is being tried: see [`crate::trial`].
    #[cold]
    fn take_replay(&mut self, chain: &mut Chain) -> Result<Option<(Taken, bool)>, RingFault> {
        let Some(head) = self.replay.front().copied() else { return Ok(None) };
        if self.suspects.contains(&head) {
            let Some(trial) = Trial::begin() else { return Ok(None) };
            self.trial = Some((head, false, trial));
            self.suspects.retain(|suspect| *suspect != head);
        }
        self.replay.pop_front();
        self.mark(head);
        if let Some(journal) = &mut self.journal {
            journal.touch(head);
        }
        self.read_chain(head, chain).map(|taken| Some((taken, true)))
    }

    #[inline]
    fn mark(&mut self, head: u16) {
        self.taken += 1;
        self.in_flight[usize::from(head)] = self.taken;
        self.flying += 1;
    }

    #[inline]
    fn read_chain(&mut self, head: u16, chain: &mut Chain) -> Result<Taken, RingFault> {
        match chain.read(&self.view, &self.desc, self.size, self.indirect, head) {
            Ok(()) => Ok(Taken { head, open: true }),
            Err(fault) => {
                // The head stays in the journal: it was taken, and will never be used.
                self.in_flight[usize::from(head)] = 0;
                self.flying -= 1;
                Err(fault)
            }
        }
    }

    /// Our code lets go of a request that the disk below has now.
    #[inline]
    pub fn release(&mut self, taken: &Taken) {
        if let Some(journal) = &mut self.journal {
            journal.release(taken.head);
        }
    }

    /// Our code takes a request in hand that the disk below has given back.
    #[inline]
    pub fn touch(&mut self, taken: &Taken) {
        if let Some(journal) = &mut self.journal {
            journal.touch(taken.head);
        }
    }

    /// Our code has no request in hand any more, since its poller has come home: whatever becomes of them later, this was
    /// no death. Control plane only.
    pub fn let_go(&mut self) {
        if let Some(journal) = &mut self.journal {
            (0..self.size).for_each(|head| journal.release(head));
        }
        self.trial = None;
    }

    /// Writes the used element of a request whose buffers hold `written` bytes for the driver. Seen by the driver after
    /// [`Ring::publish`].
    #[inline]
    pub fn complete(&mut self, mut taken: Taken, written: u32) {
        taken.open = false;
        let slot = usize::from(self.next_used & (self.size - 1));
        self.view.store_u32_pair(&self.used, 4 + 8 * slot, u32::from(taken.head), written);
        if let Some(journal) = &mut self.journal {
            journal.batch(taken.head);
        }
        if let Some((head, done, _)) = &mut self.trial {
            *done |= *head == taken.head;
        }
        self.next_used = self.next_used.wrapping_add(1);
        self.in_flight[usize::from(taken.head)] = 0;
        self.flying -= 1;
        kill::here(KillPoint::UsedWritten);
    }

    /// How many used elements wait for [`Ring::publish`].
    #[inline]
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    /// Shows the driver what has been completed.
    #[inline]
    pub fn publish(&mut self) {
        let count = self.unpublished();
        if count == 0 {
            return;
        }
        self.view.store_u16(&self.used, 2, self.next_used);
        self.published = self.next_used;
        kill::here(KillPoint::Published);
        if let Some(journal) = &mut self.journal {
            journal.settle(self.published, count);
        }
        if let Some((_, true, _)) = self.trial {
            self.trial = None;
        }
        kill::here(KillPoint::Settled);
    }

    /// Whether the driver wants to be interrupted for what was published since this was last asked (2.7.7).
    #[inline]
    pub fn wants_interrupt(&mut self) -> bool {
        let (old, new) = (self.considered, self.published);
        if old == new {
            return false;
        }
        self.considered = new;
        // The used index must be visible before the driver's wish is read, or both sides could wait for each other.
        fence(Ordering::SeqCst);
        if self.event_idx {
            passes(self.avail.load_u16(4 + 2 * usize::from(self.size)), new, old)
        } else {
            self.avail.load_u16(0) & VIRTQ_AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// Asks for a kick at the next thing made available, then looks once more: true if something is there already.
    #[inline]
    pub fn ask_for_kick(&mut self) -> bool {
        if self.event_idx {
            if self.wish != Wish::Kick(self.next_avail) {
                self.view.store_u16(&self.used, 4 + 8 * usize::from(self.size), self.next_avail);
            }
        } else if !matches!(self.wish, Wish::Kick(_)) {
            self.view.store_u16(&self.used, 0, 0);
        }
        self.wish = Wish::Kick(self.next_avail);
        // The wish must be visible before the last look, or a kick could be lost.
        fence(Ordering::SeqCst);
        self.has_work()
    }

    /// Whether somebody looks at this ring by itself from now on. The driver is told when it next makes something
    /// available, not before: an idle ring is left alone.
    #[inline]
    pub fn set_polled(&mut self, polled: bool) {
        self.polled = polled;
    }

    /// Says that kicks are not wanted. With event indexes an old wish is simply never met again until it is renewed.
    #[inline]
    fn refuse_kicks(&mut self) {
        if !self.event_idx && self.wish != Wish::NoKick {
            self.view.store_u16(&self.used, 0, VIRTQ_USED_F_NO_NOTIFY);
            self.wish = Wish::NoKick;
        }
    }

    /// Whether the memory is still all there: ask after each batch.
    #[inline]
    pub fn check_memory(&self) -> Result<(), RingFault> {
        Ok(self.view.check()?)
    }
}
