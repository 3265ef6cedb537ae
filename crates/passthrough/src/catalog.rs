//! The models that there are.

use ioplane_model::StateModel;

use crate::{i82574, ne2000, rtl8139};

/// All of them, by name.
pub fn models() -> &'static [&'static StateModel] {
    static MODELS: [&StateModel; 3] = [&i82574::MODEL, &ne2000::MODEL, &rtl8139::MODEL];
    &MODELS
}

/// The model that fits a function.
pub fn find(vendor: u16, device: u16, revision: u8) -> Option<&'static StateModel> {
    models().iter().copied().find(|model| model.ids.iter().any(|id| id.fits(vendor, device, revision)))
}

/// The model of this name.
pub fn named(name: &str) -> Option<&'static StateModel> {
    models().iter().copied().find(|model| model.name == name)
}
