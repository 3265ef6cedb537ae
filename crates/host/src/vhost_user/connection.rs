//! One connection with a front end: whole messages in, replies out. Bounded in memory, never blocking.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use tokio::io::Interest;
use tokio::net::UnixStream;
use vhost::vhost_user::message::MAX_MSG_SIZE;

use super::fault::PeerFault;
use super::message::{HEADER, Header, MAX_FILES, Message};

/// A connected socket and the message that is being received.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    buffer: Vec<u8>,
    files: Vec<OwnedFd>,
    header: Option<Header>,
}

impl Connection {
    /// Takes a connected socket over.
    pub fn new(stream: UnixStream) -> Self {
        Connection { stream, buffer: Vec::with_capacity(HEADER), files: Vec::new(), header: None }
    }

    /// Takes a connected socket over, and what somebody else has received of the next message. `None` if that is more than a
    /// message can have.
    pub fn halfway(stream: UnixStream, half: Vec<u8>, files: Vec<OwnedFd>) -> Option<Self> {
        let fits = half.len() <= HEADER + MAX_MSG_SIZE && files.len() <= MAX_FILES;
        fits.then_some(Connection { stream, buffer: half, files, header: None })
    }

    /// What has been received of the next message.
    pub fn half(&self) -> (&[u8], &[OwnedFd]) {
        (&self.buffer, &self.files)
    }

    /// The socket.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Waits for the next whole message. Dropping the future loses nothing: what has come stays for the next call.
    pub async fn receive(&mut self) -> Result<Message, PeerFault> {
        loop {
            let wanted = HEADER + self.header.map_or(0, |header| header.size as usize);
            if self.buffer.len() < wanted {
                self.fill(wanted).await?;
                continue;
            }
            match self.header.take() {
                None => {
                    let mut bytes = [0; HEADER];
                    bytes.copy_from_slice(&self.buffer[..HEADER]);
                    self.header = Some(Header::parse(&bytes)?);
                }
                Some(header) => {
                    let body = self.buffer.split_off(HEADER);
                    self.buffer.clear();
                    return Ok(Message { header, body, files: std::mem::take(&mut self.files) });
                }
            }
        }
    }

    /// Receives until the buffer has `wanted` bytes or nothing more is there; never a byte of the next message.
    async fn fill(&mut self, wanted: usize) -> Result<(), PeerFault> {
        let Connection { stream, buffer, files, .. } = self;
        let count = stream
            .async_io(Interest::READABLE, || {
                let mut bytes = [0u8; 4096];
                let room = (wanted - buffer.len()).min(bytes.len());
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
                let mut ancillary = RecvAncillaryBuffer::new(&mut space);
                let slices = &mut [IoSliceMut::new(&mut bytes[..room])];
                let got = rustix::net::recvmsg(&*stream, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
                for message in ancillary.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = message {
                        files.extend(rights);
                    }
                }
                if got.flags.contains(ReturnFlags::CTRUNC) || files.len() > MAX_FILES {
                    return Err(std::io::Error::other("more file descriptors than any message has"));
                }
                buffer.extend_from_slice(&bytes[..got.bytes]);
                Ok(got.bytes)
            })
            .await
            .map_err(PeerFault::Broken)?;
        if count == 0 {
            return Err(PeerFault::Closed);
        }
        Ok(())
    }

    /// Sends `bytes` whole, with a descriptor if there is one.
    pub async fn send(&self, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> Result<(), PeerFault> {
        send(&self.stream, bytes, file).await
    }
}

/// How long a front end may leave a reply unread.
const PATIENCE: Duration = Duration::from_secs(10);

/// Sends `bytes` whole on any connected socket; a peer that does not read is left.
pub async fn send(stream: &UnixStream, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> Result<(), PeerFault> {
    match tokio::time::timeout(PATIENCE, send_all(stream, bytes, file)).await {
        Ok(outcome) => outcome,
        Err(_) => Err(PeerFault::Deaf),
    }
}

async fn send_all(stream: &UnixStream, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> Result<(), PeerFault> {
    let mut sent = 0;
    while sent < bytes.len() {
        sent += stream
            .async_io(Interest::WRITABLE, || {
                let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
                let mut ancillary = SendAncillaryBuffer::new(&mut space);
                let files: Vec<BorrowedFd<'_>> = file.into_iter().filter(|_| sent == 0).collect();
                if !files.is_empty() {
                    ancillary.push(SendAncillaryMessage::ScmRights(&files));
                }
                let slices = &[IoSlice::new(&bytes[sent..])];
                Ok(rustix::net::sendmsg(stream.as_fd(), slices, &mut ancillary, SendFlags::NOSIGNAL)?)
            })
            .await
            .map_err(PeerFault::Broken)?;
    }
    Ok(())
}
