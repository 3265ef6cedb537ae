//! What is wrong with a configuration: where, why, and what to do.

use std::fmt;
use std::path::{Path, PathBuf};

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Line, from 1; 0 if it belongs to none.
    pub line: usize,
    pub reason: String,
    pub remedy: String,
}

/// Everything that is wrong with a configuration, in the order of its lines. Nothing of it has been applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems {
    pub file: PathBuf,
    /// Never empty.
    pub list: Vec<Problem>,
}

impl Problems {
    /// Those of `file`, ordered.
    pub fn new(file: &Path, mut list: Vec<Problem>) -> Self {
        list.sort();
        list.dedup();
        Problems { file: file.to_owned(), list }
    }
}

impl fmt::Display for Problems {
    /// `FILE:LINE: reason`, and the remedy in a line of its own.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Problem { line, reason, remedy }) in self.list.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            write!(f, "{}", self.file.display())?;
            if *line > 0 {
                write!(f, ":{line}")?;
            }
            write!(f, ": {reason}\n  hint: {remedy}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}
