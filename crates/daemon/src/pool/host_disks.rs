//! On which disks of the host a block device lies: by sysfs, through partitions and through what device-mapper and RAID put together.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use ioplane_device::BlockDevice;
use ioplane_scheduler::DiskNumber;
use rustix::fs::{major, minor};

/// How long what was found is believed, ns: volumes can be put elsewhere while they are used.
const BELIEVED_NS: u64 = 10_000_000_000;
/// Devices that lie on one another, at most.
const DEPTH: u32 = 16;

/// The tree that is read.
pub fn sysfs() -> PathBuf {
    #[cfg(feature = "kill-points")]
    if let Some(tree) = std::env::var_os("IOPLANE_TEST_SYSFS") {
        return tree.into();
    }
    PathBuf::from("/sys")
}

/// What is known of the host's disks. Numbers are never given twice.
#[derive(Debug)]
pub struct HostDisks {
    sysfs: PathBuf,
    names: Vec<String>,
    /// With the time at which it was read.
    found: BTreeMap<BlockDevice, (Vec<DiskNumber>, u64)>,
}

impl HostDisks {
    pub fn new(sysfs: PathBuf) -> Self {
        HostDisks { sysfs, names: Vec::new(), found: BTreeMap::new() }
    }

    /// Reads on which disks these devices lie, where that is not known or was read long ago; forgets all others.
    pub fn follow(&mut self, devices: &BTreeSet<BlockDevice>, now_ns: u64) {
        self.found.retain(|device, _| devices.contains(device));
        for device in devices {
            let fresh = self
                .found
                .get(device)
                .is_some_and(|(_, read_ns)| now_ns.saturating_sub(*read_ns) < BELIEVED_NS);
            if fresh {
                continue;
            }
            let mut names = BTreeSet::new();
            let link = format!("dev/block/{}:{}", major(device.0), minor(device.0));
            if self.sysfs.join(&link).canonicalize().is_ok_and(|path| !find(&path, DEPTH, &mut names)) {
                // On something that nobody knows: nothing is to be said about the rest either.
                names.clear();
            }
            let numbers: Vec<DiskNumber> = names.into_iter().map(|name| self.number(name)).collect();
            let before = self.found.insert(*device, (numbers, now_ns));
            if before.is_none_or(|(before, _)| before != self.found[device].0) {
                self.say(*device);
            }
        }
    }

    fn say(&self, device: BlockDevice) {
        let number = format!("{}:{}", major(device.0), minor(device.0));
        match self.names(device) {
            names if names.is_empty() => tracing::info!(
                device = number,
                "the host does not say on which of its disks this device lies: what is in flight there is not divided among groups over cores"
            ),
            names => tracing::debug!(device = number, disks = names.join(", "), "on these disks of the host"),
        }
    }

    fn number(&mut self, name: String) -> DiskNumber {
        let at = self.names.iter().position(|known| *known == name).unwrap_or_else(|| {
            self.names.push(name);
            self.names.len() - 1
        });
        DiskNumber(at as u32)
    }

    /// The disks that the device lies on; none if that is not known.
    pub fn of(&self, device: BlockDevice) -> &[DiskNumber] {
        self.found.get(&device).map_or(&[], |(disks, _)| disks)
    }

    /// What the host calls them.
    pub fn names(&self, device: BlockDevice) -> Vec<&str> {
        self.of(device).iter().map(|disk| self.names[disk.0 as usize].as_str()).collect()
    }
}

