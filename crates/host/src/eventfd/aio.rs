//! Raising eventfds by the completion of Linux AIO requests that end at once: writes of nothing to `/dev/null`.
//!
//! A request with `IOCB_FLAG_RESFD` names an eventfd, which the kernel raises when the request has ended (`eventfd_signal`: adds
//! one unless the counter is full, never waits, does not look at the file's flags). The write ends within `io_submit`, so
//! one system call raises the eventfd. What a context remembers of it, one event in its ring, is thrown away here without
//! a system call. Any number of threads use a context at the same time.

#![allow(unsafe_code)]
// UNSAFETY: no crate wraps these system calls; the ring of a context is memory that the kernel maps.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Events that a context has room for: many more than threads are ever between submitting and throwing away.
const EVENTS: u32 = 256;

/// Contexts of the process. Cores that signal at the same time rarely meet in one; together they are a small part of what
/// the system allows (`fs.aio-max-nr`, 65,536 by default, counted in events).
const CONTEXTS: usize = 4;

/// `IOCB_CMD_PWRITE`.
const PWRITE: u16 = 1;
/// `IOCB_FLAG_RESFD`.
const RESFD: u32 = 1;
/// `AIO_RING_MAGIC`.
const MAGIC: u32 = 0xa10a_10a1;

/// Tries of one signal. A second is needed only if as many threads as there are events stood between the two steps of a signal.
const TRIES: u32 = 3;

/// `struct iocb` of linux/aio_abi.h, on a little-endian machine.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// The head of `struct aio_ring`, where the kernel maps a context's completions; the events follow. libaio reads it too.
#[repr(C)]
struct RingHead {
    id: u32,
    events: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
    length: u32,
}

/// One AIO context, for the life of the process.
#[derive(Debug)]
pub(super) struct Context {
    /// The kernel's name of it, which is the address of its ring.
    id: usize,
    null: File,
}

impl Context {
    fn new() -> io::Result<Self> {
        let null = OpenOptions::new().write(true).open("/dev/null")?;
        let mut id = 0usize;
        // SAFETY: the kernel writes one word to `id`.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, EVENTS, &raw mut id) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        let context = Context { id, null };
        let head = context.head();
        if head.magic != MAGIC || head.incompatible != 0 {
            // Not the layout that is known here; the context stays behind, unused.
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        // A filter of system calls may allow making a context and not using it.
        let probe = super::fresh()?;
        context.submit(probe.as_fd())?;
        context.forget_ended();
        if super::empty(probe.as_fd()) != 1 {
            return Err(io::Error::from(io::ErrorKind::Unsupported));
        }
        Ok(context)
    }

    fn head(&self) -> &RingHead {
        // SAFETY: the kernel maps the ring at this address when it makes the context, for as long as the context is; nobody
        // destroys it. The fields that change are atomic.
        unsafe { &*(self.id as *const RingHead) }
    }

    /// Throws away what has ended. Threads that do so at the same time may bring back what another has thrown away; the next
    /// throws it away again.
    fn forget_ended(&self) {
        let head = self.head();
        head.head.store(head.tail.load(Ordering::Acquire), Ordering::Release);
    }

    fn submit(&self, eventfd: BorrowedFd<'_>) -> io::Result<()> {
        let mut request = Iocb {
            opcode: PWRITE,
            file: self.null.as_raw_fd() as u32,
            flags: RESFD,
            eventfd: eventfd.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let list = [&raw mut request];
        // SAFETY: one request, which the kernel has copied when the call returns; it transfers no bytes.
        match unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1usize, list.as_ptr()) } {
            1 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Raises `eventfd` by one, unless its counter is full. One system call. Says whether the kernel took the request.
    #[inline]
    pub(super) fn raise(&self, eventfd: BorrowedFd<'_>) -> bool {
        (0..TRIES).any(|_| {
            let submitted = self.submit(eventfd);
            self.forget_ended();
            submitted.is_ok()
        })
    }
}

/// A context, a different one for whoever asks next; `None` on a system that gives no contexts.
pub(super) fn shared() -> Option<&'static Context> {
    static SHARED: OnceLock<Vec<Context>> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let contexts = SHARED.get_or_init(|| {
        let made: io::Result<Vec<Context>> = (0..CONTEXTS).map(|_| Context::new()).collect();
        made.unwrap_or_else(|error| {
            tracing::warn!(
                %error,
                "no Linux AIO contexts (fs.aio-max-nr?): each interrupt takes an io_uring of its own instead"
            );
            Vec::new()
        })
    });
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    contexts.get(next.checked_rem(contexts.len())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_kernels() {
        assert_eq!(size_of::<Iocb>(), 64);
        assert_eq!(std::mem::offset_of!(Iocb, eventfd), 60);
        assert_eq!(std::mem::offset_of!(RingHead, magic), 16);
        assert_eq!(size_of::<RingHead>(), 32);
    }
}
