//! States and edges.

use super::{Look, MOST_EDGES, refused, subject};
use crate::limits::REGISTERS;
use crate::{ANY, Given, Hook, On, RESET, Reads, Region, STAY, State, StateModel, Transition, Way};

impl Look<'_> {
    pub(super) fn regions(&mut self) {
        let model = self.model;
        let mut edges = 0;
        for (at, region) in model.regions.iter().enumerate() {
            let place = format!("region {}", region.name);
            if model.regions[..at].iter().any(|other| other.name == region.name) {
                self.say(&place, "there are two of this name", "rename one");
            }
            if region.states.is_empty() {
                self.say(&place, "it has no states", "give it one, or leave the region out");
                continue;
            }
            for (at, state) in region.states.iter().enumerate() {
                self.state(region, state, &region.states[..at]);
            }
            for (at, transition) in region.transitions.iter().enumerate() {
                self.transition(region, transition);
                self.shadowed(region, transition, &region.transitions[..at]);
            }
            self.ways(region);
            edges += region.transitions.iter().map(|edge| from(region, edge).count()).sum::<usize>();
        }
        if edges > MOST_EDGES {
            self.say("regions", format!("there are {edges} edges"), format!("have up to {MOST_EDGES}"));
        }
    }

    fn state(&mut self, region: &Region, state: &State, before: &[State]) {
        let place = place(region, state.name);
        if before.iter().any(|other| other.name == state.name) {
            self.say(&place, "there are two of this name", "rename one");
        }
        if [ANY, STAY, RESET, ""].contains(&state.name) {
            self.say(&place, "this name means something else", "rename it");
        }
        if state.note.is_empty() {
            self.say(&place, "nobody can tell what the device does here", "write its note");
        }
        for (register, way) in state.hooks {
            let Some(register) = self.named(&place, register) else { continue };
            if self.model.registers.iter().take(REGISTERS).all(|own| own.name != register.name) {
                let what = format!("{} is hooked and none of the first {REGISTERS}", register.name);
                self.say(&place, what, "list it further up");
            }
            if hooked_always(register.hook, *way) {
                self.say(
                    &place,
                    format!("{} is hooked anyway", register.name),
                    "take it off the state's list",
                );
            }
        }
    }

    fn transition(&mut self, region: &Region, transition: &Transition) {
        let place = edge_place(self.model, region, transition);
        let has = |name: &str| region.states.iter().any(|state| state.name == name);
        if transition.from != ANY && !has(transition.from) {
            self.say(
                &place,
                format!("there is no state {:?}", transition.from),
                "name a state of the region, or ANY",
            );
        }
        if ![STAY, RESET].contains(&transition.to) && !has(transition.to) {
            self.say(
                &place,
                format!("there is no state {:?}", transition.to),
                "name a state of the region, STAY or RESET",
            );
        }
        if refused(transition.checks) && transition.to != STAY {
            self.say(&place, "it is always refused, so it leads nowhere", "lead it to STAY");
        }
        if refused(transition.checks) && transition.checks.len() > 1 {
            self.say(&place, "it is always refused, whatever else is checked", "leave the other checks out");
        }
        if let Some(Given { register, mask, is }) = transition.given {
            self.bits(&place, register, mask, is);
            self.known(&place, register);
        }
        self.event(&place, region, transition);
    }

    fn event(&mut self, place: &str, region: &Region, transition: &Transition) {
        match transition.on {
            On::Write { register, mask, is } => {
                self.bits(place, register, mask, is);
                self.seen(place, region, transition, register, Way::Write);
            }
            On::Sets { register, any } => {
                self.bits(place, register, any, 0);
                self.some_bit(place, any);
                self.seen(place, region, transition, register, Way::Write);
            }
            On::Read { register } => {
                self.named(place, register);
                self.seen(place, region, transition, register, Way::Read);
            }
            On::Interrupt { any } => {
                self.some_bit(place, any);
                let bits = self.model.interrupts.bits | self.model.interrupts.live;
                if any & !bits != 0 {
                    self.say(place, format!("{:#x} is no interrupt", any & !bits), "take bits of the status");
                }
            }
            On::Became { register, mask, is } => {
                self.bits(place, register, mask, is);
                self.some_bit(place, mask);
                let unreadable =
                    |register: &&crate::Register| matches!(register.reads, Reads::Never | Reads::Effect);
                if let Some(register) = self.named(place, register).filter(unreadable) {
                    self.say(
                        place,
                        format!("{} cannot be asked without an effect", register.name),
                        "wait for a register that can be read",
                    );
                }
                self.asked(place, region, transition);
            }
            On::Drained { ring } => {
                if !self.model.rings.iter().any(|own| own.name == ring) {
                    self.say(place, format!("there is no ring {ring:?}"), "name one of the rings");
                }
                self.asked(place, region, transition);
            }
            On::Moved => {
                if self.model.port.is_none() {
                    self.say(place, "there is no data port", "describe it in `port`");
                }
            }
            On::Holds(condition) => {
                self.asked_condition(place, condition);
                self.asked(place, region, transition);
            }
        }
        if !transition.checks.is_empty()
            && subject(&transition.on).is_none_or(|_| !told_before(&transition.on))
        {
            self.say(
                place,
                "it has happened when it is told, so nothing can be checked before",
                "leave the checks out",
            );
        }
    }

    fn some_bit(&mut self, place: &str, bits: u32) {
        if bits == 0 {
            self.say(place, "no bit of nothing ever fits", "name the bits");
        }
    }

    /// The monitor asks the hardware and the rings only while a state is in the way.
    fn asked(&mut self, place: &str, region: &Region, transition: &Transition) {
        let idle: Vec<&str> =
            from(region, transition).filter(|state| state.reusable).map(|state| state.name).collect();
        if !idle.is_empty() {
            self.say(
                place,
                format!("nobody asks for it in {}, where the device may change hands", idle.join(", ")),
                "let it lead out of states that are busy",
            );
        }
    }

    /// An access that is not hooked is not told: a hole.
    fn seen(&mut self, place: &str, region: &Region, transition: &Transition, register: &str, way: Way) {
        let Some(found) = self.named(place, register) else { return };
        if hooked_always(found.hook, way) {
            return;
        }
        let blind: Vec<&str> = from(region, transition)
            .filter(|state| !state.hooks.contains(&(found.name, way)))
            .map(|state| state.name)
            .collect();
        if !blind.is_empty() {
            let verb = if way == Way::Read { "read" } else { "write" };
            self.say(
                place,
                format!(
                    "a hole: no {verb} of {register} is hooked in {}, so it would not be seen",
                    blind.join(", ")
                ),
                format!("hook it there, or mark {register} with hook_writes() or hook_all()"),
            );
        }
    }

    /// Whether one before it takes everything that would fit it.
    fn shadowed(&mut self, region: &Region, transition: &Transition, before: &[Transition]) {
        let shadows = |other: &&Transition| {
            (other.from == ANY || other.from == transition.from)
                && (other.given.is_none() || other.given == transition.given)
                && covers(&other.on, &transition.on)
        };
        if let Some(other) = before.iter().find(shadows) {
            self.say(
                edge_place(self.model, region, transition),
                format!("it is never taken: {} fits first", words(self.model, other)),
                "put it before that one, or leave it out",
            );
        }
    }

    /// Every state can be reached, and left again to where the device may change hands.
    fn ways(&mut self, region: &Region) {
        let steps: Vec<(usize, usize)> = region
            .transitions
            .iter()
            .filter(|edge| !refused(edge.checks))
            .flat_map(|edge| {
                let to = region.states.iter().position(|state| state.name == edge.to);
                let at = |state: &State| region.states.iter().position(|own| own.name == state.name);
                from(region, edge).filter_map(move |state| Some((at(state)?, to?))).collect::<Vec<_>>()
            })
            .collect();
        // Begins with the first, and with `ends`; grows by one state a round.
        let mut reached = vec![false; region.states.len()];
        reached[0] = true;
        let mut back: Vec<bool> = region.states.iter().map(|state| state.reusable).collect();
        for _ in 0..region.states.len() {
            for (from, to) in &steps {
                reached[*to] |= reached[*from];
                back[*from] |= back[*to];
            }
        }
        if !region.states.iter().any(|state| state.reusable) {
            self.say(
                format!("region {}", region.name),
                "the device may not change hands in any of its states",
                "mark at least one as reusable",
            );
            return;
        }
        for (at, state) in region.states.iter().enumerate() {
            let place = place(region, state.name);
            if !reached[at] {
                self.say(
                    &place,
                    "no way leads here from the first state",
                    "give it an edge, or leave it out",
                );
            }
            let leaves = steps.iter().any(|(from, to)| *from == at && *to != at);
            if !state.reusable && !leaves {
                self.say(&place, "nothing ends it but a reset", "say which event does");
            } else if !back[at] {
                self.say(
                    &place,
                    "no way leads from here to where the device may change hands",
                    "give it, or a state that follows, an edge to one that is reusable",
                );
            }
        }
    }
}

