//! Where a guest's memory lies for the hardware: a window in the IOMMU, and nothing beside it.
//!
//! ```text
//!   bus address   60 GiB  OWN      the monitor's own rings
//!                 64 GiB  WINDOW   guest address 0; guest address + 64 GiB from there on
//! ```
//!
//! Drivers of 32-bit cards give addresses below 4 GiB. Nothing is mapped there, so an address that was not translated by the
//! monitor reaches nothing, whatever happened.

use std::sync::Arc;

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion};
use ioplane_model::Way;

/// Bus address of the monitor's own memory.
pub const OWN: u64 = 60 << 30;
/// Bus address of guest address zero.
pub const WINDOW: u64 = 64 << 30;

/// The guest's memory, as far as the hardware reaches it.
#[derive(Debug)]
pub(super) struct DmaWindow {
    view: GuestView,
    /// What is mapped in the IOMMU, by rising guest address. The clone keeps the memory alive as long as it is mapped.
    mapped: Vec<MemoryRegion>,
    /// Whether the device is ever a bus master. If not it reaches no memory at all.
    reaches: bool,
}

impl DmaWindow {
    pub(super) fn new(reaches: bool) -> Self {
        DmaWindow { view: GuestView::new(Arc::new(GuestMap::default())), mapped: Vec::new(), reaches }
    }

    pub(super) fn view(&self) -> &GuestView {
        &self.view
    }

    pub(super) fn view_mut(&mut self) -> &mut GuestView {
        &mut self.view
    }

    /// The bus address of `len` bytes at `gpa`, if every one of them is guest memory that the hardware reaches, for that. Regions that
    /// touch are one for the hardware: the window keeps their distance.
    pub(super) fn bus(&self, gpa: u64, len: u64, way: Way) -> Option<u64> {
        let end = gpa.checked_add(len.max(1))?;
        let bus = gpa.checked_add(WINDOW)?;
        end.checked_add(WINDOW)?;
        let first = self.mapped.partition_point(|region| region.gpa() + region.len() <= gpa);
        let mut at = gpa;
        for region in &self.mapped[first..] {
            if region.gpa() > at || way == Way::Write && !region.writable() {
                return None;
            }
            at = region.gpa() + region.len();
            if at >= end {
                return Some(bus);
            }
        }
        None
    }

    /// Takes a map that has all of the one before.
    pub(super) fn grow(
        &mut self,
        hardware: &mut impl Hardware,
        map: Arc<GuestMap>,
    ) -> Result<(), HardwareError> {
        self.map_new(hardware, &map)?;
        self.view.set_map(map);
        Ok(())
    }

    /// Takes another map. When this returns the hardware reaches nothing that is not in it, unless unmapping itself failed:
    /// then the caller has to stop the hardware.
    pub(super) fn replace(
        &mut self,
        hardware: &mut impl Hardware,
        map: Arc<GuestMap>,
    ) -> Result<(), HardwareError> {
        let mut outcome = Ok(());
        self.mapped.retain(|region| {
            if map.regions().iter().any(|other| region.is_same(other)) {
                return true;
            }
            match hardware.unmap(region.gpa() + WINDOW, region.len()) {
                Ok(()) => false,
                // It is tried again the next time.
                Err(error) => {
                    if outcome.is_ok() {
                        outcome = Err(error);
                    }
                    true
                }
            }
        });
        if outcome.is_ok() {
            outcome = self.map_new(hardware, &map);
        }
        self.view.set_map(map);
        outcome
    }

    fn map_new(&mut self, hardware: &mut impl Hardware, map: &GuestMap) -> Result<(), HardwareError> {
        for region in map.regions().iter().filter(|_| self.reaches) {
            if self.mapped.iter().any(|known| known.is_same(region)) {
                continue;
            }
            let Some(iova) = region.gpa().checked_add(WINDOW) else { continue };
            if iova.checked_add(region.len()).is_none() {
                continue;
            }
            hardware.map(iova, region)?;
            let at = self.mapped.partition_point(|known| known.gpa() < region.gpa());
            self.mapped.insert(at, region.clone());
        }
        Ok(())
    }

    /// Takes everything back.
    pub(super) fn clear(&mut self, hardware: &mut impl Hardware) {
        for region in self.mapped.drain(..) {
            // What fails here fails because the hardware is gone, which unmaps too.
            let _ = hardware.unmap(region.gpa() + WINDOW, region.len());
        }
    }
}
