//! Lists of what stands in the tree although a rule is against it, each entry with its reason: `xtask/reasons/RULE.txt`.
//!
//! ```text
//!   KEY = REASON          the key as the rule gives it
//!   KEY = to be mended    allowed and counted, until somebody mends it or finds a reason
//! ```
//!
//! A finding that no entry has the key of fails, and so does an entry whose key no finding has: a list only shrinks, unless somebody
//! writes it anew on purpose.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};

use crate::finding::{Finding, Standing};
use crate::tree::{Page, REASONS, Tree};

/// The reason of an entry that has none.
const OPEN: &str = "to be mended";

/// What a rule comes to with its list.
#[derive(Debug, Default)]
pub struct Judged {
    /// What is not in the list, and what is in it for nothing.
    pub findings: Vec<Finding>,
    /// Entries with a reason.
    pub reasoned: usize,
    /// Entries that are to be mended.
    pub open: usize,
}

struct Entry<'a> {
    line: usize,
    key: &'a str,
    reason: &'a str,
}

fn path(rule: &str) -> String {
    format!("{REASONS}{rule}.txt")
}

fn page<'a>(tree: &'a Tree, rule: &str) -> Option<&'a Page> {
    let path = path(rule);
    tree.reasons.iter().find(|page| page.path == path)
}

fn entries(page: Option<&Page>) -> Vec<Entry<'_>> {
    let lines = page.map_or("", |page| page.text.as_str()).lines().enumerate();
    lines
        .filter(|(_, line)| !line.trim().is_empty() && !line.starts_with('#'))
        .map(|(at, line)| {
            let (key, reason) = line.split_once(" = ").unwrap_or((line, ""));
            Entry { line: at + 1, key: key.trim(), reason: reason.trim() }
        })
        .collect()
}

/// Holds what stands against the list of `rule`.
pub fn judge(tree: &Tree, rule: &'static str, standing: &[Standing]) -> Judged {
    let entries = entries(page(tree, rule));
    let mut judged = Judged::default();
    for one in standing.iter().filter(|one| !entries.iter().any(|entry| entry.key == one.key)) {
        let what = format!("{} Or list it: `{} = REASON` in {}", one.what, one.key, path(rule));
        judged.findings.push(Finding { path: one.path.clone(), line: one.line, rule, what });
    }
    for (at, entry) in entries.iter().enumerate() {
        let what = match () {
            () if !standing.iter().any(|one| one.key == entry.key) => {
                "explains nothing (any more): take it out, or `cargo xtask check --write`"
            }
            () if entry.reason.is_empty() => "has no reason: `KEY = REASON`",
            () if entries[..at].iter().any(|other| other.key == entry.key) => "stands here twice",
            () if entry.reason == OPEN => {
                judged.open += 1;
                continue;
            }
            () => {
                judged.reasoned += 1;
                continue;
            }
        };
        let what = format!("`{}` {what}", entry.key);
        judged.findings.push(Finding { path: path(rule), line: entry.line, rule, what });
    }
    judged
}

/// The list of `rule` for what stands today: with the reasons that it has, and [`OPEN`] for what is new. A key that has changed
/// keeps its reason if it is the only one about the same thing.
pub fn renewed(tree: &Tree, rule: &str, standing: &[Standing]) -> String {
    let entries = entries(page(tree, rule));
    let about = |key: &str| key.split_once(':').map_or(key, |(about, _)| about).to_owned();
    let alone = |key: &str| {
        let mut same = entries.iter().filter(|entry| about(entry.key) == about(key));
        let only_new = standing.iter().filter(|one| about(&one.key) == about(key)).count() == 1;
        same.next().filter(|_| only_new && same.next().is_none())
    };
    let mut lines = BTreeMap::new();
    for one in standing {
        let entry = entries.iter().find(|entry| entry.key == one.key).or_else(|| alone(&one.key));
        let reason = entry.map(|entry| entry.reason).filter(|reason| !reason.is_empty());
        lines.insert(&one.key, reason.unwrap_or(OPEN));
    }
    let mut text = format!(
        "# What stands against the rule `{rule}` of `cargo xtask check`: KEY = REASON. This list only shrinks.\n\
         # `cargo xtask check --write {rule}` writes it for the tree as it is and keeps the reasons.\n"
    );
    for (key, reason) in lines {
        let _ = writeln!(text, "{key} = {reason}");
    }
    text
}

/// Writes the list of `rule` into the workspace at `root`.
pub fn write(root: &Path, tree: &Tree, rule: &str, standing: &[Standing]) -> Result<()> {
    let path = root.join(path(rule));
    std::fs::create_dir_all(root.join(REASONS))?;
    std::fs::write(&path, renewed(tree, rule, standing)).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(key: &str) -> Standing {
        Standing { key: key.into(), path: "crates/a/src/a.rs".into(), line: 3, what: "Wrong.".into() }
    }

    fn tree(list: &str) -> Tree {
        let page = Page { path: path("names"), text: list.into() };
        Tree { reasons: vec![page], ..Tree::default() }
    }

    fn findings(list: &str, keys: &[&str]) -> Vec<String> {
        let standing: Vec<_> = keys.iter().map(|key| standing(key)).collect();
        judge(&tree(list), "names", &standing).findings.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn what_is_listed_passes_and_is_counted() {
        let list = "# head\nPlan: a b = one word in both specifications\nPort: a c = to be mended\n";
        let judged = judge(&tree(list), "names", &[standing("Plan: a b"), standing("Port: a c")]);
        assert_eq!(judged.findings, []);
        assert_eq!((judged.reasoned, judged.open), (1, 1));
    }

    #[test]
    fn what_is_not_listed_fails() {
        assert_eq!(findings("", &["Plan: a b"]).len(), 1);
        assert_eq!(
            findings("Plan: a b = reason", &["Plan: a b c"]).len(),
            2,
            "a third crate is another finding"
        );
        let none = judge(&Tree::default(), "names", &[standing("Plan: a b")]);
        assert_eq!(none.findings.len(), 1, "without a list");
    }

    #[test]
    fn an_entry_must_explain_something() {
        assert!(
            findings("# head\nPlan: a b = reason", &[])[0].starts_with("xtask/reasons/names.txt:2: names: ")
        );
        assert_eq!(findings("Plan: a b", &["Plan: a b"]).len(), 1, "no reason");
        assert_eq!(findings("Plan: a b = x\nPlan: a b = y", &["Plan: a b"]).len(), 1, "twice");
    }

    #[test]
    fn a_list_written_anew_keeps_its_reasons() {
        let list = "Gone: a b = reason\nPlan: a b = the field's word\nPort: a c = to be mended\n";
        let standing = ["Plan: a d", "Port: a c", "New: a b"].map(standing);
        let text = renewed(&tree(list), "names", &standing);
        let lines: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
        assert_eq!(
            lines,
            ["New: a b = to be mended", "Plan: a d = the field's word", "Port: a c = to be mended"]
        );
        assert_eq!(judge(&tree(&text), "names", &standing).findings, []);
    }

    #[test]
    fn a_reason_is_not_given_to_another_circle() {
        let list = "x/src: a.rs b.rs = reason\nx/src: c.rs d.rs = other\n";
        let text = renewed(&tree(list), "names", &[standing("x/src: a.rs e.rs")]);
        assert!(text.ends_with("x/src: a.rs e.rs = to be mended\n"));
    }
}
