//! Functions of the host through VFIO, with an IOMMU container of type 1 (Debian's kernels have no iommufd).
//!
//! ```text
//!   Vfio --pread, pwrite--> device file: one region for each BAR, one for the configuration space
//!        --SET_IRQS-------> eventfds: the guest's own, or ours
//!        --MAP_DMA--------> Container <-- Group <-- the IOMMU group of the function
//! ```

mod container;
mod interrupts;
mod ioctl;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ioplane_api::spec::PciAddress;
use ioplane_memory::MemoryRegion;
use ioplane_pci::{Bar, BarMap, Identity, Irq, Irqs, PAGE, Pages, Space, Touch, Wire, WireError, spec};
use vfio_bindings::bindings::vfio as v;

pub use crate::ranges::Ranges;

use crate::hardware::{Hardware, HardwareError};
use crate::lease::{Lease, LeaseError};
use crate::sysfs::Sysfs;
use container::Container;
use interrupts::{Interrupts, new_event, take_event};
use ioctl::Area;

/// One function. Dropped or closed, it has no bus mastering, no interrupts and no memory; dropped, its lease ends then.
///
/// Memory BARs that are smaller than a page and that VFIO lets one map show as one page; what is beyond their end answers nothing.
#[derive(Debug)]
pub struct Vfio {
    name: String,
    address: PciAddress,
    root: PathBuf,
    // Dropped in this order: VFIO lets go of a function only when its file is closed.
    bars: BarMap,
    open: Option<Open>,
    lease: Option<Lease>,
    identity: Identity,
    irqs: Irqs,
}

/// What is there while it is open. Dropped in this order, for the same reason.
#[derive(Debug)]
struct Open {
    interrupts: Interrupts,
    device: Arc<OwnedFd>,
    container: Container,
    areas: [Area; 6],
    config: Area,
    resettable: bool,
    /// The eventfd of the daemon's own interrupt, and the interrupt that writes it.
    event: Option<(Arc<OwnedFd>, Irq)>,
}

impl Open {
    fn new(name: &str, root: &Path, address: PciAddress) -> Result<Open, HardwareError> {
        let group = Sysfs::new(root).iommu_group(address).ok_or_else(|| HardwareError::Os {
            function: name.to_owned(),
            doing: "find its IOMMU group (`ioplane pci list` says why there may be none)".into(),
            source: io::ErrorKind::NotFound.into(),
        })?;
        let container = Container::open(name, group)?;
        let device = Arc::new(container.device(address)?);
        let os = |doing: &str| {
            let (function, doing) = (name.to_owned(), doing.to_owned());
            move |source| HardwareError::Os { function, doing, source }
        };
        let asking = "ask VFIO about it";
        let (resettable, regions, kinds) = ioctl::device_info(device.as_fd()).map_err(os(asking))?;
        let mut areas: [Area; 6] = Default::default();
        for (index, area) in (0..regions).zip(&mut areas) {
            *area = ioctl::region(device.as_fd(), index).map_err(os(asking))?;
        }
        let config = ioctl::region(device.as_fd(), v::VFIO_PCI_CONFIG_REGION_INDEX).map_err(os(asking))?;
        let interrupts = Interrupts::new(device.clone(), kinds).map_err(os(asking))?;
        Ok(Open { interrupts, device, container, areas, config, resettable, event: None })
    }
}

impl Vfio {
    /// Opens a function that is bound to vfio-pci (see [`Lease::take`]) on the host whose sysfs is mounted at `root`. It can be opened
    /// once.
    pub fn open(root: &Path, address: PciAddress) -> Result<Vfio, HardwareError> {
        let name = address.to_string();
        let open = Open::new(&name, root, address)?;
        let irqs = open.interrupts.counts();
        let identity = Identity { vendor: 0, device: 0, revision: 0, class: 0, subsystem: (0, 0) };
        let (root, open) = (root.to_owned(), Some(open));
        let mut vfio = Vfio { name, address, root, bars: BarMap::new(), open, lease: None, identity, irqs };
        vfio.look()?;
        Ok(vfio)
    }

    fn opened(&self) -> Result<&Open, HardwareError> {
        self.open.as_ref().ok_or_else(|| HardwareError::Closed { function: self.name.clone() })
    }

