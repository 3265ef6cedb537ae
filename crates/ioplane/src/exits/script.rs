//! What is common to all ways of running a script in a guest.

use std::time::Duration;

/// A script is a matter of milliseconds, and some guests are slow.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// What is said when the end of a script is not seen.
pub(super) const STARTED: &str = "the script was started, and may still change the guest";

/// What a script has left.
#[derive(Debug)]
pub(super) struct Done {
    /// Its exit status.
    pub status: i64,
    /// Its output.
    pub said: String,
    /// Its error output.
    pub error: String,
}
