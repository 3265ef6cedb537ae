//! Packed virtqueues, device side (virtio 1.3, section 2.8).
//!
//! ```text
//!   descriptors:  ... | used, shown | completed, not shown | in flight | available | free ...
//!                                   ^ published                        ^ next_avail
//! ```
//!
//! A chain is read at `next_avail`. Used descriptors are written from `published` on, in the order in which chains are
//! completed, a batch at once when it is shown. Both places move on by the length of their chain. Used descriptors overwrite what was in
//! flight, so the descriptors of every chain are kept in the [`InFlightTable`]. Of a batch the first used descriptor is
//! written last: the driver looks at that one place, and sees all or nothing.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use ioplane_memory::{GuestRange, GuestView, Window};

use super::ahead::GROUP;
use super::batch::{Batch, BufferAccess, LINE, MOST_PLAIN};
use super::chain::{Chain, Descriptor};
use super::in_flight::{InFlightSet, Replay};
use super::position::Position;
use super::{InFlightRequest, KickSuppression, Mode, RingFault, RingLayout, RingRequest};
use crate::journal::packed::InFlightTable;
use crate::kill::{self, KillPoint};
use crate::spec::packed::*;
use crate::spec::split::{DESC_SIZE, MAX_SIZE, VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};

/// Whether a ring that is said to begin has been used before: after a crash QEMU knows no other place of a packed ring without a
/// journal. There is no proof that it has not, but what no ring can show at the beginning of a lap is proof that it has: a
/// descriptor that was used in this lap, or one available in this lap behind one that stays without, or nothing at all but what was
/// available in the lap before: of that lap at least one was used.
fn used_before(desc: &Window, size: u16) -> bool {
    // A driver that adds a chain makes its head available last: between the two there is a gap, for a moment.
    for look in 0..LOOKS {
        if look > 0 {
            std::thread::sleep(Duration::from_millis(2));
        }
        match look_at(desc, size) {
            RingEvidence::Use => return true,
            RingEvidence::Nothing => return false,
            RingEvidence::Gap => {}
        }
    }
    true
}

/// Looks at a gap before it is said to stay. Whoever opens a ring may block.
const LOOKS: u32 = 4;

/// What a ring shows that is said to begin.
enum RingEvidence {
    Nothing,
    Use,
    Gap,
}

/// One look of [`used_before`].
fn look_at(desc: &Window, size: u16) -> RingEvidence {
    let start = Position::START;
    let last_lap = Position { wrap: !start.wrap, ..start };
    let (mut available, mut all_last) = (false, true);
    // Backwards: the driver may be adding to it.
    for index in (0..size).rev() {
        let flags = desc.load_u16(slot(Position { index, wrap: true }) + AT_FLAGS);
        if start.sees_used(flags) {
            return RingEvidence::Use;
        }
        if start.sees_available(flags) {
            available = true;
            continue;
        }
        if available {
            return RingEvidence::Gap;
        }
        all_last &= last_lap.sees_available(flags);
    }
    if !available && all_last { RingEvidence::Use } else { RingEvidence::Nothing }
}

/// The device side of one packed ring. What each method is for is said at [`super::Ring`].
#[derive(Debug)]
pub struct Packed {
    view: GuestView,
    desc: Window,
    driver: Window,
    device: Window,
    size: u16,
    /// Where the next chain begins.
    next_avail: Position,
    /// Where nothing was when a chain was last looked for in vain.
    looked: Position,
    /// Where the next used descriptor goes.
    published: Position,
    /// Descriptors published since the driver was last considered for an interrupt.
    unconsidered: u32,
    mode: Mode,
    in_flight: InFlightSet,
    /// Descriptors taken that the driver has not been shown as used.
    owned: u16,
    /// How many requests the last look for several took: so many are expected at the next.
    run: u16,
    table: InFlightTable,
    replay: Replay,
}

