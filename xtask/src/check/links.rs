//! Links in Markdown: to files that exist, to headings that exist.

use std::collections::BTreeSet;

use anyhow::Result;

use super::Finding;
use crate::tree::{Page, Tree};

pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for page in &tree.docs {
        for (line, target) in links(&page.text) {
            if let Some(what) = broken(tree, page, target) {
                findings.push(Finding { path: page.path.clone(), line, rule: "links", what });
            }
        }
    }
    Ok(findings)
}

/// What is wrong with a link, if anything. Links to other places are nobody's business here.
fn broken(tree: &Tree, page: &Page, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { page.path.clone() } else { beside(&page.path, file) };
    if !path.is_empty() && !tree.paths.contains(&path) && path != page.path {
        return Some(format!(
            "{target} leads to {path}, which does not exist: correct the link or write the page"
        ));
    }
    let page = tree.docs.iter().find(|other| other.path == path)?;
    (!anchor.is_empty() && !headings(&page.text).contains(anchor))
        .then(|| format!("{target}: {path} has no heading with that anchor"))
}

/// `file` as seen from `page`, with its `..` taken up.
fn beside(page: &str, file: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in file.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// The lines of a page that are not inside a fence.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut fenced = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            return None;
        }
        (!fenced).then_some((at + 1, line))
    })
}

fn links(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        let mut rest = line;
        while let Some(at) = rest.find("](") {
            // An odd number of back quotes before it: code, not a link.
            let code = line[..line.len() - rest.len() + at].matches('`').count() % 2 == 1;
            rest = &rest[at + 2..];
            let Some(end) = rest.find(')') else { break };
            let target = rest[..end].split_whitespace().next().unwrap_or_default();
            if !code && !target.is_empty() {
                found.push((number, target.trim_matches(['<', '>'])));
            }
        }
        // Reference definitions.
        if let Some((label, target)) = line.split_once("]: ")
            && label.starts_with('[')
            && !label.starts_with("[^")
        {
            found.extend(target.split_whitespace().next().map(|target| (number, target)));
        }
    }
    found
}

/// The anchors that a page's headings get where it is shown: lower case, spaces to dashes, marks left out.
fn headings(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    for (_, line) in prose(text).filter(|(_, line)| line.starts_with('#')) {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let more = (1..).map(|n| format!("{anchor}-{n}"));
        if let Some(free) = std::iter::once(anchor.clone()).chain(more).find(|a| !anchors.contains(a)) {
            anchors.insert(free);
        }
    }
    anchors
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> usize {
        let page = |path: &str, text: &str| Page { path: path.into(), text: text.into() };
        let docs =
            vec![page("docs/a.md", text), page("docs/guide/b.md", "# Two words, `code`\n# Same\n# Same")];
        let paths = ["docs", "docs/a.md", "docs/guide", "docs/guide/b.md"].map(str::to_owned).to_vec();
        check(&Tree { docs, paths, ..Tree::default() }).unwrap().len()
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        assert_eq!(count("[a](missing.md)"), 1);
        assert_eq!(count("[a](guide/b.md#nowhere) and [b](../docs/nope.md)"), 2);
        assert_eq!(count("[a]: gone.md"), 1);
        assert_eq!(count("[a](#nowhere)"), 1);
    }

    #[test]
    fn links_that_lead_somewhere_pass() {
        assert_eq!(
            count("[a](guide/b.md) [b](guide/b.md#two-words-code) [c](guide/) [d](guide/b.md#same-1)"),
            0
        );
        assert_eq!(
            count("# Here\n[a](#here) [b](https://example.invalid/x) `[c](no.md)`\n```\n[d](no.md)\n```"),
            0
        );
    }
}
