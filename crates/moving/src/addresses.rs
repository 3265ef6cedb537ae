//! Where frames for the guest are to go: its addresses and VLANs, as its driver has said them to the physical function.

/// Most frames by which one function announces itself: its own address on all VLANs comes first.
const MOST_ANNOUNCED: usize = 256;

/// An address under which the guest receives, and where.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestAddress {
    /// Unicast.
    pub address: [u8; 6],
    /// `None`: frames without a tag.
    pub vlan: Option<u16>,
}

/// An address in the words of a message, which is one that somebody can have.
fn address(words: [u32; 2]) -> Option<[u8; 6]> {
    let ([a, b, c, d], [e, f, ..]) = (words[0].to_le_bytes(), words[1].to_le_bytes());
    let address = [a, b, c, d, e, f];
    (address[0] & 1 == 0 && address != [0; 6]).then_some(address)
}

/// All of them on all VLANs, the function's own address first.
pub(crate) fn of(
    own: Option<[u32; 2]>,
    further: impl Iterator<Item = [u32; 2]>,
    vlans: &[u16],
) -> Vec<GuestAddress> {
    let places = || [None].into_iter().chain(vlans.iter().copied().map(Some));
    let all = own.into_iter().chain(further).filter_map(address);
    all.flat_map(|address| places().map(move |vlan| GuestAddress { address, vlan }))
        .take(MOST_ANNOUNCED)
        .collect()
}
