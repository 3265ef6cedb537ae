//! Weights over cores: what each group gets on each core is read, and the part of its weight that stands there follows ([`divide`]).
//!
//! It is for groups that share cores with one that has queues on several. Where nobody has, each core goes by whole weights and is told nothing.
//! All devices that are in no group are one group on each core by itself: they are different VMs, so that what one of them gets on one core
//! is nothing that another one has.

use std::collections::{BTreeMap, BTreeSet};

use ioplane_device::{GroupId, GroupPart, Share};
use ioplane_scheduler::{GroupOnCore, InFlightSettings, WHOLE, divide};

/// Over how long what a group gets is averaged, ns.
const SMOOTH_NS: f64 = 80e6;
/// How often a core that serves the group is told again, ns: what it was told is lost with the group's last queue there.
const AGAIN_NS: u64 = 1_000_000_000;
/// An average below this is none at all, thousandths of a core.
const NOTHING: f64 = 0.01;

/// What the queues of one group did on one core since the last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupUse {
    pub core: u32,
    pub share: Share,
    pub used_ns: u64,
    pub wants_more: bool,
}

impl GroupUse {
    fn key(&self) -> (u32, GroupId) {
        (self.core, self.share.group)
    }

    fn in_none(&self) -> bool {
        self.share.group == Share::default().group
    }

    /// The number by which `divide` knows it.
    fn stands_for(&self) -> GroupId {
        if self.in_none() { GroupId(u32::MAX - self.core) } else { self.share.group }
    }
}

/// Averages of one group on one core.
#[derive(Debug, Default, Clone, Copy)]
struct Average {
    used_permille: f64,
    wants_more: f64,
}

impl Average {
    fn follow(&mut self, new: &GroupUse, period_ns: u64) {
        let weight = (period_ns as f64 / SMOOTH_NS).min(1.0);
        let used = (new.used_ns as f64 * 1000.0 / period_ns.max(1) as f64).min(1000.0);
        self.used_permille += (used - self.used_permille) * weight;
        if self.used_permille < NOTHING {
            self.used_permille = 0.0;
        }
        // Whoever was not polled has said nothing new.
        let wants_more = if new.wants_more && new.used_ns > 0 { 1.0 } else { 0.0 };
        self.wants_more += (wants_more - self.wants_more) * weight;
    }
}

/// What each core was told, and what that goes by.
#[derive(Debug, Default)]
pub struct Division {
    averages: BTreeMap<(u32, GroupId), Average>,
    /// With the time.
    told: BTreeMap<(u32, GroupId), (GroupPart, u64)>,
}

impl Division {
    /// Whether some core goes by a part of a weight.
    pub fn divides(&self) -> bool {
        !self.told.is_empty()
    }

    /// What cores are to be told after the last `period_ns`. One entry in `uses` for each core and group with queues there.
    pub fn look(&mut self, uses: &[GroupUse], now_ns: u64, period_ns: u64) -> Vec<(u32, GroupPart)> {
        let mut averages = BTreeMap::new();
        for one in uses {
            let mut average = self.averages.get(&one.key()).copied().unwrap_or_default();
            average.follow(one, period_ns);
            averages.insert(one.key(), average);
        }
        self.averages = averages;
        self.told.retain(|key, _| self.averages.contains_key(key));

        let mut news = Vec::new();
        for together in joined(uses) {
            let shared =
                together.iter().any(|one| !one.in_none() && cores_of(&together, one.share.group) > 1);
            let groups: BTreeSet<GroupId> = together.iter().map(GroupUse::stands_for).collect();
            if shared && groups.len() > 1 {
                // Cores that sleep are not woken.
                if together.iter().any(|one| one.used_ns > 0) {
                    self.divide(&together, now_ns, &mut news);
                }
            } else {
                for one in together {
                    if self.told.remove(&one.key()).is_some() {
                        news.push((one.core, whole(one.share.group)));
                    }
                }
            }
        }
        news
    }

