//! The rules: each a function from the tree to what breaks it.

mod circles;
mod embed;
mod homonyms;
mod layers;
mod length;
mod links;
mod names;
mod path;
mod sizes;
mod unsafety;

use anyhow::Result;

use crate::finding::{Finding, Standing};
use crate::tree::Tree;

/// Looks at the tree.
type Find<T> = fn(&Tree) -> Result<Vec<T>>;

/// One rule.
pub struct Rule {
    /// As on the command line.
    pub name: &'static str,
    /// In one line.
    pub what: &'static str,
    /// Finds what breaks it.
    pub run: Find<Finding>,
    /// Finds what breaks it unless its list has it.
    pub standing: Option<Find<Standing>>,
}

impl Rule {
    const fn new(name: &'static str, what: &'static str, run: Find<Finding>) -> Self {
        Rule { name, what, run, standing: None }
    }

    const fn listed(self, standing: Find<Standing>) -> Self {
        Rule { standing: Some(standing), ..self }
    }
}

/// Of a rule for which everything may be listed.
fn nothing(_: &Tree) -> Result<Vec<Finding>> {
    Ok(Vec::new())
}

/// All rules, cheapest first.
pub const RULES: &[Rule] = &[
    Rule::new("layers", "a crate depends only on those before it", layers::check),
    Rule::new("embed", "a program that embeds devices builds no async runtime", embed::check),
    Rule::new("unsafe", "unsafe code only where it is allowed, with a reason", unsafety::check),
    Rule::new("path", "invariant 6, no locks on the data path, saved types are versioned", path::check),
    Rule::new(
        "names",
        "no name that says nothing, no type name in several crates without a reason",
        names::check,
    )
    .listed(homonyms::standing),
    Rule::new("length", "no file over 800 lines without a reason", length::check),
    Rule::new("sizes", "no crate over 8,000 lines of its own without a reason", nothing)
        .listed(sizes::standing),
    Rule::new("circles", "no circle between the files of a crate without a reason", circles::check)
        .listed(circles::standing),
    Rule::new("links", "every relative link in Markdown leads somewhere", links::check),
];

/// A tree of one source, for the rules' tests.
#[cfg(test)]
pub fn sample(path: &str, text: &str) -> Tree {
    let source = crate::source::Source::new(path.to_owned(), text.to_owned());
    Tree { rust: vec![source], paths: vec![path.to_owned()], ..Tree::default() }
}

/// A tree of several sources, of which `root` is the first of a library.
#[cfg(test)]
pub fn samples(root: &str, files: &[(&str, &str)]) -> Tree {
    let source = |(path, text): &(&str, &str)| crate::source::Source::new((*path).into(), (*text).into());
    let target = serde_json::json!({ "kind": ["lib"], "src_path": format!("/w/{root}") });
    let packages = serde_json::json!({ "workspace_root": "/w", "packages": [{ "targets": [target] }] });
    Tree { rust: files.iter().map(source).collect(), packages, ..Tree::default() }
}
