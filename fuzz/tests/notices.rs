//! The targets' oracles are worth something: with a law taken out of the code they find that.
//!
//! One test, since a law is taken out of the whole process.

use std::time::Duration;

use ioplane_fuzz::{TARGETS, mutate};
use ioplane_memory::mutation::{Law, remove};

#[test]
fn a_law_taken_out_is_noticed() {
    let folder = std::env::temp_dir().join(format!("ioplane-fuzz-{}", std::process::id()));
    for (law, name) in [(Law::MarksStores, "blk_request"), (Law::DistrustsLoaded, "state_load")] {
        let target = TARGETS.iter().find(|target| target.name == name).copied().expect("a target");
        remove(Some(law));
        let outcome = mutate::run(target, Duration::from_secs(20), 1, &folder);
        remove(None);
        println!("{name} without {law:?}: {:?} after {} inputs", outcome.finding, outcome.runs);
        assert!(outcome.finding.is_some(), "{name} does not notice that {law:?} is gone");
    }
    let _ = std::fs::remove_dir_all(folder);
}
