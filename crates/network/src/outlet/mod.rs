//! The sending half of a queue pair: judging, copying, handing over.
//!
//! ```text
//!   send --> judge --> Way::Drop ------------------------------------------------> counted
//!              |-----> Way::Port   plain: filled straight into the receiver's tray, or copied from `head`, if that is all
//!              |                   large, not taken whole: filled into `scratch`, segmented from there
//!              '-----> Way::Flood  filled into `scratch` once, copied or segmented for each receiver
//! ```

mod judge;

use std::sync::Arc;

use crate::capture::Direction;
use crate::cause::Drop;
use crate::checksum;
use crate::counts::Tally;
use crate::flow::{flow, steer};
use crate::gso::{Large, Segments};
use crate::offload::{Offload, Takes};
use crate::opens::Opens;
use crate::plan::{Face, Plan};
use crate::shelf::Record;
use crate::spec::*;
use crate::station::Station;
use crate::switch::{PlanMail, Switch};
use crate::vlan::Form;
use crate::{HEAD, LONGEST, MOST_PORTS};
use judge::{Judged, Way};

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// So many receivers have it in their trays (or will at the next flush).
    Delivered(u32),
    /// Nobody has it; counted.
    Dropped(Drop),
    /// `fill` could not read it. Not counted: it is the caller's queue that is faulty.
    Fault,
}

/// Where a frame begins in `scratch`: room for a tag before it.
const BASE: usize = VLAN_HLEN;
/// What a copy costs of the flooding budget, at least.
const COPY_COST: u64 = 256;

/// Copies a whole frame into a slice of its length. False if its memory is not there.
pub(crate) type Fill<'a> = dyn FnMut(&mut [u8]) -> bool + 'a;

/// Where the poller of a sending queue puts its frames. Never locks, allocates, blocks or waits for a receiver.
#[derive(Debug)]
pub struct Outlet {
    switch: Arc<Switch>,
    station: Arc<Station>,
    version: u64,
    plan: Arc<Plan>,
    mail: Arc<PlanMail>,
    opens: Opens,
    scratch: Box<[u8]>,
    /// Receivers of a flood, and the form that each gets.
    targets: Vec<(u16, Form)>,
    /// What was found for the last frame, for those like it in the same batch.
    judged: Option<Judged>,
    tally: Tally,
    /// Whether a batch has begun.
    begun: bool,
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

    /// Whether a frame that is not to be segmented is short enough for `station`, in the form that it has there.
    #[inline]
    fn fits(&self, station: &Station, form: Form) -> bool {
        self.offload.is_large() || self.len.saturating_add_signed(form.growth()) <= station.longest()
    }
}

