//! Causes, masks and vectors: a cause is a vector's bit, as in the MSI-X mode of a VF.

use ioplane_pci::Vectors;

use super::chip::{InterruptLayout, RegisterLayout};
use super::spec::*;

/// The vectors' bits.
const ALL: u32 = (1 << VECTORS) - 1;

/// Registers of causes, and the vectors.
#[derive(Debug)]
pub(crate) struct Interrupts {
    cause: u32,
    mask: u32,
    auto_clear: u32,
    auto_mask: u32,
    throttle: [u32; VECTORS as usize],
    /// An entry for each pair of queues.
    ivar: Vec<u32>,
    ivar_misc: u32,
    layout: InterruptLayout,
    pub(crate) vectors: Vectors,
}

impl Interrupts {
    pub(crate) fn new(layout: &RegisterLayout) -> Interrupts {
        Interrupts {
            cause: 0,
            mask: 0,
            auto_clear: 0,
            auto_mask: 0,
            throttle: [0; VECTORS as usize],
            ivar: vec![0; layout.receive.count.div_ceil(2)],
            ivar_misc: 0,
            layout: layout.interrupts,
            vectors: Vectors::new(VECTORS),
        }
    }

    /// Everything but the vectors, which are of the bus.
    pub(crate) fn reset(&mut self, layout: &RegisterLayout) {
        let vectors = std::mem::replace(&mut self.vectors, Vectors::new(0));
        *self = Interrupts { vectors, ..Interrupts::new(layout) };
    }

    /// The register of several that follow each other from `first` on.
    fn several(registers: &mut [u32], first: u64, offset: u64) -> Option<&mut u32> {
        let at = offset.checked_sub(first).filter(|at| at.is_multiple_of(4))? / 4;
        registers.get_mut(usize::try_from(at).ok()?)
    }

    fn plain(&mut self, offset: u64) -> Option<&mut u32> {
        let layout = self.layout;
        if offset == layout.misc {
            return Some(&mut self.ivar_misc);
        }
        let throttle = Self::several(&mut self.throttle, layout.throttle, offset);
        throttle.or_else(|| Self::several(&mut self.ivar, layout.queues, offset))
    }

    pub(crate) fn read(&mut self, offset: u64) -> Option<u32> {
        let layout = self.layout;
        Some(match offset {
            _ if offset == layout.mask || offset == layout.unmask => self.mask,
            _ if offset == layout.auto_clear => self.auto_clear,
            _ if offset == layout.auto_mask => self.auto_mask,
            // Reading takes the causes that are not cleared by themselves.
            _ if offset == layout.cause => {
                let value = self.cause;
                self.cause &= self.auto_clear;
                value
            }
            _ if offset == layout.set => 0,
            _ => *self.plain(offset)?,
        })
    }

    /// `false`: no such register.
    pub(crate) fn write(&mut self, offset: u64, value: u32) -> bool {
        let layout = self.layout;
        match offset {
            _ if offset == layout.set => self.raise(value & ALL),
            _ if offset == layout.mask => {
                self.mask |= value & ALL;
                self.raise(0);
            }
            _ if offset == layout.unmask => self.mask &= !value,
            _ if offset == layout.auto_clear => self.auto_clear = value & ALL,
            _ if offset == layout.auto_mask => self.auto_mask = value & ALL,
            _ if offset == layout.cause => self.cause &= !value,
            _ => match self.plain(offset) {
                Some(place) => *place = value,
                None => return false,
            },
        }
        true
    }

    /// A queue's cause: its entry in IVAR is a byte, receive before transmit, two queues in a register.
    pub(crate) fn queue(&mut self, queue: usize, transmit: bool) {
        let ivar = self.ivar.get(queue / 2).copied().unwrap_or(0);
        let entry = ivar >> (16 * (queue % 2) as u32 + 8 * u32::from(transmit)) & 0xff;
        self.entry(entry);
    }

    pub(crate) fn mailbox(&mut self) {
        self.entry(self.ivar_misc & 0xff);
    }

    fn entry(&mut self, entry: u32) {
        if entry & IVAR_VALID != 0 {
            self.raise(1 << (entry & 3) & ALL);
        }
    }

    fn raise(&mut self, causes: u32) {
        self.cause |= causes;
        let due = self.cause & self.mask;
        for vector in (0..VECTORS).filter(|vector| due >> vector & 1 == 1) {
            self.vectors.signal(vector);
        }
        self.cause &= !(due & self.auto_clear);
        self.mask &= !(due & self.auto_mask);
    }
}
