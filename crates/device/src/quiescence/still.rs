//! The proof that a device is at a quiescent point.

/// Proof that a device is at a quiescent point: all of its pollers are home, and its registers are still. Shown by
/// [`crate::Quiescent`] alone; whatever is allowed only there asks to see it.
#[derive(Debug)]
pub struct QuiescenceProof {
    _minted_by_quiescent: (),
}

pub(super) const STILL: QuiescenceProof = QuiescenceProof { _minted_by_quiescent: () };
