//! What runs of a model: dense tables, made once; an update allocates nothing and compares no names.

use crate::compile::{Compiled, Edge, GIVEN_NONE, NO_EDGE, TO_RESET, TO_STAY};
use crate::input::{Await, ModelInput};
use crate::layout::{AccessPieces, Piece, RegisterId};
use crate::limits::REGIONS;
use crate::{Check, Condition, ModelFault, Register, State, StateModel, Way, Writes};

/// An event that has been looked up and not yet happened: the checks have to be made first. Then [`Machine::commit`], or nothing.
#[derive(Debug)]
#[must_use = "the event has not happened until it is committed"]
pub struct Pending {
    seen: ModelInput,
    /// The edge that each region takes, and the state that it is in then.
    taken: [u16; REGIONS],
    to: [u8; REGIONS],
    unchecked: bool,
    reset: bool,
    table: &'static Compiled,
    serial: u64,
}

impl Pending {
    /// What must hold before the hardware hears of the event, in the order of the regions. If one fails, drop this: the event does
    /// not happen, and nothing has changed.
    pub fn checks(&self) -> impl Iterator<Item = &'static Check> + use<> {
        let table = self.table;
        self.taken.into_iter().filter_map(|edge| table.edge_at(edge)).flat_map(|edge| edge.checks)
    }

    /// Whether there is nothing to check.
    pub fn unchecked(&self) -> bool {
        self.unchecked
    }

    /// What the event is.
    pub fn input(&self) -> ModelInput {
        self.seen
    }

    /// Whether the event resets the device.
    pub fn resets(&self) -> bool {
        self.reset
    }
}

/// What [`Machine::update`] says.
#[derive(Debug)]
pub enum Verdict {
    /// There was nothing to check: it has happened.
    Done(Moves),
    /// To be checked first.
    Check(Pending),
}

/// Which regions went from which state to which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moves {
    from: [u8; REGIONS],
    to: [u8; REGIONS],
    reset: bool,
}

impl Moves {
    /// Whether every region stayed.
    pub fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// Whether the device was reset: virtual registers, rings and whatever else the monitor keeps of it begin again.
    pub fn reset(&self) -> bool {
        self.reset
    }
}

/// A model that runs: in which state each region is, what was written last, what is hooked now. One owner, one thread at a time.
#[derive(Debug, Clone)]
pub struct Machine {
    pub(crate) model: &'static StateModel,
    pub(crate) table: &'static Compiled,
    /// The state of each region, numbered over all regions.
    pub(crate) now: [u8; REGIONS],
    pub(crate) bank: usize,
    /// One bit a register, by way.
    hooked: [u128; 2],
    pub(crate) values: Box<[u32]>,
    updates: u64,
    transitions: u64,
}

impl Machine {
    /// Makes a model run, from its first states. Says everything that is wrong with the table.
    pub fn new(model: &'static StateModel) -> Result<Self, ModelFault> {
        let table = Compiled::of(model)?;
        let mut machine = Self {
            model,
            now: table.first,
            table,
            bank: 0,
            hooked: [0; 2],
            values: vec![0; model.registers.len()].into_boxed_slice(),
            updates: 0,
            transitions: 0,
        };
        machine.rehook();
        Ok(machine)
    }

