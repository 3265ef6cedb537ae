//! Conditions of a model's own, as checks and as events.

use super::small::{ON, REGION, SMALL};
use crate::verify::verify;
use crate::{Check, Condition, Machine, ModelInput, On, Region, StateModel, Transition, Verdict};

fn below(values: &[u32]) -> bool {
    values[0] < values[1]
}

fn refusal(values: &[u32]) -> String {
    format!("{} is not below {}", values[0], values[1])
}

static BELOW: Condition =
    Condition { name: "below", words: "LO is below HI", registers: &["LO", "HI"], holds: below, refusal };
static ALIKE: Condition =
    Condition { name: "alike", words: "SPARE is below HI", registers: &["SPARE", "HI"], ..BELOW };

/// The small model with two edges more: a check by one condition, an event that is the other.
fn model(check: &'static Condition, event: &'static Condition) -> StateModel {
    let checks = vec![Check::Holds(check)].leak();
    let mut edges = REGION.transitions.to_vec();
    edges.push(Transition::new("Off", On::sets("CMD", ON), "Run").check(checks));
    edges.push(Transition::new("Run", On::Holds(event), "Off"));
    let regions = vec![Region { transitions: edges.leak(), ..REGION }].leak();
    StateModel { regions, ..SMALL.clone() }
}

fn found(check: &'static Condition, event: &'static Condition) -> String {
    verify(&model(check, event)).iter().map(|finding| format!("{finding}\n")).collect()
}

#[test]
fn a_condition_is_asked_for_while_a_state_waits_for_it() {
    let mut machine = Machine::new(Box::leak(Box::new(model(&BELOW, &ALIKE)))).unwrap();
    assert_eq!(machine.conditions(), [&ALIKE]);
    assert_eq!(machine.awaits_conditions().count(), 0, "nothing waits for it");
    let register = machine.find("CMD").unwrap();
    let pending = machine.ask(ModelInput::Write { register, value: ON });
    assert_eq!(pending.checks().collect::<Vec<_>>(), [&Check::Holds(&BELOW)]);
    machine.commit(pending);
    assert_eq!(machine.awaits_conditions().collect::<Vec<_>>(), [0]);
    assert!(
        matches!(machine.update(ModelInput::Holds { condition: 1 }), Verdict::Done(moves) if moves.is_empty())
    );
    assert!(
        matches!(machine.update(ModelInput::Holds { condition: 0 }), Verdict::Done(moves) if !moves.is_empty())
    );
    assert!(machine.reusable());
}

#[test]
fn two_conditions_are_the_same_if_they_are_one_static() {
    static TWIN: Condition = BELOW;
    assert_eq!(BELOW.name, TWIN.name);
    assert!(Check::Holds(&BELOW) == Check::Holds(&BELOW) && Check::Holds(&BELOW) != Check::Holds(&TWIN));
}

#[test]
fn a_function_is_given_values_that_are_known() {
    static WIDE: Condition = Condition { registers: &["WIDE"], ..BELOW };
    static NONE: Condition = Condition { registers: &[], ..BELOW };
    static SILENT: Condition = Condition { words: "", ..BELOW };
    static LOST: Condition = Condition { registers: &["LO", "NONE"], ..BELOW };
    static BELL: Condition = Condition { registers: &["BELL"], ..BELOW };
    assert_eq!(found(&BELOW, &ALIKE), "");
    assert_eq!(found(&BELOW, &BELL), "", "it cannot be read, and every write to it is seen");
    for (check, event, parts) in [
        (&ALIKE, &BELOW, ["the value of SPARE is needed", "hook_writes()"]),
        (&WIDE, &BELOW, ["no value of WIDE is kept", "4 bytes"]),
        (&BELOW, &WIDE, ["no value of WIDE is kept", "4 bytes"]),
        (&NONE, &BELOW, ["a function of 0 registers", "1 to 8"]),
        (&BELOW, &SILENT, ["nobody can tell", "words"]),
        (&LOST, &BELOW, ["no register \"NONE\"", "only"]),
    ] {
        let all = found(check, event);
        assert!(parts.iter().all(|part| all.contains(part)), "{parts:?}: {all}");
    }
}
