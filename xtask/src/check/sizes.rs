//! How large a crate may be.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::finding::Standing;
use crate::tree::Tree;

/// Lines of `src` outside of tests, comments included.
const MOST: usize = 8000;
/// Only for tests.
const NOT_COUNTED: &str = "testkit";

/// Crates above the limit.
pub fn standing(tree: &Tree) -> Result<Vec<Standing>> {
    let mut lines: BTreeMap<&str, usize> = BTreeMap::new();
    for source in &tree.rust {
        if let Some((name, _)) = source.path.strip_prefix("crates/").and_then(|path| path.split_once("/src/"))
        {
            *lines.entry(name).or_default() += source.lines().filter(|line| !line.test).count();
        }
    }
    Ok(lines
        .into_iter()
        .filter(|(name, lines)| *lines > MOST && *name != NOT_COUNTED)
        .map(|(name, lines)| Standing {
            key: name.to_owned(),
            path: format!("crates/{name}/Cargo.toml"),
            line: 0,
            what: format!("{lines} lines of its own, more than {MOST}: split the crate, or give the reason in docs/decisions and name that page in the list."),
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::samples;

    #[test]
    fn large_crates_are_found() {
        let half = "fn a() {}\n".repeat(MOST / 2);
        let more = format!("{half}fn b() {{}}");
        let tests = format!("#[cfg(test)]\nmod tests {{\n{half}}}");
        let found = |name: &str, second: &str| {
            let [first, second_path] = ["lib", "b"].map(|file| format!("crates/{name}/src/{file}.rs"));
            standing(&samples("", &[(&first, &half), (&second_path, second)])).unwrap().len()
        };
        assert_eq!(found("a", &half), 0);
        assert_eq!(found("a", &more), 1);
        assert_eq!(found("a", &tests), 0, "tests are not counted");
        assert_eq!(found("testkit", &more), 0);
    }
}