impl Outlet {
    pub(crate) fn new(switch: Arc<Switch>, station: Arc<Station>) -> Self {
        let (version, plan, mail) = switch.enter();
        Outlet {
            opens: Opens::new(station.place.slot),
            switch,
            station,
            version,
            plan,
            mail,
            scratch: vec![0; BASE + LONGEST].into(),
            targets: Vec::with_capacity(usize::from(MOST_PORTS)),
            judged: None,
            tally: Tally::default(),
            begun: false,
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
        if !self.begun {
            self.begin();
        }
        let flags = offload.flags & believed(self.station.uplink);
        // Told apart before anything is stored: a byte written and read again as part of more costs ten nanoseconds.
        let plain = flags | offload.gso == 0;
        let offload = if plain { Offload::NONE } else { Offload { flags, ..offload } };
        let offered = Offered { head, len, offload };
        let sent = match self.judge(&offered) {
            Way::Port { slot, form } if plain => self.direct::<true>(&offered, slot, form, fill),
            Way::Port { slot, form } => self.direct::<false>(&offered, slot, form, fill),
            Way::Flood { vlan, tag } => self.flood(&offered, vlan, tag, fill),
            Way::Drop(cause) => Err(Refusal::Here(cause)),
            Way::DropThere { slot, cause } => Err(Refusal::There(slot, cause)),
        };
        match sent {
            Ok(copies) => {
                self.tally.frame(len);
                Sent::Delivered(copies)
            }
            Err(refusal) => self.refuse(&offered, refusal),
        }
    }

    /// Counts a frame that was found to be wrong before it could be offered.
    #[cold]
    pub fn count(&mut self, cause: Drop) {
        if !self.begun {
            self.begin();
        }
        self.tally.drop(cause, 1);
    }

    /// Ends a batch, at the end of every poll: hands the open trays over and wakes their receivers if they sleep.
    #[inline]
    pub fn flush(&mut self) {
        if self.begun {
            self.opens.flush(&self.plan);
            self.station.sent.add(&mut self.tally);
            self.judged = None;
            self.begun = false;
        }
    }

    /// The first frame of a batch: whatever has been found may have changed since.
    #[inline]
    fn begin(&mut self) {
        self.begun = true;
        let version = self.switch.version();
        if version != self.version {
            // The control side holds on to the old plan for longer than we do: nothing is freed here.
            if let Some(plan) = self.mail.pop() {
                self.plan = plan;
            }
            self.version = version;
        }
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
                if let Some(face) = self.plan.face(slot)
                    && cause != Drop::Full
                {
                    face.station.received.drop(cause, 1);
                }
                cause
            }
            // It got as far as being copied, and captured.
            Refusal::Counted(cause) => {
                self.tally.frame(offered.len);
                return Sent::Dropped(cause);
            }
        };
        if let Some(ring) = self.plan.face(self.station.place.slot).and_then(|face| face.ring.as_ref()) {
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
        let Some(face) = self.plan.face(slot) else { return Err(Refusal::Here(Drop::NoPath)) };
        if !PLAIN && !face.station.takes().whole(offered.offload.gso) {
            if !fill(&mut self.scratch[BASE..BASE + offered.len]) {
                return Err(Refusal::Fault);
            }
            return self.spread(offered, [(slot, form)].into_iter());
        }
        let base = if let Form::Insert(_) = form { VLAN_HLEN } else { 0 };
        let pair = pair(&face.station, offered.head);
        let Some(mut room) = self.opens.room(&self.plan, &face.station, pair, base + offered.len) else {
            return Err(Refusal::There(slot, Drop::Full));
        };
        let own = self.plan.face(self.station.place.slot);
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
        let offload = if PLAIN {
            Offload::NONE
        } else {
            let offload = offered.offload.shifted(form.growth());
            finish(frame, offload, face.station.takes()).map_err(Refusal::Here)?
        };
        let record = Record { len: frame.len() as u32, skew: start as u8, offload };
        if let Some(ring) = &face.ring {
            ring.put(Direction::Received, frame, frame.len(), offload);
        }
        room.commit(record);
        Ok(1)
    }

    /// To everybody in a VLAN that may have it.
    #[cold]
    fn flood(
        &mut self,
        offered: &Offered<'_>,
        vlan: u16,
        tag: Option<u16>,
        fill: &mut Fill<'_>,
    ) -> Result<u32, Refusal> {
        let (own, plan) = (&self.station, &self.plan);
        let to = judge::destination(offered.head);
        self.targets.clear();
        let others = plan.taken.iter().filter(|slot| **slot != own.place.slot);
        self.targets.extend(others.filter_map(|slot| {
            let station = &plan.face(*slot)?.station;
            let form = judge::gate(own, station, to, vlan, tag).ok()?;
            (offered.whole(form) && offered.fits(station, form)).then_some((*slot, form))
        }));
        if self.targets.is_empty() {
            return Err(Refusal::Here(Drop::NoPath));
        }
        let cost = (offered.len as u64).max(COPY_COST) * self.targets.len() as u64;
        if !own.budget.spend(cost, self.switch.elapsed().as_nanos() as u64) {
            return Err(Refusal::Here(Drop::Storm));
        }
        if !fill(&mut self.scratch[BASE..BASE + offered.len]) {
            return Err(Refusal::Fault);
        }
        let targets = std::mem::take(&mut self.targets);
        let spread = self.spread(offered, targets.iter().copied());
        self.targets = targets;
        spread
    }

