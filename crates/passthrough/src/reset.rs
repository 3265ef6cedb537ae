//! The reset of a card that has none of its own, by its registers: whether the card is mediated or handed on as it is.

use std::time::{Duration, Instant};

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::{Banks, Register, StateModel, Way, Writes};

/// How long a card may take to come out of a reset.
const ENDS: Duration = Duration::from_millis(100);

/// A model's way of resetting its card ([`StateModel::reset`]), its names looked up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ByRegisters {
    bar: u8,
    bank: Option<(&'static Register, Banks)>,
    by: &'static Register,
    way: Way,
    value: u32,
    done: &'static Register,
    mask: u32,
    is: u32,
    settle: Duration,
}

impl ByRegisters {
    /// `None`: the model names what it does not have. One that is sound ([`ioplane_model::verify`]) has it.
    pub(crate) fn new(model: &'static StateModel) -> Option<Self> {
        let find = |name: &str| model.registers.iter().find(|register| register.name == name);
        let ((by, way, value), (done, mask, is)) = (model.reset.by, model.reset.done);
        let bank = match model.banks {
            Some(banks) => Some((find(banks.register)?, banks)),
            None => None,
        };
        let settle = Duration::from_millis(model.reset.settle.into());
        Some(ByRegisters {
            bar: model.bar,
            bank,
            by: find(by)?,
            way,
            value,
            done: find(done)?,
            mask,
            is,
            settle,
        })
    }

    /// The register whose writing resets and what is written, if the card is not reset by reading.
    pub(crate) fn written(&self) -> Option<(&'static Register, u32)> {
        (self.way == Way::Write).then_some((self.by, self.value))
    }

    /// Resets the card and waits for the end of that, at most 100 ms. Its first bank is chosen then.
    ///
    /// # Errors
    ///
    /// [`HardwareError::Gone`], [`HardwareError::StuckInReset`], or the first access that fails: nobody knows then how far it came.
    pub(crate) fn reset<H: Hardware>(&self, hardware: &mut H) -> Result<(), HardwareError> {
        if let Some((register, banks)) = self.bank {
            // Not every chip goes back to its first bank by itself. Which one it has now, only the chip knows: it may have been
            // somebody else's.
            let now = self.read(hardware, register)? as u8;
            let first = now & banks.keep & !banks.mask | banks.set & !banks.mask;
            self.write(hardware, register, first.into())?;
        }
        match self.way {
            Way::Write => self.write(hardware, self.by, self.value)?,
            Way::Read => {
                let value = self.read(hardware, self.by)?;
                // Drivers write back what they read, which ends the reset on cards that do not end it by themselves.
                if self.by.writes != Writes::Never {
                    self.write(hardware, self.by, value)?;
                }
            }
        }
        if !self.settle.is_zero() {
            std::thread::sleep(self.settle);
        }
        let deadline = Instant::now() + ENDS;
        loop {
            // It is looked at once more after that, however long this thread did not run.
            let late = Instant::now() >= deadline;
            let value = self.read(hardware, self.done)?;
            // All ones may mean what is waited for, or that nobody answers.
            if value == ones(self.done) && !hardware.answers()? {
                return Err(HardwareError::Gone { function: hardware.name().to_owned() });
            }
            if value & self.mask == self.is {
                return Ok(());
            }
            if late {
                return Err(HardwareError::StuckInReset {
                    function: hardware.name().to_owned(),
                    after: ENDS,
                });
            }
            std::thread::yield_now();
        }
    }

    fn read<H: Hardware>(&self, hardware: &mut H, register: &Register) -> Result<u32, HardwareError> {
        let mut bytes = [0; 4];
        hardware.read(self.bar, register.offset.into(), &mut bytes[..width(register)])?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn write<H: Hardware>(
        &self,
        hardware: &mut H,
        register: &Register,
        value: u32,
    ) -> Result<(), HardwareError> {
        hardware.write(self.bar, register.offset.into(), &value.to_le_bytes()[..width(register)])
    }
}

/// Its bytes; of a wider register no value is kept.
fn width(register: &Register) -> usize {
    usize::from(register.width).min(4)
}

fn ones(register: &Register) -> u32 {
    let mut bytes = [0; 4];
    bytes[..width(register)].fill(0xff);
    u32::from_le_bytes(bytes)
}
