//! Between card memory and the port.

use ioplane_network::{DropReason, HEAD, Offload, Sent};

use super::Ne2000;
use super::spec::*;
use crate::batch::{self, RxOutcome};
use crate::frame::{Cast, FCS, SHORTEST as LEAST, announcement, destination, fcs, hashed};

impl Ne2000 {
    /// Tells switches where its address is now, if its driver has started it.
    pub fn announce(&mut self) {
        if self.registers.running() && !self.registers.looped() {
            let frame = announcement(self.registers.par);
            // One that is lost is made up for by the guest's next frame.
            let _ = self.port_tx.send(&frame, frame.len(), Offload::NONE, &mut |to| {
                to.copy_from_slice(&frame);
                true
            });
            self.port_tx.flush();
        }
    }

    /// Sends what the registers say, at once.
    pub(super) fn transmit(&mut self) {
        let (at, len) = (u16::from(self.registers.tpsr) << 8, self.registers.tbcr);
        let Some(frame) = self.card.slice(at, len) else {
            // Where there is no memory there is nothing to send in time.
            self.counts.faults += 1;
            self.counts.drops.fault += 1;
            self.registers.tsr = TSR_ABT | TSR_FU;
            self.registers.isr |= ISR_TXE;
            return;
        };
        self.counts.sent += 1;
        self.counts.sent_bytes += u64::from(len);
        if !self.registers.looped() {
            let sent =
                self.port_tx.send(&frame[..frame.len().min(HEAD)], frame.len(), Offload::NONE, &mut |to| {
                    to.copy_from_slice(frame);
                    true
                });
            if let Sent::Dropped(_) | Sent::Fault = sent {
                self.counts.drops.refused += 1;
            }
        }
        self.registers.tsr = TSR_PTX;
        self.registers.isr |= ISR_PTX;
    }

    /// Takes a batch from the port. What has no room waits there until a register is written.
    pub(super) fn take_frames(&mut self) {
        let mut port_rx = self.port.rx(0);
        port_rx.disarm();
        self.waiting = batch::take(&mut port_rx, |frame| self.receive(frame));
        if port_rx.arm() && !self.waiting {
            self.wake_sources.wake();
        }
    }

    fn receive(&mut self, frame: &[u8]) -> RxOutcome {
        if !self.registers.running() || self.registers.looped() {
            self.counts.drops.disabled += 1;
            return RxOutcome::Dropped(DropReason::NoBuffer);
        }
        let Some(cast) = self.hears(frame) else {
            self.counts.drops.filtered += 1;
            return RxOutcome::Dropped(DropReason::Filtered);
        };
        if self.registers.rcr & RCR_MON != 0 {
            // Heard, counted, not kept.
            self.registers.missed();
            self.counts.drops.disabled += 1;
            return RxOutcome::Dropped(DropReason::NoBuffer);
        }
        let Some(ring) = self.registers.ring() else {
            self.counts.faults += 1;
            self.counts.drops.fault += 1;
            self.registers.missed();
            return RxOutcome::Dropped(DropReason::NoBuffer);
        };
        let len = frame.len().max(LEAST) + FCS;
        if !ring.holds(len) {
            return self.lost();
        }
        if !ring.room(self.registers.curr, self.registers.bnry, len) {
            return if self.lose { self.lost() } else { RxOutcome::NoRoom };
        }
        let mut bytes = std::mem::take(&mut self.incoming);
        bytes.clear();
        bytes.extend_from_slice(frame);
        bytes.resize(len - FCS, 0);
        let fcs = fcs(&bytes);
        bytes.extend_from_slice(&fcs);
        self.registers.rsr = RSR_PRX | if cast == Cast::Uni { 0 } else { RSR_PHY };
        self.registers.curr = self.card.store(&ring, self.registers.curr, self.registers.rsr, &bytes);
        self.incoming = bytes;
        self.registers.isr |= ISR_PRX;
        self.counts.received += 1;
        self.counts.received_bytes += frame.len() as u64;
        RxOutcome::Received
    }

    /// The ring is full: the frame is lost, and the guest told.
    fn lost(&mut self) -> RxOutcome {
        self.counts.drops.no_room += 1;
        self.registers.rsr = RSR_MPA;
        self.registers.isr |= ISR_OVW;
        self.registers.missed();
        RxOutcome::Dropped(DropReason::NoBuffer)
    }

    /// Whether the frame is for this station, and as what.
    fn hears(&self, frame: &[u8]) -> Option<Cast> {
        let registers = &self.registers;
        let (mac, cast) = destination(frame)?;
        let heard = match cast {
            Cast::Broad => registers.rcr & RCR_AB != 0,
            Cast::Multi => registers.rcr & RCR_AM != 0 && hashed(mac, &registers.mar),
            Cast::Uni => registers.rcr & RCR_PRO != 0 || mac == registers.par,
        };
        heard.then_some(cast)
    }
}
