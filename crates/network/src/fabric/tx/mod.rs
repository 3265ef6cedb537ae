//! The sending half of a queue pair: judging, copying, handing over.
//!
//! ```text
//!   send --> judge --> Delivery::Drop ------------------------------------------------> counted
//!              |-----> Way::Port   plain: filled straight into the receiver's buffer, or copied from `head`, if that is all
//!              |                   large, not taken whole: filled into `scratch`, segmented from there
//!              '-----> Way::Flood  filled into `scratch` once, copied or segmented for each receiver
//! ```
//!
//! What comes out of one frame is the sender's to choose, so it is charged ([`PortTx::spent`]): copies, segments, sums, looks at
//! ports, wake-ups. A flood is interrupted when it has cost what the poller allows ([`PortTx::allow`]), receiver by receiver; the frame stays
//! in `scratch` until [`PortTx::go_on`] has given it to the last.

mod alike;
mod judge;
mod lend;

use std::collections::VecDeque;
use std::sync::Arc;

use ioplane_memory::GuestMap;

use super::Fabric;
use super::capture::Direction;
use super::counts::Tally;
use super::pool::Record;
use super::port::PortShared;
use super::snapshot::{PortEntry, SwitchSnapshot};
use super::snapshots::Subscription;
use super::tx_batch::TxBatch;
use crate::cause::DropReason;
use crate::checksum;
use crate::flow::{flow, steer};
use crate::gso::{Large, Segments};
use crate::offload::{Offload, RxOffloads};
use crate::spec::*;
use crate::vlan::Form;
use crate::{HEAD, LONGEST, MOST_PORTS};
use alike::Alike;
use judge::{CachedVerdict, Delivery};
use lend::Lent;
pub use lend::{LEND_FROM, MOST_LENT, Reclaimed};

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// So many receivers have it in their buffers (or will at the next flush).
    Delivered(u32),
    /// Some of its receivers have it, and [`PortTx::go_on`] is for the others; before the last has it nothing else is sent.
    Begun,
    /// Nobody has it; counted.
    Dropped(DropReason),
    /// `fill` could not read it. Not counted: it is the caller's queue that is faulty.
    Fault,
}

/// Where a frame begins in `scratch`: room for a tag before it.
const BASE: usize = VLAN_HLEN;
/// What a copy costs, of the flooding budget as of a poll, at least.
const COPY_COST: usize = 256;
/// What it costs to find out whether one port may have a flooded frame.
const LOOK_COST: usize = 32;

/// Copies a whole frame into a slice of its length. False if its memory is not there.
pub(crate) type Fill<'a> = dyn FnMut(&mut [u8]) -> bool + 'a;

/// Where the poller of a sending queue puts its frames. Never locks, allocates, blocks or waits for a receiver.
#[derive(Debug)]
pub struct PortTx {
    fabric: Arc<Fabric>,
    shared: Arc<PortShared>,
    /// Which of the port's pairs it belongs to.
    pair: u16,
    snapshot: Arc<SwitchSnapshot>,
    subscription: Subscription,
    batch: TxBatch,
    scratch: Box<[u8]>,
    /// Receivers of a flood or of segments that do not have the frame yet, and the form that each gets; the next one is the last.
    targets: Vec<(u16, Form)>,
    /// The frame in `scratch`, while there are any.
    rest: Option<Rest>,
    /// What the frames of this poll may cost before a flood is interrupted.
    allowed: usize,
    /// What was found for the last frame, for those like it in the same batch.
    judged: Option<CachedVerdict>,
    /// Where the frames before went, for those like them in the same batch.
    alike: Option<Alike>,
    tally: Tally,
    /// Whether a batch has begun.
    begun: bool,
    /// Frames that are lent, in order. As long as there are any the snapshot stays.
    lent: VecDeque<Lent>,
    /// Maps of which a lent frame had the last reference; see `keep_last`.
    maps: Vec<Arc<GuestMap>>,
}

