//! Golden files: what users and stored data see, kept in `golden/` beside the tests, so that a change of it is always a decision.
//!
//! ```text
//!   golden!("state.json").check(&text)            panics with the differences, unless the file holds exactly that
//!   golden!("disk.state").check_state(&state)     the same of bytes, as a dump
//!   golden!("disk.state").state()                 what is stored, to be loaded again
//! ```
//!
//! `IOPLANE_WRITE_GOLDEN=1` writes what was found in place of comparing; docs/guide/development.md says when that is allowed.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use ioplane_device::SavedState;
use similar::TextDiff;

/// Set to `1`, golden files are written.
pub const WRITE: &str = "IOPLANE_WRITE_GOLDEN";
/// Bytes of one line of a dump.
const LINE: usize = 16;
/// Most lines of a difference that are printed.
const MOST: usize = 200;

/// The golden file of that name, in `golden/` beside the source file that asks for it: they move together.
#[macro_export]
macro_rules! golden {
    ($name:expr) => {
        $crate::golden::Golden::beside(env!("CARGO_MANIFEST_DIR"), file!(), $name)
    };
}

/// Bytes with what they are, in a word or two.
pub type Part = (String, Vec<u8>);

#[derive(Debug)]
pub struct Golden {
    path: PathBuf,
}

impl Golden {
    /// Of the package at `manifest`, whose source file `source` is as the compiler has it: relative to the workspace.
    pub fn beside(manifest: &str, source: &str, name: &str) -> Self {
        let found = Path::new(manifest).ancestors().map(|folder| folder.join(source)).find(|it| it.exists());
        let source = found.unwrap_or_else(|| panic!("{source} is nowhere above {manifest}"));
        Golden { path: source.with_file_name("golden").join(name) }
    }

    /// Panics with the differences unless the file holds `found`.
    #[track_caller]
    pub fn check(&self, found: &str) {
        let shown = self.path.display();
        let held = std::fs::read_to_string(&self.path).ok();
        if held.as_deref() == Some(found) {
            return;
        }
        if std::env::var(WRITE).is_ok_and(|value| value == "1") {
            let folder = self.path.parent().expect("a file is in a folder");
            let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&self.path, found));
            return written.unwrap_or_else(|error| panic!("{shown}: {error}"));
        }
        panic!(
            "{shown} holds something else. Users and stored data see it: docs/guide/development.md says when it may change \
             ({WRITE}=1 writes it).\n{}",
            difference(&held.unwrap_or_default(), found)
        );
    }

    /// The same of bytes, part by part.
    #[track_caller]
    pub fn check_parts(&self, parts: &[Part]) {
        self.check(&dump(parts));
    }

    /// The same of a saved device.
    #[track_caller]
    pub fn check_state(&self, SavedState { kind, version, body }: &SavedState) {
        self.check_parts(&[(format!("{kind} version {version}"), body.clone())]);
    }

    #[track_caller]
    pub fn text(&self) -> String {
        let shown = self.path.display();
        std::fs::read_to_string(&self.path).unwrap_or_else(|error| panic!("{shown}: {error}"))
    }

    #[track_caller]
    pub fn parts(&self) -> Vec<Part> {
        parse(&self.text())
            .unwrap_or_else(|line| panic!("{}: {line:?} is no line of a dump", self.path.display()))
    }

    /// The bytes of the part that begins with `title`.
    #[track_caller]
    pub fn part(&self, title: &str) -> Vec<u8> {
        let found = self.parts().into_iter().find(|(name, _)| name.starts_with(title));
        found.unwrap_or_else(|| panic!("{} has no part {title:?}", self.path.display())).1
    }

    /// The saved device that it holds.
    #[track_caller]
    pub fn state(&self) -> SavedState {
        let (title, body) = self.parts().into_iter().next().expect("a dump has a part");
        let (kind, version) = title.split_once(" version ").expect("a state has a kind and a version");
        SavedState { kind: kind.to_owned(), version: version.parse().expect("a version is a number"), body }
    }
}

