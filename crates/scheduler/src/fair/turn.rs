//! One turn: groups are visited, members are granted polls, and polls are paid for.

use super::{FairTurns, Grant, MOST_OWED, MOST_PER_POLL, Polled, QUANTUM, Tenant};

impl FairTurns {
    /// What a group is granted per turn: [`QUANTUM`] times its weight over the average weight of those awake.
    #[inline]
    fn quantum(&self, tenant: &Tenant) -> i64 {
        part_of(QUANTUM, self.round.len() as u64, tenant.weight, self.weights)
    }

    /// A turn begins: each group with awake queues is visited once.
    #[inline]
    pub fn begin_turn(&mut self) {
        (self.owing, self.worked, self.forgiven) = (0, false, false);
        self.left = self.round.len();
        self.visiting = None;
    }

    /// Nobody who may be served has work: so many turns go by at once that one of those that owe may be served in this one.
    #[cold]
    fn forgive(&mut self) {
        let turns = |tenant: &Tenant| -tenant.deficit / self.quantum(tenant);
        let tenants = self.round.iter().map(|&at| &self.tenants[at as usize]);
        let turns = tenants.filter(|tenant| tenant.passed_over).map(turns).min().unwrap_or(0);
        for at in 0..self.round.len() {
            let index = self.round[at] as usize;
            let grant = self.quantum(&self.tenants[index]).saturating_mul(turns);
            let tenant = &mut self.tenants[index];
            if tenant.passed_over {
                tenant.deficit = tenant.deficit.saturating_add(grant).min(0);
            }
        }
    }

    /// The next poll of this turn; `None` when the turn is over. Each is followed by [`FairTurns::polled`] for its slot.
    #[inline]
    pub fn next_poll(&mut self) -> Option<Grant> {
        loop {
            let Some(group) = self.visiting else {
                if !self.visit_next() {
                    return None;
                }
                continue;
            };
            if let Some(grant) = self.grant(group) {
                return Some(grant);
            }
            self.end_visit();
        }
    }

    /// Visits the next group that owes nothing; false if there is none left in this turn.
    #[inline]
    fn visit_next(&mut self) -> bool {
        loop {
            while self.left > 0 {
                let Some(&group) = self.round.front() else { return false };
                let quantum = self.quantum(&self.tenants[group as usize]);
                let tenant = &mut self.tenants[group as usize];
                // The second time in this turn it is the turn of those that have not been visited.
                let visited = self.forgiven && !tenant.passed_over;
                if !visited {
                    tenant.deficit += quantum;
                    tenant.passed_over = tenant.deficit <= 0;
                    if !tenant.passed_over {
                        self.bound = tenant.bound_among(self.weights);
                        self.visiting = Some(group);
                        self.visit += 1;
                        (self.passed, self.idle) = (0, 0);
                        return true;
                    }
                    self.owing += 1;
                }
                self.next_group();
            }
            if self.worked || self.owing == 0 || self.forgiven {
                return false;
            }
            self.forgive();
            (self.forgiven, self.left) = (true, self.round.len());
        }
    }

    /// The group in front of the round has been visited, or passed over.
    #[inline]
    fn next_group(&mut self) {
        self.left -= 1;
        if let Some(group) = self.round.pop_front() {
            self.round.push_back(group);
        }
    }

    fn end_visit(&mut self) {
        if let Some(group) = self.visiting.take() {
            let tenant = &mut self.tenants[group as usize];
            tenant.cut_short = self.idle < tenant.awake;
            if !tenant.cut_short {
                // Nobody had more to do: nothing is kept for later.
                tenant.deficit = tenant.deficit.min(0);
            }
            self.next_group();
        }
    }

