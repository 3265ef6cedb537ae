//! A group's weight, divided among the cores that serve its queues.
//!
//! Each core divides its time by the weights of the groups on it ([`crate::FairTurns`]) and knows of no other core. For a group to have its part of all
//! of them, its weight is divided among its cores in proportion to what it gets there: a group that gets more from one core spends more of its weight
//! on that one, and leaves the other to those who have no choice. Repeated, this leads to the division in which no group's total can grow
//! but at the price of one that has less for its weight (weighted max-min fairness): it is the proportional response of buyers in
//! a market of divisible goods (Zhang 2011), with one good per core.
//!
//! Called by the control plane every few tens of milliseconds; what comes out arrives on the cores as `CoreMessage::Group`.

use crate::fair::{GroupId, IN_FLIGHT, LARGEST_SLICE, WHOLE};

/// What one group did on one core in the last period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupOnCore {
    /// The group.
    pub group: GroupId,
    /// The core.
    pub core: u32,
    /// Time of the core that it had, in thousandths of the period.
    pub used_permille: u32,
    /// Whether it would have used more: it had work left when its turns ended.
    pub wants_more: bool,
}

/// What a group is worth on one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalShare {
    /// The group.
    pub group: GroupId,
    /// The core.
    pub core: u32,
    /// How much of its weight stands there, of [`WHOLE`], for [`crate::FairTurns::part`].
    pub part: u32,
    /// What it may have in flight from there, for [`crate::FairTurns::bound`], bytes.
    pub in_flight: u64,
}

/// What is in flight at a backing that all groups share, and what it is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InFlightSettings {
    /// Bytes that all groups together may have in flight.
    pub total: u64,
    /// What each may have from each core whatever its weight: one request of common size.
    pub least: u64,
}

impl Default for InFlightSettings {
    fn default() -> Self {
        InFlightSettings { total: IN_FLIGHT, least: LARGEST_SLICE }
    }
}

/// The part of a group's weight that stands on each of its cores even where it had nothing, over the number of its cores: a queue that wakes
/// there is not starved until the next period.
const FLOOR: f64 = 1.0 / 16.0;

/// Rounds of bidding in one call.
const ROUNDS: usize = 64;

/// Divides the weights of all groups. `weight`: of a group, by the user's settings. One entry in `on` for each group and core with queues of
/// it; the answer has one for each of these, in the same order.
pub fn divide(
    on: &[GroupOnCore],
    weight: impl Fn(GroupId) -> u32,
    in_flight: &InFlightSettings,
) -> Vec<LocalShare> {
    let pairs: Vec<Pair> = pairs(on, &weight);
    let bids = bids(&pairs);
    let awake: u64 = groups(on)
        .into_iter()
        .filter(|group| on.iter().any(|one| one.group == *group && one.used_permille > 0))
        .map(|group| u64::from(weight(group).max(1)))
        .sum();
    on.iter()
        .zip(&pairs)
        .zip(bids)
        .map(|((one, pair), bid)| {
            let cores = on.iter().filter(|other| other.group == one.group).count() as f64;
            let part = FLOOR / cores + (1.0 - FLOOR) * bid / pair.weight;
            let own = u64::from(weight(one.group).max(1));
            // One that had nothing so far is reckoned as one more.
            let idle = on.iter().all(|other| other.group != one.group || other.used_permille == 0);
            let all = awake + if idle { own } else { 0 };
            let bound = (in_flight.total as f64 * own as f64 / all.max(1) as f64 * part) as u64;
            LocalShare {
                group: one.group,
                core: one.core,
                part: ((part * f64::from(WHOLE)).round() as u32).clamp(1, WHOLE),
                in_flight: bound.max(in_flight.least),
            }
        })
        .collect()
}

fn groups(on: &[GroupOnCore]) -> Vec<GroupId> {
    let mut groups: Vec<GroupId> = on.iter().map(|one| one.group).collect();
    groups.sort_unstable();
    groups.dedup();
    groups
}

/// One group on one core, as numbers.
struct Pair {
    group: usize,
    core: usize,
    /// The group's, in all.
    weight: f64,
    /// The most that it would use of the core, where 1 is all of it.
    demand: f64,
}

fn pairs(on: &[GroupOnCore], weight: &impl Fn(GroupId) -> u32) -> Vec<Pair> {
    let names = groups(on);
    let mut cores: Vec<u32> = on.iter().map(|one| one.core).collect();
    cores.sort_unstable();
    cores.dedup();
    on.iter()
        .map(|one| Pair {
            group: names.binary_search(&one.group).unwrap_or(0),
            core: cores.binary_search(&one.core).unwrap_or(0),
            weight: f64::from(weight(one.group).max(1)),
            demand: if one.wants_more { 1.0 } else { f64::from(one.used_permille.min(1000)) / 1000.0 },
        })
        .collect()
}

