//! The half of a monitor that is the guest's: what is dropped when it leaves ([`Function::dismiss`](ioplane_pci::Function::dismiss)), so that
//! the next one begins with a half of its own.
//!
//! | field | why it goes with the guest |
//! |---|---|
//! | `machine` | what this guest has written, and the states that its accesses led to |
//! | `dma` | the memory that it has granted, in the IOMMU |
//! | `rings`, `blocks`, `transfer`, `all_moved` | its descriptors and transfers under way, counted |
//! | `tables`, `unread` | words of tables that it has written; counts that it has not read |
//! | `interrupts`, `recalled` | status and mask as it sees them; registers that are shown to it as another card had them |
//! | `config`, `line`, `error_call`, `bars`, `page` | its configuration space, its INTA#, who is told of errors, the BARs that it was shown and the page behind one of them |
//! | `stopped`, `reset_at` | the policy that struck it; since when it has done nothing |
//!
//! A guest that resets the device stays: its memory and its wires are kept, all else begins again
//! ([`Monitor::forget`](super::Monitor::forget)).

use std::sync::Arc;

use ioplane_device::Interrupt;
use ioplane_hardware::Hardware;
use ioplane_model::{Machine, StateModel, Transfer};
use ioplane_pci::{BarMap, ConfigSpace, Identity, Irqs, Line};

use super::counts::MonitorFault;
use super::dma_window::DmaWindow;
use super::page::Page;
use super::rings::ShadowRing;
use super::rings::queue::Queue;
use super::words::{Tables, Unread};

/// INTA#, and the error that stops a guest.
pub(super) const IRQS: Irqs = Irqs { intx: 1, msi: 0, msix: 0, error: 1 };

/// The interrupt status and mask as the guest sees them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Virtual {
    pub(super) status: u32,
    pub(super) mask: u32,
    /// Live bits of the hardware's status when it was last read.
    pub(super) live: u32,
}

/// A block of guest memory that the device writes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct BlockState {
    /// What the guest wrote.
    pub(super) low: u32,
    pub(super) high: u32,
    /// Being written by the device: guest address.
    pub(super) busy: Option<u64>,
}

/// The guest; see the module.
pub(super) struct Guest {
    pub(super) machine: Machine,
    pub(super) bars: BarMap,
    pub(super) config: ConfigSpace,
    pub(super) line: Line,
    pub(super) dma: DmaWindow,
    pub(super) rings: Vec<ShadowRing>,
    pub(super) blocks: Vec<BlockState>,
    pub(super) transfer: Option<Transfer>,
    /// It has just ended.
    pub(super) all_moved: bool,
    pub(super) tables: Tables,
    pub(super) unread: Unread,
    pub(super) interrupts: Virtual,
    /// Registers that are shown as another card had them: one bit each. Their values are the machine's.
    pub(super) recalled: u128,
    /// The policy `stop` has struck.
    pub(super) stopped: bool,
    /// How many accesses the card had seen when it was reset last: none have come since if it is as many now.
    pub(super) reset_at: u64,
    pub(super) error_call: Option<Arc<dyn Interrupt>>,
    pub(super) page: Option<Page>,
}

impl Guest {
    /// One that has done nothing yet. `machine` is as after a reset; `rings` are empty, and one each of the model's.
    pub(super) fn new(
        machine: Machine,
        identity: &Identity,
        (bars, page): (BarMap, Option<Page>),
        rings: Vec<ShadowRing>,
    ) -> Self {
        let model: &StateModel = machine.model();
        Guest {
            config: ConfigSpace::new(identity, &bars, IRQS),
            dma: DmaWindow::new(!model.rings.is_empty() || !model.blocks.is_empty()),
            blocks: vec![BlockState::default(); model.blocks.len()],
            machine,
            bars,
            line: Line::new(),
            rings,
            transfer: None,
            all_moved: false,
            tables: Tables::new(),
            unread: Unread::new(),
            interrupts: Virtual::default(),
            recalled: 0,
            stopped: false,
            reset_at: 0,
            error_call: None,
            page,
        }
    }

