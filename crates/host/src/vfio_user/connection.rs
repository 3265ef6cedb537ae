//! One connection with a client: whole messages in, replies out. Bounded in memory; receiving never blocks.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::fault::ClientFault;
use super::spec::{self, Header, MAX_FILES, MAX_MESSAGE, RegionAccess};

const HEADER: usize = size_of::<Header>();
/// Bytes that are received at once where a message begins: an access with eight bytes. A guest's accesses are nearly all that comes.
const AT_ONCE: usize = HEADER + size_of::<RegionAccess>() + 8;
/// How long a client may leave a reply unread.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most commands of a client that wait while an answer of its own is waited for. It waits for a reply to nearly all that it sends.
const MOST_CROSSED: usize = 64;
/// Most answers that are still to come of questions which were given up.
const MOST_LATE: usize = 64;

/// A whole message: a command, or an answer to one of ours.
#[derive(Debug)]
pub struct Message {
    /// Its header; the size is true.
    pub header: Header,
    /// What follows the header.
    pub body: Vec<u8>,
    /// What came beside it, at most [`MAX_FILES`].
    pub files: Vec<OwnedFd>,
    /// More descriptors came, and were closed.
    pub surplus: bool,
}

impl Message {
    /// The body as a `T` and what follows it.
    pub fn split<T: FromBytes + Immutable + KnownLayout>(&self) -> Result<(T, &[u8]), ClientFault> {
        T::read_from_prefix(&self.body).map_err(|_| self.bad_size(size_of::<T>()))
    }

    /// The body as a `T`, which must be all of it.
    pub fn body<T: FromBytes + Immutable + KnownLayout>(&self) -> Result<T, ClientFault> {
        T::read_from_bytes(&self.body).map_err(|_| self.bad_size(size_of::<T>()))
    }

    pub(super) fn bad_size(&self, wanted: usize) -> ClientFault {
        ClientFault::BadSize { command: self.header.command, size: self.body.len(), wanted }
    }

    /// Refuses descriptors beyond `most`.
    pub(super) fn check_files(&self, most: usize) -> Result<(), ClientFault> {
        if self.surplus || self.files.len() > most {
            return Err(self.bad_files(most));
        }
        Ok(())
    }

    pub(super) fn bad_files(&self, wanted: usize) -> ClientFault {
        ClientFault::BadFiles { command: self.header.command, found: self.files.len(), wanted }
    }
}

/// What a command is answered with.
#[derive(Debug, Default)]
pub struct Reply {
    /// What follows the header.
    pub body: Vec<u8>,
    /// What goes beside it.
    pub files: Vec<OwnedFd>,
}

impl Reply {
    /// A reply of one structure.
    pub fn of(body: &(impl IntoBytes + Immutable)) -> Self {
        Reply { body: body.as_bytes().to_vec(), files: Vec::new() }
    }
}

/// A connected socket and the message that is being received.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    /// Begins where a message begins.
    buffer: Vec<u8>,
    /// What came beside the last byte of the buffer, and so belongs to the last message in it.
    files: Vec<OwnedFd>,
    surplus: bool,
    header: Option<Header>,
    /// Commands that came while an answer was waited for.
    crossed: VecDeque<Message>,
    /// The next command's id, of those that this side sends.
    next: u16,
    /// Commands of this side without an answer yet.
    asked: Vec<u16>,
    /// Those whose answers nobody waits for any more.
    late: VecDeque<u16>,
}

/// A client's answer to a command of ours: what follows the header, or its error number.
pub(super) type Answer = Result<Vec<u8>, i32>;

