//! How long a file may be.

use anyhow::Result;

use super::Finding;
use crate::tree::Tree;

const MOST: usize = 800;
/// The reason stands among the first lines, where a reader begins.
const FIRST: usize = 15;

pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let rust = tree.rust.iter().map(|source| (&source.path, &source.text));
    let shell = tree.shell.iter().map(|page| (&page.path, &page.text));
    Ok(rust
        .chain(shell)
        .filter_map(|(path, text)| {
            let lines = text.lines().count();
            let reasoned = text.lines().take(FIRST).any(|line| line.contains("LONG:"));
            (lines > MOST && !reasoned).then(|| Finding {
                path: path.clone(),
                line: lines,
                rule: "length",
                what: format!(
                    "{lines} lines: split it, or give the reason as `// LONG: ...` in its first {FIRST} lines"
                ),
            })
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::sample;

    #[test]
    fn long_files_need_a_reason() {
        let long = "fn a() {}\n".repeat(MOST + 1);
        assert_eq!(check(&sample("a.rs", &long)).unwrap().len(), 1);
        assert_eq!(check(&sample("a.rs", &format!("// LONG: a table.\n{long}"))).unwrap(), []);
        assert_eq!(check(&sample("a.rs", &"fn a() {}\n".repeat(MOST))).unwrap(), []);
    }
}