impl Packed {
    pub(super) fn open(
        view: GuestView,
        layout: &RingLayout,
        features: u64,
        base: Option<u32>,
        journal: Option<Window>,
        in_flight: &[InFlightRequest],
    ) -> Result<Self, RingFault> {
        let size = layout.size;
        if size == 0 || size > MAX_SIZE {
            return Err(RingFault::BadSize(size));
        }
        let desc = view.window(layout.desc, DESC_SIZE * u64::from(size), 16)?;
        let driver = view.window(layout.avail, EVENT_SIZE, 4)?;
        let device = view.window(layout.used, EVENT_SIZE, 4)?;
        let (mut avail, used) = match base {
            Some(base) => (Position::of_bits(base as u16), Position::of_bits((base >> 16) as u16)),
            None => (Position::START, Position::START),
        };
        let bad = |avail: Position, used: Position| RingFault::BadStart {
            avail: avail.index,
            used: used.index,
            size,
        };
        if avail.index >= size || used.index >= size {
            return Err(bad(avail, used));
        }
        let begins = in_flight.is_empty() && avail == Position::START && used == Position::START;
        if begins && journal.is_none() && used_before(&desc, size) {
            return Err(RingFault::LostPlace);
        }
        let (mut table, recovered) = match journal.filter(|_| kill::journal_kept()) {
            Some(region) => InFlightTable::open(region, size, used, &desc)?,
            None => (InFlightTable::new(size, used), None),
        };
        let used = table.used();
        let mut heads: Vec<u16> = in_flight.iter().map(|flight| flight.head).collect();
        let (crashed, mut suspects) = (recovered.is_some(), Vec::new());
        if let Some(recovered) = recovered {
            suspects = recovered.suspects;
            // Whatever was taken is either used or in flight: that is where to go on.
            if heads.is_empty() {
                avail = used.after(table.descriptors_in_flight(), size);
                heads = recovered.heads;
            }
        }
        let replay = Replay::new(heads, suspects, size)?;
        let owned = used.until(avail, size).ok_or(bad(avail, used))?;
        for flight in in_flight {
            // What comes from elsewhere is in flight here too, should we die before it is done.
            if !table.holds(flight.head) {
                record(&mut table, flight)?;
            }
        }
        if table.descriptors_in_flight() > owned || !replay.heads().iter().all(|head| table.holds(*head)) {
            return Err(bad(avail, used));
        }
        let ring = Packed {
            view,
            desc,
            driver,
            device,
            size,
            next_avail: avail,
            looked: avail,
            published: used,
            unconsidered: 0,
            mode: Mode::of(features),
            in_flight: InFlightSet::new(size),
            owned,
            run: 0,
            table,
            replay,
        };
        if crashed {
            ring.clean();
        }
        Ok(ring)
    }

    /// A process that died while it wrote a batch leaves used descriptors behind the first one. What is
    /// completed now may lie elsewhere, and the driver must not find those. Everything up to `next_avail` is ours to write.
    fn clean(&self) {
        for ahead in 0..self.owned {
            let place = self.published.after(ahead, self.size);
            let at = slot(place) + AT_FLAGS;
            if place.sees_used(self.desc.load_u16(at)) {
                self.view.store_u16(&self.desc, at, place.available());
            }
        }
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
        u32::from(self.next_avail.bits()) | u32::from(self.published.bits()) << 16
    }

    pub(super) fn replays(&self) -> bool {
        !self.replay.is_empty()
    }

    pub(super) fn accounts_for_all(&self) -> bool {
        let replayed: u32 = self.replay.heads().iter().map(|head| u32::from(self.table.len_of(*head))).sum();
        u32::from(self.owned) == replayed
    }

    pub(super) fn in_flight_heads(&self) -> Vec<u16> {
        let mut heads = self.in_flight.heads();
        heads.extend(self.replay.heads());
        heads
    }

    pub(super) fn flights(&self) -> Vec<InFlightRequest> {
        let flight =
            |head| InFlightRequest { head, descriptors: self.table.descriptors(head).copied().collect() };
        self.in_flight_heads().into_iter().map(flight).collect()
    }

