//! Accesses to the client's memory that the client carries out: VFIO_USER_DMA_WRITE and VFIO_USER_DMA_READ, commands of the server.
//!
//! The device reaches memory by itself. But what it writes there nobody marks as dirty, and what the client has not shared (the BARs of its own
//! devices, the MSI-X table that it emulates) the device does not reach. QEMU's `pci_dma_write` does both, and its `pci_dma_read` reads the latter.
//!
//! The specification has a count of 64 bits before the data, and so does QEMU 11.1.3 (tried). The patches by which QEMU got its client have one of 32 bits,
//! and look for the data four bytes earlier. Which of the two a client does it shows by DMA_READ of memory whose content is known here ([`DmaLayout`]).

use std::sync::Arc;
use std::time::Instant;

use ioplane_memory::{GuestMap, GuestView, PAGE};
use tokio::sync::oneshot;
use zerocopy::IntoBytes;

use super::connection::Connection;
use super::fault::ClientFault;
use super::spec::{self, DmaAccess};

/// Most bytes of one write: what drivers of NICs take at once for the buffers that a device fills (Linux's `page_frag_cache`). Each write is a message and
/// an answer, and there are hundreds of pages to be written again while the guest stands still.
const PIECE: usize = 32 << 10;
/// Most writes without an answer yet: together less than a socket takes.
const WINDOW: usize = 4;
/// Places at which a client may be asked to read, until one tells its layout.
const PROBES: usize = 16;
/// Bytes of such a read.
const PROBED: usize = 256;

/// Something that the client is to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DmaWrite {
    /// What is there, once more: the client marks it as dirty.
    Again {
        /// Where, as the device sees memory.
        address: u64,
        /// Bytes.
        len: u64,
    },
    /// Other bytes.
    Bytes {
        /// Where, as the device sees memory; it need be nothing that the device reaches.
        address: u64,
        /// What.
        data: Vec<u8>,
    },
}

/// What the client has written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DmaWritten {
    /// Commands that it has answered.
    pub commands: u64,
    /// Bytes.
    pub bytes: u64,
    /// Bytes that were to be written once more, and are no memory that the device reaches any more.
    pub gone: u64,
}

/// Why not everything was written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DmaWriteError {
    /// There is no client, or it has left.
    #[error("no VMM is connected")]
    NoClient,
    /// The client has refused one.
    #[error(
        "the VMM does not write {len} bytes at {address:#x} for its device: {}{}",
        std::io::Error::from_raw_os_error(*errno),
        if *errno == libc::ENODEV { " (no memory there, or bus mastering is off)" } else { "" }
    )]
    Refused {
        /// Where.
        address: u64,
        /// How much.
        len: usize,
        /// Its error number.
        errno: i32,
    },
    /// The client has not read.
    #[error(
        "the VMM does not read {len} bytes at {address:#x} for its device: {}",
        std::io::Error::from_raw_os_error(*errno)
    )]
    Unread {
        /// Where.
        address: u64,
        /// How much.
        len: usize,
        /// Its error number; EPROTO: it has answered with less.
        errno: i32,
    },
    /// It has not answered in time. It may still write what it was sent.
    #[error("the VMM has not answered in time")]
    Late,
}

/// Where a client looks for the data of DMA_WRITE, and puts those of DMA_READ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DmaLayout {
    /// Behind [`DmaAccess`].
    Specification,
    /// Four bytes earlier, behind a count of 32 bits; as many follow the data.
    ShortCount,
}

impl DmaLayout {
    fn data_at(self) -> usize {
        match self {
            DmaLayout::Specification => size_of::<DmaAccess>(),
            DmaLayout::ShortCount => size_of::<DmaAccess>() - size_of::<u32>(),
        }
    }

    /// The body of DMA_WRITE. Of one length in both layouts.
    fn body(self, address: u64, data: &[u8]) -> Vec<u8> {
        let mut body = vec![0; size_of::<DmaAccess>() + data.len()];
        let head = DmaAccess { address, count: data.len() as u64 };
        body[..size_of::<DmaAccess>()].copy_from_slice(head.as_bytes());
        body[self.data_at()..][..data.len()].copy_from_slice(data);
        body
    }

    /// The one in which this answer to DMA_READ has `data`. `None` if it could be either, or is neither.
    fn of(answer: &[u8], data: &[u8]) -> Option<DmaLayout> {
        let is =
            |layout: DmaLayout| answer.get(layout.data_at()..).is_some_and(|read| read.starts_with(data));
        match (is(DmaLayout::Specification), is(DmaLayout::ShortCount)) {
            (true, false) => Some(DmaLayout::Specification),
            (false, true) => Some(DmaLayout::ShortCount),
            _ => None,
        }
    }
}

