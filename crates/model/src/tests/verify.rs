//! Broken tables: each fault is found, and said so that it can be put right.

use super::small::{ON, REGION, REGISTERS, RESETS, RING, SMALL, STATES};
use crate::{verify::verify, *};

/// The first finding on a model that was changed, and that it is the only one.
fn found(change: impl FnOnce(&mut StateModel)) -> String {
    let mut model = SMALL.clone();
    change(&mut model);
    let findings = verify(&model);
    assert_eq!(findings.len(), 1, "{findings:#?}");
    findings[0].to_string()
}

/// Leaked: tables are static.
fn leak<T>(values: Vec<T>) -> &'static [T] {
    Box::leak(values.into_boxed_slice())
}

/// The registers, one of them changed.
fn register(name: &str, change: impl FnOnce(&mut Register)) -> &'static [Register] {
    let mut registers = REGISTERS.to_vec();
    change(registers.iter_mut().find(|register| register.name == name).unwrap());
    leak(registers)
}

/// The region with one more edge.
fn with(edge: Transition) -> &'static [Region] {
    region(|edges| edges.push(edge))
}

fn region(change: impl FnOnce(&mut Vec<Transition>)) -> &'static [Region] {
    let mut edges = REGION.transitions.to_vec();
    change(&mut edges);
    leak(vec![Region { transitions: leak(edges), ..REGION }])
}

#[track_caller]
fn says(finding: &str, parts: &[&str]) {
    for part in parts {
        assert!(finding.contains(part), "{finding:?} does not say {part:?}");
    }
}

#[test]
fn the_small_model_is_sound() {
    assert_eq!(verify(&SMALL), []);
}

#[test]
fn a_machine_is_not_made_of_a_broken_table() {
    let mut model = SMALL.clone();
    model.regions = with(Transition::new("Off", On::written("NONE"), "Fly"));
    let fault = Machine::new(Box::leak(Box::new(model))).unwrap_err().to_string();
    says(&fault, &["model small is not sound", "NONE", "Fly", "\n"]);
}

#[test]
fn names_mean_something() {
    let edge = |on, to| with(Transition::new("Off", on, to));
    says(&found(|m| m.regions = edge(On::written("NONE"), "Run")), &["region only", "no register \"NONE\""]);
    says(&found(|m| m.regions = edge(On::written("CMD"), "Fly")), &["no state \"Fly\""]);
    let from = Transition::new("Fly", On::written("CMD"), "Run");
    says(&found(|m| m.regions = with(from)), &["no state \"Fly\""]);
    let given = Transition::new("Off", On::written("LO"), "Run").given("NONE", 1, 1);
    says(&found(|m| m.regions = with(given)), &["NONE"]);
    let check = Transition::new("Off", On::written("LO"), "Run").check(&[Check::Descriptors("none")]);
    says(&found(|m| m.regions = with(check)), &["no ring \"none\""]);
    let check = Transition::new("Off", On::written("LO"), "Run").check(&[Check::Block("none")]);
    says(&found(|m| m.regions = with(check)), &["no block \"none\""]);
    says(&found(|m| m.regions = with(Transition::new("Run", On::drained("none"), "Off"))), &["\"none\""]);
    says(&found(|m| m.interrupts.status = "NONE"), &["interrupts", "NONE"]);
    says(&found(|m| m.reset.done.0 = "NONE"), &["reset", "NONE"]);
    says(&found(|m| m.halt = &[Restore::Value("NONE", 0)]), &["halt", "NONE"]);
}

#[test]
fn what_a_data_port_does_needs_one() {
    says(&found(|m| m.regions = with(Transition::new("Run", On::Moved, "Off"))), &["no data port"]);
    let mut restore = SMALL.restore.to_vec();
    restore.push(Restore::Memory);
    says(&found(|m| m.restore = leak(restore)), &["restore", "no data port"]);
}

