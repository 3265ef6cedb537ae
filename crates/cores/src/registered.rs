//! A ring's descriptor in the table that its thread has with io_uring (Linux 5.18): a system call by its index does not look up the descriptor.
//!
//! The crate `io-uring` keeps the index in a `Submitter`, which borrows the ring and so cannot be kept beside it.

#![allow(unsafe_code)]
// UNSAFETY: io_uring_register and io_uring_enter by their numbers. What the entries name is `ring.rs`'s to keep.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::thread::{self, ThreadId};

use io_uring::EnterFlags;
use io_uring::types::SubmitArgs;

/// `IORING_REGISTER_RING_FDS`, `IORING_UNREGISTER_RING_FDS` (linux/io_uring.h).
const REGISTER: libc::c_uint = 20;
const UNREGISTER: libc::c_uint = 21;

/// `struct io_uring_rsrc_update`.
#[repr(C)]
struct Update {
    offset: u32,
    reserved: u32,
    data: u64,
}

/// The entry of one ring in the table of one thread. It keeps the ring open until [`RegisteredRing::remove`] or the thread's end.
#[derive(Debug)]
pub(crate) struct RegisteredRing {
    index: u32,
    thread: ThreadId,
}

impl RegisteredRing {
    /// Enters the ring in the calling thread's table, which has 16 places. `None` where there is no place or no such table.
    pub(crate) fn enter_in_table(ring: BorrowedFd<'_>) -> Option<Self> {
        let mut update = Update { offset: u32::MAX, reserved: 0, data: ring.as_raw_fd() as u64 };
        let entered = register(ring, REGISTER, &mut update)?;
        (entered == 1).then(|| RegisteredRing { index: update.offset, thread: thread::current().id() })
    }

    /// Takes it out again, by the thread that has it in its table.
    pub(crate) fn remove(self, ring: BorrowedFd<'_>) {
        debug_assert!(self.is_here(), "the index is of another thread's table");
        register(ring, UNREGISTER, &mut Update { offset: self.index, reserved: 0, data: 0 });
    }

    /// Whether the calling thread has it in its table.
    pub(crate) fn is_here(&self) -> bool {
        self.thread == thread::current().id()
    }

    /// io_uring_enter, by the thread that has it in its table: submits `submit` entries and, with `GETEVENTS` among the flags, waits for `least` completions.
    pub(crate) fn enter(
        &self,
        submit: u32,
        least: u32,
        flags: EnterFlags,
        args: Option<&SubmitArgs<'_, '_>>,
    ) -> io::Result<usize> {
        debug_assert_eq!(self.thread, thread::current().id(), "the index is of another thread's table");
        let flags = flags | EnterFlags::REGISTERED_RING;
        let (flags, args, size) = match args {
            Some(args) => (flags | EnterFlags::EXT_ARG, std::ptr::from_ref(args), size_of::<SubmitArgs>()),
            None => (flags, std::ptr::null(), 0),
        };
        // SAFETY: the kernel reads `size` bytes of `args`, which lives as long as the call. The index is of this thread's table, so the ring is
        // the one that was entered there, whose entries name memory that `ring.rs` answers for.
        let taken = unsafe {
            libc::syscall(libc::SYS_io_uring_enter, self.index, submit, least, flags.bits(), args, size)
        };
        usize::try_from(taken).map_err(|_| io::Error::last_os_error())
    }
}

fn register(ring: BorrowedFd<'_>, operation: libc::c_uint, update: &mut Update) -> Option<usize> {
    // SAFETY: the kernel reads and writes one `Update`.
    let done = unsafe {
        libc::syscall(
            libc::SYS_io_uring_register,
            ring.as_raw_fd(),
            operation,
            std::ptr::from_mut(update),
            1_u32,
        )
    };
    usize::try_from(done).ok()
}

#[cfg(test)]
mod tests {
    use io_uring::{IoUring, opcode};

    use super::*;

    fn descriptor(ring: &IoUring) -> BorrowedFd<'_> {
        // SAFETY: the ring lives as long as the borrow.
        unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }
    }

    #[test]
    fn a_ring_is_entered_by_its_index_and_leaves_its_place_to_others() {
        // More than the table has places for.
        for turn in 0..40 {
            let mut ring = IoUring::new(4).unwrap();
            let Some(registered) = RegisteredRing::enter_in_table(descriptor(&ring)) else {
                assert_eq!(turn, 0, "a place is lost with each ring");
                return eprintln!("SKIPPED (cannot be had here): a table of rings");
            };
            // SAFETY: names no memory.
            unsafe { ring.submission().push(&opcode::Nop::new().build().user_data(turn)) }.unwrap();
            assert_eq!(registered.enter(1, 1, EnterFlags::GETEVENTS, None).unwrap(), 1);
            assert_eq!(ring.completion().next().map(|completion| completion.user_data()), Some(turn));
            let nothing_comes = io_uring::types::Timespec::new().nsec(1);
            let args = SubmitArgs::new().timespec(&nothing_comes);
            let timed_out = registered.enter(0, 1, EnterFlags::GETEVENTS, Some(&args)).unwrap_err();
            assert_eq!(timed_out.raw_os_error(), Some(libc::ETIME));
            registered.remove(descriptor(&ring));
        }
    }

    #[test]
    fn a_full_table_is_no_error() {
        let rings: Vec<IoUring> = (0..20).map(|_| IoUring::new(2).unwrap()).collect();
        let entered: Vec<_> =
            rings.iter().map(|ring| RegisteredRing::enter_in_table(descriptor(ring))).collect();
        assert!(entered.last().is_some_and(Option::is_none), "the table has 16 places");
        for (ring, registered) in rings.iter().zip(entered) {
            if let Some(registered) = registered {
                registered.remove(descriptor(ring));
            }
        }
    }
}
