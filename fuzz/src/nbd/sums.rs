//! `nbd_sums`: a peer, or a network, that says anything in place of records with sums.
//!
//! Oracles: no panic; the same in any pieces; what is given out is what was sealed, in that order, whatever has become of the stream; a reader that is asked for room always has some.

use arbitrary::{Result, Unstructured};
use ioplane_nbd::sums::{HEADER, RECORD, RecordReader, RecordWriter, StreamSum};

use super::{damage, pieces};
use crate::Signature;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let (mut writer, mut records) = (RecordWriter::new(StreamSum::default()), Vec::new());
    let mut sealed = Vec::new();
    for number in 0..input.int_in_range(1..=6u8)? {
        let length = match input.int_in_range(0..=9u8)? {
            0 => RECORD,
            1 => usize::from(input.int_in_range(1..=RECORD as u16)?),
            _ => usize::from(input.int_in_range(1..=600u16)?),
        };
        let gather = &mut |into: &mut [u8]| {
            into.fill(number + 1);
            true
        };
        assert_eq!(writer.seal(length, gather), Ok(true), "all before it has been sent");
        sealed.resize(sealed.len() + length, number + 1);
        records.push(writer.unsent().to_vec());
        writer.sent(usize::MAX);
    }
    if input.ratio(1, 8)? {
        writer.seal_end().expect("all before it has been sent");
        records.push(writer.unsent().to_vec());
    }
    // Whoever chooses all bytes of a record may choose their sum.
    let mut chosen = false;
    match input.int_in_range(0..=9u8)? {
        0 => {
            records.remove(input.choose_index(records.len())?);
        }
        1 => {
            let other = input.choose_index(records.len())?;
            records.swap(0, other);
        }
        2 => {
            let twice = records[input.choose_index(records.len())?].clone();
            records.push(twice);
        }
        3 => {
            chosen = true;
            records.insert(0, input.arbitrary()?);
        }
        _ => {}
    }
    for record in &mut records {
        damage(input, record)?;
        let head = record.len().min(HEADER);
        if !input.ratio(15, 16)? {
            damage(input, &mut record[..head])?;
        }
        if !input.ratio(31, 32)? {
            record.truncate(input.int_in_range(0..=record.len())?);
        }
    }
    let stream = records.concat();
    let whole = open(std::iter::once(&stream[..]));
    let cut = pieces(input, &stream)?;
    assert_eq!(open(cut.into_iter()), whole, "other pieces, another end");
    let (plain, end) = whole;
    assert!(chosen || sealed.starts_with(&plain), "bytes that were not sealed like that");
    signature.saw(end.split(['{', '(']).next().unwrap_or_default());
    signature.count(plain.len() as u64);
    Ok(())
}

/// What is given out, and how it ends.
fn open<'a>(stream: impl Iterator<Item = &'a [u8]>) -> (Vec<u8>, String) {
    let mut reader = RecordReader::new(StreamSum::default());
    let (mut plain, mut some) = (Vec::new(), [0; 777]);
    for mut piece in stream {
        while !piece.is_empty() {
            let room = reader.room();
            assert!(!room.is_empty(), "a record that never fits");
            let take = room.len().min(piece.len());
            room[..take].copy_from_slice(&piece[..take]);
            reader.received(take);
            piece = &piece[take..];
            loop {
                let next = reader.has_next();
                match reader.open() {
                    Ok(opened) => {
                        assert_eq!(opened.is_some(), next, "whoever sleeps until it is there sleeps on")
                    }
                    Err(violation) => return (plain, format!("{violation:?}")),
                }
                if !next {
                    break;
                }
                while reader.ready() > 0 {
                    let bytes = reader.read(&mut some);
                    plain.extend_from_slice(&some[..bytes]);
                }
            }
        }
    }
    let between = reader.is_between();
    (plain, format!("between records: {between}"))
}
