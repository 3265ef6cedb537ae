//! Files behind mappings of the VMM: found by what Linux says of this process, and refused unless they are what they should be.
#![allow(unsafe_code)]
// UNSAFETY: maps files, and asks the kernel about descriptors of the VMM.

use std::ffi::c_int;
use std::fs;
use std::ptr;

use ioplane_plain::ProcMapping;

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;

/// Why a mapping is not that of a marker page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    /// Another file, or none.
    OtherFile,
    /// Not shared, so it does not show what others see.
    Private,
    /// Another page of the file.
    OtherPage,
    /// No descriptor of this process is the file's.
    NoDescriptor,
    /// The file is larger or smaller than such files are.
    Size,
    /// The file could shrink under KVM.
    NotSealed,
    /// Another layout.
    Layout,
    /// The kernel does not map it.
    NotMapped,
}

/// Pages of a file, mapped here until this is dropped.
#[derive(Debug)]
pub(crate) struct Mapped(*mut u8, usize);

// SAFETY: shared memory, which this only names.
unsafe impl Send for Mapped {}

impl Mapped {
    pub(crate) fn new(file: c_int, at: u64, len: u64, access: c_int) -> Result<Self, Refused> {
        let at = libc::off_t::try_from(at).map_err(|_| Refused::NotMapped)?;
        let len = usize::try_from(len).map_err(|_| Refused::NotMapped)?;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), len, access, libc::MAP_SHARED, file, at) };
        if mapped == libc::MAP_FAILED { Err(Refused::NotMapped) } else { Ok(Self(mapped.cast(), len)) }
    }

    /// Where a byte is mapped.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.1);
        self.0.wrapping_add(offset)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which nothing refers any more.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}

/// The file of that name whose mapping has that address: a descriptor of the VMM's, and the page's offset in the file.
pub(crate) fn file_of(address: usize, name: &str) -> Result<(c_int, u64), Refused> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|_| Refused::OtherFile)?;
    let (device, inode, at) = mapping(&maps, address as u64, name)?;
    Ok((descriptor(device, inode).ok_or(Refused::NoDescriptor)?, at))
}

/// Whether a file has that size, and keeps it.
pub(crate) fn sealed(file: c_int, bytes: u64) -> Result<(), Refused> {
    if status(file).is_none_or(|status| u64::try_from(status.st_size) != Ok(bytes)) {
        return Err(Refused::Size);
    }
    // SAFETY: a descriptor of this process.
    let seals = unsafe { libc::fcntl(file, libc::F_GET_SEALS) };
    let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    if seals < 0 || seals & needed != needed { Err(Refused::NotSealed) } else { Ok(()) }
}

/// The mapping that has an address: device and inode of its file, and where the address is in the file.
fn mapping(maps: &str, address: u64, name: &str) -> Result<(libc::dev_t, u64, u64), Refused> {
    let mapping = maps.lines().filter_map(ProcMapping::parse).find(|mapping| mapping.has(address));
    let mapping = mapping.filter(|mapping| mapping.path == format!("/memfd:{name} (deleted)"));
    let mapping = mapping.ok_or(Refused::OtherFile)?;
    if !mapping.shared {
        return Err(Refused::Private);
    }
    let at = mapping.offset.wrapping_add(address - mapping.start);
    // A slot is of whole pages.
    if !at.is_multiple_of(PAGE) {
        return Err(Refused::OtherPage);
    }
    let (major, minor) = mapping.device;
    Ok((libc::makedev(major, minor), mapping.inode, at))
}

fn status(file: c_int) -> Option<libc::stat> {
    // SAFETY: a structure of plain numbers.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a place for what the call writes.
    (unsafe { libc::fstat(file, &raw mut status) } == 0).then_some(status)
}

/// A descriptor of this process for a file. The VMM keeps it as long as the device is there.
fn descriptor(device: libc::dev_t, inode: u64) -> Option<c_int> {
    let names = fs::read_dir("/proc/self/fd").ok()?.flatten();
    let mut numbers = names.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(|file| status(*file).is_some_and(|status| (status.st_dev, status.st_ino) == (device, inode)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_read() {
        let mapping = |line: &str, address| mapping(line, address, "ioplane-registers");
        let line = "7f3c1a000000-7f3c1a001000 rw-s 00001000 00:01 1234                       /memfd:ioplane-registers (deleted)";
        let file = libc::makedev(0, 1);
        assert_eq!(mapping(line, 0x7f3c_1a00_0000), Ok((file, 1234, PAGE)));
        assert_eq!(mapping(line, 0x7f3c_1a00_0008), Err(Refused::OtherPage), "a slot is of whole pages");
        assert_eq!(mapping(line, 0x7f3c_1a00_1000), Err(Refused::OtherFile));
        assert_eq!(mapping(&line.replace("rw-s", "rw-p"), 0x7f3c_1a00_0000), Err(Refused::Private));
        assert_eq!(
            mapping(&line.replace("registers", "register"), 0x7f3c_1a00_0000),
            Err(Refused::OtherFile)
        );
        // A larger mapping that has the page in it.
        let whole = line.replace("00001000 00", "00000000 00").replace("a001000 ", "a003000 ");
        assert_eq!(mapping(&whole, 0x7f3c_1a00_1000), Ok((file, 1234, PAGE)));
        assert_eq!(mapping(&whole, 0x7f3c_1a00_0000), Ok((file, 1234, 0)));
    }
}