    /// Delivers what is in `scratch`, in the form that each receiver wants.
    fn spread(
        &mut self,
        offered: &Offered<'_>,
        targets: impl Iterator<Item = (u16, Form)>,
    ) -> Result<u32, Refusal> {
        let Outlet { plan, station, opens, scratch, .. } = self;
        let end = BASE + offered.len;
        let start = Form::AsIs.give(scratch, BASE, offered.head);
        // A lie is a lie to everybody, and found before anybody has been given anything.
        check(&scratch[start..end], &offered.offload).map_err(Refusal::Here)?;
        if let Some(ring) = plan.face(station.place.slot).and_then(|own| own.ring.as_ref()) {
            ring.put(Direction::Sent, &scratch[start..end], offered.len, offered.offload);
        }
        let (mut copies, mut refusal) = (0, None);
        for (slot, form) in targets {
            let Some(face) = plan.face(slot) else { continue };
            let start = form.give(scratch, BASE, offered.head);
            let offload = offered.offload.shifted(form.growth());
            match deliver(opens, plan, face, pair(&face.station, offered.head), &scratch[start..end], offload)
            {
                Ok(()) => copies += 1,
                Err(cause) => {
                    if cause != Drop::Full {
                        face.station.received.drop(cause, 1);
                    }
                    refusal.get_or_insert((slot, cause));
                }
            }
        }
        match refusal {
            // Counted there already, for each of them.
            Some((_, cause)) if copies == 0 => Err(Refusal::Counted(cause)),
            _ => Ok(copies),
        }
    }
}

/// Why a frame is not delivered.
#[derive(Debug, Clone, Copy)]
enum Refusal {
    /// Counted on its sender.
    Here(Drop),
    /// Counted on a receiver.
    There(u16, Drop),
    /// Counted on its receivers already.
    Counted(Drop),
    Fault,
}

/// The flags in which a sender is believed: only the host's own network knows that a sum is right.
#[inline]
fn believed(trusted: bool) -> u8 {
    VIRTIO_NET_HDR_F_NEEDS_CSUM | if trusted { VIRTIO_NET_HDR_F_DATA_VALID } else { 0 }
}

/// The pair of a receiver that a frame's flow goes to.
#[inline(always)]
fn pair(station: &Station, head: &[u8]) -> u16 {
    match station.active() {
        1 => 0,
        pairs => steer(flow(head), pairs),
    }
}

/// Whether what the offload header says is so.
#[inline]
fn check(frame: &[u8], offload: &Offload) -> Result<(), Drop> {
    if offload.is_large() {
        Large::check(frame, offload)?;
    } else if offload.needs_csum() {
        checksum::place(frame.len(), offload)?;
    }
    Ok(())
}

/// Does to a frame in its receiver's tray what the receiver does not take; says what is left to do.
#[inline]
fn finish(frame: &mut [u8], mut offload: Offload, takes: Takes) -> Result<Offload, Drop> {
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

/// Puts a frame, which is not to change, into the trays of one receiver: whole, or in segments.
fn deliver(
    opens: &mut Opens,
    plan: &Plan,
    face: &Face,
    pair: u16,
    frame: &[u8],
    offload: Offload,
) -> Result<(), Drop> {
    let station = &face.station;
    let takes = station.takes();
    if takes.whole(offload.gso) {
        let mut room = opens.room(plan, station, pair, frame.len()).ok_or(Drop::Full)?;
        let bytes = &mut room.bytes()[..frame.len()];
        bytes.copy_from_slice(frame);
        let offload = finish(bytes, offload, takes)?;
        if let Some(ring) = &face.ring {
            ring.put(Direction::Received, bytes, bytes.len(), offload);
        }
        room.commit(Record { len: frame.len() as u32, skew: 0, offload });
        return Ok(());
    }
    let large = Large::check(frame, &offload)?;
    if large.longest(frame.len()) > station.longest() {
        return Err(Drop::Giant);
    }
    let flags = if takes.checksum { VIRTIO_NET_HDR_F_DATA_VALID } else { 0 };
    let offload = Offload { flags, ..Offload::NONE };
    let mut segments = Segments::new(frame, large);
    while let Some(len) = segments.next_len() {
        let Some(mut room) = opens.room(plan, station, pair, len) else {
            // This one is counted; nobody comes for the others before the end of this poll.
            opens.full(plan, station, pair, segments.left() - 1);
            return Err(Drop::Full);
        };
        let bytes = &mut room.bytes()[..len];
        segments.write(bytes);
        if let Some(ring) = &face.ring {
            ring.put(Direction::Received, bytes, len, offload);
        }
        room.commit(Record { len: len as u32, skew: 0, offload });
    }
    Ok(())
}

impl std::ops::Drop for Outlet {
    fn drop(&mut self) {
        self.flush();
    }
}