/// What somebody waits for to be written.
#[derive(Debug)]
pub(super) struct DmaWrites {
    pub writes: Vec<DmaWrite>,
    pub deadline: Instant,
    pub reply: oneshot::Sender<Result<DmaWritten, DmaWriteError>>,
}

/// What somebody waits for to be read.
#[derive(Debug)]
pub(super) struct DmaRead {
    pub address: u64,
    pub len: usize,
    pub deadline: Instant,
    pub reply: oneshot::Sender<Result<Vec<u8>, DmaWriteError>>,
}

/// What the client is to do, in its order.
#[derive(Debug)]
pub(super) enum DmaOrder {
    Write(DmaWrites),
    Read(DmaRead),
}

impl DmaOrder {
    /// Has the client of `connection` do it, in messages with at most `transfer` bytes of data each, and tells whoever waits for it. The device reaches
    /// `map`; `known` is where the client looks for data, once that is known. An error ends the connection.
    pub fn carry_out(
        self,
        connection: &mut Connection,
        transfer: usize,
        map: Arc<GuestMap>,
        known: &mut Option<DmaLayout>,
    ) -> Result<(), ClientFault> {
        let access = |deadline| Writing::new(connection, transfer, map, deadline);
        match self {
            DmaOrder::Write(DmaWrites { writes, deadline, reply }) => {
                carried_out(access(deadline), reply, |access| access.all(&writes, known))
            }
            DmaOrder::Read(DmaRead { address, len, deadline, reply }) => {
                carried_out(access(deadline), reply, |access| access.read(address, len, known))
            }
        }
    }

    /// There is nobody to do it.
    pub fn refuse(self) {
        match self {
            DmaOrder::Write(writes) => drop(writes.reply.send(Err(DmaWriteError::NoClient))),
            DmaOrder::Read(read) => drop(read.reply.send(Err(DmaWriteError::NoClient))),
        }
    }
}

/// Does that, and tells whoever waits for it, unless nobody does. An error ends the connection.
fn carried_out<T>(
    mut access: Writing<'_>,
    reply: oneshot::Sender<Result<T, DmaWriteError>>,
    work: impl FnOnce(&mut Writing<'_>) -> Result<T, Ended>,
) -> Result<(), ClientFault> {
    if reply.is_closed() {
        return Ok(());
    }
    let done = work(&mut access);
    access.connection.give_up_answers();
    let (answer, outcome) = match done {
        Ok(done) => (Ok(done), Ok(())),
        Err(Ended::Write(error)) => (Err(error), Ok(())),
        Err(Ended::Connection(fault)) => (Err(DmaWriteError::NoClient), Err(fault)),
    };
    let _ = reply.send(answer);
    outcome
}

/// Why it has come to an end before its time.
enum Ended {
    /// The connection is of no use any more.
    Connection(ClientFault),
    Write(DmaWriteError),
}

impl From<ClientFault> for Ended {
    fn from(fault: ClientFault) -> Ended {
        Ended::Connection(fault)
    }
}

/// A command without an answer yet.
struct Asked {
    id: u16,
    address: u64,
    len: usize,
}

struct Writing<'a> {
    view: GuestView,
    piece: usize,
    connection: &'a mut Connection,
    deadline: Instant,
    asked: Vec<Asked>,
    written: DmaWritten,
}

