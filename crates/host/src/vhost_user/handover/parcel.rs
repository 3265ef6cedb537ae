//! Bytes and descriptors that go to another process together.
//!
//! In the bytes a descriptor is a number: its place among those that come beside. Each is named exactly once, or the parcel is
//! damaged, so none leaks and none is used for two things.

use std::os::fd::{AsFd, OwnedFd};

use ioplane_device::DeviceError;
use serde::{Deserialize, Serialize};
use tokio::net::{UnixListener, UnixStream};

use crate::vhost_user::fault::PeerFault;

/// A device on its way to another process.
#[derive(Debug)]
pub struct Parcel {
    /// What is known of it.
    pub bytes: Vec<u8>,
    /// Descriptors, in the order in which the bytes number them.
    pub files: Vec<OwnedFd>,
}

/// Why a device cannot be handed over, or taken over. Whoever has it keeps it.
#[derive(Debug, thiserror::Error)]
pub enum HandOverError {
    /// The bytes are not what this build writes.
    #[error("what was handed over is damaged: {0}")]
    Damaged(String),
    /// A descriptor could not be duplicated or used.
    #[error("a descriptor: {0} (is the limit on open files too low?)")]
    Os(std::io::Error),
    /// What the front end had said does not fit here.
    #[error(transparent)]
    Peer(#[from] PeerFault),
    /// The device refuses its state.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A descriptor, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::vhost_user) struct FileV1(u32);

/// Descriptors that go out.
#[derive(Debug, Default)]
pub(in crate::vhost_user) struct Outbox {
    files: Vec<OwnedFd>,
}

impl Outbox {
    /// Puts a duplicate in: until the other process has answered, both have it.
    pub fn put(&mut self, file: impl AsFd) -> Result<FileV1, HandOverError> {
        let number =
            u32::try_from(self.files.len()).map_err(|error| HandOverError::Damaged(error.to_string()))?;
        self.files.push(file.as_fd().try_clone_to_owned().map_err(HandOverError::Os)?);
        Ok(FileV1(number))
    }

    pub fn into_files(self) -> Vec<OwnedFd> {
        self.files
    }
}

/// Descriptors that have come.
#[derive(Debug)]
pub(in crate::vhost_user) struct Inbox {
    files: Vec<Option<OwnedFd>>,
}

impl Inbox {
    pub fn new(files: Vec<OwnedFd>) -> Self {
        Inbox { files: files.into_iter().map(Some).collect() }
    }

    /// Takes one out, for good.
    pub fn take(&mut self, FileV1(number): FileV1) -> Result<OwnedFd, HandOverError> {
        let found = self.files.get_mut(number as usize).and_then(Option::take);
        found.ok_or_else(|| HandOverError::Damaged(format!("descriptor {number} is missing, or named twice")))
    }

    fn take_socket(&mut self, file: FileV1) -> Result<OwnedFd, HandOverError> {
        let socket = self.take(file)?;
        if rustix::net::sockopt::socket_domain(&socket) != Ok(rustix::net::AddressFamily::UNIX) {
            return Err(HandOverError::Damaged("a descriptor that should be a unix socket".to_owned()));
        }
        Ok(socket)
    }

    /// A connected socket. Within a tokio runtime.
    pub fn take_stream(&mut self, file: FileV1) -> Result<UnixStream, HandOverError> {
        let stream = std::os::unix::net::UnixStream::from(self.take_socket(file)?);
        stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream)).map_err(HandOverError::Os)
    }

    /// A socket that listens. Within a tokio runtime.
    pub fn take_listener(&mut self, file: FileV1) -> Result<UnixListener, HandOverError> {
        let listener = std::os::unix::net::UnixListener::from(self.take_socket(file)?);
        listener
            .set_nonblocking(true)
            .and_then(|()| UnixListener::from_std(listener))
            .map_err(HandOverError::Os)
    }

    /// All have been taken.
    pub fn finish(self) -> Result<(), HandOverError> {
        match self.files.iter().flatten().count() {
            0 => Ok(()),
            left => Err(HandOverError::Damaged(format!("{left} descriptors that nothing names"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_taken_once_and_none_is_left() {
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut outbox = Outbox::default();
        let (a, b) = (outbox.put(&one).unwrap(), outbox.put(&other).unwrap());
        let mut inbox = Inbox::new(outbox.into_files());
        inbox.take(b).unwrap();
        assert!(inbox.take(b).is_err() && inbox.take(FileV1(2)).is_err());
        inbox.take(a).unwrap();
        inbox.finish().unwrap();
        let mut outbox = Outbox::default();
        outbox.put(&one).unwrap();
        assert!(Inbox::new(outbox.into_files()).finish().is_err());
    }
}
