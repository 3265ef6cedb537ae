//! Causes, masks and vectors: a cause is a vector's bit, as in the MSI-X mode of a VF.

use ioplane_pci::Vectors;

use super::spec::*;

/// The vectors' bits.
const ALL: u32 = (1 << VECTORS) - 1;

/// The registers of page 1.
#[derive(Debug)]
pub(super) struct Interrupts {
    cause: u32,
    mask: u32,
    auto_clear: u32,
    auto_mask: u32,
    throttle: [u32; VECTORS as usize],
    ivar: u32,
    ivar_misc: u32,
    pub(super) vectors: Vectors,
}

impl Interrupts {
    pub(super) fn new() -> Interrupts {
        Interrupts {
            cause: 0,
            mask: 0,
            auto_clear: 0,
            auto_mask: 0,
            throttle: [0; VECTORS as usize],
            ivar: 0,
            ivar_misc: 0,
            vectors: Vectors::new(VECTORS),
        }
    }

    /// Everything but the vectors, which are of the bus.
    pub(super) fn reset(&mut self) {
        let vectors = std::mem::replace(&mut self.vectors, Vectors::new(0));
        *self = Interrupts { vectors, ..Interrupts::new() };
    }

    pub(super) fn read(&mut self, offset: u64) -> Option<u32> {
        Some(match offset {
            EIMS | EIMC => self.mask,
            EIAC => self.auto_clear,
            EIAM => self.auto_mask,
            // Reading takes the causes that are not cleared by themselves.
            EICR => {
                let value = self.cause;
                self.cause &= self.auto_clear;
                value
            }
            EICS => 0,
            IVAR0 => self.ivar,
            IVAR_MISC => self.ivar_misc,
            _ => *self.throttle.get(throttle(offset)?)?,
        })
    }

    /// `false`: no such register.
    pub(super) fn write(&mut self, offset: u64, value: u32) -> bool {
        match offset {
            EICS => self.raise(value & ALL),
            EIMS => {
                self.mask |= value & ALL;
                self.raise(0);
            }
            EIMC => self.mask &= !value,
            EIAC => self.auto_clear = value & ALL,
            EIAM => self.auto_mask = value & ALL,
            EICR => self.cause &= !value,
            IVAR0 => self.ivar = value,
            IVAR_MISC => self.ivar_misc = value,
            _ => match throttle(offset).and_then(|at| self.throttle.get_mut(at)) {
                Some(place) => *place = value,
                None => return false,
            },
        }
        true
    }

    /// A queue's cause: its entry in IVAR0 is a byte, receive before transmit.
    pub(super) fn queue(&mut self, queue: usize, transmit: bool) {
        let entry = self.ivar >> (16 * queue as u32 + 8 * u32::from(transmit)) & 0xff;
        self.entry(entry);
    }

    pub(super) fn mailbox(&mut self) {
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

fn throttle(offset: u64) -> Option<usize> {
    let at = offset.checked_sub(EITR)?;
    (at.is_multiple_of(4) && at / 4 < u64::from(VECTORS)).then_some((at / 4) as usize)
}