/// A frame as it is offered.
#[derive(Clone, Copy)]
struct Offered<'a> {
    head: &'a [u8],
    len: usize,
    offload: Offload,
}

impl Offered<'_> {
    /// Whether it is still a frame in that form: one whose tag is taken off may have been nothing else.
    #[inline]
    fn whole(&self, form: Form) -> bool {
        form != Form::Strip || self.len >= ETH_HLEN + VLAN_HLEN
    }

    /// Whether a frame that is not to be segmented is short enough for `shared`, in the form that it has there.
    #[inline]
    fn fits(&self, shared: &PortShared, form: Form) -> bool {
        self.offload.is_large() || self.len.saturating_add_signed(form.growth()) <= shared.longest()
    }
}

/// A frame in `scratch` that some of its receivers do not have.
#[derive(Debug, Clone, Copy)]
struct Rest {
    head: [u8; HEAD],
    len: usize,
    offload: Offload,
    copies: u32,
    /// The first receiver that could not have it, and why.
    refusal: Option<DropReason>,
}

impl Rest {
    fn offered(&self) -> Offered<'_> {
        Offered { head: &self.head[..self.len.min(HEAD)], len: self.len, offload: self.offload }
    }
}

impl PortTx {
    pub(crate) fn new(fabric: Arc<Fabric>, shared: Arc<PortShared>, pair: u16) -> Self {
        let (snapshot, subscription) = fabric.snapshots.subscribe();
        PortTx {
            batch: TxBatch::new(shared.place.slot),
            fabric,
            shared,
            pair,
            snapshot,
            subscription,
            scratch: vec![0; BASE + LONGEST].into(),
            targets: Vec::with_capacity(usize::from(MOST_PORTS)),
            rest: None,
            allowed: usize::MAX,
            judged: None,
            alike: None,
            tally: Tally::default(),
            begun: false,
            lent: VecDeque::with_capacity(MOST_LENT),
            maps: Vec::with_capacity(MOST_LENT),
        }
    }

    /// Sends one frame of `len` bytes.
    ///
    /// `head` is a private copy of its first bytes, all of them or [`HEAD`]: by these it is judged. `fill` copies the whole frame,
    /// `len` bytes; it is called at most once; perhaps not at all, for a frame that is dropped first or that `head` has all of. What
    /// it copies into the place of the Ethernet header and tag is replaced by `head`, so that memory that changes meanwhile changes nothing
    /// that was judged.
    #[inline]
    pub fn send(
        &mut self,
        head: &[u8],
        len: usize,
        offload: Offload,
        fill: &mut dyn FnMut(&mut [u8]) -> bool,
    ) -> Sent {
        debug_assert_eq!(head.len(), len.min(HEAD));
        debug_assert!(self.rest.is_none(), "the frame before is not with all of its receivers");
        if !self.begun {
            self.begin();
        }
        let flags = offload.flags & believed(self.shared.uplink);
        // Told apart before anything is stored: a byte written and read again as part of more costs ten nanoseconds.
        let plain = flags | offload.gso == 0;
        let offload = if plain { Offload::NONE } else { Offload { flags, ..offload } };
        let offered = Offered { head, len, offload };
        let sent = match self.judge(&offered) {
            Delivery::Port { slot, form } if plain => {
                let sent = self.direct::<true>(&offered, slot, form, fill).map(Some);
                if sent.is_ok() {
                    self.note_delivery(head, slot, form);
                }
                sent
            }
            Delivery::Port { slot, form } => {
                if self.is_whole(slot, &offered) {
                    self.direct::<false>(&offered, slot, form, fill).map(Some)
                } else {
                    self.targets.clear();
                    self.targets.push((slot, form));
                    self.spread(&offered, fill)
                }
            }
            Delivery::Flood { vlan, tag } => self.flood(&offered, vlan, tag, fill),
            Delivery::Drop(cause) => Err(Refusal::Here(cause)),
            Delivery::DropThere { slot, cause } => Err(Refusal::There(slot, cause)),
        };
        match sent {
            Ok(Some(copies)) => {
                self.tally.frame(len);
                Sent::Delivered(copies)
            }
            Ok(None) => Sent::Begun,
            Err(refusal) => self.refuse(&offered, refusal),
        }
    }

