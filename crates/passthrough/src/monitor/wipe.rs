//! Memory of the device, emptied for whoever comes next.

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_model::StateModel;

use super::{Halves, Monitor, MonitorError, MonitorOptions};

impl<H: Hardware> Monitor<H> {
    /// Leaves nothing in the memory behind the data port.
    pub(super) fn wipe(&mut self) {
        if !self.card.bus.gone() && self.open_port(&[]).is_some() {
            self.fill_memory(None);
            self.halt();
        }
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
        // One way of resetting may have failed where the next did not.
        drop(self.card.bus.faults());
        self.guest.machine.reset();
        self.learn_bank();
        self.wipe();
        // The first fault says what failed: after some of them the card counts as gone.
        match self.card.bus.faults().and_then(|faults| faults.into_iter().next()) {
            Some(fault) if fault.name != "gone" => {
                let function = self.card.bus.name().to_owned();
                return Err(HardwareError::NotWiped { function, why: fault.text }.into());
            }
            _ if self.card.bus.gone() => return Err(self.card.lost().into()),
            _ => {}
        }
        Ok(self.reset_hardware()?)
    }
}
