//! The two rings.

use ioplane_memory::GuestFault;
use ioplane_network::{DropReason, HEAD, Offload, Sent};

use super::I82574;
use super::spec::*;
use crate::batch::{self, RxOutcome};
use crate::frame::{Cast, destination, fcs};

/// Longest frame that it puts together, in bytes.
const LONGEST: usize = 0x1_0000;
/// Descriptors that one access has it take, at most.
const TURNS: u32 = 4096;

/// The sum of words of a range, as the Internet's checksum has it.
fn folded(bytes: &[u8]) -> u16 {
    let mut sum = 0u32;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

impl I82574 {
    fn base(&self, low: u64) -> u64 {
        u64::from(self.peek(low)) | u64::from(self.peek(low + 4)) << 32
    }

    fn descriptor(&mut self, low: u64, at: u32) -> Result<(u64, [u32; 4]), GuestFault> {
        let place = self.base(low).wrapping_add(u64::from(at) * 16);
        let bytes: [u8; 16] = self.memory.bytes(place)?;
        let mut words = [0; 4];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok((place, words))
    }

    /// Takes descriptors from head to tail.
    pub(super) fn transmit(&mut self) {
        for _ in 0..TURNS {
            let (head, tail, slots) = (self.peek(TDH), self.peek(TDT), self.peek(TDLEN) / 16);
            let ready = self.peek(TCTL) & EN != 0 && self.config.bus_master() && slots > 0;
            if !ready || head == tail {
                return;
            }
            if self.take(head).is_err() {
                self.counts.faults += 1;
                self.counts.drops.fault += 1;
                self.outgoing.clear();
            }
            self.set(TDH, (head + 1) % slots);
        }
    }

    fn take(&mut self, head: u32) -> Result<(), GuestFault> {
        let (place, words) = self.descriptor(TDBAL, head)?;
        let extended = words[2] & TX_DEXT != 0;
        if extended && words[2] & TX_KIND != TX_DATA {
            self.context = Some(words);
        } else {
            let len = words[2] & if extended { 0xf_ffff } else { 0xffff };
            let from = self.outgoing.len();
            let room = (from + len as usize).min(LONGEST);
            self.outgoing.resize(room, 0);
            let address = u64::from(words[0]) | u64::from(words[1]) << 32;
            self.memory.read(address, &mut self.outgoing[from..])?;
            if words[2] & TX_EOP != 0 {
                if extended && words[3] & TX_TXSM != 0 {
                    self.sum();
                }
                self.send();
            }
        }
        if words[2] & TX_RS != 0 {
            self.memory.write(place + 12, &(words[3] | DD).to_le_bytes())?;
            self.raise(INT_TXDW);
        }
        Ok(())
    }

    /// Puts the checksum in as the last context said: from where to where, and where to.
    fn sum(&mut self) {
        let Some(context) = self.context else { return };
        let [start, offset] = [context[1] & 0xff, context[1] >> 8 & 0xff].map(|at| at as usize);
        let end = match context[1] >> 16 {
            0 => self.outgoing.len(),
            last => self.outgoing.len().min(last as usize + 1),
        };
        let Some(sum) = self.outgoing.get(start..end).map(folded) else { return };
        if let Some(place) = self.outgoing.get_mut(offset..offset + 2) {
            place.copy_from_slice(&sum.to_be_bytes());
        }
    }

    fn send(&mut self) {
        let frame = std::mem::take(&mut self.outgoing);
        self.counts.sent += 1;
        self.counts.sent_bytes += frame.len() as u64;
        self.count(GPTC, 1);
        let sent =
            self.port_tx.send(&frame[..frame.len().min(HEAD)], frame.len(), Offload::NONE, &mut |to| {
                to.copy_from_slice(&frame);
                true
            });
        if let Sent::Dropped(_) | Sent::Fault = sent {
            self.counts.drops.refused += 1;
        }
    }

    /// Takes a batch from the port. What has no room waits there until a register is written.
    pub(super) fn take_frames(&mut self) {
        let port = self.port.clone();
        let mut port_rx = port.rx(0);
        port_rx.disarm();
        self.waiting = batch::take(&mut port_rx, |frame| self.receive(frame));
        if self.waiting {
            self.raise(INT_RXO);
        }
        if port_rx.arm() && !self.waiting {
            self.wake_sources.wake();
        }
    }

    fn hears(&self, frame: &[u8]) -> bool {
        let rctl = self.peek(RCTL);
        let Some((mac, cast)) = destination(frame) else { return false };
        match cast {
            Cast::Broad => rctl & RCTL_BAM != 0,
            Cast::Multi => rctl & RCTL_MPE != 0 || self.hashed(mac),
            Cast::Uni => rctl & RCTL_UPE != 0 || self.is_own(mac),
        }
    }

    /// Section 7.1.1.1: one of sixteen addresses.
    fn is_own(&self, mac: [u8; 6]) -> bool {
        (0..16).any(|at| {
            let (low, high) = (self.peek(RAL0 + at * 8), self.peek(RAH0 + at * 8));
            let [a, b, c, d] = low.to_le_bytes();
            let [e, f, ..] = high.to_le_bytes();
            high & RAH_AV != 0 && mac == [a, b, c, d, e, f]
        })
    }

    /// By bits 47 to 36 of the address, as the filter's first offset has it.
    fn hashed(&self, mac: [u8; 6]) -> bool {
        let bit = u64::from(mac[4] >> 4) | u64::from(mac[5]) << 4;
        self.peek(MTA + (bit >> 5) * 4) >> (bit & 31) & 1 != 0
    }

    fn receive(&mut self, frame: &[u8]) -> RxOutcome {
        if self.peek(RCTL) & EN == 0 || !self.config.bus_master() {
            self.counts.drops.disabled += 1;
            return RxOutcome::Dropped(DropReason::NoBuffer);
        }
        if !self.hears(frame) {
            self.counts.drops.filtered += 1;
            return RxOutcome::Dropped(DropReason::Filtered);
        }
        let mut bytes = frame.to_vec();
        bytes.resize(bytes.len().max(60), 0);
        let sequence = fcs(&bytes);
        if self.peek(RCTL) & RCTL_SECRC == 0 {
            bytes.extend_from_slice(&sequence);
        }
        match self.fill(&bytes) {
            Ok(true) => {
                self.counts.received += 1;
                self.counts.received_bytes += frame.len() as u64;
                self.count(GPRC, 1);
                let octets = u64::from(self.peek(GORCL)) | u64::from(self.peek(GORCH)) << 32;
                let octets = octets.wrapping_add(bytes.len() as u64);
                self.set(GORCL, octets as u32);
                self.set(GORCH, (octets >> 32) as u32);
                self.raise(INT_RXT0);
                RxOutcome::Received
            }
            Ok(false) => RxOutcome::NoRoom,
            Err(_) => {
                self.counts.faults += 1;
                self.counts.drops.fault += 1;
                RxOutcome::Dropped(DropReason::NoBuffer)
            }
        }
    }

    /// Bytes of a buffer (section 10.2.5.1).
    fn buffer(&self) -> usize {
        let rctl = self.peek(RCTL);
        let size = 2048 >> ((rctl & RCTL_BSIZE) >> 16);
        if rctl & RCTL_BSEX != 0 { size * 16 } else { size }
    }

    /// Puts a frame into as many buffers as it takes; false: there are too few.
    fn fill(&mut self, bytes: &[u8]) -> Result<bool, GuestFault> {
        let (mut head, tail, slots) = (self.peek(RDH), self.peek(RDT), self.peek(RDLEN) / 16);
        let size = self.buffer();
        let pieces: Vec<_> = bytes.chunks(size).collect();
        if slots == 0 || ((tail + slots - head) % slots) < pieces.len() as u32 {
            return Ok(false);
        }
        let extended = self.peek(RFCTL) & RFCTL_EXTEN != 0;
        for (at, piece) in pieces.iter().enumerate() {
            let (place, words) = self.descriptor(RDBAL, head)?;
            let address = u64::from(words[0]) | u64::from(words[1]) << 32;
            self.memory.write(address, piece)?;
            let status = DD | if at + 1 == pieces.len() { RX_EOP } else { 0 };
            let length = piece.len() as u32;
            let words = match extended {
                true => [0, 0, status, length],
                false => [words[0], words[1], length, status],
            };
            let done = if extended { 2 } else { 3 };
            for at in (0..4).filter(|at| *at != done).chain([done]) {
                self.memory.write(place + at as u64 * 4, &words[at].to_le_bytes())?;
            }
            head = (head + 1) % slots;
            self.set(RDH, head);
        }
        Ok(true)
    }
}
