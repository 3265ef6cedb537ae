//! What the ring of an I/O core does for pollers: operations on files, handed to the kernel and completed on the core's thread.
//!
//! ```text
//!   attach -> submit ... -> enter (the core, after each turn) -> next ... -> detach     nothing is in flight
//!                                                                   \-----> orphan     something is
//! ```

#![allow(unsafe_code)]
// UNSAFETY: declares one unsafe method and calls none.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::RawFd;
use std::time::Duration;

/// Names what one poller has attached to the ring of its core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct IoHandle(pub u32);

/// One operation. Addresses are of this process, offsets and lengths in bytes.
#[derive(Debug, Clone, Copy)]
pub enum FileOp {
    /// From the file into memory.
    Read {
        /// The file.
        file: RawFd,
        /// Where to.
        into: *mut u8,
        /// How much.
        len: u32,
        /// Where in the file.
        offset: u64,
    },
    /// From the file into several parts of memory.
    ReadVectored {
        /// The file.
        file: RawFd,
        /// Table of the parts.
        table: *const libc::iovec,
        /// Entries of the table.
        count: u32,
        /// Where in the file.
        offset: u64,
    },
    /// From memory into the file.
    Write {
        /// The file.
        file: RawFd,
        /// Where from.
        from: *const u8,
        /// How much.
        len: u32,
        /// Where in the file.
        offset: u64,
    },
    /// From several parts of memory into the file.
    WriteVectored {
        /// The file.
        file: RawFd,
        /// Table of the parts.
        table: *const libc::iovec,
        /// Entries of the table.
        count: u32,
        /// Where in the file.
        offset: u64,
    },
    /// fsync.
    Sync {
        /// The file.
        file: RawFd,
    },
    /// fdatasync.
    SyncData {
        /// The file.
        file: RawFd,
    },
    /// fallocate.
    Allocate {
        /// The file.
        file: RawFd,
        /// FALLOC_FL_*.
        mode: i32,
        /// Where in the file.
        offset: u64,
        /// How much.
        len: u64,
    },
    /// Nothing; ends with 0.
    Nop,
}

/// The end of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoCompletion {
    /// What [`CoreIo::submit`] was told.
    pub tag: u16,
    /// What the system call would have returned, or an errno below zero.
    pub result: i32,
}

/// The one ring of a core. All methods are called on the core's thread.
pub trait CoreIo: Any + Send + fmt::Debug {
    /// Makes room for one poller, in the slot of that index, which is woken by completions. `completed` is where these are kept
    /// until [`CoreIo::next`]: it has room for as many as will ever be in flight, so that nothing allocates later.
    fn attach(&mut self, slot: usize, completed: VecDeque<IoCompletion>) -> IoHandle;

    /// Notes an operation down for the next [`CoreIo::enter`]. False if the ring takes no more from this poller before some of what
    /// is in flight has ended: nothing was noted then.
    ///
    /// # Safety
    /// The memory and the file that `op` names stay as they are until [`CoreIo::next`] has told of its end, or until what was given
    /// to [`CoreIo::orphan`] is dropped.
    unsafe fn submit(&mut self, handle: IoHandle, tag: u16, op: FileOp) -> bool;

    /// An operation of this poller that has ended.
    fn next(&mut self, handle: IoHandle) -> Option<IoCompletion>;

    /// Operations of this poller that the kernel has, or that [`CoreIo::next`] has not told of.
    fn in_flight(&self, handle: IoHandle) -> usize;

    /// Forgets a poller of which nothing is in flight, and gives back what it kept completions in. With something in flight it
    /// does nothing but forget who is to be woken: memory is not given up before the kernel has done with it.
    fn detach(&mut self, handle: IoHandle) -> VecDeque<IoCompletion>;

    /// Forgets a poller of which something is in flight. What the kernel still works on is in `keep`, which is dropped on a thread of its
    /// own once the last operation has ended. Nobody is told how they ended.
    fn orphan(&mut self, handle: IoHandle, keep: Box<dyn Send>);

    /// Hands to the kernel what was noted down, and takes what has ended. One system call at most; none if there is neither. The
    /// core does so after each turn.
    fn enter(&mut self);

    /// As [`CoreIo::enter`], but blocks until something has ended, at most for `timeout`; says whether [`CoreIo::next`] has
    /// something for anybody. For those who have no core.
    fn wait(&mut self, timeout: Duration) -> bool;
}
