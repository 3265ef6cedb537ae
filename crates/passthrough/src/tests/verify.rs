//! Cards' tables, broken: what the verifier says of memory on a card, and of what a saved card tells.

use ioplane_model::verify::verify;
use ioplane_model::{Restore, StateModel};

use crate::{ne2000, rtl8139};

/// Everything that is wrong with a table, a line each.
fn all(model: &StateModel) -> String {
    verify(model).iter().map(|finding| format!("{finding}\n")).collect()
}

/// The only thing that is wrong with it.
fn only(model: &StateModel) -> String {
    let findings = verify(model);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings[0].to_string()
}

#[track_caller]
fn says(finding: &str, parts: &[&str]) {
    for part in parts {
        assert!(finding.contains(part), "{finding:?} does not say {part:?}");
    }
}

#[test]
fn card_checks_name_registers_of_one_byte_that_are_known() {
    let mut model = ne2000::MODEL.clone();
    let card = model.card.as_mut().unwrap();
    (card.address.0, card.count.0, card.pages.stop) = ("DATA", "BNRY", "NONE");
    says(&all(&model), &["DATA is not one byte", "the value of BNRY is needed", "no register \"NONE\""]);
}

#[test]
fn the_data_port_moves_nothing_that_nobody_has_looked_at() {
    let mut model = ne2000::MODEL.clone();
    let others = model.regions.iter().copied().filter(|region| region.name != "dma");
    model.regions = others.collect::<Vec<_>>().leak();
    says(&all(&model), &["be read that nobody", "be written that nobody"]);
}

#[test]
fn what_is_shown_until_an_interrupt_names_one() {
    let mut model = ne2000::MODEL.clone();
    model.restore = [model.restore, &[Restore::Shown("RSR", 0x100)]].concat().leak();
    says(&only(&model), &["RSR is shown until 0x100"]);
}

#[test]
fn a_reset_ends_in_a_register_of_the_first_bank() {
    let mut model = ne2000::MODEL.clone();
    model.reset.done = ("CURR", 1, 1);
    says(&only(&model), &["reset", "CURR is not in the first bank"]);
}

#[test]
fn hole_11_the_card_s_memory_is_filled_before_there_is_a_ring() {
    let model = &ne2000::MODEL;
    assert_eq!(verify(model), []);
    let moved = |from: &dyn Fn(&Restore) -> bool, behind: Restore| {
        let mut steps: Vec<_> = model.restore.iter().copied().filter(|step| !from(step)).collect();
        let at = steps.iter().position(|step| *step == behind).expect("listed");
        steps.insert(at + 1, Restore::Card);
        let mut other = model.clone();
        other.restore = steps.leak();
        all(&other)
    };
    let card = |step: &Restore| *step == Restore::Card;
    let late = moved(&card, Restore::Saved("PSTOP", 0xff));
    says(&late, &["does not reach all of the card's memory", "Value of PSTART and PSTOP before Card"]);
    let bytes = moved(&|step| card(step) || *step == Restore::Value("DCR", 0x49), Restore::Value("PSTOP", 0));
    says(&bytes, &["filled in words", "Value of DCR"]);
}

#[test]
fn hole_12_what_is_told_decides_nothing() {
    let mut model = ne2000::MODEL.clone();
    model.told = &["dma", "NONE"];
    says(
        &all(&model),
        &["who says that dma is in DmaRd gets round what Quiet checks", "there is no region \"NONE\""],
    );
    let mut model = rtl8139::MODEL.clone();
    model.told = &["tally"];
    // Only what the first state checks must be checked everywhere.
    assert_eq!(verify(&model), []);
}