impl Connection {
    /// Takes a connected socket over.
    pub fn new(stream: UnixStream) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Connection {
            stream,
            buffer: Vec::new(),
            files: Vec::new(),
            surplus: false,
            header: None,
            crossed: VecDeque::new(),
            next: 0,
            asked: Vec::new(),
            late: VecDeque::new(),
        })
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// The next message has come already, whole or wrong: [`Connection::receive`] has to be called, and the socket may never become
    /// readable.
    pub fn has_message(&self) -> bool {
        if !self.crossed.is_empty() {
            return true;
        }
        let Ok((header, _)) = Header::read_from_prefix(&self.buffer) else { return false };
        !(HEADER as u32..=MAX_MESSAGE).contains(&header.size) || self.buffer.len() >= header.size as usize
    }

    /// The next whole command, or `None` if more of it has to come first.
    pub fn receive(&mut self) -> Result<Option<Message>, ClientFault> {
        if let Some(message) = self.crossed.pop_front() {
            return Ok(Some(message));
        }
        while let Some(message) = self.take()? {
            if message.header.flags & spec::FLAG_TYPE == spec::TYPE_COMMAND {
                return Ok(Some(message));
            }
            self.answered(&message)?;
        }
        Ok(None)
    }

    /// Sends a command of this side's, and says by which id its answer comes.
    pub(super) fn ask(&mut self, command: u16, body: &[u8]) -> Result<u16, ClientFault> {
        let id = self.next;
        self.next = id.wrapping_add(1);
        let header =
            Header { id, command, size: (HEADER + body.len()) as u32, flags: spec::TYPE_COMMAND, error: 0 };
        self.send(&[header.as_bytes(), body].concat(), &[])?;
        self.asked.push(id);
        Ok(id)
    }

    /// Waits for an answer to anything that was asked. `None` if none has come by `deadline`. Commands of the client are kept for
    /// [`Connection::receive`].
    pub(super) fn answer_by(&mut self, deadline: Instant) -> Result<Option<(u16, Answer)>, ClientFault> {
        loop {
            while let Some(message) = self.take()? {
                if message.header.flags & spec::FLAG_TYPE == spec::TYPE_COMMAND {
                    if self.crossed.len() == MOST_CROSSED {
                        return Err(ClientFault::TooManyCommands);
                    }
                    self.crossed.push_back(message);
                } else if self.answered(&message)? {
                    let Message { header, body, .. } = message;
                    let failed = header.flags & spec::FLAG_ERROR != 0;
                    return Ok(Some((header.id, if failed { Err(header.error as i32) } else { Ok(body) })));
                }
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return Ok(None) };
            self.poll(PollFlags::IN, left)?;
        }
    }

    /// Nobody waits any more for the answers that are still to come.
    pub(super) fn give_up_answers(&mut self) {
        self.late.extend(self.asked.drain(..));
        let over = self.late.len().saturating_sub(MOST_LATE);
        self.late.drain(..over);
    }

    /// An answer has come: says whether anybody waits for it.
    fn answered(&mut self, answer: &Message) -> Result<bool, ClientFault> {
        let Header { id, .. } = answer.header;
        if let Some(at) = self.asked.iter().position(|asked| *asked == id) {
            self.asked.swap_remove(at);
            return Ok(true);
        }
        let at = self.late.iter().position(|late| *late == id).ok_or(ClientFault::UnaskedAnswer(id))?;
        self.late.remove(at);
        Ok(false)
    }

    /// The next whole message, or `None` if more of it has to come first.
    fn take(&mut self) -> Result<Option<Message>, ClientFault> {
        loop {
            let wanted = self.header.map_or(HEADER, |header| header.size as usize);
            if self.buffer.len() < wanted {
                if !self.fill(wanted)? {
                    return Ok(None);
                }
                continue;
            }
            match self.header.take() {
                None => {
                    let (header, _) = Header::read_from_prefix(&self.buffer)
                        .map_err(|_| ClientFault::BadLength(self.buffer.len() as u32))?;
                    if header.size < HEADER as u32 || header.size > MAX_MESSAGE {
                        return Err(ClientFault::BadLength(header.size));
                    }
                    let (kind, asked) = (header.flags & spec::FLAG_TYPE, self.asked.len() + self.late.len());
                    if kind != spec::TYPE_COMMAND && (kind != spec::TYPE_REPLY || asked == 0) {
                        return Err(ClientFault::NotACommand(header.flags));
                    }
                    self.header = Some(header);
                }
                Some(header) => {
                    let body = self.buffer[HEADER..wanted].to_vec();
                    self.buffer.drain(..wanted);
                    let mut message = Message { header, body, files: Vec::new(), surplus: false };
                    if self.buffer.is_empty() {
                        message.files = std::mem::take(&mut self.files);
                        message.surplus = std::mem::take(&mut self.surplus);
                    }
                    return Ok(Some(message));
                }
            }
        }
    }

    /// Receives until the buffer has `wanted` bytes; false if they are not there yet. Takes bytes of further messages only into an empty
    /// buffer: the kernel ends a receive behind what descriptors came with, so they belong to the last message of one receive; of
    /// two, nobody could tell. A client must send no two messages by one sendmsg if the first has descriptors; QEMU and libvfio-user send
    /// each by one of its own. What would be mistaken is that client's own descriptors.
    fn fill(&mut self, wanted: usize) -> Result<bool, ClientFault> {
        let mut bytes = [0u8; 4096];
        let most = if self.buffer.is_empty() { wanted.max(AT_ONCE) } else { wanted };
        let room = (most - self.buffer.len()).min(bytes.len());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [IoSliceMut::new(&mut bytes[..room])];
        let got = match rustix::net::recvmsg(&self.stream, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(Errno::CONNRESET) => return Err(ClientFault::Closed),
            Err(errno) => return Err(ClientFault::Broken(errno.into())),
        };
        self.surplus |= got.flags.contains(ReturnFlags::CTRUNC);
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                for file in rights {
                    if self.files.len() < MAX_FILES {
                        self.files.push(file);
                    } else {
                        self.surplus = true;
                    }
                }
            }
        }
        if got.bytes == 0 {
            return Err(ClientFault::Closed);
        }
        self.buffer.extend_from_slice(&bytes[..got.bytes]);
        Ok(true)
    }

    /// Answers `header`'s command: with what it asked for, or with an error number.
    pub fn answer(&self, header: &Header, answer: Result<Reply, Errno>) -> Result<(), ClientFault> {
        let (reply, error) = match answer {
            Ok(reply) => (reply, None),
            Err(errno) => (Reply::default(), Some(errno.raw_os_error())),
        };
        let flags = spec::TYPE_REPLY | if error.is_some() { spec::FLAG_ERROR } else { 0 };
        let reply_header = Header {
            id: header.id,
            command: header.command,
            size: (HEADER + reply.body.len()) as u32,
            flags,
            error: error.unwrap_or(0) as u32,
        };
        let mut bytes = Vec::with_capacity(HEADER + reply.body.len());
        bytes.extend_from_slice(reply_header.as_bytes());
        bytes.extend_from_slice(&reply.body);
        self.send(&bytes, &reply.files)
    }

    /// Sends `bytes` whole; a client that does not read is left.
    fn send(&self, bytes: &[u8], files: &[OwnedFd]) -> Result<(), ClientFault> {
        let deadline = Instant::now() + PATIENCE;
        let mut sent = 0;
        while sent < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let borrowed: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).take(MAX_FILES).collect();
            if sent == 0 && !borrowed.is_empty() {
                ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
            }
            let slices = &[IoSlice::new(&bytes[sent..])];
            match rustix::net::sendmsg(&self.stream, slices, &mut ancillary, SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.wait_writable(deadline)?,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(ClientFault::Closed),
                Err(errno) => return Err(ClientFault::Broken(errno.into())),
            }
        }
        Ok(())
    }

    fn wait_writable(&self, deadline: Instant) -> Result<(), ClientFault> {
        let left = deadline.checked_duration_since(Instant::now()).ok_or(ClientFault::Deaf)?;
        self.poll(PollFlags::OUT, left)
    }

    /// Waits for so long at most.
    fn poll(&self, flags: PollFlags, left: Duration) -> Result<(), ClientFault> {
        let left = Timespec::try_from(left).ok();
        match rustix::event::poll(&mut [PollFd::new(&self.stream, flags)], left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(ClientFault::Broken(errno.into())),
        }
    }
}
