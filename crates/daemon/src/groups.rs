//! The groups, by name: a weight and limits that the devices of one VM have together.
//!
//! A group is numbers. Who goes by them are its devices: each takes its [`Membership`] when it is opened, and anew when its group has changed.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_api::refusal::Code;
use ioplane_api::report::{EventWord, GroupReport};
use ioplane_api::spec::{GROUP_WEIGHT, GroupChangeForm, GroupSpec, ServedSpec, SpecFields};
use ioplane_device::Share;
use ioplane_virtio::{DeviceLimits, SharedLimits};

use super::Daemon;
use super::lower::limit;
use super::registry::Registered;
use super::state_file::{GroupRecord, Record, StateFile};
use crate::config::Config;
use crate::refusal::Refusal;

/// What a device has of its group.
#[derive(Debug, Clone)]
pub struct Membership {
    pub share: Share,
    /// Of disks, of what NICs send, of what they receive.
    pub limits: [SharedLimits; 3],
}

impl Membership {
    /// A group by itself.
    pub fn alone() -> Self {
        let weight = NonZeroU32::new(GROUP_WEIGHT).unwrap_or(NonZeroU32::MIN);
        Membership { share: Share::new_group(weight), limits: Default::default() }
    }
}

struct Slot {
    record: GroupRecord,
    share: Share,
    limits: [DeviceLimits; 3],
}

