//! What stands between plain bytes and a socket: one way of making and opening records.

use std::fmt::Debug;
use std::io::{Error, ErrorKind, IoSlice, Write};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};

use crate::error::Violation;

/// Most plain bytes of a record.
pub(super) const RECORD: usize = 16 << 10;
/// Plain bytes that are taken before the socket is asked.
pub(super) const AT_ONCE: usize = 4 * RECORD;

/// Why nothing can be received, now or ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamError {
    /// An errno: `EAGAIN` while nothing is there.
    System(i32),
    /// What the peer has sent cannot be.
    Violation(Violation),
}

impl From<i32> for StreamError {
    fn from(errno: i32) -> Self {
        StreamError::System(errno)
    }
}

impl From<Violation> for StreamError {
    fn from(violation: Violation) -> Self {
        StreamError::Violation(violation)
    }
}

/// One way of making and opening records. No call blocks.
pub(super) trait Layer: Debug + Send + Sync {
    /// Whether records are made that have not gone to the kernel.
    fn has_unsent(&self) -> bool;

    /// Has some of these go to the kernel, in one call.
    fn write(&mut self, wire: &mut Wire<'_>) -> std::io::Result<()>;

    /// Makes a record of so many bytes, [`RECORD`] at most, which `gather` copies. False, and nothing is made, if that says no. [`AT_ONCE`] bytes have room when
    /// nothing is unsent.
    fn seal(&mut self, bytes: usize, gather: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, i32>;

    /// Says to the peer, behind all that was taken, that nothing more comes; or why nothing more is received.
    fn finish(&mut self);

    /// Whether something may come out of what was received, of which no socket tells.
    fn has_received(&self) -> bool;

    /// How many plain bytes are there.
    fn plain(&self) -> usize;

    /// Whether nothing comes behind these.
    fn has_ended(&self) -> bool;

    /// Copies plain bytes, as many as there are and fit; 0 at an orderly end, `None` while there are none.
    fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, StreamError>;

    /// Looks at more of what the peer has sent, a record or so; `EAGAIN` if that would take a second look at the socket. Adds to `charged` how many bytes of the
    /// connection that were.
    fn open(
        &mut self,
        socket: BorrowedFd<'_>,
        looked: &mut bool,
        charged: &mut usize,
    ) -> Result<(), StreamError>;

    /// Has all records go to the kernel, as far as the socket takes them. Whether it took all.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<bool, i32> {
        while self.has_unsent() {
            match self.write(&mut Wire(socket)) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(errno(&error)),
            }
        }
        Ok(true)
    }
}

/// Receives what the socket has; `EAGAIN` if it has been asked before, as `looked` says.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    into: &mut [u8],
    looked: &mut bool,
) -> Result<usize, StreamError> {
    if std::mem::replace(looked, true) {
        return Err(libc::EAGAIN.into());
    }
    let received = rustix::net::recv(socket, into, RecvFlags::DONTWAIT);
    Ok(received.map_err(Errno::raw_os_error)?.0)
}

pub(super) fn errno(error: &Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// A socket as records are written to it.
pub(super) struct Wire<'a>(BorrowedFd<'a>);

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> std::io::Result<usize> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        Ok(rustix::net::sendmsg(self.0, parts, &mut SendAncillaryBuffer::default(), flags)?)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
