//! VFIO's calls (Linux, `include/uapi/linux/vfio.h`), each with the structure that it takes.

#![allow(unsafe_code)]
// UNSAFETY: ioctl takes a pointer to a structure whose size the kernel reads from its first field.

use std::ffi::{CString, c_ulong};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use vfio_bindings::bindings::vfio as v;

/// `_IO(VFIO_TYPE, VFIO_BASE + n)`: neither direction nor size are in VFIO's numbers.
const fn number(n: u32) -> c_ulong {
    ((v::VFIO_TYPE as c_ulong) << 8) | (v::VFIO_BASE + n) as c_ulong
}

const GET_API_VERSION: c_ulong = number(0);
const CHECK_EXTENSION: c_ulong = number(1);
const SET_IOMMU: c_ulong = number(2);
const GROUP_GET_STATUS: c_ulong = number(3);
const GROUP_SET_CONTAINER: c_ulong = number(4);
const GROUP_GET_DEVICE_FD: c_ulong = number(6);
const DEVICE_GET_INFO: c_ulong = number(7);
const DEVICE_GET_REGION_INFO: c_ulong = number(8);
const DEVICE_GET_IRQ_INFO: c_ulong = number(9);
const DEVICE_SET_IRQS: c_ulong = number(10);
const DEVICE_RESET: c_ulong = number(11);
const IOMMU_GET_INFO: c_ulong = number(12);
const IOMMU_MAP_DMA: c_ulong = number(13);
const IOMMU_UNMAP_DMA: c_ulong = number(14);

/// Most bytes of a reply with capabilities.
const REPLY: usize = 1 << 16;
/// Most areas or ranges that are taken from a reply.
const MOST: usize = 256;

fn value(file: BorrowedFd<'_>, call: c_ulong, argument: c_ulong) -> io::Result<i32> {
    // SAFETY: these calls take a number, or nothing.
    let got = unsafe { libc::ioctl(file.as_raw_fd(), call, argument) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(got) }
}

/// `argument` begins with its own size, which the kernel does not go beyond.
fn structure<T>(file: BorrowedFd<'_>, call: c_ulong, argument: &mut T) -> io::Result<i32> {
    // SAFETY: the pointer is to a structure of the type that the call takes, and lives as long as the call.
    let got = unsafe { libc::ioctl(file.as_raw_fd(), call, std::ptr::from_mut(argument)) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(got) }
}

/// `bytes` begins with its own size.
fn bytes(file: BorrowedFd<'_>, call: c_ulong, bytes: &mut [u8]) -> io::Result<i32> {
    // SAFETY: the kernel goes no further than the size in the first four bytes, which is at most that of the buffer; it copies
    // bytewise, so that alignment does not matter.
    let got = unsafe { libc::ioctl(file.as_raw_fd(), call, bytes.as_mut_ptr()) };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(got) }
}

/// Whether the container speaks our version of the interface and knows type 1, version 2.
pub(super) fn knows_type1(container: BorrowedFd<'_>) -> io::Result<bool> {
    let version = value(container, GET_API_VERSION, 0)?;
    let type1 = value(container, CHECK_EXTENSION, v::VFIO_TYPE1v2_IOMMU.into())?;
    Ok(version == v::VFIO_API_VERSION as i32 && type1 == 1)
}

/// Chooses type 1, version 2. The container needs a group first.
pub(super) fn set_type1(container: BorrowedFd<'_>) -> io::Result<()> {
    value(container, SET_IOMMU, v::VFIO_TYPE1v2_IOMMU.into()).map(drop)
}

/// Whether all functions of the group are free.
pub(super) fn is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let mut status = v::vfio_group_status { argsz: size_of::<v::vfio_group_status>() as u32, flags: 0 };
    structure(group, GROUP_GET_STATUS, &mut status)?;
    Ok(status.flags & v::VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Puts the group into the container.
pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut file = container.as_raw_fd();
    structure(group, GROUP_SET_CONTAINER, &mut file).map(drop)
}

/// Opens a function of the group by its address.
pub(super) fn device(group: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: the call reads a string that ends with zero and lives as long as the call.
    let got = unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD, name.as_ptr()) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor, which is nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(got) })
}