fn difference(held: &str, found: &str) -> String {
    let diff = TextDiff::from_lines(held, found)
        .unified_diff()
        .context_radius(4)
        .header("golden", "found")
        .to_string();
    let lines: Vec<&str> = diff.lines().collect();
    match lines.len().checked_sub(MOST) {
        None | Some(0) => diff,
        Some(more) => format!("{}\n... and {more} lines more", lines[..MOST].join("\n")),
    }
}

/// Bytes as `hexdump -C` shows them, each part below its title.
pub fn dump(parts: &[Part]) -> String {
    let mut text = String::new();
    for (title, bytes) in parts {
        let _ = writeln!(text, "== {title}");
        let (mut before, mut left_out) = (None, false);
        for (at, line) in (0..).step_by(LINE).zip(bytes.chunks(LINE)) {
            if before == Some(line) {
                if !std::mem::replace(&mut left_out, true) {
                    text.push_str("*\n");
                }
                continue;
            }
            (before, left_out) = (Some(line), false);
            let hex: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
            let shown =
                |byte: &u8| if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '.' };
            let ascii: String = line.iter().map(shown).collect();
            let _ = writeln!(text, "{at:08x}  {:<47}  |{ascii}|", hex.join(" "));
        }
        let _ = writeln!(text, "{:08x}", bytes.len());
    }
    text
}

/// The parts of a dump; on an error the line that is none.
fn parse(text: &str) -> Result<Vec<Part>, String> {
    let mut parts: Vec<Part> = Vec::new();
    for line in text.lines() {
        let wrong = || line.to_owned();
        if let Some(title) = line.strip_prefix("== ") {
            parts.push((title.to_owned(), Vec::new()));
            continue;
        }
        let (_, bytes) = parts.last_mut().ok_or_else(wrong)?;
        if line == "*" {
            continue;
        }
        let (at, rest) = line.split_once("  ").unwrap_or((line, ""));
        let at = usize::from_str_radix(at, 16).map_err(|_| wrong())?;
        // What was left out is the line before it, again and again.
        while bytes.len() < at {
            let from = bytes.len().checked_sub(LINE).ok_or_else(wrong)?;
            bytes.extend_from_within(from..(from + LINE.min(at - bytes.len())));
        }
        let hex = rest.split('|').next().unwrap_or_default();
        for byte in hex.split_whitespace() {
            bytes.push(u8::from_str_radix(byte, 16).map_err(|_| wrong())?);
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dumped_is_read() {
        let bytes: Vec<u8> = [vec![7; 70], (0..=255).collect(), vec![0; 48]].concat();
        for len in [0, 1, 15, 16, 17, 47, 48, 64, 65, 70, 100, bytes.len()] {
            let parts =
                vec![("one".to_owned(), bytes[..len].to_vec()), ("two, 3 files".to_owned(), vec![0xff])];
            assert_eq!(parse(&dump(&parts)), Ok(parts), "{len} bytes");
        }
        assert_eq!(
            dump(&[("x".into(), b"AB\0".to_vec())]).lines().nth(1),
            Some(&*format!("00000000  41 42 00{:40} |AB.|", ""))
        );
        assert!(parse("00000000  00\n").is_err() && parse("== x\n00000000  0g\n").is_err());
    }

    #[test]
    fn what_differs_is_shown() {
        let shown = difference("a line\nthat stays\n", "a line\nthat goes\n");
        assert!(shown.contains("\n a line\n-that stays\n+that goes\n"), "{shown}");
        let many = |word: &str| format!("{word}\n").repeat(1000);
        assert_eq!(difference(&many("one"), &many("other")).lines().count(), MOST + 1);
        assert!(golden!("x").path.ends_with("crates/testkit/src/golden/x"));
    }
}
