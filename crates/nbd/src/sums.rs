//! Sums over what two hosts say to each other in plain text: in the transmission phase each direction is cut into records, each with the CRC32C of its bytes.
//!
//! ```text
//!   length  2 bytes  of what follows the header: 1 to 16384; 0 has a meaning of its own
//!   check   2 bytes  the length with all bits inverted
//!   sum     4 bytes  CRC32C of all that has gone in this direction since the connection began: the handshake, and of each record, up to and with this one,
//!                    length, check and bytes. Big endian, as all of NBD
//!   bytes
//! ```
//!
//! The server begins with a record of no bytes, by which the client sees that the handshake has come as it was sent. Later, one of no bytes says that the peer
//! has got a wrong sum, and ends the connection. Since a sum goes on from the one before, records that are lost, doubled or exchanged are noticed, too.
//!
//! It is for networks and machines that change bits. Whoever wants to change something makes the right sum for it: that is what TLS is for.
//!
//! Code without I/O: whoever has the socket calls it. Nothing here allocates but the constructors.

use crate::error::Violation;
use crate::mutation::{Rule, removed};

/// The metadata context by which a client asks for sums ([`query`]). Servers of others, and older ones of ours, do not select it; with TLS, and by a socket of this host,
/// nobody asks. Both sides begin with records behind the acknowledgement of `NBD_OPT_GO`.
pub const CRC32C: &str = "ioplane:crc32c";

/// Bytes of a record's header.
pub const HEADER: usize = 8;
/// Most bytes behind it: they are copied and summed in the fastest cache, and nobody waits long for the rest of a record.
pub const RECORD: usize = 16 << 10;
/// Most records that are made before the socket is asked.
pub const RECORDS: usize = 4;
/// Bytes that are received ahead.
const AHEAD: usize = 64 << 10;

/// The query by which a client of `export` asks for sums. It has the sum of the `others`, in order, so that a server does nothing that was changed on the way. Asked
/// twice, one that is itself changed is noticed by the other: it counts as one of the others then.
pub fn query<'a>(export: &str, others: impl IntoIterator<Item = &'a str>) -> String {
    format!("{CRC32C}={:08x}", sum_of_queries(export, others).0)
}

/// Whether a query asks for sums.
pub fn is_asked_by(query: &str) -> bool {
    query == CRC32C || told_by(query).is_some()
}

/// What follows [`CRC32C`] and the sign of equality.
fn told_by(query: &str) -> Option<&str> {
    query.strip_prefix(CRC32C)?.strip_prefix('=')
}

fn sum_of_queries<'a>(export: &str, others: impl IntoIterator<Item = &'a str>) -> StreamSum {
    let mut sum = StreamSum::default();
    let mut add = |word: &str| {
        sum.add(&(word.len() as u32).to_be_bytes());
        sum.add(word.as_bytes());
    };
    add(export);
    others.into_iter().for_each(add);
    sum
}

/// Sees to it that `queries` are what a client has asked, if it says their sum among them, once or more often.
pub(crate) fn check_queries<'a>(
    export: &str,
    queries: impl Iterator<Item = &'a str> + Clone,
) -> Result<(), Violation> {
    let others = queries.clone().filter(|query| told_by(query).is_none());
    let counted = sum_of_queries(export, others).0;
    // By their text: digits may be written in more than one way.
    let right = format!("{counted:08x}");
    match queries.filter_map(told_by).find(|told| *told != right) {
        None => Ok(()),
        Some(told) => Err(Violation::Sum { told: u32::from_str_radix(told, 16).unwrap_or(0), counted }),
    }
}

/// What was said in a handshake, from one of its sides.
#[derive(Debug)]
pub(crate) struct Spoken {
    pub sent: StreamSum,
    pub received: StreamSum,
    /// What the peer has sent beyond it.
    pub ahead: Vec<u8>,
}

/// The sum of all that has gone in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StreamSum(u32);

impl StreamSum {
    /// Goes on with more of it.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, bytes);
    }

    /// The header of a record of `bytes`, which are [`RECORD`] at most.
    fn head(&mut self, bytes: &[u8]) -> [u8; HEADER] {
        let length = bytes.len() as u16;
        let mut head = [0; HEADER];
        head[..2].copy_from_slice(&length.to_be_bytes());
        head[2..4].copy_from_slice(&(!length).to_be_bytes());
        self.add(&head[..4]);
        self.add(bytes);
        head[4..].copy_from_slice(&self.0.to_be_bytes());
        head
    }

    /// The record with which a server begins.
    pub fn opening(&mut self) -> [u8; HEADER] {
        self.head(&[])
    }

    /// Sees to it that a record of no bytes is the one with which a server that has sent all that came before begins.
    pub fn check_opening(&mut self, head: [u8; HEADER]) -> Result<(), Violation> {
        match length(head)? {
            0 => self.check(head, &[]),
            other => Err(Violation::RecordLength(other)),
        }
    }

    fn check(&mut self, head: [u8; HEADER], bytes: &[u8]) -> Result<(), Violation> {
        self.add(&head[..4]);
        self.add(bytes);
        let told = u32::from_be_bytes([head[4], head[5], head[6], head[7]]);
        if told == self.0 || removed(Rule::Sum) {
            Ok(())
        } else {
            Err(Violation::Sum { told, counted: self.0 })
        }
    }
}

