//! What happens around a function of this host while another takes its state, or while it comes to rest.

use std::path::Path;
use std::time::{Duration, Instant};

use ioplane_api::spec::PciAddress;
use ioplane_hardware::PhysicalFunction;
use ioplane_moving::Surroundings;

use super::SYSFS;
use crate::refusal::Refusal;

/// Between two looks at the hardware.
const LOOK: Duration = Duration::from_micros(100);
/// Frames that have not come for so long are sent once more.
const AGAIN: Duration = Duration::from_millis(20);

/// A host with time that passes, and the physical function that frames come from.
pub(super) struct Here {
    /// Who sends frames; nobody where the driver brings its rings back itself.
    physical: Option<PhysicalFunction>,
    patience: Duration,
    deadline: Option<Instant>,
    /// How many frames were missing when some were sent last, and when.
    asked: Option<(u32, Instant)>,
}

impl Here {
    pub(super) fn new(physical: Option<PhysicalFunction>, patience: Duration) -> Self {
        Here { physical, patience, deadline: None, asked: None }
    }
}

impl Surroundings for Here {
    fn wait(&mut self) -> bool {
        let patience = self.patience;
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + patience);
        std::thread::sleep(LOOK);
        Instant::now() < deadline
    }

    fn fill(&mut self, address: [u8; 6], count: u32) -> std::io::Result<()> {
        let now = Instant::now();
        if let Some((missing, at)) = &mut self.asked
            && *missing >= count
        {
            // Some have come since, or are on their way: no more are sent than are needed.
            if *missing > count {
                (*missing, *at) = (count, now);
            }
            if now < *at + AGAIN {
                return Ok(());
            }
        }
        self.asked = Some((count, now));
        match &mut self.physical {
            Some(physical) => physical.send(address, count),
            None => Err(std::io::Error::other("no physical function is asked")),
        }
    }
}

/// Who sends frames to the virtual function at `of`. Blocks.
pub(super) fn physical(of: PciAddress) -> Result<PhysicalFunction, Refusal> {
    PhysicalFunction::of(Path::new(SYSFS), of).map_err(|error| {
        Refusal::conflict(
            format!("frames to {of} cannot be sent from its physical function: {error}"),
            "the card's physical function has to be driven by this host, with its interface up",
        )
    })
}
