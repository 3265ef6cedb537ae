//! The dense form of a table.

use std::sync::{Mutex, PoisonError};

use crate::input::{Await, ModelInput};
use crate::layout::{Layout, RegisterId};
use crate::limits::REGIONS;
use crate::{
    ANY, Check, Condition, Hook, ModelFault, On, RESET, STAY, State, StateModel, Transition, Way, verify,
};

/// [`Edge::to`]: the region stays.
pub(crate) const TO_STAY: u8 = 0xff;
/// [`Edge::to`]: the device resets.
pub(crate) const TO_RESET: u8 = 0xfe;
/// [`Edge::given`]: no condition.
pub(crate) const GIVEN_NONE: u8 = 0xff;
/// No edge. There are fewer than this ([`verify`]).
pub(crate) const NO_EDGE: u16 = u16::MAX;

/// One transition out of one state on one kind of event.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Edge {
    pub mask: u32,
    pub is: u32,
    pub given_mask: u32,
    pub given_is: u32,
    pub given: u8,
    pub to: u8,
    /// Fits if `value & mask` is not `is`, instead of if it is.
    pub unequal: bool,
    pub checks: &'static [Check],
}

/// A model by numbers. States are numbered over all regions, one after another. An event's *key* is its kind with its register or
/// ring.
#[derive(Debug, Clone)]
pub(crate) struct Compiled {
    pub layout: Layout,
    pub banks: usize,
    pub bank: Option<RegisterId>,
    /// The mask and the shift of the bank's field.
    field: (u8, u8),
    /// The first state of each region.
    pub first: [u8; REGIONS],
    /// One bit a state.
    pub reusable: u64,
    /// By state and way: what it hooks, one bit a register.
    pub hooks: Box<[[u128; 2]]>,
    /// What is hooked in all states.
    pub always: [u128; 2],
    /// What events are about that take a function.
    pub conditions: Box<[&'static Condition]>,
    /// By key: which regions have edges for it.
    pub listens: Box<[u8]>,
    /// By `key * states + state`: where its edges are.
    spans: Box<[(u16, u16)]>,
    edges: Box<[Edge]>,
    states: usize,
    registers: usize,
    rings: usize,
}

impl Compiled {
    /// The dense form of a model: made at the first call, then kept for as long as the process lives, as the table itself is.
    pub fn of(model: &'static StateModel) -> Result<&'static Self, ModelFault> {
        static MADE: Mutex<Vec<(&'static StateModel, &'static Compiled)>> = Mutex::new(Vec::new());
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, compiled)) = made.iter().find(|(own, _)| std::ptr::eq(*own, model)) {
            return Ok(compiled);
        }
        let compiled: &'static Self = Box::leak(Box::new(Self::new(model)?));
        made.push((model, compiled));
        Ok(compiled)
    }

    fn new(model: &'static StateModel) -> Result<Self, ModelFault> {
        let findings = verify::verify(model);
        if !findings.is_empty() {
            return Err(ModelFault::Unsound { model: model.name, findings });
        }
        let banks = model.banks.map_or(1, |banks| usize::from(banks.mask >> banks.shift) + 1);
        let bank = model.banks.and_then(|banks| id(model, banks.register));
        let states: usize = model.regions.iter().map(|region| region.states.len()).sum();
        let registers = model.registers.len();
        let rings = model.rings.len();
        let conditions = conditions(model);
        let keys = registers * 3 + rings + 2 + conditions.len();
        let mut compiled = Self {
            layout: Layout::new(model, banks, bank),
            banks,
            bank,
            field: model.banks.map_or((0, 0), |banks| (banks.mask, banks.shift)),
            first: [0; REGIONS],
            reusable: 0,
            hooks: vec![[0; 2]; states].into_boxed_slice(),
            always: always(model),
            conditions,
            listens: vec![0; keys].into_boxed_slice(),
            spans: vec![(0, 0); keys * states].into_boxed_slice(),
            edges: Box::default(),
            states,
            registers,
            rings,
        };
        compiled.fill(model);
        Ok(compiled)
    }

