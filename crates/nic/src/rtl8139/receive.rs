//! Receiving: filter, descriptor ring of C+ mode, buffer of C mode.

use ioplane_memory::{GuestFault, Window};
use ioplane_network::DropReason;
use ioplane_network::spec::{ETH_ADDRESSES, ETH_HLEN, ETH_P_8021Q, VLAN_HLEN};

use super::spec::*;
use super::transmit::next;
use super::{Rtl8139, sums};
use crate::batch::{self, RxOutcome};
use crate::frame::{Cast, FCS, SHORTEST, destination, fcs, hashed};

/// A descriptor that the chip owns.
struct Buffer {
    place: Window,
    opts1: u32,
    address: u64,
}

impl Buffer {
    fn len(&self) -> usize {
        (self.opts1 & RX_BUFFER) as usize
    }
}

/// Why a frame did not get into descriptors.
enum Refused {
    NoRoom,
    /// All that the ring has is too little.
    Never,
    Fault(GuestFault),
}

impl From<GuestFault> for Refused {
    fn from(fault: GuestFault) -> Self {
        Refused::Fault(fault)
    }
}

impl Rtl8139 {
    /// Takes a batch from the port. What has no room waits there until a register is written, with "no descriptor" raised.
    pub(super) fn take_frames(&mut self) {
        let mut port_rx = self.port.rx(0);
        port_rx.disarm();
        self.waiting = batch::take(&mut port_rx, |frame| self.receive(frame));
        if self.waiting {
            self.chip.registers.raise(INT_RXOVW);
        }
        // Armed in any case; woken only if the guest's memory is not what is missing.
        if port_rx.arm() && !self.waiting {
            self.wake_sources.wake();
        }
    }

    /// A frame that cannot wait.
    pub(super) fn receive_or_lose(&mut self, frame: &[u8]) {
        if self.receive(frame) == RxOutcome::NoRoom {
            self.chip.registers.raise(INT_RXOVW);
            self.lost();
        }
    }

    fn lost(&mut self) -> DropReason {
        self.counts.drops.no_room += 1;
        self.chip.registers.missed();
        self.chip.tally.missed();
        DropReason::NoBuffer
    }

    fn receive(&mut self, frame: &[u8]) -> RxOutcome {
        let plus = self.chip.registers.u16(CPCR) & CPCR_RXEN != 0;
        // Drivers turn the receiver on before they say where the ring is.
        let ready = self.enabled(CR_RE) && self.master() && !(plus && self.chip.registers.u64(RDSAR) == 0);
        if !ready {
            self.counts.drops.disabled += 1;
            return RxOutcome::Dropped(DropReason::NoBuffer);
        }
        let Some(cast) = self.hears(frame) else {
            self.counts.drops.filtered += 1;
            return RxOutcome::Dropped(DropReason::Filtered);
        };
        let refused = match plus {
            true => self.fill_ring(frame, cast),
            false => self.fill_buffer(frame, cast),
        };
        match refused {
            Ok(()) => {
                self.counts.received += 1;
                self.counts.received_bytes += frame.len() as u64;
                self.chip.tally.received(cast);
                self.chip.registers.raise(INT_ROK);
                RxOutcome::Received
            }
            Err(Refused::NoRoom) => RxOutcome::NoRoom,
            Err(Refused::Never) => {
                self.chip.registers.raise(INT_RXOVW);
                RxOutcome::Dropped(self.lost())
            }
            Err(Refused::Fault(fault)) => {
                self.fault(fault);
                self.counts.drops.fault += 1;
                self.chip.tally.rx_err = self.chip.tally.rx_err.wrapping_add(1);
                self.chip.registers.raise(INT_RER);
                RxOutcome::Dropped(DropReason::NoBuffer)
            }
        }
    }

    /// Whether the frame is for this station, and as what.
    fn hears(&self, frame: &[u8]) -> Option<Cast> {
        let registers = &self.chip.registers;
        let rcr = registers.u32(RCR);
        let (mac, cast) = destination(frame)?;
        let heard = match cast {
            Cast::Broad => rcr & RCR_AB != 0,
            Cast::Multi => rcr & RCR_AM != 0 && hashed(mac, registers.hash()),
            Cast::Uni => rcr & RCR_AAP != 0 || rcr & RCR_APM != 0 && mac == registers.mac(),
        };
        heard.then_some(cast)
    }

    /// Whether the frame is for the very address of the station; in promiscuous mode not every one is.
    fn matched(&self, frame: &[u8]) -> bool {
        frame.starts_with(&self.chip.registers.mac())
    }

    /// C+ mode: into as many descriptors as it takes. The guest sees the first of them last.
    fn fill_ring(&mut self, frame: &[u8], cast: Cast) -> Result<(), Refused> {
        let cpcr = self.chip.registers.u16(CPCR);
        let mut bytes = std::mem::take(&mut self.incoming);
        bytes.clear();
        let tag = frame
            .get(ETH_ADDRESSES..ETH_HLEN + 2)
            .filter(|tag| cpcr & CPCR_RXVLAN != 0 && tag[..2] == ETH_P_8021Q.to_be_bytes())
            .map(|tag| u32::from(u16::from_le_bytes([tag[2], tag[3]])));
        match tag {
            Some(_) => {
                bytes.extend_from_slice(&frame[..ETH_ADDRESSES]);
                bytes.extend_from_slice(&frame[ETH_ADDRESSES + VLAN_HLEN..]);
            }
            None => bytes.extend_from_slice(frame),
        }
        bytes.resize(bytes.len().max(SHORTEST), 0);
        let sums = if cpcr & CPCR_RXCHKSUM != 0 { sums::verdict(&bytes) } else { 0 };
        let fcs = fcs(&bytes);
        bytes.extend_from_slice(&fcs);
        let kind = match cast {
            Cast::Uni if self.matched(frame) => RX_PAM,
            Cast::Uni => 0,
            Cast::Multi => RX_MAR,
            Cast::Broad => RX_BAR,
        };
        let opts2 = tag.map_or(0, |tag| RX_TAVA | tag);
        let stored = self.scatter(&bytes, kind | sums, opts2);
        self.incoming = bytes;
        stored
    }

