//! Whatever happens in whatever order.

use std::sync::LazyLock;

use ioplane_model::{
    ANY, Machine, ModelInput, ModelStateV1, On, Reads, Register, RegisterId, STAY, StateModel, Verdict, Way,
    Writes,
};
use proptest::prelude::*;

use crate::{catalog, rtl8139};

/// As many registers as no model of ours has.
const MOST: usize = 112;

/// What a model with that many registers calls them: all of ours, by place, and some that there are not.
static IDS: LazyLock<Vec<RegisterId>> = LazyLock::new(|| {
    let mut model = rtl8139::MODEL.clone();
    let mut registers = model.registers.to_vec();
    for offset in model.size.. {
        if registers.len() == MOST {
            model.size = offset;
            break;
        }
        let name = format!("MORE{offset:X}").leak();
        registers.push(Register::new(name, offset, 1, Reads::Alive, Writes::Never));
    }
    model.registers = registers.leak();
    let machine = Machine::new(Box::leak(Box::new(model))).unwrap();
    machine.model().registers.iter().map(|register| machine.find(register.name).unwrap()).collect()
});

/// Any event of any model: registers and rings that there are, and some that there are not.
fn seen() -> impl Strategy<Value = ModelInput> {
    // Small values hit commands; a byte's worth of high bits hits masks.
    let value = prop_oneof![4 => 0u32..256, 1 => any::<u32>(), 1 => (0u32..32).prop_map(|bit| 1 << bit)];
    let register = proptest::sample::select(IDS.clone());
    prop_oneof![
        8 => (register.clone(), value.clone()).prop_map(|(register, value)| ModelInput::Write { register, value }),
        2 => register.clone().prop_map(|register| ModelInput::Read { register }),
        2 => value.clone().prop_map(|bits| ModelInput::Interrupt { bits }),
        1 => (0u8..4).prop_map(|ring| ModelInput::Drained { ring }),
        2 => (register, value).prop_map(|(register, value)| ModelInput::Became { register, value }),
        1 => Just(ModelInput::Moved),
        1 => (0u8..3).prop_map(|condition| ModelInput::Holds { condition }),
    ]
}

fn model() -> impl Strategy<Value = &'static StateModel> {
    proptest::sample::select(catalog::models().to_vec())
}

/// Every access that an edge out of a present state is about is hooked.
fn nothing_is_missed(machine: &Machine) -> Result<(), TestCaseError> {
    let states: Vec<_> = machine.states().collect();
    for (region, (_, state)) in machine.model().regions.iter().zip(&states) {
        for edge in region.transitions.iter().filter(|edge| [ANY, state.name].contains(&edge.from)) {
            let (name, way) = match edge.on {
                On::Write { register, .. } | On::Sets { register, .. } => (register, Way::Write),
                On::Read { register } => (register, Way::Read),
                _ => continue,
            };
            let id = machine.find(name).expect("a register");
            prop_assert!(machine.hooked(id, way), "{name} in {}", state.name);
        }
    }
    Ok(())
}

