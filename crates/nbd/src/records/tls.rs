//! Records of TLS.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::BorrowedFd;

use tokio_rustls::rustls::Connection;

use super::layer::{AT_ONCE, Layer, RECORD, StreamError, Wire, errno, receive};

/// Bytes of the connection that one call receives.
const WIRE: usize = 64 << 10;
/// Bytes of the connection that a peer may send besides plain ones at once, and how many for each plain one. Short replies take two or three. Beyond that it has
/// its peer work for nothing: new keys and tickets are dear.
const MOST_IN_VAIN: u64 = 64 << 10;
const MOST_PER_PLAIN: u64 = 4;
/// Bytes of records that have yet to be sent: more than those of [`AT_ONCE`].
const MOST_UNSENT: usize = 2 * AT_ONCE;

/// A session of rustls, and what it is given.
#[derive(Debug)]
pub(super) struct TlsRecords {
    session: Connection,
    /// Received, and not looked at by the session.
    wire: Box<[u8]>,
    start: usize,
    end: usize,
    /// Plain bytes that the session has for the caller.
    plain: usize,
    /// Bytes of the connection, and plain ones, that the session has looked at in all.
    looked_at: [u64; 2],
    /// The peer has said that nothing more comes, or its stream has ended.
    ended: bool,
    /// Where those of a record are gathered.
    gathered: Box<[u8]>,
}

impl TlsRecords {
    /// Of a session whose handshake has ended. What it has yet to send is sent first.
    pub fn new(mut session: Connection) -> TlsRecords {
        session.set_buffer_limit(Some(MOST_UNSENT));
        let [wire, gathered] = [WIRE, RECORD].map(|bytes| vec![0; bytes].into_boxed_slice());
        // What came behind the handshake may be open already. An error comes again.
        let plain = session.process_new_packets().map_or(0, |state| state.plaintext_bytes_to_read());
        TlsRecords { session, wire, start: 0, end: 0, plain, looked_at: [0; 2], ended: false, gathered }
    }
}

impl Layer for TlsRecords {
    fn has_unsent(&self) -> bool {
        self.session.wants_write()
    }

    fn write(&mut self, wire: &mut Wire<'_>) -> std::io::Result<()> {
        self.session.write_tls(wire).map(drop)
    }

    fn seal(&mut self, bytes: usize, gather: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, i32> {
        let part = &mut self.gathered[..bytes.min(RECORD)];
        if !gather(part) {
            return Ok(false);
        }
        self.session.writer().write_all(part).map_err(|error| errno(&error))?;
        Ok(true)
    }

    fn finish(&mut self) {
        self.session.send_close_notify();
    }

    fn has_received(&self) -> bool {
        self.start < self.end || self.plain > 0
    }

    fn plain(&self) -> usize {
        self.plain
    }

    fn has_ended(&self) -> bool {
        self.ended
    }

    fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, StreamError> {
        match self.session.reader().read(into) {
            Ok(bytes) => {
                self.plain -= bytes.min(self.plain);
                Ok(Some(bytes))
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                self.plain = 0;
                Ok(None)
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(libc::ECONNRESET.into()),
            Err(error) => Err(errno(&error).into()),
        }
    }

    fn open(
        &mut self,
        socket: BorrowedFd<'_>,
        looked: &mut bool,
        charged: &mut usize,
    ) -> Result<(), StreamError> {
        if self.start == self.end {
            let received = receive(socket, &mut self.wire, looked)?;
            (self.start, self.end) = (0, received);
            self.ended |= received == 0;
        }
        // Nothing is the end of the stream, also for the session.
        let mut wire = &self.wire[self.start..self.end];
        let bytes = self.session.read_tls(&mut wire).map_err(|error| errno(&error))?;
        self.start = self.end - wire.len();
        *charged += bytes;
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
        if *wire > MOST_IN_VAIN + MOST_PER_PLAIN * *plain { Err(libc::EBADMSG.into()) } else { Ok(()) }
    }
}
