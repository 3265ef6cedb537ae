//! The guest's physical address space: regions, sorted, immutable once made.

#![allow(unsafe_code)]
// UNSAFETY: each region keeps the address of its first byte beside the mapping that holds it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::PAGE;
use crate::charge::Pin;
use crate::error::{MapError, MappingError};
use crate::mapping::Mapping;
use crate::mutation::{Invariant, bound};
use crate::quota::MAX_REGIONS;

/// What a front end says of a region, before it is mapped. Addresses and lengths in bytes.
#[derive(Debug)]
pub struct RegionSpec {
    /// Guest physical address of the first byte.
    pub gpa: u64,
    /// Length.
    pub len: u64,
    /// Where the front end has it in its own address space (vhost-user ring addresses are given in these).
    pub user: u64,
    /// Offset in the file.
    pub offset: u64,
    /// The file.
    pub file: OwnedFd,
}

/// A range of guest physical addresses and the memory behind it.
#[derive(Debug, Clone)]
pub struct MemoryRegion {
    /// Guest physical address of the first byte.
    pub(crate) gpa: u64,
    /// Length in bytes.
    pub(crate) len: u64,
    /// Address of the first byte in the front end's own space.
    pub(crate) user: u64,
    /// The memory, from `skip` on.
    pub(crate) mapping: Arc<Mapping>,
    /// Where in `mapping` the region begins: file offsets need not be page-aligned.
    pub(crate) skip: usize,
    /// Where that is in our address space.
    base: NonNull<u8>,
    /// Whether it may be stored into: `mapping`'s, here to be at hand.
    pub(crate) writable: bool,
    /// Set when the memory has gone: `mapping`'s, here to be at hand.
    lost: &'static AtomicBool,
}

// SAFETY: `base` points into `mapping`, which may be shared, and lives as long as this.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Maps what `spec` describes, for loads and stores.
    pub fn map(spec: RegionSpec) -> Result<Self, MapError> {
        Self::map_by(spec, Mapping::of_file)
    }

    /// Maps it for loads alone: no device may store into it.
    pub fn map_read_only(spec: RegionSpec) -> Result<Self, MapError> {
        Self::map_by(spec, Mapping::of_file_read_only)
    }

    pub(crate) fn map_by(
        spec: RegionSpec,
        by: impl FnOnce(OwnedFd, u64, u64) -> Result<Mapping, MappingError>,
    ) -> Result<Self, MapError> {
        let RegionSpec { gpa, len, user, offset, file } = spec;
        if gpa.checked_add(len).is_none() || user.checked_add(len).is_none() {
            return Err(MapError::Wraps { at: gpa, len });
        }
        let skip = offset % PAGE;
        let whole = len.checked_add(skip).ok_or(MapError::Wraps { at: gpa, len })?;
        if len == 0 {
            return Err(MappingError::Shape { offset, len }.into());
        }
        let mapping = Arc::new(by(file, offset - skip, whole)?);
        // SAFETY: the mapping is `skip` and `len` bytes long.
        let base = unsafe { mapping.start().add(skip as usize) };
        let (writable, lost) = (mapping.writable(), mapping.lost());
        Ok(MemoryRegion { gpa, len, user, mapping, skip: skip as usize, base, writable, lost })
    }

    /// The first byte. Valid while the region lives.
    #[inline]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Guest physical address of the first byte.
    pub fn gpa(&self) -> u64 {
        self.gpa
    }

    /// Length in bytes, never zero.
    #[expect(clippy::len_without_is_empty, reason = "an empty region is refused")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Where it is in our address space: for who gives the memory to hardware by its address (VFIO). Valid while the region lives.
    pub fn host_address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Counts all of it as pinned, on the account of the client whose memory it is: before it is given to hardware, and until after
    /// that has let go of it.
    pub fn pin(&self) -> Result<Pin, MapError> {
        Ok(Pin::of(self.mapping.charge(), self.len)?)
    }

    /// Whether it is the same bytes at the same place. While one of the two lives no other memory can have come to its address.
    pub fn is_same(&self, other: &MemoryRegion) -> bool {
        (self.gpa, self.len, self.base, self.writable) == (other.gpa, other.len, other.base, other.writable)
    }

    /// Whether devices may store into it.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Whether the region has lost pages since it was mapped.
    #[inline]
    pub fn poisoned(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Whether it is what `spec` describes: the same bytes of the same file at the same addresses.
    pub fn matches(&self, spec: &RegionSpec) -> bool {
        let inode = |file: BorrowedFd<'_>| rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino));
        let place = (self.gpa, self.len, self.user, self.mapping.offset() + self.skip as u64);
        place == (spec.gpa, spec.len, spec.user, spec.offset)
            && inode(self.mapping.file()).is_ok_and(|ours| inode(spec.file.as_fd()) == Ok(ours))
    }

    /// What was said of it when it was mapped, for another process to map the same; with a descriptor of its own. Whether it may be
    /// stored into is [`MemoryRegion::writable`], and is not in it.
    pub fn spec(&self) -> std::io::Result<RegionSpec> {
        Ok(RegionSpec {
            gpa: self.gpa,
            len: self.len,
            user: self.user,
            offset: self.mapping.offset() + self.skip as u64,
            file: self.mapping.file().try_clone_to_owned()?,
        })
    }
}