    #[inline]
    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight.count()
    }

    #[inline]
    pub(super) fn has_work(&mut self) -> bool {
        if !self.replay.is_empty() {
            return true;
        }
        // A driver all of whose descriptors are ours has none to offer, whatever it writes there.
        self.owned < self.size
            && self.next_avail.sees_available(self.desc.load_u16(slot(self.next_avail) + AT_FLAGS))
    }

    #[inline]
    pub(super) fn take(&mut self, chain: &mut Chain) -> Result<Option<(RingRequest, bool)>, RingFault> {
        if !self.replay.is_empty() {
            return self.take_replay(chain);
        }
        if !self.has_work() {
            self.looked = self.next_avail;
            return Ok(None);
        }
        kill::here(KillPoint::Seen);
        let (first, id) = self.load(self.next_avail);
        if first.flags & VIRTQ_DESC_F_NEXT == 0 {
            return self.take_one(first, id, chain).map(|taken| Some((taken, false)));
        }
        let (id, after) = self.stage(first, id).inspect_err(|_| self.table.unstage())?;
        self.in_flight.add(id);
        self.owned += self.table.staged();
        self.table.take(id);
        self.took(after);
        self.desc.prefetch(slot(after));
        self.read_chain(id, false, chain).map(|taken| Some((taken, false)))
    }

    /// Takes the next chain, which is the one descriptor `descriptor`.
    #[inline]
    fn take_one(
        &mut self,
        descriptor: Descriptor,
        id: u16,
        chain: &mut Chain,
    ) -> Result<RingRequest, RingFault> {
        if descriptor.flags & VIRTQ_DESC_F_INDIRECT != 0 && !self.mode.indirect {
            return Err(RingFault::BadIndirect(id));
        }
        self.check_unheld(id)?;
        if !self.table.take_one(descriptor, id) {
            return Err(RingFault::Loop(self.next_avail.index));
        }
        self.in_flight.add(id);
        self.owned += 1;
        let after = self.next_avail.after(1, self.size);
        self.took(after);
        self.desc.prefetch(slot(after));
        let outcome = walk(chain, &self.view, std::iter::once(&descriptor), self.mode.indirect, id);
        self.walked(outcome, id, false)
    }

    /// A chain has been written down as taken; the next one begins at `after`.
    #[inline]
    fn took(&mut self, after: Position) {
        if self.mode.polled {
            self.refuse_kicks();
        }
        self.next_avail = after;
        kill::here(KillPoint::Journalled);
    }

    /// Whether `id` is a buffer ID, and of nothing in flight.
    #[inline]
    fn check_unheld(&self, id: u16) -> Result<(), RingFault> {
        match self.in_flight.holds(id) {
            None => Err(RingFault::BadDescriptor(id)),
            Some(true) => Err(RingFault::HeadInFlight(id)),
            Some(false) => Ok(()),
        }
    }

    #[inline]
    pub(super) fn take_plain(&mut self, touch: BufferAccess, most: usize, batch: &mut Batch) {
        const KIND: u16 = VIRTQ_DESC_F_NEXT
            | VIRTQ_DESC_F_INDIRECT
            | VIRTQ_DESC_F_WRITE
            | VIRTQ_DESC_F_AVAIL
            | VIRTQ_DESC_F_USED;
        if !self.replay.is_empty() || !self.has_work() {
            return;
        }
        let most = usize::from(self.size - self.owned).min(MOST_PLAIN - batch.0.len()).min(most) as u16;
        self.ask_for_lines(most);
        let Packed { view, desc: ring, size, in_flight, table, .. } = self;
        let (halves, _) = ring.longs(0).as_chunks();
        let (mut place, mut count) = (self.next_avail, 0);
        while count < most {
            let (desc, id) = load(ring, halves, place);
            if desc.flags & KIND != place.available() | touch.flags() {
                break;
            }
            kill::here(KillPoint::Seen);
            if in_flight.holds(id) != Some(false) || !table.take_one(desc, id) {
                break;
            }
            let buffer = GuestRange { gpa: desc.addr, len: desc.len };
            touch.ask(view, buffer);
            in_flight.add(id);
            batch.0.push((RingRequest::new(id, false), buffer));
            (place, count) = (place.after(1, *size), count + 1);
            kill::here(KillPoint::Journalled);
        }
        (self.next_avail, self.run) = (place, count);
        self.owned += count;
        if count > 0 && self.mode.polled {
            self.refuse_kicks();
        }
    }

    /// Asks for the lines that a look for `most` descriptors reads, to store used descriptors to them later: for as many as it can expect. A line of
    /// which the driver is still writing descriptors would be taken from its processor in vain.
    #[inline]
    fn ask_for_lines(&self, most: u16) {
        let ask = |place| {
            let gpa = self.desc.gpa() + slot(place) as u64;
            self.view.prefetch_store(GuestRange { gpa, len: DESC_SIZE as u32 });
        };
        for nth in (0..most.min(self.run.saturating_mul(2)).max(1)).step_by(PER_LINE) {
            ask(self.next_avail.after(nth, self.size));
            // With nothing in flight they go to the same lines.
            if self.owned > 0 {
                ask(self.published.after(nth, self.size));
            }
        }
    }

    /// The first descriptors of the next requests, see [`super::Ring::look_ahead`]: as many as are of one descriptor each.
    #[inline]
    pub(super) fn first_descriptors(&mut self, most: usize, out: &mut [Descriptor; GROUP]) -> usize {
        if !self.replay.is_empty() || !self.has_work() {
            return 0;
        }
        let most = usize::from(self.size - self.owned).min(most).min(GROUP) as u16;
        let mut place = self.next_avail;
        let mut count = 0;
        while count < most {
            let (desc, _) = self.load(place);
            if !place.sees_available(desc.flags) || desc.flags & VIRTQ_DESC_F_NEXT != 0 {
                break;
            }
            out[usize::from(count)] = desc;
            count += 1;
            place = place.after(1, self.size);
        }
        for nth in (0..count).step_by(PER_LINE) {
            let gpa = self.desc.gpa() + slot(self.published.after(nth, self.size)) as u64;
            self.view.prefetch_store(GuestRange { gpa, len: DESC_SIZE as u32 });
        }
        count.into()
    }

    /// Copies the descriptors of the next chain, of which the first has been read, and is not the last: its buffer ID, and where the chain
    /// after it begins. Each is read exactly once.
    #[inline]
    fn stage(&mut self, first: Descriptor, id: u16) -> Result<(u16, Position), RingFault> {
        let mut place = self.next_avail;
        let (mut descriptor, mut id) = (first, id);
        for _ in 0..self.size - self.owned {
            if !self.table.stage(descriptor, id) {
                break;
            }
            place = place.after(1, self.size);
            // A table stands alone (2.8.19).
            if descriptor.flags & VIRTQ_DESC_F_INDIRECT != 0 {
                return Err(RingFault::BadIndirect(id));
            }
            if descriptor.flags & VIRTQ_DESC_F_NEXT == 0 {
                return self.check_unheld(id).map(|()| (id, place));
            }
            (descriptor, id) = self.load(place);
        }
        Err(RingFault::Loop(self.next_avail.index))
    }

    /// The descriptor at `place` and its buffer ID (2.8.13).
    #[inline]
    fn load(&self, place: Position) -> (Descriptor, u16) {
        load(&self.desc, self.desc.longs(0).as_chunks().0, place)
    }

    #[cold]
    fn take_replay(&mut self, chain: &mut Chain) -> Result<Option<(RingRequest, bool)>, RingFault> {
        let Some(id) = self.replay.next() else { return Ok(None) };
        self.in_flight.add(id);
        self.table.touch(id);
        self.read_chain(id, true, chain).map(|taken| Some((taken, true)))
    }

    /// Reads a chain in flight out of the table.
    #[inline]
    fn read_chain(&mut self, id: u16, replayed: bool, chain: &mut Chain) -> Result<RingRequest, RingFault> {
        let outcome = walk(chain, &self.view, self.table.descriptors(id), self.mode.indirect, id);
        self.walked(outcome, id, replayed)
    }

    /// The chain of `id` has been taken, and read with that outcome.
    #[inline]
    fn walked(
        &mut self,
        outcome: Result<(), RingFault>,
        id: u16,
        replayed: bool,
    ) -> Result<RingRequest, RingFault> {
        match outcome {
            Ok(()) => Ok(RingRequest::new(id, replayed)),
            Err(fault) => {
                // It stays in the table: it was taken, and will never be used.
                self.in_flight.remove(id);
                Err(fault)
            }
        }
    }

    pub(super) fn rewind(&mut self, taken: RingRequest) {
        let RingRequest { head: id, replayed, .. } = taken;
        taken.abandon();
        if replayed {
            self.in_flight.remove(id);
            self.replay.rewind(id);
            self.table.release(id);
            return;
        }
        let count = self.table.len_of(id);
        self.next_avail = self.next_avail.before(count, self.size);
        self.owned -= count;
        self.table.rewind(id);
        self.in_flight.remove(id);
    }

    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.looked.sees_available(self.desc.load_u16(slot(self.looked) + AT_FLAGS))
    }

    #[inline]
    pub(super) fn release(&mut self, taken: &RingRequest) {
        self.table.release(taken.head);
    }

    #[inline]
    pub(super) fn touch(&mut self, taken: &RingRequest) {
        self.table.touch(taken.head);
    }

    pub(super) fn let_go(&mut self) {
        self.table.release_all();
        self.replay.let_go();
    }

    #[inline(always)]
    pub(super) fn complete(&mut self, mut taken: RingRequest, written: u32) {
        taken.open = false;
        self.table.batch(taken.head, written);
        self.replay.completed(taken.head);
        self.in_flight.remove(taken.head);
    }

    #[inline]
    pub(super) fn journal_lost(&self) -> bool {
        self.table.lost()
    }

    #[inline]
    pub(super) fn unpublished(&self) -> u16 {
        self.table.batched()
    }

    #[inline]
    pub(super) fn publish(&mut self) {
        if self.table.batched() == 0 {
            return;
        }
        let before = self.table.descriptors_in_flight();
        let (held_back, after) = self.write_used();
        self.table.prepare(after);
        let shown = before - self.table.descriptors_in_flight();
        let (behind, first) = held_back.split();
        for (at, word) in behind {
            self.view.store_u64(&self.desc, *at, *word);
            kill::here(KillPoint::UsedWritten);
        }
        kill::here(KillPoint::UsedWritten);
        self.view.store_u64(&self.desc, first.0, first.1);
        self.published = after;
        self.owned -= shown;
        self.unconsidered = self.unconsidered.saturating_add(shown.into());
        kill::here(KillPoint::Published);
        self.table.settle();
        self.replay.published();
        kill::here(KillPoint::Settled);
    }

    /// Writes the used descriptors of the batch, but for those in the line of the first one, and says where the next batch begins. The driver
    /// may be looking at that line, which shows the batch: what goes there is stored together, at the end.
    #[inline]
    fn write_used(&self) -> (HeldBack, Position) {
        let mut held_back = HeldBack::default();
        let mut place = self.published;
        for used in self.table.batch_chains() {
            let mut flags = place.used();
            if used.written > 0 {
                flags |= VIRTQ_DESC_F_WRITE;
            }
            let at = slot(place) + AT_LEN;
            let word = u64::from(used.written) | u64::from(used.id) << 32 | u64::from(flags) << 48;
            if !held_back.holds(self.published, place, at, word) {
                self.view.store_u64(&self.desc, at, word);
                kill::here(KillPoint::UsedWritten);
            }
            place = place.after(used.num, self.size);
        }
        (held_back, place)
    }

    #[inline]
    pub(super) fn wants_interrupt(&mut self) -> bool {
        let moved = std::mem::take(&mut self.unconsidered);
        if moved == 0 {
            return false;
        }
        // The used descriptors must be visible before the driver's suppression of interrupts is read, or both sides could wait for each other.
        fence(Ordering::SeqCst);
        let suppression = self.driver.load_u32(0);
        match (suppression >> 16) as u16 & RING_EVENT_FLAGS_MASK {
            RING_EVENT_FLAGS_DISABLE => false,
            RING_EVENT_FLAGS_DESC if self.mode.event_idx => {
                self.published.passed(Position::of_bits(suppression as u16), moved, self.size)
            }
            // What is reserved says nothing: an interrupt too many does no harm.
            _ => true,
        }
    }

    #[inline]
    pub(super) fn ask_for_kick(&mut self) -> bool {
        self.request_kick_at(self.next_avail.bits());
        self.has_work()
    }

    #[inline]
    pub(super) fn ask_for_more(&mut self) -> bool {
        self.request_kick_at(self.looked.bits());
        self.has_more()
    }

    /// A kick when the driver passes `place`. It is visible before the look that follows, or a kick could be lost.
    #[inline]
    fn request_kick_at(&mut self, place: u16) {
        let said = match self.mode.suppression {
            KickSuppression::Kick(said) => said == place || !self.mode.event_idx,
            KickSuppression::Unsaid | KickSuppression::NoKick => false,
        };
        if !said {
            let flags = if self.mode.event_idx { RING_EVENT_FLAGS_DESC } else { RING_EVENT_FLAGS_ENABLE };
            self.store_suppression(place, flags);
            self.mode.suppression = KickSuppression::Kick(place);
        }
        fence(Ordering::SeqCst);
    }

    #[inline]
    pub(super) fn set_polled(&mut self, polled: bool) {
        self.mode.polled = polled;
        if polled && matches!(self.mode.suppression, KickSuppression::Kick(_)) {
            self.refuse_kicks();
        }
    }

    /// Says that kicks are not wanted. (A place that is not renewed would be met again in every other lap.)
    #[inline]
    fn refuse_kicks(&mut self) {
        if self.mode.suppression != KickSuppression::NoKick {
            self.store_suppression(0, RING_EVENT_FLAGS_DISABLE);
            self.mode.suppression = KickSuppression::NoKick;
        }
    }

    /// Both halves of the device's event suppression structure in one store, since drivers read them so.
    #[inline]
    fn store_suppression(&self, place: u16, flags: u16) {
        self.view.store_u32(&self.device, 0, u32::from(place) | u32::from(flags) << 16);
    }
}

