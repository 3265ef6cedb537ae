//! Sending: descriptor rings of C+ mode, the four descriptors of C mode.

use ioplane_memory::{GuestFault, Window};
use ioplane_network::spec::{ETH_ADDRESSES, ETH_P_8021Q, VLAN_HLEN};
use ioplane_network::{HEAD, Offload, Sent, checksum};

use super::spec::*;
use super::{ROOM, Rtl8139, sums};
use crate::frame::{SHORTEST, announcement};

/// A ring of C+ mode, by the index of what is kept of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Queue {
    Normal = 0,
    High = 1,
}

impl Queue {
    fn base(self) -> u64 {
        match self {
            Queue::Normal => TNPDS,
            Queue::High => THPDS,
        }
    }
}

/// A descriptor that the chip owns.
#[derive(Debug)]
struct Piece {
    place: Window,
    opts1: u32,
    opts2: u32,
    address: u64,
}

/// What a ring has for the chip.
#[derive(Debug)]
enum Found {
    /// Nothing, or a frame whose end is not there yet.
    Nothing,
    /// A whole frame.
    Frame,
    /// Descriptors that are no frame: no beginning, no end within the ring, another beginning before the end.
    Malformed,
}

impl Rtl8139 {
    /// Sends what a ring has, at most as many descriptors as a ring can have. A frame is sent when all of its descriptors are the chip's.
    pub(super) fn transmit_ring(&mut self, queue: Queue) {
        if !self.enabled(CR_TE) || self.chip.registers.u16(CPCR) & CPCR_TXEN == 0 || !self.master() {
            return;
        }
        let mut taken = 0;
        let mut causes = 0;
        let mut pieces = Vec::with_capacity(8);
        while taken < RING as usize {
            pieces.clear();
            let found = match self.find(queue, &mut pieces) {
                Ok(found) => found,
                Err(fault) => {
                    self.fault(fault);
                    causes |= INT_SERR;
                    break;
                }
            };
            let error = match found {
                Found::Nothing => break,
                Found::Frame => self.transmit(&pieces),
                Found::Malformed => {
                    self.counts.drops.malformed += 1;
                    self.chip.tally.tx_abort = self.chip.tally.tx_abort.wrapping_add(1);
                    TX_TES
                }
            };
            causes |= if error == 0 { INT_TOK } else { INT_TER };
            if error != 0 {
                self.chip.tally.tx_err = self.chip.tally.tx_err.wrapping_add(1);
            }
            taken += pieces.len();
            self.give_back(queue, &pieces, error);
        }
        self.chip.registers.raise(if causes == 0 { INT_TDU } else { causes });
    }

    /// The descriptors of the next frame of a ring.
    fn find(&self, queue: Queue, pieces: &mut Vec<Piece>) -> Result<Found, GuestFault> {
        let base = self.chip.registers.u64(queue.base()) & !(RING_ALIGN - 1);
        let mut index = self.chip.transmit[queue as usize];
        while pieces.len() < RING as usize {
            let at = base.wrapping_add(DESCRIPTOR * u64::from(index));
            let place = self.memory.window(at, DESCRIPTOR, 4)?;
            // Acquire: the rest was written before the ownership.
            let opts1 = place.load_u32(0);
            if opts1 & DESC_OWN == 0 {
                return Ok(Found::Nothing);
            }
            let first = pieces.is_empty();
            if !first && opts1 & DESC_FS != 0 {
                return Ok(Found::Malformed);
            }
            let opts2 = place.load_u32(4);
            let address = u64::from(place.load_u32(8)) | u64::from(place.load_u32(12)) << 32;
            pieces.push(Piece { place, opts1, opts2, address });
            if first && opts1 & DESC_FS == 0 {
                return Ok(Found::Malformed);
            }
            if opts1 & DESC_LS != 0 {
                return Ok(Found::Frame);
            }
            index = next(index, opts1);
        }
        Ok(Found::Malformed)
    }

    /// Gives descriptors back, by rising index; the ring goes on behind them.
    fn give_back(&mut self, queue: Queue, pieces: &[Piece], error: u32) {
        for Piece { place, opts1, .. } in pieces {
            let done = opts1 & (DESC_EOR | DESC_FS | DESC_LS | TX_LENGTH) | error;
            self.memory.store_u32(place, 0, done);
            let index = &mut self.chip.transmit[queue as usize];
            *index = next(*index, *opts1);
        }
    }

    /// Sends a frame. Says which error its descriptors are to have.
    fn transmit(&mut self, pieces: &[Piece]) -> u32 {
        let len: usize = pieces.iter().map(|piece| (piece.opts1 & TX_LENGTH) as usize).sum();
        if len > ROOM - VLAN_HLEN {
            self.counts.drops.malformed += 1;
            self.chip.tally.tx_abort = self.chip.tally.tx_abort.wrapping_add(1);
            return TX_TES;
        }
        let mut buffer = std::mem::take(&mut self.outgoing);
        let error = match self.gather(pieces, &mut buffer[VLAN_HLEN..]) {
            Ok(()) => {
                self.finish(pieces, &mut buffer, len);
                0
            }
            Err(fault) => {
                self.fault(fault);
                self.counts.drops.fault += 1;
                self.chip.tally.tx_underrun = self.chip.tally.tx_underrun.wrapping_add(1);
                TX_TES | TX_UNF
            }
        };
        self.outgoing = buffer;
        error
    }