    fn scatter(&mut self, bytes: &[u8], status: u32, opts2: u32) -> Result<(), Refused> {
        if bytes.len() > RX_LENGTH as usize {
            return Err(Refused::Never);
        }
        let (buffers, index) = self.find_buffers(bytes.len())?;
        let mut rest = bytes;
        for buffer in &buffers {
            let (here, after) = rest.split_at(buffer.len().min(rest.len()));
            self.memory.write(buffer.address, here)?;
            rest = after;
        }
        let last = buffers.len() - 1;
        for (n, Buffer { place, opts1, .. }) in buffers.iter().enumerate().rev() {
            let mut done = opts1 & DESC_EOR;
            done |= if n == 0 { DESC_FS } else { 0 };
            done |= if n == last { DESC_LS | status | bytes.len() as u32 } else { opts1 & RX_BUFFER };
            self.memory.store_u32(place, 4, opts2);
            self.memory.store_u32(place, 0, done);
        }
        self.chip.receive = index;
        Ok(())
    }

    /// Descriptors with room for `len` bytes, at least one, and the index of the one behind them.
    fn find_buffers(&self, len: usize) -> Result<(Vec<Buffer>, u32), Refused> {
        let base = self.chip.registers.u64(RDSAR) & !(RING_ALIGN - 1);
        let first = self.chip.receive;
        let (mut buffers, mut room, mut index) = (Vec::with_capacity(1), 0, first);
        for _ in 0..RING {
            let place =
                self.memory.window(base.wrapping_add(DESCRIPTOR * u64::from(index)), DESCRIPTOR, 4)?;
            // Acquire: the rest was written before the ownership.
            let opts1 = place.load_u32(0);
            if opts1 & DESC_OWN == 0 {
                return Err(Refused::NoRoom);
            }
            let address = u64::from(place.load_u32(8)) | u64::from(place.load_u32(12)) << 32;
            let buffer = Buffer { place, opts1, address };
            room += buffer.len();
            buffers.push(buffer);
            index = next(index, opts1);
            if room >= len {
                return Ok((buffers, index));
            }
            if index == first {
                break;
            }
        }
        Err(Refused::Never)
    }

    /// C mode: where the guest reads next.
    fn read_pointer(&self) -> u32 {
        u32::from(self.chip.registers.u16(CAPR).wrapping_add(CAPR_SHORT)) % self.chip.registers.buffer()
    }

    /// C mode: whether the buffer is empty is a bit of the command register.
    pub(super) fn see_buffer(&mut self) {
        let empty = self.read_pointer() == u32::from(self.chip.registers.u16(CBR));
        self.chip.registers.put_bits(CR, 1, if empty { CR_BUFE.into() } else { 0 }, CR_BUFE.into());
    }

    /// C mode: a head, the frame, its check sequence, one after the other in a buffer that wraps.
    fn fill_buffer(&mut self, frame: &[u8], cast: Cast) -> Result<(), Refused> {
        let size = self.chip.registers.buffer();
        let at = u32::from(self.chip.registers.u16(CBR));
        let free = match (size + self.read_pointer() - at) % size {
            0 => size,
            free => free,
        };
        let mut bytes = std::mem::take(&mut self.incoming);
        bytes.clear();
        let len = frame.len().max(SHORTEST) + FCS;
        let kind = match cast {
            Cast::Uni if self.matched(frame) => HEAD_PAM,
            Cast::Uni => 0,
            Cast::Multi => HEAD_MAR,
            Cast::Broad => HEAD_BAR,
        };
        bytes.extend_from_slice(&(HEAD_ROK | kind | (len as u32) << 16).to_le_bytes());
        bytes.extend_from_slice(frame);
        bytes.resize(bytes.len().max(4 + SHORTEST), 0);
        let fcs = fcs(&bytes[4..]);
        bytes.extend_from_slice(&fcs);
        let stored = self.store(&bytes, at, size, free);
        self.incoming = bytes;
        stored
    }

    fn store(&mut self, bytes: &[u8], at: u32, size: u32, free: u32) -> Result<(), Refused> {
        let len = bytes.len() as u32;
        if len >= size {
            return Err(Refused::Never);
        }
        // Full would look like empty; the next frame begins at a multiple of four.
        if len.next_multiple_of(4) >= free {
            return Err(Refused::NoRoom);
        }
        let base = u64::from(self.chip.registers.u32(RBSTART));
        // A driver that asks for it has room behind the end; a buffer of 64 KiB always wraps.
        let runs_over = self.chip.registers.u32(RCR) & RCR_WRAP != 0 && size < 65_536;
        let before = if runs_over { bytes.len() } else { bytes.len().min((size - at) as usize) };
        self.memory.write(base + u64::from(at), &bytes[..before])?;
        if before < bytes.len() {
            self.memory.write(base, &bytes[before..])?;
        }
        self.chip.registers.put(CBR, 2, (at + len).next_multiple_of(4) % size);
        self.see_buffer();
        Ok(())
    }
}
