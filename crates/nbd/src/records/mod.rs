//! Records of one connection in its transmission phase, for whoever has its socket: records on one side, plain bytes on the other. No call blocks.
//!
//! ```text
//!   plain bytes --gathered, 16 KiB at most--> TLS, or sums --records--> sendmsg
//!   recv --64 KiB at most--> TLS, or sums --plain bytes--> the caller's buffer
//! ```
//!
//! What is gathered is a copy: a guest that writes meanwhile changes no byte between seal and socket. What has not been opened is not given out.
//! rustls allocates the memory of each record that it makes or opens: what a connection has at a time is bounded, but an I/O core that serves it
//! allocates (docs/decisions/0048-identity-and-tls.md). Sums allocate nothing (docs/decisions/0073-sums-in-plain-text.md).

use std::os::fd::BorrowedFd;

use ioplane_identity::PeerConnection;
use tokio_rustls::TlsStream;
use tokio_rustls::rustls::{ClientConnection, Connection, ServerConnection};

mod gather;
mod layer;
mod summed;
mod tls;

pub(crate) use gather::Gathering;
pub(crate) use layer::StreamError;
use layer::{AT_ONCE, Layer, RECORD};
use summed::SummedRecords;
use tls::TlsRecords;

use crate::protection::Protection;
use crate::sums::{RecordReader, RecordWriter};

/// See the module.
#[derive(Debug)]
pub(crate) struct Records {
    layer: Box<dyn Layer>,
    protection: Protection,
    /// Bytes of the connection that were looked at, and nobody was charged for.
    uncharged: usize,
    /// Why nothing more can be received.
    failed: Option<StreamError>,
    /// Ends the connection when the peer's certificate is revoked.
    _peer: Option<PeerConnection>,
}

impl Records {
    fn new(layer: Box<dyn Layer>, protection: Protection) -> Records {
        Records { layer, protection, uncharged: 0, failed: None, _peer: None }
    }

    /// Sums, behind a handshake.
    pub fn summed(reader: RecordReader, writer: RecordWriter) -> Records {
        Records::new(Box::new(SummedRecords::new(reader, writer)), Protection::Sums)
    }

    /// TLS: takes a stream apart.
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
        (stream, Records::new(Box::new(TlsRecords::new(session)), Protection::Tls))
    }

    /// The same, of a connection that `peer` is to end.
    pub fn watched(self, peer: PeerConnection) -> Records {
        Records { _peer: Some(peer), ..self }
    }

    /// By what the bytes are protected.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// Whether the socket has not taken all records yet.
    pub fn has_unsent(&self) -> bool {
        self.layer.has_unsent()
    }

    /// Whether something may come out that no socket tells of.
    pub fn has_received(&self) -> bool {
        self.layer.has_received()
    }

    /// Sends records that are ready, as far as the socket takes them. Whether it took all.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> Result<bool, i32> {
        self.layer.flush(socket)
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
            let part = (bytes - taken).min(RECORD);
            // There is room for all of it: nothing more is unsent than what was taken at once.
            if !self.layer.seal(part, &mut gather)? {
                self.flush(socket)?;
                return if taken > 0 { Ok(taken) } else { Err(libc::EFAULT) };
            }
            taken += part;
            let many = taken % AT_ONCE == 0 || taken == bytes;
            if many && !self.flush(socket)? {
                break;
            }
        }
        Ok(taken)
    }

    /// Receives plain bytes, as many as there are and fit; 0 at an orderly end, `EAGAIN` while there are none. With TLS an end without the peer's word is `ECONNRESET`,
    /// and a record that the peer has not made `EBADMSG`. A call looks at the socket once, so that a peer that sends records without plain bytes does not keep it.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<usize, StreamError> {
        let mut looked = false;
        loop {
            if let Some(bytes) = self.layer.read(into)? {
                return Ok(bytes);
            }
            self.fill(socket, &mut looked)?;
        }
    }

    /// Has more looked at of what the peer has sent; `EAGAIN` if that would take a second look at the socket. An error comes again.
    fn fill(&mut self, socket: BorrowedFd<'_>, looked: &mut bool) -> Result<(), StreamError> {
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        let done = self.layer.open(socket, looked, &mut self.uncharged);
        if let Err(error) = done
            && !matches!(error, StreamError::System(libc::EAGAIN | libc::EINTR))
        {
            self.failed = Some(error);
        }
        done
    }

    /// What is there for the caller to receive. What TLS's two sessions say to each other is taken.
    pub fn listen(&mut self, socket: BorrowedFd<'_>) -> Heard {
        let mut looked = false;
        while self.layer.plain() == 0 && !self.layer.has_ended() {
            match self.fill(socket, &mut looked) {
                Err(StreamError::System(libc::EAGAIN | libc::EINTR)) => return Heard::Nothing,
                // It comes again when it is received.
                Err(error) => return Heard::Failed(error),
                Ok(()) => {}
            }
        }
        if self.layer.plain() > 0 { Heard::Bytes } else { Heard::End }
    }

    /// Bytes of the connection that were looked at since this was last asked: what has been done for the peer, whatever came of it.
    pub fn charge(&mut self) -> usize {
        std::mem::take(&mut self.uncharged)
    }

    /// Says to the peer, behind all that was taken, that nothing more comes. It has to be flushed. Where what the peer has sent could not be opened it is told as
    /// far as the socket takes it.
    pub fn finish(&mut self, socket: BorrowedFd<'_>) {
        self.layer.finish();
        if self.failed.is_some() {
            let _ = self.flush(socket);
        }
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
    /// The connection is lost.
    Failed(StreamError),
}