/// Whether the function can be reset by VFIO; how many regions and kinds of interrupt there are.
pub(super) fn device_info(device: BorrowedFd<'_>) -> io::Result<(bool, u32, u32)> {
    let mut info =
        v::vfio_device_info { argsz: size_of::<v::vfio_device_info>() as u32, ..Default::default() };
    structure(device, DEVICE_GET_INFO, &mut info)?;
    if info.flags & v::VFIO_DEVICE_FLAGS_PCI == 0 {
        return Err(io::Error::other("VFIO says that it is no PCI function"));
    }
    Ok((info.flags & v::VFIO_DEVICE_FLAGS_RESET != 0, info.num_regions, info.num_irqs))
}

/// A region of a function, in bytes of the function's file.
#[derive(Debug, Clone, Default)]
pub(super) struct Area {
    pub(super) size: u64,
    pub(super) offset: u64,
    /// What can be mapped: offset in the region, length.
    pub(super) mappable: Vec<(u64, u64)>,
}

/// One region. One that is not there has no bytes.
pub(super) fn region(device: BorrowedFd<'_>, index: u32) -> io::Result<Area> {
    let head = size_of::<v::vfio_region_info>();
    let ask = |size: usize| -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; size];
        buffer[..4].copy_from_slice(&(size as u32).to_le_bytes());
        buffer[8..12].copy_from_slice(&index.to_le_bytes());
        bytes(device, DEVICE_GET_REGION_INFO, &mut buffer)?;
        Ok(buffer)
    };
    let mut reply = ask(head)?;
    let wants = word(&reply, 0) as usize;
    if wants > head && wants <= REPLY {
        reply = ask(wants)?;
    }
    let (flags, size) = (word(&reply, 4), long(&reply, 16));
    let mut area = Area { size, offset: long(&reply, 24), mappable: Vec::new() };
    if flags & v::VFIO_REGION_INFO_FLAG_MMAP != 0 {
        area.mappable.push((0, size));
        if flags & v::VFIO_REGION_INFO_FLAG_CAPS != 0
            && let Some(sparse) =
                capability(&reply, word(&reply, 12), v::VFIO_REGION_INFO_CAP_SPARSE_MMAP as u16)
        {
            area.mappable = pairs(&reply, sparse + 16, word(&reply, sparse + 8));
        }
    }
    Ok(area)
}

/// How many interrupts of a kind there are.
pub(super) fn interrupts(device: BorrowedFd<'_>, index: u32) -> io::Result<u32> {
    let mut info =
        v::vfio_irq_info { argsz: size_of::<v::vfio_irq_info>() as u32, index, ..Default::default() };
    structure(device, DEVICE_GET_IRQ_INFO, &mut info)?;
    Ok(if info.flags & v::VFIO_IRQ_INFO_EVENTFD != 0 { info.count } else { 0 })
}

/// What is done to interrupts `start ..` of a kind.
pub(super) enum Set<'a> {
    /// From now on each writes its eventfd, or nothing.
    Signal(&'a [Option<BorrowedFd<'a>>]),
    /// No interrupt of that kind any more.
    Off,
    /// The first one is masked.
    Mask,
    /// The first one is unmasked.
    Unmask,
}

/// Does it.
pub(super) fn set_interrupts(
    device: BorrowedFd<'_>,
    index: u32,
    start: u32,
    set: &Set<'_>,
) -> io::Result<()> {
    let none = v::VFIO_IRQ_SET_DATA_NONE;
    let (flags, files) = match set {
        Set::Signal(files) => (v::VFIO_IRQ_SET_DATA_EVENTFD | v::VFIO_IRQ_SET_ACTION_TRIGGER, *files),
        Set::Off => (none | v::VFIO_IRQ_SET_ACTION_TRIGGER, &[][..]),
        Set::Mask => (none | v::VFIO_IRQ_SET_ACTION_MASK, &[][..]),
        Set::Unmask => (none | v::VFIO_IRQ_SET_ACTION_UNMASK, &[][..]),
    };
    let count = match set {
        Set::Signal(files) => files.len() as u32,
        Set::Off => 0,
        Set::Mask | Set::Unmask => 1,
    };
    let size = size_of::<v::vfio_irq_set>() + 4 * files.len();
    let mut buffer = Vec::with_capacity(size);
    for field in [size as u32, flags, index, start, count] {
        buffer.extend(field.to_le_bytes());
    }
    for file in files {
        buffer.extend(file.map_or(-1, |file| file.as_raw_fd()).to_le_bytes());
    }
    match bytes(device, DEVICE_SET_IRQS, &mut buffer)? {
        0 => Ok(()),
        // As many vectors as asked for are not to be had.
        fewer => Err(io::Error::other(format!("the host has only {fewer} interrupt vectors left"))),
    }
}

