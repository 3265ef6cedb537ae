//! Where a frame may go, by its first bytes and what the switch knows.

use super::{Offered, PortTx};
use crate::cause::DropReason;
use crate::fabric::port::PortShared;
use crate::fabric::snapshot::{PortEntry, SwitchSnapshot};
use crate::fabric::table::{Seen, Tick};
use crate::spec::*;
use crate::vlan::{Form, tag};
use crate::{LONGEST, Mac};

/// What is to become of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivery {
    /// To one port.
    Port { slot: u16, form: Form },
    /// To all ports of a VLAN that may have it.
    Flood { vlan: u16, tag: Option<u16> },
    /// To nobody: counted on the sender.
    Drop(DropReason),
    /// To nobody: counted on the port that it was for.
    DropThere { slot: u16, cause: DropReason },
}

/// What was found for a frame, for those in the same batch with the same addresses and VLAN.
#[derive(Debug, Clone, Copy)]
pub(super) struct CachedVerdict {
    pub key: u128,
    pub way: Delivery,
    /// Frames longer than this have to be looked at once more, as those that might be too short.
    pub longest: usize,
}

/// The destination of a frame of at least [`ETH_HLEN`] bytes.
#[inline]
pub(super) fn destination(head: &[u8]) -> Mac {
    head.first_chunk().copied().unwrap_or_default()
}

/// Whether a frame of `from` may go to `to`, and in which form. Errors but [`DropReason::Isolated`] are counted on `to`.
#[inline]
pub(super) fn gate(
    from: &PortShared,
    to: &PortShared,
    mac: Mac,
    vlan: u16,
    tag: Option<u16>,
) -> Result<Form, DropReason> {
    if from.isolated && to.isolated {
        return Err(DropReason::Isolated);
    }
    let form = to.vlan.leave(vlan, tag).ok_or(DropReason::Vlan)?;
    if !to.is_up() {
        return Err(DropReason::Down);
    }
    // The guest filters what it sees: an access port's frames have no VLAN for it.
    let seen = if form == Form::Strip || (form == Form::AsIs && tag.is_none()) { 0 } else { vlan };
    if to.filter.hears(mac, seen) { Ok(form) } else { Err(DropReason::Filtered) }
}

/// What the way of a frame depends on: addresses, type, and the tag if there is one.
#[inline]
pub(super) fn key(head: &[u8; KEY]) -> u128 {
    let key = u128::from_le_bytes(*head);
    let tagged = head[ETH_ADDRESSES..ETH_HLEN] == ETH_P_8021Q.to_be_bytes();
    if tagged { key } else { key & ((1 << (8 * ETH_HLEN)) - 1) }
}

/// Bytes that the way of a frame depends on.
const KEY: usize = 16;

/// Addresses that no bridge forwards (IEEE 802.1D, table 7-10): spanning tree, pause frames, LLDP.
fn link_local(mac: Mac) -> bool {
    mac[..5] == [0x01, 0x80, 0xc2, 0, 0] && mac[5] < 0x10
}

impl PortTx {
    #[inline]
    pub(super) fn judge(&mut self, offered: &Offered<'_>) -> Delivery {
        if let Some(judged) = &self.judged
            && let Some(head) = offered.head.first_chunk::<KEY>()
            && judged.key == key(head)
            && (ETH_HLEN + VLAN_HLEN..=judged.longest).contains(&offered.len)
        {
            return judged.way;
        }
        self.judge_anew(offered)
    }

    fn judge_anew(&mut self, offered: &Offered<'_>) -> Delivery {
        let Offered { head, len, .. } = *offered;
        if len < ETH_HLEN || head.len() < ETH_HLEN.min(len) {
            return Delivery::Drop(DropReason::Runt);
        }
        if len > LONGEST || !offered.fits(&self.shared, Form::AsIs) {
            return Delivery::Drop(DropReason::Giant);
        }
        let way = match head.first_chunk::<KEY>() {
            // Too short to have a tag, whatever its type says: its key would be that of another frame, which has one.
            None => self.find(head, None),
            Some(first) => {
                let key = key(first);
                match &self.judged {
                    Some(judged) if judged.key == key => judged.way,
                    _ => {
                        let way = self.find(head, tag(head));
                        // What is expected of frames is not older than what is known of them.
                        self.alike = None;
                        self.judged = Some(CachedVerdict { key, way, longest: self.longest(way) });
                        way
                    }
                }
            }
        };
        if let Delivery::Port { slot, form } = way {
            if !offered.whole(form) {
                return Delivery::Drop(DropReason::Runt);
            }
            if self.snapshot.entry(slot).is_some_and(|entry| !offered.fits(&entry.shared, form)) {
                return Delivery::DropThere { slot, cause: DropReason::Giant };
            }
        }
        way
    }