/// How many bytes a header says that follow.
fn length([high, low, inverted @ ..]: [u8; HEADER]) -> Result<u16, Violation> {
    let length = u16::from_be_bytes([high, low]);
    let check = u16::from_be_bytes([inverted[0], inverted[1]]);
    if check == !length && usize::from(length) <= RECORD {
        Ok(length)
    } else {
        Err(Violation::RecordLength(length))
    }
}

/// One direction, from the side that receives. Gives out nothing whose sum has not been seen to be right.
#[derive(Debug)]
pub struct RecordReader {
    bytes: Box<[u8]>,
    /// Received, and not given out.
    start: usize,
    end: usize,
    /// Of these, those that may be given out.
    ready: usize,
    sum: StreamSum,
}

impl RecordReader {
    /// Goes on behind what has the sum `sum`. Allocates.
    pub fn new(sum: StreamSum) -> RecordReader {
        RecordReader { bytes: vec![0; AHEAD].into_boxed_slice(), start: 0, end: 0, ready: 0, sum }
    }

    /// Where more is received to. There is room while [`RecordReader::has_next`] says no and nothing is [`ready`](RecordReader::ready).
    pub fn room(&mut self) -> &mut [u8] {
        // A part of a record is moved only where little room is left behind it, not by each call.
        if self.start == self.end || self.bytes.len() - self.end < AHEAD / 2 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        &mut self.bytes[self.end..]
    }

    /// So many bytes have been put into the room.
    pub fn received(&mut self, bytes: usize) {
        self.end = self.end.saturating_add(bytes).min(self.bytes.len());
    }

    /// How many bytes can be read.
    pub fn ready(&self) -> usize {
        self.ready
    }

    /// What is there of the next record's header, if that is all of it.
    fn head(&self) -> Option<[u8; HEADER]> {
        self.bytes[self.start + self.ready..self.end].first_chunk().copied()
    }

    /// Whether a whole record is there that has not been opened, or something that cannot be one.
    pub fn has_next(&self) -> bool {
        let there = self.end - self.start - self.ready;
        self.head()
            .is_some_and(|head| length(head).map_or(true, |length| there >= HEADER + usize::from(length)))
    }

    /// Whether what was received ends with a record.
    pub fn is_between(&self) -> bool {
        self.start + self.ready == self.end
    }

    /// Checks the next record, once what is ready has been read. Says how many bytes it took of the stream; `None` while it has not come as a whole. After an
    /// error the connection is over.
    pub fn open(&mut self) -> Result<Option<usize>, Violation> {
        if self.ready > 0 {
            return Ok(Some(0));
        }
        let Some(head) = self.head() else { return Ok(None) };
        let length = usize::from(length(head)?);
        let from = self.start + HEADER;
        let Some(bytes) = self.bytes[..self.end].get(from..from + length) else { return Ok(None) };
        self.sum.check(head, bytes)?;
        if length == 0 {
            return Err(Violation::ChangedThere);
        }
        (self.start, self.ready) = (from, length);
        Ok(Some(HEADER + length))
    }

    /// Copies what can be read, as far as it fits; says how many bytes.
    pub fn read(&mut self, into: &mut [u8]) -> usize {
        let bytes = self.ready.min(into.len());
        into[..bytes].copy_from_slice(&self.bytes[self.start..][..bytes]);
        self.start += bytes;
        self.ready -= bytes;
        bytes
    }
}

/// One direction, from the side that sends.
#[derive(Debug)]
pub struct RecordWriter {
    bytes: Box<[u8]>,
    /// Records, and not sent.
    start: usize,
    end: usize,
    sum: StreamSum,
}

impl RecordWriter {
    /// Goes on behind what has the sum `sum`. Allocates.
    pub fn new(sum: StreamSum) -> RecordWriter {
        let bytes = vec![0; RECORDS * (HEADER + RECORD)].into_boxed_slice();
        RecordWriter { bytes, start: 0, end: 0, sum }
    }

    /// What is to be sent.
    pub fn unsent(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// So many bytes of that have been sent.
    pub fn sent(&mut self, bytes: usize) {
        self.start = self.start.saturating_add(bytes).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Makes a record of so many bytes, 1 to [`RECORD`], which `gather` copies to where they are summed and sent from: what changes behind its back afterwards changes
    /// nothing. False, and nothing is made, if `gather` says no. There is room for four records when all are sent.
    pub fn seal(&mut self, bytes: usize, gather: &mut dyn FnMut(&mut [u8]) -> bool) -> Result<bool, NoRoom> {
        let from = self.end + HEADER;
        let fits = (1..=RECORD).contains(&bytes);
        let record = self.bytes.get_mut(from..from + bytes).filter(|_| fits).ok_or(NoRoom)?;
        if !gather(record) {
            return Ok(false);
        }
        let head = self.sum.head(record);
        self.put(head, bytes);
        Ok(true)
    }

    /// Makes the record that says that what the peer has sent has come with a wrong sum. Nothing may follow.
    pub fn seal_end(&mut self) -> Result<(), NoRoom> {
        if self.end + HEADER > self.bytes.len() {
            return Err(NoRoom);
        }
        let head = self.sum.head(&[]);
        self.put(head, 0);
        Ok(())
    }

    fn put(&mut self, head: [u8; HEADER], bytes: usize) {
        self.bytes[self.end..][..HEADER].copy_from_slice(&head);
        self.end += HEADER + bytes;
    }
}

/// A record has no room before others are sent, or is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom;

#[cfg(test)]
mod tests;
