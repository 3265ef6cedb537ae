//! What can be wrong with a file of symbols.

use std::io;
use std::path::PathBuf;

use ioplane_plain::{plain, shown};

/// Why there are no names. Paths are others' words: none reaches a terminal as it is.
#[derive(Debug, thiserror::Error)]
pub enum SymbolsError {
    /// We may not do it.
    #[error(
        "{} is not permitted; run as root, or with CAP_PERFMON, CAP_SYS_PTRACE and a readable tracefs",
        plain(.what)
    )]
    Forbidden {
        /// What was tried.
        what: String,
    },
    /// A file does not look as it should.
    #[error("{}: {}", shown(.path), plain(.what))]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file cannot be read.
    #[error("{}: {}", shown(.path), plain(&.source.to_string()))]
    File {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl SymbolsError {
    /// For `map_err` on files.
    pub(crate) fn file(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> SymbolsError {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::PermissionDenied => {
                SymbolsError::Forbidden { what: format!("reading {}", path.display()) }
            }
            _ => SymbolsError::File { path, source },
        }
    }
}

/// Short for results of this crate.
pub(crate) type Result<T> = std::result::Result<T, SymbolsError>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a path has in it.
    #[test]
    fn no_error_writes_to_the_terminal() {
        let bad = "/tmp/\x1b]0;x\x07\x1b[2J\n\u{9b}H";
        let errors = [
            SymbolsError::Malformed { path: bad.into(), what: bad.into() },
            SymbolsError::file(bad)(io::Error::other(bad)),
            SymbolsError::file(bad)(io::ErrorKind::PermissionDenied.into()),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.chars().any(char::is_control) && text.contains("/tmp/"), "{text:?}");
        }
    }
}