    fn opened_mut(&mut self) -> Result<&mut Open, HardwareError> {
        self.open.as_mut().ok_or_else(|| HardwareError::Closed { function: self.name.clone() })
    }

    /// Keeps the lease as long as the function is open.
    pub fn keep(&mut self, lease: Lease) {
        self.lease = Some(lease);
    }

    /// Closes the function and ends its lease, with an error if that fails.
    pub fn release(mut self) -> Result<(), LeaseError> {
        let lease = self.lease.take();
        drop(self);
        lease.map_or(Ok(()), Lease::give_back)
    }

    /// Reads who it is and what it has; switches memory and ports on, and bus mastering off.
    fn look(&mut self) -> Result<(), HardwareError> {
        let mut header = [0; 0x40];
        self.read_config(0, &mut header)?;
        let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        let long =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        if short(spec::VENDOR_ID) == u16::MAX {
            return Err(HardwareError::Gone { function: self.name.clone() });
        }
        self.identity = Identity {
            vendor: short(spec::VENDOR_ID),
            device: short(spec::DEVICE_ID),
            revision: header[spec::REVISION_ID],
            class: long(spec::REVISION_ID) >> 8,
            subsystem: (short(spec::SUBSYSTEM_VENDOR_ID), short(spec::SUBSYSTEM_ID)),
        };
        let table = self.msix_pages()?;
        let open = self.opened()?;
        let mut bars = BarMap::new();
        let mut command = 0;
        let mut upper_half = false;
        for (index, area) in (0u8..).zip(&open.areas) {
            if std::mem::take(&mut upper_half) || area.size == 0 {
                continue;
            }
            let register = long(spec::BAR0 + 4 * usize::from(index));
            let space = match register {
                register if register & spec::BAR_IO != 0 => Space::Port,
                register if register & spec::BAR_MEMORY_64 != 0 && index < 5 => Space::Memory64,
                _ => Space::Memory32,
            };
            upper_half = space == Space::Memory64;
            command |= if space == Space::Port { spec::COMMAND_IO } else { spec::COMMAND_MEMORY };
            let mut bar = Bar::new(mapped_size(area, space), space);
            bar.prefetchable = space != Space::Port && register & spec::BAR_PREFETCHABLE != 0;
            for (offset, len) in mappable(area, space, &table, index) {
                let file = open.device.clone();
                let pages = Pages { offset, len, touch: Touch::Mapped, file, at: area.offset + offset };
                // What is not in whole pages stays trapped.
                bar = bar.clone().with_pages(pages).unwrap_or(bar);
            }
            bars = bars.with(index, bar);
        }
        self.bars = bars;
        let before = short(spec::COMMAND);
        let after = (before | command) & !(spec::COMMAND_MASTER | spec::COMMAND_INTX_DISABLE);
        self.write_config(spec::COMMAND as u64, &after.to_le_bytes())
    }

    /// Pages with the MSI-X table and its pending bits: BAR, first byte, one past the last. Those are the VMM's to emulate.
    fn msix_pages(&mut self) -> Result<Vec<(u8, u64, u64)>, HardwareError> {
        let Some(at) = self.capability(spec::CAP_MSIX)? else { return Ok(Vec::new()) };
        let mut bytes = [0; 12];
        self.read_config(at, &mut bytes)?;
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let vectors = u64::from(word(0) >> 16 & 0x7ff) + 1;
        let range = |word: u32, len: u64| {
            let start = u64::from(word & !7);
            ((word & 7) as u8, start / PAGE * PAGE, (start + len).next_multiple_of(PAGE))
        };
        let entry = spec::MSIX_ENTRY as u64;
        Ok(vec![range(word(4), vectors * entry), range(word(8), vectors.div_ceil(64) * 8)])
    }

    fn os(&self, doing: String, source: io::Error) -> HardwareError {
        HardwareError::Os { function: self.name.clone(), doing, source }
    }