    /// Whether a frame was [`Sent::Begun`].
    #[inline]
    pub fn has_begun(&self) -> bool {
        self.rest.is_some()
    }

    /// Goes on with a frame that was [`Sent::Begun`], to one receiver at least. What it gives is for that frame: `Begun` again, or
    /// what became of it; `None` if there is no such frame.
    #[inline]
    pub fn go_on(&mut self) -> Option<Sent> {
        self.rest.is_some().then(|| self.finish_rest())
    }

    #[cold]
    fn finish_rest(&mut self) -> Sent {
        if !self.begun {
            self.begin();
        }
        let Some(rest) = self.rest.take() else { return Sent::Delivered(0) };
        match self.spread_some(rest) {
            Ok(None) => Sent::Begun,
            Ok(Some(copies)) => {
                self.tally.frame(rest.len);
                Sent::Delivered(copies)
            }
            Err(refusal) => self.refuse(&rest.offered(), refusal),
        }
    }

    /// Lets the frames from here on cost so much beyond their own bytes, in bytes copied, before a flood is interrupted. At first there
    /// is no limit.
    #[inline]
    pub fn allow(&mut self, cost: usize) {
        self.allowed = cost;
        self.batch.spent = 0;
    }

    /// What has been spent since [`PortTx::allow`].
    #[inline]
    pub fn spent(&self) -> usize {
        self.batch.spent
    }

    /// Counts a frame that was found to be wrong before it could be offered.
    #[cold]
    pub fn count(&mut self, cause: DropReason) {
        if !self.begun {
            self.begin();
        }
        self.tally.drop(cause, 1);
    }

    /// Ends a batch, at the end of every poll: hands the open buffers over and wakes their receivers if they sleep.
    #[inline]
    pub fn flush(&mut self) {
        if self.begun {
            self.batch.flush(&self.snapshot);
            self.shared.sent.add(&mut self.tally);
            (self.judged, self.alike) = (None, None);
            self.begun = false;
        }
    }

    /// The first frame of a batch: whatever has been found may have changed since.
    #[inline]
    fn begin(&mut self) {
        self.begun = true;
        if !self.subscription.is_newer(&self.fabric.snapshots)
            || (!self.lent.is_empty() && !self.recall_all())
        {
            return;
        }
        if let Some(snapshot) = self.subscription.newer(&self.fabric.snapshots) {
            self.stay_with(&snapshot);
            // The control side holds on to the old snapshot for longer than we do: nothing is freed here.
            self.snapshot = snapshot;
        }
    }

    /// Of the receivers of a frame that was begun, those that are still plugged in where they were.
    fn stay_with(&mut self, new: &SwitchSnapshot) {
        let PortTx { snapshot, targets, .. } = self;
        targets.retain(|(slot, _)| match (snapshot.entry(*slot), new.entry(*slot)) {
            (Some(before), Some(now)) => Arc::ptr_eq(&before.shared, &now.shared),
            _ => false,
        });
    }

    #[cold]
    fn refuse(&mut self, offered: &Offered<'_>, refusal: Refusal) -> Sent {
        let cause = match refusal {
            Refusal::Fault => return Sent::Fault,
            Refusal::Here(cause) => {
                self.tally.drop(cause, 1);
                cause
            }
            Refusal::There(slot, cause) => {
                self.tally.frame(offered.len);
                if let Some(entry) = self.snapshot.entry(slot)
                    && cause != DropReason::Full
                {
                    entry.shared.received.drop(cause, 1);
                }
                cause
            }
            // It got as far as being copied, and captured.
            Refusal::Counted(cause) => {
                self.tally.frame(offered.len);
                return Sent::Dropped(cause);
            }
        };
        if let Some(ring) = self.snapshot.entry(self.shared.place.slot).and_then(|entry| entry.ring.as_ref())
        {
            ring.put(Direction::Sent, offered.head, offered.len, offered.offload);
        }
        Sent::Dropped(cause)
    }

