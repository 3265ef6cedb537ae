//! What can go wrong at the other end of a socket.

use std::io;

use ioplane_plain::plain;

/// Why there is no answer, or not the one that was asked for. Answers are others' words: none reaches a terminal as it is.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// Whoever is at the other end of a socket of a QEMU's does not answer, or not as it should.
    #[error("{}", plain(&.0.to_string()))]
    Peer(#[source] io::Error),
    /// A QEMU's monitor, or a guest's agent, refuses a command.
    #[error("it refuses {command}: {}", plain(.why))]
    Refused {
        /// Which.
        command: String,
        /// In its words.
        why: String,
    },
}

/// Short for results of this crate.
pub(crate) type Result<T> = std::result::Result<T, QemuError>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever an answer has in it.
    #[test]
    fn no_error_writes_to_the_terminal() {
        let bad = "/tmp/\x1b]0;x\x07\x1b[2J\n\u{9b}H";
        let errors = [
            QemuError::Peer(io::Error::other(bad)),
            QemuError::Refused { command: "query-pci".into(), why: bad.into() },
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.chars().any(char::is_control) && text.contains("/tmp/"), "{text:?}");
        }
    }
}
