//! What others wrote: never more than a stated number of bytes of it, and nothing that a terminal obeys.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{ExitsError, Result};

/// Of an answer that is not understood so many characters are shown.
const EXCERPT: usize = 200;

/// The bytes of a file that may have `limit` of them at most.
pub(crate) fn bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut found = Vec::new();
    let file = File::open(path).map_err(ExitsError::file(path))?;
    file.take(limit + 1).read_to_end(&mut found).map_err(ExitsError::file(path))?;
    if found.len() as u64 > limit {
        let what = format!("has more than {limit} bytes; that is no such file");
        return Err(ExitsError::Malformed { path: path.into(), what });
    }
    Ok(found)
}

/// The same as text; bytes that are not UTF-8 are replaced.
pub(crate) fn text(path: &Path, limit: u64) -> Result<String> {
    bytes(path, limit).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// On one line, and without what moves a terminal's cursor: control characters are shown as `?`.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The same of a path. It is for showing only: the path itself may well have such characters.
pub(crate) fn shown(path: &Path) -> String {
    plain(&path.to_string_lossy())
}

/// The first characters of what somebody has answered, plain.
pub fn excerpt(answer: &impl std::fmt::Display) -> String {
    let text = answer.to_string();
    let mut first = plain(&text.chars().take(EXCERPT).collect::<String>());
    if text.chars().nth(EXCERPT).is_some() {
        first += "...";
    }
    first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_is_not_written_to() {
        assert_eq!(plain("a\x1b]0;b\x07\n\u{9b}2J\x7f\u{e9}"), "a?]0;b???2J?\u{e9}");
        assert_eq!(shown(Path::new("/tmp/\x1b[2J")), "/tmp/?[2J");
    }

    #[test]
    fn what_is_long_is_cut() {
        assert_eq!(excerpt(&"\r{}"), "?{}");
        let long = excerpt(&"\u{e9}".repeat(100_000));
        assert_eq!((long.chars().count(), long.ends_with("\u{e9}...")), (EXCERPT + 3, true));
    }
}
