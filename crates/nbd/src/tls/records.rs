//! TLS of one connection in its transmission phase, for whoever has its socket: records on one side, plain bytes on the other. No call blocks.
//!
//! ```text
//!   plain bytes --gathered, 16 KiB at most--> rustls --records--> sendmsg
//!   recv --64 KiB at most--> rustls --plain bytes--> the caller's buffer
//! ```
//!
//! rustls allocates the memory of each record that it makes or opens: what a connection has at a time is bounded, but an I/O core that serves it
//! allocates (docs/decisions/0048-identity-and-tls.md).

use std::io::{Error, ErrorKind, IoSlice, Read, Write};
use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use tokio_rustls::TlsStream;
use tokio_rustls::rustls::{ClientConnection, Connection, ServerConnection};

/// Bytes of the connection that one call receives.
const WIRE: usize = 64 << 10;
/// Plain bytes of a record (RFC 8446, section 5.1).
const RECORD: usize = 16 << 10;
/// Plain bytes that are taken before the socket is asked.
const AT_ONCE: usize = 4 * RECORD;
/// Bytes of records that have yet to be sent: more than those of [`AT_ONCE`].
const MOST_UNSENT: usize = 2 * AT_ONCE;

/// See the module.
#[derive(Debug)]
pub(crate) struct Records {
    session: Connection,
    /// Received, and not looked at by the session.
    wire: Box<[u8]>,
    start: usize,
    end: usize,
    /// Plain bytes that the session has for the caller.
    plain: usize,
    /// The peer has said that nothing more comes, or its stream has ended.
    ended: bool,
    /// Where those of a record are gathered.
    gathered: Box<[u8]>,
}

impl Records {
    /// Of a session whose handshake has ended. What it has yet to send is sent first.
    fn new(mut session: Connection) -> Records {
        session.set_buffer_limit(Some(MOST_UNSENT));
        let [wire, gathered] = [WIRE, RECORD].map(|bytes| vec![0; bytes].into_boxed_slice());
        Records { session, wire, start: 0, end: 0, plain: 0, ended: false, gathered }
    }

    /// Takes a stream apart.
    pub fn of<S>(stream: impl Into<TlsStream<S>>) -> (S, Records) {
        let (stream, session) = match stream.into() {
            TlsStream::Client(stream) => {
                let (stream, session): (S, ClientConnection) = stream.into_inner();
                (stream, Connection::from(session))
            }
            TlsStream::Server(stream) => {
                let (stream, session): (S, ServerConnection) = stream.into_inner();
                (stream, Connection::from(session))
            }
        };
        (stream, Records::new(session))
    }

    /// Whether the socket has not taken all records yet.
    pub fn has_unsent(&self) -> bool {
        self.session.wants_write()
    }

    /// Whether something may come out that no socket tells of.
    pub fn has_received(&self) -> bool {
        self.start < self.end || self.plain > 0
    }

    /// Sends records that are ready, as far as the socket takes them. Whether it took all.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<bool, i32> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut Wire(socket)) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(errno(&error)),
            }
        }
        Ok(true)
    }

    /// Takes `bytes` plain bytes, or as many as the socket takes and up to [`AT_ONCE`] more. `gather` copies the next ones. Says how many were taken; `EAGAIN` while
    /// what was taken before has not been sent.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        bytes: usize,
        mut gather: impl FnMut(&mut [u8]),
    ) -> Result<usize, i32> {
        if !self.flush(socket)? {
            return Err(libc::EAGAIN);
        }
        let mut taken = 0;
        while taken < bytes {
            let part = &mut self.gathered[..(bytes - taken).min(RECORD)];
            gather(part);
            // There is room for all of it: nothing more is unsent than what was taken at once.
            self.session.writer().write_all(part).map_err(|error| errno(&error))?;
            taken += part.len();
            let many = taken % AT_ONCE == 0 || taken == bytes;
            if many && !self.flush(socket)? {
                break;
            }
        }
        Ok(taken)
    }

    /// Receives plain bytes, as many as there are and fit; 0 at an orderly end, `EAGAIN` while there are none. An end without the peer's word is `ECONNRESET`, and a
    /// record that the peer has not made `EBADMSG`.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<usize, i32> {
        loop {
            match self.session.reader().read(into) {
                Ok(bytes) => {
                    self.plain -= bytes.min(self.plain);
                    return Ok(bytes);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.plain = 0,
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Err(libc::ECONNRESET),
                Err(error) => return Err(errno(&error)),
            }
            self.fill(socket)?;
        }
    }

    /// Has the session look at more of what the peer has sent.
    fn fill(&mut self, socket: BorrowedFd<'_>) -> Result<(), i32> {
        if self.start == self.end {
            let (received, _) = rustix::net::recv(socket, &mut self.wire[..], RecvFlags::DONTWAIT)
                .map_err(Errno::raw_os_error)?;
            (self.start, self.end) = (0, received);
            self.ended |= received == 0;
        }
        // Nothing is the end of the stream, also for the session.
        let mut wire = &self.wire[self.start..self.end];
        self.session.read_tls(&mut wire).map_err(|error| errno(&error))?;
        self.start = self.end - wire.len();
        let state = self.session.process_new_packets();
        if self.session.wants_write() {
            // An answer of the session's own, or why it ends. Without room it goes with what is sent next.
            let _ = self.flush(socket);
        }
        let state = state.map_err(|_| libc::EBADMSG)?;
        self.plain = state.plaintext_bytes_to_read();
        self.ended |= state.peer_has_closed();
        Ok(())
    }

    /// Whether something is there for the caller to receive, an end and an error included. What the two sessions say to each other is taken.
    pub fn listen(&mut self, socket: BorrowedFd<'_>) -> bool {
        while self.plain == 0 {
            match self.fill(socket) {
                Err(libc::EAGAIN) => return false,
                // It comes again when it is received.
                Err(_) => return true,
                Ok(()) if self.ended => return true,
                Ok(()) => {}
            }
        }
        true
    }

    /// Tells the peer, behind all that was taken, that nothing more comes. Whether the socket took all of that.
    pub fn finish(&mut self, socket: BorrowedFd<'_>) -> bool {
        self.session.send_close_notify();
        self.flush(socket).unwrap_or(false)
    }
}

fn errno(error: &Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// A socket as rustls writes to it.
struct Wire<'a>(BorrowedFd<'a>);

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
