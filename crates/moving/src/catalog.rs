//! The functions that guests drive themselves and that can be moved.

use ioplane_model::DirectModel;

use crate::vf82576;

/// All of them, by name.
pub fn movable() -> &'static [&'static DirectModel] {
    static MOVABLE: [&DirectModel; 1] = [&vf82576::DIRECT];
    &MOVABLE
}
