//! The order of the crates (docs/architecture.md, "Crates").

use anyhow::{Context, Result};
use serde_json::Value;

use super::Finding;
use crate::tree::Tree;

const RULE: &str = "crate order";

/// Each may depend on those before it. A new crate is entered here, at its place.
const ORDER: [&str; 32] = [
    "ioplane-api",
    // Knows the interface and nothing else, so it stands before all else.
    "ioplane-cli",
    // Files and certificates: knows nothing of what is said over TLS.
    "ioplane-identity",
    // How certificates come to hosts over the network; knows nothing of what they are used for.
    "ioplane-join",
    // Before all that know what a device is: it carries names.
    "ioplane-netbus",
    "ioplane-memory",
    // Before all that will ask it (docs/decisions/0041-scheduling.md).
    "ioplane-scheduler",
    "ioplane-device",
    "ioplane-cores",
    "ioplane-storage",
    "ioplane-nbd",
    "ioplane-network",
    "ioplane-pci",
    "ioplane-nic",
    "ioplane-virtio",
    "ioplane-embed",
    "ioplane-model",
    "ioplane-hardware",
    // Beside mediation: guests drive these functions themselves.
    "ioplane-moving",
    "ioplane-passthrough",
    "ioplane-host",
    "ioplane-explain",
    "ioplane-plain",
    "ioplane-qemu",
    "ioplane-vcpu",
    "ioplane-daemon",
    "ioplane-symbols",
    "ioplane-kvmstat",
    "ioplane-exits",
    // A shared object that VMMs load: no crate can link it.
    "ioplane-interposer",
    "ioplane-testkit",
    "ioplane",
];
/// Stand outside: they may depend on any crate, and no crate on them.
const OUTSIDE: [&str; 6] = [
    "ioplane-e2e",
    "ioplane-bench",
    "ioplane-figures",
    "ioplane-xtask",
    "ioplane-guest-load",
    "ioplane-fuzz",
];
/// Only for tests.
const DEV_ONLY: &str = "ioplane-testkit";

fn rank(name: &str) -> Option<usize> {
    ORDER.iter().position(|other| *other == name)
}

pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let packages = tree.packages["packages"].as_array().context("cargo metadata lists no packages")?;
    let mut findings = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let mut found = |what: String| {
            findings.push(Finding { path: manifest(package), line: 0, rule: RULE, what });
        };
        let own = rank(name);
        if own.is_none() && !OUTSIDE.contains(&name) {
            found(format!(
                "{name} has no place: enter it into ORDER or OUTSIDE in xtask/src/check/layers.rs"
            ));
        }
        let Some(own) = own else { continue };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let on = dependency["name"].as_str().unwrap_or_default();
            let dev = dependency["kind"].as_str() == Some("dev");
            match rank(on) {
                _ if OUTSIDE.contains(&on) => {
                    found(format!(
                        "{name} depends on {on}, which stands outside: move what is shared into a crate"
                    ));
                }
                Some(_) if on == DEV_ONLY && !dev => {
                    found(format!("{name} depends on {on}: only tests may, move it to [dev-dependencies]"));
                }
                Some(other) if other >= own && on != DEV_ONLY => {
                    found(format!(
                        "{name} depends on {on}, which stands after it: turn the dependency round"
                    ));
                }
                _ => {}
            }
        }
    }
    Ok(findings)
}

fn manifest(package: &Value) -> String {
    let path = package["manifest_path"].as_str().unwrap_or_default();
    let parts: Vec<&str> = path.split('/').collect();
    parts[parts.len().saturating_sub(3)..].join("/")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn findings(name: &str, on: &str, kind: Option<&str>) -> usize {
        let package = json!({"name": name, "manifest_path": "/w/crates/x/Cargo.toml",
            "dependencies": [{"name": on, "kind": kind}, {"name": "serde", "kind": null}]});
        let tree = Tree { packages: json!({ "packages": [package] }), ..Tree::default() };
        check(&tree).unwrap().len()
    }

    #[test]
    fn only_downwards() {
        assert_eq!(findings("ioplane-virtio", "ioplane-storage", None), 0);
        assert_eq!(findings("ioplane-storage", "ioplane-virtio", None), 1);
        assert_eq!(findings("ioplane-storage", "ioplane-virtio", Some("dev")), 1);
        assert_eq!(findings("ioplane-host", "ioplane-e2e", None), 1);
    }

    #[test]
    fn the_testkit_is_for_tests() {
        assert_eq!(findings("ioplane-virtio", "ioplane-testkit", Some("dev")), 0);
        assert_eq!(findings("ioplane", "ioplane-testkit", None), 1);
        assert_eq!(findings("ioplane-e2e", "ioplane-testkit", None), 0);
    }

    #[test]
    fn nobody_without_a_place() {
        assert_eq!(findings("ioplane-attic", "serde", None), 1);
    }
}