#[test]
fn registers_do_not_overlap_in_a_bank() {
    says(
        &found(|m| m.registers = register("SPARE", |r| r.offset = 3)),
        &["LO", "overlaps SPARE", "both can be read"],
    );
    // One is only read, the other only written: both may stay.
    let mut model = SMALL.clone();
    model.registers = register("WIDE", |r| (r.offset, r.width) = (1, 1));
    assert_eq!(verify(&model), []);
    says(&found(|m| m.registers = register("WIDE", |r| r.width = 17)), &["WIDE", "beyond"]);
    says(&found(|m| m.registers = register("WIDE", |r| r.width = 0)), &["WIDE", "no bytes"]);
    says(&found(|m| m.registers = register("WIDE", |r| r.bank = Some(1))), &["WIDE", "bank"]);
    says(&found(|m| m.registers = register("WIDE", |r| r.reads = Reads::Never)), &["neither"]);
    let mut model = SMALL.clone();
    model.registers = register("WIDE", |r| r.name = "LO");
    assert!(verify(&model).iter().any(|finding| finding.to_string().contains("two of this name")));
}

#[test]
fn banks_are_chosen_by_one_byte_that_is_seen() {
    let mut model = SMALL.clone();
    model.banks = Some(Banks { register: "SPARE", mask: 0xc0, shift: 6, keep: 0, set: 0 });
    let all = verify(&model).iter().map(|finding| format!("{finding}\n")).collect::<String>();
    says(&all, &["banks: SPARE is not one byte", "banks: not every write to SPARE is seen"]);
}

#[test]
fn banks_are_a_field() {
    let banks = |register, mask, shift| Some(Banks { register, mask, shift, keep: 0, set: 0 });
    for (mask, shift) in [(0, 0), (0xc0, 5), (0xa0, 5), (0x80, 200)] {
        says(&found(|m| m.banks = banks("CMD", mask, shift)), &["banks", "not a number of banks"]);
    }
    assert_eq!(verify(&StateModel { banks: banks("CMD", 0xc0, 6), ..SMALL.clone() }), []);
}

#[test]
fn every_state_can_be_reached_and_left() {
    let state = |state: State| {
        let mut states = STATES.to_vec();
        states.push(state);
        leak(states)
    };
    let regions = |states, edges: &[Transition]| {
        let transitions = leak([REGION.transitions, edges].concat());
        leak(vec![Region { states, transitions, ..REGION }])
    };
    let none = state(State::reusable("Lost", "?"));
    says(&found(|m| m.regions = regions(none, &[])), &["state Lost", "no way leads here"]);
    let trap = state(State::busy("Trap", "?"));
    let into = Transition::new("Off", On::written("LO"), "Trap");
    says(&found(|m| m.regions = regions(trap, &[into])), &["state Trap", "nothing ends it but a reset"]);
    // Two that lead to each other.
    let mut pair = trap.to_vec();
    pair.push(State::busy("Pit", "?"));
    let edges = [
        into,
        Transition::new("Trap", On::written("LO"), "Pit"),
        Transition::new("Pit", On::written("LO"), "Trap"),
    ];
    let mut model = SMALL.clone();
    model.regions = regions(leak(pair), &edges);
    let findings = verify(&model);
    assert_eq!(findings.len(), 2, "{findings:?}");
    assert!(findings.iter().all(|finding| finding.what.contains("no way leads from here")));
    // A way that is always refused is none.
    let refused = Transition::new("Trap", On::written("LO"), STAY).check(&[Check::Deny("no")]);
    says(&found(|m| m.regions = regions(trap, &[into, refused])), &["state Trap", "nothing ends it"]);
}

#[test]
fn some_state_is_reusable() {
    let states = leak(vec![State::busy("Off", "?"), State::busy("Run", "?")]);
    says(&found(|m| m.regions = leak(vec![Region { states, ..REGION }])), &["any of its states", "reusable"]);
}

#[test]
fn an_event_that_nobody_sees_is_a_hole() {
    let edge = Transition::new("Off", On::written("SPARE"), "Run");
    let hole = found(|m| m.regions = with(edge));
    says(&hole, &["region only, Off on write SPARE to Run", "a hole", "in Off", "hook_writes()"]);
    // Hooked in that state, it is none; hooked in another one, it is.
    let hooked = |at: usize| {
        let mut states = STATES.to_vec();
        states[at] = states[at].hooks(&[("SPARE", Way::Write)]);
        leak(vec![Region { states: leak(states), ..with(edge)[0] }])
    };
    let mut model = SMALL.clone();
    model.regions = hooked(0);
    assert_eq!(verify(&model), []);
    says(&found(|m| m.regions = hooked(1)), &["a hole"]);
    says(&found(|m| m.regions = with(Transition::new("Run", On::read("CMD"), "Off"))), &["no read of CMD"]);
    says(&found(|m| m.regions = with(Transition::new(ANY, On::written("SPARE"), "Run"))), &["in Off, Run"]);
}

