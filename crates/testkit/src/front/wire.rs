//! vhost-user messages over a socket, well-formed or not. The front end's side; blocking, with a time-out.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most bytes of a body that are taken from a back end.
pub const MAX_BODY: usize = 1 << 16;
/// Most descriptors in one message, as the kernel takes them here.
pub const MAX_FDS: usize = 32;
const HEADER: usize = 12;

/// Version 1 of the protocol, in the flags of every message.
pub const VERSION: u32 = 1;
/// The message is a reply.
pub const REPLY: u32 = 1 << 2;
/// The sender wants a reply where the message has none of its own (REPLY_ACK).
pub const NEED_REPLY: u32 = 1 << 3;

/// Requests of a front end, under the names of the vhost-user specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(non_camel_case_types, clippy::upper_case_acronyms)]
#[repr(u32)]
pub enum FrontEndRequest {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_OWNER = 3,
    RESET_OWNER = 4,
    SET_MEM_TABLE = 5,
    SET_LOG_BASE = 6,
    SET_LOG_FD = 7,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    GET_VRING_BASE = 11,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    GET_PROTOCOL_FEATURES = 15,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    SEND_RARP = 19,
    NET_SET_MTU = 20,
    SET_BACKEND_REQ_FD = 21,
    GET_CONFIG = 24,
    SET_CONFIG = 25,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    RESET_DEVICE = 34,
    GET_MAX_MEM_SLOTS = 36,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
    SET_STATUS = 39,
    GET_STATUS = 40,
}

/// CONFIG_CHANGE_MSG, the one request of a back end that this front end knows.
pub const BACKEND_CONFIG_CHANGE: u32 = 2;

/// Why a conversation ended.
#[derive(Debug, thiserror::Error)]
pub enum FrontSocketError {
    /// The socket.
    #[error("vhost-user socket: {0}")]
    Os(#[from] std::io::Error),
    /// The back end closed the connection.
    #[error("the back end closed the connection")]
    Closed,
    /// Nothing came in time.
    #[error("the back end did not answer in time")]
    Timeout,
    /// Something came that is no message, or not the one that was due.
    #[error("the back end sent {0}")]
    Garbled(String),
}

impl From<rustix::io::Errno> for FrontSocketError {
    fn from(errno: rustix::io::Errno) -> Self {
        use rustix::io::Errno;
        match errno {
            Errno::AGAIN => FrontSocketError::Timeout,
            Errno::PIPE | Errno::CONNRESET => FrontSocketError::Closed,
            errno => FrontSocketError::Os(errno.into()),
        }
    }
}

#[derive(Debug)]
pub struct Message {
    pub request: u32,
    /// Version, REPLY, NEED_REPLY.
    pub flags: u32,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// The body as one number.
    pub fn u64(&self) -> Result<u64, FrontSocketError> {
        let bytes = self.body.get(..8).and_then(|b| b.try_into().ok());
        bytes
            .map(u64::from_ne_bytes)
            .ok_or_else(|| FrontSocketError::Garbled(format!("{} bytes for a number", self.body.len())))
    }
}

/// A connected socket. Everything goes: the methods do not check what a front end may send.
#[derive(Debug)]
pub struct FrontSocket {
    socket: UnixStream,
}

impl FrontSocket {
    /// Connects to the socket at `path`; answers are waited for at most ten seconds.
    pub fn connect(path: &Path) -> Result<Self, FrontSocketError> {
        Self::on(UnixStream::connect(path)?)
    }

    /// Uses a connected socket, one end of a pair for instance.
    pub fn on(socket: UnixStream) -> Result<Self, FrontSocketError> {
        let wire = FrontSocket { socket };
        wire.patience(Duration::from_secs(10))?;
        Ok(wire)
    }

    /// How long to wait for the other side, in either direction.
    pub fn patience(&self, time: Duration) -> Result<(), FrontSocketError> {
        self.socket.set_read_timeout(Some(time))?;
        self.socket.set_write_timeout(Some(time))?;
        Ok(())
    }

    pub fn socket(&self) -> &UnixStream {
        &self.socket
    }

    /// Sends a message with version 1 and `flags` besides.
    pub fn send(
        &self,
        request: u32,
        flags: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontSocketError> {
        self.send_raw(request, VERSION | flags, body.len() as u32, body, fds)
    }

    /// Sends a header that claims what it likes, then `body`.
    pub fn send_raw(
        &self,
        request: u32,
        flags: u32,
        size: u32,
        body: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontSocketError> {
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        for word in [request, flags, size] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(body);
        self.send_bytes(&bytes, fds)
    }

    /// Sends bytes that need not be a message, with descriptors on the first of them.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), FrontSocketError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(FrontSocketError::Garbled(format!(
                "no more than {MAX_FDS} descriptors: {}",
                fds.len()
            )));
        }
        let mut sent = 0;
        while sent < bytes.len() {
            let slice = [IoSlice::new(&bytes[sent..])];
            let mut none = SendAncillaryBuffer::default();
            let control = if sent == 0 { &mut control } else { &mut none };
            match sendmsg(&self.socket, &slice, control, SendFlags::NOSIGNAL) {
                Ok(count) => sent += count,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Waits for the next message.
    pub fn receive(&self) -> Result<Message, FrontSocketError> {
        let mut fds = Vec::new();
        let mut header = [0u8; HEADER];
        self.fill(&mut header, &mut fds)?;
        let word =
            |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let size = word(8) as usize;
        if size > MAX_BODY {
            return Err(FrontSocketError::Garbled(format!("a body of {size} bytes")));
        }
        let mut body = vec![0u8; size];
        self.fill(&mut body, &mut fds)?;
        Ok(Message { request: word(0), flags: word(4), body, fds })
    }

    /// Waits for the reply to `request`.
    pub fn reply(&self, request: FrontEndRequest) -> Result<Message, FrontSocketError> {
        let message = self.receive()?;
        if message.request != request as u32 || message.flags & REPLY == 0 {
            let Message { request: came, flags, .. } = message;
            return Err(FrontSocketError::Garbled(format!(
                "message {came} ({flags:#x}) in place of {request:?}'s reply"
            )));
        }
        Ok(message)
    }

    /// Whether the back end has closed the connection (waits up to `time` for that; anything it sends is thrown away).
    pub fn closed_within(&self, time: Duration) -> bool {
        let until = std::time::Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() || self.socket.set_read_timeout(Some(left)).is_err() {
                return false;
            }
            match self.fill(&mut [0u8; 1], &mut Vec::new()) {
                Ok(()) => {}
                Err(FrontSocketError::Timeout) => return false,
                Err(_) => return true,
            }
        }
    }

    fn fill(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<(), FrontSocketError> {
        let mut filled = 0;
        while filled < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut slice = [IoSliceMut::new(&mut bytes[filled..])];
            let came = match recvmsg(self.socket.as_fd(), &mut slice, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Ok(came) => came,
                Err(rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            if came.flags.contains(ReturnFlags::CTRUNC) {
                return Err(FrontSocketError::Garbled(format!("more than {MAX_FDS} descriptors")));
            }
            if came.bytes == 0 {
                return Err(FrontSocketError::Closed);
            }
            filled += came.bytes;
        }
        Ok(())
    }
}
