//! The sending end of a Unix socket that carries descriptors, as a peer that may do anything uses it.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use arbitrary::{Result, Unstructured};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// Throws replies away, so that nobody waits for room.
pub fn drain(theirs: &UnixStream) {
    let mut bytes = [0; 4096];
    let mut reader = theirs;
    while matches!(reader.read(&mut bytes), Ok(1..)) {}
}

/// Sends `bytes` with at most 40 of `files`, in one piece or in two: the second has no descriptors.
pub fn send(
    theirs: &UnixStream,
    input: &mut Unstructured<'_>,
    bytes: &[u8],
    files: &[OwnedFd],
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let borrowed: Vec<_> = files.iter().map(|file| file.as_fd()).take(40).collect();
    if !borrowed.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&borrowed));
    }
    let cut = if input.ratio(1, 16)? { input.int_in_range(1..=bytes.len())? } else { bytes.len() };
    let flags = SendFlags::NOSIGNAL;
    let _ = rustix::net::sendmsg(theirs, &[IoSlice::new(&bytes[..cut])], &mut ancillary, flags);
    if cut < bytes.len() {
        let _ = rustix::net::send(theirs, &bytes[cut..], flags);
    }
    Ok(())
}
