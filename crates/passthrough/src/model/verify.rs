//! What is wrong with a table.

use super::machine::{REGIONS, REGISTERS, STATES};
use super::{Finding, StateModel};

/// Everything that is wrong with a table; empty if it is sound.
pub fn verify(model: &StateModel) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut most = |what: &str, has: usize, most: usize| {
        if has == 0 || has > most {
            findings.push(Finding {
                place: what.to_owned(),
                what: format!("there are {has}"),
                remedy: format!("have 1 to {most}"),
            });
        }
    };
    most("registers", model.registers.len(), REGISTERS);
    most("regions", model.regions.len(), REGIONS);
    let states = model.regions.iter().map(|region| region.states.len()).sum();
    most("states of all regions", states, STATES);
    findings
}