    /// What a failed access means.
    fn failed(&self, doing: &str, error: rustix::io::Errno) -> HardwareError {
        let mut vendor = [0; 2];
        let Ok(open) = self.opened() else { return HardwareError::Closed { function: self.name.clone() } };
        match rustix::io::pread(&open.device, &mut vendor, open.config.offset) {
            Ok(2) if vendor != [0xff; 2] => {
                self.os(format!("{doing} its registers (are memory and ports switched off?)"), error.into())
            }
            _ => HardwareError::Gone { function: self.name.clone() },
        }
    }

    /// Where in the function's file a register is.
    fn place(&self, bar: u8, offset: u64, len: usize) -> Result<u64, HardwareError> {
        let area = self.opened()?.areas.get(usize::from(bar));
        let inside = area.filter(|a| offset.checked_add(len as u64).is_some_and(|end| end <= a.size));
        let no = || HardwareError::NoSuchRegister { function: self.name.clone(), bar, offset, len };
        Ok(inside.ok_or_else(no)?.offset + offset)
    }
}

/// A small BAR that VFIO lets one map is alone on its page.
fn mapped_size(area: &Area, space: Space) -> u64 {
    let alone = space != Space::Port && area.mappable == [(0, area.size)];
    if alone { area.size.max(PAGE) } else { area.size }
}

/// What of a BAR can be mapped: offset and length, in whole pages, without those in `but`.
fn mappable(area: &Area, space: Space, but: &[(u8, u64, u64)], index: u8) -> Vec<(u64, u64)> {
    if space == Space::Port {
        return Vec::new();
    }
    let small = mapped_size(area, space) > area.size;
    let mut all: Vec<(u64, u64)> = area
        .mappable
        .iter()
        .map(|(offset, len)| (*offset, if small { PAGE } else { *len }))
        .filter_map(|(offset, len)| Some((offset, offset.checked_add(len)?)))
        .collect();
    for (_, start, end) in but.iter().filter(|(bar, ..)| *bar == index) {
        let around = |(first, last): (u64, u64)| [(first, last.min(*start)), (first.max(*end), last)];
        all = all.into_iter().flat_map(around).filter(|(first, last)| first < last).collect();
    }
    all.into_iter().map(|(first, last)| (first, last - first)).collect()
}

impl Drop for Vfio {
    fn drop(&mut self) {
        self.close();
    }
}

