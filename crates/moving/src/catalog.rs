//! The functions that guests drive themselves and that can be moved.

use ioplane_model::DirectModel;

use crate::{vf82576, vf82599};

/// All of them, by name.
pub fn movable() -> &'static [&'static DirectModel] {
    static MOVABLE: [&DirectModel; 2] = [&vf82576::DIRECT, &vf82599::DIRECT];
    &MOVABLE
}

/// The model that fits a function.
pub fn find(vendor: u16, device: u16, revision: u8) -> Option<&'static DirectModel> {
    let fits = |direct: &&DirectModel| direct.model.ids.iter().any(|id| id.fits(vendor, device, revision));
    movable().iter().copied().find(fits)
}
