//! The socket between a daemon and its successor: frames of bytes with descriptors beside them.
//!
//! ```text
//!   greeting, each way   "ioplane>" | oldest format u32 | newest format u32        never changes
//!   frame                bytes u32 | descriptors u32 | one byte for each batch of descriptors | the bytes
//! ```
//!
//! All numbers are little-endian. Blocking, with a deadline for each step.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The format that this build writes and reads.
pub const FORMAT: u32 = 1;
const MAGIC: [u8; 8] = *b"ioplane>";
/// Most descriptors that go beside one byte: the kernel's SCM_MAX_FD is 253.
const BATCH: usize = 250;
/// Most bytes of a frame: a device's state has at most a mebibyte.
const MAX_BYTES: usize = 4 << 20;
/// Most descriptors of a frame: 509 regions, three for each of 256 rings, and a few.
const MAX_FILES: usize = 2048;

/// Why the two do not understand each other.
#[derive(Debug, thiserror::Error)]
pub enum HandoverSocketError {
    /// The other has closed the socket, or is dead.
    #[error("it ended before it answered")]
    Closed,
    /// Nothing came, or nothing was taken, in time.
    #[error("it did not answer within {0:?}")]
    Late(Duration),
    /// What came is no greeting.
    #[error("it is no ioplane that can take over")]
    Stranger,
    /// No format in common.
    #[error("it hands over in formats {oldest} to {newest}, and this one in format {FORMAT}")]
    Foreign { oldest: u32, newest: u32 },
    /// What came is no frame, or not the one that was due.
    #[error("it sent {0}")]
    Garbled(String),
    #[error("the socket between the two: {0}")]
    Os(std::io::Error),
}

/// One end.
#[derive(Debug)]
pub struct HandoverSocket {
    socket: UnixStream,
    end: Instant,
    patience: Duration,
}

impl HandoverSocket {
    /// On a connected socket. A deadline comes first, by [`HandoverSocket::within`].
    pub fn on(socket: UnixStream) -> std::io::Result<Self> {
        socket.set_nonblocking(false)?;
        Ok(HandoverSocket { socket, end: Instant::now(), patience: Duration::ZERO })
    }

    /// Everything from now on must be done within `patience`.
    pub fn within(&mut self, patience: Duration) -> &mut Self {
        (self.end, self.patience) = (Instant::now() + patience, patience);
        self
    }

    fn limit(&self) -> Result<(), HandoverSocketError> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HandoverSocketError::Late(self.patience));
        }
        let set =
            self.socket.set_read_timeout(Some(left)).and_then(|()| self.socket.set_write_timeout(Some(left)));
        set.map_err(HandoverSocketError::Os)
    }

    fn failed(&self, error: std::io::Error) -> HandoverSocketError {
        use std::io::ErrorKind as K;
        match error.kind() {
            K::WouldBlock | K::TimedOut => HandoverSocketError::Late(self.patience),
            K::BrokenPipe | K::ConnectionReset | K::UnexpectedEof => HandoverSocketError::Closed,
            _ => HandoverSocketError::Os(error),
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), HandoverSocketError> {
        while !bytes.is_empty() {
            self.limit()?;
            match self.socket.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), HandoverSocketError> {
        let mut filled = 0;
        while filled < bytes.len() {
            self.limit()?;
            match self.socket.read(&mut bytes[filled..]) {
                Ok(0) => return Err(HandoverSocketError::Closed),
                Ok(count) => filled += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    /// Says which formats this build knows, hears the other's, and finds out whether there is one in common.
    pub fn greet(&mut self) -> Result<(), HandoverSocketError> {
        let mut ours = MAGIC.to_vec();
        ours.extend_from_slice(&FORMAT.to_le_bytes());
        ours.extend_from_slice(&FORMAT.to_le_bytes());
        self.write(&ours)?;
        let mut theirs = [0; 16];
        self.read(&mut theirs)?;
        if theirs[..8] != MAGIC {
            return Err(HandoverSocketError::Stranger);
        }
        let (oldest, newest) = (word(&theirs[8..12]), word(&theirs[12..16]));
        if (oldest..=newest).contains(&FORMAT) {
            Ok(())
        } else {
            Err(HandoverSocketError::Foreign { oldest, newest })
        }
    }

    /// Sends a message and descriptors, which stay the caller's.
    pub fn send(
        &mut self,
        message: &impl Serialize,
        files: &[BorrowedFd<'_>],
    ) -> Result<(), HandoverSocketError> {
        let bytes =
            postcard::to_stdvec(message).map_err(|error| HandoverSocketError::Garbled(error.to_string()))?;
        let (len, count) = (bytes.len(), files.len());
        if len > MAX_BYTES || count > MAX_FILES {
            return Err(HandoverSocketError::Garbled(format!(
                "nothing: {len} bytes and {count} descriptors are too many"
            )));
        }
        let mut head = (len as u32).to_le_bytes().to_vec();
        head.extend_from_slice(&(count as u32).to_le_bytes());
        self.write(&head)?;
        for batch in files.chunks(BATCH) {
            self.send_batch(batch)?;
        }
        self.write(&bytes)
    }

    fn send_batch(&mut self, files: &[BorrowedFd<'_>]) -> Result<(), HandoverSocketError> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        loop {
            self.limit()?;
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            ancillary.push(SendAncillaryMessage::ScmRights(files));
            match rustix::net::sendmsg(
                &self.socket,
                &[IoSlice::new(&[0])],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            ) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.failed(errno.into())),
            }
        }
    }

    /// Waits for the next message and its descriptors.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<(T, Vec<OwnedFd>), HandoverSocketError> {
        let mut head = [0; 8];
        self.read(&mut head)?;
        let (len, count) = (word(&head[..4]) as usize, word(&head[4..]) as usize);
        if len > MAX_BYTES || count > MAX_FILES {
            return Err(HandoverSocketError::Garbled(format!(
                "a frame of {len} bytes and {count} descriptors"
            )));
        }
        let mut files = Vec::with_capacity(count);
        while files.len() < count {
            let wanted = (count - files.len()).min(BATCH);
            self.receive_batch(wanted, &mut files)?;
        }
        let mut bytes = vec![0; len];
        self.read(&mut bytes)?;
        match postcard::take_from_bytes(&bytes) {
            Ok((message, [])) => Ok((message, files)),
            Ok((_, rest)) => {
                Err(HandoverSocketError::Garbled(format!("a frame with {} bytes too many", rest.len())))
            }
            Err(error) => Err(HandoverSocketError::Garbled(format!("a frame that is none: {error}"))),
        }
    }

    fn receive_batch(&mut self, wanted: usize, files: &mut Vec<OwnedFd>) -> Result<(), HandoverSocketError> {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(BATCH))];
        let before = files.len();
        let got = loop {
            self.limit()?;
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0];
            let slices = &mut [IoSliceMut::new(&mut byte)];
            match rustix::net::recvmsg(self.socket.as_fd(), slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(got) => {
                    for message in ancillary.drain() {
                        if let RecvAncillaryMessage::ScmRights(rights) = message {
                            files.extend(rights);
                        }
                    }
                    break (got.bytes, got.flags);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(self.failed(errno.into())),
            }
        };
        match got {
            (0, _) => Err(HandoverSocketError::Closed),
            (_, flags) if flags.contains(ReturnFlags::CTRUNC) => Err(HandoverSocketError::Garbled(
                "descriptors that did not arrive: is the limit on open files too low?".to_owned(),
            )),
            _ if files.len() - before == wanted => Ok(()),
            _ => Err(HandoverSocketError::Garbled(format!(
                "{} descriptors in place of {wanted}",
                files.len() - before
            ))),
        }
    }
}

