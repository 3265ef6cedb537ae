//! Chores of the workspace, in Rust: `cargo xtask check` holds the house's rules that no compiler knows.
//!
//! ```text
//!   Tree (every source once, comments and strings told from code) --> one function a rule --> Vec<Finding>
//! ```
//!
//! Must not know: what the crates do. It reads text and `cargo metadata`.

mod check;
mod source;
mod tree;

use std::process::ExitCode;

use anyhow::{Context, Result};

const USAGE: &str = "usage: cargo xtask check [RULE...]\n\nRules:\n";

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    match words.next().as_deref() {
        Some("check") => report(check_all(&words.collect::<Vec<_>>())),
        _ => {
            eprint!("{USAGE}");
            for rule in check::RULES {
                eprintln!("  {:<10} {}", rule.name, rule.what);
            }
            ExitCode::from(2)
        }
    }
}

/// Runs the rules named, or all of them; says how many findings there were.
fn check_all(names: &[String]) -> Result<usize> {
    for name in names {
        if !check::RULES.iter().any(|rule| rule.name == name) {
            anyhow::bail!("no rule is called {name}: `cargo xtask` lists them");
        }
    }
    let root = tree::root()?;
    let tree = tree::Tree::read(&root).with_context(|| format!("reading {}", root.display()))?;
    let mut count = 0;
    for rule in check::RULES.iter().filter(|rule| names.is_empty() || names.iter().any(|n| n == rule.name)) {
        let findings = (rule.run)(&tree)?;
        println!("{:<10} {}", rule.name, if findings.is_empty() { "ok" } else { "FAILED" });
        for finding in &findings {
            println!("  {finding}");
        }
        count += findings.len();
    }
    Ok(count)
}

fn report(outcome: Result<usize>) -> ExitCode {
    match outcome {
        Ok(0) => ExitCode::SUCCESS,
        Ok(count) => {
            eprintln!("{count} findings");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}