/// Adds the disks below the device that this directory is; false if it cannot be told.
fn find(device: &Path, depth: u32, names: &mut BTreeSet<String>) -> bool {
    if depth == 0 {
        return false;
    }
    if device.join("partition").exists() {
        return device.parent().is_some_and(|disk| find(disk, depth - 1, names));
    }
    let slaves: Vec<PathBuf> = match fs::read_dir(device.join("slaves")) {
        Ok(slaves) => slaves.flatten().map(|slave| slave.path()).collect(),
        // A disk has none.
        Err(_) => Vec::new(),
    };
    if slaves.is_empty() {
        let Some(name) = device.file_name().and_then(|name| name.to_str()) else { return false };
        names.insert(name.to_owned());
        return true;
    }
    slaves.iter().all(|slave| slave.canonicalize().is_ok_and(|slave| find(&slave, depth - 1, names)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::makedev;

    use super::*;

    /// A tree as the kernel has it: devices in a directory of their own, links to them by number and from one to another.
    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new() -> Self {
            let tree = Tree(tempfile::tempdir().unwrap());
            fs::create_dir_all(tree.0.path().join("dev/block")).unwrap();
            tree
        }

        fn add(&self, path: &str, minor: u32, slaves: &[&str]) {
            let root = self.0.path();
            let device = root.join("devices").join(path);
            fs::create_dir_all(device.join("slaves")).unwrap();
            symlink(&device, root.join(format!("dev/block/8:{minor}"))).unwrap();
            for slave in slaves {
                let name = Path::new(slave).file_name().unwrap();
                symlink(root.join("devices").join(slave), device.join("slaves").join(name)).unwrap();
            }
        }

        fn partition(&self, path: &str, minor: u32) {
            self.add(path, minor, &[]);
            fs::write(self.0.path().join("devices").join(path).join("partition"), "1\n").unwrap();
        }
    }

    fn device(minor: u32) -> BlockDevice {
        BlockDevice(makedev(8, minor))
    }

    fn found(disks: &mut HostDisks, minor: u32, now_ns: u64) -> Vec<String> {
        disks.follow(&BTreeSet::from([device(minor)]), now_ns);
        disks.names(device(minor)).into_iter().map(str::to_owned).collect()
    }

    #[test]
    fn a_device_is_followed_to_its_disks() {
        let tree = Tree::new();
        tree.add("pci/sda", 0, &[]);
        tree.partition("pci/sda/sda1", 1);
        tree.add("pci/sdb", 16, &[]);
        // A volume on a partition and a whole disk, an encrypted volume on that.
        tree.add("virtual/dm-0", 100, &["pci/sda/sda1", "pci/sdb"]);
        tree.add("virtual/dm-1", 101, &["virtual/dm-0"]);
        let mut disks = HostDisks::new(tree.0.path().to_owned());
        for (minor, names) in [
            (0, vec!["sda"]),
            (1, vec!["sda"]),
            (16, vec!["sdb"]),
            (100, vec!["sda", "sdb"]),
            (101, vec!["sda", "sdb"]),
        ] {
            assert_eq!(found(&mut disks, minor, 0), names, "8:{minor}");
        }
        // Whatever was asked for meanwhile, a disk keeps its number.
        disks.follow(&BTreeSet::from([device(1), device(16)]), 0);
        let [first, second] = [1, 16].map(|minor| disks.of(device(minor)).to_vec());
        assert_ne!(first, second);
        disks.follow(&BTreeSet::from([device(0)]), 0);
        assert_eq!(disks.of(device(0)), first);
    }

    #[test]
    fn what_cannot_be_told_is_on_no_disk() {
        let tree = Tree::new();
        // A file system without a device, a volume of which one half is gone, and two that lie on each other.
        tree.add("pci/sda", 0, &[]);
        tree.add("virtual/dm-0", 100, &["pci/sda", "pci/gone"]);
        tree.add("virtual/dm-1", 101, &["virtual/dm-2"]);
        tree.add("virtual/dm-2", 102, &["virtual/dm-1"]);
        let mut disks = HostDisks::new(tree.0.path().to_owned());
        for minor in [99, 100, 101] {
            assert_eq!(found(&mut disks, minor, 0), Vec::<String>::new(), "8:{minor}");
        }
        let mut none = HostDisks::new(tree.0.path().join("no-such-tree"));
        assert_eq!(found(&mut none, 0, 0), Vec::<String>::new());
    }

    #[test]
    fn a_volume_that_moves_is_found_where_it_is() {
        let tree = Tree::new();
        tree.add("pci/sda", 0, &[]);
        tree.add("pci/sdb", 16, &[]);
        tree.add("virtual/dm-0", 100, &["pci/sda"]);
        let mut disks = HostDisks::new(tree.0.path().to_owned());
        assert_eq!(found(&mut disks, 100, 0), ["sda"]);
        let slaves = tree.0.path().join("devices/virtual/dm-0/slaves");
        fs::remove_file(slaves.join("sda")).unwrap();
        symlink(tree.0.path().join("devices/pci/sdb"), slaves.join("sdb")).unwrap();
        assert_eq!(found(&mut disks, 100, BELIEVED_NS - 1), ["sda"], "read at every look");
        assert_eq!(found(&mut disks, 100, BELIEVED_NS), ["sdb"]);
    }
}
