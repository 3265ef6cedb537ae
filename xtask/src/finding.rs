//! What breaks a rule.

use std::fmt;

/// One thing that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// File.
    pub path: String,
    /// Line, from 1; zero if it is about the whole file.
    pub line: usize,
    /// Which rule, in short.
    pub rule: &'static str,
    /// What is wrong, and what to do.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}: {}", self.path, self.line.max(1), self.rule, self.what)
    }
}

/// Something against a rule that a list may allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// What it is called in the list. The part before the first `:` is what it is about.
    pub key: String,
    /// File.
    pub path: String,
    /// Line, from 1; zero if it is about the whole file.
    pub line: usize,
    /// What is wrong, and what to do.
    pub what: String,
}
