//! Who takes part: queues that come, wake, rest and go. Each group's awake members stand in a ring that is linked through their slots, so that
//! nothing is allocated but when a queue comes.

use super::{BlockDevice, FairTurns, GroupId, Member, NOBODY, Tenant, WHOLE};

impl FairTurns {
    /// Puts a queue that rests into `slot`, which is free. Allocates.
    pub fn attach(&mut self, slot: usize, group: GroupId, weight: u32) {
        self.attach_on(slot, group, weight, None);
    }

    /// As [`FairTurns::attach`], a queue whose backing lies on this device.
    pub fn attach_on(&mut self, slot: usize, group: GroupId, weight: u32, device: Option<BlockDevice>) {
        debug_assert!(self.members.get(slot).is_none_or(Option::is_none));
        let at = match self.tenants.iter().position(|tenant| tenant.id == group) {
            Some(at) => at,
            None => self.new_tenant(group),
        };
        self.tenants[at].attached += 1;
        let lane = self.enter_lane(at as u32, device);
        if self.members.len() <= slot {
            self.members.resize(slot + 1, None);
        }
        self.members[slot] = Some(Member {
            group: at as u32,
            weight: weight.max(1),
            next: NOBODY,
            previous: NOBODY,
            awake: false,
            deficit: 0,
            granted: false,
            idle_in: 0,
            in_flight: 0,
            lane,
        });
    }

    /// A place for a group that has none, of one that is gone if there is one.
    fn new_tenant(&mut self, id: GroupId) -> usize {
        let tenant = Tenant {
            id,
            whole: 1,
            part: WHOLE,
            weight: WHOLE,
            attached: 0,
            awake: 0,
            weights: 0,
            deficit: 0,
            before: NOBODY,
            in_flight: 0,
            told: 0,
            bound: u64::MAX,
            throttled: 0,
            served: 0,
            cut_short: false,
            passed_over: false,
        };
        match self.tenants.iter().position(|tenant| tenant.attached == 0) {
            Some(at) => {
                self.tenants[at] = tenant;
                at
            }
            None => {
                self.tenants.push(tenant);
                self.round.reserve(self.tenants.len().saturating_sub(self.round.len()));
                self.tenants.len() - 1
            }
        }
    }

    /// The queue has left `slot`; what it had in flight is no longer the group's.
    pub fn detach(&mut self, slot: usize) {
        self.rest(slot);
        if let Some(member) = self.members.get_mut(slot).and_then(Option::take) {
            self.leave_lane(member.lane, member.in_flight);
            let tenant = &mut self.tenants[member.group as usize];
            tenant.in_flight -= member.in_flight;
            tenant.attached -= 1;
        }
    }

    fn tenant(&mut self, group: GroupId) -> Option<&mut Tenant> {
        self.tenants.iter_mut().find(|tenant| tenant.id == group && tenant.attached > 0)
    }

    /// The group's weight, against other groups. Holds from the next turn on.
    pub fn weigh(&mut self, group: GroupId, weight: u32) {
        if let Some(tenant) = self.tenant(group) {
            tenant.whole = weight.max(1);
            self.reweigh(group);
        }
    }

    /// How much of the group's weight stands on this core, of [`WHOLE`], which it is at first. Holds from the next turn on.
    pub fn part(&mut self, group: GroupId, part: u32) {
        if let Some(tenant) = self.tenant(group) {
            tenant.part = part.clamp(1, WHOLE);
            self.reweigh(group);
        }
    }

    fn reweigh(&mut self, group: GroupId) {
        let Some(tenant) = self.tenant(group) else { return };
        let weight = tenant.whole.saturating_mul(tenant.part);
        let before = std::mem::replace(&mut tenant.weight, weight);
        if tenant.awake > 0 {
            self.weights = self.weights - u64::from(before) + u64::from(weight);
        }
    }

    /// The most that the group may have in flight from this core, in bytes, if that is less than its part of [`super::IN_FLIGHT`] by weight; and
    /// [`super::LARGEST_SLICE`] at least.
    pub fn bound(&mut self, group: GroupId, bytes: u64) {
        if let Some(tenant) = self.tenant(group) {
            tenant.bound = bytes;
        }
    }

    /// The queue is to be polled in each turn from now on.
    pub fn wake(&mut self, slot: usize) {
        let Some(Some(member)) = self.members.get_mut(slot) else { return };
        if std::mem::replace(&mut member.awake, true) {
            return;
        }
        // Whatever it was found to be before, it is looked at again.
        member.idle_in = 0;
        let (group, weight) = (member.group, member.weight);
        let tenant = &mut self.tenants[group as usize];
        tenant.awake += 1;
        tenant.weights += u64::from(weight);
        if tenant.awake == 1 {
            self.weights += u64::from(tenant.weight);
            tenant.before = slot as u32;
            self.link(slot as u32, slot as u32);
            if !self.competes()
                && let Some(&alone) = self.round.front()
            {
                // Nobody had to wait for what it has cost while it was alone.
                self.tenants[alone as usize].deficit = 0;
            }
            self.round.push_back(group);
        } else {
            // Behind everybody else: before the one whose turn it is.
            let before = tenant.before;
            let turn = self.next_of(before as usize);
            self.link(before, slot as u32);
            self.link(slot as u32, turn);
            self.tenants[group as usize].before = slot as u32;
        }
    }

    /// The queue is not to be polled until it is woken.
    pub fn rest(&mut self, slot: usize) {
        let Some(Some(member)) = self.members.get_mut(slot) else { return };
        if !std::mem::replace(&mut member.awake, false) {
            return;
        }
        (member.deficit, member.granted) = (member.deficit.min(0), false);
        let (group, weight, next, previous) = (member.group, member.weight, member.next, member.previous);
        if self.visiting == Some(group) {
            self.idle -= u32::from(member.idle_in == self.visit);
            self.passed = 0;
        }
        let tenant = &mut self.tenants[group as usize];
        tenant.awake -= 1;
        tenant.weights -= u64::from(weight);
        if tenant.awake == 0 {
            self.weights -= u64::from(tenant.weight);
            // Alone it owes nobody.
            tenant.deficit = if self.round.len() > 1 { tenant.deficit.min(0) } else { 0 };
            tenant.before = NOBODY;
            self.leave_round(group);
            return;
        }
        if tenant.before == slot as u32 {
            tenant.before = previous;
        }
        self.link(previous, next);
    }

    fn leave_round(&mut self, group: u32) {
        if let Some(at) = self.round.iter().position(|other| *other == group) {
            self.round.remove(at);
            // Those yet to be visited stand in front; whoever is visited stands first.
            if at < self.left {
                self.left -= 1;
            }
        }
        if self.visiting == Some(group) {
            self.visiting = None;
        }
    }

    pub(super) fn next_of(&self, slot: usize) -> u32 {
        self.members.get(slot).and_then(Option::as_ref).map_or(NOBODY, |member| member.next)
    }

    /// In a group's ring `next` comes behind `slot`.
    fn link(&mut self, slot: u32, next: u32) {
        if let Some(Some(member)) = self.members.get_mut(slot as usize) {
            member.next = next;
        }
        if let Some(Some(member)) = self.members.get_mut(next as usize) {
            member.previous = slot;
        }
    }
}
