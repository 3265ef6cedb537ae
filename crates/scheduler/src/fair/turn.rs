//! One turn: groups are visited, members are granted polls, and polls are paid for.

use super::{FairTurns, Grant, LARGEST_SLICE, MOST_OWED, MOST_PER_POLL, Polled, QUANTUM, Tenant};

impl FairTurns {
    /// What a group is granted per turn: [`QUANTUM`] times its weight over the average weight of those awake.
    fn quantum(&self, tenant: &Tenant) -> i64 {
        let groups = self.round.len() as u64;
        (QUANTUM * groups * u64::from(tenant.weight) / self.weights.max(1)).max(1) as i64
    }

    /// A turn begins: each group with awake queues is visited once.
    pub fn begin_turn(&mut self) {
        if !self.served && !self.round.is_empty() {
            self.forgive();
        }
        self.served = false;
        self.left = self.round.len();
        self.visiting = None;
    }

    /// All groups owe: so many turns go by at once that one of them may be served in this one.
    fn forgive(&mut self) {
        let turns = self.round.iter().map(|&at| {
            let tenant = &self.tenants[at as usize];
            -tenant.deficit.min(0) / self.quantum(tenant)
        });
        let turns = turns.min().unwrap_or(0);
        for at in 0..self.round.len() {
            let index = self.round[at] as usize;
            let grant = self.quantum(&self.tenants[index]).saturating_mul(turns);
            let tenant = &mut self.tenants[index];
            tenant.deficit = (tenant.deficit + grant).min(0);
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
                self.served = true;
                return Some(grant);
            }
            self.end_visit();
        }
    }

    /// Visits the next group that owes nothing; false if there is none left in this turn.
    fn visit_next(&mut self) -> bool {
        while self.left > 0 {
            let Some(&group) = self.round.front() else { return false };
            let tenant = &self.tenants[group as usize];
            let quantum = self.quantum(tenant);
            let tenant = &mut self.tenants[group as usize];
            tenant.deficit += quantum;
            if tenant.deficit > 0 {
                self.visiting = Some(group);
                self.visit += 1;
                (self.passed, self.idle) = (0, 0);
                return true;
            }
            self.left -= 1;
            self.round.rotate_left(1);
        }
        false
    }

    fn end_visit(&mut self) {
        if let Some(group) = self.visiting.take() {
            let tenant = &mut self.tenants[group as usize];
            tenant.cut_short = self.idle < tenant.awake;
            if !tenant.cut_short {
                // Nobody had more to do: nothing is kept for later.
                tenant.deficit = tenant.deficit.min(0);
            }
            self.left -= 1;
            self.round.rotate_left(1);
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
            let (deficit, in_flight) = (tenant.deficit, tenant.in_flight);
            let bound = if in_flight == 0 { tenant.bound.max(LARGEST_SLICE) } else { tenant.bound };
            let Some(Some(member)) = self.members.get_mut(slot) else { return None };
            if member.idle_in == self.visit {
                // Once per visit; somebody else has not been looked at.
                self.tenants[group as usize].before = slot as u32;
                continue;
            }
            if !std::mem::replace(&mut member.granted, true) {
                member.deficit += (QUANTUM / 2 * awake * u64::from(member.weight) / weights).max(1) as i64;
            }
            if member.deficit <= 0 {
                // It owes to its neighbours, if any of them has work.
                member.granted = false;
                self.passed += 1;
                self.tenants[group as usize].before = slot as u32;
                if self.passed + self.idle >= awake as u32 {
                    self.forgive_members(group);
                }
                continue;
            }
            let bytes = (member.deficit.min(deficit) as u64).min(MOST_PER_POLL);
            let room = bound.saturating_sub(in_flight);
            self.tenants[group as usize].throttled += u64::from(room == 0);
            return Some(Grant { slot, bytes, room });
        }
    }

    /// The members with work all owe: so many rounds go by at once that one of them can be served.
    fn forgive_members(&mut self, group: u32) {
        let tenant = &self.tenants[group as usize];
        let (awake, weights, first) = (u64::from(tenant.awake), tenant.weights, tenant.before as usize);
        let quantum = |weight: u32| (QUANTUM / 2 * awake * u64::from(weight) / weights).max(1) as i64;
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
        let Polled { bytes, submitted, completed, more } = polled;
        let cost = i64::try_from(bytes).unwrap_or(MOST_OWED).min(MOST_OWED);
        let completed = completed.min(member.in_flight);
        member.in_flight = member.in_flight - completed + submitted;
        member.deficit = (member.deficit - cost).max(-MOST_OWED);
        let tenant = &mut self.tenants[member.group as usize];
        tenant.in_flight = tenant.in_flight - completed + submitted;
        tenant.deficit = (tenant.deficit - cost).max(-MOST_OWED);
        tenant.served += bytes;
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
