//! What a model's names mean to the monitor: looked up once, at start.

use ioplane_model::{
    BufferLength, Check, Condition, CounterBlock, DataPort, DescriptorRing, Flow, Machine, RegisterId,
    Restore, StateModel, VALUES, Writes,
};

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
    Base {
        ring: u8,
        high: bool,
    },
    /// Half of a block's address.
    Block {
        block: u8,
        high: bool,
    },
    /// The data port.
    Port,
    /// Length, head and tail of a ring that the hardware follows to its tail: the guest's are kept, the hardware has ours.
    Length {
        ring: u8,
    },
    Head {
        ring: u8,
    },
    Tail {
        ring: u8,
    },
    /// Ones clear the virtual mask, or set the virtual status.
    Unmask,
    Cause,
    /// A table of words: what the guest writes is remembered.
    Table,
    /// Counters that reading clears.
    Counters,
}

/// The registers of a ring that the hardware follows to its tail.
#[derive(Debug)]
pub(super) struct QueuePlan {
    pub(super) length: RegisterId,
    pub(super) head: RegisterId,
    pub(super) tail: RegisterId,
    pub(super) formats: Box<[FormatPlan]>,
}

impl QueuePlan {
    /// Whether what its descriptors mean depends on that register.
    pub(super) fn depends_on(&self, id: RegisterId) -> bool {
        self.formats.iter().any(|format| {
            format.given.is_some_and(|(own, ..)| own == id) || format.by.is_some_and(|(own, _)| own == id)
        })
    }
}

/// On which registers a format of descriptors depends.
#[derive(Debug)]
pub(super) struct FormatPlan {
    pub(super) given: Option<(RegisterId, u32, u32)>,
    pub(super) by: Option<(RegisterId, LengthOf)>,
}

/// Bytes of a buffer by the value of a register.
type LengthOf = fn(u32) -> u32;

/// A mask that one register sets and another clears.
#[derive(Debug, Clone, Copy)]
pub(super) struct SplitPlan {
    pub(super) clear: RegisterId,
    pub(super) auto: RegisterId,
    pub(super) auto_on: (RegisterId, u32),
    pub(super) asserted: u32,
}

/// A check, by numbers.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rule {
    Ring(u8),
    Base(u8),
    Block(u8),
    /// By its place in [`MonitorPlan::conditions`].
    Holds(u8),
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
    Memory,
    /// Shown as it was, until an interrupt of these bits or until it is written.
    Shown(RegisterId, u32),
    /// A table of words; so many at its beginning are the card's own.
    Table(RegisterId, u16),
}

/// The registers whose values a function of the model is given.
#[derive(Debug, Clone, Copy)]
pub(super) struct Inputs {
    registers: [RegisterId; VALUES],
    count: u8,
}

impl Inputs {
    /// `None`: none, too many, or names of nothing.
    fn new(machine: &Machine, names: &[&str]) -> Option<Self> {
        let mut registers = [machine.find(names.first()?)?; VALUES];
        if names.len() > VALUES {
            return None;
        }
        for (place, name) in registers.iter_mut().zip(names) {
            *place = machine.find(name)?;
        }
        Some(Inputs { registers, count: names.len() as u8 })
    }

    pub(super) fn registers(&self) -> &[RegisterId] {
        &self.registers[..usize::from(self.count)]
    }

    /// Calls a function with their values.
    #[inline]
    pub(super) fn give<R>(
        &self,
        mut value: impl FnMut(RegisterId) -> u32,
        function: impl FnOnce(&[u32]) -> R,
    ) -> R {
        let mut values = [0; VALUES];
        let registers = self.registers();
        for (place, id) in values.iter_mut().zip(registers) {
            *place = value(*id);
        }
        function(&values[..registers.len()])
    }
}

/// A condition of the model, and the registers that it looks at.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlannedCondition {
    pub(super) table: &'static Condition,
    pub(super) inputs: Inputs,
    /// The data port moves one of them.
    pub(super) moves: bool,
}

/// The data port's registers.
#[derive(Debug, Clone, Copy)]
pub(super) struct PortPlan {
    pub(super) table: &'static DataPort,
    pub(super) register: RegisterId,
    pub(super) address: (RegisterId, RegisterId),
    pub(super) count: (RegisterId, RegisterId),
    pub(super) reached: (RegisterId, RegisterId),
    pub(super) command: RegisterId,
    pub(super) inputs: Inputs,
}