#[test]
fn nobody_asks_the_hardware_where_nothing_is_waited_for() {
    let edge = Transition::new("Off", On::became("CMD", 4, 4), "Run");
    says(&found(|m| m.regions = with(edge)), &["nobody asks for it in Off"]);
    let edge = Transition::new("Run", On::became("BELL", 4, 4), "Off");
    says(&found(|m| m.regions = with(edge)), &["BELL cannot be asked"]);
}

#[test]
fn an_edge_that_is_never_taken_is_found() {
    let shadowed = |first: On, second: On| {
        let edges = [Transition::new(ANY, first, "Run"), Transition::new("Off", second, "Run")];
        found(|m| m.regions = region(|all| all.extend(edges)))
    };
    for (first, second) in [
        (On::written("LO"), On::sets("LO", 2)),
        (On::written("LO"), On::write("LO", 3, 1)),
        (On::write("LO", 1, 1), On::write("LO", 3, 1)),
        (On::sets("LO", 3), On::sets("LO", 2)),
        (On::sets("LO", 3), On::write("LO", 7, 5)),
        (On::interrupt(3), On::interrupt(1)),
    ] {
        says(&shadowed(first, second), &["it is never taken", "fits first"]);
    }
    // These have something left.
    for (first, second) in [
        (On::write("LO", 3, 1), On::write("LO", 1, 1)),
        (On::sets("LO", 2), On::sets("LO", 3)),
        (On::sets("LO", 2), On::write("LO", 1, 1)),
        (On::write("LO", 1, 1), On::write("HI", 1, 1)),
    ] {
        let edges = [Transition::new(ANY, first, "Run"), Transition::new("Off", second, "Run")];
        let mut model = SMALL.clone();
        model.regions = region(|all| all.extend(edges));
        assert_eq!(verify(&model), []);
    }
    let given = Transition::new("Off", On::written("LO"), "Run").given("HI", 1, 1);
    let mut model = SMALL.clone();
    model.regions = region(|all| all.extend([given, Transition::new("Off", On::written("LO"), "Run")]));
    assert_eq!(verify(&model), [], "it is taken when the condition does not hold");
}

#[test]
fn values_that_never_fit_are_found() {
    let edge = |on| with(Transition::new("Off", on, "Run"));
    says(&found(|m| m.regions = edge(On::write("LO", 1, 2))), &["LO & 0x1 is never 0x2"]);
    says(&found(|m| m.regions = edge(On::write("CMD", 0x100, 0))), &["CMD (1 bytes) has not"]);
    says(&found(|m| m.regions = edge(On::sets("LO", 0))), &["no bit"]);
    says(&found(|m| m.regions = with(Transition::new("Run", On::interrupt(4), "Off"))), &["no interrupt"]);
    says(&found(|m| m.interrupts.error = 4), &["does not interrupt"]);
}

#[test]
fn what_is_refused_leads_nowhere_and_what_has_happened_cannot_be_refused() {
    let deny = &[Check::Deny("no")];
    let edge = Transition::new("Off", On::written("LO"), "Run").check(deny);
    says(&found(|m| m.regions = with(edge)), &["leads nowhere", "STAY"]);
    let edge = Transition::new("Run", On::interrupt(1), STAY).check(deny);
    says(&found(|m| m.regions = with(edge)), &["nothing can be checked before"]);
    let edge = Transition::new("Off", On::written("LO"), STAY).check(&[Check::Deny("")]);
    says(&found(|m| m.regions = with(edge)), &["no reason"]);
}

