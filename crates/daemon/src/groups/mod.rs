//! The groups, by name: a weight and limits that the devices of one VM have together.
//!
//! A group is numbers. Who goes by them are its devices (`members`): each takes its [`Membership`] when it is opened, and anew when its group has
//! changed.

mod members;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_api::spec::{GroupSpec, ServedSpec, SpecFields};
use ioplane_device::Share;
use ioplane_virtio::{DeviceLimits, SharedLimits};

use super::lower::limit;
use super::state_file::{GroupRecord, StateFile};
use crate::config::Config;
use crate::refusal::Refusal;

/// What a device has of its group. By default it is in none: it shares what one group of weight 1 has with all others in none.
#[derive(Debug, Clone, Default)]
pub struct Membership {
    pub share: Share,
    /// Of disks, of what NICs send, of what they receive.
    pub limits: [SharedLimits; 3],
}

struct Slot {
    record: GroupRecord,
    share: Share,
    limits: [DeviceLimits; 3],
}

impl Slot {
    fn new(record: GroupRecord) -> Self {
        let share = Share::new_group(NonZeroU32::MIN);
        let mut slot = Slot { record, share, limits: Default::default() };
        slot.follow();
        slot
    }

    /// Is as its record says.
    fn follow(&mut self) {
        let spec = &self.record.now;
        self.share.weight = NonZeroU32::new(spec.weight).unwrap_or(NonZeroU32::MIN);
        self.limits.iter_mut().zip(spec.limits()).for_each(|(limits, spec)| limit(limits, &spec));
    }
}

/// All of them. No method waits for a device.
pub struct Groups {
    slots: Mutex<BTreeMap<String, Slot>>,
    state_file: Arc<StateFile>,
    /// One change at a time: what is read of a record is what is changed.
    pub changing: tokio::sync::Mutex<()>,
}

impl Groups {
    /// Those of the state file.
    pub fn new(state_file: Arc<StateFile>) -> Self {
        let records = state_file.entries().groups;
        let slots = records.into_iter().map(|(name, record)| (name, Slot::new(record))).collect();
        Groups { slots: Mutex::new(slots), state_file, changing: tokio::sync::Mutex::default() }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a device has of the group that it names.
    pub fn membership(&self, spec: &impl ServedSpec) -> Membership {
        let Some(group) = spec.group() else { return Membership::default() };
        match self.slots().get(group) {
            Some(slot) => {
                Membership { share: slot.share, limits: slot.limits.each_ref().map(DeviceLimits::own) }
            }
            None => {
                // It was taken away at the moment at which the device came.
                tracing::warn!(device = spec.name(), group, "there is no such group: the device is in none");
                Membership::default()
            }
        }
    }

    /// The share of a group; that of all devices in no group if there is none of that name.
    pub fn share(&self, group: Option<&str>) -> Share {
        let slots = self.slots();
        group.and_then(|group| slots.get(group)).map_or(Share::default(), |slot| slot.share)
    }

    /// Whether there is a group of that name, for whoever asks for a device in it.
    pub fn check(&self, group: &str) -> Result<(), Refusal> {
        self.record(group).map(drop).map_err(|refused| refused.at("group"))
    }

    pub fn record(&self, name: &str) -> Result<GroupRecord, Refusal> {
        self.slots().get(name).map(|slot| slot.record.clone()).ok_or_else(|| {
            Refusal::missing(
                format!("there is no group {name}"),
                format!("see `ioplane group list`; `ioplane group add {name}` makes it"),
            )
        })
    }

    pub fn is_empty(&self) -> bool {
        self.slots().is_empty()
    }

    pub fn records(&self) -> BTreeMap<String, GroupRecord> {
        self.slots().iter().map(|(name, slot)| (name.clone(), slot.record.clone())).collect()
    }

    /// Makes one as the record says, whether or not it is there, and writes that down first; says whether it is another now. Its devices
    /// do not hear of it from here.
    pub fn set(&self, record: GroupRecord) -> Result<bool, Refusal> {
        let name = record.now.name.clone();
        let mut slots = self.slots();
        self.state_file.change(|entries| {
            entries.groups.insert(name.clone(), record.clone());
        })?;
        match slots.get_mut(&name) {
            Some(slot) => {
                let differs = slot.record.now != record.now;
                slot.record = record;
                slot.follow();
                Ok(differs)
            }
            None => {
                slots.insert(name, Slot::new(record));
                Ok(true)
            }
        }
    }

    /// Takes one away. The caller has seen that nobody is in it.
    fn forget(&self, name: &str) -> Result<(), Refusal> {
        let mut slots = self.slots();
        self.state_file.change(|entries| {
            entries.groups.remove(name);
        })?;
        slots.remove(name);
        Ok(())
    }

    /// What the configuration wants of each.
    pub fn merged(&self, config: &Config) -> Vec<GroupRecord> {
        let slots = self.slots();
        let merge = |spec: &GroupSpec| merged(spec, slots.get(&spec.name).map(|slot| &slot.record));
        config.groups.iter().map(|(spec, _)| merge(spec)).collect()
    }

    /// Those that the configuration had and has no more.
    pub fn gone(&self, config: &Config) -> Vec<String> {
        let wanted = |name: &str| config.groups.iter().any(|(spec, _)| spec.name == name);
        let slots = self.slots();
        let gone = slots.iter().filter(|(name, slot)| slot.record.configured.is_some() && !wanted(name));
        gone.map(|(name, _)| name.clone()).collect()
    }
}

/// The record of a group that the configuration names, given what is known of it.
fn merged(spec: &GroupSpec, known: Option<&GroupRecord>) -> GroupRecord {
    let now = match known {
        Some(GroupRecord { configured: Some(base), now }) => GroupSpec::three_way(base, spec, now),
        _ => spec.clone(),
    };
    GroupRecord { configured: Some(spec.clone()), now }
}