    /// To one receiver. `PLAIN`: nothing is left to do for the frame, which is known when this is compiled; half of the time
    /// that a small frame takes would go into carrying the nothing about.
    #[inline]
    fn direct<const PLAIN: bool>(
        &mut self,
        offered: &Offered<'_>,
        slot: u16,
        form: Form,
        fill: &mut Fill<'_>,
    ) -> Result<u32, Refusal> {
        let Some(entry) = self.snapshot.entry(slot) else { return Err(Refusal::Here(DropReason::NoPath)) };
        let base = if let Form::Insert(_) = form { VLAN_HLEN } else { 0 };
        let pair = pair(&self.shared, self.pair, &entry.shared, offered.head);
        let Some(mut room) = self.batch.room(&self.snapshot, &entry.shared, pair, base + offered.len) else {
            return Err(Refusal::There(slot, DropReason::Full));
        };
        let own = self.snapshot.entry(self.shared.place.slot);
        let bytes = &mut room.bytes()[..base + offered.len];
        // All of a small one is there already, and is what was judged.
        let small = offered.head.len() == offered.len;
        if small {
            bytes[base..].copy_from_slice(offered.head);
        } else if !fill(&mut bytes[base..]) {
            return Err(Refusal::Fault);
        }
        if let Some(ring) = own.and_then(|own| own.ring.as_ref()) {
            Form::AsIs.give(bytes, base, offered.head);
            ring.put(Direction::Sent, &bytes[base..], offered.len, offered.offload);
        }
        let start = if small && form == Form::AsIs { base } else { form.give(bytes, base, offered.head) };
        let frame = &mut bytes[start..];
        let mut summed = 0;
        let offload = if PLAIN {
            Offload::NONE
        } else {
            let (offload, takes) = (offered.offload.shifted(form.growth()), entry.shared.takes());
            if offload.needs_csum() && !takes.checksum {
                summed = frame.len();
            }
            finish(frame, offload, takes).map_err(Refusal::Here)?
        };
        let record = Record { len: frame.len() as u32, skew: start as u8, offload };
        if let Some(ring) = &entry.ring {
            ring.put(Direction::Received, frame, frame.len(), offload);
        }
        room.commit(record);
        if !PLAIN {
            self.batch.spent += summed;
        }
        Ok(1)
    }

    /// Whether a receiver takes a frame unsegmented.
    #[inline]
    fn is_whole(&self, slot: u16, offered: &Offered<'_>) -> bool {
        self.snapshot.entry(slot).is_none_or(|entry| entry.shared.takes().whole(offered.offload.gso))
    }

    /// To everybody in a VLAN that may have it.
    #[cold]
    fn flood(
        &mut self,
        offered: &Offered<'_>,
        vlan: u16,
        tag: Option<u16>,
        fill: &mut Fill<'_>,
    ) -> Result<Option<u32>, Refusal> {
        let (own, snapshot) = (&self.shared, &self.snapshot);
        self.batch.spent += snapshot.taken.len() * LOOK_COST;
        let to = judge::destination(offered.head);
        self.targets.clear();
        let others = snapshot.taken.iter().rev().filter(|slot| **slot != own.place.slot);
        self.targets.extend(others.filter_map(|slot| {
            let shared = &snapshot.entry(*slot)?.shared;
            let form = judge::gate(own, shared, to, vlan, tag).ok()?;
            (offered.whole(form) && offered.fits(shared, form)).then_some((*slot, form))
        }));
        if self.targets.is_empty() {
            return Err(Refusal::Here(DropReason::NoPath));
        }
        let cost = (offered.len.max(COPY_COST) * self.targets.len()) as u64;
        if !own.budget.spend(cost, self.fabric.elapsed().as_nanos() as u64) {
            self.targets.clear();
            return Err(Refusal::Here(DropReason::Storm));
        }
        self.spread(offered, fill)
    }

