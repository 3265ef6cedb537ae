//! Lanes: what the queues of one group have in flight on one block device of the host from this core, and how much that may be.

use super::{FairTurns, GroupId, MOST_IN_FLIGHT};

/// The number of the block device of the host on which a backing lies, as `stat` gives it (`st_dev`, or `st_rdev` of the device itself). What
/// disk that is part of is the control plane's business.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockDevice(pub u64);

/// What a lane has had in flight of late.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackingUse {
    /// The most, bytes.
    pub peak: u64,
    /// A queue would have had more in flight than it might.
    pub lacks: bool,
}

impl BackingUse {
    fn with(self, other: BackingUse) -> BackingUse {
        BackingUse { peak: self.peak.max(other.peak), lacks: self.lacks | other.lacks }
    }
}

#[derive(Debug, Clone)]
pub(super) struct Lane {
    group: u32,
    /// `None`: it is not known where they lie.
    device: Option<BlockDevice>,
    members: u32,
    in_flight: u64,
    /// What the control plane has said; `None` until then.
    bound: Option<u64>,
    /// Since [`FairTurns::end_period`] was called last, and between that call and the one before.
    used: BackingUse,
    used_before: BackingUse,
}

impl Lane {
    #[inline]
    pub(super) fn is_told(&self) -> bool {
        self.bound.is_some()
    }

    /// What may be submitted, if the control plane has said how much.
    #[inline]
    pub(super) fn room(&self) -> Option<u64> {
        self.bound.map(|bound| bound.saturating_sub(self.in_flight))
    }

    /// What may be submitted before [`MOST_IN_FLIGHT`] is reached, whoever uses the device; `u64::MAX` while that is far, so that a queue need not
    /// be told and what it submits need not be cut into slices.
    #[inline]
    pub(super) fn below_most(&self) -> u64 {
        if self.is_near_most() { MOST_IN_FLIGHT.saturating_sub(self.in_flight) } else { u64::MAX }
    }

    /// A backing of which it is not known where it lies may be any of several: one that is silent must not take the room of the others.
    #[inline]
    fn is_near_most(&self) -> bool {
        self.in_flight > MOST_IN_FLIGHT / 2 && self.device.is_some()
    }

    #[inline]
    fn moved(&mut self, before: u64, now: u64) {
        self.in_flight = self.in_flight - before + now;
        self.used.peak = self.used.peak.max(self.in_flight);
    }

    #[inline]
    fn may_be_reached(&self) -> bool {
        self.bound.is_some_and(|bound| bound != u64::MAX) || self.is_near_most()
    }
}

impl FairTurns {
    /// Changes a lane, and counts whether its bound may be reached then.
    #[inline]
    fn change_lane<T>(&mut self, at: usize, change: impl FnOnce(&mut Lane) -> T) -> T {
        let lane = &mut self.lanes[at];
        let before = lane.may_be_reached();
        let got = change(lane);
        self.bounded = self.bounded + usize::from(lane.may_be_reached()) - usize::from(before);
        got
    }

    /// A member of the lane has so much in flight, and had that much before.
    #[inline]
    pub(super) fn move_lane(&mut self, lane: u32, before: u64, now: u64) {
        self.change_lane(lane as usize, |lane| lane.moved(before, now));
    }

    /// A place for a member of that group whose backing lies there. Allocates.
    pub(super) fn enter_lane(&mut self, group: u32, device: Option<BlockDevice>) -> u32 {
        let same = |lane: &Lane| lane.members > 0 && lane.group == group && lane.device == device;
        if let Some(at) = self.lanes.iter().position(same) {
            self.lanes[at].members += 1;
            return at as u32;
        }
        let (used, used_before) = <(BackingUse, BackingUse)>::default();
        let lane = Lane { group, device, members: 1, in_flight: 0, bound: None, used, used_before };
        match self.lanes.iter().position(|lane| lane.members == 0) {
            Some(at) => {
                self.lanes[at] = lane;
                at as u32
            }
            None => {
                self.lanes.push(lane);
                self.lanes.len() as u32 - 1
            }
        }
    }

    /// A member that has so much in flight goes; what its lane was told goes with the last one.
    pub(super) fn leave_lane(&mut self, lane: u32, in_flight: u64) {
        let at = lane as usize;
        if self.lanes[at].is_told() {
            self.tenants[self.lanes[at].group as usize].told -= in_flight;
        }
        self.change_lane(at, |lane| {
            lane.in_flight -= in_flight;
            lane.members -= 1;
            if lane.members == 0 {
                lane.bound = None;
            }
        });
    }

    /// The most that the group may have in flight on that device from this core, bytes, from the next poll on and whoever competes for the core;
    /// `u64::MAX` if nobody else uses what the device is part of. Forgotten with the last queue that the group has there.
    pub fn bound_on(&mut self, group: GroupId, device: BlockDevice, bytes: u64) {
        let tenants = &self.tenants;
        let is_it = |lane: &Lane| {
            let tenant = &tenants[lane.group as usize];
            lane.members > 0 && lane.device == Some(device) && tenant.id == group && tenant.attached > 0
        };
        let Some(at) = self.lanes.iter().position(is_it) else { return };
        let lane = &self.lanes[at];
        if !lane.is_told() {
            self.tenants[lane.group as usize].told += lane.in_flight;
        }
        self.change_lane(at, |lane| lane.bound = Some(bytes));
    }

    /// Whether some group has a bound on some device, or comes near [`MOST_IN_FLIGHT`], so that a queue has to be told its room although its group has
    /// the core to itself.
    #[inline]
    pub fn bounds_lanes(&self) -> bool {
        self.bounded > 0
    }

    /// The queue has left something undone since it had no room for it.
    #[inline]
    pub fn lacked_room(&mut self, slot: usize) {
        if let Some(Some(member)) = self.members.get(slot) {
            self.lanes[member.lane as usize].used.lacks = true;
        }
    }

    /// Bytes that the queue has in flight.
    pub fn in_flight(&self, slot: usize) -> u64 {
        self.members.get(slot).and_then(Option::as_ref).map_or(0, |member| member.in_flight)
    }

    /// What the queue's group has had in flight on the device of this queue's backing, in this period and the one before.
    pub fn backing_use(&self, slot: usize) -> BackingUse {
        match self.members.get(slot) {
            Some(Some(member)) => {
                let lane = &self.lanes[member.lane as usize];
                lane.used.with(lane.used_before)
            }
            _ => BackingUse::default(),
        }
    }

    /// A period of [`FairTurns::backing_use`] ends.
    pub fn end_period(&mut self) {
        for lane in &mut self.lanes {
            let now = BackingUse { peak: lane.in_flight, lacks: false };
            lane.used_before = std::mem::replace(&mut lane.used, now);
        }
    }
}
