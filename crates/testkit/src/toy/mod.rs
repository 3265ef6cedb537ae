//! Toy devices: the smallest that have everything a real one has.
//!
//! - [`dma`]: no pollers. The guest drives it by its registers, it has a busy state, and it is *recognised* as quiescent.
//! - [`card`]: a PCI function with everything that a host has to serve: trapped, mapped and shadow pages, every kind of interrupt, DMA.
//! - [`ring`]: two queues with pollers on I/O cores, event suppression both ways, requests in flight; it is *driven* to
//!   quiescence.
//! - [`virtio`]: the smallest virtio device, with everything of rings and queues left to `ioplane-virtio`.

mod bench;
pub mod card;
pub mod dma;
mod gate;
pub mod ring;
mod ring_poller;
pub mod virtio;
mod virtio_poller;
mod wires;

pub use card::ToyCard;
pub use dma::ToyDma;
pub use gate::Gate;
pub use ring::{RingDriver, ToyRing};
pub use virtio::Adder;

use ioplane_device::{Access, StateError};

/// What a register access meant, once its width is checked: toys have 64-bit registers only.
enum Word<'a> {
    Read(&'a mut [u8]),
    Write(u64),
    /// Another width: reads give ones, writes go nowhere.
    Bad,
}

fn word(op: Access<'_>) -> Word<'_> {
    match op {
        Access::Read(bytes) if bytes.len() == 8 => Word::Read(bytes),
        Access::Read(bytes) => {
            bytes.fill(0xff);
            Word::Bad
        }
        Access::Write(bytes) => bytes.try_into().map_or(Word::Bad, |b| Word::Write(u64::from_le_bytes(b))),
    }
}

/// Encodes numbers as a state's body.
fn encode(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Decodes a body of whole numbers.
fn decode(body: &[u8]) -> Result<Vec<u64>, StateError> {
    let (words, rest) = body.as_chunks::<8>();
    if !rest.is_empty() {
        return Err(StateError::Damaged(format!("{} bytes are not whole numbers", body.len())));
    }
    Ok(words.iter().map(|w| u64::from_le_bytes(*w)).collect())
}

/// The step of both toys' checksums: depends on everything before it, in order.
pub fn mix(sum: u64, word: u64) -> u64 {
    (sum ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23)
}
