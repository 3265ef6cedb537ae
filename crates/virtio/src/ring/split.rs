//! Split virtqueues, device side (virtio 1.3, section 2.7).

use std::sync::atomic::{Ordering, fence};

use ioplane_memory::{GuestRange, GuestView, Window};

use super::ahead::GROUP;
use super::batch::{Batch, BufferAccess, LINE, MOST_PLAIN};
use super::chain::{Chain, Descriptor};
use super::in_flight::{InFlightSet, Replay};
use super::{InFlightRequest, KickSuppression, Mode, RingFault, RingLayout, RingRequest};
use crate::journal::split::Journal;
use crate::kill::{self, KillPoint};
use crate::spec::split::*;

/// The device side of one split ring. What each method is for is said at [`super::Ring`].
#[derive(Debug)]
pub struct Split {
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
    mode: Mode,
    in_flight: InFlightSet,
    journal: Option<Journal>,
    replay: Replay,
}

impl Split {
    pub(super) fn open(
        view: GuestView,
        layout: &RingLayout,
        features: u64,
        base: Option<u32>,
        journal: Option<Window>,
        in_flight: &[InFlightRequest],
    ) -> Result<Self, RingFault> {
        let size = layout.size;
        if !size.is_power_of_two() || size > MAX_SIZE {
            return Err(RingFault::BadSize(size));
        }
        let desc = view.window(layout.desc, DESC_SIZE * u64::from(size), 16)?;
        let avail = view.window(layout.avail, avail_bytes(size), 2)?;
        let used = view.window(layout.used, used_bytes(size), 4)?;
        let used_idx = used.load_u16(2);
        let mut next_avail = base.unwrap_or(0) as u16;
        let mut heads: Vec<u16> = in_flight.iter().map(|flight| flight.head).collect();
        let mut unrecorded = Vec::new();
        let (mut books, mut suspects) = (None, Vec::new());
        if let Some(window) = journal.filter(|_| kill::journal_kept()) {
            let (journal, recovered) = Journal::open(window, size, used_idx)?;
            suspects = recovered.suspects;
            // Whatever was taken is either used or in flight: that is where to go on (vhost-user, "Inflight I/O tracking").
            if heads.is_empty() {
                next_avail = used_idx.wrapping_add(recovered.heads.len() as u16);
                heads = recovered.heads;
            } else {
                unrecorded = heads.iter().copied().filter(|head| !recovered.heads.contains(head)).collect();
            }
            books = Some(journal);
        }
        let mut ring = Split {
            view,
            desc,
            avail,
            used,
            size,
            next_avail,
            seen_avail: next_avail,
            next_used: used_idx,
            published: used_idx,
            considered: used_idx,
            mode: Mode::of(features),
            in_flight: InFlightSet::new(size),
            journal: books,
            replay: Replay::new(heads, suspects, size)?,
        };
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
        let unreturned = self.next_avail.wrapping_sub(self.published);
        let heads = self.replay.heads();
        let bad = RingFault::BadStart { avail: self.next_avail, used: self.published, size: self.size };
        if unreturned > self.size || usize::from(unreturned) < heads.len() {
            return Err(bad);
        }
        // Whatever is to be replayed has been made available once.
        let ahead = self.avail.load_u16(2).wrapping_sub(self.next_avail);
        if !heads.is_empty() && ahead > self.size {
            return Err(bad);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    #[inline]
    pub(super) fn view(&self) -> &GuestView {
        &self.view
    }

    pub(super) fn view_mut(&mut self) -> &mut GuestView {
        &mut self.view
    }

    pub(super) fn base(&self) -> u32 {
        self.next_avail.into()
    }

    pub(super) fn replays(&self) -> bool {
        !self.replay.is_empty()
    }

    pub(super) fn accounts_for_all(&self) -> bool {
        usize::from(self.next_avail.wrapping_sub(self.published)) == self.replay.heads().len()
    }

    pub(super) fn in_flight_heads(&self) -> Vec<u16> {
        let mut heads = self.in_flight.heads();
        heads.extend(self.replay.heads());
        heads
    }

    #[inline]
    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight.count()
    }

    #[inline]
    pub(super) fn has_work(&mut self) -> bool {
        if self.next_avail != self.seen_avail || !self.replay.is_empty() {
            return true;
        }
        self.seen_avail = self.avail.load_u16(2);
        self.next_avail != self.seen_avail
    }

    #[inline]
    pub(super) fn take(&mut self, chain: &mut Chain) -> Result<Option<(RingRequest, bool)>, RingFault> {
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
        match self.in_flight.holds(head) {
            None => return Err(RingFault::BadDescriptor(head)),
            Some(true) => return Err(RingFault::HeadInFlight(head)),
            Some(false) => self.took(head),
        }
        self.read_chain(head, false, chain).map(|taken| Some((taken, false)))
    }

    /// Writes down that `head`, the next one, has been taken.
    #[inline]
    fn took(&mut self, head: u16) {
        self.in_flight.add(head);
        if self.mode.polled {
            self.refuse_kicks();
        }
        if let Some(journal) = &mut self.journal {
            journal.take(head);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        kill::here(KillPoint::Journalled);
    }

    #[inline]
    pub(super) fn take_plain(&mut self, touch: BufferAccess, most: usize, batch: &mut Batch) {
        if !self.replay.is_empty() {
            return;
        }
        self.seen_avail = self.avail.load_u16(2);
        let ahead = self.seen_avail.wrapping_sub(self.next_avail);
        if ahead > self.size {
            return;
        }
        let count = usize::from(ahead).min(most).min(MOST_PLAIN - batch.0.len());
        let mut heads = [0; MOST_PLAIN];
        let (avail, mask) = (self.avail.shorts(4), self.size - 1);
        for (nth, head) in heads[..count].iter_mut().enumerate() {
            let slot = usize::from(self.next_avail.wrapping_add(nth as u16) & mask);
            // Ordered by the load of the index above.
            *head = u16::from_le(avail[slot].load(Ordering::Relaxed));
            self.desc.prefetch(usize::from(*head) * DESC_SIZE as usize);
        }
        for nth in (0..count).step_by(LINE / 8) {
            let slot = usize::from(self.next_used.wrapping_add(nth as u16) & mask);
            self.view.prefetch_store(GuestRange { gpa: self.used.gpa() + 4 + 8 * slot as u64, len: 8 });
        }
        for head in &heads[..count] {
            kill::here(KillPoint::Seen);
            if self.in_flight.holds(*head) != Some(false) {
                return;
            }
            let (desc, _) = read(|| self.desc.pair(usize::from(*head) * DESC_SIZE as usize));
            if desc.flags != touch.flags() {
                return;
            }
            let buffer = GuestRange { gpa: desc.addr, len: desc.len };
            touch.ask(&self.view, buffer);
            self.took(*head);
            batch.0.push((RingRequest::new(*head, false), buffer));
        }
    }

    /// The first descriptors of the next requests that are known to be available, see [`super::Ring::look_ahead`].
    #[inline]
    pub(super) fn first_descriptors(&mut self, most: usize, out: &mut [Descriptor; GROUP]) -> usize {
        if !self.replay.is_empty() || !self.has_work() {
            return 0;
        }
        if self.seen_avail.wrapping_sub(self.next_avail) == 1 {
            // There may be more by now.
            self.seen_avail = self.avail.load_u16(2);
        }
        let ahead = usize::from(self.seen_avail.wrapping_sub(self.next_avail));
        if ahead > usize::from(self.size) {
            return 0;
        }
        let count = ahead.min(most).min(GROUP);
        let (mut heads, mask) = ([0; GROUP], self.size - 1);
        for (nth, head) in (0..).zip(&mut heads[..count]) {
            *head = self.avail.load_u16(4 + 2 * usize::from(self.next_avail.wrapping_add(nth) & mask));
            self.desc.prefetch(usize::from(*head) * DESC_SIZE as usize);
        }
        for nth in (0..count).step_by(LINE / 8) {
            let slot = usize::from(self.next_used.wrapping_add(nth as u16) & mask);
            self.view.prefetch_store(GuestRange { gpa: self.used.gpa() + 4 + 8 * slot as u64, len: 8 });
        }
        for (head, desc) in heads[..count].iter().zip(out) {
            *desc = match *head < self.size {
                true => parse(self.desc.pair(usize::from(*head) * DESC_SIZE as usize)).0,
                // A fault, for who takes it.
                false => Descriptor::default(),
            };
        }
        count
    }

    #[cold]
    fn take_replay(&mut self, chain: &mut Chain) -> Result<Option<(RingRequest, bool)>, RingFault> {
        let Some(head) = self.replay.next() else { return Ok(None) };
        self.in_flight.add(head);
        if let Some(journal) = &mut self.journal {
            journal.touch(head);
        }
        self.read_chain(head, true, chain).map(|taken| Some((taken, true)))
    }

    #[inline]
    fn read_chain(&mut self, head: u16, replayed: bool, chain: &mut Chain) -> Result<RingRequest, RingFault> {
        match walk(chain, &self.view, &self.desc, self.size, self.mode.indirect, head) {
            Ok(()) => Ok(RingRequest::new(head, replayed)),
            Err(fault) => {
                // The head stays in the journal: it was taken, and will never be used.
                self.in_flight.remove(head);
                Err(fault)
            }
        }
    }

    pub(super) fn rewind(&mut self, taken: RingRequest) {
        let RingRequest { head, replayed, .. } = taken;
        taken.abandon();
        self.in_flight.remove(head);
        if replayed {
            self.replay.rewind(head);
            self.journal.iter_mut().for_each(|journal| journal.release(head));
            return;
        }
        self.next_avail = self.next_avail.wrapping_sub(1);
        if let Some(journal) = &mut self.journal {
            journal.rewind(head);
        }
    }

    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.avail.load_u16(2) != self.seen_avail
    }

    #[inline]
    pub(super) fn release(&mut self, taken: &RingRequest) {
        if let Some(journal) = &mut self.journal {
            journal.release(taken.head);
        }
    }

    #[inline]
    pub(super) fn touch(&mut self, taken: &RingRequest) {
        if let Some(journal) = &mut self.journal {
            journal.touch(taken.head);
        }
    }

    pub(super) fn let_go(&mut self) {
        if let Some(journal) = &mut self.journal {
            (0..self.size).for_each(|head| journal.release(head));
        }
        self.replay.let_go();
    }

    #[inline(always)]
    pub(super) fn complete(&mut self, mut taken: RingRequest, written: u32) {
        taken.open = false;
        let slot = usize::from(self.next_used & (self.size - 1));
        self.view.store_u32_pair(&self.used, 4 + 8 * slot, u32::from(taken.head), written);
        if let Some(journal) = &mut self.journal {
            journal.batch(taken.head);
        }
        self.replay.completed(taken.head);
        self.next_used = self.next_used.wrapping_add(1);
        self.in_flight.remove(taken.head);
        kill::here(KillPoint::UsedWritten);
    }

    #[inline]
    pub(super) fn journal_lost(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::lost)
    }