impl<'a> Writing<'a> {
    fn new(
        connection: &'a mut Connection,
        transfer: usize,
        map: Arc<GuestMap>,
        deadline: Instant,
    ) -> Writing<'a> {
        Writing {
            view: GuestView::new(map),
            piece: PIECE.min(transfer),
            connection,
            deadline,
            asked: Vec::with_capacity(WINDOW),
            written: DmaWritten::default(),
        }
    }

    /// Where the client looks for data; it is asked if that is not known.
    fn found_out(&mut self, writes: &[DmaWrite], known: &mut Option<DmaLayout>) -> Result<DmaLayout, Ended> {
        if self.piece == 0 {
            return Err(Ended::Write(DmaWriteError::NoClient));
        }
        if known.is_none() {
            *known = self.layout(writes)?;
        }
        Ok(known.unwrap_or(DmaLayout::Specification))
    }

    fn read(&mut self, address: u64, len: usize, known: &mut Option<DmaLayout>) -> Result<Vec<u8>, Ended> {
        let layout = self.found_out(&[], known)?;
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let piece = self.piece.min(len - bytes.len());
            let address = address.saturating_add(bytes.len() as u64);
            let unread = |errno| Ended::Write(DmaWriteError::Unread { address, len: piece, errno });
            let answer = self.asked_to_read(address, piece)?.map_err(unread)?;
            let data = answer.get(layout.data_at()..).and_then(|data| data.get(..piece));
            bytes.extend_from_slice(data.ok_or_else(|| unread(libc::EPROTO))?);
        }
        Ok(bytes)
    }

    /// The body of its answer, or its error number.
    fn asked_to_read(&mut self, address: u64, len: usize) -> Result<Result<Vec<u8>, i32>, Ended> {
        let asked = DmaAccess { address, count: len as u64 };
        let id = self.connection.ask(spec::DMA_READ, asked.as_bytes())?;
        loop {
            let answer = self.connection.answer_by(self.deadline)?;
            let (of, answer) = answer.ok_or(Ended::Write(DmaWriteError::Late))?;
            if of == id {
                return Ok(answer);
            }
        }
    }

    fn all(&mut self, writes: &[DmaWrite], known: &mut Option<DmaLayout>) -> Result<DmaWritten, Ended> {
        let layout = self.found_out(writes, known)?;
        let mut bytes = vec![0; self.piece];
        for write in writes {
            match write {
                DmaWrite::Bytes { address, data } => {
                    for (number, data) in data.chunks(self.piece).enumerate() {
                        let at = address.saturating_add((number * self.piece) as u64);
                        self.send(layout, at, data)?;
                    }
                }
                DmaWrite::Again { address, len } => {
                    let (mut at, mut left) = (*address, *len);
                    while left > 0 {
                        // A range of memory may end at the end of any page.
                        let most = left.min(self.piece as u64) as usize;
                        let page = most.min((PAGE - at % PAGE) as usize);
                        let there = [most, page]
                            .into_iter()
                            .find(|len| self.view.read(at, &mut bytes[..*len]).is_ok());
                        match there {
                            Some(len) => self.send(layout, at, &bytes[..len])?,
                            None => self.written.gone += page as u64,
                        }
                        let done = there.unwrap_or(page) as u64;
                        left -= done;
                        at = at.saturating_add(done);
                    }
                }
            }
        }
        while !self.asked.is_empty() {
            self.answer()?;
        }
        Ok(self.written)
    }

    fn send(&mut self, layout: DmaLayout, address: u64, data: &[u8]) -> Result<(), Ended> {
        while self.asked.len() >= WINDOW {
            self.answer()?;
        }
        let id = self.connection.ask(spec::DMA_WRITE, &layout.body(address, data))?;
        self.asked.push(Asked { id, address, len: data.len() });
        Ok(())
    }

    /// Waits for an answer to one of those that are without.
    fn answer(&mut self) -> Result<(), Ended> {
        let answer = self.connection.answer_by(self.deadline)?;
        let (id, answer) = answer.ok_or(Ended::Write(DmaWriteError::Late))?;
        let Some(at) = self.asked.iter().position(|asked| asked.id == id) else { return Ok(()) };
        let Asked { address, len, .. } = self.asked.swap_remove(at);
        match answer {
            Ok(_) => {
                self.written.commands += 1;
                self.written.bytes += len as u64;
                Ok(())
            }
            Err(errno) => Err(Ended::Write(DmaWriteError::Refused { address, len, errno })),
        }
    }

    /// Has the client read what is known here: first what is to be written again, then pages all over memory. `None`: it does not read, or tells
    /// nothing by it. It gets what the specification has, and is asked again the next time.
    fn layout(&mut self, writes: &[DmaWrite]) -> Result<Option<DmaLayout>, Ended> {
        let again = writes.iter().filter_map(|write| match write {
            DmaWrite::Again { address, .. } => Some(*address),
            DmaWrite::Bytes { .. } => None,
        });
        let regions = self.view.map().regions().to_vec();
        let all = regions.iter().flat_map(|region| {
            let step = (region.len() / PROBES as u64 / PAGE).max(1) * PAGE;
            (0..region.len()).step_by(step as usize).map(move |at| region.gpa() + at)
        });
        let mut known = [0; PROBED];
        let mut probes = 0;
        for address in again.chain(all) {
            let piece = PROBED.min(self.piece).min((PAGE - address % PAGE) as usize);
            let known = &mut known[..piece];
            // What looks the same four bytes on tells nothing.
            if self.view.read(address, known).is_err() || known[4..] == known[..piece - 4] {
                continue;
            }
            let answer = self.asked_to_read(address, piece)?;
            let layout = answer.ok().and_then(|answer| DmaLayout::of(&answer, known));
            probes += 1;
            match layout {
                Some(_) => return Ok(layout),
                None if probes == PROBES => break,
                None => {}
            }
        }
        Ok(None)
    }
}
