//! What a model's names mean to the monitor: looked up once, at start.

use ioplane_model::{Check, Flow, Machine, RegisterId, Restore, StateModel, Way, Writes};

use crate::reset::ByRegisters;

/// What the monitor itself has to do with a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Nothing.
    Plain,
    /// The interrupt status: virtual.
    Status,
    /// The interrupt mask: virtual.
    Mask,
    /// Half of a ring's base address: the guest's is kept, the hardware has ours.
    Base { ring: u8, high: bool },
    /// Half of a block's address.
    Block { block: u8, high: bool },
    /// The card's data port.
    Port,
}

/// A check, by numbers.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rule {
    Ring(u8),
    Base(u8),
    Block(u8),
    Card { start: (RegisterId, RegisterId), count: (RegisterId, RegisterId), way: Way },
    CardPage { page: RegisterId, count: (RegisterId, RegisterId) },
    Below(RegisterId, RegisterId),
    Within(RegisterId),
    Deny(&'static str),
    Ignore,
}

/// A step of bringing a device back, by numbers.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    /// The saved value's bits, with others set.
    Saved {
        register: RegisterId,
        mask: u32,
        with: u32,
    },
    Value(RegisterId, u32),
    Ring(u8),
    Card,
    /// Shown as it was, until an interrupt of these bits.
    Shown(RegisterId, u32),
}

/// Registers of a card's data port.
#[derive(Debug, Clone, Copy)]
pub(super) struct CardPlan {
    pub(super) port: RegisterId,
    pub(super) address: (RegisterId, RegisterId),
    pub(super) count: (RegisterId, RegisterId),
    pub(super) reached: (RegisterId, RegisterId),
    pub(super) command: RegisterId,
    pub(super) words: RegisterId,
    pub(super) start: RegisterId,
    pub(super) stop: RegisterId,
    pub(super) boundary: RegisterId,
    pub(super) current: RegisterId,
}

/// A model, by numbers.
#[derive(Debug)]
pub(super) struct Plan {
    /// All registers.
    pub(super) all: Box<[RegisterId]>,
    roles: Box<[Role]>,
    /// Registers that the monitor sees whatever the model hooks: one bit each.
    pub(super) special: u128,
    /// Registers that writes do nothing to, or nothing that a guest may do: one bit each.
    pub(super) silent: u128,
    pub(super) status: RegisterId,
    pub(super) mask: RegisterId,
    /// Ring base registers by ring: low and high half.
    pub(super) bases: Box<[(RegisterId, RegisterId)]>,
    pub(super) blocks: Box<[(RegisterId, RegisterId)]>,
    /// By ring: register and bits.
    pub(super) enables: Box<[(RegisterId, u32)]>,
    pub(super) doorbells: Box<[Option<(RegisterId, u32)>]>,
    pub(super) reset: ByRegisters,
    pub(super) bank: Option<RegisterId>,
    pub(super) card: Option<CardPlan>,
    pub(super) halt: Box<[Step]>,
    pub(super) restore: Box<[Step]>,
    /// Where a check of the table lies, and what it means; by rising address.
    rules: Box<[(usize, Rule)]>,
}

