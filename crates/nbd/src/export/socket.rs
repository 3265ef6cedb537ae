//! The socket of a connection: system calls that never block, straight between the kernel and the connection's memory.

#![allow(unsafe_code)]
// UNSAFETY: recvmsg and sendmsg over spans of a mapping, which no safe slice may stand for.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ioplane_memory::{GuestFault, GuestRange, GuestView};
use ioplane_storage::MAX_RANGES;
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown, sockopt};

use crate::error::Violation;
use crate::protection::Protection;
use crate::records::{Gathering, Records, StreamError};

/// Most spans of one call: a request of [`MAX_RANGES`], and what is before and behind it.
const SPANS: usize = MAX_RANGES + 4;

/// Most calls by which what a client still sends is read over.
const MOST_READ_OVER: u32 = 16;

/// The socket of a client whose handshake has ended, perhaps with TLS or sums.
#[derive(Debug)]
pub struct ClientSocket {
    fd: OwnedFd,
    records: Option<Box<Records>>,
}

impl From<OwnedFd> for ClientSocket {
    /// Without either.
    fn from(fd: OwnedFd) -> Self {
        ClientSocket { fd, records: None }
    }
}

impl AsFd for ClientSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl ClientSocket {
    pub(super) fn with_records(fd: OwnedFd, records: Records) -> ClientSocket {
        ClientSocket { fd, records: Some(Box::new(records)) }
    }

    /// By what its bytes are protected.
    pub(super) fn protection(&self) -> Protection {
        self.records.as_ref().map_or(Protection::None, |records| records.protection())
    }

    /// The part of the records, for a while.
    pub(super) fn take_records(&mut self) -> Option<Box<Records>> {
        self.records.take()
    }

    /// Puts it back.
    pub(super) fn put_records(&mut self, records: Option<Box<Records>>) {
        self.records = records;
    }

    /// Whether it receives into staging only.
    pub(super) fn has_records(&self) -> bool {
        self.records.is_some()
    }

    /// Whether something that was sent has not gone to the kernel yet. Never without records.
    pub(super) fn has_unsent(&self) -> bool {
        self.records.as_ref().is_some_and(|records| records.has_unsent())
    }

    /// Whether something can be received that the kernel does not tell of. Never without records.
    pub(super) fn has_received(&self) -> bool {
        self.records.as_ref().is_some_and(|records| records.has_received())
    }

    /// Passes on what has not gone to the kernel. Whether all of it has.
    pub(super) fn flush(&mut self) -> Result<bool, Errno> {
        let Some(records) = &mut self.records else { return Ok(true) };
        records.flush(self.fd.as_fd()).map_err(Errno::from_raw_os_error)
    }

    /// Says to the client that the connection ends, where there is a word for that. It has to be flushed.
    pub(super) fn finish(&mut self) {
        if let Some(records) = &mut self.records {
            records.finish(self.fd.as_fd());
        }
    }

    /// Ends the connection. What the client still sends is not read.
    pub(super) fn end(&mut self) {
        if self.has_records() {
            let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
            self.read_over();
        } else {
            let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
        }
    }

    /// Bytes of records that were looked at since this was last asked; none without them.
    pub(super) fn charge(&mut self) -> usize {
        self.records.as_mut().map_or(0, |records| records.charge())
    }

    /// A socket that is closed with something unread resets its connection, and what the client has not read is lost with it. A client of TLS says that it ends, at
    /// least, and one with sums may have sent more than was looked at.
    fn read_over(&self) {
        let mut scrap = [0; 4096];
        for _ in 0..MOST_READ_OVER {
            if !rustix::net::recv(&self.fd, &mut scrap, RecvFlags::DONTWAIT).is_ok_and(|(bytes, _)| bytes > 0)
            {
                return;
            }
        }
    }

    /// Receives into `ranges` of the memory of `view`, as far as one call has room for them, and what comes after all of them into `staging`. With records there must be no
    /// ranges.
    pub(super) fn receive(
        &mut self,
        view: &GuestView,
        ranges: &[GuestRange],
        staging: &mut [u8],
    ) -> Result<Moved, ReceiveError> {
        let Some(records) = &mut self.records else { return receive(&self.fd, view, ranges, staging) };
        debug_assert!(ranges.is_empty());
        match records.receive(self.fd.as_fd(), staging) {
            Ok(0) => Ok(Moved::End),
            Ok(bytes) => Ok(Moved::Bytes(bytes)),
            Err(StreamError::System(libc::EAGAIN | libc::EINTR)) => Ok(Moved::Later),
            Err(StreamError::System(errno)) => Err(ReceiveError::Lost(Errno::from_raw_os_error(errno))),
            Err(StreamError::Violation(violation)) => Err(ReceiveError::Violation(violation)),
        }
    }
}

/// Has a TCP socket send at once, and end when its peer neither sends nor acknowledges anything for `silence`. Others are left as they are.
pub(super) fn notice_silence(socket: &impl AsFd, silence: Duration) -> std::io::Result<()> {
    if sockopt::set_tcp_nodelay(socket, true).is_err() {
        // Not TCP.
        return Ok(());
    }
    let silence = silence.max(Duration::from_secs(3));
    let third = Duration::from_secs(silence.as_secs() / 3);
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, third)?;
    sockopt::set_tcp_keepintvl(socket, third)?;
    sockopt::set_tcp_keepcnt(socket, 2)?;
    sockopt::set_tcp_user_timeout(socket, u32::try_from(silence.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}

impl Drop for ClientSocket {
    fn drop(&mut self) {
        if self.has_records() {
            self.read_over();
        }
    }
}

/// What one call came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    /// So many bytes.
    Bytes(usize),
    /// None now.
    Later,
    /// The peer sends no more.
    End,
}

