//! What a program that embeds devices has to build: no async runtime, no HTTP, no command line.

use anyhow::{Context, Result, ensure};

use super::Finding;
use crate::tree::{self, Tree};

/// The crate whose example is such a program: its dev-dependencies are the crates that the example needs.
const EMBED: &str = "ioplane-embed";
/// What belongs to the daemon and its clients.
const NOT_THERE: [&str; 4] = ["tokio", "axum", "hyper", "clap"];

pub fn check(_: &Tree) -> Result<Vec<Finding>> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());
    let output = std::process::Command::new(cargo)
        .args(["tree", "--package", EMBED, "--edges", "normal,build,dev", "--prefix", "none"])
        .current_dir(tree::root()?)
        .output()
        .context("running cargo tree")?;
    ensure!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let listed = String::from_utf8(output.stdout).context("cargo tree")?;
    ensure!(listed.contains(EMBED), "cargo tree does not list {EMBED}");
    Ok(findings(&listed))
}

/// `listed`: a package a line, its name first.
fn findings(listed: &str) -> Vec<Finding> {
    let packages: Vec<&str> = listed.lines().filter_map(|line| line.split(' ').next()).collect();
    let there = NOT_THERE.iter().filter(|name| packages.contains(*name));
    there
        .map(|name| Finding {
            path: "crates/embed/Cargo.toml".to_owned(),
            line: 0,
            rule: "embed",
            what: format!(
                "a program that embeds devices would build {name}: `cargo tree -p {EMBED} -e normal,build,dev -i {name}` shows who brings it"
            ),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_found_and_its_relatives_are_not() {
        assert_eq!(
            findings("ioplane-embed v0.1.0 (/w/crates/embed)\ntokio-util v0.7.1\nclap_lex v1.0.0\n"),
            []
        );
        assert_eq!(findings("ioplane-embed v0.1.0\ntokio v1.1.0\nlibc v0.2.1\nclap v4.0.0 (*)\n").len(), 2);
    }
}
