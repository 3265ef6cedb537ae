//! What the function reaches of memory: what was mapped for it, at bus addresses.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestView, MapError, MemoryRegion};

struct Mapped {
    iova: u64,
    region: MemoryRegion,
    view: GuestView,
}

/// Bytes of a page.
const PAGE: u64 = 4096;

/// An IOMMU's translations.
#[derive(Default)]
pub(crate) struct Dma {
    mapped: Vec<Mapped>,
    /// Numbers of the guest's pages that were written, since somebody asked.
    written: RefCell<BTreeSet<u64>>,
}

impl Dma {
    pub(crate) fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), MapError> {
        let view = GuestView::new(Arc::new(GuestMap::new(vec![region.clone()])?));
        self.mapped.push(Mapped { iova, region: region.clone(), view });
        Ok(())
    }

    /// Whether it was mapped exactly so.
    pub(crate) fn unmap(&mut self, iova: u64, len: u64) -> bool {
        let before = self.mapped.len();
        self.mapped.retain(|mapped| mapped.iova != iova || mapped.region.len() != len);
        self.mapped.len() < before
    }

    fn place(&self, iova: u64, len: usize) -> Option<(&GuestView, u64)> {
        let end = iova.checked_add(len as u64)?;
        let mapped = self
            .mapped
            .iter()
            .find(|mapped| iova >= mapped.iova && end <= mapped.iova.saturating_add(mapped.region.len()))?;
        Some((&mapped.view, mapped.region.gpa() + (iova - mapped.iova)))
    }

    /// `false`: not there.
    pub(crate) fn read(&self, iova: u64, out: &mut [u8]) -> bool {
        self.place(iova, out.len()).is_some_and(|(view, gpa)| view.read(gpa, out).is_ok())
    }

    /// `false`: not there, or only for reading.
    pub(crate) fn write(&self, iova: u64, bytes: &[u8]) -> bool {
        let Some((view, gpa)) = self.place(iova, bytes.len()) else { return false };
        let written = view.write(gpa, bytes).is_ok();
        if written && let Some(last) = (bytes.len() as u64).checked_sub(1) {
            self.written.borrow_mut().extend(gpa / PAGE..=(gpa + last) / PAGE);
        }
        written
    }

    /// Pages that were written, since it was asked last.
    pub(crate) fn take_written(&self) -> BTreeSet<u64> {
        self.written.take()
    }
}