    /// Begins to deliver a frame to `targets`, from `scratch`.
    fn spread(&mut self, offered: &Offered<'_>, fill: &mut Fill<'_>) -> Result<Option<u32>, Refusal> {
        let PortTx { snapshot, shared, scratch, .. } = self;
        let end = BASE + offered.len;
        if !fill(&mut scratch[BASE..end]) {
            return Err(Refusal::Fault);
        }
        let start = Form::AsIs.give(scratch, BASE, offered.head);
        // A lie is a lie to everybody, and found before anybody has been given anything.
        check(&scratch[start..end], &offered.offload).map_err(Refusal::Here)?;
        if let Some(ring) = snapshot.entry(shared.place.slot).and_then(|own| own.ring.as_ref()) {
            ring.put(Direction::Sent, &scratch[start..end], offered.len, offered.offload);
        }
        let mut head = [0; HEAD];
        head[..offered.head.len()].copy_from_slice(offered.head);
        let (len, offload) = (offered.len, offered.offload);
        self.spread_some(Rest { head, len, offload, copies: 0, refusal: None })
    }

    /// Delivers what is in `scratch`, in the form that each receiver wants, to one of them at least and to the others as long as
    /// [`PortTx::allow`] lets it. `None`: some do not have it yet.
    fn spread_some(&mut self, mut rest: Rest) -> Result<Option<u32>, Refusal> {
        let PortTx { snapshot, batch, scratch, targets, allowed, shared, pair: own_pair, .. } = self;
        let end = BASE + rest.len;
        while let Some((slot, form)) = targets.pop() {
            let Some(entry) = snapshot.entry(slot) else { continue };
            let offered = rest.offered();
            let pair = pair(shared, *own_pair, &entry.shared, offered.head);
            let offload = offered.offload.shifted(form.growth());
            let start = form.give(scratch, BASE, offered.head);
            match deliver(batch, snapshot, entry, pair, &scratch[start..end], offload) {
                Ok(()) => rest.copies += 1,
                Err(cause) => {
                    if cause != DropReason::Full {
                        entry.shared.received.drop(cause, 1);
                    }
                    rest.refusal.get_or_insert(cause);
                }
            }
            if !targets.is_empty() && batch.spent >= *allowed {
                self.rest = Some(rest);
                return Ok(None);
            }
        }
        match rest.refusal {
            // Counted there already, for each of them.
            Some(cause) if rest.copies == 0 => Err(Refusal::Counted(cause)),
            _ => Ok(Some(rest.copies)),
        }
    }
}

/// Why a frame is not delivered.
#[derive(Debug, Clone, Copy)]
enum Refusal {
    /// Counted on its sender.
    Here(DropReason),
    /// Counted on a receiver.
    There(u16, DropReason),
    /// Counted on its receivers already.
    Counted(DropReason),
    Fault,
}

/// The flags in which a sender is believed: only the host's own network knows that a sum is right.
#[inline]
fn believed(trusted: bool) -> u8 {
    VIRTIO_NET_HDR_F_NEEDS_CSUM | if trusted { VIRTIO_NET_HDR_F_DATA_VALID } else { 0 }
}

/// The pair of receiver `to` that a frame goes to which `from` sends on `own_pair` (docs/decisions/0054).
///
/// A sender that uses as many pairs as the receiver has steered its flows itself: what it sends on one pair arrives at one, and the order of a
/// flow is that of the ring. Fewer pairs would leave some of the receiver's without frames: then flows are spread by their number.
#[inline(always)]
fn pair(from: &PortShared, own_pair: u16, to: &PortShared, head: &[u8]) -> u16 {
    fixed_pair(from, own_pair, to).unwrap_or_else(|| steer(flow(head), to.active()))
}

