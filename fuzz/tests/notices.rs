//! The targets' oracles are worth something: with an invariant taken out of the code they find that.
//!
//! One test, since an invariant is taken out of the whole process.

use std::time::Duration;

use ioplane_fuzz::{TARGETS, mutate};
use ioplane_memory::mutation::{Invariant, remove};

#[test]
fn a_invariant_taken_out_is_noticed() {
    let folder = std::env::temp_dir().join(format!("ioplane-fuzz-{}", std::process::id()));
    for (invariant, name) in
        [(Invariant::MarksStores, "blk_request"), (Invariant::DistrustsLoaded, "state_load")]
    {
        let target = TARGETS.iter().find(|target| target.name == name).copied().expect("a target");
        remove(Some(invariant));
        let outcome = mutate::run(target, Duration::from_secs(20), 1, &folder);
        remove(None);
        println!("{name} without {invariant:?}: {:?} after {} inputs", outcome.finding, outcome.runs);
        assert!(outcome.finding.is_some(), "{name} does not notice that {invariant:?} is gone");
    }
    let _ = std::fs::remove_dir_all(folder);
}
