//! The machine on a small table.

use super::small::{ON, SMALL};
use crate::{Check, Machine, ModelFault, ModelInput, ModelStateV1, RegisterId, StateModel, Verdict, Way};

fn machine() -> Machine {
    Machine::new(&SMALL).unwrap()
}

fn write(machine: &mut Machine, name: &str, value: u32) -> Verdict {
    let register = machine.find(name).unwrap();
    machine.update(ModelInput::Write { register, value })
}

/// Into Run.
fn run(machine: &mut Machine) {
    write(machine, "CMD", ON);
    let Verdict::Check(pending) = write(machine, "BELL", 1) else { panic!("a ring is checked") };
    machine.commit(pending);
    assert_eq!(machine.busy(), Some(("only", "Run")));
}

#[test]
fn an_access_is_split_into_the_registers_that_it_touches() {
    let machine = machine();
    let split = |way, offset, width| {
        let pieces = machine.at(way, offset, width);
        pieces
            .iter()
            .map(|p| (p.register.map(|id| machine.register(id).name), p.from, p.within, p.width))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        split(Way::Write, 0, 4),
        [(Some("CMD"), 0, 0, 1), (Some("BELL"), 1, 0, 1), (Some("SPARE"), 2, 0, 2)]
    );
    assert_eq!(split(Way::Read, 6, 4), [(Some("LO"), 0, 2, 2), (Some("HI"), 2, 0, 2)], "unaligned");
    assert_eq!(split(Way::Read, 20, 8), [(Some("WIDE"), 0, 4, 8)]);
    assert_eq!(split(Way::Read, 30, 4), [(Some("WIDE"), 0, 14, 2), (None, 2, 0, 2)], "beyond the end");
    assert_eq!(split(Way::Read, u64::MAX - 1, 4), [(None, 0, 0, 4)]);
    assert_eq!(split(Way::Read, 1, 1), [(Some("BELL"), 0, 0, 1)], "known, though it cannot be read");
    assert_eq!(split(Way::Read, 4, 0), []);
    assert_eq!(split(Way::Read, 16, 99).len(), 1, "no more than 8 bytes");
}

#[test]
fn a_part_of_a_register_is_merged_with_what_was_written_before() {
    let mut machine = machine();
    write(&mut machine, "LO", 0x1122_3344);
    let pieces = machine.at(Way::Write, 6, 1);
    assert_eq!(machine.merged(&pieces[0], &[0xaa]), 0x11aa_3344);
    let pieces = machine.at(Way::Write, 7, 2);
    assert_eq!(machine.merged(&pieces[0], &[0xaa, 0xbb]), 0xaa22_3344);
    assert_eq!(machine.merged(&pieces[1], &[0xaa, 0xbb]), 0xbb);
    assert_eq!(machine.merged(&pieces[1], &[]), 0, "bytes that are not there");
    write(&mut machine, "STATUS", 0xffff);
    let pieces = machine.at(Way::Write, 15, 1);
    assert_eq!(machine.merged(&pieces[0], &[0x01]), 0x0100, "ones clear: others are left alone");
}

#[test]
fn a_refused_event_has_not_happened() {
    let mut machine = machine();
    write(&mut machine, "CMD", ON);
    let register = machine.find("BELL").unwrap();
    let pending = machine.ask(ModelInput::Write { register, value: 1 });
    assert_eq!(pending.checks().collect::<Vec<_>>(), [&Check::Descriptors("ring")]);
    assert_eq!((machine.value(register), machine.value_after(&pending, register)), (0, 1));
    drop(pending);
    assert!(machine.reusable());
    assert_eq!((machine.value(register), machine.updates()), (0, 1));
}

#[test]
fn a_condition_looks_at_what_was_written_earlier() {
    let mut machine = machine();
    assert!(matches!(write(&mut machine, "BELL", 1), Verdict::Done(moves) if moves.is_empty()), "it is off");
    assert!(machine.reusable());
    run(&mut machine);
    assert_eq!(machine.transitions(), 1);
}