    #[inline]
    pub(super) fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }

    #[inline]
    pub(super) fn publish(&mut self) {
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
        self.replay.published();
        kill::here(KillPoint::Settled);
    }

    #[inline]
    pub(super) fn wants_interrupt(&mut self) -> bool {
        let (old, new) = (self.considered, self.published);
        if old == new {
            return false;
        }
        self.considered = new;
        // The used index must be visible before the driver's suppression of interrupts is read, or both sides could wait for each other.
        fence(Ordering::SeqCst);
        if self.mode.event_idx {
            passes(self.avail.load_u16(4 + 2 * usize::from(self.size)), new, old)
        } else {
            self.avail.load_u16(0) & VIRTQ_AVAIL_F_NO_INTERRUPT == 0
        }
    }

    #[inline]
    pub(super) fn ask_for_kick(&mut self) -> bool {
        self.request_kick_at(self.next_avail);
        self.has_work()
    }

    #[inline]
    pub(super) fn ask_for_more(&mut self) -> bool {
        self.request_kick_at(self.seen_avail);
        self.has_more()
    }

    /// A kick when the driver's index passes `index`. It is visible before the look that follows, or a kick could
    /// be lost.
    #[inline]
    fn request_kick_at(&mut self, index: u16) {
        let suppression = self.mode.suppression;
        if self.mode.event_idx {
            if suppression != KickSuppression::Kick(index) {
                self.store_avail_event(index);
            }
        } else if !matches!(suppression, KickSuppression::Kick(_)) {
            self.view.store_u16(&self.used, 0, 0);
        }
        self.mode.suppression = KickSuppression::Kick(index);
        fence(Ordering::SeqCst);
    }

    /// `avail_event` stands behind the used ring's entries (virtio 1.3, section 2.7.8).
    #[inline]
    fn store_avail_event(&self, index: u16) {
        self.view.store_u16(&self.used, 4 + 8 * usize::from(self.size), index);
    }

    #[inline]
    pub(super) fn set_polled(&mut self, polled: bool) {
        self.mode.polled = polled;
        if polled && matches!(self.mode.suppression, KickSuppression::Kick(_)) {
            self.withdraw_kick();
        }
    }

    /// The kick that was asked for is not wanted any more.
    fn withdraw_kick(&mut self) {
        if self.mode.event_idx {
            // An index that the driver has passed.
            self.store_avail_event(self.next_avail.wrapping_sub(1));
            self.mode.suppression = KickSuppression::NoKick;
        } else {
            self.refuse_kicks();
        }
    }

    /// Says that kicks are not wanted. With event indexes an old `avail_event` is never reached again, so the driver does not kick.
    #[inline]
    fn refuse_kicks(&mut self) {
        if !self.mode.event_idx && self.mode.suppression != KickSuppression::NoKick {
            self.view.store_u16(&self.used, 0, VIRTQ_USED_F_NO_NOTIFY);
            self.mode.suppression = KickSuppression::NoKick;
        }
    }
}

