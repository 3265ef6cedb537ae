//! What others wrote, as it may be shown: of a bounded length, and nothing in it that a terminal obeys. Files that others wrote, of a bounded size. And lines of
//! `/proc/PID/maps`.
//!
//! Must not know: who wrote it, and where it is shown.
#![forbid(unsafe_code)]

mod file;
mod mapping;

use std::path::Path;

pub use file::{FileError, file_bytes, file_text};
pub use mapping::ProcMapping;

/// Of an answer that is not understood so many characters are shown.
const EXCERPT: usize = 200;

/// On one line, and without what moves a terminal's cursor: control characters are shown as `?`.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The same of a path. It is for showing only: the path itself may well have such characters.
pub fn shown(path: &Path) -> String {
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