impl Hardware for Vfio {
    fn name(&self) -> &str {
        &self.name
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn bars(&self) -> &BarMap {
        &self.bars
    }

    fn irqs(&self) -> Irqs {
        self.irqs
    }

    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        let at = self.place(bar, offset, out.len())?;
        match rustix::io::pread(&self.opened()?.device, &mut *out, at) {
            Ok(got) if got == out.len() => Ok(()),
            Ok(_) => Err(self.failed("read", rustix::io::Errno::IO)),
            Err(error) => Err(self.failed("read", error)),
        }
    }

    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        let at = self.place(bar, offset, bytes.len())?;
        match rustix::io::pwrite(&self.opened()?.device, bytes, at) {
            Ok(put) if put == bytes.len() => Ok(()),
            Ok(_) => Err(self.failed("write", rustix::io::Errno::IO)),
            Err(error) => Err(self.failed("write", error)),
        }
    }

    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError> {
        out.fill(0xff);
        let open = self.opened()?;
        let inside = open.config.size.saturating_sub(offset).min(out.len() as u64) as usize;
        let at = open.config.offset.saturating_add(offset);
        match rustix::io::pread(&open.device, &mut out[..inside], at) {
            Ok(got) if got == inside => Ok(()),
            Ok(_) => Err(HardwareError::Gone { function: self.name.clone() }),
            Err(error) => Err(self.os("read its configuration space".into(), error.into())),
        }
    }

    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError> {
        let open = self.opened()?;
        let inside = open.config.size.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let at = open.config.offset.saturating_add(offset);
        match rustix::io::pwrite(&open.device, &bytes[..inside], at) {
            Ok(put) if put == inside => Ok(()),
            Ok(_) => Err(HardwareError::Gone { function: self.name.clone() }),
            Err(error) => Err(self.os("write its configuration space".into(), error.into())),
        }
    }

    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        self.opened_mut()?.container.map(iova, region)
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        self.opened_mut()?.container.unmap(iova, len)
    }

    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError> {
        let below = |why: String| WireError::Below { irq, why };
        let open = self.opened_mut().map_err(|error| below(error.to_string()))?;
        if open.event.is_some() {
            return Err(below("we listen to its interrupts ourselves".into()));
        }
        open.interrupts.wire(irq, vector, wire)
    }

    fn listen(&mut self) -> Result<(), HardwareError> {
        let open = self.opened_mut()?;
        if open.event.is_some() {
            return Ok(());
        }
        let doing = "listen to its interrupts";
        let ours = if open.interrupts.wired() {
            Err(io::Error::other("they are wired to a guest"))
        } else {
            new_event().and_then(|event| Ok((open.interrupts.listen(&event)?, event)))
        };
        let (irq, event) = ours.map_err(|error| self.os(doing.into(), error))?;
        self.opened_mut()?.event = Some((Arc::new(event), irq));
        Ok(())
    }

    fn interrupt(&self) -> Option<&Arc<OwnedFd>> {
        self.open.as_ref()?.event.as_ref().map(|(event, _)| event)
    }

    fn take_interrupt(&mut self) -> bool {
        self.interrupt().is_some_and(|event| take_event(event))
    }

    fn unmask(&mut self) -> Result<(), HardwareError> {
        let open = self.opened_mut()?;
        let unmasked = match &open.event {
            Some((_, Irq::Intx)) => open.interrupts.unmask(),
            _ => Ok(()),
        };
        unmasked.map_err(|error| self.os("unmask its interrupt".into(), error))
    }

    fn close(&mut self) {
        // All of this the kernel would do when the files are closed; but a VMM may have mapped our pages, and keep one open.
        let _ = self.master(false);
        if let Some(open) = &mut self.open {
            open.interrupts.clear();
            open.container.clear();
        }
        self.bars = self.bars.trapped();
        self.open = None;
    }

    fn reopen(&mut self) -> Result<(), HardwareError> {
        if self.open.is_some() {
            return Ok(());
        }
        let was = self.identity;
        self.open = Some(Open::new(&self.name, &self.root, self.address)?);
        let looked = self.look();
        let same = self.identity == was
            && self.open.as_ref().map(|open| open.interrupts.counts()) == Some(self.irqs);
        // Another card may have been put into its slot.
        let outcome = looked.and_then(|()| match same {
            true => Ok(()),
            false => Err(HardwareError::Gone { function: self.name.clone() }),
        });
        if outcome.is_err() {
            self.close();
            self.identity = was;
        }
        outcome
    }

    fn reset(&mut self) -> Result<bool, HardwareError> {
        let open = self.opened()?;
        if !open.resettable {
            return Ok(false);
        }
        ioctl::reset(open.device.as_fd()).map_err(|error| self.os("reset it".into(), error))?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_are_mapped_but_not_the_table() {
        let area = |size, mappable: &[(u64, u64)]| Area { size, offset: 0, mappable: mappable.into() };
        let wide = area(0x20000, &[(0, 0x20000)]);
        assert_eq!(mappable(&wide, Space::Memory32, &[], 0), [(0, 0x20000)]);
        let table = [(3, 0x1000, 0x3000), (3, 0, 0x1000), (0, 0x4000, 0x5000)];
        assert_eq!(mappable(&wide, Space::Memory32, &table, 0), [(0, 0x4000), (0x5000, 0x1b000)]);
        assert_eq!(mappable(&wide, Space::Memory32, &table, 3), [(0x3000, 0x1d000)]);
        let sparse = area(0x4000, &[(0, 0x1000), (0x2000, 0x2000)]);
        assert_eq!(mappable(&sparse, Space::Memory64, &[], 0), [(0, 0x1000), (0x2000, 0x2000)]);
        let small = area(0x100, &[(0, 0x100)]);
        assert_eq!((mapped_size(&small, Space::Memory32), mapped_size(&small, Space::Port)), (PAGE, 0x100));
        assert_eq!(mappable(&small, Space::Memory32, &[], 1), [(0, PAGE)]);
        assert!(mappable(&small, Space::Port, &[], 0).is_empty());
        assert!(mappable(&area(0x100, &[]), Space::Memory32, &[], 0).is_empty());
        assert!(mappable(&area(0x100, &[(u64::MAX, 2)]), Space::Memory32, &[], 0).is_empty());
    }
}
