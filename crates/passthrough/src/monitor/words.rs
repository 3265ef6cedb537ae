//! Registers of many words: tables that guests write, and counters that reading clears. What a guest wrote there, and what it has not yet
//! read, goes along to other hardware.

use std::collections::BTreeMap;

use ioplane_hardware::Hardware;
use ioplane_model::{CounterBlock, RegisterId};

use super::Monitor;
use super::counts::MonitorFault;

/// Words of tables that the guest has written, by the offset of their registers.
pub(super) type Tables = BTreeMap<u16, u32>;
/// Counts that the guest has not read, by their offset in the block: what is added to what the hardware says next.
pub(super) type Unread = BTreeMap<u16, u64>;

/// Whether the counter at `at` is the low or the high half of a wide one: the offset of its low half, and which.
fn half(block: &CounterBlock, at: u16) -> Option<(u16, bool)> {
    let of = |low: &u16| {
        [(*low, false), (low + 4, true)].into_iter().find(|(_, high)| low + 4 * u16::from(*high) == at)
    };
    block.wide.iter().find_map(of).map(|(low, high)| (if high { at - 4 } else { low }, high))
}

impl<H: Hardware> Monitor<H> {
    /// A whole word, or nobody knows what the hardware makes of it.
    fn word_at(offset: u64, len: usize) -> Result<u16, MonitorFault> {
        match u16::try_from(offset) {
            Ok(at) if len == 4 && at.is_multiple_of(4) => Ok(at),
            _ => Err(MonitorFault::register(
                "part-of-a-word",
                format!("{len} bytes at {offset:#x}, where words of 4 bytes are"),
            )),
        }
    }

    /// The guest writes a word of a table.
    pub(super) fn write_table(&mut self, bar: u8, offset: u64, part: &[u8]) -> Result<(), MonitorFault> {
        let at = Self::word_at(offset, part.len())?;
        let word = part.try_into().map_or(0, u32::from_le_bytes);
        self.guest.tables.insert(at, word);
        self.card.bus.write_at(bar, offset, part);
        Ok(())
    }

    /// Writes a whole table as the guest has written it. Of the `preset` words at its beginning those that it has not written stay.
    pub(super) fn restore_table(&mut self, id: RegisterId, preset: u16) {
        let register = self.guest.machine.register(id);
        for word in 0..register.width / 4 {
            let at = register.offset + word * 4;
            let value = match self.guest.tables.get(&at) {
                Some(value) => *value,
                None if word < preset => continue,
                None => 0,
            };
            self.card.bus.write_at(self.card.model.bar, at.into(), &value.to_le_bytes());
        }
    }

    /// The guest reads counters.
    pub(super) fn read_counters(&mut self, bar: u8, offset: u64, out: &mut [u8]) {
        let Some((id, block)) = self.card.plan.counters else { return };
        let first = self.guest.machine.register(id).offset;
        match Self::word_at(offset, out.len()) {
            Ok(at) => {
                self.card.bus.read_at(bar, offset, out);
                let now = <[u8; 4]>::try_from(&*out).map_or(0, u32::from_le_bytes);
                out.copy_from_slice(&self.counted(block, at - first.min(at), now).to_le_bytes());
            }
            Err(fault) => self.fault(fault),
        }
    }

    /// What the guest finds in a counter that says `now`.
    fn counted(&mut self, block: &CounterBlock, at: u16, now: u32) -> u32 {
        let unread = &mut self.guest.unread;
        match half(block, at) {
            None => u32::try_from(unread.remove(&at).unwrap_or(0)).unwrap_or(u32::MAX).saturating_add(now),
            Some((low, false)) => {
                let sum = unread.remove(&low).unwrap_or(0).saturating_add(now.into());
                if sum >> 32 != 0 {
                    unread.insert(low, sum & !0xffff_ffff);
                }
                sum as u32
            }
            Some((low, true)) => {
                let carried = (unread.remove(&low).unwrap_or(0) >> 32) as u32;
                carried.saturating_add(now)
            }
        }
    }

    /// Reads all counters, before a reset clears them: the guest finds them later.
    pub(super) fn keep_counters(&mut self) {
        let Some((id, block)) = self.card.plan.counters else { return };
        let register = self.guest.machine.register(id);
        for at in (0..register.width).step_by(4) {
            let mut bytes = [0; 4];
            self.card.bus.read_at(self.card.model.bar, u64::from(register.offset + at), &mut bytes);
            let now = u64::from(u32::from_le_bytes(bytes));
            if self.card.bus.gone() || now == 0 {
                continue;
            }
            let (place, now) = match half(block, at) {
                Some((low, true)) => (low, now << 32),
                Some((low, false)) => (low, now),
                None => (at, now),
            };
            let count = self.guest.unread.entry(place).or_default();
            *count = count.saturating_add(now);
        }
    }
}
