//! What is looked at before the hardware hears of an access.

use ioplane_hardware::Hardware;
use ioplane_model::{Machine, Pending, RegisterId, Way};

use super::Monitor;
use super::counts::MonitorFault;
use super::plan::Rule;
use super::policy::{Cause, Policy};

/// Why an access does not happen.
#[derive(Debug)]
pub(super) enum Refusal {
    /// It has no meaning: dropped, without a fault.
    Ignored,
    /// It is denied.
    Fault(MonitorFault),
}

impl From<MonitorFault> for Refusal {
    fn from(fault: MonitorFault) -> Self {
        Refusal::Fault(fault)
    }
}

impl<H: Hardware> Monitor<H> {
    /// Makes all checks of an event. Rings that pass have their descriptors vetted, to be published when the event happens.
    pub(super) fn examine(&mut self, pending: &Pending) -> Result<(), Refusal> {
        if pending.unchecked() {
            return Ok(());
        }
        for check in pending.checks() {
            self.check(pending, self.card.plan.rule(check))?;
        }
        Ok(())
    }

    fn check(&mut self, pending: &Pending, rule: Rule) -> Result<(), Refusal> {
        match rule {
            Rule::Ring(ring) => {
                if let Some(plan) = self.card.plan.queues.get(usize::from(ring)).and_then(Option::as_ref) {
                    let tail = self.guest.machine.value_after(pending, plan.tail);
                    self.guest.propose(ring, tail);
                }
                Ok(self.vet(ring)?)
            }
            Rule::Base(ring) => match self.guest.rings.get(usize::from(ring)) {
                Some(ring) => Ok(ring.check_base(&self.guest.dma)?),
                None => Ok(()),
            },
            Rule::Block(block) => {
                let value = |id: RegisterId| self.guest.machine.value_after(pending, id);
                let at = usize::from(block);
                let Some(((low, high), table)) =
                    self.card.plan.blocks.get(at).zip(self.card.model.blocks.get(at))
                else {
                    return Ok(());
                };
                let gpa = u64::from(value(*low) & !table.flags) | u64::from(value(*high)) << 32;
                match self.guest.dma.bus(gpa, table.size.into(), Way::Write) {
                    Some(_) => Ok(()),
                    None => Err(outside_block(table.name, gpa, table.size).into()),
                }
            }
            Rule::Ignore => Err(Refusal::Ignored),
            rule => {
                if let Rule::Holds(at) = rule
                    && self.card.plan.conditions.get(usize::from(at)).is_some_and(|condition| condition.moves)
                {
                    self.learn_address();
                }
                Ok(self.check_registers(&self.guest.machine, pending, rule)?)
            }
        }
    }

    /// The checks that look at registers only, as `machine` has them.
    pub(super) fn check_registers(
        &self,
        machine: &Machine,
        pending: &Pending,
        rule: Rule,
    ) -> Result<(), MonitorFault> {
        match rule {
            Rule::Holds(at) => {
                let Some(condition) = self.card.plan.conditions.get(usize::from(at)) else {
                    return Err(MonitorFault::register("denied", "the check is not of this model"));
                };
                let table = condition.table;
                condition.inputs.give(
                    |id| machine.value_after(pending, id),
                    |values| match (table.holds)(values) {
                        true => Ok(()),
                        false => Err(MonitorFault::dma(table.name, (table.refusal)(values))),
                    },
                )
            }
            Rule::Deny(why) => Err(MonitorFault::register("denied", why)),
            Rule::Ring(_) | Rule::Base(_) | Rule::Block(_) | Rule::Ignore => Ok(()),
        }
    }

    /// Vets a ring, at the guest's asking. A fault leaves nothing to publish.
    pub(super) fn vet(&mut self, ring: u8) -> Result<(), MonitorFault> {
        self.shape_ring(usize::from(ring));
        let Some(ring) = self.guest.rings.get_mut(usize::from(ring)) else { return Ok(()) };
        // What the hardware has finished meanwhile makes room.
        ring.harvest(&self.guest.dma);
        let ignored = self.card.policies.of(Cause::Dma) != Policy::Stop;
        let vetted = ring.vet(&self.guest.dma, ignored).inspect_err(|_| ring.drop_vetted());
        for fault in ring.ignored() {
            self.card.bus.report(fault);
        }
        vetted
    }
}

pub(super) fn outside_block(name: &str, gpa: u64, size: u32) -> MonitorFault {
    MonitorFault::dma(
        "block-outside",
        format!("block {name} at {gpa:#x}+{size:#x} is outside the guest's memory"),
    )
}