impl Slot {
    fn new(record: GroupRecord) -> Self {
        let share = Membership::alone().share;
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
}

impl Groups {
    /// Those of the state file.
    pub fn new(state_file: Arc<StateFile>) -> Self {
        let records = state_file.entries().groups;
        let slots = records.into_iter().map(|(name, record)| (name, Slot::new(record))).collect();
        Groups { slots: Mutex::new(slots), state_file }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a device has of the group that it names.
    pub fn membership(&self, spec: &impl ServedSpec) -> Membership {
        let Some(group) = spec.group() else { return Membership::alone() };
        match self.slots().get(group) {
            Some(slot) => {
                Membership { share: slot.share, limits: slot.limits.each_ref().map(DeviceLimits::own) }
            }
            None => {
                // It was taken away at the moment at which the device came.
                tracing::warn!(
                    device = spec.name(),
                    group,
                    "there is no such group: the device is one by itself"
                );
                Membership::alone()
            }
        }
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

    pub fn records(&self) -> BTreeMap<String, GroupRecord> {
        self.slots().iter().map(|(name, slot)| (name.clone(), slot.record.clone())).collect()
    }

    /// Makes one as the record says, whether or not it is there, and writes that down first; says whether it is another now. Its devices
    /// hear of it by [`Daemon::regroup`].
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

fn origin(record: &GroupRecord) -> &'static str {
    if record.configured.is_some() { "config" } else { "added" }
}

/// Those of one kind that are in the group.
fn members<S: ServedSpec>(records: BTreeMap<String, Record<S>>, group: &str) -> Vec<String> {
    let inside = records.into_iter().filter(|(_, record)| record.now.group() == Some(group));
    inside.map(|(name, _)| name).collect()
}

/// The weight and the limits, for people.
pub fn words(spec: &GroupSpec) -> String {
    let what = [("disks", "requests"), ("sent", "frames"), ("received", "frames")];
    let limits = spec.limits().into_iter().zip(what);
    let limited = limits.filter_map(|(limits, (of, unit))| Some(format!("{of}: {}", limits.words(unit)?)));
    [format!("weight {}", spec.weight)].into_iter().chain(limited).collect::<Vec<_>>().join(", ")
}

impl Daemon {
    /// The configured groups as they were changed at run time. One that is gone from the configuration stays for what was added to it at
    /// run time.
    pub(super) fn start_groups(&self) -> Result<(), Refusal> {
        let (config, entries) = (self.config(), self.state_file.entries());
        for record in self.groups.merged(&config) {
            self.groups.set(record)?;
        }
        for name in self.groups.gone(&config) {
            fn added<S: ServedSpec>(records: &BTreeMap<String, Record<S>>, group: &str) -> bool {
                records.values().any(|one| one.configured.is_none() && one.now.group() == Some(group))
            }
            if added(&entries.disks, &name) || added(&entries.nics, &name) {
                tracing::warn!(
                    group = name,
                    "gone from the configuration, and devices that were added are in it"
                );
                let record = GroupRecord { configured: None, ..self.groups.record(&name)? };
                self.groups.set(record)?;
            } else {
                tracing::warn!(group = name, "gone from the configuration: no longer there");
                self.groups.forget(&name)?;
            }
        }
        Ok(())
    }

    /// Makes one as somebody asks for it, and says whether it is new: one that is so already stays as it is.
    pub(super) fn put_group(&self, wanted: GroupSpec) -> Result<bool, Refusal> {
        let name = wanted.name.clone();
        if let Ok(record) = self.groups.record(&name) {
            let differing = wanted.differing(&record.now);
            let Some(first) = differing.first() else { return Ok(false) };
            let error = format!("group {name} is there already, with another {}", differing.join(", "));
            let remedy = format!("change it by `ioplane group set {name}`, or give another name");
            return Err(Refusal::new(Code::Exists, error, remedy).at(first));
        }
        let text = words(&wanted);
        self.groups.set(GroupRecord { configured: None, now: wanted })?;
        tracing::info!(group = name, text, "group added");
        self.tell(EventWord::Served, "group", &name, &text);
        Ok(true)
    }

    /// Changes its weight and its limits: when this returns, all of its devices that answer go by them.
    pub(super) async fn change_group(&self, name: &str, change: &GroupChangeForm) -> Result<(), Refusal> {
        let record = self.groups.record(name)?;
        let now = record.now.changed(change).map_err(|flaws| Refusal::flaws(&flaws))?;
        let text = words(&now);
        self.groups.set(GroupRecord { now, ..record })?;
        tracing::info!(group = name, text, "group changed");
        self.tell(EventWord::Changed, "group", name, &text);
        self.regroup(name).await
    }

    /// Has every device of the group go by it as it is now. Goes on where one does not answer; the first error.
    pub(super) async fn regroup(&self, group: &str) -> Result<(), Refusal> {
        async fn each<K: Registered>(daemon: &Daemon, group: &str) -> Result<(), Refusal> {
            let registry = K::registry(daemon);
            let mut outcome = Ok(());
            for name in members(registry.records(), group) {
                // One that is not served yet takes its membership when it is.
                let Ok(one) = registry.served(&name) else { continue };
                outcome = outcome.and(one.rejoin().await);
            }
            outcome
        }
        let disks = each::<super::disk::Disk>(self, group).await;
        disks.and(each::<super::nic::Nic>(self, group).await)
    }

    /// Takes one away, unless a device is in it or the configuration names it.
    pub(super) fn remove_group(&self, name: &str) -> Result<(), Refusal> {
        if self.groups.record(name)?.configured.is_some() {
            let remedy = "take it out of the configuration, then `ioplane reload`";
            return Err(Refusal::conflict(format!("group {name} is in the configuration"), remedy));
        }
        self.end_group(name)
    }

    /// The same of one that the configuration does not name any more.
    pub(super) fn end_group(&self, name: &str) -> Result<(), Refusal> {
        let disks = members(self.disks.records(), name).into_iter().map(|disk| ("disk", disk));
        let nics = members(self.nics.records(), name).into_iter().map(|nic| ("nic", nic));
        if let Some((kind, device)) = disks.chain(nics).next() {
            let remedy = format!("`ioplane {kind} set {device} --group ''` first, or take the {kind} away");
            let refused = Refusal::conflict(format!("{kind} {device} is in group {name}"), remedy);
            return Err(refused.coded(Code::InUse));
        }
        self.groups.forget(name)?;
        tracing::info!(group = name, "removed");
        self.tell(EventWord::Removed, "group", name, "removed");
        Ok(())
    }

    pub(super) fn group_report(&self, name: &str) -> Result<GroupReport, Refusal> {
        let record = self.groups.record(name)?;
        let (disks, nics) = (members(self.disks.records(), name), members(self.nics.records(), name));
        Ok(GroupReport::new(&record.now, origin(&record), disks, nics))
    }

    pub(super) fn group_reports(&self) -> Vec<GroupReport> {
        let names = self.groups.records().into_keys();
        names.filter_map(|name| self.group_report(&name).ok()).collect()
    }
}
