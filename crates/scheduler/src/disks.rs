//! What may be in flight on one disk of the host, divided among the groups that use it: over all cores, by weight.
//!
//! A disk that answers in turn divides its rate by what each has in flight there (Little's law). So each group that uses it has a part of
//! [`crate::IN_FLIGHT`] in proportion to its weight, wherever its queues are. A disk by itself: what a group gets of one says nothing about another.
//!
//! - A group that is the only one to use a disk has no bound on it.
//! - A group that has had nothing in flight for [`IDLE_NS`] gives its part to the others, and has one slice from each core until it is seen again.
//! - A group that needs less than its part keeps the rest of it, so that its next requests wait for no more than before. But where all that is needed is less than
//!   [`BUSY`], those that lack room have that much together: a disk is not left idle for the sake of a weight.
//!
//! Called by the control plane every few tens of milliseconds; what comes out arrives on the cores for [`crate::FairTurns::bound_on`].

use std::collections::{BTreeMap, BTreeSet};

use crate::fair::{BlockDevice, GroupId};
use crate::split::InFlightSettings;

/// How long a group has had nothing in flight that gives its part to others, ns.
const IDLE_NS: u64 = 100_000_000;
/// For how long a group that has gone idle still counts as one that uses the disk, ns.
const GONE_NS: u64 = 1_000_000_000;
/// What keeps a disk busy, bytes: four of the largest slices.
const BUSY: u64 = 512 << 10;

/// A disk of the host, by a number of the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DiskNumber(pub u32);

/// What the queues of a group on one core have done on one block device since the last look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskLane {
    /// The group.
    pub group: GroupId,
    /// Of the group, by the user's settings.
    pub weight: u32,
    /// The core.
    pub core: u32,
    /// The device.
    pub device: BlockDevice,
    /// Whether it had anything in flight.
    pub active: bool,
    /// The most that it had in flight, bytes.
    pub peak: u64,
    /// Whether it would have had more in flight than it might.
    pub lacks: bool,
}

/// What a group may have in flight on one device from one core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskPart {
    /// The group.
    pub group: GroupId,
    /// The core.
    pub core: u32,
    /// The device.
    pub device: BlockDevice,
    /// Bytes; `u64::MAX` if no other group uses the disks that the device lies on.
    pub in_flight: u64,
}

type LaneKey = (GroupId, u32, BlockDevice);

/// What is remembered of a lane from look to look.
#[derive(Debug, Clone, Copy, Default)]
struct Recent {
    /// When it had something in flight last.
    active_ns: Option<u64>,
    /// When it would have had more.
    lacked_ns: Option<u64>,
    /// The most that it had in flight, which fades.
    peak: f64,
}

impl Recent {
    fn see(&mut self, lane: &DiskLane, now_ns: u64, period_ns: u64) {
        if lane.active {
            self.active_ns = Some(now_ns);
        }
        if lane.active && lane.lacks {
            self.lacked_ns = Some(now_ns);
        }
        let faded = self.peak * (1.0 - (period_ns as f64 / IDLE_NS as f64).min(1.0));
        self.peak = faded.max(if lane.active { lane.peak as f64 } else { 0.0 });
    }

    fn within(at: Option<u64>, now_ns: u64, span_ns: u64) -> bool {
        at.is_some_and(|at| now_ns.saturating_sub(at) < span_ns)
    }
}

/// One lane as the division sees it.
#[derive(Debug, Clone, Copy)]
struct Need {
    group: GroupId,
    weight: f64,
    /// It has used the disk within [`GONE_NS`], within [`IDLE_NS`].
    known: bool,
    active: bool,
    /// What it needs, bytes; infinite if it lacks room.
    need: f64,
}

/// The memory of what groups have in flight on disks, and what follows from it.
#[derive(Debug, Default)]
pub struct DiskShares {
    settings: InFlightSettings,
    recent: BTreeMap<LaneKey, Recent>,
    looked_ns: u64,
}

