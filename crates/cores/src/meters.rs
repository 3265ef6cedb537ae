//! The meters of the slots that a core has, and what groups have used of it: entered by whoever sends a slot, read by the control plane.

#![expect(
    clippy::disallowed_types,
    reason = "senders and readers lock it, on the control plane; the core never does"
)]

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_device::{GroupId, SlotMeter};

/// What the queues of one group have used of cores. A queue that changes its group takes along what it has used since it was read last.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct GroupTime {
    /// Time with work of these queues, ns: what went by while any queue of the core had work is divided by what each says that its work cost.
    pub busy_ns: u64,
    /// Their polls that found nothing to do.
    pub empty_polls: u64,
    /// Their part of the time in which the core was awake and had no work, ns: that is divided by these polls.
    pub empty_ns: u64,
}

impl AddAssign for GroupTime {
    fn add_assign(&mut self, other: GroupTime) {
        self.busy_ns += other.busy_ns;
        self.empty_polls += other.empty_polls;
        self.empty_ns += other.empty_ns;
    }
}

/// The meter of one slot, and what of it has been added to its group.
#[derive(Debug)]
struct Entry {
    meter: Arc<SlotMeter>,
    busy_ns: u64,
    empty_polls: u64,
}

/// What one group has used, and its polls without work since the core's time without work was divided last.
#[derive(Debug, Default)]
struct Used {
    time: GroupTime,
    undivided: u64,
}

#[derive(Debug, Default)]
struct Table {
    entries: Vec<Entry>,
    groups: BTreeMap<GroupId, Used>,
    /// The core's time without work that has been divided, ns.
    divided_ns: u64,
}

impl Table {
    /// Adds what the slots have used to their groups, and forgets those that are gone.
    fn count(&mut self) {
        let groups = &mut self.groups;
        self.entries.retain_mut(|entry| {
            // Asked first: what it has used rises no more, and this sees all of it.
            let gone = Arc::get_mut(&mut entry.meter).is_some();
            let (busy_ns, empty_polls) = (entry.meter.busy_ns(), entry.meter.empty_polls());
            if (busy_ns, empty_polls) != (entry.busy_ns, entry.empty_polls) {
                let used = groups.entry(entry.meter.share().group).or_default();
                used.time.busy_ns += busy_ns - entry.busy_ns;
                used.time.empty_polls += empty_polls - entry.empty_polls;
                used.undivided += empty_polls - entry.empty_polls;
                (entry.busy_ns, entry.empty_polls) = (busy_ns, empty_polls);
            }
            !gone
        });
    }

    /// Divides the core's time without work, which is now `empty_ns` in all.
    fn divide(&mut self, empty_ns: u64) {
        let polls: u64 = self.groups.values().map(|used| used.undivided).sum();
        let new_ns = empty_ns.saturating_sub(self.divided_ns);
        if polls == 0 || new_ns == 0 {
            return;
        }
        for used in self.groups.values_mut() {
            let undivided = std::mem::take(&mut used.undivided);
            used.time.empty_ns += (u128::from(new_ns) * u128::from(undivided) / u128::from(polls)) as u64;
        }
        self.divided_ns = empty_ns;
    }
}

// CONTROL: senders of slots and readers of meters.
/// One for each core. The core tells nobody when a slot goes: its meter is then held by this table only.
#[derive(Debug, Default)]
pub(crate) struct MeterTable(Mutex<Table>);

impl MeterTable {
    /// The table, without the meters of slots that are gone.
    fn lock(&self) -> MutexGuard<'_, Table> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        table.count();
        table
    }

    /// Enters the meter of a slot that is about to be sent.
    pub(crate) fn enter(&self, meter: &Arc<SlotMeter>) {
        self.lock().entries.push(Entry { meter: meter.clone(), busy_ns: 0, empty_polls: 0 });
    }

    /// Those of the slots that the core has, or is about to have. One whose poller has parked a moment ago may be among them.
    pub(crate) fn all(&self) -> Vec<Arc<SlotMeter>> {
        self.lock().entries.iter().map(|entry| entry.meter.clone()).collect()
    }

    /// What each group has used. `empty_ns`: the core's time without work.
    pub(crate) fn group_times(&self, empty_ns: u64) -> BTreeMap<GroupId, GroupTime> {
        let mut table = self.lock();
        table.divide(empty_ns);
        table.groups.iter().map(|(group, used)| (*group, used.time)).collect()
    }

    /// Forgets what a group has used.
    pub(crate) fn forget_group(&self, group: GroupId) {
        self.lock().groups.remove(&group);
    }
}
