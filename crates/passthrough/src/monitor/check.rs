//! What is looked at before the hardware hears of an access.

use ioplane_hardware::Hardware;
use ioplane_model::{Machine, Pages, Pending, RegisterId, Way};

use super::Monitor;
use super::counts::Fault;
use super::plan::Rule;
use super::policy::{Cause, Policy};

/// Why an access does not happen.
#[derive(Debug)]
pub(super) enum Refusal {
    /// It has no meaning: dropped, without a fault.
    Ignored,
    /// It is denied.
    Fault(Fault),
}

impl From<Fault> for Refusal {
    fn from(fault: Fault) -> Self {
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
            self.check(pending, self.plan.rule(check))?;
        }
        Ok(())
    }

    fn check(&mut self, pending: &Pending, rule: Rule) -> Result<(), Refusal> {
        match rule {
            Rule::Ring(ring) => Ok(self.vet(ring)?),
            Rule::Base(ring) => match self.rings.get(usize::from(ring)) {
                Some(ring) => Ok(ring.check_base(&self.ground)?),
                None => Ok(()),
            },
            Rule::Block(block) => {
                let value = |id: RegisterId| self.machine.value_after(pending, id);
                let at = usize::from(block);
                let Some(((low, high), table)) = self.plan.blocks.get(at).zip(self.model.blocks.get(at))
                else {
                    return Ok(());
                };
                let gpa = u64::from(value(*low) & !table.flags) | u64::from(value(*high)) << 32;
                match self.ground.bus(gpa, table.size.into(), Way::Write) {
                    Some(_) => Ok(()),
                    None => Err(outside_block(table.name, gpa, table.size).into()),
                }
            }
            Rule::Ignore => Err(Refusal::Ignored),
            Rule::Card { .. } => {
                self.learn_address();
                Ok(self.check_registers(&self.machine, pending, rule)?)
            }
            rule => Ok(self.check_registers(&self.machine, pending, rule)?),
        }
    }

    /// The checks that look at registers only, as `machine` has them.
    pub(super) fn check_registers(
        &self,
        machine: &Machine,
        pending: &Pending,
        rule: Rule,
    ) -> Result<(), Fault> {
        let value = |id: RegisterId| machine.value_after(pending, id);
        let pair = |(low, high): (RegisterId, RegisterId)| value(low) & 0xff | (value(high) & 0xff) << 8;
        let name = |id: RegisterId| machine.register(id).name;
        let (Some(card), Some(plan)) = (&self.model.card, &self.plan.card) else {
            return match rule {
                Rule::Deny(why) => Err(Fault::register("denied", why)),
                _ => Ok(()),
            };
        };
        match rule {
            Rule::Card { start, count, way } => {
                let (start, count) = (pair(start), pair(count));
                if self.may_move(way, start, count, value) {
                    return Ok(());
                }
                let doing = if way == Way::Read { "reading" } else { "writing" };
                let text = format!("{doing} card memory {start:#06x}+{count:#x}, which is not the guest's");
                Err(Fault::dma("card-outside", text))
            }
            Rule::CardPage { page, count } => {
                // A card that is to send nothing looks at the page all the same.
                let (start, count) = ((value(page) & 0xff) * Pages::PAGE, pair(count).max(1));
                if card.allows(Way::Write, start, count, None) {
                    return Ok(());
                }
                let text = format!("sending card memory {start:#06x}+{count:#x}, which is not the guest's");
                Err(Fault::dma("card-page-outside", text))
            }
            Rule::Below(low, high) => {
                let (first, end) = (value(low) & 0xff, value(high) & 0xff);
                let bytes = end.saturating_sub(first) * Pages::PAGE;
                if first < end && card.allows(Way::Write, first * Pages::PAGE, bytes, None) {
                    return Ok(());
                }
                let text = format!(
                    "{} {first:#04x} and {} {end:#04x} are no range of pages of the card's memory",
                    name(low),
                    name(high)
                );
                Err(Fault::dma("card-ring", text))
            }
            Rule::Within(id) => {
                let (page, first, end) =
                    (value(id) & 0xff, value(plan.start) & 0xff, value(plan.stop) & 0xff);
                if (first..end).contains(&page) {
                    return Ok(());
                }
                let text =
                    format!("{} {page:#04x} is outside the card's ring {first:#04x} to {end:#04x}", name(id));
                Err(Fault::dma("card-page", text))
            }
            Rule::Deny(why) => Err(Fault::register("denied", why)),
            Rule::Ring(_) | Rule::Base(_) | Rule::Block(_) | Rule::Ignore => Ok(()),
        }
    }

    /// The card's receive ring in bytes, first and end, by the registers.
    pub(super) fn card_ring(&self, value: impl Fn(RegisterId) -> u32) -> Option<(u32, u32)> {
        let card = self.plan.card.as_ref()?;
        let (first, end) = (value(card.start) & 0xff, value(card.stop) & 0xff);
        Some((first * Pages::PAGE, end * Pages::PAGE))
    }

    /// Whether a guest may move so many bytes from `start` on, the registers being so. In words the card moves two at a time; from an odd
    /// address some cards never meet the end of the ring.
    pub(super) fn may_move(
        &self,
        way: Way,
        start: u32,
        count: u32,
        value: impl Fn(RegisterId) -> u32 + Copy,
    ) -> bool {
        let (Some(plan), Some(card)) = (&self.plan.card, &self.model.card) else { return false };
        let ring = self.card_ring(value);
        if value(plan.words) & card.words.1 == 0 {
            return card.allows(way, start, count, ring);
        }
        let count = count.next_multiple_of(2);
        let passes = ring.is_some_and(|(_, end)| start < end && start + count > end);
        !(passes && start % 2 == 1) && card.allows(way, start, count, ring)
    }

    /// Vets a ring, at the guest's asking. A fault leaves nothing to publish.
    pub(super) fn vet(&mut self, ring: u8) -> Result<(), Fault> {
        let Some(ring) = self.rings.get_mut(usize::from(ring)) else { return Ok(()) };
        // What the hardware has finished meanwhile makes room.
        ring.harvest(&self.ground);
        let ignored = self.policies.of(Cause::Dma) != Policy::Stop;
        let vetted = ring.vet(&self.ground, ignored).inspect_err(|_| ring.drop_vetted());
        for fault in ring.ignored() {
            self.bus.report(fault);
        }
        vetted
    }
}

pub(super) fn outside_block(name: &str, gpa: u64, size: u32) -> Fault {
    Fault::dma("block-outside", format!("block {name} at {gpa:#x}+{size:#x} is outside the guest's memory"))
}
