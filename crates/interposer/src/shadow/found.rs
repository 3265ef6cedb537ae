//! The register file behind a mapping of the VMM: found by what Linux says of this process, and refused unless it is what it should be.
#![allow(unsafe_code)]
// UNSAFETY: maps two pages of a file, and asks the kernel about descriptors of the VMM.

use std::ffi::c_int;
use std::fs;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_pci::register_file::{BYTES, CONTROL_AT, GRANTED, MAGIC, MARKER_AT, NAME, REGISTERS_AT, WANTED};
use ioplane_plain::ProcMapping;

use super::follower::{PAGE, Registers};

/// Why a mapping is not that of a marker page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refused {
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

/// A page of the file, mapped here until this is dropped.
#[derive(Debug)]
struct Mapped(*mut u8);

// SAFETY: shared memory, reached by atomic accesses only.
unsafe impl Send for Mapped {}

impl Mapped {
    fn new(file: c_int, at: u64, access: c_int) -> Result<Self, Refused> {
        let at = libc::off_t::try_from(at).map_err(|_| Refused::NotMapped)?;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let mapped =
            unsafe { libc::mmap(ptr::null_mut(), PAGE as usize, access, libc::MAP_SHARED, file, at) };
        if mapped == libc::MAP_FAILED { Err(Refused::NotMapped) } else { Ok(Self(mapped.cast())) }
    }

    fn number(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at < PAGE as usize);
        // SAFETY: inside the page, aligned, and mapped as long as this is; the file cannot shrink.
        unsafe { &*self.0.add(at).cast() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own mapping, to which nothing refers any more.
        unsafe { libc::munmap(self.0.cast(), PAGE as usize) };
    }
}

/// A register file: page 0 for reading only, and the control page.
#[derive(Debug)]
pub(super) struct FoundRegisters {
    registers: Mapped,
    control: Mapped,
}

impl FoundRegisters {
    /// Where the registers are mapped, for KVM.
    pub(super) fn address(&self) -> usize {
        self.registers.0.expose_provenance()
    }
}

impl Registers for FoundRegisters {
    fn want(&self, request: u64) {
        self.control.number(WANTED).store(request, Ordering::Release);
    }

    fn granted(&self) -> u64 {
        self.control.number(GRANTED).load(Ordering::Acquire)
    }
}

/// The register file whose marker page is mapped at that address.
pub(super) fn find(address: usize) -> Result<FoundRegisters, Refused> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|_| Refused::OtherFile)?;
    let (device, inode) = marker(&maps, address as u64)?;
    let file = descriptor(device, inode).ok_or(Refused::NoDescriptor)?;
    if status(file).is_none_or(|status| u64::try_from(status.st_size) != Ok(BYTES)) {
        return Err(Refused::Size);
    }
    // SAFETY: a descriptor of this process.
    let seals = unsafe { libc::fcntl(file, libc::F_GET_SEALS) };
    let needed = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
    if seals < 0 || seals & needed != needed {
        return Err(Refused::NotSealed);
    }
    let control = Mapped::new(file, CONTROL_AT, libc::PROT_READ | libc::PROT_WRITE)?;
    if u64::from_le(control.number(0).load(Ordering::Acquire)) != MAGIC {
        return Err(Refused::Layout);
    }
    Ok(FoundRegisters { registers: Mapped::new(file, REGISTERS_AT, libc::PROT_READ)?, control })
}

/// The file of the mapping that has an address: device and inode.
fn marker(maps: &str, address: u64) -> Result<(libc::dev_t, u64), Refused> {
    let mapping = maps.lines().filter_map(ProcMapping::parse).find(|mapping| mapping.has(address));
    let mapping = mapping.filter(|mapping| mapping.path == format!("/memfd:{NAME} (deleted)"));
    let mapping = mapping.ok_or(Refused::OtherFile)?;
    if !mapping.shared {
        return Err(Refused::Private);
    }
    if mapping.offset.wrapping_add(address - mapping.start) != MARKER_AT {
        return Err(Refused::OtherPage);
    }
    let (major, minor) = mapping.device;
    Ok((libc::makedev(major, minor), mapping.inode))
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
#[path = "found_tests.rs"]
mod tests;