    /// The table.
    pub fn model(&self) -> &'static StateModel {
        self.model
    }

    /// A register by its name. For the start: it compares names.
    pub fn find(&self, name: &str) -> Option<RegisterId> {
        self.table.find(self.model, name)
    }

    /// A register.
    pub fn register(&self, id: RegisterId) -> &'static Register {
        // An id is only made for a register of a model. One of another model may be out of range.
        self.model.registers.get(id.index()).unwrap_or(&NO_REGISTER)
    }

    /// Which registers an access of 1 to 8 bytes touches, in the bank that is chosen now.
    pub fn at(&self, way: Way, offset: u64, width: usize) -> AccessPieces {
        self.table.layout.split(self.bank, way, offset, width)
    }

    /// Which registers an access would touch in another bank.
    pub fn at_bank(&self, bank: u8, way: Way, offset: u64, width: usize) -> AccessPieces {
        let bank = usize::from(bank).min(self.table.banks.saturating_sub(1));
        self.table.layout.split(bank, way, offset, width)
    }

    /// Whether the model has to be told of an access.
    pub fn hooked(&self, id: RegisterId, way: Way) -> bool {
        self.hooked[way as usize].checked_shr(id.0.into()).unwrap_or(0) & 1 == 1
    }

    /// Everything that is hooked now, one bit a register by [`RegisterId::index`]: to see cheaply whether it has changed. No register
    /// beyond the first 128 is ever hooked.
    pub fn hooks(&self, way: Way) -> u128 {
        self.hooked[way as usize]
    }

    /// The value that a write of some bytes of a register means: the other bytes are as last written, or zero in a register whose
    /// ones clear or set.
    pub fn merged(&self, piece: &Piece, bytes: &[u8]) -> u32 {
        let Some(id) = piece.register else { return 0 };
        let clears = matches!(self.register(id).writes, Writes::Clears | Writes::Sets);
        let mut value = if clears { [0; 4] } else { self.value(id).to_le_bytes() };
        for (at, byte) in piece.of(bytes).iter().enumerate() {
            if let Some(place) = value.get_mut(usize::from(piece.within) + at) {
                *place = *byte;
            }
        }
        u32::from_le_bytes(value)
    }

    /// What was last written to a register, as far as it was told: of registers whose writes are always hooked, what the guest
    /// believes to be there. Zero after a reset.
    pub fn value(&self, id: RegisterId) -> u32 {
        self.values.get(id.index()).copied().unwrap_or(0)
    }

    /// What a register will hold once `pending` has happened: for checks.
    pub fn value_after(&self, pending: &Pending, id: RegisterId) -> u32 {
        match pending.seen {
            ModelInput::Write { register, value } if register == id => value,
            _ => self.value(id),
        }
    }

    /// Notes a value without an event: of an unhooked write, or as read from the hardware. The bank follows.
    #[inline]
    pub fn note(&mut self, id: RegisterId, value: u32) {
        if let Some(place) = self.values.get_mut(id.index()) {
            *place = value;
        }
        if self.table.bank == Some(id) {
            self.bank = self.table.bank_of(value);
        }
    }

    /// The bank that is chosen.
    pub fn bank(&self) -> u8 {
        self.bank as u8
    }

    /// What the monitor writes, and where, to choose a bank for itself without starting anything. It writes that of [`Machine::bank`]
    /// when it is done. `None`: the model has no banks.
    pub fn select(&self, bank: u8) -> Option<(RegisterId, u32)> {
        let banks = self.model.banks?;
        let id = self.table.bank?;
        let field = bank.checked_shl(u32::from(banks.shift)).unwrap_or(0) & banks.mask;
        let kept = self.value(id) as u8 & banks.keep & !banks.mask;
        Some((id, u32::from(kept | banks.set | field)))
    }

    /// Looks an event up: what has to be checked before it happens, and where it leads. Changes nothing.
    #[inline]
    pub fn ask(&self, seen: ModelInput) -> Pending {
        let (key, value) = self.table.key(seen);
        let mut pending = Pending {
            seen,
            taken: [NO_EDGE; REGIONS],
            to: self.now,
            unchecked: true,
            reset: false,
            table: self.table,
            serial: self.updates,
        };
        let (mut listening, base) = self.table.listeners(key);
        while listening != 0 {
            let region = listening.trailing_zeros() as usize % REGIONS;
            listening &= listening - 1;
            let (from, edges) = self.table.edges(base, self.now[region]);
            for (at, edge) in edges.iter().enumerate() {
                if self.fits(edge, seen, value) {
                    pending.taken[region] = from + at as u16;
                    pending.unchecked &= edge.checks.is_empty();
                    match edge.to {
                        TO_STAY => {}
                        TO_RESET => pending.reset = true,
                        to => pending.to[region] = to,
                    }
                    break;
                }
            }
        }
        pending
    }

    #[inline]
    fn fits(&self, edge: &Edge, seen: ModelInput, value: u32) -> bool {
        if ((value & edge.mask) == edge.is) == edge.unequal {
            return false;
        }
        if edge.given == GIVEN_NONE {
            return true;
        }
        let given = match seen {
            ModelInput::Write { register, value } if register.0 == edge.given => value,
            _ => self.value(RegisterId(edge.given)),
        };
        given & edge.given_mask == edge.given_is
    }

    /// The event happens. To be called before any other, on the machine that was asked.
    #[inline]
    pub fn commit(&mut self, pending: Pending) -> Moves {
        debug_assert_eq!(pending.serial, self.updates, "another event came between asking and committing");
        self.updates += 1;
        let from = self.now;
        if pending.reset {
            self.begin();
        } else {
            self.now = pending.to;
            if let ModelInput::Write { register, value } = pending.seen {
                self.note(register, value);
            }
        }
        if self.now != from {
            self.transitions += 1;
            self.rehook();
        }
        Moves { from, to: self.now, reset: pending.reset }
    }

    /// Asks, and commits if there is nothing to check.
    #[inline]
    pub fn update(&mut self, seen: ModelInput) -> Verdict {
        let pending = self.ask(seen);
        if pending.unchecked() { Verdict::Done(self.commit(pending)) } else { Verdict::Check(pending) }
    }

    /// Whether the device may change hands now: every region is in a state that says so.
    #[inline]
    pub fn reusable(&self) -> bool {
        self.now_in(self.table.reusable)
    }

    #[inline]
    fn now_in(&self, states: u64) -> bool {
        self.now[..self.model.regions.len()].iter().all(|state| states >> (state % 64) & 1 == 1)
    }

    /// Each region's name and the state that it is in.
    pub fn states(&self) -> impl Iterator<Item = (&'static str, &'static State)> + '_ {
        let model = self.model;
        model
            .regions
            .iter()
            .zip(self.now)
            .map(|(region, state)| (region.name, self.table.state(model, state)))
    }

    /// The first region that is in the way of a change of hands, and the state that it is in.
    pub fn busy(&self) -> Option<(&'static str, &'static str)> {
        self.states().find(|(_, state)| !state.reusable).map(|(region, state)| (region, state.name))
    }

    /// Which regions moved: region, from, to.
    pub fn moves<'a>(
        &'a self,
        moves: &'a Moves,
    ) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> + 'a {
        let model = self.model;
        let name = move |state| self.table.state(model, state).name;
        let changed = move |(region, (from, to)): (&'static crate::Region, (u8, u8))| {
            (from != to).then(|| (region.name, name(from), name(to)))
        };
        model.regions.iter().zip(moves.from.into_iter().zip(moves.to)).filter_map(changed)
    }

    /// What the present states wait for in the hardware's registers, to be read by the monitor now and then and told as
    /// [`ModelInput::Became`]. A register in another bank is only named while every other region is reusable, as choosing a bank
    /// ([`Machine::select`]) could disturb what runs there.
    pub fn awaits(&self) -> impl Iterator<Item = Await> + '_ {
        self.waiting().flat_map(move |(region, state)| {
            let undisturbed = self.others_reusable(region);
            self.table.awaits(state).filter(move |wait| {
                let bank = self.register(wait.register).bank;
                undisturbed || bank.is_none_or(|bank| usize::from(bank) == self.bank)
            })
        })
    }

    /// The rings that the present states wait for, by their places in [`StateModel::rings`].
    pub fn awaits_rings(&self) -> impl Iterator<Item = u8> + '_ {
        let rings = self.model.rings.len().min(usize::from(u8::MAX)) as u8;
        (0..rings).filter(|ring| self.listens(ModelInput::Drained { ring: *ring }, false))
    }

    /// The conditions that events of the model are about, by number.
    pub fn conditions(&self) -> &'static [&'static Condition] {
        &self.table.conditions
    }

    /// The conditions that the present states wait for, by their places in [`Machine::conditions`]: to be looked at by the monitor now
    /// and then and told as [`ModelInput::Holds`]. Their registers may lie in any bank, so that each is only named while every region but the
    /// one that waits is reusable.
    pub fn awaits_conditions(&self) -> impl Iterator<Item = u8> + '_ {
        let conditions = self.table.conditions.len().min(usize::from(u8::MAX)) as u8;
        (0..conditions).filter(|condition| self.listens(ModelInput::Holds { condition: *condition }, true))
    }

    fn listens(&self, seen: ModelInput, undisturbed: bool) -> bool {
        let (_, base) = self.table.listeners(self.table.key(seen).0);
        self.waiting().any(|(region, state)| {
            !self.table.edges(base, state).1.is_empty() && (!undisturbed || self.others_reusable(region))
        })
    }

    /// The regions that are in the way, with their states.
    fn waiting(&self) -> impl Iterator<Item = (usize, u8)> + '_ {
        let states = self.now.iter().copied().enumerate().take(self.model.regions.len());
        states.filter(|(_, state)| self.table.reusable >> (state % 64) & 1 == 0)
    }

    fn others_reusable(&self, region: usize) -> bool {
        self.waiting().all(|(other, _)| other == region)
    }

    /// Begins again, as after a reset of the device by the monitor: first states, nothing written.
    pub fn reset(&mut self) {
        self.begin();
        self.rehook();
    }

    fn begin(&mut self) {
        self.now = self.table.first;
        self.values.fill(0);
        self.bank = 0;
    }

    pub(crate) fn rehook(&mut self) {
        let mut hooked = self.table.always;
        for state in &self.now[..self.model.regions.len()] {
            if let Some(hooks) = self.table.hooks.get(usize::from(*state)) {
                hooked[0] |= hooks[0];
                hooked[1] |= hooks[1];
            }
        }
        self.hooked = hooked;
    }

    /// Events that have happened.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// Those of them that changed the state of a region.
    pub fn transitions(&self) -> u64 {
        self.transitions
    }
}

/// What stands for a register of another model.
static NO_REGISTER: Register = Register::new("(none)", 0, 0, crate::Reads::Never, crate::Writes::Never);