impl DiskShares {
    /// A look at `now_ns`. One entry in `lanes` for each group, core and device with queues, and the answer has one for each, in the same order.
    /// `disks`: on which disks of the host a device lies; on none where that is not known, and then it is shared with nobody.
    pub fn look<'a>(
        &mut self,
        lanes: &[DiskLane],
        disks: impl Fn(BlockDevice) -> &'a [DiskNumber],
        now_ns: u64,
    ) -> Vec<DiskPart> {
        let period_ns = now_ns.saturating_sub(std::mem::replace(&mut self.looked_ns, now_ns));
        let mut recent = BTreeMap::new();
        for lane in lanes {
            let key = (lane.group, lane.core, lane.device);
            let mut one = self.recent.get(&key).copied().unwrap_or_default();
            one.see(lane, now_ns, period_ns);
            recent.insert(key, one);
        }
        self.recent = recent;

        let mut bounds = vec![u64::MAX; lanes.len()];
        let used: BTreeSet<DiskNumber> = lanes.iter().flat_map(|lane| disks(lane.device)).copied().collect();
        for disk in used {
            let on: Vec<usize> =
                (0..lanes.len()).filter(|at| disks(lanes[*at].device).contains(&disk)).collect();
            let needs: Vec<Need> = on.iter().map(|at| self.need(&lanes[*at], now_ns)).collect();
            for (at, bound) in on.into_iter().zip(divide_disk(&needs, &self.settings)) {
                // One that lies on several has what the scarcest of them leaves it.
                bounds[at] = bounds[at].min(bound);
            }
        }
        lanes
            .iter()
            .zip(bounds)
            .map(|(lane, in_flight)| DiskPart {
                group: lane.group,
                core: lane.core,
                device: lane.device,
                in_flight,
            })
            .collect()
    }

    fn need(&self, lane: &DiskLane, now_ns: u64) -> Need {
        let recent = self.recent.get(&(lane.group, lane.core, lane.device)).copied().unwrap_or_default();
        let lacks = Recent::within(recent.lacked_ns, now_ns, IDLE_NS);
        Need {
            group: lane.group,
            weight: f64::from(lane.weight.max(1)),
            known: Recent::within(recent.active_ns, now_ns, GONE_NS),
            active: Recent::within(recent.active_ns, now_ns, IDLE_NS),
            need: if lacks { f64::INFINITY } else { recent.peak },
        }
    }
}

/// What one group needs of a disk, over all cores.
#[derive(Debug, Clone, Copy, Default)]
struct GroupNeed {
    weight: f64,
    known: bool,
    active: bool,
    need: f64,
}

/// What each lane may have in flight on one disk.
fn divide_disk(needs: &[Need], settings: &InFlightSettings) -> Vec<u64> {
    let mut groups: BTreeMap<GroupId, GroupNeed> = BTreeMap::new();
    for need in needs {
        let group = groups.entry(need.group).or_default();
        group.weight = need.weight;
        group.known |= need.known;
        group.active |= need.active;
        group.need += need.need;
    }
    if groups.values().filter(|group| group.known).count() < 2 {
        return vec![u64::MAX; needs.len()];
    }
    let parts = group_parts(&groups, settings.total as f64);
    let mut bounds = vec![settings.least; needs.len()];
    for (group, part) in parts {
        let of: Vec<usize> = (0..needs.len()).filter(|at| needs[*at].group == group).collect();
        let wanted: Vec<f64> = of.iter().map(|at| needs[*at].need).collect();
        for (at, bound) in of.into_iter().zip(fill(part, &wanted)) {
            bounds[at] = (bound as u64).max(settings.least);
        }
    }
    bounds
}

/// What each group that is not idle may have in flight.
fn group_parts(groups: &BTreeMap<GroupId, GroupNeed>, total: f64) -> BTreeMap<GroupId, f64> {
    let weights = |among: &dyn Fn(&GroupNeed) -> bool| -> f64 {
        groups.values().filter(|group| among(group)).map(|group| group.weight).sum()
    };
    let active = weights(&|group| group.active);
    let part = |group: &GroupNeed| total * group.weight / active;
    let lacks = |group: &GroupNeed| group.active && group.need >= part(group);
    // What those that have enough leave of a busy disk.
    let enough: f64 =
        groups.values().filter(|group| group.active && !lacks(group)).map(|group| group.need).sum();
    let left = (BUSY as f64).min(total) - enough;
    let short = weights(&lacks);
    groups
        .iter()
        .filter(|(_, group)| group.active)
        .map(|(id, group)| {
            let raised = if lacks(group) { left * group.weight / short } else { 0.0 };
            (*id, part(group).max(raised))
        })
        .collect()
}