/// What the table says of one region, read slowly: the state that follows, or `None` for a reset.
fn slowly(machine: &Machine, region: usize, seen: ModelInput) -> Option<&'static str> {
    let region = &machine.model().regions[region];
    let (_, state) = machine.states().find(|(name, _)| *name == region.name).expect("a region");
    let is = |id: RegisterId, name| machine.register(id).name == name;
    let fits = |on: &On| match (*on, seen) {
        (On::Write { register, mask, is: value }, ModelInput::Write { register: id, value: written }) => {
            is(id, register) && written & mask == value
        }
        (On::Sets { register, any }, ModelInput::Write { register: id, value }) => {
            is(id, register) && value & any != 0
        }
        (On::Read { register }, ModelInput::Read { register: id }) => is(id, register),
        (On::Interrupt { any }, ModelInput::Interrupt { bits }) => bits & any != 0,
        (On::Drained { ring }, ModelInput::Drained { ring: at }) => {
            machine.model().rings.get(usize::from(at)).is_some_and(|own| own.name == ring)
        }
        (On::Became { register, mask, is: value }, ModelInput::Became { register: id, value: shown }) => {
            is(id, register) && shown & mask == value
        }
        (On::Moved, ModelInput::Moved) => true,
        (On::Holds(condition), ModelInput::Holds { condition: at }) => {
            machine.conditions().get(usize::from(at)).is_some_and(|own| *own == condition)
        }
        _ => false,
    };
    let edge = region.transitions.iter().find(|edge| {
        [ANY, state.name].contains(&edge.from)
            && fits(&edge.on)
            && edge.given.is_none_or(|given| {
                let id = machine.find(given.register).expect("a register");
                let value = match seen {
                    ModelInput::Write { register, value } if register == id => value,
                    _ => machine.value(id),
                };
                value & given.mask == given.is
            })
    });
    match edge.map(|edge| edge.to) {
        None | Some(STAY) => Some(state.name),
        Some(ioplane_model::RESET) => None,
        Some(to) => Some(to),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_sequence_does_what_the_table_says(model in model(), events in proptest::collection::vec(seen(), 1..150)) {
        let mut machine = Machine::new(model).unwrap();
        for event in events {
            let slow: Vec<_> = (0..model.regions.len()).map(|region| slowly(&machine, region, event)).collect();
            let pending = machine.ask(event);
            // All checks pass, even those that refuse: states must stay sound whatever the monitor lets through.
            let resets = pending.resets();
            prop_assert_eq!(resets, slow.iter().any(Option::is_none));
            let moves = machine.commit(pending);
            prop_assert_eq!(moves.reset(), resets);
            for ((_, state), slow) in machine.states().zip(&slow) {
                if !resets {
                    prop_assert_eq!(Some(state.name), *slow);
                }
            }
            nothing_is_missed(&machine)?;
            prop_assert_eq!(machine.reusable(), machine.busy().is_none());
            prop_assert!(machine.reusable() || !model.name.is_empty());
            for wait in machine.awaits() {
                prop_assert_eq!(wait.is & !wait.mask, 0);
            }
        }
    }

    #[test]
    fn saved_and_loaded_it_behaves_the_same(
        model in model(),
        before in proptest::collection::vec(seen(), 0..60),
        after in proptest::collection::vec(seen(), 0..60),
    ) {
        let mut machine = Machine::new(model).unwrap();
        for event in before {
            if let Verdict::Check(pending) = machine.update(event) {
                machine.commit(pending);
            }
        }
        // Values may not exceed their registers to be loaded, as the monitor's never do.
        for register in IDS.iter().copied().take(model.registers.len()) {
            let width = u32::from(machine.register(register).width);
            let mask = if width >= 4 { !0 } else { (1 << (width * 8)) - 1 };
            machine.note(register, machine.value(register) & mask);
        }
        let bytes = postcard::to_allocvec(&machine.save()).unwrap();
        let saved: ModelStateV1 = postcard::from_bytes(&bytes).unwrap();
        let mut loaded = Machine::new(model).unwrap();
        loaded.load(&saved).unwrap();
        prop_assert_eq!(loaded.bank(), machine.bank());
        for event in after {
            for one in [&mut machine, &mut loaded] {
                if let Verdict::Check(pending) = one.update(event) {
                    one.commit(pending);
                }
            }
            prop_assert_eq!(machine.save(), loaded.save());
            for way in [Way::Read, Way::Write] {
                prop_assert_eq!(machine.hooks(way), loaded.hooks(way));
            }
        }
    }

    #[test]
    fn a_split_covers_the_access_once(
        model in model(),
        bank in any::<u8>(),
        write in any::<bool>(),
        offset in prop_oneof![0u64..0x120, 0u64..0xb800, any::<u64>()],
        width in 0usize..12,
    ) {
        let machine = Machine::new(model).unwrap();
        let way = if write { Way::Write } else { Way::Read };
        let split = machine.at_bank(bank, way, offset, width);
        let mut next = 0;
        for piece in split.iter() {
            prop_assert_eq!(piece.from, next);
            prop_assert!(piece.width > 0);
            next += piece.width;
            if let Some(id) = piece.register {
                let register = machine.register(id);
                let first = u64::from(register.offset) + u64::from(piece.within);
                prop_assert_eq!(first, offset + u64::from(piece.from));
                prop_assert!(u32::from(piece.within) + u32::from(piece.width) <= u32::from(register.width));
            }
        }
        prop_assert_eq!(usize::from(next), width.min(8));
    }

    #[test]
    fn any_saved_state_is_taken_or_refused(
        model in model(),
        names in proptest::collection::vec(("[a-zA-Z]{0,9}", "[a-zA-Z+-]{0,9}"), 0..6),
        values in proptest::collection::vec(("[A-Z0-9_]{0,8}", any::<u32>()), 0..6),
    ) {
        let mut machine = Machine::new(model).unwrap();
        let saved = ModelStateV1 { model: model.name.to_owned(), states: names, values };
        let before = machine.save();
        if machine.load(&saved).is_err() {
            prop_assert_eq!(machine.save(), before);
        }
    }
}
