//! The configuration file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// `ioplane config save`: what was added at run time, as a part of the configuration. `GET /v1/config/save` says what `POST` would do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct SavedReport {
    /// The configuration file.
    pub file: PathBuf,
    /// What is appended, such as `disk web`.
    pub saved: Vec<String>,
    /// What else the file does not say of what is served, one line each: it has to be written by hand.
    pub unsaved: Vec<String>,
    /// The text that is appended; empty if there is nothing.
    pub text: String,
}
