//! The tally counters (data sheet, 6.4), dumped into guest memory when it asks.

use serde::{Deserialize, Serialize};

use super::spec::TALLY;
use crate::frame::Cast;

/// What the guest may have dumped. What cannot happen here (collisions, alignment) is zero, and not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TallyV1 {
    /// Frames sent.
    pub tx_ok: u64,
    /// Frames received.
    pub rx_ok: u64,
    /// Frames not sent.
    pub tx_err: u64,
    /// Frames not received.
    pub rx_err: u32,
    /// Frames for which there was no room.
    pub missed: u16,
    /// Frames received for the station's address.
    pub rx_physical: u64,
    /// Broadcast frames received.
    pub rx_broadcast: u64,
    /// Multicast frames received.
    pub rx_multicast: u32,
    /// Frames whose transmission was aborted.
    pub tx_abort: u16,
    /// Frames whose bytes could not be had.
    pub tx_underrun: u16,
}

impl TallyV1 {
    pub(super) fn received(&mut self, cast: Cast) {
        self.rx_ok = self.rx_ok.wrapping_add(1);
        match cast {
            Cast::Uni => self.rx_physical = self.rx_physical.wrapping_add(1),
            Cast::Multi => self.rx_multicast = self.rx_multicast.wrapping_add(1),
            Cast::Broad => self.rx_broadcast = self.rx_broadcast.wrapping_add(1),
        }
    }

    pub(super) fn missed(&mut self) {
        self.rx_err = self.rx_err.wrapping_add(1);
        self.missed = self.missed.wrapping_add(1);
    }

    /// As the chip dumps them.
    pub(super) fn bytes(&self) -> [u8; TALLY] {
        let mut bytes = [0; TALLY];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.tx_ok.to_le_bytes());
        put(8, &self.rx_ok.to_le_bytes());
        put(16, &self.tx_err.to_le_bytes());
        put(24, &self.rx_err.to_le_bytes());
        put(28, &self.missed.to_le_bytes());
        put(40, &self.rx_physical.to_le_bytes());
        put(48, &self.rx_broadcast.to_le_bytes());
        put(56, &self.rx_multicast.to_le_bytes());
        put(60, &self.tx_abort.to_le_bytes());
        put(62, &self.tx_underrun.to_le_bytes());
        bytes
    }
}
