//! The NBD targets: both sides of the handshake, requests against a running export, replies, and records with sums.
//!
//! Each is fed nearly right bytes in pieces of any size, and once more in one piece: both come to the same.

pub mod client;
pub mod replies;
pub mod requests;
pub mod server;
pub mod sums;

use arbitrary::{Result, Unstructured};

/// Cuts `bytes` into pieces, at most 16 different sizes.
fn pieces<'a>(input: &mut Unstructured<'_>, mut bytes: &'a [u8]) -> Result<Vec<&'a [u8]>> {
    let mut pieces = Vec::new();
    while !bytes.is_empty() && pieces.len() < 16 {
        let size = 1 + usize::from(input.arbitrary::<u8>()?) % bytes.len().min(200);
        let (piece, rest) = bytes.split_at(size);
        pieces.push(piece);
        bytes = rest;
    }
    pieces.push(bytes);
    Ok(pieces)
}

/// A name that is known, nearly known, or anything.
fn name(input: &mut Unstructured<'_>) -> Result<Vec<u8>> {
    Ok(match input.int_in_range(0..=7u8)? {
        0..=4 => b"disk".to_vec(),
        5 => Vec::new(),
        6 => b"disc".to_vec(),
        _ => input.arbitrary()?,
    })
}

/// Damages a byte, sometimes.
fn damage(input: &mut Unstructured<'_>, bytes: &mut [u8]) -> Result<()> {
    if !bytes.is_empty() && !input.ratio(7, 8)? {
        let at = input.choose_index(bytes.len())?;
        bytes[at] = input.arbitrary()?;
    }
    Ok(())
}