impl Plan {
    /// `None`: the table names what it does not have. A machine that was made of it has checked that.
    pub(super) fn new(model: &'static StateModel, machine: &Machine) -> Option<Self> {
        let find = |name: &str| machine.find(name);
        let pair = |names: (&str, &str)| Some((find(names.0)?, find(names.1)?));
        let ring = |name: &str| {
            model.rings.iter().position(|ring| ring.name == name).and_then(|at| u8::try_from(at).ok())
        };
        let block = |name: &str| {
            model.blocks.iter().position(|block| block.name == name).and_then(|at| u8::try_from(at).ok())
        };
        let status = find(model.interrupts.status)?;
        let mask = find(model.interrupts.mask)?;
        let bases: Box<[_]> = model.rings.iter().map(|ring| pair(ring.base)).collect::<Option<_>>()?;
        let blocks: Box<[_]> = model.blocks.iter().map(|block| pair(block.base)).collect::<Option<_>>()?;
        let enables: Box<[_]> = model
            .rings
            .iter()
            .map(|ring| Some((find(ring.enable.0)?, ring.enable.1)))
            .collect::<Option<_>>()?;
        let doorbells: Box<[Option<(RegisterId, u32)>]> = model
            .rings
            .iter()
            .map(|ring| match ring.doorbell {
                Some((name, bits)) => Some(Some((find(name)?, bits))),
                None => Some(None),
            })
            .collect::<Option<_>>()?;
        let card = match &model.card {
            None => None,
            Some(card) => Some(CardPlan {
                port: find(card.port)?,
                address: pair(card.address)?,
                count: pair(card.count)?,
                reached: pair(card.reached)?,
                command: find(card.command)?,
                words: find(card.words.0)?,
                start: find(card.pages.start)?,
                stop: find(card.pages.stop)?,
                boundary: find(card.pages.boundary)?,
                current: find(card.pages.current)?,
            }),
        };
        let mut roles = vec![Role::Plain; model.registers.len()].into_boxed_slice();
        let mut special = 0u128;
        let mut give = |id: RegisterId, role: Role| {
            if let Some(place) = roles.get_mut(id.index()) {
                *place = role;
            }
            special |= 1 << (id.index() % 128);
        };
        for (at, (low, high)) in (0u8..).zip(&blocks) {
            give(*low, Role::Block { block: at, high: false });
            give(*high, Role::Block { block: at, high: true });
        }
        for (at, (low, high)) in (0u8..).zip(&bases) {
            give(*low, Role::Base { ring: at, high: false });
            give(*high, Role::Base { ring: at, high: true });
        }
        give(status, Role::Status);
        give(mask, Role::Mask);
        if let Some(card) = &card {
            give(card.port, Role::Port);
            give(card.command, Role::Plain);
        }
        for (id, _) in enables.iter().chain(doorbells.iter().flatten()) {
            give(*id, Role::Plain);
        }
        let steps = |list: &'static [Restore]| -> Option<Box<[Step]>> {
            list.iter()
                .filter_map(|step| match *step {
                    Restore::Saved(name, mask) => {
                        Some(find(name).map(|register| Step::Saved { register, mask, with: 0 }))
                    }
                    Restore::With(name, mask, with) => {
                        Some(find(name).map(|register| Step::Saved { register, mask, with }))
                    }
                    Restore::Value(name, value) => Some(find(name).map(|id| Step::Value(id, value))),
                    Restore::Ring(name) => Some(ring(name).map(Step::Ring)),
                    Restore::Card => Some(Some(Step::Card)),
                    Restore::Shown(name, until) => Some(find(name).map(|id| Step::Shown(id, until))),
                    Restore::Lost(..) => None,
                })
                .collect()
        };
        let rule = |check: &Check| {
            Some(match *check {
                Check::Ring(name) => Rule::Ring(ring(name)?),
                Check::Base(name) => Rule::Base(ring(name)?),
                Check::Block(name) => Rule::Block(block(name)?),
                Check::Card { start, count, way } => {
                    Rule::Card { start: pair(start)?, count: pair(count)?, way }
                }
                Check::CardPage { page, count } => Rule::CardPage { page: find(page)?, count: pair(count)? },
                Check::Below(low, high) => Rule::Below(find(low)?, find(high)?),
                Check::Within(page) => Rule::Within(find(page)?),
                Check::Deny(why) => Rule::Deny(why),
                Check::Ignore(_) => Rule::Ignore,
            })
        };
        let transitions = model.regions.iter().flat_map(|region| region.transitions);
        let mut rules = transitions
            .flat_map(|transition| transition.checks)
            .map(|check| Some((std::ptr::from_ref(check) as usize, rule(check)?)))
            .collect::<Option<Vec<_>>>()?;
        rules.sort_by_key(|(at, _)| *at);
        Some(Plan {
            all: model.registers.iter().filter_map(|register| find(register.name)).collect(),
            special,
            silent: model
                .registers
                .iter()
                .filter(|register| register.writes == Writes::Never)
                .filter_map(|register| find(register.name))
                .fold(0, |bits, id| bits | 1 << (id.index() % 128)),
            status,
            mask,
            bases,
            blocks,
            enables,
            doorbells,
            reset: ByRegisters::new(model)?,
            bank: model.banks.and_then(|banks| find(banks.register)),
            card,
            halt: steps(model.halt)?,
            restore: steps(model.restore)?,
            rules: rules.into(),
            roles,
        })
    }

    pub(super) fn role(&self, id: RegisterId) -> Role {
        self.roles.get(id.index()).copied().unwrap_or(Role::Plain)
    }

    /// What a check of the table means. One that is not of the table is refused.
    pub(super) fn rule(&self, check: &'static Check) -> Rule {
        let at = std::ptr::from_ref(check) as usize;
        match self.rules.binary_search_by_key(&at, |(place, _)| *place) {
            Ok(found) => self.rules[found].1,
            Err(_) => Rule::Deny("the check is not of this model"),
        }
    }

    /// Registers whose values are saved.
    pub(super) fn saved(&self) -> impl Iterator<Item = RegisterId> + '_ {
        self.restore.iter().filter_map(|step| match step {
            Step::Saved { register, .. } | Step::Shown(register, _) => Some(*register),
            _ => None,
        })
    }

    /// Registers that another card does not have as this one had them, and until which interrupts their old values are shown.
    pub(super) fn shown(&self) -> impl Iterator<Item = (RegisterId, u32)> + '_ {
        self.restore.iter().filter_map(|step| match step {
            Step::Shown(register, until) => Some((*register, *until)),
            _ => None,
        })
    }
}

/// Whether a model says things that this monitor does not do.
pub(super) fn complaint(model: &StateModel) -> Option<String> {
    if let Some(ring) = model.rings.iter().find(|ring| !super::rings::sound(ring)) {
        return Some(format!("ring {}: its descriptors cannot be copied in words of 32 bits", ring.name));
    }
    let lost = model.rings.iter().find(|ring| ring.flow == Flow::Transmit && ring.doorbell.is_none());
    if let Some(ring) = lost {
        return Some(format!("ring {} transmits and has no doorbell", ring.name));
    }
    let status = model.registers.iter().find(|register| register.name == model.interrupts.status);
    if status.is_none_or(|register| register.writes != Writes::Clears || register.width > 4) {
        return Some("the interrupt status must be cleared by writing ones".to_owned());
    }
    None
}
