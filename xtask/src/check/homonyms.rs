//! Type names that several crates define: one word should have one meaning in the workspace.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use crate::finding::Standing;
use crate::tree::Tree;

/// Every name that is declared `pub` as a struct, an enum, a trait or a type in two crates or more.
pub fn standing(tree: &Tree) -> Result<Vec<Standing>> {
    let mut places: BTreeMap<&str, BTreeMap<&str, (&str, usize)>> = BTreeMap::new();
    for source in tree.rust.iter().filter(|source| !source.is_test_file()) {
        let Some((name, _)) = source.path.strip_prefix("crates/").and_then(|path| path.split_once("/src/"))
        else {
            continue;
        };
        for module in source.outline().with_context(|| source.path.clone())? {
            for (declared, line) in &module.types {
                places.entry(declared).or_default().entry(name).or_insert((&source.path, *line));
            }
        }
    }
    Ok(places
        .into_iter()
        .filter(|(_, crates)| crates.len() > 1)
        .filter_map(|(name, crates)| {
            let (path, line) = *crates.values().next_back()?;
            let names: Vec<&str> = crates.keys().copied().collect();
            Some(Standing {
                key: format!("{name}: {}", names.join(" ")),
                path: path.to_owned(),
                line,
                what: format!(
                    "`{name}` is a public type of {}: give each what is its own the field's word for it.",
                    names.join(", ")
                ),
            })
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::samples;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        standing(&samples("", files)).unwrap().into_iter().map(|one| one.key).collect()
    }

    #[test]
    fn the_same_word_in_two_crates_is_found() {
        let files = [
            ("crates/a/src/lib.rs", "pub struct Plan;\npub struct Own;"),
            ("crates/b/src/c.rs", "pub trait Plan {}"),
            ("crates/b/src/d.rs", "pub enum Plan {}\npub enum Own2 {}"),
        ];
        assert_eq!(found(&files), ["Plan: a b"]);
    }

    #[test]
    fn what_is_not_public_is_nobodys_word() {
        let files = [
            ("crates/a/src/lib.rs", "pub struct Plan;"),
            ("crates/b/src/lib.rs", "pub(crate) struct Plan;\n#[cfg(test)]\nmod tests { pub struct Plan; }"),
            ("crates/b/tests/plan.rs", "pub struct Plan;"),
            ("bench/src/main.rs", "pub struct Plan;"),
        ];
        assert_eq!(found(&files), [""; 0]);
    }
}