    fn divide(&mut self, together: &[GroupUse], now_ns: u64, news: &mut Vec<(u32, GroupPart)>) {
        let on: Vec<GroupOnCore> = together
            .iter()
            .map(|one| {
                let average = self.averages.get(&one.key()).copied().unwrap_or_default();
                GroupOnCore {
                    group: one.stands_for(),
                    core: one.core,
                    used_permille: average.used_permille.ceil() as u32,
                    wants_more: average.wants_more >= 0.5,
                }
            })
            .collect();
        let weights: BTreeMap<GroupId, u32> =
            together.iter().map(|one| (one.stands_for(), one.share.weight.get())).collect();
        let weight = |group| weights.get(&group).copied().unwrap_or(1);
        let shares = divide(&on, weight, &InFlightSettings::default());
        for (one, share) in together.iter().zip(shares) {
            let part = GroupPart { group: one.share.group, part: share.part, in_flight: share.in_flight };
            let known = self.told.get(&one.key()).is_some_and(|(told, at)| {
                let lost = one.used_ns > 0 && now_ns.saturating_sub(*at) >= AGAIN_NS;
                near(told.part.into(), part.part.into()) && near(told.in_flight, part.in_flight) && !lost
            });
            if !known {
                self.told.insert(one.key(), (part, now_ns));
                news.push((one.core, part));
            }
        }
    }
}

fn whole(group: GroupId) -> GroupPart {
    GroupPart { group, part: WHOLE, in_flight: u64::MAX }
}

/// Whether they differ by no more than noise.
fn near(a: u64, b: u64) -> bool {
    a.abs_diff(b) <= a.max(b) / 16
}

fn cores_of(uses: &[GroupUse], group: GroupId) -> usize {
    uses.iter().filter(|one| one.share.group == group).count()
}