/// The spans of one call, in order.
struct Table {
    entries: [libc::iovec; SPANS],
    count: usize,
    bytes: usize,
}

impl Table {
    fn new() -> Table {
        let none = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Table { entries: [none; SPANS], count: 0, bytes: 0 }
    }

    fn has_room(&self) -> bool {
        self.count < SPANS
    }

    /// The caller has seen that there is room.
    fn push(&mut self, base: *mut u8, len: usize) {
        if len > 0 {
            self.entries[self.count] = libc::iovec { iov_base: base.cast(), iov_len: len };
            self.count += 1;
            self.bytes += len;
        }
    }

    fn message(&mut self) -> libc::msghdr {
        // SAFETY: a msghdr is plain data, for which zeros are a value.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = self.entries.as_mut_ptr();
        message.msg_iovlen = self.count as _;
        message
    }
}

/// Receives into `ranges` of the memory of `view`, as far as one call has room for them, and what comes after all of them into `staging`.
fn receive(
    socket: &OwnedFd,
    view: &GuestView,
    ranges: &[GuestRange],
    staging: &mut [u8],
) -> Result<Moved, ReceiveError> {
    let mut table = Table::new();
    for range in ranges.iter().take(SPANS - 1) {
        let span = view.iovec(*range)?;
        table.push(span.base(), span.len());
    }
    if ranges.len() < SPANS {
        table.push(staging.as_mut_ptr(), staging.len());
    }
    // SAFETY: the spans lie in the map that `view` keeps mapped, and `staging` is borrowed for the length of the call.
    let done = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut table.message(), libc::MSG_DONTWAIT) };
    match moved(done)? {
        Moved::Bytes(0) => Ok(Moved::End),
        moved => Ok(moved),
    }
}

/// Why nothing was received.
#[derive(Debug)]
pub(super) enum ReceiveError {
    /// The connection is lost.
    Lost(Errno),
    /// What the client has sent cannot be.
    Violation(Violation),
    /// The host has no memory left for ours.
    Memory,
}

impl From<Errno> for ReceiveError {
    fn from(errno: Errno) -> Self {
        ReceiveError::Lost(errno)
    }
}

impl From<GuestFault> for ReceiveError {
    fn from(_: GuestFault) -> Self {
        ReceiveError::Memory
    }
}

/// What one call sends: bytes of ours and ranges of memory, in order.
pub(super) struct Sending<'a> {
    view: &'a GuestView,
    table: Table,
}

impl<'a> Sending<'a> {
    /// Nothing yet, with ranges in the memory of `view`.
    pub fn new(view: &'a GuestView) -> Sending<'a> {
        Sending { view, table: Table::new() }
    }

    /// All that was pushed, in bytes.
    pub fn bytes(&self) -> usize {
        self.table.bytes
    }

    /// Adds bytes of ours; false, and nothing, if there is no room.
    pub fn push(&mut self, bytes: &'a [u8]) -> bool {
        let room = self.table.has_room();
        if room {
            self.table.push(bytes.as_ptr().cast_mut(), bytes.len());
        }
        room
    }

    /// Adds a range of memory; false, and nothing, if there is no room.
    pub fn push_range(&mut self, range: GuestRange) -> Result<bool, GuestFault> {
        let room = self.table.has_room();
        if room {
            let span = self.view.iovec(range)?;
            self.table.push(span.base(), span.len());
        }
        Ok(room)
    }

    /// Sends what the socket takes now; through `records` if it has them.
    pub fn send(mut self, socket: &ClientSocket, records: Option<&mut Records>) -> Result<Moved, Errno> {
        let fd = &socket.fd;
        if let Some(records) = records {
            // SAFETY: what was pushed is borrowed for longer than the call, and ranges lie in the map that `view` keeps mapped.
            let mut gathering = unsafe { Gathering::new(&self.table.entries[..self.table.count]) };
            let gather = |into: &mut [u8]| {
                gathering.copy(into);
                true
            };
            return match records.send(fd.as_fd(), self.table.bytes, gather) {
                Ok(bytes) => Ok(Moved::Bytes(bytes)),
                Err(libc::EAGAIN | libc::EINTR) => Ok(Moved::Later),
                Err(errno) => Err(Errno::from_raw_os_error(errno)),
            };
        }
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        let message = self.table.message();
        // SAFETY: what was pushed is borrowed for longer than the call, which only reads it; ranges lie in the map that `view` keeps
        // mapped.
        moved(unsafe { libc::sendmsg(fd.as_raw_fd(), &message, flags) })
    }
}

fn moved(done: isize) -> Result<Moved, Errno> {
    if let Ok(bytes) = usize::try_from(done) {
        return Ok(Moved::Bytes(bytes));
    }
    match Errno::from_io_error(&std::io::Error::last_os_error()) {
        Some(Errno::AGAIN | Errno::INTR) => Ok(Moved::Later),
        Some(errno) => Err(errno),
        None => Err(Errno::IO),
    }
}
