//! Frames like the one before: to the same receiver, with nothing to do to them. Such a frame is copied once, with its header, to where it
//! goes if it is what it is expected to be, and judged there.

use super::judge::{Delivery, key};
use super::{PortTx, fixed_pair};
use crate::fabric::pool::Record;
use crate::fabric::snapshot::queue_number;
use crate::offload::Offload;
use crate::spec::*;
use crate::vlan::Form;

/// The longest frame that is copied before anything is known of it: one of an Ethernet without jumbo frames. If it is not like the one before,
/// that was in vain.
const LONGEST_ALIKE: usize = 2048;

/// Where the last frames went.
#[derive(Debug, Clone, Copy)]
pub(super) struct Alike {
    /// What their way depends on; see [`key`].
    key: u128,
    longest: usize,
    /// The receiving queue, and its place in the batch.
    number: u16,
    at: usize,
    /// There were two: so a third is expected.
    confirmed: bool,
}

impl PortTx {
    /// Sends one frame of `len` bytes as the one before, if it is like that: then it is sent when this returns, and costs nothing beyond its
    /// bytes. `fill` copies the 12 bytes of its header (`virtio_net_hdr_v1`) and then the frame, and is called at most once. False: it has to
    /// be sent by [`PortTx::send`], from the beginning, which also finds what is wrong with memory that `fill` could not read.
    #[inline]
    pub fn send_alike(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> bool) -> bool {
        debug_assert!(self.rest.is_none(), "the frame before is not with all of its receivers");
        let Some(alike) = self.alike.filter(|alike| alike.confirmed) else { return false };
        if !(ETH_HLEN + VLAN_HLEN..=alike.longest).contains(&len) {
            return false;
        }
        let room = self.batch.room_at(&self.snapshot, alike.number, alike.at, len);
        let Some(mut room) = room else { return false };
        let bytes = room.header_and_frame(len);
        // Judged by the copy, which nobody else can change.
        let is_alike = fill(bytes)
            && bytes[0] & VIRTIO_NET_HDR_F_NEEDS_CSUM == 0
            && bytes[1] == VIRTIO_NET_HDR_GSO_NONE
            && bytes[NET_HDR..].first_chunk().is_some_and(|head| key(head) == alike.key);
        if !is_alike {
            // The next one is not expected to be either: it would be copied twice.
            self.alike = None;
            return false;
        }
        room.commit(Record { len: len as u32, skew: 0, offload: Offload::NONE });
        self.tally.frame(len);
        true
    }

    /// A frame that begins with `head`, with nothing to do for it, has gone to `slot` in that form.
    #[inline]
    pub(super) fn note_delivery(&mut self, head: &[u8], slot: u16, form: Form) {
        let before = self.alike.take();
        // An uplink may say more of a frame than that there is nothing to do.
        if form != Form::AsIs || self.shared.uplink {
            return;
        }
        // What is known is of this frame, and not of one before: those too short for a key are judged without it.
        let Some(judged) = self.judged.filter(|judged| judged.way == Delivery::Port { slot, form }) else {
            return;
        };
        if head.first_chunk().map(key) != Some(judged.key) {
            return;
        }
        let captured = |slot| self.snapshot.entry(slot).is_none_or(|entry| entry.ring.is_some());
        if captured(self.shared.place.slot) || captured(slot) {
            return;
        }
        let pair = self.snapshot.entry(slot).and_then(|to| fixed_pair(&self.shared, self.pair, &to.shared));
        let number = pair.map(|pair| queue_number(slot, pair));
        self.alike = number.and_then(|number| {
            let (at, longest) = (self.batch.place_of(number)?, judged.longest.min(LONGEST_ALIKE));
            let (key, number) = (judged.key, number as u16);
            let confirmed = before.is_some_and(|before| before.key == key && before.number == number);
            Some(Alike { key, longest, number, at, confirmed })
        });
    }
}
