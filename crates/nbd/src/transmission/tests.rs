//! Replies, written by [`Chunk`] and [`SimpleReply`] and read by [`ReplyReader`].

use proptest::prelude::*;

use super::*;
use crate::error::Violation;
use crate::spec::*;

const READ: Request = Request { flags: 0, command: NBD_CMD_READ, cookie: 7, offset: 4096, length: 64 };
const WRITE: Request = Request { flags: 0, command: NBD_CMD_WRITE, cookie: 8, offset: 0, length: 16 };
const STATUS: Request =
    Request { flags: 0, command: NBD_CMD_BLOCK_STATUS, cookie: 9, offset: 0, length: 1 << 20 };

fn in_flight(cookie: u64) -> Option<Request> {
    [READ, WRITE, STATUS].into_iter().find(|request| request.cookie == cookie)
}

/// What a client makes of a stream: events with their messages, and payload byte by byte at its place.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Event(ReplyEvent, Vec<u8>),
    Byte(u64, u64, u8),
}

/// Reads `stream` in pieces of `piece` bytes.
fn read(structured: bool, stream: &[u8], piece: usize) -> (Vec<Seen>, Result<(), Violation>) {
    let mut reader = ReplyReader::new(structured);
    let mut seen = Vec::new();
    for mut input in stream.chunks(piece) {
        loop {
            match reader.next(&mut input, in_flight) {
                Ok(Some(ReplyEvent::Payload { cookie, offset, length })) => {
                    assert!(length > 0 && length == reader.payload());
                    let take = input.len().min(length as usize);
                    for (at, byte) in input[..take].iter().enumerate() {
                        seen.push(Seen::Byte(cookie, offset + at as u64, *byte));
                    }
                    input = &input[take..];
                    reader.advance(take as u32);
                    if take < length as usize {
                        break;
                    }
                }
                Ok(Some(event)) => seen.push(Seen::Event(event, reader.message().to_vec())),
                Ok(None) => break,
                Err(violation) => return (seen, Err(violation)),
            }
        }
        assert!(input.is_empty(), "{} bytes were left although more was asked for", input.len());
    }
    (seen, Ok(()))
}

fn chunk(out: &mut Vec<u8>, cookie: u64, last: bool, chunk: Chunk<'_>) {
    let start = out.len();
    out.resize(start + chunk.encoded_len(), 0);
    assert_eq!(chunk.encode(cookie, last, &mut out[start..]), Some(out.len() - start));
}

/// One of everything that a server may say when structured replies were negotiated.
fn structured_stream() -> Vec<u8> {
    let mut out = Vec::new();
    chunk(&mut out, 7, false, Chunk::OffsetData { offset: 4096 + 16, length: 16 });
    out.extend(100..116);
    chunk(&mut out, 8, true, Chunk::Error { error: NBD_ENOSPC, message: "the disk is full" });
    chunk(&mut out, 7, false, Chunk::OffsetHole { offset: 4096, length: 16 });
    let extents = [Extent { length: 4096, flags: 0 }, Extent { length: 8192, flags: 3 }];
    chunk(&mut out, 9, false, Chunk::BlockStatus { context: 5, extents: &extents });
    out.extend(SimpleReply { error: 0, cookie: 8 }.encode());
    chunk(&mut out, 9, true, Chunk::None);
    chunk(&mut out, 7, false, Chunk::ErrorOffset { error: NBD_EIO, message: "bad", offset: 4130 });
    chunk(&mut out, 7, true, Chunk::OffsetData { offset: 4096 + 32, length: 32 });
    out.extend(0..32);
    out.extend(SimpleReply { error: NBD_EPERM, cookie: 7 }.encode());
    out
}

fn simple_stream() -> Vec<u8> {
    let mut out = SimpleReply { error: 0, cookie: 7 }.encode().to_vec();
    out.extend(0..64);
    out.extend(SimpleReply { error: 0, cookie: 8 }.encode());
    out.extend(SimpleReply { error: NBD_EIO, cookie: 7 }.encode());
    out
}

