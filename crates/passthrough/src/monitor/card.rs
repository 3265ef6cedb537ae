//! Memory on the card, behind a data port: what the guest moves there is counted, what others left there is wiped.

use ioplane_hardware::Hardware;
use ioplane_model::{Pages, RegisterId, Seen, Way};

use super::Monitor;

/// A transfer through the data port that the guest has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) way: Way,
    /// Where the next byte goes.
    pub(super) address: u32,
    /// Bytes that are left.
    pub(super) left: u32,
}

/// Most bytes at a time through the data port.
const STEP: usize = 4;

/// Bytes of a range that are moved: whole words, as many as the count register holds.
fn whole(first: u32, end: u32) -> u32 {
    end.saturating_sub(first) & 0xfffe
}

impl<H: Hardware> Monitor<H> {
    fn pair(&self, (low, high): (RegisterId, RegisterId)) -> u32 {
        self.machine.value(low) & 0xff | (self.machine.value(high) & 0xff) << 8
    }

    /// After a write: of the address, or of the command, by which a transfer begins, or ends, or goes on.
    pub(super) fn begin_transfer(&mut self, id: RegisterId, value: u32) {
        let (Some(plan), Some(card)) = (&self.plan.card, &self.model.card) else { return };
        let told = &mut self.address_told;
        (told.0, told.1) = (told.0 || id == plan.address.0, told.1 || id == plan.address.1);
        if id != plan.command {
            return;
        }
        let (mask, read, write) = card.direction;
        let way = match value & mask {
            bits if bits == read => Way::Read,
            bits if bits == write => Way::Write,
            _ => {
                self.transfer = None;
                return;
            }
        };
        let (address, left) = (self.pair(plan.address), self.pair(plan.count));
        self.transfer = Some(Transfer { way, address, left });
        self.counts.totals.vetted_bytes += u64::from(left);
    }

    /// Lets the address registers say where the card really is. A transfer moves on; who begins the next without an address, or with
    /// half of one, begins there. Whether a card goes on from what it has reached or from what was written is its own affair:
    /// both are the same after this.
    pub(super) fn learn_address(&mut self) {
        let Some(plan) = self.plan.card else { return };
        if self.address_told == (true, true) {
            return;
        }
        let reached = [plan.reached.0, plan.reached.1].map(|register| self.peek(register) & 0xff);
        for (register, value) in [plan.address.0, plan.address.1].into_iter().zip(reached) {
            if !self.bus.gone() && self.machine.value(register) & 0xff != value {
                self.machine.note(register, value);
                self.poke(register, value);
            }
        }
        self.rechoose();
        self.address_told = (true, true);
    }

    /// A transfer that the port is open for.
    pub(super) fn open_transfer(&self) -> Option<Transfer> {
        let port = self.plan.card?.port;
        self.transfer.filter(|transfer| transfer.left > 0 && !self.machine.hooked(port, transfer.way))
    }

    /// Bytes that the card moves for an access to its port of one or two bytes.
    fn element(&self) -> u32 {
        let words = self.plan.card.as_ref().zip(self.model.card.as_ref());
        words.map_or(1, |(plan, card)| if self.machine.value(plan.words) & card.words.1 != 0 { 2 } else { 1 })
    }

    /// The receive ring in bytes, first and end.
    fn ring_bytes(&self) -> (u32, u32) {
        self.card_ring(|id| self.machine.value(id)).unwrap_or((0, 0))
    }

    /// How many bytes the next access to the port has, of `wanted` that are left of one of the guest's of `width`. None are moved that the
    /// guest may not have: there are cards that go on behind the count. And the end of the ring is met exactly: there are
    /// cards that pass it otherwise.
    fn port_step(&self, wanted: usize, width: usize) -> Option<usize> {
        let Transfer { way, address, left } = self.transfer.filter(|transfer| transfer.left > 0)?;
        let end = self.ring_bytes().1;
        let allowed = || left >= 4 || self.may_move(way, address, 4, |id| self.machine.value(id));
        let whole = (address >= end || end - address >= 4) && allowed();
        match wanted {
            0 => None,
            4.. if whole => Some(4),
            _ if width > 2 => Some(wanted.min(self.element() as usize)),
            _ => Some(wanted),
        }
    }

    /// The guest reads the data port. What was not asked for from the card reads as zero.
    pub(super) fn port_reads(&mut self, bar: u8, id: RegisterId, out: &mut [u8]) {
        let (offset, width) = (self.machine.register(id).offset.into(), out.len());
        let mut from = 0;
        while let Some(step) = self.port_step(width - from, width) {
            self.bus.read_at(bar, offset, &mut out[from..from + step]);
            self.ported(step);
            from += step;
        }
    }

    /// The guest writes the data port.
    pub(super) fn port_writes(&mut self, bar: u8, id: RegisterId, bytes: &[u8]) {
        let (offset, width) = (self.machine.register(id).offset.into(), bytes.len());
        let mut from = 0;
        while let Some(step) = self.port_step(width - from, width) {
            self.bus.write_at(bar, offset, &bytes[from..from + step]);
            self.ported(step);
            from += step;
        }
    }

