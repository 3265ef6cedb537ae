//! The file behind a marker page, and pages of a device: what this process maps.
#![allow(unsafe_code)]
// UNSAFETY: maps files, and reads what is mapped.

use std::ffi::{OsStr, c_int};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use ioplane_pci::lent_pages::{LONGEST, MAGIC, MOST, NAME, PATH, PATH_LEN, REGISTERS};

use super::follower::Run;
use crate::marker::{Mapped, PAGE, Refused, file_of, sealed};

/// What a marker page says of its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FoundDevice {
    /// Bytes of registers in front of it.
    pub(super) registers: u64,
    /// Where the device lends them.
    pub(super) socket: PathBuf,
}

/// The device whose marker page is mapped at that address.
pub(super) fn find(address: usize) -> Result<FoundDevice, Refused> {
    let (file, at) = file_of(address, NAME)?;
    let registers = at;
    let whole = registers.is_power_of_two() && (PAGE..=MOST * PAGE).contains(&registers);
    if !whole {
        return Err(Refused::OtherPage);
    }
    sealed(file, registers + 2 * PAGE)?;
    let control = Mapped::new(file, registers + PAGE, PAGE, libc::PROT_READ)?;
    let number = |at: usize| {
        // SAFETY: inside the page, aligned, and mapped as long as this is; the file cannot shrink.
        let number: &AtomicU64 = unsafe { &*control.at(at).cast() };
        u64::from_le(number.load(Ordering::Acquire))
    };
    if (number(0), number(REGISTERS)) != (MAGIC, registers) {
        return Err(Refused::Layout);
    }
    let len = usize::try_from(number(PATH_LEN)).ok().filter(|len| (1..=LONGEST).contains(len));
    let path: Vec<u8> = (0..len.ok_or(Refused::Layout)?)
        .map(|n| {
            // SAFETY: as above; a byte is always aligned.
            let byte: &AtomicU8 = unsafe { &*control.at(PATH + n).cast() };
            byte.load(Ordering::Relaxed)
        })
        .collect();
    Ok(FoundDevice { registers, socket: OsStr::from_bytes(&path).into() })
}

/// Pages of a device's registers that follow each other.
#[derive(Debug)]
pub(super) struct DevicePages {
    mapped: Mapped,
    first: u64,
    count: u64,
}

impl DevicePages {
    /// Where they are mapped, for KVM.
    pub(super) fn address(&self) -> u64 {
        self.mapped.at(0).expose_provenance() as u64
    }

    /// Maps the pages that `pages` names, of a BAR that begins at `at` in the file. All of them, or none.
    pub(super) fn map(file: &OwnedFd, at: u64, pages: u64) -> Option<Vec<DevicePages>> {
        let access: c_int = libc::PROT_READ | libc::PROT_WRITE;
        let mut all = Vec::new();
        for (first, count) in runs(pages) {
            let from = at.checked_add(first * PAGE)?;
            let mapped = Mapped::new(file.as_raw_fd(), from, count * PAGE, access).ok()?;
            all.push(DevicePages { mapped, first, count });
        }
        Some(all)
    }
}

impl Run for DevicePages {
    fn pages(&self) -> (u64, u64) {
        (self.first, self.count)
    }
}

/// Pages that follow each other: the first one, and how many.
fn runs(pages: u64) -> Vec<(u64, u64)> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for page in (0..u64::from(u64::BITS)).filter(|page| pages >> page & 1 == 1) {
        match runs.last_mut() {
            Some((first, count)) if *first + *count == page => *count += 1,
            _ => runs.push((page, 1)),
        }
    }
    runs
}

/// A message with the descriptor that may have come with it; `None` when the other end is gone or says what is no message.
pub(super) fn receive(socket: c_int, bytes: &mut [u8]) -> Option<Option<OwnedFd>> {
    let mut file = None;
    let mut got = 0;
    while got < bytes.len() {
        let rest = &mut bytes[got..];
        let mut part = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        // Room for one descriptor, aligned as the kernel wants it.
        let mut space = [0_u64; 3];
        // SAFETY: a structure of numbers and pointers that may be null.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        header.msg_control = space.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&space);
        // SAFETY: the structure describes memory of ours that outlives the call.
        let read = unsafe { libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC) };
        if read < 0 && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted {
            continue;
        }
        got += usize::try_from(read).ok().filter(|read| *read > 0)?;
        file = descriptor(&header).or(file);
        if header.msg_flags & libc::MSG_CTRUNC != 0 {
            return None;
        }
    }
    Some(file)
}

/// The descriptor that came with what `recvmsg` has just filled in.
fn descriptor(header: &libc::msghdr) -> Option<OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: the structure was filled in by the kernel, and the memory that it names is still there.
    let first = unsafe { libc::CMSG_FIRSTHDR(header) };
    if first.is_null() {
        return None;
    }
    // SAFETY: as above.
    let (level, kind, len) = unsafe { ((*first).cmsg_level, (*first).cmsg_type, (*first).cmsg_len) };
    // SAFETY: makes no access.
    let one = unsafe { libc::CMSG_LEN(size_of::<c_int>() as u32) } as usize;
    if (level, kind) != (libc::SOL_SOCKET, libc::SCM_RIGHTS) || len < one {
        return None;
    }
    // SAFETY: there is room for one descriptor, which the kernel has put there; it is ours from here on.
    unsafe { Some(OwnedFd::from_raw_fd(ptr::read_unaligned(libc::CMSG_DATA(first).cast::<c_int>()))) }
}

/// Sends a message. Whoever has gone is not told.
pub(super) fn send(socket: c_int, bytes: &[u8]) {
    // SAFETY: bytes that are there. A message is far smaller than what a socket takes, so it goes as a whole.
    unsafe {
        libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
}

#[cfg(test)]
#[path = "found_tests.rs"]
mod tests;
