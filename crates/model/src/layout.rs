//! Where the registers lie: an access by offset and width, as the registers that it touches.

use std::ops::Deref;

use crate::{Reads, Register, StateModel, Way, Writes};

/// A register of a model: its place in [`StateModel::registers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegisterId(pub(crate) u8);

impl RegisterId {
    /// Its place in [`StateModel::registers`].
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// The part of an access that touches one register, or none that the model knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The register; `None`: nothing that the model knows.
    pub register: Option<RegisterId>,
    /// First byte, counted in the access.
    pub from: u8,
    /// First byte, counted in the register.
    pub within: u16,
    /// Bytes.
    pub width: u8,
}

impl Piece {
    /// Its part of the bytes of a write.
    pub fn of<'a>(&self, bytes: &'a [u8]) -> &'a [u8] {
        let from = usize::from(self.from);
        bytes.get(from..from + usize::from(self.width)).unwrap_or(&[])
    }
}

/// Widest access, in bytes.
const WIDEST: usize = 8;

/// An access as pieces, in the order of the bytes. Together they are the whole access, up to 8 bytes.
#[derive(Debug, Clone, Copy)]
pub struct AccessPieces {
    pieces: [Piece; WIDEST],
    len: u8,
}

impl Deref for AccessPieces {
    type Target = [Piece];

    fn deref(&self) -> &[Piece] {
        &self.pieces[..usize::from(self.len)]
    }
}

/// No register.
const NONE: u8 = u8::MAX;

/// The registers by bank, way and offset.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    /// `[(bank * 2 + way) * size + offset]`: the register's number.
    bytes: Box<[u8]>,
    size: usize,
    /// First byte of each register.
    first: Box<[u16]>,
    /// What the offsets mean depends on this register.
    bank: Option<u8>,
}

impl Layout {
    /// Lays out a model whose numbers of registers and banks have been checked. Of two registers at an offset the one with a meaning
    /// for that way wins.
    pub(crate) fn new(model: &StateModel, banks: usize, bank: Option<RegisterId>) -> Self {
        let size = usize::from(model.size);
        let mut bytes = vec![NONE; banks.max(1) * 2 * size].into_boxed_slice();
        // First those without a meaning for that way, then those with one over them.
        for meaning in [false, true] {
            for (id, register) in model.registers.iter().enumerate().take(usize::from(NONE)) {
                for way in [Way::Read, Way::Write] {
                    if has_meaning(register, way) != meaning {
                        continue;
                    }
                    for in_bank in 0..banks.max(1) {
                        if register.bank.is_some_and(|own| usize::from(own) != in_bank) {
                            continue;
                        }
                        let base = (in_bank * 2 + way as usize) * size;
                        for byte in 0..usize::from(register.width) {
                            let offset = usize::from(register.offset) + byte;
                            if offset < size {
                                bytes[base + offset] = id as u8;
                            }
                        }
                    }
                }
            }
        }
        let first = model.registers.iter().map(|register| register.offset).collect();
        Self { bytes, size, first, bank: bank.map(|id| id.0) }
    }

    /// Splits an access. A register that follows the bank register in one write is unknown: which bank is meant cannot be told.
    pub(crate) fn split(&self, bank: usize, way: Way, offset: u64, width: usize) -> AccessPieces {
        let none = Piece { register: None, from: 0, within: 0, width: 0 };
        let mut split = AccessPieces { pieces: [none; WIDEST], len: 0 };
        let base = (bank * 2 + way as usize) * self.size;
        let mut last = None;
        let mut lost = false;
        for byte in 0..width.min(WIDEST) {
            let at = offset.checked_add(byte as u64).and_then(|at| usize::try_from(at).ok());
            let at = at.filter(|at| *at < self.size && !lost);
            let id = at.and_then(|at| self.bytes.get(base + at)).copied().unwrap_or(NONE);
            if last == Some(id) {
                if let Some(piece) = split.pieces.get_mut(usize::from(split.len).wrapping_sub(1)) {
                    piece.width += 1;
                }
                continue;
            }
            last = Some(id);
            lost |= way == Way::Write && self.bank == Some(id);
            let first = self.first.get(usize::from(id)).copied();
            let within = first.and_then(|first| at?.checked_sub(usize::from(first))).unwrap_or(0);
            if let Some(piece) = split.pieces.get_mut(usize::from(split.len)) {
                *piece = Piece {
                    register: (id != NONE).then_some(RegisterId(id)),
                    from: byte as u8,
                    within: within as u16,
                    width: 1,
                };
                split.len += 1;
            }
        }
        split
    }
}

/// Whether an access that way means something to the register.
pub(crate) fn has_meaning(register: &Register, way: Way) -> bool {
    match way {
        Way::Read => register.reads != Reads::Never,
        Way::Write => register.writes != Writes::Never,
    }
}