    /// An access of so many bytes has gone through the data port.
    fn ported(&mut self, width: usize) {
        let moved = if width >= 4 { 4 } else { self.element() };
        self.counts.totals.port_bytes += u64::from(moved);
        self.address_told = (false, false);
        let (first, end) = self.ring_bytes();
        let Some(transfer) = &mut self.transfer else { return };
        transfer.left = transfer.left.saturating_sub(moved);
        let next = transfer.address + moved;
        let passes = transfer.address < end && next >= end;
        transfer.address = if passes { first + (next - end) } else { next & 0xffff };
        if transfer.left == 0 {
            self.transfer = None;
            // Told when the access is through.
            self.all_moved = true;
        }
    }

    /// Tells the model that a transfer has ended, once the access that ended it has happened.
    pub(super) fn tell_moved(&mut self) {
        if std::mem::take(&mut self.all_moved) {
            self.tell(Seen::Moved);
        }
    }

    /// Begins a transfer of the monitor's own.
    fn command(&mut self, way: Way, address: u32, count: u32) {
        let (Some(plan), Some(card)) = (self.plan.card, &self.model.card) else { return };
        let (mask, read, write) = card.direction;
        let now = self.peek(plan.command);
        let bits = if way == Way::Read { read } else { write };
        for (register, value) in [(plan.address.0, address), (plan.address.1, address >> 8)] {
            self.poke(register, value & 0xff);
        }
        for (register, value) in [(plan.count.0, count), (plan.count.1, count >> 8)] {
            self.poke(register, value & 0xff);
        }
        let (bank, field) = (self.bus.bank, self.model.banks.map_or(0, |banks| u32::from(banks.mask)));
        let shift = self.model.banks.map_or(0, |banks| u32::from(banks.shift % 8));
        self.poke(plan.command, now & !mask & !field | u32::from(bank) << shift & field | bits);
        self.address_told = (false, false);
    }

    /// The status bits that a transfer of ours left behind are nobody's.
    fn hush(&mut self) {
        let status = self.machine.register(self.plan.status);
        let bits = super::bus::full(status) & !self.model.interrupts.live;
        self.poke(self.plan.status, bits);
    }

    /// Fills the card's memory that a guest can write from `bytes`, or with zeros. The steps of bringing a card back that come before
    /// have started it: it moves words, keeps no frame, and has no ring.
    pub(super) fn fill_card(&mut self, bytes: Option<&[u8]>) {
        let (Some(plan), Some(card)) = (self.plan.card, &self.model.card) else { return };
        let port = self.machine.register(plan.port);
        let step = usize::from(port.width).clamp(2, STEP);
        let mut at = 0;
        for (first, end) in card.writable {
            let count = whole(*first, *end);
            self.command(Way::Write, *first, count);
            let until = at + count as usize;
            while at < until {
                let step = step.min(until - at);
                let piece = bytes.and_then(|bytes| bytes.get(at..at + step)).unwrap_or(&[0; STEP][..step]);
                self.bus.write_at(self.model.bar, port.offset.into(), piece);
                at += step;
            }
        }
        self.hush();
    }

    /// All of the card's memory that a guest can write; before it comes what comes before [`Monitor::fill_card`].
    pub(super) fn read_card(&mut self) -> Option<Vec<u8>> {
        let (plan, card) = (self.plan.card?, self.model.card.as_ref()?);
        let port = self.machine.register(plan.port);
        let step = usize::from(port.width).clamp(2, STEP);
        let mut bytes = Vec::with_capacity(self.card_size());
        for (first, end) in card.writable {
            let count = whole(*first, *end);
            self.command(Way::Read, *first, count);
            let until = bytes.len() + count as usize;
            while bytes.len() < until {
                let mut piece = [0; STEP];
                let piece = &mut piece[..step.min(until - bytes.len())];
                self.bus.read_at(self.model.bar, port.offset.into(), piece);
                bytes.extend_from_slice(piece);
            }
        }
        self.hush();
        Some(bytes)
    }

    /// How many bytes [`Monitor::read_card`] gives.
    pub(super) fn card_size(&self) -> usize {
        let ranges = self.model.card.as_ref().map_or(&[][..], |card| card.writable);
        ranges.iter().map(|(first, end)| whole(*first, *end) as usize).sum()
    }

    /// Takes a transfer up again where it was.
    pub(super) fn continue_transfer(&mut self, transfer: Transfer) {
        self.command(transfer.way, transfer.address, transfer.left);
        self.transfer = Some(transfer);
        self.rechoose();
    }

    /// Whether the card's receive ring holds nothing that the guest has not read, by the hardware's registers.
    pub(super) fn emptied(&mut self) -> bool {
        let Some(plan) = self.plan.card else { return false };
        let (start, stop) = (self.machine.value(plan.start) as u8, self.machine.value(plan.stop) as u8);
        let boundary = self.peek(plan.boundary) as u8;
        let current = self.peek(plan.current) as u8;
        self.rechoose();
        !self.bus.gone() && Pages::empty(start, stop, boundary, current)
    }
}
