//! The half of a monitor that is the card's: what is there whoever the guest is.
//!
//! | field | why it outlives the guest |
//! |---|---|
//! | `info`, `model`, `plan`, `policies` | what the card is, and what its owner wants done with it |
//! | `bus`, `unusable` | the hardware, its bank, whether it is gone or stuck in its reset: the next guest gets the same one |
//! | `own` | the memory of the copies of descriptors: mapped as long as the hardware is ours, emptied for each guest |
//! | `address_told` | what the hardware's registers are not known to say: a reset leaves them where they are |
//! | `masked`, `idle`, `storm` | the hardware's interrupt, which is ours; the guest has one of its own |
//! | `parked` | saved registers, and all else that the device is brought back from: between two guests that is a reset one, and what is loaded for the next guest is there before it comes |
//! | `counts` | counts of a function only rise; what a guest's half has counted is added when it goes |

use ioplane_device::DeviceInfo;
use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::MemoryRegion;
use ioplane_model::StateModel;

use super::bus::Bus;
use super::counts::Counts;
use super::plan::MonitorPlan;
use super::policy::Policies;
use super::quiescence::QuiescentState;

/// The card; see the module.
pub(super) struct Card<H: Hardware> {
    pub(super) info: DeviceInfo,
    pub(super) bus: Bus<H>,
    pub(super) model: &'static StateModel,
    pub(super) plan: MonitorPlan,
    /// Of the rings' copies, mapped for the hardware.
    pub(super) own: Option<MemoryRegion>,
    /// Whether the data port's address, low and high byte, is what was last written.
    pub(super) address_told: (bool, bool),
    /// The hardware's INTA# is masked, by itself, until it is unmasked.
    pub(super) masked: bool,
    /// Interrupts in a row that meant nothing.
    pub(super) idle: u32,
    pub(super) storm: bool,
    pub(super) policies: Policies,
    /// Its last reset or wipe failed: nobody knows what the hardware would do, or whose bytes its memory holds. It is left alone, and answers
    /// with all ones, until one succeeds.
    pub(super) unusable: Option<String>,
    pub(super) counts: Counts,
    /// The device stands still: how it is to go on.
    pub(super) parked: Option<Box<QuiescentState>>,
}

impl<H: Hardware> Card<H> {
    pub(super) fn new(
        info: DeviceInfo,
        bus: Bus<H>,
        model: &'static StateModel,
        plan: MonitorPlan,
        own: Option<MemoryRegion>,
        policies: Policies,
    ) -> Self {
        Card {
            info,
            bus,
            model,
            plan,
            own,
            address_told: (false, false),
            masked: false,
            idle: 0,
            storm: false,
            policies,
            unusable: None,
            counts: Counts::new(),
            parked: None,
        }
    }

    /// Whether it is beyond use: gone, or not to be reset.
    pub(super) fn dead(&self) -> bool {
        self.bus.gone() || self.unusable.is_some()
    }

    /// It uses no memory from here on.
    pub(super) fn silence(&mut self) {
        let silenced = self.bus.hardware().master(false);
        self.bus.judge(silenced);
    }

    /// What is said of hardware that no longer answers.
    pub(super) fn lost(&self) -> HardwareError {
        HardwareError::Gone { function: self.bus.name().to_owned() }
    }
}