    fn fill(&mut self, model: &'static StateModel) {
        let mut lists: Vec<Vec<(usize, Edge)>> = vec![Vec::new(); self.spans.len()];
        let mut first = 0;
        for (place, region) in model.regions.iter().enumerate() {
            self.first[place] = first as u8;
            for (at, state) in region.states.iter().enumerate() {
                let number = first + at;
                self.reusable |= u64::from(state.reusable) << number;
                for (register, way) in state.hooks {
                    if let Some(id) = id(model, register) {
                        self.hooks[number][*way as usize] |= 1u128.checked_shl(id.0.into()).unwrap_or(0);
                    }
                }
                let fitting = region.transitions.iter().filter(|edge| [ANY, state.name].contains(&edge.from));
                for transition in fitting {
                    let to = match transition.to {
                        STAY => TO_STAY,
                        RESET => TO_RESET,
                        name => {
                            let at = region.states.iter().position(|state| state.name == name);
                            at.map_or(TO_STAY, |at| (first + at) as u8)
                        }
                    };
                    let Some((key, edge)) = self.edge(model, transition, to) else { continue };
                    lists[key * self.states + number].push((place, edge));
                }
            }
            first += region.states.len();
        }
        for (at, list) in lists.iter_mut().enumerate() {
            // Those at the end that change nothing need not be looked at.
            let (key, number) = (at / self.states, (at % self.states) as u8);
            let idle = |edge: &Edge| edge.checks.is_empty() && [TO_STAY, number].contains(&edge.to);
            while list.last().is_some_and(|(_, edge)| idle(edge)) {
                list.pop();
            }
            for (place, _) in list.iter() {
                self.listens[key] |= 1 << place;
            }
        }
        let mut edges = Vec::new();
        for (span, list) in self.spans.iter_mut().zip(lists) {
            *span = (edges.len() as u16, (edges.len() + list.len()) as u16);
            edges.extend(list.into_iter().map(|(_, edge)| edge));
        }
        self.edges = edges.into_boxed_slice();
    }

    fn edge(&self, model: &StateModel, transition: &Transition, to: u8) -> Option<(usize, Edge)> {
        let given = transition.given;
        let mut edge = Edge {
            mask: 0,
            is: 0,
            given_mask: given.map_or(0, |given| given.mask),
            given_is: given.map_or(0, |given| given.is),
            given: given.and_then(|given| id(model, given.register)).map_or(GIVEN_NONE, |id| id.0),
            to,
            unequal: false,
            checks: transition.checks,
        };
        let seen = match transition.on {
            On::Write { register, mask, is } => {
                (edge.mask, edge.is) = (mask, is);
                ModelInput::Write { register: id(model, register)?, value: 0 }
            }
            On::Sets { register, any } => {
                (edge.mask, edge.unequal) = (any, true);
                ModelInput::Write { register: id(model, register)?, value: 0 }
            }
            On::Read { register } => ModelInput::Read { register: id(model, register)? },
            On::Interrupt { any } => {
                (edge.mask, edge.unequal) = (any, true);
                ModelInput::Interrupt { bits: 0 }
            }
            On::Drained { ring } => {
                let ring = model.rings.iter().position(|own| own.name == ring)?;
                ModelInput::Drained { ring: ring as u8 }
            }
            On::Became { register, mask, is } => {
                (edge.mask, edge.is) = (mask, is);
                ModelInput::Became { register: id(model, register)?, value: 0 }
            }
            On::Moved => ModelInput::Moved,
            On::Holds(condition) => {
                let at = self.conditions.iter().position(|own| *own == condition)?;
                ModelInput::Holds { condition: at as u8 }
            }
        };
        Some((self.key(seen).0, edge))
    }