fn word(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (HandoverSocket, HandoverSocket) {
        let (a, b) = UnixStream::pair().unwrap();
        let (mut a, mut b) = (HandoverSocket::on(a).unwrap(), HandoverSocket::on(b).unwrap());
        a.within(Duration::from_secs(10));
        b.within(Duration::from_secs(10));
        (a, b)
    }

    #[test]
    fn many_descriptors_arrive_whole_and_in_order() {
        let (mut a, mut b) = pair();
        let (one, other) = UnixStream::pair().unwrap();
        let files: Vec<_> =
            (0..BATCH * 2 + 7).map(|n| if n % 2 == 0 { one.as_fd() } else { other.as_fd() }).collect();
        let sender = std::thread::spawn({
            let owned: Vec<_> = files.iter().map(|file| file.try_clone_to_owned().unwrap()).collect();
            move || {
                let files: Vec<_> = owned.iter().map(AsFd::as_fd).collect();
                a.send(&"here".to_owned(), &files).unwrap();
                a.send(&7u32, &[]).unwrap();
            }
        });
        let (text, came) = b.receive::<String>().unwrap();
        assert_eq!((text.as_str(), came.len()), ("here", files.len()));
        let inode = |file: &dyn AsFd| rustix::fs::fstat(file.as_fd()).unwrap().st_ino;
        assert!(came.iter().zip(&files).all(|(came, sent)| inode(came) == inode(sent)));
        assert_eq!(b.receive::<u32>().unwrap().0, 7);
        sender.join().unwrap();
        assert!(matches!(b.receive::<u32>(), Err(HandoverSocketError::Closed)));
    }

    #[test]
    fn strangers_are_recognised() {
        for (said, wanted) in [
            (b"GET / HTTP/1.1\r\n".to_vec(), "no ioplane"),
            ([&MAGIC[..], &[2, 0, 0, 0, 9, 0, 0, 0]].concat(), "formats 2 to 9"),
            (Vec::new(), "ended before"),
        ] {
            let (a, mut b) = UnixStream::pair().unwrap();
            let mut a = HandoverSocket::on(a).unwrap();
            b.write_all(&said).unwrap();
            let _ = b.shutdown(std::net::Shutdown::Write);
            let refused = a.within(Duration::from_secs(10)).greet().unwrap_err().to_string();
            assert!(refused.contains(wanted), "{refused}");
        }
        let (a, _b) = UnixStream::pair().unwrap();
        let refused = HandoverSocket::on(a).unwrap().within(Duration::from_millis(20)).greet().unwrap_err();
        assert!(matches!(refused, HandoverSocketError::Late(_)), "{refused}");
    }

    #[test]
    fn frames_that_are_none_are_refused() {
        for head in [[0xff; 8], [0, 0, 0, 0, 0, 0, 0xff, 0], [3, 0, 0, 0, 0, 0, 0, 0]] {
            let (a, mut b) = UnixStream::pair().unwrap();
            b.write_all(&head).unwrap();
            b.write_all(&[0xff; 3]).unwrap();
            let mut a = HandoverSocket::on(a).unwrap();
            assert!(matches!(
                a.within(Duration::from_secs(10)).receive::<u32>(),
                Err(HandoverSocketError::Garbled(_))
            ));
        }
    }
}
