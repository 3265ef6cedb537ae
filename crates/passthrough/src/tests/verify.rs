//! Cards' tables, broken: what the verifier says of memory on a card, and of what a saved card tells.

use ioplane_model::verify::verify;
use ioplane_model::{
    BufferLength, Check, Condition, CounterBlock, DataPort, DescriptorBuffer, DescriptorFormat, On, Region,
    Restore, StateModel, TailQueue,
};

use crate::ne2000::functions::{MAY_READ, MAY_WRITE};
use crate::{i82574, ne2000, rtl8139};

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
fn a_data_port_names_registers_of_one_byte_that_are_known() {
    let mut model = ne2000::MODEL.clone();
    let port = model.port.as_mut().unwrap();
    (port.address.0, port.count.0, port.registers) = ("DATA", "BNRY", &["NONE"]);
    says(&all(&model), &["DATA is not one byte", "the value of BNRY is needed", "no register \"NONE\""]);
    let mut model = ne2000::MODEL.clone();
    let port = model.port.as_mut().unwrap();
    port.writable = &[(0x4000, 0x4001), (0x5000, 0x5000)];
    says(&all(&model), &["a range ends before it begins", "not moved in accesses of 4 bytes"]);
}

#[test]
fn the_data_port_moves_nothing_that_nobody_has_looked_at() {
    let mut model = ne2000::MODEL.clone();
    let others = model.regions.iter().copied().filter(|region| region.name != "dma");
    model.regions = others.collect::<Vec<_>>().leak();
    says(&all(&model), &["be read that nobody", "be written that nobody"]);
}

/// The table with another check before one way of transfer.
fn with(from: &'static Condition, to: &'static Condition) -> StateModel {
    let mut model = ne2000::MODEL.clone();
    let dma = model.regions.iter().find(|region| region.name == "dma").expect("a region");
    let mut edges = dma.transitions.to_vec();
    for edge in edges.iter_mut().filter(|edge| edge.checks == [Check::Holds(from)]) {
        edge.checks = vec![Check::Holds(to)].leak();
    }
    model.regions = vec![Region { transitions: edges.leak(), ..*dma }].leak();
    model
}

/// The verifier calls the functions: one that lets through what the table says is nobody's is found.
#[test]
fn a_function_that_lets_too_much_through_is_found() {
    static GENEROUS: Condition = Condition { name: "generous", holds: |_| true, ..MAY_WRITE };
    static BLIND: Condition = Condition { name: "blind", registers: &["RSAR0", "RSAR1"], ..MAY_WRITE };
    says(&all(&with(&MAY_WRITE, &GENEROUS)), &["generous lets the byte at 0x0000 pass"]);
    says(&all(&with(&MAY_WRITE, &BLIND)), &["CR lets memory be written that nobody has looked at"]);
    says(&all(&with(&MAY_WRITE, &MAY_READ)), &["card-outside lets the byte at 0x0000 pass"]);
    let mut model = ne2000::MODEL.clone();
    model.port = Some(DataPort { readable: &[(0x4000, 0x8000)], ..model.port.unwrap() });
    says(&only(&model), &["port", "lets the byte at 0x0000 pass"]);
}

#[test]
fn a_command_that_is_checked_in_some_states_only_is_not_checked() {
    let mut model = with(&MAY_WRITE, &MAY_WRITE);
    let mut edges = model.regions[0].transitions.to_vec();
    for edge in edges.iter_mut().filter(|edge| edge.checks == [Check::Holds(&MAY_WRITE)]) {
        edge.from = "Quiet";
    }
    let dma = model.regions[0];
    model.regions = vec![Region { transitions: edges.clone().leak(), ..dma }].leak();
    says(&all(&model), &["CR lets memory be written that nobody has looked at"]);
    for edge in edges.iter_mut().filter(|edge| edge.checks == [Check::Holds(&MAY_WRITE)]) {
        (edge.from, edge.on) = (ioplane_model::ANY, On::write("CR", 0xff, 0x12));
    }
    model.regions = vec![Region { transitions: edges.leak(), ..dma }].leak();
    let found = all(&model);
    assert!(
        !found.contains("nobody has looked at"),
        "some command is: which others are not, tests show: {found}"
    );
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
        steps.insert(at + 1, Restore::Memory);
        let mut other = model.clone();
        other.restore = steps.leak();
        all(&other)
    };
    let card = |step: &Restore| *step == Restore::Memory;
    let late = moved(&card, Restore::Saved("PSTOP", 0xff));
    says(&late, &["nobody knows whether PSTART is PSTOP", "Value of PSTART and PSTOP before Memory"]);
    let bytes = moved(&|step| card(step) || *step == Restore::Value("DCR", 0x49), Restore::Value("PSTOP", 0));
    says(&bytes, &["filled in words", "Value of DCR"]);
    let mut model = ne2000::MODEL.clone();
    let set = |step: &Restore| {
        if *step == Restore::Value("PSTOP", 0) { Restore::Value("PSTOP", 0x80) } else { *step }
    };
    model.restore = model.restore.iter().map(set).collect::<Vec<_>>().leak();
    says(&only(&model), &["does not reach all of the card's memory", "Value of PSTART and PSTOP"]);
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