    /// The key of an event, and the value that edges look at. Of a register or ring of another model: a key without edges.
    #[inline]
    pub fn key(&self, seen: ModelInput) -> (usize, u32) {
        let of = |register: RegisterId, kind: usize| match register.index() {
            index if index < self.registers => kind * self.registers + index,
            _ => usize::MAX,
        };
        let rings = self.registers * 3;
        match seen {
            ModelInput::Write { register, value } => (of(register, 0), value),
            ModelInput::Read { register } => (of(register, 1), 0),
            ModelInput::Became { register, value } => (of(register, 2), value),
            ModelInput::Drained { ring } if usize::from(ring) < self.rings => (rings + usize::from(ring), 0),
            ModelInput::Drained { .. } => (usize::MAX, 0),
            ModelInput::Interrupt { bits } => (rings + self.rings, bits),
            ModelInput::Moved => (rings + self.rings + 1, 0),
            // The last keys: of a condition of another model there is none.
            ModelInput::Holds { condition } => (rings + self.rings + 2 + usize::from(condition), 0),
        }
    }

    /// Which regions have edges for a key, one bit a region, and where its row of states begins.
    #[inline]
    pub fn listeners(&self, key: usize) -> (u8, usize) {
        match self.listens.get(key) {
            Some(regions) => (*regions, key * self.states),
            None => (0, usize::MAX / 2),
        }
    }

    /// The edges out of a state in a row: the number of the first, and all of them.
    #[inline]
    pub fn edges(&self, base: usize, state: u8) -> (u16, &[Edge]) {
        let Some((from, to)) = self.spans.get(base + usize::from(state)) else { return (0, &[]) };
        (*from, self.edges.get(usize::from(*from)..usize::from(*to)).unwrap_or(&[]))
    }

    /// An edge by its number.
    #[inline]
    pub fn edge_at(&self, number: u16) -> Option<&Edge> {
        self.edges.get(usize::from(number))
    }

    /// What a state waits for in the hardware's registers.
    pub fn awaits(&self, state: u8) -> impl Iterator<Item = Await> + '_ {
        (0..self.registers).flat_map(move |register| {
            let register = RegisterId(register as u8);
            let (_, base) = self.listeners(self.key(ModelInput::Became { register, value: 0 }).0);
            self.edges(base, state).1.iter().map(move |edge| Await { register, mask: edge.mask, is: edge.is })
        })
    }

    /// A state by its number.
    pub fn state(&self, model: &'static StateModel, number: u8) -> &'static State {
        let mut left = usize::from(number);
        for region in model.regions {
            match region.states.get(left) {
                Some(state) => return state,
                None => left -= region.states.len(),
            }
        }
        &NO_STATE
    }

    pub fn find(&self, model: &StateModel, name: &str) -> Option<RegisterId> {
        id(model, name)
    }

    /// Which bank a value of the bank register chooses.
    #[inline]
    pub fn bank_of(&self, value: u32) -> usize {
        usize::from((value as u8 & self.field.0) >> (self.field.1 & 7))
    }
}

static NO_STATE: State = State::busy("(none)", "");

/// A register by its name.
pub(crate) fn id(model: &StateModel, name: &str) -> Option<RegisterId> {
    let at = model.registers.iter().position(|register| register.name == name)?;
    u8::try_from(at).ok().map(RegisterId)
}

/// The conditions of all events, each once.
fn conditions(model: &StateModel) -> Box<[&'static Condition]> {
    let mut all: Vec<&'static Condition> = Vec::new();
    for transition in model.regions.iter().flat_map(|region| region.transitions) {
        if let On::Holds(condition) = transition.on
            && !all.contains(&condition)
        {
            all.push(condition);
        }
    }
    all.into_boxed_slice()
}

fn always(model: &StateModel) -> [u128; 2] {
    let mut always = [0; 2];
    for (at, register) in model.registers.iter().enumerate() {
        let (reads, writes) = match register.hook {
            Hook::ByState => (false, false),
            Hook::Writes => (false, true),
            Hook::Both => (true, true),
        };
        // Of those beyond the first 128 none is: `verify` sees to it.
        let bit = 1u128.checked_shl(at as u32).unwrap_or(0);
        always[Way::Read as usize] |= u128::from(reads) * bit;
        always[Way::Write as usize] |= u128::from(writes) * bit;
    }
    always
}
