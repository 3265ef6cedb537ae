//! Chores of the workspace, in Rust: `cargo xtask check` holds the rules that no compiler knows.
//!
//! ```text
//!   Tree (every source once, comments and strings told from code) --> one function a rule --> Vec<Finding>
//!                                                        what may stay for a reason --> reasons/RULE.txt (listed)
//! ```
//!
//! Must not know: what the crates do. It reads text and `cargo metadata`.

mod check;
mod finding;
mod listed;
mod outline;
mod source;
mod tree;

use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

const USAGE: &str = "usage: cargo xtask check [--write] [RULE...]\n\n  --write     write xtask/reasons/RULE.txt for the tree as it is: reasons are kept, what is new is \"to be mended\"\n\nRules:\n";

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
fn check_all(words: &[String]) -> Result<usize> {
    let (options, names): (Vec<&String>, Vec<&String>) = words.iter().partition(|word| word.starts_with('-'));
    if let Some(option) = options.iter().find(|option| **option != "--write") {
        anyhow::bail!("no option is called {option}: `cargo xtask` lists them");
    }
    for name in &names {
        if !check::RULES.iter().any(|rule| rule.name == *name) {
            anyhow::bail!("no rule is called {name}: `cargo xtask` lists them");
        }
    }
    let root = tree::root()?;
    let tree = tree::Tree::read(&root).with_context(|| format!("reading {}", root.display()))?;
    let wanted = |rule: &&check::Rule| names.is_empty() || names.iter().any(|name| *name == rule.name);
    let mut count = 0;
    for rule in check::RULES.iter().filter(wanted) {
        count += if options.is_empty() { run(&tree, rule)? } else { write(&root, &tree, rule)? };
    }
    Ok(count)
}

/// Runs one rule; says how many findings there were.
fn run(tree: &tree::Tree, rule: &check::Rule) -> Result<usize> {
    let mut findings = (rule.run)(tree)?;
    let mut listed = String::new();
    if let Some(standing) = rule.standing {
        let judged = listed::judge(tree, rule.name, &standing(tree)?);
        listed = format!(", listed: {} with a reason, {} to be mended", judged.reasoned, judged.open);
        findings.extend(judged.findings);
    }
    println!("{:<10} {}{listed}", rule.name, if findings.is_empty() { "ok" } else { "FAILED" });
    for finding in &findings {
        println!("  {finding}");
    }
    Ok(findings.len())
}

/// Writes the rule's list, if it has one.
fn write(root: &Path, tree: &tree::Tree, rule: &check::Rule) -> Result<usize> {
    if let Some(standing) = rule.standing {
        let standing = standing(tree)?;
        listed::write(root, tree, rule.name, &standing)?;
        println!("{:<10} {} entries written", rule.name, standing.len());
    }
    Ok(0)
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
