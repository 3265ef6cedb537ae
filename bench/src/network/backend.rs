//! Who can carry frames between NICs.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::nic::Shape;
use crate::served::{Place, Served};

/// The address of NIC number `index`: locally administered.
pub fn mac(index: usize) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, 0xa0 + index as u8]
}

/// The socket of NIC number `index` in `folder`.
pub fn socket(folder: &Path, index: usize) -> PathBuf {
    folder.join(format!("nic{index}.sock"))
}

/// Somebody who can.
pub trait Backend {
    /// Prefix of its figures, and its name in tables.
    fn name(&self) -> &'static str;

    /// Starts it with `nics` NICs of `shape` that listen at [`socket`] in `folder` and have the addresses [`mac`], with
    /// everything it has on the processor `place.cpus.back`. It need not listen yet when this returns.
    fn start(&self, nics: usize, shape: Shape, folder: &Path, place: &Place) -> Result<Served>;

    /// Whether a large frame arrives with the TCP checksum that it was sent with: the pseudo-header's.
    fn keeps_checksum(&self) -> bool {
        true
    }

    /// How it works, for the reader of the figures.
    fn describe(&self) -> String;
}