/// Divides `total` so that nobody's part can grow but at the cost of one that has less; what nobody needs is divided evenly.
fn fill(total: f64, needs: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by(|a, b| needs[*a].total_cmp(&needs[*b]));
    let (mut got, mut left) = (vec![0.0; needs.len()], total);
    for (nth, at) in order.iter().enumerate() {
        got[*at] = needs[*at].min(left / (needs.len() - nth) as f64);
        left -= got[*at];
    }
    got.iter().map(|part| part + left / needs.len().max(1) as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const LOOK: u64 = 20_000_000;

    fn lane(group: u32, weight: u32, core: u32, device: u64, peak: u64, lacks: bool) -> DiskLane {
        let device = BlockDevice(device);
        DiskLane { group: GroupId(group), weight, core, device, active: peak > 0, peak, lacks }
    }

    /// Devices 1 and 2 are partitions of disk 0, 3 is disk 1, 4 lies on both, 9 on nothing that is known.
    fn disks(device: BlockDevice) -> &'static [DiskNumber] {
        match device.0 {
            1 | 2 => &[DiskNumber(0)],
            3 => &[DiskNumber(1)],
            4 => &[DiskNumber(0), DiskNumber(1)],
            _ => &[],
        }
    }

    fn bounds(lanes: &[DiskLane]) -> Vec<u64> {
        DiskShares::default().look(lanes, disks, LOOK).iter().map(|part| part.in_flight).collect()
    }

    #[test]
    fn what_two_groups_on_two_cores_have_in_flight_follows_their_weights() {
        let lanes = [lane(1, 1, 0, 1, MIB, true), lane(2, 3, 1, 1, MIB, true)];
        assert_eq!(bounds(&lanes), [MIB, 3 * MIB]);
        // Partitions of one disk are that disk; another disk is none of their business.
        let lanes = [
            lane(1, 1, 0, 1, MIB, true),
            lane(2, 3, 1, 2, MIB, true),
            lane(3, 9, 1, 3, MIB, true),
            lane(4, 9, 1, 9, MIB, true),
            lane(5, 9, 0, 9, MIB, true),
        ];
        assert_eq!(bounds(&lanes), [MIB, 3 * MIB, u64::MAX, u64::MAX, u64::MAX]);
        // One that lies on two disks is bound by the scarcer.
        let lanes = [lane(1, 1, 0, 1, MIB, true), lane(2, 3, 1, 4, MIB, true), lane(3, 9, 1, 3, MIB, true)];
        assert_eq!(bounds(&lanes), [MIB, MIB, 3 * MIB]);
    }

    #[test]
    fn the_part_of_a_group_is_divided_among_its_cores_by_what_they_need() {
        let lanes = [
            lane(1, 1, 0, 1, MIB, true),
            lane(1, 1, 1, 2, MIB, true),
            lane(2, 1, 0, 1, MIB, true),
            lane(2, 1, 1, 1, 256 << 10, false),
        ];
        assert_eq!(bounds(&lanes), [MIB, MIB, 2 * MIB - (256 << 10), 256 << 10]);
    }

    #[test]
    fn an_idle_group_gives_its_part_away_and_is_seen_when_it_wakes() {
        let mut shares = DiskShares::default();
        let mut look = |number: u64, other: u64| {
            let lanes =
                [lane(1, 1, 0, 1, MIB, true), lane(2, 3, 1, 1, other, other > 0), lane(3, 4, 1, 1, 0, false)];
            shares.look(&lanes, disks, number * LOOK).iter().map(|part| part.in_flight).collect::<Vec<_>>()
        };
        assert_eq!(look(1, 0)[0], u64::MAX, "the only one to use it");
        assert_eq!(look(2, MIB), [MIB, 3 * MIB, 128 << 10]);
        // What pauses for a moment keeps its part.
        assert_eq!(look(4, 0), [MIB, 3 * MIB, 128 << 10]);
        assert_eq!(look(7, 0), [4 * MIB, 128 << 10, 128 << 10]);
        assert_eq!(look(8, 4096), [MIB, 3 * MIB, 128 << 10]);
        assert_eq!(look(200, 0)[0], u64::MAX, "long gone");
    }

    #[test]
    fn a_weight_does_not_leave_a_disk_idle() {
        // It needs 64 KiB of its 3996 KiB.
        let lanes = [lane(1, 1, 0, 1, 128 << 10, true), lane(2, 999, 1, 1, 64 << 10, false)];
        assert_eq!(bounds(&lanes)[0], BUSY - (64 << 10));
        // Those that lack share what is left by weight.
        let lanes = [
            lane(1, 1, 0, 1, 128 << 10, true),
            lane(2, 996, 1, 1, 256 << 10, false),
            lane(3, 3, 0, 1, 128 << 10, true),
        ];
        let got = bounds(&lanes);
        assert_eq!((got[0], got[2]), (128 << 10, 192 << 10));
        // Where all lack nothing is raised.
        let lanes = [lane(1, 1, 0, 1, 128 << 10, true), lane(2, 999, 1, 1, 64 << 10, true)];
        assert_eq!(bounds(&lanes)[0], 128 << 10);
    }

    #[test]
    fn nothing_and_strange_numbers_are_divided_too() {
        assert_eq!(bounds(&[]), []);
        let lanes = [lane(1, 0, 0, 1, u64::MAX, true), lane(2, u32::MAX, 1, 1, u64::MAX, false)];
        let got = bounds(&lanes);
        assert_eq!(got[0], 128 << 10);
        assert!(got[1] <= 4 * MIB && got[1] > 3 * MIB, "{got:?}");
        // Time that runs backwards.
        let mut shares = DiskShares::default();
        let _ = shares.look(&lanes, disks, 1000 * LOOK);
        assert_eq!(shares.look(&lanes, disks, LOOK).len(), 2);
    }
}
