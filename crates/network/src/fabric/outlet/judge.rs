//! Where a frame may go, by its first bytes and what the switch knows.

use super::{Offered, Outlet};
use crate::cause::Drop;
use crate::fabric::plan::{Face, Plan};
use crate::fabric::station::Station;
use crate::fabric::table::{Seen, Tick};
use crate::spec::*;
use crate::vlan::{Form, tag};
use crate::{LONGEST, Mac};

/// What is to become of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// To one port.
    Port { slot: u16, form: Form },
    /// To all ports of a VLAN that may have it.
    Flood { vlan: u16, tag: Option<u16> },
    /// To nobody: counted on the sender.
    Drop(Drop),
    /// To nobody: counted on the port that it was for.
    DropThere { slot: u16, cause: Drop },
}

/// What was found for a frame, for those in the same batch with the same addresses and VLAN.
#[derive(Debug, Clone, Copy)]
pub(super) struct Judged {
    key: u128,
    way: Way,
    /// Frames longer than this have to be looked at once more, as those that might be too short.
    longest: usize,
}

/// The destination of a frame of at least [`ETH_HLEN`] bytes.
#[inline]
pub(super) fn destination(head: &[u8]) -> Mac {
    head.first_chunk().copied().unwrap_or_default()
}

/// Whether a frame of `from` may go to `to`, and in which form. Errors but [`Drop::Isolated`] are counted on `to`.
#[inline]
pub(super) fn gate(
    from: &Station,
    to: &Station,
    mac: Mac,
    vlan: u16,
    tag: Option<u16>,
) -> Result<Form, Drop> {
    if from.isolated && to.isolated {
        return Err(Drop::Isolated);
    }
    let form = to.vlan.leave(vlan, tag).ok_or(Drop::Vlan)?;
    if !to.is_up() {
        return Err(Drop::Down);
    }
    // The guest filters what it sees: an access port's frames have no VLAN for it.
    let seen = if form == Form::Strip || (form == Form::AsIs && tag.is_none()) { 0 } else { vlan };
    if to.filter.hears(mac, seen) { Ok(form) } else { Err(Drop::Filtered) }
}

/// What the way of a frame depends on: addresses, type, and the tag if there is one.
#[inline]
fn key(head: &[u8; KEY]) -> u128 {
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

impl Outlet {
    #[inline]
    pub(super) fn judge(&mut self, offered: &Offered<'_>) -> Way {
        if let Some(judged) = &self.judged
            && let Some(head) = offered.head.first_chunk::<KEY>()
            && judged.key == key(head)
            && (ETH_HLEN + VLAN_HLEN..=judged.longest).contains(&offered.len)
        {
            return judged.way;
        }
        self.judge_anew(offered)
    }

    fn judge_anew(&mut self, offered: &Offered<'_>) -> Way {
        let Offered { head, len, .. } = *offered;
        if len < ETH_HLEN || head.len() < ETH_HLEN.min(len) {
            return Way::Drop(Drop::Runt);
        }
        if len > LONGEST || !offered.fits(&self.station, Form::AsIs) {
            return Way::Drop(Drop::Giant);
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
                        self.judged = Some(Judged { key, way, longest: self.longest(way) });
                        way
                    }
                }
            }
        };
        if let Way::Port { slot, form } = way {
            if !offered.whole(form) {
                return Way::Drop(Drop::Runt);
            }
            if self.plan.face(slot).is_some_and(|face| !offered.fits(&face.station, form)) {
                return Way::DropThere { slot, cause: Drop::Giant };
            }
        }
        way
    }

    /// What no frame that goes that way is too long for, segmented or not.
    fn longest(&self, way: Way) -> usize {
        let own = self.station.longest();
        match way {
            Way::Port { slot, form } => self
                .plan
                .face(slot)
                .map_or(0, |face| own.min(face.station.longest().saturating_add_signed(-form.growth()))),
            _ => own,
        }
        .min(LONGEST)
    }

    /// Finds the way anew.
    fn find(&self, head: &[u8], tag: Option<u16>) -> Way {
        let own = &*self.station;
        if !own.is_up() {
            return Way::Drop(Drop::Down);
        }
        let to = destination(head);
        let mut from = [0; 6];
        from.copy_from_slice(&head[6..12]);
        if from[0] & 1 != 0 || from == [0; 6] {
            return Way::Drop(Drop::Malformed);
        }
        let Some(vlan) = own.vlan.enter(tag) else { return Way::Drop(Drop::Vlan) };
        if link_local(to) {
            return Way::Drop(Drop::Filtered);
        }
        let now = self.fabric.tick();
        if let Err(cause) = self.source(from, vlan, now) {
            return Way::Drop(cause);
        }
        if to[0] & 1 != 0 {
            return Way::Flood { vlan, tag };
        }
        let Some(face) = self.receiver(to, vlan, now) else { return Way::Flood { vlan, tag } };
        let slot = face.station.place.slot;
        if slot == own.place.slot {
            return Way::Drop(Drop::NoPath);
        }
        match gate(own, &face.station, to, vlan, tag) {
            Ok(form) => Way::Port { slot, form },
            Err(Drop::Isolated) => Way::Drop(Drop::Isolated),
            Err(cause) => Way::DropThere { slot, cause },
        }
    }

    /// Whether a frame from `from` may come from here; learns that it does.
    fn source(&self, from: Mac, vlan: u16, now: Tick) -> Result<(), Drop> {
        let own = &*self.station;
        if own.mac == Some(from) {
            return Ok(());
        }
        // A port that is down has no guest: it may have migrated, and be heard from elsewhere.
        if self.plan.fixed(from).any(|face| face.station.is_up()) {
            return Err(Drop::Spoofed);
        }
        match self.fabric.table.saw(from, vlan, own.place, own.share, now) {
            Seen::Held => Err(Drop::Loop),
            Seen::Known | Seen::Learned | Seen::NoRoom => Ok(()),
        }
    }

    /// The port where `to` is; `None` if the frame is to be flooded to find it.
    fn receiver(&self, to: Mac, vlan: u16, now: Tick) -> Option<&Face> {
        let plan: &Plan = &self.plan;
        let raised = |face: &&Face| face.station.raised.load(std::sync::atomic::Ordering::Relaxed);
        let up = plan.fixed(to).filter(|face| face.station.is_up()).max_by_key(raised);
        if up.is_some() {
            return up;
        }
        let learned = || {
            let place = self.fabric.table.find(to, vlan, now)?;
            plan.face(place.slot).filter(|face| face.station.place == place)
        };
        // The guest of a port that is down may be outside by now; if there is no outside, it is nowhere.
        let down = || if plan.uplinks { None } else { plan.fixed(to).next() };
        learned().or_else(down)
    }
}
