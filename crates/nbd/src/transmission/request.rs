//! Requests (section "Request message").

use super::field;
use crate::error::Violation;
use crate::spec::{NBD_CMD_WRITE, NBD_REQUEST_MAGIC};

/// A request, without the data of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// `NBD_CMD_FLAG_*`; any bit may be set in what a client sent.
    pub flags: u16,
    /// `NBD_CMD_*`; any number in what a client sent.
    pub command: u16,
    /// Chosen by the client, returned in the replies.
    pub cookie: u64,
    /// First byte in the export.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

impl Request {
    /// Bytes on the wire.
    pub const SIZE: usize = 28;

    /// As the wire has it.
    pub fn encode(&self) -> [u8; Request::SIZE] {
        let mut bytes = [0; Request::SIZE];
        bytes[..4].copy_from_slice(&NBD_REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    /// From the wire. Only the magic number is checked: a server answers what it does not know with `NBD_EINVAL` and goes on.
    pub fn decode(bytes: &[u8; Request::SIZE]) -> Result<Request, Violation> {
        match u32::from_be_bytes(field(bytes, 0)) {
            NBD_REQUEST_MAGIC => Ok(Request {
                flags: u16::from_be_bytes(field(bytes, 4)),
                command: u16::from_be_bytes(field(bytes, 6)),
                cookie: u64::from_be_bytes(field(bytes, 8)),
                offset: u64::from_be_bytes(field(bytes, 16)),
                length: u32::from_be_bytes(field(bytes, 24)),
            }),
            magic => Err(Violation::RequestMagic(magic)),
        }
    }

    /// Bytes of data that follow the request in the stream.
    pub fn payload(&self) -> u32 {
        if self.command == NBD_CMD_WRITE { self.length } else { 0 }
    }

    /// Whether `length` bytes at `offset` are at least one byte and lie in what this request is about.
    pub fn covers(&self, offset: u64, length: u32) -> bool {
        let within = offset.checked_sub(self.offset).and_then(|at| at.checked_add(length.into()));
        length != 0 && within.is_some_and(|end| end <= self.length.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn decodes_what_it_encodes(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) {
            let request = Request { flags, command, cookie, offset, length };
            prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
        }

        #[test]
        fn other_magic_is_refused(at in 0..4_usize, flip in 1..=255_u8) {
            let mut bytes = Request { flags: 0, command: 0, cookie: 1, offset: 2, length: 3 }.encode();
            bytes[at] ^= flip;
            prop_assert!(matches!(Request::decode(&bytes), Err(Violation::RequestMagic(_))));
        }
    }

    #[test]
    fn layout() {
        let request =
            Request { flags: 1, command: NBD_CMD_WRITE, cookie: 0x0102, offset: 0x0304, length: 0x0506 };
        let bytes = request.encode();
        assert_eq!(bytes[..8], [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 1]);
        assert_eq!(
            (bytes[14..16].as_ref(), bytes[22..24].as_ref(), bytes[26..].as_ref()),
            (&[1, 2][..], &[3, 4][..], &[5, 6][..])
        );
    }

    #[test]
    fn only_writes_carry_data() {
        let mut request = Request { flags: 0, command: NBD_CMD_WRITE, cookie: 0, offset: 0, length: 7 };
        assert_eq!(request.payload(), 7);
        request.command = 0;
        assert_eq!(request.payload(), 0);
    }

    #[test]
    fn covers_no_more_than_was_asked() {
        let request = Request { flags: 0, command: 0, cookie: 0, offset: u64::MAX - 9, length: 9 };
        assert!(request.covers(u64::MAX - 9, 9) && request.covers(u64::MAX - 1, 1));
        assert!(!request.covers(u64::MAX - 9, 10) && !request.covers(u64::MAX - 10, 1));
        assert!(!request.covers(u64::MAX, 1) && !request.covers(u64::MAX - 5, 0));
    }
}
