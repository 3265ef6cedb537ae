//! What the owner of a served device is told when a command is not carried out.

/// Why a command was not carried out; the device is as it was.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// The device has been removed.
    #[error("the device is gone")]
    Gone,
    /// A front end is connected.
    #[error("a front end is connected: shut the VM down or unplug the disk first, or use --force")]
    Connected,
    /// Not now.
    #[error("{0}")]
    Refused(String),
}
