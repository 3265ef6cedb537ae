//! Packed virtqueues, device side (virtio 1.3, section 2.8).
//!
//! ```text
//!   descriptors:  ... | used, shown | completed, not shown | in flight | available | free ...
//!                                   ^ published            ^ next_used ^ next_avail
//! ```
//!
//! A chain is read at `next_avail`; its used descriptor is written at `next_used`, in the order in which chains are
//! completed, and both places move on by the length of their chain. Used descriptors overwrite what was in flight, so the
//! descriptors of every chain are kept in the [`InFlightTable`]. Of a batch the flags of the first used descriptor are
//! written last: the driver looks at that one place, and sees all or nothing.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ioplane_memory::{GuestRange, GuestView, Window};

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
    next_used: Position,
    /// Where the first used descriptor goes that the driver has not been shown.
    published: Position,
    /// Its flags, written when it is shown.
    held_back: u16,
    /// Descriptors published since the driver was last considered for an interrupt.
    unconsidered: u32,
    mode: Mode,
    in_flight: InFlightSet,
    /// Descriptors taken that the driver has not been shown as used.
    owned: u16,
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
            next_used: used,
            published: used,
            held_back: 0,
            unconsidered: 0,
            mode: Mode::of(features),
            in_flight: InFlightSet::new(size),
            owned,
            table,
            replay,
        };
        if crashed {
            ring.clean();
        }
        Ok(ring)
    }

    /// A process that died between completing and showing a batch leaves used descriptors behind the first one. What is
    /// completed now may lie elsewhere, and the driver must not find those. Everything up to `next_avail` is ours to write.
    fn clean(&self) {
        for ahead in 0..self.owned {
            let place = self.next_used.after(ahead, self.size);
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
        let (id, after) = self.stage().inspect_err(|_| self.table.unstage())?;
        self.took(id, after);
        self.desc.prefetch(slot(after));
        self.read_chain(id, false, chain).map(|taken| Some((taken, false)))
    }

    /// Writes down that the chain `id`, which is staged in the table, has been taken; the next one begins at `after`.
    #[inline]
    fn took(&mut self, id: u16, after: Position) {
        if self.mode.polled {
            self.refuse_kicks();
        }
        self.in_flight.add(id);
        self.owned += self.table.staged();
        self.table.take(id);
        self.next_avail = after;
        kill::here(KillPoint::Journalled);
    }

    #[inline]
    pub(super) fn take_plain(&mut self, touch: BufferAccess, most: usize, batch: &mut Batch) {
        if !self.replay.is_empty() || !self.has_work() {
            return;
        }
        let room = usize::from(self.size - self.owned).min(MOST_PLAIN - batch.0.len());
        let count = room.min(most) as u16;
        // Used descriptors go to the same lines, or to those just before.
        let ask = |place| {
            let gpa = self.desc.gpa() + slot(place) as u64;
            self.view.prefetch_store(GuestRange { gpa, len: DESC_SIZE as u32 });
        };
        for nth in (0..count).step_by(LINE / DESC_SIZE as usize) {
            ask(self.next_avail.after(nth, self.size));
            ask(self.next_used.after(nth, self.size));
        }
        const KIND: u16 = VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_WRITE;
        for _ in 0..count {
            let (desc, id) = self.load(self.next_avail);
            if !self.next_avail.sees_available(desc.flags) || desc.flags & KIND != touch.flags() {
                return;
            }
            kill::here(KillPoint::Seen);
            if self.in_flight.holds(id) != Some(false) || !self.table.stage(desc, id) {
                return;
            }
            let buffer = GuestRange { gpa: desc.addr, len: desc.len };
            touch.ask(&self.view, buffer);
            self.took(id, self.next_avail.after(1, self.size));
            batch.0.push((RingRequest::new(id, false), buffer));
        }
    }

    /// Copies the descriptors of the next chain: its buffer ID, and where the chain after it begins. Each is read exactly
    /// once.
    #[inline]
    fn stage(&mut self) -> Result<(u16, Position), RingFault> {
        let mut place = self.next_avail;
        for nth in 0..self.size - self.owned {
            let (descriptor, id) = self.load(place);
            if !self.table.stage(descriptor, id) {
                break;
            }
            place = place.after(1, self.size);
            let next = descriptor.flags & VIRTQ_DESC_F_NEXT != 0;
            // A table stands alone (2.8.19).
            if descriptor.flags & VIRTQ_DESC_F_INDIRECT != 0 && (next || nth > 0 || !self.mode.indirect) {
                return Err(RingFault::BadIndirect(id));
            }
            if !next {
                return match self.in_flight.holds(id) {
                    None => Err(RingFault::BadDescriptor(id)),
                    Some(true) => Err(RingFault::HeadInFlight(id)),
                    Some(false) => Ok((id, place)),
                };
            }
        }
        Err(RingFault::Loop(self.next_avail.index))
    }

    /// The descriptor at `place` and its buffer ID (2.8.13).
    #[inline]
    fn load(&self, place: Position) -> (Descriptor, u16) {
        let (table, at) = (self.desc.longs(0), 2 * usize::from(place.index));
        let word = u64::from_le(table[at + 1].load(Ordering::Acquire));
        let addr = u64::from_le(table[at].load(Ordering::Acquire));
        let desc = Descriptor { addr, len: word as u32, flags: (word >> 48) as u16 };
        let again = || Descriptor { len: self.desc.load_u32(slot(place) + AT_LEN), ..desc };
        (desc.once(again), (word >> 32) as u16)
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
        let id = taken.head;
        let first = self.table.batched() == 0;
        let count = self.table.batch(id);
        let mut flags = self.next_used.used();
        if written > 0 {
            flags |= VIRTQ_DESC_F_WRITE;
        }
        let at = slot(self.next_used);
        if first {
            // The driver looks here next: everything but the flags, which show the whole batch.
            self.held_back = flags;
            self.view.store_u32(&self.desc, at + AT_LEN, written);
            self.view.store_u16(&self.desc, at + AT_ID, id);
        } else {
            let word = u64::from(written) | u64::from(id) << 32 | u64::from(flags) << 48;
            self.view.store_u64(&self.desc, at + AT_LEN, word);
        }
        self.replay.completed(id);
        self.next_used = self.next_used.after(count, self.size);
        self.in_flight.remove(id);
        kill::here(KillPoint::UsedWritten);
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
        self.table.prepare(self.next_used);
        let shown = before - self.table.descriptors_in_flight();
        self.view.store_u16(&self.desc, slot(self.published) + AT_FLAGS, self.held_back);
        self.published = self.next_used;
        self.owned -= shown;
        self.unconsidered = self.unconsidered.saturating_add(shown.into());
        kill::here(KillPoint::Published);
        self.table.settle();
        self.replay.published();
        kill::here(KillPoint::Settled);
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
const AT_ID: usize = 12;
const AT_FLAGS: usize = 14;

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
