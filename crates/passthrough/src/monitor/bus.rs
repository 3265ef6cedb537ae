//! The hardware, one register at a time, and what becomes of an access that fails.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::{Register, RegisterId};

use super::counts::MonitorFault;

/// So many failed calls one after the other, and the hardware counts as gone.
const FAILURES: u32 = 8;

const HERE: &str = "the hardware is given back last";

/// The hardware and the BAR of its registers.
#[derive(Debug)]
pub(super) struct Bus<H> {
    /// Until it is given back.
    hardware: Option<H>,
    bar: u8,
    /// The bank that the hardware has chosen.
    pub(super) bank: u8,
    failures: u32,
    gone: bool,
    /// What [`Bus::failure`] says.
    failure: Option<String>,
    /// What went wrong and has not been counted yet.
    faults: Vec<MonitorFault>,
}

impl<H: Hardware> Bus<H> {
    pub(super) fn new(hardware: H, bar: u8) -> Self {
        Bus {
            hardware: Some(hardware),
            bar,
            bank: 0,
            failures: 0,
            gone: false,
            failure: None,
            faults: Vec::new(),
        }
    }

    pub(super) fn hardware(&mut self) -> &mut H {
        self.hardware.as_mut().expect(HERE)
    }

    fn hardware_ref(&self) -> &H {
        self.hardware.as_ref().expect(HERE)
    }

    pub(super) fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        self.hardware_ref().interrupt()
    }

    pub(super) fn name(&self) -> &str {
        self.hardware_ref().name()
    }

    pub(super) fn is_here(&self) -> bool {
        self.hardware.is_some()
    }

    /// Gives the hardware back, the first time; nothing else may be called afterwards.
    pub(super) fn give_back(&mut self) -> Option<H> {
        self.hardware.take()
    }

    pub(super) fn gone(&self) -> bool {
        self.gone
    }

    /// From here on [`Bus::failure`] says what fails first.
    pub(super) fn forget_failure(&mut self) {
        self.failure = None;
    }

    /// What failed first since [`Bus::forget_failure`], where the hardware did answer. One failed call among thousands counts here, however few make the hardware gone.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Faults since the last call.
    pub(super) fn faults(&mut self) -> Option<Vec<MonitorFault>> {
        (!self.faults.is_empty()).then(|| std::mem::take(&mut self.faults))
    }

    /// Keeps a fault until it is counted.
    pub(super) fn report(&mut self, fault: MonitorFault) {
        self.faults.push(fault);
    }

    /// Takes the outcome of a call; whether it was well.
    pub(super) fn judge(&mut self, outcome: Result<(), HardwareError>) -> bool {
        let error = match outcome {
            Ok(()) => {
                self.failures = 0;
                return true;
            }
            Err(error) => error,
        };
        let text = error.to_string();
        if !matches!(error, HardwareError::Gone { .. }) {
            self.failure.get_or_insert_with(|| text.clone());
        }
        match error {
            HardwareError::Gone { .. } => self.lose(text),
            HardwareError::NoSuchRegister { .. } => {
                self.faults.push(MonitorFault::register("no-such-register", text));
            }
            HardwareError::Os { .. }
            | HardwareError::Closed { .. }
            | HardwareError::Forbidden { .. }
            | HardwareError::Kept { .. }
            | HardwareError::Left { .. }
            | HardwareError::NoRoom { .. }
            | HardwareError::Lost { .. }
            | HardwareError::NotWiped { .. }
            | HardwareError::StuckInReset { .. }
            | HardwareError::Unreachable { .. }
            | HardwareError::Unresettable { .. }
            | HardwareError::Unwatched { .. } => {
                self.failures += 1;
                if self.failures >= FAILURES {
                    self.lose(format!("{text}; given up after {FAILURES} failures"));
                } else {
                    self.faults.push(MonitorFault::hardware("hardware-error", text));
                }
            }
        }
        false
    }

    pub(super) fn lose(&mut self, text: String) {
        if !self.gone {
            self.gone = true;
            self.faults.push(MonitorFault::hardware("gone", text));
        }
    }

    /// Registers read as all ones: asks whether the function is still there.
    pub(super) fn suspect(&mut self) {
        let answers = match self.hardware().answers() {
            Ok(yes) => yes,
            Err(error) => self.judge(Err(error)),
        };
        if !answers {
            let text = format!("{} is gone: it answers with all ones", self.name());
            self.lose(text);
        }
    }

    /// As the guest asked for it: 1 to 8 bytes of any alignment, in steps that the hardware has. All ones if it fails.
    pub(super) fn read_at(&mut self, bar: u8, offset: u64, out: &mut [u8]) {
        let mut at = 0;
        while at < out.len() && !self.gone {
            let step = step(offset + at as u64, out.len() - at);
            let read = self.hardware().read(bar, offset + at as u64, &mut out[at..at + step]);
            if !self.judge(read) {
                out[at..].fill(0xff);
                return;
            }
            at += step;
        }
        out[at..].fill(0xff);
    }

    /// As [`Bus::read_at`], to write.
    pub(super) fn write_at(&mut self, bar: u8, offset: u64, bytes: &[u8]) {
        let mut at = 0;
        while at < bytes.len() && !self.gone {
            let step = step(offset + at as u64, bytes.len() - at);
            let wrote = self.hardware().write(bar, offset + at as u64, &bytes[at..at + step]);
            if !self.judge(wrote) {
                return;
            }
            at += step;
        }
    }

    /// A register of the bank that is chosen.
    pub(super) fn read(&mut self, register: &Register) -> u32 {
        let mut bytes = [0xff; 4];
        let width = usize::from(register.width).min(4);
        self.read_at(self.bar, register.offset.into(), &mut bytes[..width]);
        bytes[width..].fill(0);
        u32::from_le_bytes(bytes)
    }

    /// A register of the bank that is chosen.
    pub(super) fn write(&mut self, register: &Register, value: u32) {
        let width = usize::from(register.width).min(4);
        self.write_at(self.bar, register.offset.into(), &value.to_le_bytes()[..width]);
    }
}

/// The largest aligned step that fits.
fn step(offset: u64, left: usize) -> usize {
    [4, 2, 1].into_iter().find(|step| *step <= left && offset.is_multiple_of(*step as u64)).unwrap_or(1)
}

/// The bits of a register that a part of it covers: `within` bytes from its first, `width` bytes.
pub(super) fn lanes(within: u16, width: u8) -> u32 {
    let (within, width) = (u32::from(within), u32::from(width));
    if within >= 4 {
        return 0;
    }
    let ones = if width >= 4 { u32::MAX } else { (1 << (8 * width)) - 1 };
    ones << (8 * within)
}

/// All bits of a register.
pub(super) fn full(register: &Register) -> u32 {
    lanes(0, register.width.min(4) as u8)
}

/// One bit of a set of registers.
pub(super) fn bit(id: RegisterId) -> u128 {
    1 << (id.index() % 128)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_go_in_aligned_steps() {
        assert_eq!([step(0, 8), step(0, 3), step(2, 4), step(1, 4), step(4, 1)], [4, 2, 2, 1, 1]);
        assert_eq!(
            [lanes(0, 4), lanes(1, 2), lanes(3, 1), lanes(3, 4), lanes(4, 1)],
            [u32::MAX, 0x00ff_ff00, 0xff00_0000, 0xff00_0000, 0]
        );
    }
}
