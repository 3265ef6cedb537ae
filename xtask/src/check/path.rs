//! What must hold on the data path: invariant 6, no locks, versioned saved state.

use anyhow::Result;

use super::Finding;
use crate::source::{Source, has_word};
use crate::tree::Tree;

/// Unmarked stores into windows: only the crate that marks, and the journal, which is not guest memory.
const STORES: [&str; 4] = [".put_u8(", ".put_u16(", ".put_u32(", ".put_u64("];
/// Play the guest, so they write its memory as a guest does; or make the window itself; or store to pages of registers and to
/// rings of their own, which only hardware or a guest that reads sees.
const MAY_STORE: [&str; 8] = [
    "crates/memory/",
    "crates/virtio/src/journal/",
    "crates/testkit/",
    "crates/nic/src/rtl8139/shadow.rs",
    "crates/passthrough/src/monitor/rings",
    "crates/passthrough/src/monitor/page.rs",
    "crates/pci/src/lent_pages.rs",
    "crates/pci/src/register_file.rs",
];
/// Crates whose pollers run on I/O cores. (Storage has control halves that lock: clippy asks each for its reason.)
const DATA_PATH: [&str; 5] = [
    "crates/memory/src/",
    "crates/device/src/",
    "crates/cores/src/",
    "crates/network/src/",
    "crates/virtio/src/",
];
const LOCKS: [&str; 2] = ["Mutex", "RwLock"];
/// Says that only threads of the control plane take the lock.
const CONTROL: &str = "CONTROL:";

pub fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    for source in tree.rust.iter().filter(|source| source.path.starts_with("crates/")) {
        stores(source, &mut findings);
        locks(source, &mut findings);
        saved(source, &mut findings);
    }
    Ok(findings)
}

fn stores(source: &Source, findings: &mut Vec<Finding>) {
    if MAY_STORE.iter().any(|place| source.path.starts_with(place)) {
        return;
    }
    for line in source.lines().filter(|line| !line.test) {
        if let Some(store) = STORES.iter().find(|store| line.code.contains(*store)) {
            let what = format!("{store}..) does not mark the dirty log: store through GuestView");
            findings.push(Finding {
                path: source.path.clone(),
                line: line.number,
                rule: "invariant 6",
                what,
            });
        }
    }
}

fn locks(source: &Source, findings: &mut Vec<Finding>) {
    if !DATA_PATH.iter().any(|place| source.path.starts_with(place)) {
        return;
    }
    // The import says nothing: the place where the lock lives has to.
    let lines = source.lines().filter(|line| !line.test && !line.code.trim_start().starts_with("use "));
    for line in lines {
        let declares = |lock: &&&str| has_word(line.code, lock) && line.code.contains(&format!("{lock}<"));
        if let Some(lock) = LOCKS.iter().find(declares)
            && !source.noted(line.number, CONTROL)
        {
            let what = format!(
                "a {lock} on the data path: use atomics or a mailbox; if only control threads take it, say who in `// {CONTROL} ...` above"
            );
            findings.push(Finding { path: source.path.clone(), line: line.number, rule: "locks", what });
        }
    }
}

/// In a file that encodes state, whatever is serialised outlives the build: its name says its version.
fn saved(source: &Source, findings: &mut Vec<Finding>) {
    if !source.lines().any(|line| !line.test && line.code.contains("postcard::")) {
        return;
    }
    let mut derived = false;
    for line in source.lines().filter(|line| !line.test) {
        if line.code.contains("derive(") {
            derived = has_word(line.code, "Serialize") && has_word(line.code, "Deserialize");
        }
        let mut words = line.code.split_whitespace().skip_while(|word| *word != "struct" && *word != "enum");
        let (Some(_), Some(name)) = (words.next(), words.next()) else { continue };
        let name = name.trim_end_matches(|c: char| !c.is_alphanumeric());
        let version = name.trim_end_matches(|c: char| c.is_ascii_digit());
        if std::mem::take(&mut derived) && (version == name || !version.ends_with('V')) {
            let what = format!("{name} is saved: call it {name}V1, and keep it readable for ever");
            findings.push(Finding {
                path: source.path.clone(),
                line: line.number,
                rule: "saved types",
                what,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::sample;

    fn count(path: &str, text: &str) -> usize {
        check(&sample(path, text)).unwrap().len()
    }

    #[test]
    fn unmarked_stores_are_found() {
        let text = "fn a() { window.put_u16(2, 1); }";
        assert_eq!(count("crates/virtio/src/ring/mod.rs", text), 1);
        assert_eq!(count("crates/virtio/src/journal/split.rs", text), 0);
        assert_eq!(count("crates/virtio/src/a.rs", &format!("#[cfg(test)]\nmod tests {{\n{text}\n}}")), 0);
    }

    #[test]
    fn locks_need_a_reason() {
        assert_eq!(
            count("crates/cores/src/a.rs", "use std::sync::Mutex;\nstatic A: Mutex<u8> = Mutex::new(0);"),
            1
        );
        assert_eq!(
            count("crates/cores/src/a.rs", "struct A {\n// CONTROL: the pool's owner.\na: Mutex<u8>,\n}"),
            0
        );
        assert_eq!(count("crates/host/src/a.rs", "static A: RwLock<u8> = RwLock::new(0);"), 0);
    }

    #[test]
    fn saved_types_have_a_version() {
        let text = |name: &str| {
            format!(
                "use postcard::to_stdvec;\n#[derive(Debug, Serialize, Deserialize)]\npub struct {name} {{\n}}"
            )
        };
        assert_eq!(count("crates/virtio/src/a.rs", &text("Saved")), 1);
        assert_eq!(count("crates/virtio/src/a.rs", &text("SavedV1")), 0);
        assert_eq!(count("crates/virtio/src/a.rs", &text("SavedV12")), 0);
    }
}
