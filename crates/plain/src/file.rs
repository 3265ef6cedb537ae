//! Files that others wrote: never more than a stated number of bytes of them.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::{plain, shown};

/// Why a file has not told what it was read for. Paths are others' words: none reaches a terminal as it is.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// We may not read it.
    #[error("reading {} is not permitted; run as root", shown(.0))]
    Forbidden(PathBuf),
    /// It does not look as it should.
    #[error("{}: {}", shown(.path), plain(.what))]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// It cannot be read.
    #[error("{}: {}", shown(.path), plain(&.source.to_string()))]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl FileError {
    /// For `map_err` on what the file is read or written with.
    pub fn of(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> FileError {
        let path = path.into();
        move |source| match source.kind() {
            io::ErrorKind::PermissionDenied => FileError::Forbidden(path),
            _ => FileError::Unreadable { path, source },
        }
    }

    /// It does not look as it should.
    pub fn malformed(path: impl Into<PathBuf>, what: impl Into<String>) -> FileError {
        FileError::Malformed { path: path.into(), what: what.into() }
    }
}

/// The bytes of a file that may have `limit` of them at most.
pub fn file_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let mut found = Vec::new();
    let file = File::open(path).map_err(FileError::of(path))?;
    file.take(limit + 1).read_to_end(&mut found).map_err(FileError::of(path))?;
    if found.len() as u64 > limit {
        return Err(FileError::malformed(path, format!("has more than {limit} bytes; that is no such file")));
    }
    Ok(found)
}

/// The same as text; bytes that are not UTF-8 are replaced.
pub fn file_text(path: &Path, limit: u64) -> Result<String, FileError> {
    file_bytes(path, limit).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a path has in it.
    #[test]
    fn no_error_writes_to_the_terminal() {
        let bad = "/tmp/\x1b]0;x\x07\x1b[2J\n\u{9b}H";
        let errors = [
            FileError::malformed(bad, bad),
            FileError::of(bad)(io::Error::other(bad)),
            FileError::of(bad)(io::ErrorKind::PermissionDenied.into()),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(!text.chars().any(char::is_control) && text.contains("/tmp/"), "{text:?}");
        }
    }

    #[test]
    fn no_more_is_read_than_was_said() {
        let own = std::env::current_exe().unwrap();
        let length = std::fs::metadata(&own).unwrap().len();
        assert_eq!(file_bytes(&own, length).unwrap().len() as u64, length);
        assert!(matches!(file_bytes(&own, length - 1), Err(FileError::Malformed { .. })));
        assert!(matches!(file_text(Path::new("/nowhere"), 1), Err(FileError::Unreadable { .. })));
    }
}