    /// The next poll of the visited group, unless it has had its part or none of its members has work.
    fn grant(&mut self, group: u32) -> Option<Grant> {
        loop {
            let tenant = &self.tenants[group as usize];
            if tenant.deficit <= 0 || self.idle >= tenant.awake {
                return None;
            }
            let slot = self.next_of(tenant.before as usize) as usize;
            let (awake, weights) = (u64::from(tenant.awake), tenant.weights);
            let alone = awake == 1;
            let (deficit, undivided) = (tenant.deficit, tenant.room(self.bound));
            let Some(Some(member)) = self.members.get_mut(slot) else { return None };
            if member.idle_in == self.visit {
                // Once per visit; somebody else has not been looked at.
                self.tenants[group as usize].before = slot as u32;
                continue;
            }
            if !alone && !std::mem::replace(&mut member.granted, true) {
                member.deficit += part_of(QUANTUM / 2, awake, member.weight, weights);
            }
            if !alone && member.deficit <= 0 {
                // It owes to its neighbours, if any of them has work.
                member.granted = false;
                self.passed += 1;
                self.tenants[group as usize].before = slot as u32;
                if self.passed + self.idle >= awake as u32 {
                    self.forgive_members(group);
                }
                continue;
            }
            let part = if alone { deficit } else { member.deficit.min(deficit) };
            let bytes = (part as u64).min(MOST_PER_POLL);
            let lane = &self.lanes[member.lane as usize];
            let room = lane.room().unwrap_or(undivided).min(lane.below_most());
            self.tenants[group as usize].throttled += u64::from(room == 0);
            return Some(Grant { slot, bytes, room });
        }
    }

    /// The members with work all owe: so many rounds go by at once that one of them can be served.
    fn forgive_members(&mut self, group: u32) {
        let tenant = &self.tenants[group as usize];
        let (awake, weights, first) = (u64::from(tenant.awake), tenant.weights, tenant.before as usize);
        let quantum = |weight: u32| part_of(QUANTUM / 2, awake, weight, weights);
        let mut rounds = i64::MAX;
        let mut at = first;
        for _ in 0..awake {
            if let Some(Some(member)) = self.members.get(at)
                && member.idle_in != self.visit
            {
                rounds = rounds.min(-member.deficit.min(0) / quantum(member.weight));
            }
            at = self.next_of(at) as usize;
        }
        for _ in 0..awake {
            let next = self.next_of(at) as usize;
            if let Some(Some(member)) = self.members.get_mut(at)
                && member.idle_in != self.visit
            {
                member.deficit = (member.deficit + quantum(member.weight).saturating_mul(rounds)).min(0);
            }
            at = next;
        }
        self.passed = 0;
    }

    /// What came of the poll that was granted to `slot`.
    #[inline]
    pub fn polled(&mut self, slot: usize, polled: Polled) {
        let Some(Some(member)) = self.members.get_mut(slot) else { return };
        let Polled { bytes, more } = polled;
        let cost = i64::try_from(bytes).unwrap_or(MOST_OWED).min(MOST_OWED);
        let tenant = &mut self.tenants[member.group as usize];
        // With no other member awake it owes nobody of its group.
        let alone = tenant.awake == u32::from(member.awake);
        member.deficit = if alone { 0 } else { (member.deficit - cost).max(-MOST_OWED) };
        tenant.deficit = (tenant.deficit - cost).max(-MOST_OWED);
        tenant.served += bytes;
        self.worked |= bytes > 0;
        if self.visiting != Some(member.group) {
            return;
        }
        if more {
            self.passed = 0;
        } else {
            self.idle += u32::from(member.idle_in != self.visit);
            member.idle_in = self.visit;
            member.deficit = member.deficit.min(0);
        }
        if !more || member.deficit <= 0 {
            member.granted = false;
            tenant.before = slot as u32;
        }
    }
}

/// The part of `all` per head that one of that weight gets, of so many heads with such a sum of weights. Where all weigh the same nothing is divided.
#[inline]
fn part_of(all: u64, heads: u64, weight: u32, weights: u64) -> i64 {
    let weight = u64::from(weight);
    if heads * weight == weights { all as i64 } else { (all * heads * weight / weights.max(1)).max(1) as i64 }
}
