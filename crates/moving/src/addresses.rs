//! Where frames for the guest are to go: its addresses and VLANs, as its driver has said them to the physical function.

use ioplane_hardware::Hardware;

use crate::error::MovingError;
use crate::kept::Kept;
use crate::movable::Movable;

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
pub(crate) fn of(kept: &Kept, further: impl Iterator<Item = [u32; 2]>, vlans: &[u16]) -> Vec<GuestAddress> {
    let own = kept.begun.then_some(kept.address).into_iter();
    let places = || [None].into_iter().chain(vlans.iter().copied().map(Some));
    let all = own.chain(further).filter_map(address);
    all.flat_map(|address| places().map(move |vlan| GuestAddress { address, vlan }))
        .take(MOST_ANNOUNCED)
        .collect()
}

impl<H: Hardware> Movable<H> {
    /// Under which addresses the guest receives now. None of one that stands still, or that has no receive ring switched on: its
    /// address may be another function's.
    pub fn addresses(&mut self) -> Result<Vec<GuestAddress>, MovingError> {
        if !self.runs() {
            return Ok(Vec::new());
        }
        for at in 0..self.plan.rings.len() {
            let ring = self.plan.rings[at];
            if ring.receives() && self.get(ring.control)? & ring.enable != 0 {
                return Ok(self.kept.addresses(&self.plan.table.mailbox));
            }
        }
        Ok(Vec::new())
    }
}
