//! What users say about cores and devices, as the pool's policy needs it: read again only when the state file has changed.

use std::collections::BTreeMap;

use ioplane_api::spec::{CoreSpec, ServedSpec};
use ioplane_device::{GroupId, Share, SlotMeter};

use crate::groups::Groups;
use crate::state_file::{Record, StateFile};

/// By what a queue's device is found and moved.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceRef {
    /// The disk of this name.
    Disk(String),
    /// The NIC of this name.
    Nic(String),
    /// The uplink of the switch of this name.
    Uplink(String),
}

impl DeviceRef {
    /// What people call the device: an uplink is called as its switch.
    pub fn name(&self) -> &str {
        let (DeviceRef::Disk(name) | DeviceRef::Nic(name) | DeviceRef::Uplink(name)) = self;
        name
    }
}

/// What users say about one device.
#[derive(Debug)]
pub struct DeviceFacts {
    pub device: DeviceRef,
    pub group: GroupId,
    core: Option<u32>,
    moved: BTreeMap<u16, u32>,
}

impl DeviceFacts {
    fn of<S: ServedSpec>(record: &Record<S>, groups: &Groups, device: fn(String) -> DeviceRef) -> Self {
        DeviceFacts {
            device: device(record.now.name().to_owned()),
            group: groups.share(record.now.group()).group,
            core: record.now.core(),
            moved: record.moved.clone(),
        }
    }

    /// The core that a user has pinned the queue to.
    pub fn pin(&self, queue: u16) -> Option<u32> {
        self.moved.get(&queue).copied().or(self.core)
    }
}

/// What users say about everything, and of which version of the state file that is.
#[derive(Debug, Default)]
pub struct Facts {
    version: Option<u64>,
    cores: BTreeMap<u32, (CoreSpec, Option<GroupId>)>,
    /// By the kind and the name that a device gives itself.
    devices: BTreeMap<&'static str, BTreeMap<String, DeviceFacts>>,
}

impl Facts {
    /// Reads the state file again, if it has changed.
    pub fn follow(&mut self, state_file: &StateFile, groups: &Groups) {
        let version = state_file.version();
        if self.version == Some(version) {
            return;
        }
        let entries = state_file.entries();
        let core = |core: CoreSpec| {
            let group = core.reserve.as_deref().map(|group| groups.share(Some(group)).group);
            // A group that has gone reserves nothing.
            (core.id, (core, group.filter(|group| *group != Share::default().group)))
        };
        self.cores = entries.cores.into_values().filter_map(|record| record.now).map(core).collect();
        let disks = entries.disks.iter();
        let disks =
            disks.map(|(name, record)| (name.clone(), DeviceFacts::of(record, groups, DeviceRef::Disk)));
        let nics = entries.nics.iter();
        let nics = nics.map(|(name, record)| (name.clone(), DeviceFacts::of(record, groups, DeviceRef::Nic)));
        let uplinks = entries.switches.iter().filter_map(|(name, record)| {
            let facts = DeviceFacts {
                device: DeviceRef::Uplink(name.clone()),
                group: Share::default().group,
                core: record.now.core,
                moved: BTreeMap::new(),
            };
            Some((record.now.uplink.clone()?, facts))
        });
        self.devices = BTreeMap::from([
            ("virtio-blk", disks.collect()),
            ("virtio-net", nics.collect()),
            ("tap", uplinks.collect()),
        ]);
        self.version = Some(version);
    }

    /// What is said about a core, and the group that it is reserved for.
    pub fn core(&self, id: u32) -> Option<&(CoreSpec, Option<GroupId>)> {
        self.cores.get(&id)
    }

    /// What is said about the device of a queue. A PCI function's queues cannot be moved, and are none of the pool's.
    pub fn device(&self, meter: &SlotMeter) -> Option<&DeviceFacts> {
        self.devices.get(meter.kind())?.get(meter.device())
    }

    /// Whether there is something to do without a pool: users want cores to be empty, or a pool that is gone has left some behind.
    pub fn need_looks(&self) -> bool {
        self.cores.values().any(|(core, reserved)| core.drain || core.elastic || reserved.is_some())
    }
}