/// Resets a function.
pub(super) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    value(device, DEVICE_RESET, 0).map(drop)
}

/// The bus addresses that the IOMMU can translate, first and last byte of each range; none if the kernel does not tell.
pub(super) fn ranges(container: BorrowedFd<'_>) -> io::Result<Vec<(u64, u64)>> {
    let head = size_of::<v::vfio_iommu_type1_info>();
    let ask = |size: usize| -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; size];
        buffer[..4].copy_from_slice(&(size as u32).to_le_bytes());
        bytes(container, IOMMU_GET_INFO, &mut buffer)?;
        Ok(buffer)
    };
    let mut reply = ask(head)?;
    let wants = word(&reply, 0) as usize;
    if wants > head && wants <= REPLY {
        reply = ask(wants)?;
    }
    if word(&reply, 4) & v::VFIO_IOMMU_INFO_CAPS == 0 {
        return Ok(Vec::new());
    }
    let at = capability(&reply, word(&reply, 16), v::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE as u16);
    Ok(at.map(|at| pairs(&reply, at + 16, word(&reply, at + 8))).unwrap_or_default())
}

/// Maps our memory at `address .. + size` at bus address `iova`, for reading and, if it is `writable`, for writing. The memory has to stay mapped by us.
pub(super) fn map(
    container: BorrowedFd<'_>,
    iova: u64,
    address: u64,
    size: u64,
    writable: bool,
) -> io::Result<()> {
    let write = if writable { v::VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
    let mut map = v::vfio_iommu_type1_dma_map {
        argsz: size_of::<v::vfio_iommu_type1_dma_map>() as u32,
        flags: v::VFIO_DMA_MAP_FLAG_READ | write,
        vaddr: address,
        iova,
        size,
    };
    structure(container, IOMMU_MAP_DMA, &mut map).map(drop)
}

/// Takes that back; how many bytes were mapped there.
pub(super) fn unmap(container: BorrowedFd<'_>, iova: u64, size: u64) -> io::Result<u64> {
    // Without the bitmap that may follow.
    let mut buffer = [0; 24];
    buffer[..4].copy_from_slice(&24u32.to_le_bytes());
    buffer[8..16].copy_from_slice(&iova.to_le_bytes());
    buffer[16..24].copy_from_slice(&size.to_le_bytes());
    bytes(container, IOMMU_UNMAP_DMA, &mut buffer)?;
    Ok(long(&buffer, 16))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// Where in a reply a capability is: its identifier, version, and the offset of the next (16, 16 and 32 bits).
fn capability(reply: &[u8], first: u32, id: u16) -> Option<usize> {
    let mut at = first as usize;
    for _ in 0..reply.len() / 8 {
        if at == 0 || at + 8 > reply.len() {
            return None;
        }
        if word(reply, at) as u16 == id {
            return Some(at);
        }
        at = word(reply, at + 4) as usize;
    }
    None
}

fn pairs(reply: &[u8], at: usize, count: u32) -> Vec<(u64, u64)> {
    let starts = (0..MOST.min(count as usize)).map(|n| at + 16 * n);
    starts.take_while(|at| at + 16 <= reply.len()).map(|at| (long(reply, at), long(reply, at + 8))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_have_the_numbers_of_the_interface() {
        assert_eq!(GET_API_VERSION, 0x3b64);
        assert_eq!(IOMMU_MAP_DMA, 0x3b71);
    }

    #[test]
    fn capabilities_are_found_and_never_looped_over() {
        let mut reply = vec![0; 80];
        let mut put = |at: usize, value: u32| reply[at..at + 4].copy_from_slice(&value.to_le_bytes());
        put(24, 7);
        put(28, 40);
        put(40, 1);
        put(44, 24);
        put(48, 900);
        put(56, 0x1000);
        put(60, 1);
        put(64, 0x2000);
        assert_eq!(capability(&reply, 24, 1), Some(40));
        assert_eq!(capability(&reply, 24, 2), None, "a ring of two");
        assert_eq!(capability(&reply, 0, 7), None);
        assert_eq!(capability(&reply, 79, 7), None);
        assert_eq!(capability(&reply, u32::MAX, 7), None);
        assert_eq!(
            pairs(&reply, 56, word(&reply, 48)),
            [(0x1_0000_1000, 0x2000)],
            "no more than there are bytes"
        );
    }
}