    /// The half of the next guest. What this one has granted is taken back from the hardware. The BARs and their page are handed on: the
    /// next guest gets fresh ones when it is admitted, and until then they are what the function has.
    pub(super) fn leave(&mut self, hardware: &mut impl Hardware) -> Guest {
        self.dma.clear(hardware);
        let mut machine = self.machine.clone();
        machine.reset();
        let rings = self.rings.iter().map(ShadowRing::emptied).collect();
        let shown = (self.bars.clone(), self.page.take());
        Guest::new(machine, &hardware.identity(), shown, rings)
    }

    /// Half of a ring's base address as the guest knows it.
    pub(super) fn base_half(&self, ring: u8, high: bool) -> u32 {
        let base = self.rings.get(usize::from(ring)).map_or(0, |ring| ring.base);
        if high { (base >> 32) as u32 } else { base as u32 }
    }

    /// Whether the place of a ring may change: a ring that is followed to its tail only while nothing of it is the hardware's.
    pub(super) fn movable(&mut self, ring: u8) -> Result<&mut ShadowRing, MonitorFault> {
        let Guest { rings, dma, .. } = self;
        let Some(ring) = rings.get_mut(usize::from(ring)) else {
            return Err(MonitorFault::register("denied", "there is no such ring"));
        };
        if ring.queue.is_some() {
            ring.harvest(dma);
            let waiting = ring.in_flight();
            if waiting > 0 {
                let text = format!(
                    "ring {} changes while {waiting} of its descriptors are the hardware's",
                    ring.table.name
                );
                return Err(MonitorFault::register("ring-busy", text));
            }
        }
        Ok(ring)
    }

    pub(super) fn set_base(&mut self, ring: u8, high: bool, value: u32) {
        let Some(ring) = self.rings.get_mut(usize::from(ring)) else { return };
        ring.base = match high {
            true => ring.base & 0xffff_ffff | u64::from(value) << 32,
            false => ring.base & !0xffff_ffff | u64::from(value),
        };
    }

    /// What a register of a ring that is followed to its tail says.
    pub(super) fn of_queue(&self, ring: u8, says: impl FnOnce(&ShadowRing, &Queue) -> u32) -> u32 {
        let ring = self.rings.get(usize::from(ring));
        ring.and_then(|ring| Some(says(ring, ring.queue.as_ref()?))).unwrap_or(0)
    }

    /// The guest is about to write the tail of a ring.
    pub(super) fn propose(&mut self, ring: u8, tail: u32) {
        if let Some(queue) = self.rings.get_mut(usize::from(ring)).and_then(|ring| ring.queue.as_mut()) {
            queue.propose(tail);
        }
    }

    /// Half of a block's address as the guest knows it; the flag that starts it is there until the hardware was seen to have ended.
    pub(super) fn block_half(&self, block: u8, high: bool) -> u32 {
        let block = self.blocks.get(usize::from(block));
        block.map_or(0, |block| if high { block.high } else { block.low })
    }

    /// The device has written a block.
    pub(super) fn block_done(&mut self, at: usize) {
        let model = self.machine.model();
        let Some((state, table)) = self.blocks.get_mut(at).zip(model.blocks.get(at)) else { return };
        if let Some(gpa) = state.busy.take() {
            state.low &= !table.start;
            self.dma.view().wrote(gpa, table.size.into());
        }
    }

    /// Whether the hardware may be using this guest's memory now.
    pub(super) fn lends(&self) -> bool {
        self.rings.iter().any(|ring| ring.live) || self.blocks.iter().any(|block| block.busy.is_some())
    }

    /// Tells the VMM that something is wrong with the function.
    pub(super) fn cry(&self) {
        if let Some(call) = &self.error_call {
            call.signal();
        }
    }
}
