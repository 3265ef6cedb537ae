//! Why a connection of the control half, or a question by one, has come to nothing.

use super::status::Loss;
use crate::error::{NbdError, Violation};

/// In words, and whether it counts as a connection that the server has ended by breaking the protocol.
#[derive(Debug)]
pub(super) struct Failure {
    pub why: String,
    /// In a handshake only what is of sums: another server may answer there for a while.
    pub violation: Option<Violation>,
}

impl From<String> for Failure {
    fn from(why: String) -> Failure {
        Failure { why, violation: None }
    }
}

impl From<&str> for Failure {
    fn from(why: &str) -> Failure {
        why.to_owned().into()
    }
}

impl From<NbdError> for Failure {
    fn from(error: NbdError) -> Failure {
        let violation = match error {
            NbdError::Violation(violation) if violation.is_of_sums() => Some(violation),
            _ => None,
        };
        Failure { why: error.to_string(), violation }
    }
}

impl From<Loss> for Failure {
    fn from(loss: Loss) -> Failure {
        let violation = match loss {
            Loss::Violation(violation) => Some(violation),
            _ => None,
        };
        Failure { why: loss.to_string(), violation }
    }
}
