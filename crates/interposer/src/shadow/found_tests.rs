#![allow(unsafe_code)]
// UNSAFETY: maps files of its own.

use std::ffi::{CString, c_int};
use std::fs;
use std::ptr;

use ioplane_pci::RegisterFile;
use std::os::fd::AsRawFd;

use super::*;

const SEALS: c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// A page of a file as the VMM maps it; it stays.
fn map(file: c_int, at: u64, flags: c_int) -> usize {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, wherever the kernel puts it.
    let mapped =
        unsafe { libc::mmap(ptr::null_mut(), PAGE as usize, access, flags, file, at as libc::off_t) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.expose_provenance()
}

/// A file that somebody offers.
fn offer(name: &str, bytes: u64, seals: c_int, magic: u64) -> c_int {
    let name = CString::new(name).unwrap();
    // SAFETY: a name with its end; then a descriptor of our own.
    let file = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    assert!(file >= 0);
    let magic = magic.to_le_bytes();
    // SAFETY: as above, and bytes that are there.
    unsafe {
        assert_eq!(libc::ftruncate(file, bytes as libc::off_t), 0);
        if bytes > CONTROL_AT {
            let written = libc::pwrite(file, magic.as_ptr().cast(), 8, CONTROL_AT as libc::off_t);
            assert_eq!(written, 8);
        }
        assert_eq!(libc::fcntl(file, libc::F_ADD_SEALS, seals), 0);
    }
    file
}

#[test]
fn the_file_of_a_device_is_found_by_its_marker() {
    let file = RegisterFile::new().unwrap();
    let other = RegisterFile::new().unwrap();
    let marker = file.marker();
    assert_eq!(marker.at, MARKER_AT);
    let address = map(marker.file.as_raw_fd(), MARKER_AT, libc::MAP_SHARED);
    let found = find(address).unwrap();
    found.want(3);
    assert_eq!(
        (file.request(), other.request()),
        (Some(3), None),
        "of two files, the one that is mapped there"
    );
    file.grant(3);
    assert_eq!(found.granted(), 3);
    file.registers().put_u16(0x3e, 0x8001);
    // SAFETY: mapped, and aligned.
    let seen = unsafe { ptr::with_exposed_provenance::<u16>(found.address() + 0x3e).read_volatile() };
    assert_eq!(seen, 0x8001);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let own = maps.lines().find(|line| line.starts_with(&format!("{:x}-", found.address()))).unwrap();
    assert!(own.contains(" r--s "), "not for writing: {own}");
}

#[test]
fn what_is_no_marker_page_is_refused() {
    let file = RegisterFile::new().unwrap();
    let marker = file.marker();
    let descriptor = marker.file.as_raw_fd();
    let refused = |address: usize| find(address).expect_err("refused");
    assert_eq!(refused(map(descriptor, REGISTERS_AT, libc::MAP_SHARED)), Refused::OtherPage);
    assert_eq!(refused(map(descriptor, CONTROL_AT, libc::MAP_SHARED)), Refused::OtherPage);
    assert_eq!(refused(map(descriptor, MARKER_AT, libc::MAP_PRIVATE)), Refused::Private);
    assert_eq!(refused(map(-1, 0, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)), Refused::OtherFile);
    assert_eq!(refused(8), Refused::OtherFile, "nothing is mapped there");
}

#[test]
fn hostile_offers_are_refused() {
    let offered = |file: c_int| {
        let found = find(map(file, MARKER_AT, libc::MAP_SHARED));
        // SAFETY: our own.
        unsafe { libc::close(file) };
        found.map(drop)
    };
    assert_eq!(offered(offer(NAME, BYTES, SEALS, MAGIC)), Ok(()));
    for bytes in [2 * PAGE, BYTES - 1, BYTES + PAGE] {
        assert_eq!(offered(offer(NAME, bytes, SEALS, MAGIC)), Err(Refused::Size), "{bytes}");
    }
    for seals in [0, libc::F_SEAL_GROW, libc::F_SEAL_SHRINK] {
        assert_eq!(offered(offer(NAME, BYTES, seals, MAGIC)), Err(Refused::NotSealed), "{seals}");
    }
    assert_eq!(offered(offer(NAME, BYTES, SEALS, MAGIC + 1)), Err(Refused::Layout));
    assert_eq!(offered(offer("ioplane-register", BYTES, SEALS, MAGIC)), Err(Refused::OtherFile));
    // Whoever mapped it has no descriptor of it any more.
    let file = offer(NAME, BYTES, SEALS, MAGIC);
    let address = map(file, MARKER_AT, libc::MAP_SHARED);
    // SAFETY: our own.
    unsafe { libc::close(file) };
    assert_eq!(find(address).map(drop), Err(Refused::NoDescriptor));
}