/// Reads the chain that begins at `head`. Every descriptor is read exactly once: a driver that changes it meanwhile
/// changes nothing.
#[inline]
fn walk(
    chain: &mut Chain,
    view: &GuestView,
    table: &Window,
    size: u16,
    indirect: bool,
    head: u16,
) -> Result<(), RingFault> {
    chain.clear();
    let mut index = head;
    for _ in 0..size {
        if index >= size {
            return Err(RingFault::BadDescriptor(index));
        }
        let (desc, next) = read(|| table.pair(usize::from(index) * DESC_SIZE as usize));
        if desc.flags & VIRTQ_DESC_F_INDIRECT != 0 {
            if !indirect || desc.flags & VIRTQ_DESC_F_NEXT != 0 {
                return Err(RingFault::BadIndirect(index));
            }
            return walk_indirect(chain, view, &desc, head);
        }
        chain.add(&desc, head)?;
        if desc.flags & VIRTQ_DESC_F_NEXT == 0 {
            return Ok(());
        }
        index = next;
    }
    Err(RingFault::Loop(head))
}

#[inline]
fn walk_indirect(chain: &mut Chain, view: &GuestView, desc: &Descriptor, head: u16) -> Result<(), RingFault> {
    let (table, count) = desc.table(view, head)?;
    let mut index = 0u64;
    for _ in 0..count {
        if index >= count {
            return Err(RingFault::BadDescriptor(index as u16));
        }
        let (desc, next) = read(|| table.pair((index * DESC_SIZE) as usize));
        if desc.flags & VIRTQ_DESC_F_INDIRECT != 0 {
            return Err(RingFault::BadIndirect(head));
        }
        chain.add(&desc, head)?;
        if desc.flags & VIRTQ_DESC_F_NEXT == 0 {
            return Ok(());
        }
        index = u64::from(next);
    }
    Err(RingFault::Loop(head))
}

/// The descriptor whose halves `load` gives, and its successor.
#[inline(always)]
fn read(load: impl Fn() -> (u64, u64)) -> (Descriptor, u16) {
    let (desc, next) = parse(load());
    (desc.once(|| parse(load()).0), next)
}

/// A descriptor and its successor (2.7.5).
#[inline]
fn parse((addr, word): (u64, u64)) -> (Descriptor, u16) {
    (Descriptor { addr, len: word as u32, flags: (word >> 32) as u16 }, (word >> 48) as u16)
}
