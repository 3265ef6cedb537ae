//! Who is polled next, and for how much: deficit round robin by cost, by group and within a group by queue.
//!
//! A group is what shares a weight: the queues of one VM. In each turn a group that has work is granted a quantum in proportion to its weight, and its
//! queues take turns within it. What a poll costs is deducted when it is over, so a poll that goes over its grant is paid for in the turns
//! that follow. A group without work keeps no grant, but it keeps what it owes.
//!
//! What the backing is asked for at once is bounded per group as well ([`FairTurns::bound`]): where the disk and not the core is what groups compete
//! for, each has in flight in proportion to its weight, and a disk that serves what it has in turn divides itself by that. Where it is known on
//! which block device a backing lies, the control plane says how much of that each group may have from this core ([`FairTurns::bound_on`]), whether or not
//! groups compete for the core.
//!
//! Nothing here reads a clock, and after [`FairTurns::attach`] nothing allocates.

mod lane;
mod ring;
mod turn;

use std::collections::VecDeque;

use lane::Lane;
pub use lane::{BackingUse, BlockDevice};

/// A group of queues that share a weight and limits: a tenant, a VM. `Share::group` of the queue's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub u32);

/// What a request costs beside its bytes, in bytes that could be copied meanwhile; and what a poll costs.
pub const REQUEST_COST: u64 = 512;

/// What a group of average weight is granted per turn: some 16 us of copying, so that a turn of eight groups that all have work takes as long as
/// four polls may (docs/decisions/0017-work-per-poll.md). A NIC has room in it for a whole batch of small frames in each direction.
pub const QUANTUM: u64 = 128 << 10;

/// The most that one poll is granted.
pub const MOST_PER_POLL: u64 = 256 << 10;

/// What all groups together have in flight from one core while several compete, in bytes; each has its part by weight. A disk of 1 GB/s is through with
/// it in 4 ms.
pub const IN_FLIGHT: u64 = 4 << 20;

/// The largest transfer that is handed to a backing in one piece. Each group may have this in flight at least.
pub const LARGEST_SLICE: u64 = 128 << 10;

/// The most that a group has in flight on one block device from one core, also if it is alone there, bytes: what the first request of another
/// waits for. A disk does not feel it: one of 7 GB/s that answers within a millisecond is busy with 7 MB. What one poll of each queue submits may
/// come on top.
pub const MOST_IN_FLIGHT: u64 = 64 << 20;

/// The whole of a group's weight, as [`FairTurns::part`] counts it.
pub const WHOLE: u32 = 4096;

/// The most that is owed: some 16 polls that each cost what a poll may. A poller that says that it has cost more is forgiven.
const MOST_OWED: i64 = 16 * MOST_PER_POLL as i64;

/// The cost of a poll that had work, in bytes that could have been copied meanwhile.
#[inline]
pub fn poll_cost(requests: u32, bytes: u32) -> u64 {
    u64::from(bytes) + (u64::from(requests) + 1) * REQUEST_COST
}

/// One poll that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The slot to step.
    pub slot: usize,
    /// What the poll may cost. The last request that it takes may go over.
    pub bytes: u64,
    /// What it may hand to a backing: at most this, and with 0 it only completes. Larger transfers are handed over in slices.
    pub room: u64,
}

/// What came of a poll.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Polled {
    /// What it cost; nothing if it found nothing.
    pub bytes: u64,
    /// Whether there may be more to do at once. False: it ran dry, or waits for its backing or a limit.
    pub more: bool,
}

const NOBODY: u32 = u32::MAX;

/// One queue.
#[derive(Debug, Clone)]
struct Member {
    group: u32,
    weight: u32,
    /// Its neighbours in the group's ring of awake members.
    next: u32,
    previous: u32,
    awake: bool,
    deficit: i64,
    /// Granted its quantum since the ring came to it.
    granted: bool,
    /// The visit in which it had no more work.
    idle_in: u64,
    /// What of its group's is in flight for it.
    in_flight: u64,
    /// Where that is counted.
    lane: u32,
}

/// The queues of one group on this core.
#[derive(Debug, Clone)]
struct Tenant {
    id: GroupId,
    /// Of the group on all cores.
    whole: u32,
    /// What of it stands on this core, of [`WHOLE`].
    part: u32,
    /// The product of both.
    weight: u32,
    attached: u32,
    awake: u32,
    /// Sum of the awake members' weights.
    weights: u64,
    deficit: i64,
    /// The member before the one whose turn it is, in the ring.
    before: u32,
    in_flight: u64,
    /// What of it is on lanes with a bound of their own.
    told: u64,
    bound: u64,
    /// Turns in which it could not submit since its bound was reached.
    throttled: u64,
    served: u64,
    /// Its last visit ended with work left.
    cut_short: bool,
    /// This turn has not visited it yet, since it owes.
    passed_over: bool,
}

