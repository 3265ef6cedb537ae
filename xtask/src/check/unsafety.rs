//! Where unsafe code may be, and what it must say. That every block has `// SAFETY:` is clippy's to check.

use anyhow::Result;

use super::Finding;
use crate::source::has_word;
use crate::tree::Tree;

const RULE: &str = "unsafe";

/// Where modules may have unsafe code. The guest's load generator is not part of the plane: it makes ioctls. An allocator
/// that watches pollers cannot be written without, nor a client that keeps a bare mapping of a card's page. `device` declares
/// the one unsafe method of a core's ring, and calls none.
const ALLOWED: [&str; 14] = [
    "crates/device/src/io.rs",
    "crates/memory/",
    "crates/cores/",
    "crates/host/",
    "crates/hardware/",
    "crates/storage/",
    "crates/network/",
    "crates/nbd/",
    "crates/exits/",
    "crates/vcpu/",
    "crates/interposer/",
    "crates/testkit/src/allocator.rs",
    "crates/testkit/src/bin/keeper.rs",
    "guest/load/",
];

pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for source in &tree.rust {
        let Some(first) = source.lines().find(|line| has_word(line.code, "unsafe")) else { continue };
        let mut found = |what: &str| {
            findings.push(Finding {
                path: source.path.clone(),
                line: first.number,
                rule: RULE,
                what: what.to_owned(),
            });
        };
        if !ALLOWED.iter().any(|folder| source.path.starts_with(folder)) {
            found(
                "unsafe code outside memory, cores, host, hardware, storage, network, nbd, exits, vcpu and interposer: ask one of them to do it",
            );
        }
        if source.is_test_file() {
            // A child of the module that it tests, whose note holds for both.
            continue;
        }
        if !source.lines().any(|line| line.code.contains("allow(unsafe_code)")) {
            found("unsafe code in a module that does not say so: add #![allow(unsafe_code)] to this file");
        }
        if !source.text.lines().any(|line| line.trim_start().starts_with("// UNSAFETY:")) {
            found("no `// UNSAFETY:` below #![allow(unsafe_code)]: say in a line why this module needs it");
        }
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::sample;

    const GOOD: &str = "#![allow(unsafe_code)]\n// UNSAFETY: maps.\nfn a() { unsafe { b() } }";

    #[test]
    fn a_noted_module_of_an_allowed_crate_passes() {
        assert_eq!(check(&sample("crates/memory/src/a.rs", GOOD)).unwrap(), []);
        assert_eq!(check(&sample("crates/virtio/src/a.rs", "// unsafe\nfn a() {}")).unwrap(), []);
    }

    #[test]
    fn others_do_not() {
        assert_eq!(check(&sample("crates/virtio/src/a.rs", GOOD)).unwrap().len(), 1);
        let without = GOOD.replace("// UNSAFETY: maps.", "");
        assert_eq!(check(&sample("crates/memory/src/a.rs", &without)).unwrap().len(), 1);
        let without = GOOD.replace("#![allow(unsafe_code)]", "");
        assert_eq!(check(&sample("crates/host/src/a.rs", &without)).unwrap().len(), 1);
    }
}
