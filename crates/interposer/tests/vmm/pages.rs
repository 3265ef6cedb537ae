//! A VMM whose device lends pages: by a socket, to the library in this process, which adds slots of its own to the VM.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use ioplane_pci::{Bar, LentPages, PAGE, PageMessage, Space};

use super::*;

const BAR: u64 = 0xfe00_0000;
const REGISTERS: u64 = 0x4000;
/// The VMM's slots: of the marker page, and of whatever tries for the place of the registers.
const MARKER: u32 = 3;
const OTHER: u32 = 4;
const LIMIT: Duration = Duration::from_secs(20);

fn region(slot: u32, address: u64, size: u64, host: usize) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: address,
        memory_size: size,
        userspace_addr: host as u64,
    }
}

/// Whether KVM itself has no slot at page 1 of the registers: asked past the library.
fn is_free(vm: c_int, memory: usize) -> bool {
    let set = |size| {
        let region = region(OTHER, BAR + PAGE, size, memory);
        // SAFETY: a structure that the kernel reads.
        unsafe { libc::syscall(libc::SYS_ioctl, vm, KVM_SET_USER_MEMORY_REGION, at(&region)) }
    };
    if set(PAGE) == 0 {
        assert_eq!(set(0), 0);
        return true;
    }
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EEXIST));
    false
}

/// How often this process has mapped the device.
fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("/memfd:the-device")).count()
}

fn accepted(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).unwrap();
    let end = Instant::now() + LIMIT;
    let stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(error) => assert!(Instant::now() < end, "nobody connects: {error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

fn says(stream: &UnixStream, message: PageMessage, file: Option<c_int>) {
    let bytes = message.bytes();
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut space = [0_u64; 3];
    // SAFETY: a structure of numbers and pointers, filled in as the kernel wants it, with memory that outlives the call.
    unsafe {
        let mut header: libc::msghdr = std::mem::zeroed();
        header.msg_iov = &raw mut part;
        header.msg_iovlen = 1;
        if let Some(file) = file {
            header.msg_control = space.as_mut_ptr().cast();
            header.msg_controllen = size_of_val(&space);
            let first = libc::CMSG_FIRSTHDR(&raw const header);
            (*first).cmsg_level = libc::SOL_SOCKET;
            (*first).cmsg_type = libc::SCM_RIGHTS;
            (*first).cmsg_len = libc::CMSG_LEN(4) as usize;
            libc::CMSG_DATA(first).cast::<c_int>().write_unaligned(file);
        }
        let sent = libc::sendmsg(stream.as_raw_fd(), &raw const header, 0);
        assert_eq!(usize::try_from(sent).ok(), Some(bytes.len()));
    }
}

fn hears(stream: &mut UnixStream) -> PageMessage {
    let mut bytes = [0; PageMessage::BYTES];
    stream.read_exact(&mut bytes).unwrap();
    PageMessage::read(&bytes).expect("a message")
}

pub fn run() {
    let Ok(kvm) = File::options().read(true).write(true).open("/dev/kvm") else {
        return println!("no KVM: /dev/kvm cannot be opened");
    };
    let vm = match call(kvm.as_raw_fd(), KVM_CREATE_VM, 0) {
        Ok(vm) => vm,
        Err(why) => return println!("no KVM: {why}"),
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("f.sock.pages");
    let listener = UnixListener::bind(&path).unwrap();
    let pages = LentPages::new(REGISTERS, &path).unwrap();
    let bar = pages.offered_by(&Bar::new(REGISTERS, Space::Memory64)).unwrap();
    let marker = &bar.pages()[0];
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let (len, from) = (PAGE as usize, marker.at as libc::off_t);
    let file = marker.file.as_raw_fd();
    // SAFETY: a new mapping, wherever the kernel puts it.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), len, access, libc::MAP_SHARED, file, from) };
    assert_ne!(mapped, libc::MAP_FAILED);
    let mapped = mapped.expose_provenance();
    let memory = map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1).expose_provenance();
    // SAFETY: a name with its end; then a descriptor of our own.
    let device = unsafe {
        let device = libc::memfd_create(c"the-device".as_ptr(), libc::MFD_CLOEXEC);
        assert_eq!(libc::ftruncate(device, 8 * PAGE as libc::off_t), 0);
        device
    };
    let places = |there: bool| {
        let size = if there { PAGE } else { 0 };
        call(vm, KVM_SET_USER_MEMORY_REGION, at(&region(MARKER, BAR + REGISTERS, size, mapped))).unwrap();
    };
    places(true);
    let mut line = accepted(&listener);
    assert!(is_free(vm, memory) && mappings() == 0, "nothing is lent");
    let lend = |line: &mut UnixStream, number| {
        says(line, PageMessage::Lend { number, pages: 0b1110, at: 4 * PAGE }, Some(device));
        assert_eq!(hears(line), PageMessage::Lent { number });
        assert!(!is_free(vm, memory) && mappings() == 1);
    };
    lend(&mut line, 1);
    says(&line, PageMessage::Take { number: 1 }, None);
    assert_eq!(hears(&mut line), PageMessage::Taken { number: 1 });
    assert!(is_free(vm, memory) && mappings() == 0);
    // The VMM wants the place for something else, for a while.
    lend(&mut line, 2);
    call(vm, KVM_SET_USER_MEMORY_REGION, at(&region(OTHER, BAR + 2 * PAGE, PAGE, memory))).unwrap();
    assert_eq!(mappings(), 1);
    call(vm, KVM_SET_USER_MEMORY_REGION, at(&region(OTHER, 0, 0, 0))).unwrap();
    assert!(!is_free(vm, memory), "they are back");
    // The BAR goes: when the VMM's call returns nothing is mapped.
    places(false);
    assert!(is_free(vm, memory) && mappings() == 0);
    assert_eq!(hears(&mut line), PageMessage::Taken { number: 2 });
    assert_eq!(line.read(&mut [0]).unwrap(), 0, "the connection has ended");
    // Back again, and the device dies.
    places(true);
    let mut line = accepted(&listener);
    lend(&mut line, 1);
    drop(line);
    let end = Instant::now() + LIMIT;
    while !is_free(vm, memory) || mappings() > 0 {
        assert!(Instant::now() < end, "they stay when the device is gone");
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("pages lent");
}
