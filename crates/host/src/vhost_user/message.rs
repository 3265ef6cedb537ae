//! Messages: a header of twelve bytes, a body, descriptors beside it. The bodies are the `vhost` crate's.

use std::os::fd::OwnedFd;

use vhost::vhost_user::message::{FrontendReq, MAX_MSG_SIZE};
use vm_memory::ByteValued;

use super::fault::PeerFault;

/// Bytes of a header.
pub const HEADER: usize = 12;
/// Most descriptors in one message. SET_MEM_TABLE has the most: one a region, eight at the time of the specification.
pub const MAX_FILES: usize = 32;

const FLAGS_VERSION: u32 = 0x3;
const FLAGS_REPLY: u32 = 0x4;
const FLAGS_NEED_REPLY: u32 = 0x8;

/// A header, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What is asked.
    pub request: FrontendReq,
    /// The sender waits for an answer even where the request has none of its own.
    pub need_reply: bool,
    /// Bytes of the body.
    pub size: u32,
}

impl Header {
    /// Reads a header; refuses what cannot be one.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Self, PeerFault> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (request, flags, size) = (word(0), word(4), word(8));
        if flags & FLAGS_VERSION != 1 || flags & FLAGS_REPLY != 0 || flags & !0xf != 0 {
            return Err(PeerFault::BadFlags(flags));
        }
        if size as usize > MAX_MSG_SIZE {
            return Err(PeerFault::Huge(size));
        }
        let request = FrontendReq::try_from(request).map_err(|_| PeerFault::UnknownRequest(request))?;
        Ok(Header { request, need_reply: flags & FLAGS_NEED_REPLY != 0, size })
    }
}

/// A whole message from the front end.
#[derive(Debug)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// As many bytes as the header says.
    pub body: Vec<u8>,
    /// What came beside it.
    pub files: Vec<OwnedFd>,
}

impl Message {
    fn request(&self) -> u32 {
        self.header.request as u32
    }

    /// The body as a `T`, which must be all of it.
    pub fn body<T: ByteValued + Default>(&self) -> Result<T, PeerFault> {
        let (value, rest) = self.split::<T>()?;
        if !rest.is_empty() {
            return Err(PeerFault::BadSize {
                request: self.request(),
                size: self.body.len(),
                wanted: size_of::<T>(),
            });
        }
        Ok(value)
    }

    /// The body as a `T` and what follows it.
    pub fn split<T: ByteValued + Default>(&self) -> Result<(T, &[u8]), PeerFault> {
        let wanted = size_of::<T>();
        if self.body.len() < wanted {
            return Err(PeerFault::BadSize { request: self.request(), size: self.body.len(), wanted });
        }
        let (front, rest) = self.body.split_at(wanted);
        let mut value = T::default();
        value.as_mut_slice().copy_from_slice(front);
        Ok((value, rest))
    }

    /// The body, which must be empty.
    pub fn empty(&self) -> Result<(), PeerFault> {
        if self.body.is_empty() {
            Ok(())
        } else {
            Err(PeerFault::BadSize { request: self.request(), size: self.body.len(), wanted: 0 })
        }
    }

    /// Takes the descriptors, of which there must be `wanted`.
    pub fn take_files(&mut self, wanted: usize) -> Result<Vec<OwnedFd>, PeerFault> {
        if self.files.len() != wanted {
            return Err(PeerFault::BadFiles { request: self.request(), found: self.files.len(), wanted });
        }
        Ok(std::mem::take(&mut self.files))
    }

    /// Takes the only descriptor, which must be there.
    pub fn take_file(&mut self) -> Result<OwnedFd, PeerFault> {
        let request = self.request();
        let found = self.files.len();
        match (self.files.pop(), found) {
            (Some(file), 1) => Ok(file),
            _ => Err(PeerFault::BadFiles { request, found, wanted: 1 }),
        }
    }
}

/// The bytes of a reply to `request`.
pub fn reply(request: FrontendReq, body: &[u8]) -> Vec<u8> {
    frame(request as u32, 1 | FLAGS_REPLY, body)
}

/// The bytes of a request to the front end, on the back channel.
pub fn backend_request(request: u32, body: &[u8]) -> Vec<u8> {
    frame(request, 1, body)
}

fn frame(request: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend_from_slice(&request.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(body);
    bytes
}
