//! Circles between the files of a crate: a file that uses another one which, by however many others, uses it.
//!
//! Whoever reads one file of a circle must read all of them. Parent and child modules are left out: a parent declares its children,
//! and they say `super`. A circle that is one concept in several files says so in the first lines of one of them, and names the
//! others; the rest stands in the list.

mod modules;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use anyhow::Result;

use super::Finding;
use crate::finding::Standing;
use crate::tree::Tree;
use modules::{Crate, Edge};

const RULE: &str = "circles";
/// `// CIRCLE: b.rs, c.rs: why they are one.`
const NOTE: &str = "CIRCLE: ";
/// The reason stands among the first lines, where a reader begins.
const FIRST: usize = 15;

/// A circle of files.
struct Circle {
    /// The folder of the crate's sources.
    folder: String,
    /// The files, in that folder.
    files: BTreeSet<String>,
    /// One way round, for the reader.
    way: String,
}

/// Circles for which no file gives a reason.
pub fn standing(tree: &Tree) -> Result<Vec<Standing>> {
    let (circles, notes) = (circles(tree)?, notes(tree));
    let reasoned = |circle: &Circle| notes.iter().any(|note| note.explains(circle));
    Ok(circles
        .into_iter()
        .filter(|circle| !reasoned(circle))
        .map(|circle| {
            let files: Vec<&str> = circle.files.iter().map(String::as_str).collect();
            Standing {
                key: format!("{}: {}", circle.folder, files.join(" ")),
                path: format!("{}/{}", circle.folder, files[0]),
                line: 0,
                what: format!(
                    "{} files in a circle: {}. Move what they share into a file of its own; or, if they are one concept, name the others in the first {FIRST} lines of one of them: `// {NOTE}b.rs, c.rs: reason`.",
                    files.len(),
                    circle.way
                ),
            }
        })
        .collect())
}

/// Notes that explain no circle.
pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let circles = circles(tree)?;
    let idle = notes(tree).into_iter().filter(|note| !circles.iter().any(|circle| note.explains(circle)));
    Ok(idle
        .map(|note| Finding {
            path: note.path,
            line: note.line,
            rule: RULE,
            what: "explains no circle: the files that it names, with this one, are none (any more), or it gives no reason".into(),
        })
        .collect())
}

/// A reason in a file.
struct Note {
    path: String,
    line: usize,
    others: Vec<String>,
    reason: String,
}

impl Note {
    fn explains(&self, circle: &Circle) -> bool {
        let Some(own) = self.path.strip_prefix(&circle.folder).and_then(|own| own.strip_prefix('/')) else {
            return false;
        };
        let named: BTreeSet<&str> = self.others.iter().map(String::as_str).chain([own]).collect();
        !self.reason.is_empty() && circle.files.iter().map(String::as_str).eq(named)
    }
}

fn notes(tree: &Tree) -> Vec<Note> {
    let mut notes = Vec::new();
    for source in &tree.rust {
        for (at, line) in source.text.lines().take(FIRST).enumerate() {
            let Some(note) = line.trim_start().strip_prefix("// ").and_then(|note| note.strip_prefix(NOTE))
            else {
                continue;
            };
            let (others, reason) = note.split_once(": ").unwrap_or((note, ""));
            notes.push(Note {
                path: source.path.clone(),
                line: at + 1,
                others: others.split(", ").map(str::to_owned).collect(),
                reason: reason.trim().to_owned(),
            });
        }
    }
    notes
}

fn circles(tree: &Tree) -> Result<Vec<Circle>> {
    let mut found = Vec::new();
    for root in &tree.roots() {
        let of_crate = Crate::read(tree, root)?;
        let edges = of_crate.edges();
        let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder);
        for members in strong(of_crate.files.len(), &edges) {
            let name = |file: usize| {
                let path = &of_crate.files[file].path;
                path.strip_prefix(folder).map_or(path.as_str(), |below| below.trim_start_matches('/'))
            };
            let way = shortest(&members, &edges);
            let steps: Vec<String> = way
                .iter()
                .map(|step| format!("{}:{} uses {}", name(step.0), edges[step].line, edges[step].path))
                .collect();
            found.push(Circle {
                folder: folder.to_owned(),
                files: members.iter().map(|file| name(*file).to_owned()).collect(),
                way: steps.join(", "),
            });
        }
    }
    Ok(found)
}

type Edges = BTreeMap<(usize, usize), Edge>;

/// The files after `from` on the way along `edges`.
fn next(edges: &Edges, from: usize) -> impl Iterator<Item = usize> {
    edges.range((from, 0)..(from + 1, 0)).map(|((_, to), _)| *to)
}

/// Sets of files that can all be reached from each other: the strongly connected components of more than one file.
fn strong(count: usize, edges: &Edges) -> Vec<Vec<usize>> {
    let reach: Vec<BTreeSet<usize>> = (0..count)
        .map(|from| {
            let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
            while let Some(at) = open.pop() {
                open.extend(next(edges, at).filter(|to| reached.insert(*to)));
            }
            reached
        })
        .collect();
    let mut found: Vec<Vec<usize>> = Vec::new();
    for file in 0..count {
        if reach[file].contains(&file) && !found.iter().any(|members| members.contains(&file)) {
            found.push(reach[file].iter().copied().filter(|other| reach[*other].contains(&file)).collect());
        }
    }
    found
}

