//! The proof that a device is at a quiescent point.

/// Proof that a device is at a quiescent point: the device owns all of its pollers, and its registers do not change. Only
/// [`crate::Quiescent`] has one; functions that are allowed only there take it as an argument.
#[derive(Debug)]
pub struct QuiescenceProof {
    _minted_by_quiescent: (),
}

pub(super) const PROOF: QuiescenceProof = QuiescenceProof { _minted_by_quiescent: () };
