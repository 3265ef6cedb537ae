//! What the function reaches of memory: what was mapped for it, at bus addresses.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestView, MapError, MemoryRegion};

struct Mapped {
    region: MemoryRegion,
    view: GuestView,
}

/// Bytes of a page.
const PAGE: u64 = 4096;

/// An IOMMU's translations.
#[derive(Default)]
pub(crate) struct Dma {
    /// By bus address.
    mapped: BTreeMap<u64, Mapped>,
    /// Numbers of the guest's pages that were written, since somebody asked.
    written: RefCell<BTreeSet<u64>>,
}

impl Dma {
    pub(crate) fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), MapError> {
        let view = GuestView::new(Arc::new(GuestMap::new(vec![region.clone()])?));
        self.mapped.insert(iova, Mapped { region: region.clone(), view });
        Ok(())
    }

    /// Whether it was mapped exactly so.
    pub(crate) fn unmap(&mut self, iova: u64, len: u64) -> bool {
        let found = self.mapped.get(&iova).is_some_and(|mapped| mapped.region.len() == len);
        if found {
            self.mapped.remove(&iova);
        }
        found
    }

    /// Does something to each piece of `len` bytes at `iova`, mapping by mapping: where it is, and which of the bytes it is. `false`: some of
    /// it is not there.
    fn each(
        &self,
        iova: u64,
        len: usize,
        mut act: impl FnMut(&GuestView, u64, Range<usize>) -> bool,
    ) -> bool {
        let mut done = 0;
        while done < len {
            let Some(at) = iova.checked_add(done as u64) else { return false };
            let Some((begin, mapped)) = self.mapped.range(..=at).next_back() else { return false };
            let into = at - begin;
            let Some(left) = mapped.region.len().checked_sub(into).filter(|left| *left > 0) else {
                return false;
            };
            let end = len.min(done.saturating_add(usize::try_from(left).unwrap_or(usize::MAX)));
            if !act(&mapped.view, mapped.region.gpa() + into, done..end) {
                return false;
            }
            done = end;
        }
        true
    }

    /// `false`: not there.
    pub(crate) fn read(&self, iova: u64, out: &mut [u8]) -> bool {
        self.each(iova, out.len(), |view, gpa, part| view.read(gpa, &mut out[part]).is_ok())
    }

    /// `false`: not there, or only for reading.
    pub(crate) fn write(&self, iova: u64, bytes: &[u8]) -> bool {
        self.each(iova, bytes.len(), |view, gpa, part| {
            let last = gpa + part.len() as u64 - 1;
            let written = view.write(gpa, &bytes[part]).is_ok();
            if written {
                self.written.borrow_mut().extend(gpa / PAGE..=last / PAGE);
            }
            written
        })
    }

    /// Pages that were written, since it was asked last.
    pub(crate) fn take_written(&self) -> BTreeSet<u64> {
        self.written.take()
    }
}
