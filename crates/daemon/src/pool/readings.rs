//! What cores and queues use, from one look to the next.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use ioplane_cores::Pool;
use ioplane_device::{BlockDevice, GroupId, PollerId, SlotMeter};
use ioplane_scheduler::{CoreLoad, CoreUse, DiskLane, PoolReadings, QueueKey, QueueLoad, QueueLook};

use super::divide::GroupUse;
use super::facts::{DeviceRef, Facts};
use super::nodes::GuestNodes;
use crate::choices::keep_last;

/// Devices that are gone and whose names are kept for the log.
const OLD_NAMES: usize = 512;

/// The numbers by which the policy knows devices.
#[derive(Debug, Default)]
pub struct DeviceNumbers {
    numbers: BTreeMap<DeviceRef, u32>,
    devices: BTreeMap<u32, DeviceRef>,
    next: u32,
}

impl DeviceNumbers {
    fn number(&mut self, device: &DeviceRef) -> u32 {
        if let Some(number) = self.numbers.get(device) {
            return *number;
        }
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.numbers.insert(device.clone(), number);
        self.devices.insert(number, device.clone());
        number
    }

    /// The device with this number, unless it is long gone.
    pub fn device(&self, number: u32) -> Option<&DeviceRef> {
        self.devices.get(&number)
    }

    /// Forgets the oldest of the devices that have no queue on a core, if there are many.
    fn forget(&mut self, used: &BTreeSet<u32>) {
        let unused: Vec<u32> = self.devices.keys().filter(|number| !used.contains(number)).copied().collect();
        for number in unused.iter().take(unused.len().saturating_sub(OLD_NAMES)) {
            if let Some(device) = self.devices.remove(number) {
                self.numbers.remove(&device);
            }
        }
    }
}

/// What was read last.
#[derive(Debug)]
pub struct Meters {
    looked: Instant,
    used_ns: BTreeMap<PollerId, u64>,
    /// What each group did on each core before the last look, by core and group, and in how long that was.
    pub groups: BTreeMap<(u32, GroupId), GroupUse>,
    pub period_ns: u64,
    /// What each group has had in flight from each core on each block device.
    pub lanes: BTreeMap<(GroupId, u32, BlockDevice), DiskLane>,
    pub numbers: DeviceNumbers,
}

/// What the daemon itself knows of cores and queues.
#[derive(Debug, Default)]
pub struct Underway {
    /// Cores that end when their queues have left.
    pub ending: BTreeSet<u32>,
    /// Queues that are to be moved, or are being moved.
    pub moving: BTreeSet<QueueKey>,
    /// Queues whose move has failed since the last look.
    pub not_quiet: Vec<QueueKey>,
    /// On which NUMA nodes the memory of guests is.
    pub nodes: GuestNodes,
}

impl Meters {
    pub fn new() -> Self {
        Meters {
            looked: Instant::now(),
            used_ns: BTreeMap::new(),
            groups: BTreeMap::new(),
            period_ns: 1,
            lanes: BTreeMap::new(),
            numbers: DeviceNumbers::default(),
        }
    }

    /// What each core has chosen for its queues. Locks each core's table of queues for a moment.
    pub fn choices(&mut self, pool: &Pool, facts: &Facts) -> Vec<QueueLook> {
        let mut queues: BTreeMap<QueueKey, (PollerId, QueueLook)> = BTreeMap::new();
        for core in pool.cores() {
            for meter in core.meters() {
                let Some(device) = facts.device(&meter) else { continue };
                let queue = QueueKey { device: self.numbers.number(&device.device), queue: meter.queue() };
                let poller = meter.poller().number();
                let (Some(choices), now_ns) = (meter.choices().read(), core.age_ns()) else { continue };
                let look = QueueLook { queue, poller, core: core.id().0, now_ns, choices };
                keep_last(&mut queues, queue, meter.poller(), look);
            }
        }
        self.numbers.forget(&queues.keys().map(|queue| queue.device).collect());
        queues.into_values().map(|(_, look)| look).collect()
    }