/// Where a descriptor's parts lie in it (2.8.13): address, length, buffer ID, flags.
const AT_LEN: usize = 8;
const AT_FLAGS: usize = 14;
/// Descriptors in a line of a cache.
const PER_LINE: usize = LINE / DESC_SIZE as usize;

/// Used descriptors that lie in the line of the first one of a batch: where in the ring, and what is stored there.
#[derive(Default)]
struct HeldBack {
    stores: [(usize, u64); PER_LINE],
    count: usize,
}

impl HeldBack {
    /// Takes the used descriptor at `place`, if it is in the same line as the one at `first`.
    #[inline]
    fn holds(&mut self, first: Position, place: Position, at: usize, word: u64) -> bool {
        let line = |place: Position| usize::from(place.index) / PER_LINE;
        if place.wrap != first.wrap || line(place) != line(first) || self.count == PER_LINE {
            return false;
        }
        self.stores[self.count] = (at, word);
        self.count += 1;
        true
    }

    /// Those behind the first one, and the first one.
    #[inline]
    fn split(&self) -> (&[(usize, u64)], (usize, u64)) {
        (&self.stores[1..self.count.max(1)], self.stores[0])
    }
}

/// The descriptor at `place` of `ring`, whose `halves` are these, and its buffer ID. Its flags are loaded first, with acquire: the driver stores them
/// last.
#[inline(always)]
fn load(ring: &Window, halves: &[[AtomicU64; 2]], place: Position) -> (Descriptor, u16) {
    let [first, second] = &halves[usize::from(place.index)];
    let word = u64::from_le(second.load(Ordering::Acquire));
    let addr = u64::from_le(first.load(Ordering::Acquire));
    let desc = Descriptor { addr, len: word as u32, flags: (word >> 48) as u16 };
    let again = || Descriptor { len: ring.load_u32(slot(place) + AT_LEN), ..desc };
    (desc.once(again), (word >> 32) as u16)
}