/// Groups that have cores in common, with one another or by way of others.
fn joined(uses: &[GroupUse]) -> Vec<Vec<GroupUse>> {
    let mut sets: Vec<Vec<GroupUse>> = Vec::new();
    for one in uses {
        let meets = |set: &Vec<GroupUse>| {
            set.iter().any(|other| other.core == one.core || other.stands_for() == one.stands_for())
        };
        let (met, mut others): (Vec<_>, Vec<_>) = sets.into_iter().partition(meets);
        others.push(met.into_iter().flatten().chain([*one]).collect());
        sets = others;
    }
    sets
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    const LOOK: u64 = 20_000_000;

    fn on(core: u32, group: u32, used_permille: u64, wants_more: bool) -> GroupUse {
        let share = Share { group: GroupId(group), weight: NonZeroU32::MIN };
        GroupUse { core, share, used_ns: used_permille * LOOK / 1000, wants_more }
    }

    /// Looks until nothing changes, and what each core goes by then.
    #[derive(Default)]
    struct Cores {
        division: Division,
        looks: u64,
        parts: BTreeMap<(u32, u32), GroupPart>,
        messages: usize,
    }

    impl Cores {
        fn look(&mut self, uses: &[GroupUse], looks: u64) {
            for _ in 0..looks {
                self.looks += 1;
                for (core, part) in self.division.look(uses, self.looks * LOOK, LOOK) {
                    self.parts.insert((core, part.group.0), part);
                    self.messages += 1;
                }
            }
        }

        /// Of the group's weight on that core, per cent; its bound, KiB.
        fn part(&self, core: u32, group: u32) -> (u32, u64) {
            let whole = whole(GroupId(group));
            let part = self.parts.get(&(core, group)).unwrap_or(&whole);
            (part.part * 100 / WHOLE, part.in_flight >> 10)
        }
    }

    #[test]
    fn the_weights_of_two_cores_follow_what_a_group_gets() {
        let mut cores = Cores::default();
        // It gets half of each, beside another on each: nobody can do better.
        let even = [on(0, 1, 500, true), on(0, 2, 500, true), on(1, 1, 500, true), on(1, 3, 500, true)];
        cores.look(&even, 20);
        assert_eq!([cores.part(0, 1).0, cores.part(1, 1).0], [50, 50]);
        assert_eq!([cores.part(0, 2).0, cores.part(1, 3).0], [100, 100]);
        // The other of core 1 goes to sleep: that core is all its own, and it leaves the first to whoever has no other.
        let alone = [on(0, 1, 500, true), on(0, 2, 500, true), on(1, 1, 1000, false), on(1, 3, 0, false)];
        cores.look(&alone, 20);
        let (first, second) = (cores.part(0, 1), cores.part(1, 1));
        assert!(first.0 <= 5 && second.0 >= 90, "{first:?} {second:?}");
        // It has less to do there and wants more of the first, where it had almost nothing.
        let less = [on(0, 1, 30, true), on(0, 2, 970, true), on(1, 1, 100, false), on(1, 3, 0, false)];
        cores.look(&less, 30);
        // 0.55 of a core each.
        let first = cores.part(0, 1).0;
        assert!((75..=90).contains(&first), "{first} %");
        // What all have in flight together is bounded, but for the least that each may have.
        let bounds: u64 =
            [(0, 1), (0, 2), (1, 1), (1, 3)].map(|(core, group)| cores.part(core, group).1).iter().sum();
        assert!((4 << 10..(6 << 10)).contains(&bounds), "{bounds} KiB");
    }

    #[test]
    fn cores_are_told_nothing_while_nothing_changes_and_again_now_and_then() {
        let mut cores = Cores::default();
        let noisy = |look: u64| {
            let more = look % 3;
            [on(0, 1, 300 + more, true), on(0, 2, 700 - more, true), on(1, 1, 200 - more, false)]
        };
        for look in 0..20 {
            cores.look(&noisy(look), 1);
        }
        let settled = std::mem::take(&mut cores.messages);
        for look in 20..40 {
            cores.look(&noisy(look), 1);
        }
        assert_eq!(cores.messages, 0, "told {settled} times before");
        cores.look(&noisy(0), 100);
        assert_eq!(cores.messages, 6, "not each of three twice in two seconds");
        // Whoever does nothing is not woken.
        cores.messages = 0;
        cores.look(&[on(0, 1, 0, false), on(0, 2, 0, false), on(1, 1, 0, false)], 200);
        assert_eq!(cores.messages, 0);
    }

    #[test]
    fn cores_that_share_no_group_go_by_whole_weights() {
        let mut cores = Cores::default();
        // Devices in no group are different VMs, on whichever cores they are.
        let none = Share::default().group.0;
        let apart =
            [on(0, none, 500, true), on(0, 1, 500, true), on(1, none, 500, true), on(1, 2, 500, true)];
        cores.look(&apart, 20);
        assert!(cores.messages == 0 && !cores.division.divides());
        // A group by itself on two cores has nobody to divide with.
        let lonely = [on(0, 1, 500, true), on(1, 1, 500, true), on(2, 2, 500, true)];
        cores.look(&lonely, 20);
        assert_eq!(cores.messages, 0);
        // A queue of the first moves to the core of the second, and back.
        let meet = [apart[0], apart[1], apart[2], apart[3], on(1, 1, 300, true)];
        cores.look(&meet, 20);
        let told: Vec<(u32, u32)> = cores.parts.keys().copied().collect();
        assert_eq!(told, [(0, none), (0, 1), (1, none), (1, 1), (1, 2)]);
        assert!(cores.division.divides() && cores.part(0, 1).0 < 100);
        assert_eq!(
            (cores.part(0, none).0, cores.part(1, none).0),
            (100, 100),
            "divided although they are apart"
        );
        cores.look(&apart, 1);
        assert!(!cores.division.divides());
        assert_eq!([(0, none), (0, 1), (1, 2)].map(|(core, group)| cores.part(core, group).0), [100; 3]);
    }
}
