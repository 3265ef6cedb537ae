//! Saved state: a box of bytes with a name and a version, hostile until a device has checked it.

use serde::{Deserialize, Serialize};

/// A saved device. The bytes are the device's own, versioned encoding; nothing here trusts them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedState {
    /// Kind of the device that saved it, as in [`crate::DeviceInfo::kind`].
    pub kind: String,
    /// Version of the encoding.
    pub version: u32,
    /// The encoding.
    pub body: Vec<u8>,
}

impl SavedState {
    /// Most bytes that a device may save; more is a bug on the saving side and an attack on the loading side.
    pub const MAX_BODY: usize = 1 << 20;

    /// Checks what can be checked without knowing the device.
    pub fn expect(&self, kind: &str, version: u32) -> Result<&[u8], StateError> {
        if self.kind != kind {
            return Err(StateError::OtherKind { wanted: kind.to_owned(), found: self.kind.clone() });
        }
        if self.version != version {
            return Err(StateError::OtherVersion { wanted: version, found: self.version });
        }
        if self.body.len() > Self::MAX_BODY {
            return Err(StateError::TooLarge(self.body.len()));
        }
        Ok(&self.body)
    }
}

/// Why a saved state is refused. The device that refused it is as it was before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// Saved by a device of another kind.
    #[error("the state was saved by a {found}, this device is a {wanted}")]
    OtherKind {
        /// What this device is.
        wanted: String,
        /// What the state says.
        found: String,
    },
    /// An encoding this build does not read.
    #[error("the state has version {found}, this build reads version {wanted}")]
    OtherVersion {
        /// What this build reads.
        wanted: u32,
        /// What the state says.
        found: u32,
    },
    /// Over [`SavedState::MAX_BODY`].
    #[error("the state has {0} bytes, more than any device saves")]
    TooLarge(usize),
    /// Does not decode.
    #[error("the state is damaged: {0}")]
    Damaged(String),
    /// Decodes, but no device can be in that state.
    #[error("the state is impossible: {0}")]
    Impossible(String),
}
