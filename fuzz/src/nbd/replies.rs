//! `nbd_replies`: a server that says anything in the transmission phase.
//!
//! Oracles: no panic; the same in any pieces; payload and holes lie in what was asked for; all input is used before more is asked for.

use arbitrary::{Result, Unstructured};
use ioplane_nbd::spec::*;
use ioplane_nbd::transmission::{Chunk, ChunkHeader, Extent, ReplyEvent, ReplyReader, Request, SimpleReply};

use super::{damage, pieces};
use crate::Signature;

const REQUESTS: [Request; 3] = [
    Request { flags: 0, command: NBD_CMD_READ, cookie: 1, offset: 1 << 20, length: 256 },
    Request { flags: 0, command: NBD_CMD_WRITE, cookie: 2, offset: 0, length: 64 },
    Request { flags: 0, command: NBD_CMD_BLOCK_STATUS, cookie: 3, offset: 0, length: 4096 },
];

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let structured = input.ratio(3, 4)?;
    let mut said = Vec::new();
    for _ in 0..input.int_in_range(1..=12u8)? {
        let start = said.len();
        let cookie = u64::from(input.int_in_range(1..=3u8)?);
        if !structured || !input.ratio(5, 6)? {
            let error = u32::from(input.int_in_range(0..=5u8)?) / 2;
            said.extend(SimpleReply { error, cookie }.encode());
            if cookie == 1 && error == 0 {
                said.resize(said.len() + 256, 7);
            }
        } else {
            chunk(input, &mut said, cookie)?;
        }
        if !input.ratio(3, 4)? {
            damage(input, &mut said[start..])?;
        }
    }
    let whole = read(structured, std::iter::once(&said[..]));
    let cut = pieces(input, &said)?;
    assert_eq!(read(structured, cut.into_iter()), whole, "other pieces, other events");
    for event in &whole {
        signature.saw(event.split(['{', '(']).next().unwrap_or_default());
    }
    Ok(())
}

fn chunk(input: &mut Unstructured<'_>, said: &mut Vec<u8>, cookie: u64) -> Result<()> {
    let offset = (1 << 20) + u64::from(input.int_in_range(0..=300u16)?);
    let length = u32::from(input.int_in_range(0..=260u16)?);
    let extents = [Extent { length, flags: 0 }, Extent { length: 512, flags: 3 }];
    let of = match input.int_in_range(0..=6u8)? {
        0 => Chunk::None,
        1 | 2 => Chunk::OffsetData { offset, length },
        3 => Chunk::OffsetHole { offset, length },
        4 => Chunk::BlockStatus { context: 1, extents: &extents },
        5 => Chunk::Error { error: length, message: "why" },
        _ => Chunk::ErrorOffset { error: length, message: "where", offset },
    };
    let start = said.len();
    said.resize(start + of.encoded_len(), 0);
    of.encode(cookie, input.ratio(1, 2)?, &mut said[start..]).expect("room");
    if let Chunk::OffsetData { length, .. } = of {
        said.resize(said.len() + length as usize, 9);
    }
    if !input.ratio(63, 64)? {
        let (flags, kind, length) = (input.arbitrary()?, input.arbitrary()?, input.arbitrary()?);
        said.extend(ChunkHeader { flags, kind, cookie, length }.encode());
    }
    Ok(())
}

fn read<'a>(structured: bool, said: impl Iterator<Item = &'a [u8]>) -> Vec<String> {
    let mut reader = ReplyReader::new(structured);
    let mut events = Vec::new();
    // How far the payload of one chunk has come, whatever the pieces.
    let mut payload: Option<(u64, u64)> = None;
    for mut input in said {
        loop {
            let find = |cookie| REQUESTS.into_iter().find(|request| request.cookie == cookie);
            match reader.next(&mut input, find) {
                Ok(Some(ReplyEvent::Payload { cookie, offset, length })) => {
                    assert!(cookie == 1 && REQUESTS[0].covers(offset, length));
                    assert!(payload.is_none_or(|(_, at)| at == offset || reader.payload() == length));
                    let take = input.len().min(length as usize);
                    input = &input[take..];
                    reader.advance(take as u32);
                    payload = Some((cookie, offset + take as u64));
                    if take < length as usize {
                        break;
                    }
                    events.push(format!("payload to {}", offset + u64::from(length)));
                }
                Ok(Some(event)) => {
                    if let ReplyEvent::Hole { offset, length, .. } = event {
                        assert!(REQUESTS[0].covers(offset, length));
                    }
                    events.push(format!("{event:?} {:?}", reader.message()));
                }
                Ok(None) => {
                    assert!(input.is_empty());
                    break;
                }
                Err(violation) => {
                    events.push(format!("{violation:?}"));
                    return events;
                }
            }
        }
    }
    events
}