#[test]
fn what_a_busy_state_waits_for_is_named_and_ends_it() {
    for end in 0..3 {
        let mut machine = machine();
        assert_eq!((machine.awaits().count(), machine.awaits_rings().count()), (0, 0));
        run(&mut machine);
        let wait = machine.awaits().next().unwrap();
        assert_eq!(machine.register(wait.register).name, "CMD");
        assert_eq!(machine.awaits_rings().collect::<Vec<_>>(), [0]);
        assert_eq!(machine.awaits_conditions().count(), 0);
        let seen = [
            ModelInput::Became { register: wait.register, value: wait.is },
            ModelInput::Drained { ring: 0 },
            ModelInput::Interrupt { bits: 0x30 },
        ][end];
        let Verdict::Done(moves) = machine.update(seen) else { panic!("nothing to check") };
        assert_eq!(machine.moves(&moves).collect::<Vec<_>>(), [("only", "Run", "Off")]);
        assert!(machine.reusable());
    }
}

#[test]
fn a_reset_begins_again_and_forgets() {
    let mut machine = machine();
    run(&mut machine);
    let Verdict::Done(moves) = write(&mut machine, "CMD", 3) else { panic!("nothing to check") };
    assert!(moves.reset());
    assert!(machine.reusable());
    assert_eq!(machine.value(machine.find("CMD").unwrap()), 0);
    run(&mut machine);
    machine.reset();
    assert!(machine.reusable());
}

#[test]
fn saved_and_loaded_it_goes_on() {
    let mut first = machine();
    write(&mut first, "LO", 0xfeed);
    run(&mut first);
    let saved: ModelStateV1 = serde_json::from_str(&serde_json::to_string(&first.save()).unwrap()).unwrap();
    let mut second = machine();
    second.load(&saved).unwrap();
    assert_eq!(second.busy(), Some(("only", "Run")));
    assert_eq!(second.value(second.find("LO").unwrap()), 0xfeed);
    assert_eq!(second.save(), saved);
    let mut third = machine();
    assert!(third.adopt(&second));
    assert_eq!(third.save(), saved);
    let other: &'static StateModel = Box::leak(Box::new(SMALL.clone()));
    assert!(!third.adopt(&Machine::new(other).unwrap()), "another model's");
    assert_eq!(third.save(), saved);
}

#[test]
fn a_hostile_state_is_refused_whole() {
    let mut machine = machine();
    run(&mut machine);
    let good = machine.save();
    let s = str::to_owned;
    let many = vec![(s("LO"), 1); 9];
    let broken = [
        ("other", good.states.clone(), vec![]),
        ("small", vec![], vec![]),
        ("small", vec![(s("only"), s("Run")), (s("only"), s("Off"))], vec![]),
        ("small", vec![(s("else"), s("Run"))], vec![]),
        ("small", vec![(s("only"), s("Fly"))], vec![]),
        ("small", good.states.clone(), vec![(s("NONE"), 1)]),
        ("small", good.states.clone(), vec![(s("CMD"), 0x100)]),
        ("small", good.states.clone(), many),
    ];
    for (model, states, values) in broken {
        let state = ModelStateV1 { model: s(model), states, values };
        let fault = machine.load(&state).unwrap_err();
        assert!(matches!(fault, ModelFault::State { .. }), "{fault}");
        assert_eq!(machine.save(), good, "{fault}");
    }
}

#[test]
fn ids_of_another_model_do_nothing() {
    let mut machine = machine();
    // As a model with more registers has.
    let register = RegisterId(60);
    for seen in [
        ModelInput::Write { register, value: !0 },
        ModelInput::Read { register },
        ModelInput::Became { register, value: !0 },
        ModelInput::Drained { ring: 200 },
        ModelInput::Moved,
        ModelInput::Holds { condition: 0 },
        ModelInput::Holds { condition: 255 },
    ] {
        assert!(matches!(machine.update(seen), Verdict::Done(moves) if moves.is_empty()));
    }
    assert_eq!((machine.register(register).width, machine.value(register)), (0, 0));
    assert!(!machine.hooked(register, Way::Write));
}
