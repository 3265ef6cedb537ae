//! Records with sums ([`crate::sums`]).

use std::io::Write;
use std::os::fd::BorrowedFd;

use super::layer::{AT_ONCE, Layer, RECORD, StreamError, Wire, receive};
use crate::sums::{self, RecordReader, RecordWriter};

const _: () = assert!(RECORD == sums::RECORD && AT_ONCE == sums::RECORDS * sums::RECORD);

/// See the module.
#[derive(Debug)]
pub(super) struct SummedRecords {
    reader: RecordReader,
    writer: RecordWriter,
    /// The peer's stream has ended.
    ended: bool,
    /// A record of the peer's was not as it was sent.
    changed: bool,
}

impl SummedRecords {
    pub fn new(reader: RecordReader, writer: RecordWriter) -> SummedRecords {
        SummedRecords { reader, writer, ended: false, changed: false }
    }

    /// Checks the next record. Whether there was one.
    fn check(&mut self, charged: &mut usize) -> Result<bool, StreamError> {
        let opened = self.reader.open();
        self.changed |= opened.is_err();
        let opened = opened?;
        *charged += opened.unwrap_or(0);
        Ok(opened.is_some())
    }
}

impl Layer for SummedRecords {
    fn has_unsent(&self) -> bool {
        !self.writer.unsent().is_empty()
    }

    fn write(&mut self, wire: &mut Wire<'_>) -> std::io::Result<()> {
        let sent = wire.write(self.writer.unsent())?;
        self.writer.sent(sent);
        Ok(())
    }

    fn seal(&mut self, bytes: usize, gather: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, i32> {
        self.writer.seal(bytes, gather).map_err(|_| libc::ENOBUFS)
    }

    fn finish(&mut self) {
        if self.changed {
            // Without room it is not told: its connection ends.
            let _ = self.writer.seal_end();
        }
    }

    fn has_received(&self) -> bool {
        self.reader.ready() > 0 || self.reader.has_next()
    }

    fn plain(&self) -> usize {
        self.reader.ready()
    }

    fn has_ended(&self) -> bool {
        self.ended && !self.reader.has_next()
    }

    /// In the middle of a record the end is that of a peer that was killed, or cut off: `ECONNRESET`.
    fn read(&mut self, into: &mut [u8]) -> Result<Option<usize>, StreamError> {
        if self.reader.ready() > 0 {
            return Ok(Some(self.reader.read(into)));
        }
        match self.has_ended() {
            false => Ok(None),
            true if self.reader.is_between() => Ok(Some(0)),
            true => Err(libc::ECONNRESET.into()),
        }
    }

    fn open(
        &mut self,
        socket: BorrowedFd<'_>,
        looked: &mut bool,
        charged: &mut usize,
    ) -> Result<(), StreamError> {
        if self.check(charged)? || self.ended {
            return Ok(());
        }
        let received = receive(socket, self.reader.room(), looked)?;
        self.reader.received(received);
        self.ended = received == 0;
        self.check(charged)?;
        Ok(())
    }
}