/// Where the descriptor at `place` begins.
#[inline]
fn slot(place: Position) -> usize {
    usize::from(place.index) * DESC_SIZE as usize
}

/// Writes down a chain that was taken elsewhere: hostile input.
fn record(table: &mut InFlightTable, flight: &InFlightRequest) -> Result<(), RingFault> {
    let head = flight.head;
    if flight.descriptors.is_empty() || !flight.descriptors.iter().all(|desc| table.stage(*desc, head)) {
        return Err(RingFault::Loop(head));
    }
    table.take(head);
    table.release(head);
    Ok(())
}

/// Puts the buffers of `descriptors` into `chain`.
#[inline]
fn walk<'a>(
    chain: &mut Chain,
    view: &GuestView,
    descriptors: impl Iterator<Item = &'a Descriptor>,
    indirect: bool,
    id: u16,
) -> Result<(), RingFault> {
    chain.clear();
    for descriptor in descriptors {
        if descriptor.flags & VIRTQ_DESC_F_INDIRECT == 0 {
            chain.add(descriptor, id)?;
            continue;
        }
        if !indirect {
            return Err(RingFault::BadIndirect(id));
        }
        let (table, count) = descriptor.table(view, id)?;
        for index in 0..count as usize {
            let (addr, word) = table.pair(index * DESC_SIZE as usize);
            let entry = Descriptor { addr, len: word as u32, flags: (word >> 48) as u16 };
            // 2.8.7: of the flags only WRITE means something here; a table in a table is a mistake all the same.
            if entry.flags & VIRTQ_DESC_F_INDIRECT != 0 {
                return Err(RingFault::BadIndirect(id));
            }
            chain.add(&entry, id)?;
        }
    }
    Ok(())
}