#[test]
fn a_structured_stream() {
    let (seen, end) = read(true, &structured_stream(), usize::MAX);
    end.unwrap();
    let events: Vec<_> = seen
        .iter()
        .filter_map(
            |seen| if let Seen::Event(event, message) = seen { Some((*event, &message[..])) } else { None },
        )
        .collect();
    let extent =
        |length, flags| ReplyEvent::BlockStatus { cookie: 9, context: 5, extent: Extent { length, flags } };
    let full = &b"the disk is full"[..];
    assert_eq!(events[0], (ReplyEvent::Error { cookie: 8, error: NBD_ENOSPC, offset: None }, full));
    assert_eq!(events[1].0, ReplyEvent::Done { cookie: 8 });
    assert_eq!(events[2].0, ReplyEvent::Hole { cookie: 7, offset: 4096, length: 16 });
    assert_eq!((events[3].0, events[4].0), (extent(4096, 0), extent(8192, 3)));
    assert_eq!((events[5].0, events[6].0), (ReplyEvent::Done { cookie: 8 }, ReplyEvent::Done { cookie: 9 }));
    assert_eq!(events[7], (ReplyEvent::Error { cookie: 7, error: NBD_EIO, offset: Some(4130) }, &b"bad"[..]));
    assert_eq!(events[8].0, ReplyEvent::Done { cookie: 7 });
    assert_eq!(events[9], (ReplyEvent::Error { cookie: 7, error: NBD_EPERM, offset: None }, &b""[..]));
    assert_eq!((events[10].0, events.len()), (ReplyEvent::Done { cookie: 7 }, 11));
    let bytes: Vec<_> = seen.iter().filter(|seen| matches!(seen, Seen::Byte(..))).collect();
    assert_eq!((bytes[0], bytes.len()), (&Seen::Byte(7, 4112, 100), 48));
    assert_eq!(bytes[47], &Seen::Byte(7, 4096 + 63, 31));
}

#[test]
fn a_simple_stream() {
    let (seen, end) = read(false, &simple_stream(), usize::MAX);
    end.unwrap();
    let byte = |at: u64| Seen::Byte(7, 4096 + at, at as u8);
    assert_eq!(seen[..64], (0..64).map(byte).collect::<Vec<_>>());
    let done = |cookie| Seen::Event(ReplyEvent::Done { cookie }, Vec::new());
    let error = ReplyEvent::Error { cookie: 7, error: NBD_EIO, offset: None };
    assert_eq!(seen[64..], [done(7), done(8), Seen::Event(error, Vec::new()), done(7)]);
}

#[test]
fn pieces_of_any_size_give_the_same() {
    for (structured, stream) in [(true, structured_stream()), (false, simple_stream())] {
        let whole = read(structured, &stream, usize::MAX);
        for piece in 1..64 {
            assert_eq!(read(structured, &stream, piece), whole, "in pieces of {piece} bytes");
        }
    }
}

#[test]
fn a_truncated_stream_waits() {
    for (structured, stream) in [(true, structured_stream()), (false, simple_stream())] {
        let (whole, _) = read(structured, &stream, usize::MAX);
        for end in 1..stream.len() {
            let (seen, result) = read(structured, &stream[..end], usize::MAX);
            assert_eq!(result, Ok(()), "after {end} bytes");
            assert!(whole.starts_with(&seen) && seen.len() < whole.len(), "after {end} bytes");
        }
    }
}

#[test]
fn corrupted_bytes_are_noticed_or_read() {
    for (structured, stream) in [(true, structured_stream()), (false, simple_stream())] {
        for at in 0..stream.len() {
            for bit in 0..8 {
                let mut damaged = stream.clone();
                damaged[at] ^= 1 << bit;
                let whole = read(structured, &damaged, usize::MAX);
                assert_eq!(read(structured, &damaged, 1), whole, "bit {bit} of byte {at}");
            }
        }
    }
}

