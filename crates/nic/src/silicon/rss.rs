//! Receive-side scaling: which queue takes a frame. The hash is Toeplitz's, as Microsoft's specification of RSS and the data sheets have
//! it, over the addresses of IPv4; what is not IPv4 goes to the first queue.

/// Bytes of a key.
pub(crate) const KEY: usize = 40;

/// A key of this PF's own: two hosts do not share one.
pub(crate) fn key(mac: [u8; 6]) -> [u8; KEY] {
    let mut state = u64::from(crc32fast::hash(&mac)) << 1 | 1;
    std::array::from_fn(|_| {
        // Knuth's multiplier, of MMIX.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
}

/// The queue for a frame: the hash's low bits, as many as PSRTYPE (`split`) says; the redirection table deals entries out in turn.
pub(super) fn queue(key: &[u8; KEY], split: u32, frame: &[u8]) -> usize {
    let bits = split >> 29;
    let Some(addresses) = frame.get(26..34).filter(|_| frame[12..14] == [8, 0]) else { return 0 };
    hash(key, addresses) as usize & ((1 << bits) - 1)
}

fn hash(key: &[u8; KEY], input: &[u8]) -> u32 {
    let mut hash = 0;
    for (at, byte) in input.iter().enumerate() {
        let mut window = [0; 8];
        window[..5].copy_from_slice(&key[at..at + 5]);
        let window = u64::from_be_bytes(window);
        for bit in (0..8).filter(|bit| byte >> (7 - bit) & 1 == 1) {
            hash ^= (window << bit >> 32) as u32;
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    /// The example of Microsoft's "Verifying the RSS hash calculation": IPv4 addresses without ports.
    #[test]
    fn the_hash_is_the_published_one() {
        let key = [
            0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
            0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
            0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
        ];
        let from_to = [66, 9, 149, 187, 161, 142, 100, 80];
        assert_eq!(super::hash(&key, &from_to), 0x323e_8fc2);
        let from_to = [199, 92, 111, 2, 65, 69, 140, 83];
        assert_eq!(super::hash(&key, &from_to), 0xd718_262a);
    }
}
