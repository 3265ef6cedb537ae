//! One Rust source, with its code told from its comments and strings.

use std::cell::OnceCell;

use anyhow::Result;

use crate::outline::{Module, outline};

/// A source file. `code` has the same lines as `text`, with comments and the inside of strings blanked.
#[derive(Debug)]
pub struct Source {
    /// Where.
    pub path: String,
    /// As it is.
    pub text: String,
    code: String,
    /// For each line, whether it belongs to a `#[cfg(test)]` module written out in this file.
    tests: Vec<bool>,
    outline: OnceCell<Vec<Module>>,
}

/// One line of a source.
#[derive(Debug, Clone, Copy)]
pub struct Line<'a> {
    /// From 1.
    pub number: usize,
    /// Code only.
    pub code: &'a str,
    /// Whether it is test code.
    pub test: bool,
}

impl Source {
    /// Reads `text`.
    pub fn new(path: String, text: String) -> Self {
        let code = blank(&text);
        let tests = test_lines(&code);
        Source { path, text, code, tests, outline: OnceCell::new() }
    }

    /// Its modules, read when first asked for.
    pub fn outline(&self) -> Result<&[Module]> {
        if let Some(modules) = self.outline.get() {
            return Ok(modules);
        }
        let modules = outline(&self.text)?;
        Ok(self.outline.get_or_init(|| modules))
    }

    /// Its lines of code.
    pub fn lines(&self) -> impl Iterator<Item = Line<'_>> {
        let whole = self.is_test_file();
        self.code.lines().zip(&self.tests).enumerate().map(move |(at, (code, test))| Line {
            number: at + 1,
            code,
            test: whole || *test,
        })
    }

    /// Whether all of it is test code.
    pub fn is_test_file(&self) -> bool {
        self.path.contains("/tests/")
            || self.path.contains("/benches/")
            || self.path.contains("/examples/")
            || self.path.ends_with("_tests.rs")
            || self.path.ends_with("/tests.rs")
    }

    /// Whether `note` stands on line `number` or among the comments directly above it.
    pub fn noted(&self, number: usize, note: &str) -> bool {
        let lines: Vec<&str> = self.text.lines().collect();
        let on = lines.get(number - 1).is_some_and(|line| line.contains(note));
        let above = lines[..(number - 1).min(lines.len())].iter().rev();
        on || above
            .map(|line| line.trim_start())
            .take_while(|line| line.starts_with("//") || line.starts_with("#["))
            .any(|line| line.contains(note))
    }
}

/// Whether `word` stands in `code` by itself, not as a part of a longer name.
pub fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word).any(|(at, _)| {
        let part = |c: char| c.is_alphanumeric() || c == '_';
        !code[..at].ends_with(part) && !code[at + word.len()..].starts_with(part)
    })
}

fn blank(text: &str) -> String {
    let bytes: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            '/' if bytes.get(at + 1) == Some(&'/') => until(&bytes, at, |rest| rest[0] == '\n'),
            '/' if bytes.get(at + 1) == Some(&'*') => comment_end(&bytes, at),
            '"' => string_end(&bytes, at),
            'r' if raw_hashes(&bytes, at).is_some() => raw_end(&bytes, at),
            '\'' => char_end(&bytes, at),
            c => {
                out.push(c);
                at += 1;
                // A name is taken whole, so that the `r` at its end is not taken for the start of a string.
                while (c.is_alphanumeric() || c == '_')
                    && bytes.get(at).is_some_and(|c| c.is_alphanumeric() || *c == '_')
                {
                    out.push(bytes[at]);
                    at += 1;
                }
                continue;
            }
        };
        out.extend(bytes[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    out
}

fn until(bytes: &[char], from: usize, stop: impl Fn(&[char]) -> bool) -> usize {
    (from..bytes.len()).find(|at| stop(&bytes[*at..])).unwrap_or(bytes.len())
}

fn comment_end(bytes: &[char], from: usize) -> usize {
    let (mut depth, mut at) = (0usize, from);
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => {
                (depth, at) = (depth - 1, at + 2);
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    at.min(bytes.len())
}

fn string_end(bytes: &[char], from: usize) -> usize {
    let mut at = from + 1;
    while at < bytes.len() {
        match bytes[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

fn raw_hashes(bytes: &[char], at: usize) -> Option<usize> {
    let hashes = bytes[at + 1..].iter().take_while(|c| **c == '#').count();
    (bytes.get(at + 1 + hashes) == Some(&'"')).then_some(hashes)
}

fn raw_end(bytes: &[char], from: usize) -> usize {
    let hashes = raw_hashes(bytes, from).unwrap_or(0);
    let ends = |rest: &[char]| {
        rest[0] == '"' && rest[1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes
    };
    (until(bytes, from + hashes + 2, ends) + 1 + hashes).min(bytes.len())
}

/// A character, or a lifetime: then only its quote.
fn char_end(bytes: &[char], from: usize) -> usize {
    match (bytes.get(from + 1), bytes.get(from + 2)) {
        (Some('\\'), _) => (until(bytes, from + 3, |rest| rest[0] == '\'') + 1).min(bytes.len()),
        (Some(_), Some('\'')) => from + 3,
        _ => from + 1,
    }
}

/// Which lines of `code` lie in a module marked `#[cfg(test)]`.
fn test_lines(code: &str) -> Vec<bool> {
    let (mut marks, mut armed, mut depth) = (Vec::new(), false, 0i64);
    for line in code.lines() {
        let inside = depth > 0;
        if !inside && line.trim_start().starts_with("#[cfg(test)]") {
            armed = true;
        }
        let mut mine = inside || armed;
        if inside || (armed && line.contains('{')) {
            armed = false;
            depth += line.matches('{').count() as i64 - line.matches('}').count() as i64;
            mine = true;
        } else if armed && line.trim_end().ends_with(';') {
            armed = false;
        }
        marks.push(mine);
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_no_code() {
        let text = "let a = \"unsafe\"; // unsafe\n/* unsafe /* unsafe */ unsafe */ let b = r#\"unsafe\"#;\nlet c = '\"'; unsafe {}";
        let source = Source::new("a.rs".into(), text.into());
        let found: Vec<_> = source.lines().filter(|l| has_word(l.code, "unsafe")).map(|l| l.number).collect();
        assert_eq!(found, [3]);
    }

    #[test]
    fn lifetimes_are_not_characters() {
        let source = Source::new("a.rs".into(), "fn a<'a>(b: &'a str) { unsafe_code; unsafe {} }".into());
        assert!(source.lines().all(|l| has_word(l.code, "unsafe")));
        assert!(!has_word("unsafe_code", "unsafe"));
    }

    #[test]
    fn test_modules_are_told_from_code() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n fn b() {}\n}\nfn c() {}\n#[cfg(test)]\nmod more;\nfn d() {}";
        let tests: Vec<_> = Source::new("a.rs".into(), text.into()).lines().map(|l| l.test).collect();
        assert_eq!(tests, [false, true, true, true, true, false, true, true, false]);
    }
}