impl Tenant {
    /// What it may have in flight beside others, whose weights and its own come to `weights`.
    #[inline]
    fn bound_among(&self, weights: u64) -> u64 {
        let part = IN_FLIGHT * u64::from(self.weight) / weights.max(u64::from(self.weight));
        part.min(self.bound).max(LARGEST_SLICE)
    }

    /// What it may submit, of so much that it may have in flight, where its lane has no bound.
    #[inline]
    fn room(&self, bound: u64) -> u64 {
        bound.saturating_sub(self.in_flight - self.told)
    }
}

/// The order of polls on one core. Slots are named by their number on the core, below some tens of thousands.
#[derive(Debug, Clone, Default)]
pub struct FairTurns {
    members: Vec<Option<Member>>,
    tenants: Vec<Tenant>,
    lanes: Vec<Lane>,
    /// How many of them have a bound that may be reached.
    bounded: usize,
    /// Groups with awake members, the next one first.
    round: VecDeque<u32>,
    /// Sum of the weights of these.
    weights: u64,
    /// Groups that have yet to be visited in this turn.
    left: usize,
    visiting: Option<u32>,
    /// What the visited group may have in flight.
    bound: u64,
    /// Number of the visit.
    visit: u64,
    /// Members of the visited group that had no more work in this visit.
    idle: u32,
    /// Members that owe and were passed since the last poll with work.
    passed: u32,
    /// Groups that this turn has passed over, since they owe.
    owing: u32,
    /// Whether a poll of this turn had work.
    worked: bool,
    /// Whether what is owed has been forgiven in this turn.
    forgiven: bool,
}

/// One group of a core, as it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TenantReading {
    /// Which.
    pub group: GroupId,
    /// What its polls have cost since its first queue came to this core.
    pub served: u64,
    /// Bytes in flight now.
    pub in_flight: u64,
    /// Polls that might submit nothing because of the bound.
    pub throttled: u64,
    /// Whether it had more work when its last turn was over.
    pub wants_more: bool,
}

impl FairTurns {
    /// Whether more than one group has awake queues. With one, any order is fair, and what it costs need not be told: whoever comes to compete
    /// with it finds it without debts.
    #[inline]
    pub fn competes(&self) -> bool {
        self.round.len() > 1
    }

    /// The queue has handed so many bytes to its backing, and the backing has ended so many of what it was handed before. Whoever competes or
    /// not: what a group has in flight counts when others come.
    #[inline]
    pub fn moved(&mut self, slot: usize, submitted: u64, completed: u64) {
        if let Some(Some(member)) = self.members.get_mut(slot) {
            let before = member.in_flight;
            member.in_flight = (before + submitted).saturating_sub(completed);
            let (now, lane) = (member.in_flight, member.lane);
            let tenant = &mut self.tenants[member.group as usize];
            tenant.in_flight = tenant.in_flight - before + now;
            if self.lanes[lane as usize].is_told() {
                tenant.told = tenant.told - before + now;
            }
            self.move_lane(lane, before, now);
        }
    }

    /// What the queue may hand to its backing now; `u64::MAX` where nobody competes with its group for the core or the backing, and the group is far from
    /// [`MOST_IN_FLIGHT`].
    #[inline]
    pub fn room(&self, slot: usize) -> u64 {
        match self.members.get(slot) {
            Some(Some(member)) => self.room_of(member),
            _ => u64::MAX,
        }
    }

    #[inline]
    fn room_of(&self, member: &Member) -> u64 {
        let lane = &self.lanes[member.lane as usize];
        let room = match lane.room() {
            Some(room) => room,
            None if self.competes() => {
                let tenant = &self.tenants[member.group as usize];
                tenant.room(tenant.bound_among(self.weights))
            }
            None => u64::MAX,
        };
        room.min(lane.below_most())
    }

    /// Whether the group of this queue would use more of the core than it may while others compete with it, or have more in flight where that is
    /// divided by cores and not by disks of the host.
    pub fn wants_more(&self, slot: usize) -> bool {
        match self.members.get(slot) {
            Some(Some(member)) if self.competes() => {
                let tenant = &self.tenants[member.group as usize];
                let divided_by_disks = self.lanes[member.lane as usize].is_told();
                tenant.cut_short || (!divided_by_disks && tenant.room(tenant.bound_among(self.weights)) == 0)
            }
            _ => false,
        }
    }

    /// How the groups of this core stand.
    pub fn read(&self) -> impl Iterator<Item = TenantReading> {
        self.tenants.iter().filter(|tenant| tenant.attached > 0).map(|tenant| TenantReading {
            group: tenant.id,
            served: tenant.served,
            in_flight: tenant.in_flight,
            throttled: tenant.throttled,
            wants_more: tenant.cut_short,
        })
    }
}
