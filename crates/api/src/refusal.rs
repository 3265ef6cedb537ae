//! Why the daemon did not do what it was asked.

use serde::{Deserialize, Serialize};

/// Which kind of refusal; decides the HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// 404: no such thing.
    Missing,
    /// 409: not as things are now.
    Conflict,
    /// 413: larger than any that makes sense.
    Huge,
    /// 405: not on this resource.
    Method,
    /// 422: it makes no sense.
    Invalid,
    /// 503: not now; the same again may work.
    Busy,
    /// 500: the system failed.
    Failed,
}

/// A refusal as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RefusalBody {
    /// What is wrong.
    pub error: String,
    /// What to do.
    pub remedy: String,
}