/// All memory of one guest. Changing it means making another one and giving it to every poller.
#[derive(Debug, Default)]
pub struct GuestMap {
    regions: Vec<MemoryRegion>,
}

impl GuestMap {
    /// A map of `regions`; refuses overlaps.
    pub fn new(regions: Vec<MemoryRegion>) -> Result<Self, MapError> {
        let mut map = GuestMap::default();
        for region in regions {
            map.insert(region)?;
        }
        Ok(map)
    }

    /// One region of `len` bytes at guest address zero, made here: for tests, benches and VMMs of our own.
    pub fn anonymous(len: u64) -> Result<Self, MapError> {
        let mapping = Mapping::anonymous("guest-memory", len)?;
        let file = mapping.file().try_clone_to_owned().map_err(|_| MappingError::TooMany)?;
        drop(mapping);
        Self::new(vec![MemoryRegion::map(RegionSpec { gpa: 0, len, user: 0, offset: 0, file })?])
    }

    /// This map and one region more.
    pub fn with(&self, region: MemoryRegion) -> Result<Self, MapError> {
        let mut map = GuestMap { regions: self.regions.clone() };
        map.insert(region)?;
        Ok(map)
    }

    /// This map without the region at `gpa` of `len` bytes that the front end knows at `user`.
    pub fn without(&self, gpa: u64, len: u64, user: u64) -> Result<Self, MapError> {
        let at = self.regions.iter().position(|r| r.gpa == gpa && r.len == len && r.user == user);
        let at = at.ok_or(MapError::NoSuchRegion { at: gpa, len })?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(GuestMap { regions })
    }

    fn insert(&mut self, region: MemoryRegion) -> Result<(), MapError> {
        if self.regions.len() as u64 >= bound(Invariant::KeepsQuotas, MAX_REGIONS as u64) {
            return Err(MapError::TooMany);
        }
        let at = self.regions.partition_point(|r| r.gpa < region.gpa);
        let clash = |r: &&MemoryRegion| r.gpa < region.gpa + region.len && region.gpa < r.gpa + r.len;
        if let Some(other) = self.regions.iter().find(clash) {
            return Err(MapError::Overlap { at: region.gpa, len: region.len, other: other.gpa });
        }
        self.regions.insert(at, region);
        Ok(())
    }

    /// The regions by rising guest address.
    pub fn regions(&self) -> &[MemoryRegion] {
        &self.regions
    }

    /// The region that holds the guest address `gpa`, and how many bytes into it.
    #[inline]
    pub(crate) fn holding(&self, gpa: u64) -> Option<(&MemoryRegion, u64)> {
        let region = match self.regions.as_slice() {
            // Most guests; no search.
            [only] => only,
            // Regions do not overlap, so no other can hold it than the last that begins at or before it.
            all => &all[all.partition_point(|region| region.gpa <= gpa).checked_sub(1)?],
        };
        let at = gpa.checked_sub(region.gpa)?;
        (at < region.len).then_some((region, at))
    }

    /// The guest address that the front end calls `user`, if it is in a region.
    pub fn gpa_of_user(&self, user: u64) -> Option<u64> {
        self.regions.iter().find(|r| user >= r.user && user - r.user < r.len).map(|r| r.gpa + (user - r.user))
    }

    /// Whether any region has lost pages since it was mapped.
    #[inline]
    pub fn poisoned(&self) -> bool {
        self.regions.iter().any(MemoryRegion::poisoned)
    }

    /// One past the highest guest address, in bytes: the size that a dirty log needs.
    pub fn limit(&self) -> u64 {
        self.regions.last().map_or(0, |r| r.gpa + r.len)
    }
}