/// [`pair`], if it is the same for each frame.
#[inline(always)]
fn fixed_pair(from: &PortShared, own_pair: u16, to: &PortShared) -> Option<u16> {
    match to.active() {
        1 => Some(0),
        pairs if from.active() < pairs => None,
        pairs if own_pair < pairs => Some(own_pair),
        pairs => Some(own_pair % pairs),
    }
}

/// Whether what the offload header says is so.
#[inline]
fn check(frame: &[u8], offload: &Offload) -> Result<(), DropReason> {
    if offload.is_large() {
        Large::check(frame, offload)?;
    } else if offload.needs_csum() {
        checksum::place(frame.len(), offload)?;
    }
    Ok(())
}

/// Does to a frame in its receiver's buffer what the receiver does not take; says what is left to do.
#[inline]
fn finish(frame: &mut [u8], mut offload: Offload, takes: RxOffloads) -> Result<Offload, DropReason> {
    if offload.is_large() {
        offload.hdr_len = Large::check(frame, &offload)?.headers() as u16;
        return Ok(offload);
    }
    if offload.needs_csum() {
        if takes.checksum {
            checksum::place(frame.len(), &offload)?;
            return Ok(Offload { hdr_len: 0, gso_size: 0, ..offload });
        }
        checksum::complete(frame, &offload)?;
    }
    let flags = if takes.checksum { offload.flags & VIRTIO_NET_HDR_F_DATA_VALID } else { 0 };
    Ok(Offload { flags, ..Offload::NONE })
}

/// Puts a frame, which is not to change, into the buffers of one receiver: whole, or in segments.
fn deliver(
    batch: &mut TxBatch,
    snapshot: &SwitchSnapshot,
    entry: &PortEntry,
    pair: u16,
    frame: &[u8],
    offload: Offload,
) -> Result<(), DropReason> {
    let shared = &entry.shared;
    let takes = shared.takes();
    // Where the sum is ours to make, that is as much work as the copy.
    let times = 1 + usize::from(!takes.checksum && offload.needs_csum());
    if takes.whole(offload.gso) {
        batch.spent += frame.len().max(COPY_COST) * times;
        let mut room = batch.room(snapshot, shared, pair, frame.len()).ok_or(DropReason::Full)?;
        let bytes = &mut room.bytes()[..frame.len()];
        bytes.copy_from_slice(frame);
        let offload = finish(bytes, offload, takes)?;
        if let Some(ring) = &entry.ring {
            ring.put(Direction::Received, bytes, bytes.len(), offload);
        }
        room.commit(Record { len: frame.len() as u32, skew: 0, offload });
        return Ok(());
    }
    let large = Large::check(frame, &offload)?;
    if large.longest(frame.len()) > shared.longest() {
        return Err(DropReason::Giant);
    }
    let flags = if takes.checksum { VIRTIO_NET_HDR_F_DATA_VALID } else { 0 };
    let offload = Offload { flags, ..Offload::NONE };
    let mut segments = Segments::new(frame, large);
    while let Some(len) = segments.next_len() {
        // Copied, and summed.
        batch.spent += 2 * len + COPY_COST;
        let Some(mut room) = batch.room(snapshot, shared, pair, len) else {
            // This one is counted; nobody comes for the others before the end of this poll.
            batch.full(snapshot, shared, pair, segments.left() - 1);
            return Err(DropReason::Full);
        };
        let bytes = &mut room.bytes()[..len];
        segments.write(bytes);
        if let Some(ring) = &entry.ring {
            ring.put(Direction::Received, bytes, len, offload);
        }
        room.commit(Record { len: len as u32, skew: 0, offload });
    }
    Ok(())
}

impl std::ops::Drop for PortTx {
    fn drop(&mut self) {
        self.revoke_all();
        self.flush();
    }
}
