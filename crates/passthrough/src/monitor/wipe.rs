//! Memory of the device, emptied for whoever comes next.

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::StateModel;

use super::{Halves, Monitor, MonitorError, MonitorOptions};

impl<H: Hardware> Monitor<H> {
    /// Leaves nothing in the memory behind the data port.
    ///
    /// # Errors
    ///
    /// As [`Monitor::fill_memory`].
    pub(super) fn wipe(&mut self) -> Result<(), HardwareError> {
        if self.card.bus.gone() {
            return Err(self.card.lost());
        }
        self.card.bus.forget_failure();
        let Some(()) = self.open_port(&[]) else { return Ok(()) };
        let filled = self.fill_memory(None);
        self.halt();
        filled
    }

    /// Resets hardware, wipes its memory and resets it again, for a guest that will have it unwatched. Nothing is mapped, and no interrupt is
    /// listened to. The hardware comes back in any case, off the bus.
    ///
    /// # Errors
    ///
    /// What a monitor cannot be made for, a reset that fails, the first access that fails: its memory may still hold what it held.
    pub(crate) fn empty(hardware: H, model: &'static StateModel) -> (H, Result<(), MonitorError>) {
        let options = MonitorOptions { shadows: false, ..MonitorOptions::new(hardware.name()) };
        let halves = match Halves::new(&hardware, model, options) {
            Ok(halves) => halves,
            Err(error) => return (hardware, Err(error)),
        };
        let mut monitor = halves.around(hardware);
        let emptied = monitor.empty_memory();
        (monitor.card.bus.give_back().expect("it is given back once: the monitor is ours"), emptied)
    }

    fn empty_memory(&mut self) -> Result<(), MonitorError> {
        self.open_registers()?;
        self.reset_hardware()?;
        self.guest.machine.reset();
        self.learn_bank();
        self.wipe()?;
        Ok(self.reset_hardware()?)
    }
}