    /// Adds what a queue says to the lane that it is in. `advanced`: its poller has had work since the last look.
    fn enter_lane(&mut self, core: u32, meter: &SlotMeter, advanced: bool) {
        let Some(device) = meter.block_device() else { return };
        let (share, used) = (meter.share(), meter.backing_use());
        let lane = self.lanes.entry((share.group, core, device)).or_insert(DiskLane {
            group: share.group,
            weight: share.weight.get(),
            core,
            device,
            active: false,
            peak: 0,
            lacks: false,
        });
        // What a queue said that rests since long is old, but for what it has in flight itself.
        if meter.in_flight() > 0 || (advanced && used.peak > 0) {
            lane.active = true;
            lane.peak = lane.peak.max(used.peak);
            lane.lacks |= used.lacks;
        }
    }

    /// How everything is at `now`, and whether any queue has had work since the last look. Locks each core's table of queues for a moment.
    pub fn read(
        &mut self,
        pool: &Pool,
        facts: &Facts,
        underway: &mut Underway,
        (now, now_ns): (Instant, u64),
    ) -> (PoolReadings, bool) {
        let period_ns = now.saturating_duration_since(self.looked).as_nanos().max(1) as u64;
        (self.looked, self.period_ns) = (now, period_ns);
        self.groups.clear();
        self.lanes.clear();
        let mut used_ns = BTreeMap::new();
        let mut queues: BTreeMap<QueueKey, (PollerId, QueueLoad)> = BTreeMap::new();
        let (mut cores, mut worked) = (Vec::new(), false);
        for core in pool.cores() {
            let (id, reading) = (core.id().0, core.read());
            let Some((spec, reserved)) = facts.core(id) else { continue };
            let used_for = match reserved {
                _ if underway.ending.contains(&id) => CoreUse::Ending,
                _ if spec.drain => CoreUse::Draining,
                Some(group) => CoreUse::Reserved(*group),
                None => CoreUse::Open,
            };
            cores.push(CoreLoad {
                core: id,
                cpu: spec.cpu,
                used_for,
                kept: !spec.elastic,
                busy_permille: reading.busy_permille,
            });
            for meter in core.meters() {
                let used = meter.busy_ns();
                let before = self.used_ns.get(&meter.poller()).copied().unwrap_or(0);
                worked |= used > before;
                used_ns.insert(meter.poller(), used);
                let share = meter.share();
                let group = self.groups.entry((id, share.group)).or_insert(GroupUse {
                    core: id,
                    share,
                    used_ns: 0,
                    wants_more: false,
                });
                group.used_ns += used - before.min(used);
                group.wants_more |= used > before && meter.wants_more();
                self.enter_lane(id, &meter, used > before);
                let Some(device) = facts.device(&meter) else { continue };
                let key = QueueKey { device: self.numbers.number(&device.device), queue: meter.queue() };
                let load = QueueLoad {
                    queue: key,
                    group: device.group,
                    core: id,
                    load_permille: ((used - before.min(used)).saturating_mul(1000) / period_ns).min(1000)
                        as u32,
                    pinned: device.pin(meter.queue()),
                    node: underway.nodes.of(&device.device),
                    moving: underway.moving.contains(&key),
                };
                keep_last(&mut queues, key, meter.poller(), load);
            }
        }
        self.used_ns = used_ns;
        self.numbers.forget(&queues.keys().map(|queue| queue.device).collect());
        let queues = queues.into_values().map(|(_, load)| load).collect();
        let not_quiet = std::mem::take(&mut underway.not_quiet);
        (PoolReadings { now_ns, cores, queues, not_quiet }, worked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_and_those_of_devices_that_are_long_gone_are_forgotten() {
        let mut numbers = DeviceNumbers::default();
        let disk = |name: u32| DeviceRef::Disk(name.to_string());
        let first = numbers.number(&disk(0));
        for name in 1..2000 {
            let number = numbers.number(&disk(name));
            assert_eq!(number, numbers.number(&disk(name)));
            numbers.forget(&BTreeSet::from([first]));
        }
        assert_eq!(numbers.device(first), Some(&disk(0)));
        assert_eq!((numbers.devices.len(), numbers.numbers.len()), (OLD_NAMES + 1, OLD_NAMES + 1));
        assert_ne!(numbers.number(&DeviceRef::Nic("0".into())), first, "a NIC is not the disk of its name");
    }
}
