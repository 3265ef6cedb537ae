//! The language and the monitor know no device.

use std::path::{Path, PathBuf};

use crate::ne2000;

/// Names of registers that are words of the field, or of the language.
const COMMON: [&str; 5] = ["CR", "DATA", "IMR", "ISR", "RESET"];

/// All Rust files below a directory.
fn sources(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

/// What only the DP8390 has stays in its directory: the names of its registers, above all.
#[test]
fn no_word_of_the_dp8390_is_in_the_language_or_in_the_monitor() {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for directory in ["../model/src", "src/monitor"] {
        sources(&own.join(directory), &mut files);
    }
    assert!(files.len() > 30, "{files:?}");
    let registers = ne2000::MODEL.registers.iter().map(|register| register.name);
    let words: Vec<&str> =
        registers.filter(|name| !COMMON.contains(name)).chain(["DP8390", "NE2000", "ne2000"]).collect();
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a source");
        let used = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let found: Vec<&str> = used.filter(|word| words.contains(word)).collect();
        assert!(found.is_empty(), "{}: {found:?}", path.display());
    }
}