#[test]
fn the_hardware_follows_nothing_that_nobody_has_looked_at() {
    let unchecked = region(|edges| edges[1].checks = &[]);
    says(&found(|m| m.regions = unchecked), &["ring ring", "BELL", "Descriptors(\"ring\")"]);
    let receive = leak(vec![DescriptorRing { flow: Flow::Receive, ..RING }]);
    says(&found(|m| m.rings = receive), &["CMD", "Base(\"ring\")"]);
    let silent = leak(vec![DescriptorRing { doorbell: None, ..RING }]);
    says(&found(|m| m.rings = silent), &["nothing makes the hardware look"]);
    let bits = leak(vec![DescriptorRing {
        descriptor: DescriptorLayout { end: 1 << 31, ..RING.descriptor },
        ..RING
    }]);
    says(&found(|m| m.rings = bits), &["share bits"]);
    let short =
        leak(vec![DescriptorRing { descriptor: DescriptorLayout { size: 14, ..RING.descriptor }, ..RING }]);
    says(&found(|m| m.rings = short), &["beyond the end"]);
    let odd = leak(vec![DescriptorRing { align: 24, ..RING }]);
    says(&found(|m| m.rings = odd), &["power of two"]);
    let block = Block { name: "block", base: ("LO", "HI"), flags: 0xf, start: 8, size: 64 };
    says(&found(|m| m.blocks = leak(vec![block])), &["block block", "Block(\"block\")"]);
}

#[test]
fn addresses_are_always_seen() {
    says(
        &found(|m| m.registers = register("LO", |r| r.hook = Hook::ByState)),
        &["ring ring", "value of LO", "hook_writes()"],
    );
    says(&found(|m| m.registers = register("STATUS", |r| r.hook = Hook::Writes)), &["STATUS", "hook_all()"]);
}

#[test]
fn what_guests_can_set_is_brought_back() {
    let short = &[Restore::Ring("ring"), Restore::Saved("CMD", ON)];
    says(&found(|m| m.restore = short), &["SPARE", "is not brought back", "Lost(\"SPARE\", why)"]);
    let lost = &[Restore::Ring("ring"), Restore::Lost("SPARE", "it is spare")];
    assert_eq!(verify(&StateModel { restore: lost, ..SMALL.clone() }), []);
    let why = &[Restore::Ring("ring"), Restore::Lost("SPARE", "")];
    says(&found(|m| m.restore = why), &["SPARE is lost for no reason"]);
    let twice = &[Restore::Ring("ring"), Restore::Ring("ring"), Restore::Saved("SPARE", 1)];
    says(&found(|m| m.restore = twice), &["2 times"]);
    let fixed = &[Restore::Ring("ring"), Restore::Saved("SPARE", 1), Restore::Saved("WIDE", 1)];
    says(&found(|m| m.restore = fixed), &["WIDE cannot be written"]);
    let unknown = register("SPARE", |r| r.reads = Reads::Never);
    says(&found(|m| m.registers = unknown), &["nobody knows what SPARE holds"]);
    let set = &[Restore::Ring("ring"), Restore::Saved("SPARE", 1), Restore::Shown("SPARE", 1)];
    says(&found(|m| m.restore = set), &["SPARE is not a value that only the card sets"]);
    says(&found(|m| m.halt = &[Restore::Saved("CMD", 1)]), &["halt", "nothing has been saved"]);
}

#[test]
fn a_reset_does_not_go_unnoticed() {
    says(
        &found(|m| m.regions = region(|edges| edges.retain(|edge| edge.to != RESET))),
        &["reset", "no edge on CMD", "RESET"],
    );
    says(&found(|m| m.reset.by.2 = RESETS << 8), &["reset", "CMD"]);
}

#[test]
fn states_are_told_apart_and_explained() {
    let states = |first, second| leak(vec![Region { states: leak(vec![first, second]), ..REGION }]);
    let silent = State { note: "", ..STATES[1] };
    says(&found(|m| m.regions = states(STATES[0], silent)), &["state Run", "note"]);
    let listed = STATES[1].hooks(&[("CMD", Way::Write)]);
    says(&found(|m| m.regions = states(STATES[0], listed)), &["CMD is hooked anyway"]);
    says(&found(|m| m.regions = leak(vec![REGION, REGION])), &["two of this name"]);
    says(&found(|m| m.regions = &[]), &["regions", "there are 0"]);
}