/// The table with another queue of its first ring.
fn with_queue(change: impl Fn(&mut TailQueue)) -> StateModel {
    let mut model = i82574::MODEL.clone();
    let mut rings = model.rings.to_vec();
    change(rings[0].queue.as_mut().expect("it is followed to its tail"));
    model.rings = rings.leak();
    model
}

/// The table with other formats of its first ring.
fn with_formats(change: impl Fn(&mut DescriptorFormat)) -> StateModel {
    with_queue(|queue| {
        let mut formats = queue.formats.to_vec();
        formats.iter_mut().for_each(&change);
        queue.formats = formats.leak();
    })
}

#[test]
fn a_tail_is_not_written_before_descriptors_were_looked_at() {
    let mut model = i82574::MODEL.clone();
    let unchecked = |region: &Region| {
        let mut edges = region.transitions.to_vec();
        edges.iter_mut().for_each(|edge| edge.checks = &[]);
        Region { transitions: edges.leak(), ..*region }
    };
    model.regions = model.regions.iter().map(unchecked).collect::<Vec<_>>().leak();
    says(
        &all(&model),
        &["TDT makes the hardware follow", "RDT makes the hardware follow", "Descriptors(\"receive\")"],
    );
    says(&all(&with_queue(|queue| queue.tail = "RADV")), &["the value of RADV is needed"]);
}

#[test]
fn formats_lie_within_their_descriptors() {
    says(&only(&with_queue(|queue| queue.unit = 100)), &["no number of descriptors"]);
    says(&only(&with_queue(|queue| queue.formats = &[])), &["have 0 formats"]);
    let beyond = all(&with_formats(|format| format.last = Some((4, 1))));
    says(&beyond, &["format legacy lies beyond", "format data lies beyond"]);
    says(&all(&with_formats(|format| format.written = 1)), &["by which legacy is done is not written back"]);
    says(&all(&with_formats(|format| format.written |= 1 << 4)), &["format context lies beyond"]);
    let buffer = DescriptorBuffer { address: 3, length: BufferLength::By("STATUS", |_| 1) };
    let by = all(&with_formats(|format| format.buffer = Some(buffer)));
    says(&by, &["the value of STATUS is needed", "format data lies beyond"]);
    let none = DescriptorBuffer { address: 0, length: BufferLength::Field(2, 0) };
    says(&all(&with_formats(|format| format.buffer = Some(none))), &["buffers of data have no length"]);
}

#[test]
fn tables_and_counters_are_registers_of_many_words() {
    let mut model = i82574::MODEL.clone();
    model.counters = Some(CounterBlock { register: "MTA", wide: &[0x1fc] });
    says(&all(&model), &["MTA are not words that reading clears", "a wide one is not within them"]);
    let mut model = i82574::MODEL.clone();
    model.restore =
        [model.restore, &[Restore::Table("CTRL", 0), Restore::Table("STATISTICS", 0)]].concat().leak();
    says(&all(&model), &["CTRL is not a table", "STATISTICS is not a table"]);
    // Until it is written is only what the guest writes.
    model.restore = [i82574::MODEL.restore, &[Restore::Shown("STATUS", 0)]].concat().leak();
    says(&only(&model), &["STATUS is shown until 0x0"]);
}
