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

use ioplane_identity::PeerConnection;
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
/// Bytes of the connection that a peer may send besides plain ones at once, and how many for each plain one. Short replies take two or three. Beyond that it has
/// its peer work for nothing: new keys and tickets are dear.
const MOST_IN_VAIN: u64 = 64 << 10;
const MOST_PER_PLAIN: u64 = 4;
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
    /// Bytes of the connection, and plain ones, that the session has looked at in all.
    looked_at: [u64; 2],
    /// Of the former, those that nobody was charged for.
    uncharged: usize,
    /// Why nothing more can be received.
    failed: Option<i32>,
    /// The peer has said that nothing more comes, or its stream has ended.
    ended: bool,
    /// Where those of a record are gathered.
    gathered: Box<[u8]>,
    /// Ends the connection when the peer's certificate is revoked.
    _peer: Option<PeerConnection>,
}

impl Records {
    /// Of a session whose handshake has ended. What it has yet to send is sent first.
    fn new(mut session: Connection) -> Records {
        session.set_buffer_limit(Some(MOST_UNSENT));
        let [wire, gathered] = [WIRE, RECORD].map(|bytes| vec![0; bytes].into_boxed_slice());
        // What came behind the handshake may be open already. An error comes again.
        let plain = session.process_new_packets().map_or(0, |state| state.plaintext_bytes_to_read());
        Records {
            session,
            wire,
            start: 0,
            end: 0,
            plain,
            looked_at: [0; 2],
            uncharged: 0,
            failed: None,
            ended: false,
            gathered,
            _peer: None,
        }
    }

    /// The same, of a connection that `peer` is to end.
    pub fn watched(self, peer: PeerConnection) -> Records {
        Records { _peer: Some(peer), ..self }
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

    /// Takes `bytes` plain bytes, or as many as the socket takes and up to [`AT_ONCE`] more. `gather` copies the next ones; false if they were not there, which is
    /// `EFAULT` if they are the first. Says how many were taken; `EAGAIN` while what was taken before has not been sent.
    pub fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        bytes: usize,
        mut gather: impl FnMut(&mut [u8]) -> bool,
    ) -> Result<usize, i32> {
        if !self.flush(socket)? {
            return Err(libc::EAGAIN);
        }
        let mut taken = 0;
        while taken < bytes {
            let part = &mut self.gathered[..(bytes - taken).min(RECORD)];
            if !gather(part) {
                self.flush(socket)?;
                return if taken > 0 { Ok(taken) } else { Err(libc::EFAULT) };
            }
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
    /// record that the peer has not made `EBADMSG`. A call looks at the socket once, so that a peer that sends records without plain bytes does not keep it.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<usize, i32> {
        let mut looked = false;
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
            self.fill(socket, &mut looked)?;
        }
    }

    /// Has the session look at more of what the peer has sent; `EAGAIN` if that would take a second look at the socket.
    fn fill(&mut self, socket: BorrowedFd<'_>, looked: &mut bool) -> Result<(), i32> {
        let done = self.failed.map_or_else(|| self.open(socket, looked), Err);
        if let Err(errno) = done
            && !matches!(errno, libc::EAGAIN | libc::EINTR)
        {
            self.failed = Some(errno);
        }
        done
    }

    fn open(&mut self, socket: BorrowedFd<'_>, looked: &mut bool) -> Result<(), i32> {
        if self.start == self.end {
            if std::mem::replace(looked, true) {
                return Err(libc::EAGAIN);
            }
            let (received, _) = rustix::net::recv(socket, &mut self.wire[..], RecvFlags::DONTWAIT)
                .map_err(Errno::raw_os_error)?;
            (self.start, self.end) = (0, received);
            self.ended |= received == 0;
        }
        // Nothing is the end of the stream, also for the session.
        let mut wire = &self.wire[self.start..self.end];
        let bytes = self.session.read_tls(&mut wire).map_err(|error| errno(&error))?;
        self.start = self.end - wire.len();
        self.uncharged += bytes;
        let state = self.session.process_new_packets();
        if self.session.wants_write() {
            // An answer of the session's own, or why it ends. Without room it goes with what is sent next.
            let _ = self.flush(socket);
        }
        let state = state.map_err(|_| libc::EBADMSG)?;
        self.plain = state.plaintext_bytes_to_read();
        self.ended |= state.peer_has_closed();
        let [wire, plain] = &mut self.looked_at;
        *wire += bytes as u64;
        *plain += self.plain as u64;
        if *wire > MOST_IN_VAIN + MOST_PER_PLAIN * *plain { Err(libc::EBADMSG) } else { Ok(()) }
    }

    /// What is there for the caller to receive. What the two sessions say to each other is taken.
    pub fn listen(&mut self, socket: BorrowedFd<'_>) -> Heard {
        let mut looked = false;
        while self.plain == 0 && !self.ended {
            match self.fill(socket, &mut looked) {
                Err(libc::EAGAIN | libc::EINTR) => return Heard::Nothing,
                // It comes again when it is received.
                Err(errno) => return Heard::Failed(errno),
                Ok(()) => {}
            }
        }
        if self.plain > 0 { Heard::Bytes } else { Heard::End }
    }

    /// Bytes of the connection that were looked at since this was last asked: what has been done for the peer, whatever came of it.
    pub fn charge(&mut self) -> usize {
        std::mem::take(&mut self.uncharged)
    }

    /// Says to the peer, behind all that was taken, that nothing more comes. It has to be flushed.
    pub fn finish(&mut self) {
        self.session.send_close_notify();
    }
}

/// What there is to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Nothing.
    Nothing,
    /// Plain bytes.
    Bytes,
    /// The end, by TLS's word or by the socket's.
    End,
    /// The connection is lost, by errno.
    Failed(i32),
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
