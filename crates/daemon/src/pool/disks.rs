//! Disks of the host over cores: what groups have in flight is read, and what each may have from each core follows ([`DiskShares`]).
//!
//! Queues whose backing is on a disk that is not known are told nothing: their groups are bounded on each core by itself.

use std::collections::{BTreeMap, BTreeSet};

use ioplane_api::report::InFlightReport;
use ioplane_device::{BlockDevice, DevicePart, GroupId};
use ioplane_scheduler::{DiskLane, DiskPart, DiskShares};

use super::host_disks::HostDisks;

/// How often a core with something in flight is told again, ns: what it was told is lost with the group's last queue there.
const AGAIN_NS: u64 = 1_000_000_000;

/// What each core was told, and what that goes by.
#[derive(Debug)]
pub struct DiskDivision {
    shares: DiskShares,
    hosts: HostDisks,
    /// By core, with the time.
    told: BTreeMap<(u32, GroupId, BlockDevice), (u64, u64)>,
}

impl DiskDivision {
    pub fn new(hosts: HostDisks) -> Self {
        DiskDivision { shares: DiskShares::default(), hosts, told: BTreeMap::new() }
    }

    /// Whether some group has a bound that it may reach.
    pub fn divides(&self) -> bool {
        self.told.values().any(|(in_flight, _)| *in_flight != u64::MAX)
    }

    /// How the lane stands.
    pub fn report(&self, lane: &DiskLane) -> InFlightReport {
        let told = self.told.get(&(lane.core, lane.group, lane.device)).map(|(bound, _)| *bound);
        InFlightReport {
            core: lane.core,
            host_disks: self.hosts.names(lane.device).into_iter().map(str::to_owned).collect(),
            bytes: if lane.active { lane.peak } else { 0 },
            bound_bytes: told.filter(|bound| *bound != u64::MAX),
        }
    }

    /// What cores are to be told. One entry in `lanes` for each group, core and device with queues.
    pub fn look(&mut self, lanes: &[DiskLane], now_ns: u64) -> Vec<(u32, DevicePart)> {
        self.hosts.follow(&lanes.iter().map(|lane| lane.device).collect(), now_ns);
        let hosts = &self.hosts;
        let parts = self.shares.look(lanes, |device| hosts.of(device), now_ns);
        let here: BTreeSet<_> = parts.iter().map(|part| (part.core, part.group, part.device)).collect();
        self.told.retain(|key, _| here.contains(key));
        let mut news = Vec::new();
        for (lane, part) in lanes.iter().zip(parts) {
            let DiskPart { group, core, device, in_flight } = part;
            let before = self.told.get(&(core, group, device)).copied();
            if is_news(lane.active, before, in_flight, hosts.of(device).is_empty(), now_ns) {
                self.told.insert((core, group, device), (in_flight, now_ns));
                news.push((core, DevicePart { group, device, in_flight }));
            }
        }
        news
    }
}

/// Whether a core is to hear of a bound. `before`: what it was told, and when.
fn is_news(active: bool, before: Option<(u64, u64)>, bound: u64, unknown: bool, now_ns: u64) -> bool {
    match before {
        // It goes by what competes on the core.
        None => active && !unknown,
        Some((before, _)) if !active => bound == u64::MAX && before != u64::MAX,
        Some((before, at)) => !near(before, bound) || now_ns.saturating_sub(at) >= AGAIN_NS,
    }
}

/// Whether they differ by no more than noise.
fn near(a: u64, b: u64) -> bool {
    a.abs_diff(b) <= a.max(b) / 16
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::fs::makedev;

    use super::*;

    const LOOK: u64 = 20_000_000;
    const MIB: u64 = 1 << 20;

    /// Two groups of weights 1 and 3 on two cores, on disks with these minor numbers; 8:0 is known and 8:9 is not.
    struct Two {
        division: DiskDivision,
        now_ns: u64,
        minors: [u32; 2],
        _tree: tempfile::TempDir,
    }

    impl Two {
        fn new(minors: [u32; 2]) -> Self {
            let tree = tempfile::tempdir().unwrap();
            fs::create_dir_all(tree.path().join("dev/block/8:0")).unwrap();
            let division = DiskDivision::new(HostDisks::new(tree.path().to_owned()));
            Two { division, now_ns: 0, minors, _tree: tree }
        }

        /// What is told at a look at which they have so much in flight.
        fn look(&mut self, peaks: [u64; 2]) -> Vec<(u32, u64)> {
            self.now_ns += LOOK;
            let lane = |at: usize| DiskLane {
                group: GroupId(at as u32 + 1),
                weight: [1, 3][at],
                core: at as u32,
                device: BlockDevice(makedev(8, self.minors[at])),
                active: peaks[at] > 0,
                peak: peaks[at],
                lacks: peaks[at] > 0,
            };
            let told = self.division.look(&[lane(0), lane(1)], self.now_ns);
            told.into_iter().map(|(core, part)| (core, part.in_flight)).collect()
        }
    }

    #[test]
    fn cores_are_told_what_changes_and_now_and_then_what_stays() {
        let mut two = Two::new([0, 0]);
        assert_eq!(two.look([0, 0]), []);
        assert_eq!(two.look([MIB, 0]), [(0, u64::MAX)]);
        assert!(!two.division.divides(), "nobody to divide with");
        assert_eq!(two.look([MIB, MIB]), [(0, MIB), (1, 3 * MIB)]);
        assert!(two.division.divides());
        let told: Vec<_> = (0..50).flat_map(|_| two.look([MIB, MIB])).collect();
        assert_eq!(told, [(0, MIB), (1, 3 * MIB)], "once more within a second");
        // The second falls asleep: it is not woken to hear of it, and the first has all.
        let told: Vec<_> = (0..20).flat_map(|_| two.look([MIB, 0])).collect();
        assert_eq!(told, [(0, 4 * MIB)]);
        let told: Vec<_> = (0..50).flat_map(|_| two.look([MIB, 0])).collect();
        assert!(told.contains(&(0, u64::MAX)) && told.contains(&(1, u64::MAX)), "{told:?}");
        assert!(!two.division.divides());
    }

    #[test]
    fn what_lies_on_an_unknown_disk_is_divided_with_nobody() {
        let mut two = Two::new([9, 9]);
        let told: Vec<_> = (0..100).flat_map(|_| two.look([MIB, MIB])).collect();
        assert_eq!(told, []);
        let mut two = Two::new([0, 9]);
        assert_eq!(two.look([MIB, MIB]), [(0, u64::MAX)]);
        assert!(!two.division.divides());
    }
}
