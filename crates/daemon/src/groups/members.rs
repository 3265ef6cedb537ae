//! The groups and the devices that are in them: what is asked of both together.

use std::collections::BTreeMap;

use ioplane_api::refusal::Code;
use ioplane_api::report::{EventWord, GroupCoreReport, GroupReport, GroupUseReport};
use ioplane_api::spec::{GroupChangeForm, GroupSpec, ServedSpec, SpecFields};
use ioplane_cores::{GroupTime, GroupTimes};

use crate::Daemon;
use crate::disk::Disk;
use crate::nic::Nic;
use crate::refusal::Refusal;
use crate::registry::Registered;
use crate::state_file::{GroupRecord, Record};

fn origin(record: &GroupRecord) -> &'static str {
    if record.configured.is_some() { "config" } else { "added" }
}

/// Those of one kind that are in the group.
fn members<S: ServedSpec>(records: BTreeMap<String, Record<S>>, group: &str) -> Vec<String> {
    let inside = records.into_iter().filter(|(_, record)| record.now.group() == Some(group));
    inside.map(|(name, _)| name).collect()
}

/// The weight and the limits, for people.
fn words(spec: &GroupSpec) -> String {
    let what = [("disks", "requests"), ("sent", "frames"), ("received", "frames")];
    let limits = spec.limits().into_iter().zip(what);
    let limited = limits.filter_map(|(limits, (of, unit))| Some(format!("{of}: {}", limits.words(unit)?)));
    [format!("weight {}", spec.weight)].into_iter().chain(limited).collect::<Vec<_>>().join(", ")
}

/// What a group has used of one core.
fn used_of((core, used): (&u32, &GroupTime)) -> GroupCoreReport {
    let GroupTime { busy_ns, empty_ns, empty_polls } = *used;
    let used = GroupUseReport { busy_us: busy_ns / 1000, empty_us: empty_ns / 1000, empty_polls };
    GroupCoreReport { core: *core, used }
}

impl Daemon {
    /// The configured groups as they were changed at run time. One that is gone from the configuration stays for what was added to it at
    /// run time.
    pub(crate) fn start_groups(&self) -> Result<(), Refusal> {
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
    pub(crate) async fn put_group(&self, wanted: GroupSpec) -> Result<bool, Refusal> {
        let _changing = self.groups.changing.lock().await;
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
        self.pool.look_soon();
        tracing::info!(group = name, text, "group added");
        self.tell(EventWord::Served, "group", &name, &text);
        Ok(true)
    }

    /// Changes its weight and its limits: when this returns, all of its devices that answer go by them.
    pub(crate) async fn change_group(&self, name: &str, change: &GroupChangeForm) -> Result<(), Refusal> {
        let _changing = self.groups.changing.lock().await;
        let record = self.groups.record(name)?;
        let now = record.now.changed(change).map_err(|flaws| Refusal::flaws(&flaws))?;
        let text = words(&now);
        self.groups.set(GroupRecord { now, ..record })?;
        tracing::info!(group = name, text, "group changed");
        self.tell(EventWord::Changed, "group", name, &text);
        self.regroup(name).await
    }

    /// Has every device of the group go by it as it is now. Goes on where one does not answer; the first error.
    pub(crate) async fn regroup(&self, group: &str) -> Result<(), Refusal> {
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
        let disks = each::<Disk>(self, group).await;
        disks.and(each::<Nic>(self, group).await)
    }

    /// Takes one away, unless a device is in it or the configuration names it.
    pub(crate) async fn remove_group(&self, name: &str) -> Result<(), Refusal> {
        let _changing = self.groups.changing.lock().await;
        if self.groups.record(name)?.configured.is_some() {
            let remedy = "take it out of the configuration, then `ioplane reload`";
            return Err(Refusal::conflict(format!("group {name} is in the configuration"), remedy));
        }
        self.end_group(name)
    }

    /// The same of one that the configuration does not name any more; the caller sees to it that nobody changes it meanwhile.
    pub(crate) fn end_group(&self, name: &str) -> Result<(), Refusal> {
        let disks = members(self.disks.records(), name).into_iter().map(|disk| ("disk", disk));
        let nics = members(self.nics.records(), name).into_iter().map(|nic| ("nic", nic));
        if let Some((kind, device)) = disks.chain(nics).next() {
            let remedy = format!("`ioplane {kind} set {device} --group ''` first, or take the {kind} away");
            let refused = Refusal::conflict(format!("{kind} {device} is in group {name}"), remedy);
            return Err(refused.coded(Code::InUse));
        }
        if let Some(core) = self.cores.all().into_iter().find(|core| core.reserve.as_deref() == Some(name)) {
            let (error, remedy) =
                (format!("I/O core {} is reserved for group {name}", core.id), "`ioplane core open");
            let refused = Refusal::conflict(error, format!("{remedy} {}` first", core.id));
            return Err(refused.coded(Code::InUse));
        }
        let group = self.groups.share(Some(name)).group;
        self.groups.forget(name)?;
        self.cores.pool().forget_group(group);
        tracing::info!(group = name, "removed");
        self.tell(EventWord::Removed, "group", name, "removed");
        Ok(())
    }

    pub(crate) fn group_report(&self, name: &str) -> Result<GroupReport, Refusal> {
        self.group_report_of(name, &self.cores.pool().group_times())
    }

    fn group_report_of(&self, name: &str, times: &GroupTimes) -> Result<GroupReport, Refusal> {
        let record = self.groups.record(name)?;
        let (disks, nics) = (members(self.disks.records(), name), members(self.nics.records(), name));
        let group = self.groups.share(Some(name)).group;
        let in_flight = self.pool.in_flight(group);
        let used_per_core = times.get(&group).into_iter().flatten().map(used_of).collect();
        Ok(GroupReport::new(&record.now, origin(&record), disks, nics, in_flight, used_per_core))
    }

    pub(crate) fn group_reports(&self) -> Vec<GroupReport> {
        let (names, times) = (self.groups.records().into_keys(), self.cores.pool().group_times());
        names.filter_map(|name| self.group_report_of(&name, &times).ok()).collect()
    }
}
