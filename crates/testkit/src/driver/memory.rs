//! Guest memory as a VMM lays it out: memfds at guest addresses, and a bump allocator for rings and buffers.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ioplane_memory::{GuestFault, GuestMap, GuestView, MapError, MemoryRegion, PAGE, RegionSpec, Window};

/// Where the first region lies in the guest, unless told: above 4 GiB, so that a device that takes an offset for an
/// address is found out.
pub const FIRST_GPA: u64 = 0x1_0000_0000;
/// What is added to a guest address to get the address that we, the front end, claim to have it at. Vhost-user gives
/// ring addresses in these, so a back end that mixes the two up is found out as well.
pub const USER_BASE: u64 = 0x7e00_0000_0000;

/// One region, and all that a back end has to be told of it.
#[derive(Debug)]
pub struct SharedRegion {
    /// Guest physical address of the first byte.
    pub gpa: u64,
    /// Length in bytes.
    pub len: u64,
    /// Front-end virtual address of the first byte.
    pub user: u64,
    /// Offset in the file, bytes.
    pub offset: u64,
    file: OwnedFd,
}

impl SharedRegion {
    /// The memfd. It is not sealed: a hostile test may shrink it.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The memory of a pretended guest. Owned by one test or bench thread; clones of [`GuestMemory::view`] may go anywhere.
#[derive(Debug)]
pub struct GuestMemory {
    regions: Vec<SharedRegion>,
    view: GuestView,
    /// Bytes taken of each region.
    taken: Vec<u64>,
}

impl GuestMemory {
    /// One region of `len` bytes (rounded up to pages) at [`FIRST_GPA`].
    pub fn new(len: u64) -> Result<Self, MapError> {
        Self::of(&[(FIRST_GPA, len)])
    }

    /// Regions of (guest address, length in bytes); both multiples of a page. They must not overlap.
    pub fn of(regions: &[(u64, u64)]) -> Result<Self, MapError> {
        let view = GuestView::new(Arc::new(GuestMap::default()));
        let mut memory = GuestMemory { regions: Vec::new(), view, taken: Vec::new() };
        for &(gpa, len) in regions {
            memory.add(gpa, len)?;
        }
        Ok(memory)
    }

    /// Plugs another region, and returns its index. Windows made before stay good.
    pub fn add(&mut self, gpa: u64, len: u64) -> Result<usize, MapError> {
        // The region begins a page into the file, so that a back end that ignores `offset` reads the wrong bytes.
        let (len, offset) = (len.next_multiple_of(PAGE), PAGE);
        let os = ioplane_memory::MappingError::from;
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("testkit-guest", flags).map_err(os)?;
        rustix::fs::ftruncate(&file, offset + len).map_err(os)?;
        let copy = rustix::io::fcntl_dupfd_cloexec(&file, 0).map_err(os)?;
        let user = USER_BASE + gpa;
        let region = MemoryRegion::map(RegionSpec { gpa, len, user, offset, file: copy })?;
        let map = self.view.map().with(region)?;
        self.view.set_map(Arc::new(map));
        self.regions.push(SharedRegion { gpa, len, user, offset, file });
        self.taken.push(0);
        Ok(self.regions.len() - 1)
    }

    /// Forgets region `index`: what a VMM does when memory is unplugged. Nothing may use it any more.
    pub fn remove(&mut self, index: usize) -> Result<SharedRegion, MapError> {
        let region = self.regions.remove(index);
        self.taken.remove(index);
        let map = self.view.map().without(region.gpa, region.len, region.user)?;
        self.view.set_map(Arc::new(map));
        Ok(region)
    }

    /// The regions, in the order in which they were added.
    pub fn regions(&self) -> &[SharedRegion] {
        &self.regions
    }

    /// Our own access to the bytes.
    pub fn view(&self) -> &GuestView {
        &self.view
    }

    /// Takes `len` bytes, aligned to `align` (a power of two, at most a page), never given back. `None` when full.
    pub fn alloc(&mut self, len: u64, align: u64) -> Option<u64> {
        for (region, taken) in self.regions.iter().zip(&mut self.taken) {
            let at = taken.next_multiple_of(align);
            if at.checked_add(len).is_some_and(|end| end <= region.len) {
                *taken = at + len;
                return Some(region.gpa + at);
            }
        }
        None
    }

    /// [`GuestMemory::alloc`] and a window on what was taken.
    pub fn carve(&mut self, len: u64, align: u64) -> Result<Window, GuestFault> {
        let gpa = self.alloc(len, align).ok_or(GuestFault::OutsideMemory { gpa: u64::MAX, len })?;
        self.view.window(gpa, len, align)
    }

    /// The front-end virtual address of guest address `gpa`, as vhost-user messages want it.
    pub fn user_of(&self, gpa: u64) -> Option<u64> {
        let region = self.regions.iter().find(|r| gpa >= r.gpa && gpa - r.gpa < r.len)?;
        Some(region.user + (gpa - region.gpa))
    }

    /// Stores a byte to every page, so that no page fault disturbs a measurement.
    pub fn populate(&self) {
        for region in &self.regions {
            for page in (0..region.len).step_by(PAGE as usize) {
                let _ = self.view.write(region.gpa + page, &[0]);
            }
        }
    }
}
