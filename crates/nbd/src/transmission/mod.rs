//! The transmission phase: requests from the client, replies from the server. No I/O is done here.

mod chunk;
mod reader;
mod reply;
mod request;
#[cfg(test)]
mod tests;

pub use chunk::{Chunk, Extent};
pub use reader::{ReplyEvent, ReplyReader};
pub use reply::{ChunkHeader, SimpleReply};
pub use request::Request;

/// The `N` bytes at `at`, for `from_be_bytes`. The caller has checked that they are there.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