/// The edges of a shortest way round within `members`.
fn shortest(members: &[usize], edges: &Edges) -> Vec<(usize, usize)> {
    let round = |start: usize| {
        let (mut before, mut open) = (BTreeMap::new(), VecDeque::from([start]));
        while let Some(at) = open.pop_front() {
            for to in next(edges, at).filter(|to| members.contains(to)) {
                if to == start {
                    let (mut way, mut end) = (vec![(at, start)], at);
                    while let Some(from) = before.get(&end).copied() {
                        way.insert(0, (from, end));
                        end = from;
                    }
                    return Some(way);
                }
                if let std::collections::btree_map::Entry::Vacant(entry) = before.entry(to) {
                    entry.insert(at);
                    open.push_back(to);
                }
            }
        }
        None
    };
    members.iter().filter_map(|start| round(*start)).min_by_key(Vec::len).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::samples;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let files: Vec<_> =
            files.iter().map(|(path, text)| (format!("crates/x/src/{path}"), *text)).collect();
        let files: Vec<_> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let standing = standing(&samples("crates/x/src/lib.rs", &files)).unwrap();
        standing.into_iter().map(|one| one.key).collect()
    }

    #[test]
    fn a_circle_of_two_and_one_of_three() {
        let two =
            [("lib.rs", "mod a;\nmod b;"), ("a.rs", "use crate::b::B;"), ("b.rs", "fn c(_: super::a::A) {}")];
        assert_eq!(found(&two), ["crates/x/src: a.rs b.rs"]);
        let three = [
            ("lib.rs", "mod a;\nmod b;\nmod c;"),
            ("a.rs", "use crate::b;\nfn d() { b::e(); }"),
            ("b.rs", "use super::c::C;"),
            ("c.rs", "fn d() { assert!(crate::a::A::new()); }"),
        ];
        assert_eq!(found(&three), ["crates/x/src: a.rs b.rs c.rs"]);
        let mut open = three;
        open[3].1 = "pub struct C;";
        assert_eq!(found(&open), [""; 0]);
    }

    #[test]
    fn names_are_followed_through_the_root() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\npub use a::A;\npub use b::*;"),
            ("a.rs", "pub struct A;\nfn c() { crate::B::new() }"),
            ("b.rs", "use crate::A;\npub struct B;"),
        ];
        assert_eq!(found(&files), ["crates/x/src: a.rs b.rs"]);
    }

    #[test]
    fn names_are_followed_through_the_parent() {
        let files = [
            ("lib.rs", "mod a;\nmod b;"),
            ("a/mod.rs", "mod c;\nuse crate::b::B;"),
            ("a/c.rs", "use super::*;\npub struct C;\nfn d(_: B) {}"),
            ("b.rs", "pub struct B;\nuse crate::a::c::C;"),
        ];
        assert_eq!(found(&files), ["crates/x/src: a/c.rs b.rs"]);
    }

    #[test]
    fn parents_and_children_are_no_circle() {
        let files = [
            ("lib.rs", "mod a;\npub struct L;\nuse a::A;"),
            ("a/mod.rs", "mod b;\npub use b::B;\npub struct A;\nuse crate::L;"),
            ("a/b.rs", "pub struct B;\nuse super::A;\nuse crate::L;"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn tests_and_other_crates_make_no_circle() {
        let files = [
            ("lib.rs", "mod a;\nmod b;"),
            ("a.rs", "use crate::b::B;\nuse b_other::a::A;\npub struct A;"),
            ("b.rs", "use std::a::A;\n#[cfg(test)]\nmod tests { use crate::a::A; }"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }

    #[test]
    fn a_reason_names_the_others() {
        let circle = |note: &str| {
            let a = format!("//! A.\n\n{note}\nuse crate::b::B;");
            let files = [
                ("crates/x/src/lib.rs", "mod a;\nmod b;"),
                ("crates/x/src/a.rs", a.as_str()),
                ("crates/x/src/b.rs", "use crate::a::A;"),
            ];
            let tree = samples("crates/x/src/lib.rs", &files);
            (standing(&tree).unwrap().len(), check(&tree).unwrap().len())
        };
        assert_eq!(circle("// CIRCLE: b.rs: one state machine."), (0, 0));
        assert_eq!(circle("// CIRCLE: b.rs"), (1, 1), "no reason");
        assert_eq!(circle("// CIRCLE: b.rs, c.rs: one state machine."), (1, 1), "more than there are");
        assert_eq!(circle(""), (1, 0));
    }

    #[test]
    fn the_way_round_is_shown() {
        let files = [
            ("crates/x/src/lib.rs", "mod a;\nmod b;"),
            ("crates/x/src/a.rs", "\nuse crate::b::B;"),
            ("crates/x/src/b.rs", "use crate::a::A;"),
        ];
        let standing = standing(&samples("crates/x/src/lib.rs", &files)).unwrap();
        assert!(
            standing[0].what.contains("a.rs:2 uses crate::b::B, b.rs:1 uses crate::a::A"),
            "{}",
            standing[0].what
        );
    }
}
