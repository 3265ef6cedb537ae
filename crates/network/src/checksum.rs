//! The Internet checksum (RFC 1071).

use crate::cause::DropReason;
use crate::offload::Offload;

/// A sum that goes on: add pieces of even length in any order (only the last may be odd), then [`Sum::check`].
///
/// Kept in the machine's byte order: the sum of swapped words is the swapped sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sum(u64);

impl Sum {
    /// Adds the 16-bit words of `bytes`; an odd byte at the end is the first of a word whose second is zero.
    #[inline]
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        // 32-bit words into 64 bits: no carry is lost below 16 GiB, and the compiler does several at once.
        let (words, rest) = bytes.as_chunks::<4>();
        self.0 += words.iter().map(|word| u64::from(u32::from_ne_bytes(*word))).sum::<u64>();
        let mut last = [0; 4];
        last[..rest.len()].copy_from_slice(rest);
        self.0 += u64::from(u32::from_ne_bytes(last));
        self
    }

    /// Adds one word, given in host byte order.
    #[inline]
    pub fn word(mut self, word: u16) -> Self {
        self.0 += u64::from(word.to_be());
        self
    }

    /// Adds what another sum has.
    #[inline]
    pub fn and(self, other: Sum) -> Self {
        Sum(self.0 + other.0)
    }

    /// The sum itself, in host byte order, not inverted: what a partial checksum (of the pseudo-header) is.
    #[inline]
    pub fn partial(self) -> u16 {
        let mut sum = self.0;
        for _ in 0..5 {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        u16::from_be(sum as u16)
    }

    /// The checksum, in host byte order.
    #[inline]
    pub fn check(self) -> u16 {
        !self.partial()
    }

    /// The checksum where zero means that there is none (UDP): then its other form.
    #[inline]
    pub fn check_nonzero(self) -> u16 {
        match self.check() {
            0 => 0xffff,
            check => check,
        }
    }
}

/// Whether `offload` names a place for the sum that lies inside a frame of `len` bytes, behind its Ethernet header.
#[inline]
pub fn place(len: usize, offload: &Offload) -> Result<usize, DropReason> {
    let (start, offset) = (usize::from(offload.csum_start), usize::from(offload.csum_offset));
    let inside = start >= crate::spec::ETH_HLEN && start + offset + 2 <= len;
    if inside { Ok(start + offset) } else { Err(DropReason::Offload) }
}

/// Completes the checksum of a frame: the place has the sum of the pseudo-header.
#[inline]
pub fn complete(frame: &mut [u8], offload: &Offload) -> Result<(), DropReason> {
    let at = place(frame.len(), offload)?;
    let check = Sum::default().bytes(&frame[usize::from(offload.csum_start)..]).check_nonzero();
    frame[at..at + 2].copy_from_slice(&check.to_be_bytes());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Word by word, as the RFC says it.
    fn slow(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for word in bytes.chunks(2) {
            sum += u32::from(u16::from_be_bytes([word[0], *word.get(1).unwrap_or(&0)]));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }

    proptest! {
        #[test]
        fn as_word_by_word(bytes in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..100) {
            prop_assert_eq!(Sum::default().bytes(&bytes).check(), slow(&bytes));
            let cut = (cut * 2).min(bytes.len() & !1);
            let parts = Sum::default().bytes(&bytes[cut..]).and(Sum::default().bytes(&bytes[..cut]));
            prop_assert_eq!(parts.check(), slow(&bytes));
        }
    }

    #[test]
    fn the_largest_sum_does_not_overflow() {
        let bytes = vec![0xff; 65_557];
        assert_eq!(Sum::default().bytes(&bytes).check(), slow(&bytes));
        assert_eq!(Sum::default().word(0x1234).word(0xf000).partial(), 0x0235);
    }

    #[test]
    fn what_lies_outside_is_refused() {
        let offload = |csum_start, csum_offset| Offload { csum_start, csum_offset, ..Offload::NONE };
        assert_eq!(place(60, &offload(34, 16)), Ok(50));
        assert_eq!(place(60, &offload(34, 24)), Ok(58));
        assert_eq!(place(60, &offload(34, 25)), Err(DropReason::Offload));
        assert_eq!(
            place(60, &offload(13, 0)),
            Err(DropReason::Offload),
            "the addresses are not to be written"
        );
        assert_eq!(place(60, &offload(65_535, 65_535)), Err(DropReason::Offload));
    }
}