    /// Copies a frame together.
    fn gather(&self, pieces: &[Piece], mut to: &mut [u8]) -> Result<(), GuestFault> {
        for piece in pieces {
            let (here, rest) = to.split_at_mut((piece.opts1 & TX_LENGTH) as usize);
            self.memory.read(piece.address, here)?;
            to = rest;
        }
        Ok(())
    }

    /// Sums, padding and the tag for a frame that lies in `buffer` behind room for a tag.
    fn finish(&mut self, pieces: &[Piece], buffer: &mut [u8], len: usize) {
        let Some(first) = pieces.first() else { return };
        let mut len = len;
        if len < SHORTEST {
            buffer[VLAN_HLEN + len..VLAN_HLEN + SHORTEST].fill(0);
            len = SHORTEST;
        }
        let (mut offload, len) = sums::fill(&mut buffer[VLAN_HLEN..VLAN_HLEN + len], first.opts1);
        let start = if first.opts2 & TX_TAGC != 0 {
            buffer.copy_within(VLAN_HLEN..VLAN_HLEN + ETH_ADDRESSES, 0);
            buffer[ETH_ADDRESSES..ETH_ADDRESSES + 2].copy_from_slice(&ETH_P_8021Q.to_be_bytes());
            // The descriptor has the tag's bytes in their order on the wire.
            let tag = (first.opts2 & VLAN_TAG) as u16;
            buffer[ETH_ADDRESSES + 2..ETH_ADDRESSES + VLAN_HLEN].copy_from_slice(&tag.to_le_bytes());
            if offload != Offload::NONE {
                offload.csum_start += VLAN_HLEN as u16;
                offload.hdr_len += VLAN_HLEN as u16;
            }
            0
        } else {
            VLAN_HLEN
        };
        self.chip.tally.tx_ok = self.chip.tally.tx_ok.wrapping_add(1);
        self.send(&mut buffer[start..VLAN_HLEN + len], offload);
    }

    /// Tells switches where its address is now, if its driver has it send.
    pub fn announce(&mut self) {
        if self.enabled(CR_TE) {
            let frame = announcement(self.chip.registers.mac());
            // One that is lost is made up for by the guest's next frame.
            let _ = self.port_tx.send(&frame, frame.len(), Offload::NONE, &mut |to| {
                to.copy_from_slice(&frame);
                true
            });
            self.port_tx.flush();
        }
    }

    /// To the port, or back to the receiver.
    fn send(&mut self, frame: &mut [u8], offload: Offload) {
        let len = frame.len();
        self.counts.sent += 1;
        self.counts.sent_bytes += len as u64;
        if self.chip.registers.u32(TCR) & TCR_LBK == TCR_LBK {
            if offload.needs_csum() && !offload.is_large() {
                let _ = checksum::complete(frame, &offload);
            }
            // There is no port in which it could wait.
            self.receive_or_lose(frame);
            return;
        }
        let sent = self.port_tx.send(&frame[..len.min(HEAD)], len, offload, &mut |to| {
            to.copy_from_slice(frame);
            true
        });
        if let Sent::Dropped(_) | Sent::Fault = sent {
            self.counts.drops.refused += 1;
        }
    }

    /// C mode: a status was written. Sends from the descriptors in turn, for as long as the next is the chip's.
    pub(super) fn transmit_descriptor(&mut self, at: u64, value: u32) {
        let kept = TSD_SIZE | TSD_OWN | TSD_ERTXTH;
        self.chip.registers.put(at, 4, value & kept);
        for _ in 0..TSDS {
            let at = TSD0 + 4 * self.chip.current;
            let status = self.chip.registers.u32(at);
            if status & TSD_OWN != 0 || !self.enabled(CR_TE) || !self.master() {
                break;
            }
            let len = (status & TSD_SIZE) as usize;
            let address = self.chip.registers.u32(TSAD0 + 4 * self.chip.current).into();
            let mut buffer = std::mem::take(&mut self.outgoing);
            let (done, cause) = match self.memory.read(address, &mut buffer[..len]) {
                Ok(()) => {
                    self.chip.tally.tx_ok = self.chip.tally.tx_ok.wrapping_add(1);
                    self.send(&mut buffer[..len], Offload::NONE);
                    (TSD_TOK, INT_TOK)
                }
                Err(fault) => {
                    self.fault(fault);
                    self.counts.drops.fault += 1;
                    self.chip.tally.tx_err = self.chip.tally.tx_err.wrapping_add(1);
                    (TSD_TABT, INT_TER)
                }
            };
            self.outgoing = buffer;
            self.chip.registers.put(at, 4, status | TSD_OWN | done);
            self.chip.registers.raise(cause);
            self.chip.current = (self.chip.current + 1) % TSDS;
        }
        self.chip.registers.sum_up();
    }
}

/// The descriptor after that with the index, whose first word is `opts1`.
pub(super) fn next(index: u32, opts1: u32) -> u32 {
    if opts1 & DESC_EOR != 0 { 0 } else { (index + 1) % RING }
}