/// Whether the monitor tells an event before the hardware hears of it.
fn told_before(event: &On) -> bool {
    matches!(event, On::Write { .. } | On::Sets { .. } | On::Read { .. })
}

fn hooked_always(hook: Hook, way: Way) -> bool {
    hook == Hook::Both || (hook == Hook::Writes && way == Way::Write)
}

/// The states that an edge leads out of.
fn from<'a>(region: &'a Region, edge: &'a Transition) -> impl Iterator<Item = &'a State> {
    region.states.iter().filter(move |state| [ANY, state.name].contains(&edge.from))
}

/// Whether whatever fits the second event fits the first.
fn covers(first: &On, second: &On) -> bool {
    match (*first, *second) {
        (On::Write { register, mask, is }, On::Write { register: own, mask: wide, is: value }) => {
            register == own && mask & !wide == 0 && value & mask == is
        }
        (On::Write { register, mask: 0, is: 0 }, On::Sets { register: own, .. }) => register == own,
        (On::Sets { register, any }, On::Write { register: own, mask, is }) => {
            register == own && is & mask & any != 0
        }
        (On::Sets { register, any }, On::Sets { register: own, any: few }) => {
            register == own && few & !any == 0
        }
        (On::Interrupt { any }, On::Interrupt { any: few }) => few & !any == 0,
        (On::Became { register, mask, is }, On::Became { register: own, mask: wide, is: value }) => {
            register == own && mask & !wide == 0 && value & mask == is
        }
        (first, second) => first == second,
    }
}

fn place(region: &Region, state: &str) -> String {
    format!("region {}, state {state}", region.name)
}

pub(super) fn edge_place(model: &StateModel, region: &Region, transition: &Transition) -> String {
    format!("region {}, {}", region.name, words(model, transition))
}

fn words(model: &StateModel, transition: &Transition) -> String {
    let on = crate::words::event(model, &transition.on);
    format!("{} on {on} to {}", transition.from, transition.to)
}
