//! The rules: each a function from the tree to what breaks it.

mod embed;
mod layers;
mod length;
mod links;
mod names;
mod path;
mod unsafety;

use std::fmt;

use anyhow::Result;

use crate::tree::Tree;

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

/// One rule.
pub struct Rule {
    /// As on the command line.
    pub name: &'static str,
    /// In one line.
    pub what: &'static str,
    /// Finds what breaks it.
    pub run: fn(&Tree) -> Result<Vec<Finding>>,
}

/// All rules, cheapest first.
pub const RULES: &[Rule] = &[
    Rule { name: "layers", what: "a crate depends only on those before it", run: layers::check },
    Rule { name: "embed", what: "a program that embeds devices builds no async runtime", run: embed::check },
    Rule {
        name: "unsafe",
        what: "unsafe code only where the house allows it, with a reason",
        run: unsafety::check,
    },
    Rule {
        name: "path",
        what: "law 6, no locks on the data path, saved types are versioned",
        run: path::check,
    },
    Rule { name: "names", what: "no name that says nothing", run: names::check },
    Rule { name: "length", what: "no file over 800 lines without a reason", run: length::check },
    Rule { name: "links", what: "every relative link in Markdown leads somewhere", run: links::check },
];

/// A tree of one source, for the rules' tests.
#[cfg(test)]
pub fn sample(path: &str, text: &str) -> Tree {
    let source = crate::source::Source::new(path.to_owned(), text.to_owned());
    Tree { rust: vec![source], paths: vec![path.to_owned()], ..Tree::default() }
}