/// What each group spends on each core in the end; a group's bids sum up to its weight.
fn bids(pairs: &[Pair]) -> Vec<f64> {
    let cores = pairs.iter().map(|pair| pair.core + 1).max().unwrap_or(0);
    let count = pairs.iter().map(|pair| pair.group + 1).max().unwrap_or(0);
    let per_group = |of: &dyn Fn(usize) -> f64| {
        let mut sums = vec![0.0; count];
        pairs.iter().enumerate().for_each(|(at, pair)| sums[pair.group] += of(at));
        sums
    };
    let members = per_group(&|_| 1.0);
    let mut bids: Vec<f64> = pairs.iter().map(|pair| pair.weight / members[pair.group]).collect();
    for _ in 0..ROUNDS {
        let got = served(pairs, &bids, cores);
        let totals = per_group(&|at| got[at]);
        for (at, pair) in pairs.iter().enumerate() {
            if totals[pair.group] > 0.0 {
                bids[at] = pair.weight * got[at] / totals[pair.group];
            }
        }
    }
    bids
}

/// What each group gets of each core for its bid: in proportion, and nobody more than it can use.
fn served(pairs: &[Pair], bids: &[f64], cores: usize) -> Vec<f64> {
    let mut got = vec![0.0; pairs.len()];
    for core in 0..cores {
        let mut wanting: Vec<usize> = (0..pairs.len()).filter(|at| pairs[*at].core == core).collect();
        let mut left = 1.0;
        loop {
            let bid: f64 = wanting.iter().map(|at| bids[*at]).sum();
            if bid <= 0.0 {
                break;
            }
            let part = |at: usize| left * bids[at] / bid;
            let (full, short): (Vec<usize>, Vec<usize>) =
                wanting.iter().partition(|at| pairs[**at].demand <= part(**at));
            if full.is_empty() {
                wanting.iter().for_each(|at| got[*at] = part(*at));
                break;
            }
            full.iter().for_each(|at| got[*at] = pairs[*at].demand);
            left -= full.iter().map(|at| pairs[*at].demand).sum::<f64>();
            wanting = short;
        }
    }
    got
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(group: u32, core: u32, used_permille: u32, wants_more: bool) -> GroupOnCore {
        GroupOnCore { group: GroupId(group), core, used_permille, wants_more }
    }

    /// What each group gets in all, in thousandths of a core, by the divided weights.
    fn totals(on: &[GroupOnCore], weight: impl Fn(GroupId) -> u32) -> Vec<u32> {
        let shares = divide(on, &weight, &InFlightSettings::default());
        let pairs = pairs(on, &weight);
        let bid = |share: &LocalShare| f64::from(share.part) * f64::from(weight(share.group));
        let bids: Vec<f64> = shares.iter().map(bid).collect();
        let got = served(&pairs, &bids, 8);
        groups(on)
            .iter()
            .enumerate()
            .map(|(index, _)| {
                let sum: f64 =
                    pairs.iter().zip(&got).filter(|(pair, _)| pair.group == index).map(|(_, got)| got).sum();
                (sum * 1000.0).round() as u32
            })
            .collect()
    }

    fn near(got: &[u32], wanted: &[u32]) {
        let close = got.iter().zip(wanted).all(|(got, wanted)| got.abs_diff(*wanted) * 20 <= *wanted);
        assert!(close && got.len() == wanted.len(), "{got:?}, not {wanted:?}");
    }

    #[test]
    fn a_group_on_two_cores_gets_no_more_than_its_weight() {
        let all = [on(0, 0, 500, true), on(0, 1, 500, true), on(1, 0, 500, true), on(2, 1, 500, true)];
        near(&totals(&all, |_| 1), &[667, 667, 667]);
        // Twice the weight: 1000, 500, 500.
        near(&totals(&all, |group| if group.0 == 0 { 2 } else { 1 }), &[1000, 500, 500]);
    }

    #[test]
    fn who_can_go_elsewhere_leaves_the_crowded_core() {
        let all = [
            on(0, 0, 250, true),
            on(0, 1, 500, true),
            on(1, 0, 250, true),
            on(2, 0, 250, true),
            on(3, 1, 500, true),
        ];
        near(&totals(&all, |_| 1), &[500, 500, 500, 500]);
    }

    #[test]
    fn who_wants_little_gets_it_and_spends_the_rest_elsewhere() {
        let all = [on(0, 0, 100, false), on(0, 1, 450, true), on(1, 1, 550, true), on(2, 0, 900, true)];
        near(&totals(&all, |_| 1), &[550, 550, 900]);
    }

    #[test]
    fn a_quiet_group_keeps_a_part_of_each_core() {
        let all = [on(0, 0, 0, false), on(0, 1, 900, true), on(1, 0, 900, true)];
        let shares = divide(&all, |_| 4, &InFlightSettings::default());
        assert!(shares[0].part * 64 > WHOLE && shares[2].part == WHOLE, "{shares:?}");
        assert!(shares.iter().all(|share| share.in_flight >= 128 << 10));
        let sum: u64 = shares.iter().map(|share| share.in_flight).sum();
        assert!(sum <= (4 << 20) + 3 * (128 << 10));
    }

    #[test]
    fn nothing_to_divide() {
        assert_eq!(divide(&[], |_| 1, &InFlightSettings::default()), []);
    }
}
