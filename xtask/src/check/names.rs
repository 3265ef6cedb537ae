//! Names that say nothing.

use anyhow::Result;

use super::Finding;
use crate::source::Source;
use crate::tree::Tree;

const RULE: &str = "names";
const EMPTY: [&str; 9] =
    ["util", "utils", "utility", "utilities", "common", "helper", "helpers", "manager", "managers"];
const KINDS: [&str; 8] = ["fn", "struct", "enum", "trait", "mod", "type", "union", "macro_rules!"];

pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for path in &tree.paths {
        let stem = path.rsplit('/').next().unwrap_or(path);
        let stem = stem.split('.').next().unwrap_or(stem);
        if let Some(word) = empty_word(stem) {
            let what = format!("a file or folder called {word}: name it after what it holds");
            findings.push(Finding { path: path.clone(), line: 0, rule: RULE, what });
        }
    }
    for source in &tree.rust {
        for line in source.lines() {
            for (kind, name) in declared(line.code) {
                let mut found = |what: String| {
                    findings.push(Finding { path: source.path.clone(), line: line.number, rule: RULE, what });
                };
                if let Some(word) = empty_word(name) {
                    found(format!("`{kind} {name}`: {word} says nothing, name it after what it does"));
                }
                if kind == "fn" && name.starts_with("get_") && !of_specification(source, name) {
                    found(format!("`fn {name}`: call it `{}`", name.trim_start_matches("get_")));
                }
            }
        }
    }
    Ok(findings)
}

/// A specification's own word, kept as it is: its constant stands in the same file (GET_VRING_BASE).
fn of_specification(source: &Source, name: &str) -> bool {
    source.text.contains(&name.to_uppercase())
}

/// What a line declares: kind and name.
fn declared(code: &str) -> Vec<(&'static str, &str)> {
    let mut found = Vec::new();
    let mut words = code.split(|c: char| c.is_whitespace() || c == '(' || c == '{').filter(|w| !w.is_empty());
    while let Some(word) = words.next() {
        if let Some(kind) = KINDS.iter().find(|kind| **kind == word)
            && let Some(name) = words.next()
        {
            let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
            found.push((*kind, &name[..end]));
        }
    }
    found
}

/// The empty word in a name, if it has one.
fn empty_word(name: &str) -> Option<String> {
    let mut words = vec![String::new()];
    let mut last_lower = false;
    for c in name.chars() {
        if c == '_' || c == '-' || (c.is_uppercase() && last_lower) {
            words.push(String::new());
        }
        if c != '_'
            && c != '-'
            && let Some(word) = words.last_mut()
        {
            word.extend(c.to_lowercase());
        }
        last_lower = c.is_lowercase();
    }
    words.into_iter().find(|word| EMPTY.contains(&word.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::sample;

    fn count(path: &str, text: &str) -> usize {
        check(&sample(path, text)).unwrap().len()
    }

    #[test]
    fn empty_names_are_found() {
        assert_eq!(count("crates/a/src/util.rs", ""), 1);
        assert_eq!(count("crates/common/src/a.rs", ""), 0, "the folder itself is a path of its own");
        assert_eq!(count("a.rs", "pub struct DiskManager;"), 1);
        assert_eq!(count("a.rs", "mod ring_helpers;"), 1);
        assert_eq!(count("a.rs", "pub(crate) async fn get_size(&self) -> u64 {"), 1);
    }

    #[test]
    fn names_that_say_something_pass() {
        assert_eq!(count("a.rs", "fn budget_left() {}\nstruct Commonplace;\nlet manager = 1;"), 0);
        assert_eq!(count("a.rs", "// GET_CONFIG\nfn get_config() {}"), 0, "the specification's word");
    }
}
