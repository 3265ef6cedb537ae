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
    /// What was being served and is not any more: it could be changed neither forth nor back.
    pub lost: Vec<String>,
}

impl Problems {
    /// Those of `file`, ordered.
    pub fn new(file: &Path, mut list: Vec<Problem>) -> Self {
        list.sort();
        list.dedup();
        Problems { file: file.to_owned(), list, lost: Vec::new() }
    }

    /// What to do after a reload that had them.
    pub fn after_reload(&self) -> String {
        let served = match self.lost.as_slice() {
            [] => "what was being served is still served".to_owned(),
            lost => {
                format!("{} could not be served as before either, the rest is still served", lost.join(", "))
            }
        };
        format!("correct the lines named, then reload again; {served}")
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