/// A model, by numbers.
#[derive(Debug)]
pub(super) struct MonitorPlan {
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
    /// By ring.
    pub(super) queues: Box<[Option<QueuePlan>]>,
    pub(super) split: Option<SplitPlan>,
    pub(super) counters: Option<(RegisterId, &'static CounterBlock)>,
    pub(super) reset: ByRegisters,
    pub(super) bank: Option<RegisterId>,
    pub(super) port: Option<PortPlan>,
    /// Conditions that are checks.
    pub(super) conditions: Box<[PlannedCondition]>,
    /// Conditions that are events, by the machine's numbers.
    pub(super) awaited: Box<[PlannedCondition]>,
    pub(super) halt: Box<[Step]>,
    pub(super) restore: Box<[Step]>,
    /// Where a check of the table lies, and what it means; by rising address.
    rules: Box<[(usize, Rule)]>,
}

impl MonitorPlan {
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
        let queue = |ring: &'static DescriptorRing| -> Option<Option<QueuePlan>> {
            let Some(table) = &ring.queue else { return Some(None) };
            let formats = table.formats.iter().map(|format| {
                let given = match format.given {
                    Some(given) => Some((find(given.register)?, given.mask, given.is)),
                    None => None,
                };
                let by = match format.buffer.map(|buffer| buffer.length) {
                    Some(BufferLength::By(name, length)) => Some((find(name)?, length)),
                    Some(BufferLength::Field(..)) | None => None,
                };
                Some(FormatPlan { given, by })
            });
            Some(Some(QueuePlan {
                length: find(table.length)?,
                head: find(table.head)?,
                tail: find(table.tail)?,
                formats: formats.collect::<Option<_>>()?,
            }))
        };
        let queues: Box<[_]> = model.rings.iter().map(queue).collect::<Option<_>>()?;
        let split = match model.interrupts.split {
            Some(split) => Some(SplitPlan {
                clear: find(split.clear)?,
                auto: find(split.auto)?,
                auto_on: (find(split.auto_on.0)?, split.auto_on.1),
                asserted: split.asserted,
            }),
            None => None,
        };
        let counters = match &model.counters {
            Some(block) => Some((find(block.register)?, block)),
            None => None,
        };
        let port = match &model.port {
            None => None,
            Some(table) => Some(PortPlan {
                table,
                register: find(table.register)?,
                address: pair(table.address)?,
                count: pair(table.count)?,
                reached: pair(table.reached)?,
                command: find(table.command)?,
                inputs: Inputs::new(machine, table.registers)?,
            }),
        };
        let condition = |table: &'static Condition| {
            let inputs = Inputs::new(machine, table.registers)?;
            let moved =
                |id: &RegisterId| port.is_some_and(|port| *id == port.address.0 || *id == port.address.1);
            Some(PlannedCondition { table, inputs, moves: inputs.registers().iter().any(moved) })
        };
        let transitions = || model.regions.iter().flat_map(|region| region.transitions);
        let mut conditions: Vec<PlannedCondition> = Vec::new();
        for check in transitions().flat_map(|transition| transition.checks) {
            if let Check::Holds(table) = *check
                && !conditions.iter().any(|planned| planned.table == table)
            {
                conditions.push(condition(table)?);
            }
        }
        let awaited = machine.conditions().iter().map(|table| condition(table)).collect::<Option<_>>()?;
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
        for (at, queue) in (0u8..).zip(&queues) {
            let Some(queue) = queue else { continue };
            give(queue.length, Role::Length { ring: at });
            give(queue.head, Role::Head { ring: at });
            give(queue.tail, Role::Tail { ring: at });
        }
        if let Some(split) = model.interrupts.split {
            give(find(split.clear)?, Role::Unmask);
            give(find(split.cause)?, Role::Cause);
        }
        if let Some(block) = &model.counters {
            give(find(block.register)?, Role::Counters);
        }
        for step in model.restore {
            if let Restore::Table(name, _) = *step {
                give(find(name)?, Role::Table);
            }
        }
        for register in model.registers.iter().filter(|register| register.kept != 0) {
            give(find(register.name)?, Role::Plain);
        }
        give(status, Role::Status);
        give(mask, Role::Mask);
        if let Some(port) = &port {
            give(port.register, Role::Port);
            give(port.command, Role::Plain);
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
                    Restore::Memory => Some(Some(Step::Memory)),
                    Restore::Shown(name, until) => Some(find(name).map(|id| Step::Shown(id, until))),
                    Restore::Table(name, preset) => Some(find(name).map(|id| Step::Table(id, preset))),
                    Restore::Lost(..) => None,
                })
                .collect()
        };
        let rule = |check: &Check| {
            Some(match *check {
                Check::Descriptors(name) => Rule::Ring(ring(name)?),
                Check::Base(name) => Rule::Base(ring(name)?),
                Check::Block(name) => Rule::Block(block(name)?),
                Check::Holds(table) => {
                    let at = conditions.iter().position(|planned| planned.table == table)?;
                    Rule::Holds(u8::try_from(at).ok()?)
                }
                Check::Deny(why) => Rule::Deny(why),
                Check::Ignore(_) => Rule::Ignore,
            })
        };
        let mut rules = transitions()
            .flat_map(|transition| transition.checks)
            .map(|check| Some((std::ptr::from_ref(check) as usize, rule(check)?)))
            .collect::<Option<Vec<_>>>()?;
        rules.sort_by_key(|(at, _)| *at);
        Some(MonitorPlan {
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
            queues,
            split,
            counters,
            reset: ByRegisters::new(model)?,
            bank: model.banks.and_then(|banks| find(banks.register)),
            port,
            conditions: conditions.into(),
            awaited,
            halt: steps(model.halt)?,
            restore: steps(model.restore)?,
            rules: rules.into(),
            roles,
        })
    }

    /// Whether the hardware follows tails. It begins at the first descriptor after a reset only, so that it is reset whenever it goes on.
    pub(super) fn follows_tails(&self) -> bool {
        self.queues.iter().any(Option::is_some)
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

    /// Tables of words.
    pub(super) fn tables(&self) -> impl Iterator<Item = RegisterId> + '_ {
        self.restore.iter().filter_map(|step| match step {
            Step::Table(register, _) => Some(*register),
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
    let rung = |ring: &DescriptorRing| ring.doorbell.is_some() || ring.queue.is_some();
    let lost = model.rings.iter().find(|ring| ring.flow == Flow::Transmit && !rung(ring));
    if let Some(ring) = lost {
        return Some(format!("ring {} transmits and has no doorbell", ring.name));
    }
    let status = model.registers.iter().find(|register| register.name == model.interrupts.status);
    if status.is_none_or(|register| register.writes != Writes::Clears || register.width > 4) {
        return Some("the interrupt status must be cleared by writing ones".to_owned());
    }
    None
}
