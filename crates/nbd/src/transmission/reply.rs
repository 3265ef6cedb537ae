//! Headers of replies (sections "Simple reply message" and "Structured reply chunk message").

use super::field;
use crate::error::Violation;
use crate::spec::{NBD_REPLY_FLAG_DONE, NBD_SIMPLE_REPLY_MAGIC, NBD_STRUCTURED_REPLY_MAGIC};

/// A simple reply, without the data of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimpleReply {
    /// Error value; 0 when the request succeeded.
    pub error: u32,
    /// Of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// As the wire has it.
    pub fn encode(&self) -> [u8; SimpleReply::SIZE] {
        let mut bytes = [0; SimpleReply::SIZE];
        bytes[..4].copy_from_slice(&NBD_SIMPLE_REPLY_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.error.to_be_bytes());
        bytes[8..].copy_from_slice(&self.cookie.to_be_bytes());
        bytes
    }

    /// From the wire.
    pub fn decode(bytes: &[u8; SimpleReply::SIZE]) -> Result<SimpleReply, Violation> {
        match u32::from_be_bytes(field(bytes, 0)) {
            NBD_SIMPLE_REPLY_MAGIC => Ok(SimpleReply {
                error: u32::from_be_bytes(field(bytes, 4)),
                cookie: u64::from_be_bytes(field(bytes, 8)),
            }),
            magic => Err(Violation::ReplyMagic(magic)),
        }
    }
}

/// What every chunk of a structured reply starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkHeader {
    /// `NBD_REPLY_FLAG_*`; unknown ones are to be ignored.
    pub flags: u16,
    /// `NBD_REPLY_TYPE_*`; any number in what a server sent.
    pub kind: u16,
    /// Of the request.
    pub cookie: u64,
    /// Bytes that follow.
    pub length: u32,
}

impl ChunkHeader {
    /// Bytes on the wire.
    pub const SIZE: usize = 20;

    /// As the wire has it.
    pub fn encode(&self) -> [u8; ChunkHeader::SIZE] {
        let mut bytes = [0; ChunkHeader::SIZE];
        bytes[..4].copy_from_slice(&NBD_STRUCTURED_REPLY_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    /// From the wire. Only the magic number is checked.
    pub fn decode(bytes: &[u8; ChunkHeader::SIZE]) -> Result<ChunkHeader, Violation> {
        match u32::from_be_bytes(field(bytes, 0)) {
            NBD_STRUCTURED_REPLY_MAGIC => Ok(ChunkHeader {
                flags: u16::from_be_bytes(field(bytes, 4)),
                kind: u16::from_be_bytes(field(bytes, 6)),
                cookie: u64::from_be_bytes(field(bytes, 8)),
                length: u32::from_be_bytes(field(bytes, 16)),
            }),
            magic => Err(Violation::ReplyMagic(magic)),
        }
    }

    /// Whether it is the last chunk of its reply.
    pub fn is_last(&self) -> bool {
        self.flags & NBD_REPLY_FLAG_DONE != 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn simple_replies_decode_as_encoded(error: u32, cookie: u64) {
            let reply = SimpleReply { error, cookie };
            prop_assert_eq!(SimpleReply::decode(&reply.encode()), Ok(reply));
        }

        #[test]
        fn chunk_headers_decode_as_encoded(flags: u16, kind: u16, cookie: u64, length: u32) {
            let header = ChunkHeader { flags, kind, cookie, length };
            prop_assert_eq!(ChunkHeader::decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn neither_is_taken_for_the_other() {
        let simple = SimpleReply { error: 0, cookie: 1 }.encode();
        let chunk = ChunkHeader { flags: 1, kind: 0, cookie: 1, length: 0 }.encode();
        assert!(matches!(SimpleReply::decode(&field(&chunk, 0)), Err(Violation::ReplyMagic(_))));
        let mut longer = [0; ChunkHeader::SIZE];
        longer[..SimpleReply::SIZE].copy_from_slice(&simple);
        assert!(matches!(ChunkHeader::decode(&longer), Err(Violation::ReplyMagic(_))));
    }
}