#[test]
fn what_a_server_must_not_say() {
    let violation = |structured, chunks: &[(u64, bool, Chunk<'_>)]| {
        let mut out = Vec::new();
        for (cookie, last, of) in chunks {
            chunk(&mut out, *cookie, *last, *of);
        }
        read(structured, &out, usize::MAX).1.unwrap_err()
    };
    let data = |offset, length| Chunk::OffsetData { offset, length };
    assert_eq!(violation(false, &[(7, true, Chunk::None)]), Violation::NotNegotiated);
    assert_eq!(violation(true, &[(1, true, Chunk::None)]), Violation::UnknownCookie(1));
    assert_eq!(
        violation(true, &[(7, true, data(4095, 2))]),
        Violation::OutsideRequest { offset: 4095, length: 2 }
    );
    assert_eq!(
        violation(true, &[(7, true, data(4096, 65))]),
        Violation::OutsideRequest { offset: 4096, length: 65 }
    );
    assert_eq!(
        violation(true, &[(7, true, data(4096, 0))]),
        Violation::ChunkLength { kind: NBD_REPLY_TYPE_OFFSET_DATA, length: 8 }
    );
    let hole = Chunk::OffsetHole { offset: 4096, length: 0 };
    assert_eq!(violation(true, &[(7, true, hole)]), Violation::OutsideRequest { offset: 4096, length: 0 });
    assert_eq!(
        violation(true, &[(8, true, data(0, 1))]),
        Violation::UnexpectedChunk { kind: NBD_REPLY_TYPE_OFFSET_DATA, command: NBD_CMD_WRITE }
    );
    let none = Chunk::BlockStatus { context: 1, extents: &[] };
    assert_eq!(
        violation(true, &[(9, true, none)]),
        Violation::ChunkLength { kind: NBD_REPLY_TYPE_BLOCK_STATUS, length: 4 }
    );
    let empty = Chunk::BlockStatus { context: 1, extents: &[Extent { length: 0, flags: 0 }] };
    assert_eq!(violation(true, &[(9, true, empty)]), Violation::EmptyExtent);
    let zero = Chunk::Error { error: 0, message: "" };
    assert_eq!(violation(true, &[(7, true, zero)]), Violation::ErrorZero);
    let header = |flags, kind, length| ChunkHeader { flags, kind, cookie: 7, length }.encode();
    assert_eq!(read(true, &header(0, NBD_REPLY_TYPE_NONE, 0), 20).1, Err(Violation::NotDone));
    assert_eq!(
        read(true, &header(1, 99, 0), 20).1,
        Err(Violation::UnexpectedChunk { kind: 99, command: NBD_CMD_READ })
    );
    assert_eq!(
        read(true, &header(1, NBD_REPLY_TYPE_ERROR, 1 << 20), 20).1,
        Err(Violation::ChunkLength { kind: NBD_REPLY_TYPE_ERROR, length: 1 << 20 })
    );
    let mut long = header(1, NBD_REPLY_TYPE_ERROR_OFFSET, 20).to_vec();
    long.extend([0, 0, 0, 5, 0, 7]);
    assert_eq!(read(true, &long, 99).1, Err(Violation::MessageLength(7)));
    let simple = |cookie| SimpleReply { error: 0, cookie }.encode();
    assert_eq!(read(true, &simple(7), 99).1, Err(Violation::SimpleReply(NBD_CMD_READ)));
    assert_eq!(read(false, &simple(9), 99).1, Err(Violation::SimpleReply(NBD_CMD_BLOCK_STATUS)));
    assert_eq!(read(false, b"HTTP", 99).1, Err(Violation::ReplyMagic(u32::from_be_bytes(*b"HTTP"))));
}

#[test]
fn error_chunks_of_unknown_types_fail_their_request_only() {
    let mut stream = ChunkHeader { flags: 1, kind: 0x8077, cookie: 7, length: 20 }.encode().to_vec();
    stream.extend([0, 0, 0, 5, 0, 3]);
    stream.extend(*b"why, and eleven");
    stream.truncate(ChunkHeader::SIZE + 20);
    stream.extend(SimpleReply { error: 0, cookie: 8 }.encode());
    let (seen, end) = read(true, &stream, 3);
    end.unwrap();
    let error = ReplyEvent::Error { cookie: 7, error: NBD_EIO, offset: None };
    assert_eq!(seen[0], Seen::Event(error, b"why".to_vec()));
    assert_eq!(seen.len(), 3);
}

#[test]
fn long_messages_are_cut_at_a_character() {
    let message = "ö".repeat(3000);
    let of = Chunk::Error { error: NBD_EIO, message: &message };
    assert_eq!(of.encoded_len(), ChunkHeader::SIZE + 6 + MAX_STRING);
    let mut out = Vec::new();
    chunk(&mut out, 7, true, of);
    let (seen, end) = read(true, &out, 4096);
    end.unwrap();
    assert!(matches!(&seen[0], Seen::Event(_, text) if *text == message.as_bytes()[..MAX_STRING]));
    assert_eq!(of.encode(7, true, &mut [0; 4096]), None);
}

proptest! {
    #[test]
    fn any_bytes_are_read_alike_in_any_pieces(structured: bool, bytes: Vec<u8>, piece in 1..9_usize) {
        let mut stream = NBD_STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
        if !structured {
            stream = NBD_SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        }
        stream.extend(bytes);
        prop_assert_eq!(read(structured, &stream, piece), read(structured, &stream, usize::MAX));
    }
}
