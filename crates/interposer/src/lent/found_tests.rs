#![allow(unsafe_code)]
// UNSAFETY: maps files of its own.

use std::os::unix::net::UnixStream;
use std::path::Path;

use ioplane_pci::{Bar, LentPages, PageMessage, Space};

use super::*;

fn map(file: c_int, at: u64) -> usize {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, wherever the kernel puts it; it stays.
    let mapped = unsafe {
        libc::mmap(ptr::null_mut(), PAGE as usize, access, libc::MAP_SHARED, file, at as libc::off_t)
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.expose_provenance()
}

fn marker(pages: &LentPages) -> ioplane_pci::Pages {
    let bar = Bar::new(0x4000, Space::Memory32);
    pages.offered_by(&bar).unwrap().pages()[0].clone()
}

#[test]
fn a_device_is_found_by_its_marker() {
    let pages = LentPages::new(0x4000, Path::new("/run/ioplane/nic0.pages")).unwrap();
    let marker = marker(&pages);
    let found = find(map(marker.file.as_raw_fd(), marker.at)).unwrap();
    assert_eq!(found, FoundDevice { registers: 0x4000, socket: "/run/ioplane/nic0.pages".into() });
    // The control page, and what is in front of the marker.
    let refused = |at| find(map(marker.file.as_raw_fd(), at)).unwrap_err();
    assert_eq!(refused(0x5000), Refused::OtherPage);
    assert_eq!(refused(0), Refused::OtherPage);
    assert_eq!(refused(0x2000), Refused::Size);
}

#[test]
fn a_file_that_says_something_else_is_refused() {
    let said = |at: usize, value: u64| {
        let pages = LentPages::new(0x4000, Path::new("/run/x")).unwrap();
        let marker = marker(&pages);
        let control = map(marker.file.as_raw_fd(), 0x5000);
        // SAFETY: mapped above, and aligned.
        unsafe { ptr::with_exposed_provenance_mut::<u64>(control + at).write_volatile(value) };
        find(map(marker.file.as_raw_fd(), marker.at)).map(drop)
    };
    assert_eq!(said(REGISTERS, 0x4000), Ok(()), "what it says already");
    for (at, value) in [
        (0, MAGIC + 1),
        (REGISTERS, 0x2000),
        (PATH_LEN, 0),
        (PATH_LEN, LONGEST as u64 + 1),
        (PATH_LEN, u64::MAX),
    ] {
        assert_eq!(said(at, value), Err(Refused::Layout), "{at}: {value:#x}");
    }
}

#[test]
fn pages_that_follow_each_other_are_one_run() {
    assert_eq!(runs(0b1110), [(1, 3)]);
    assert_eq!(runs(0b1011), [(0, 2), (3, 1)]);
    assert_eq!(runs(u64::MAX), [(0, 64)]);
    assert_eq!(runs(0), []);
}

#[test]
fn pages_are_mapped_where_the_bar_is_in_the_file() {
    // SAFETY: a name with its end; then a descriptor of our own.
    let file = unsafe {
        use std::os::fd::FromRawFd;
        let file = libc::memfd_create(c"bar".as_ptr(), libc::MFD_CLOEXEC);
        assert_eq!(libc::ftruncate(file, 8 * PAGE as libc::off_t), 0);
        let word = 0x1234_5678_u32.to_le_bytes();
        assert_eq!(libc::pwrite(file, word.as_ptr().cast(), 4, 5 * PAGE as libc::off_t), 4);
        OwnedFd::from_raw_fd(file)
    };
    let mapped = DevicePages::map(&file, 4 * PAGE, 0b1010).unwrap();
    assert_eq!(mapped.iter().map(Run::pages).collect::<Vec<_>>(), [(1, 1), (3, 1)]);
    // SAFETY: mapped, and aligned.
    let seen = unsafe { ptr::with_exposed_provenance::<u32>(mapped[0].address() as usize).read_volatile() };
    assert_eq!(seen, 0x1234_5678);
    assert!(DevicePages::map(&file, u64::MAX - PAGE, 2).is_none());
    assert!(DevicePages::map(&file, 1, 1).is_none(), "not a page");
}

#[test]
fn messages_come_with_a_descriptor_or_without() {
    let (here, there) = UnixStream::pair().unwrap();
    let mut bytes = [0; PageMessage::BYTES];
    send(there.as_raw_fd(), &PageMessage::Take { number: 3 }.bytes());
    assert!(receive(here.as_raw_fd(), &mut bytes).unwrap().is_none());
    assert_eq!(PageMessage::read(&bytes), Some(PageMessage::Take { number: 3 }));
    // In two pieces, with a descriptor beside the first.
    let lend = PageMessage::Lend { number: 4, pages: 2, at: 0 }.bytes();
    with_descriptor(there.as_raw_fd(), &lend[..5], here.as_raw_fd());
    send(there.as_raw_fd(), &lend[5..]);
    let file = receive(here.as_raw_fd(), &mut bytes).unwrap().expect("a descriptor");
    assert_eq!(PageMessage::read(&bytes), Some(PageMessage::Lend { number: 4, pages: 2, at: 0 }));
    assert!(file.as_raw_fd() > 2 && file.as_raw_fd() != here.as_raw_fd());
    drop(there);
    assert!(receive(here.as_raw_fd(), &mut bytes).is_none(), "the other end is gone");
    // Nobody listens: no signal comes.
    send(here.as_raw_fd(), &bytes);
}

fn with_descriptor(socket: c_int, bytes: &[u8], file: c_int) {
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut space = [0_u64; 3];
    // SAFETY: a structure of numbers and pointers, filled in as the kernel wants it, with memory that outlives the call.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        header.msg_control = space.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&space);
        let first = libc::CMSG_FIRSTHDR(&raw const header);
        (*first).cmsg_level = libc::SOL_SOCKET;
        (*first).cmsg_type = libc::SCM_RIGHTS;
        (*first).cmsg_len = libc::CMSG_LEN(4) as usize;
        libc::CMSG_DATA(first).cast::<c_int>().write_unaligned(file);
        assert_eq!(libc::sendmsg(socket, &raw const header, 0), bytes.len() as isize);
    }
}