    /// What no frame that goes that way is too long for, segmented or not.
    fn longest(&self, way: Delivery) -> usize {
        let own = self.shared.longest();
        match way {
            Delivery::Port { slot, form } => self
                .snapshot
                .entry(slot)
                .map_or(0, |entry| own.min(entry.shared.longest().saturating_add_signed(-form.growth()))),
            _ => own,
        }
        .min(LONGEST)
    }

    /// Finds the way anew.
    fn find(&self, head: &[u8], tag: Option<u16>) -> Delivery {
        let own = &*self.shared;
        if !own.is_up() {
            return Delivery::Drop(DropReason::Down);
        }
        let to = destination(head);
        let mut from = [0; 6];
        from.copy_from_slice(&head[6..12]);
        if from[0] & 1 != 0 || from == [0; 6] {
            return Delivery::Drop(DropReason::Malformed);
        }
        let Some(vlan) = own.vlan.enter(tag) else { return Delivery::Drop(DropReason::Vlan) };
        if link_local(to) {
            return Delivery::Drop(DropReason::Filtered);
        }
        let now = self.fabric.tick();
        if let Err(cause) = self.source(from, vlan, now) {
            return Delivery::Drop(cause);
        }
        if to[0] & 1 != 0 {
            return Delivery::Flood { vlan, tag };
        }
        let Some(entry) = self.receiver(to, vlan, now) else { return Delivery::Flood { vlan, tag } };
        let slot = entry.shared.place.slot;
        if slot == own.place.slot {
            return Delivery::Drop(DropReason::NoPath);
        }
        match gate(own, &entry.shared, to, vlan, tag) {
            Ok(form) => Delivery::Port { slot, form },
            Err(DropReason::Isolated) => Delivery::Drop(DropReason::Isolated),
            Err(cause) => Delivery::DropThere { slot, cause },
        }
    }

    /// Whether a frame from `from` may come from here; learns that it does.
    fn source(&self, from: Mac, vlan: u16, now: Tick) -> Result<(), DropReason> {
        let own = &*self.shared;
        if own.mac == Some(from) {
            return Ok(());
        }
        // A port that is down has no guest: it may have migrated, and be heard from elsewhere.
        if self.snapshot.fixed(from).any(|entry| entry.shared.is_up()) {
            return Err(DropReason::Spoofed);
        }
        match self.fabric.table.saw(from, vlan, own.place, own.share, now) {
            Seen::Held => Err(DropReason::Loop),
            Seen::Known | Seen::Learned | Seen::NoRoom => Ok(()),
        }
    }

    /// The port where `to` is; `None` if the frame is to be flooded to find it.
    fn receiver(&self, to: Mac, vlan: u16, now: Tick) -> Option<&PortEntry> {
        let snapshot: &SwitchSnapshot = &self.snapshot;
        let raised = |entry: &&PortEntry| entry.shared.raised.load(std::sync::atomic::Ordering::Relaxed);
        let up = snapshot.fixed(to).filter(|entry| entry.shared.is_up()).max_by_key(raised);
        if up.is_some() {
            return up;
        }
        let learned = || {
            let place = self.fabric.table.find(to, vlan, now)?;
            snapshot.entry(place.slot).filter(|entry| entry.shared.place == place)
        };
        // The guest of a port that is down may be outside by now; if there is no outside, it is nowhere.
        let down = || if snapshot.uplinks { None } else { snapshot.fixed(to).next() };
        learned().or_else(down)
    }
}
