//! Large frames that stay in their sender's memory until their receiver copies them: one copy in place of two (docs/decisions/0054).
//!
//! A lent frame has a buffer of the receiver's, as any large frame, and is in its inbox like any other. Only its bytes are still with the
//! sender, who asks for them back one way or the other ([`Reclaim`]): so neither waits for the other longer than one copy takes.

use std::sync::Arc;

use ioplane_memory::{GuestMap, LentRanges};

use super::judge::Delivery;
use super::{Offered, PortTx, believed, pair};
use crate::HEAD;
use crate::checksum;
use crate::fabric::counts::Tally;
use crate::fabric::lent::{LentFor, LentOut, Reclaim};
use crate::fabric::tx_batch::receiver;
use crate::gso::Large;
use crate::offload::{Offload, RxOffloads};
use crate::spec::*;
use crate::vlan::Form;

/// Most frames that a port TX has lent at a time. What is sent beyond is copied.
pub const MOST_LENT: usize = 16;
/// Shortest frame that is lent, in bytes: below, the two copies cost less than having a buffer each.
pub const LEND_FROM: usize = 16 << 10;

/// What became of a lent frame, whose memory is its sender's again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaimed {
    /// The receiver has it, or it is in its buffer. Bytes.
    Sent(usize),
    /// Nobody has it.
    Revoked,
}

/// A frame that is lent, or was until its receiver was done.
#[derive(Debug)]
pub(super) struct Lent {
    /// Its receiving queue.
    number: u16,
    bytes: usize,
    /// `None`: the memory is the sender's again.
    out: Option<LentOut>,
}

impl PortTx {
    /// Lends a frame as [`PortTx::send`] would send it; `ranges` are the bytes behind its first [`HEAD`]. False if it cannot be lent, and
    /// nothing has happened then: it goes to several ports, or has to be changed for its receiver, or somebody looks on, or the receiver sleeps,
    /// or takes none. Until it is reclaimed ([`PortTx::reclaim`]) its memory must not be given back to its guest.
    pub fn lend(
        &mut self,
        head: &[u8],
        len: usize,
        offload: Offload,
        ranges: impl FnOnce() -> Option<LentRanges>,
    ) -> bool {
        if len < LEND_FROM || head.len() != HEAD || self.lent.len() == MOST_LENT {
            return false;
        }
        if !self.begun {
            self.begin();
        }
        self.try_to_lend(head, len, offload, ranges).is_some()
    }

    fn try_to_lend(
        &mut self,
        head: &[u8],
        len: usize,
        offload: Offload,
        ranges: impl FnOnce() -> Option<LentRanges>,
    ) -> Option<()> {
        let offload = Offload { flags: offload.flags & believed(self.shared.uplink), ..offload };
        let offered = Offered { head, len, offload };
        let Delivery::Port { slot, form: Form::AsIs } = self.judge(&offered) else { return None };
        let PortTx { snapshot, shared, pair: own_pair, batch, lent, .. } = self;
        let entry = snapshot.entry(slot)?;
        let own_ring = snapshot.entry(shared.place.slot).and_then(|own| own.ring.as_ref());
        if entry.ring.is_some() || own_ring.is_some() {
            return None;
        }
        let offload = finished(&offered, entry.shared.takes())?;
        let pair = pair(shared, *own_pair, &entry.shared, head);
        let pool = &entry.shared.pools[usize::from(pair)];
        if !pool.takes_lent() || pool.sleeps() {
            return None;
        }
        let ranges = ranges()?;
        let bytes: usize = ranges.spans().iter().map(|span| span.len()).sum();
        if bytes != len - HEAD {
            return None;
        }
        let (number, out) = batch.lend(snapshot, &entry.shared, pair, (head, len, offload), ranges)?;
        lent.push_back(Lent { number, bytes: len, out: Some(out) });
        Some(())
    }

    /// Frames that have been lent and not reclaimed.
    #[inline]
    pub fn lent(&self) -> usize {
        self.lent.len()
    }

    /// Asks for the oldest frame that is lent. `None`: it is not to be had now; with [`Reclaim::Copy`] and [`Reclaim::Revoke`] that is because its
    /// receiver copies it at this moment.
    pub fn reclaim(&mut self, how: Reclaim) -> Option<Reclaimed> {
        let oldest = self.lent.front_mut()?;
        let reclaimed = oldest.reclaim(&self.snapshot, how)?;
        let Lent { bytes, out, .. } = self.lent.pop_front()?;
        if let Some(out) = out {
            keep_last(&mut self.maps, out.into_map());
        }
        if let Reclaimed::Sent(_) = reclaimed {
            let mut tally = Tally::default();
            tally.frame(bytes);
            self.shared.sent.add(&mut tally);
        }
        Some(reclaimed)
    }

    /// Copies all frames that are lent into their receivers' buffers. False if there is one that its receiver copies at this moment.
    #[cold]
    pub(super) fn recall_all(&mut self) -> bool {
        let PortTx { snapshot, lent, maps, .. } = self;
        let mut all = true;
        for lent in lent.iter_mut().filter(|lent| lent.out.is_some()) {
            match lent.reclaim(snapshot, Reclaim::Copy) {
                Some(_) => {
                    if let Some(out) = lent.out.take() {
                        keep_last(maps, out.into_map());
                    }
                }
                None => all = false,
            }
        }
        all
    }

    /// Whoever has not begun with a frame of ours does not any more; waits for who has.
    #[cold]
    pub(super) fn revoke_all(&mut self) {
        let PortTx { snapshot, lent, .. } = self;
        for mut lent in lent.drain(..) {
            while lent.reclaim(snapshot, Reclaim::Revoke).is_none() {
                // For as long as one copy takes, on another core.
                std::thread::yield_now();
            }
        }
    }
}

impl Lent {
    fn reclaim(&mut self, snapshot: &super::SwitchSnapshot, how: Reclaim) -> Option<Reclaimed> {
        let sent = Reclaimed::Sent(self.bytes);
        let Some(out) = &self.out else { return Some(sent) };
        let Some((_, pool)) = receiver(snapshot, self.number) else {
            unreachable!("a snapshot is not exchanged while a frame is lent by it")
        };
        match (how, pool.reclaim(out, how)) {
            (_, LentFor::Done) => Some(sent),
            (Reclaim::Revoke, LentFor::Waiting) => Some(Reclaimed::Revoked),
            (_, LentFor::Waiting | LentFor::Reading) => None,
        }
    }
}

/// Drops a reference to a map, unless it is the last: then the map is kept until the port TX is dropped, since a core must not unmap memory.
fn keep_last(maps: &mut Vec<Arc<GuestMap>>, map: Arc<GuestMap>) {
    if Arc::strong_count(&map) == 1 && maps.len() < maps.capacity() {
        maps.push(map);
    }
}

/// What is left to do for a frame that its receiver takes as it is. `None` if there is something to do for it first, or if what it says
/// of itself is not so by its first bytes.
fn finished(offered: &Offered<'_>, takes: RxOffloads) -> Option<Offload> {
    let Offered { head, len, offload } = *offered;
    if offload.is_large() {
        let large = Large::of_head(head, len, &offload)?;
        return takes.whole(offload.gso).then_some(Offload { hdr_len: large.headers() as u16, ..offload });
    }
    if offload.needs_csum() {
        checksum::place(len, &offload).ok()?;
        return takes.checksum.then_some(Offload { hdr_len: 0, gso_size: 0, ..offload });
    }
    let flags = if takes.checksum { offload.flags & VIRTIO_NET_HDR_F_DATA_VALID } else { 0 };
    Some(Offload { flags, ..Offload::NONE })
}
