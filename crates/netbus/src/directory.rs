//! Whose names are whose, and which hosts are there: decisions without files, sockets or a clock.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::device::{DeviceRecord, HostPresence, ListedDevice, check_all};
use crate::error::NetbusError;
use crate::limits::{LEASE, MOST_HOSTS, MOST_NAMES};

/// A name that a host publishes, and that is another's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// The name.
    pub name: String,
    /// The host that has it.
    pub by: String,
}

/// What has to be durable before a host is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NameChange {
    /// The device of this name is this host's.
    Put(String, DeviceRecord),
    /// The name is free.
    Remove(String),
}

/// What came of forgetting a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Forgotten {
    /// The name is free.
    Done,
    /// There is none of this name.
    Unknown,
    /// The host that publishes it is there: it would only report it again.
    Present(String),
}

#[derive(Debug)]
struct Published {
    host: String,
    device: DeviceRecord,
}

/// All devices, by name. Times are since an epoch of the caller's.
#[derive(Debug, Default)]
pub struct Directory {
    devices: BTreeMap<String, Published>,
    /// The lease of each host that has reported.
    leases: BTreeMap<String, Lease>,
}

/// Whether a host is there.
#[derive(Debug, Clone, Copy)]
struct Lease {
    /// Its last report.
    last: Duration,
    /// It has said that it ends.
    ended: bool,
}

impl Directory {
    /// With what was kept.
    pub fn new(kept: impl IntoIterator<Item = (String, DeviceRecord)>) -> Directory {
        let published =
            |(host, device): (String, DeviceRecord)| (device.name.clone(), Published { host, device });
        Directory { devices: kept.into_iter().map(published).collect(), leases: BTreeMap::new() }
    }

    /// A host publishes `devices`, and nothing else any more. What it may not have is another's, and is in the answer. The changes have to be
    /// durable before it is told so.
    ///
    /// # Errors
    /// What the host says cannot be used, or there are too many hosts. Nothing has changed then.
    pub fn report(
        &mut self,
        host: &str,
        devices: Vec<DeviceRecord>,
        now: Duration,
    ) -> Result<(Vec<Taken>, Vec<NameChange>), NetbusError> {
        check_all(&devices)?;
        let new = devices.iter().filter(|device| !self.devices.contains_key(&device.name)).count();
        if self.devices.len() + new > MOST_NAMES {
            return Err(NetbusError::Names);
        }
        if !self.leases.contains_key(host) {
            if self.leases.len() >= MOST_HOSTS {
                self.drop_leases(now);
            }
            if self.leases.len() >= MOST_HOSTS {
                return Err(NetbusError::Hosts);
            }
        }
        self.leases.insert(host.to_owned(), Lease { last: now, ended: false });
        let (mut taken, mut changes) = (Vec::new(), Vec::new());
        let gone = |one: &Published| one.host == host && !devices.iter().any(|d| d.name == one.device.name);
        let withdrawn: Vec<String> =
            self.devices.iter().filter(|(_, one)| gone(one)).map(|(name, _)| name.clone()).collect();
        for name in withdrawn {
            self.devices.remove(&name);
            changes.push(NameChange::Remove(name));
        }
        for device in devices {
            match self.devices.get_mut(&device.name) {
                Some(one) if one.host != host => {
                    taken.push(Taken { name: device.name, by: one.host.clone() });
                }
                Some(one) => {
                    if one.device.lasting() != device.lasting() {
                        changes.push(NameChange::Put(host.to_owned(), device.lasting()));
                    }
                    one.device = device;
                }
                None => {
                    changes.push(NameChange::Put(host.to_owned(), device.lasting()));
                    let published = Published { host: host.to_owned(), device };
                    self.devices.insert(published.device.name.clone(), published);
                }
            }
        }
        Ok((taken, changes))
    }

    /// All devices, by name.
    pub fn list(&self, now: Duration) -> Vec<ListedDevice> {
        let entry = |one: &Published| {
            let seen = self.seen(&one.host, now);
            // How a device is, only its host knows.
            let device = if seen == HostPresence::Now { one.device.clone() } else { one.device.lasting() };
            ListedDevice { host: one.host.clone(), seen, device }
        };
        self.devices.values().map(entry).collect()
    }

    /// Frees the name of a device whose host does not come back.
    pub fn forget(&mut self, name: &str, now: Duration) -> (Forgotten, Option<NameChange>) {
        let Some(one) = self.devices.get(name) else { return (Forgotten::Unknown, None) };
        if self.seen(&one.host, now) == HostPresence::Now {
            return (Forgotten::Present(one.host.clone()), None);
        }
        self.devices.remove(name);
        (Forgotten::Done, Some(NameChange::Remove(name.to_owned())))
    }

    /// A host has said that it ends: it is lost from now on, and keeps its names.
    pub fn leave(&mut self, host: &str) {
        if let Some(lease) = self.leases.get_mut(host) {
            lease.ended = true;
        }
    }

    fn seen(&self, host: &str, now: Duration) -> HostPresence {
        match self.leases.get(host) {
            None => HostPresence::Never,
            Some(Lease { last, ended }) => {
                let age = now.saturating_sub(*last);
                let lost = || HostPresence::Lost(u64::try_from(age.as_millis()).unwrap_or(u64::MAX));
                if *ended || age > LEASE { lost() } else { HostPresence::Now }
            }
        }
    }

    /// Hosts that are gone and have no devices take no place.
    fn drop_leases(&mut self, now: Duration) {
        let with_devices: BTreeSet<&String> = self.devices.values().map(|one| &one.host).collect();
        let stay: BTreeMap<String, Lease> = self
            .leases
            .iter()
            .filter(|(host, _)| with_devices.contains(host) || self.seen(host, now) == HostPresence::Now)
            .map(|(host, lease)| (host.clone(), *lease))
            .collect();
        self.leases = stay;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::device::DeviceRate;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_name_is_one_hosts_until_it_is_withdrawn() {
        let mut directory = Directory::default();
        let (taken, changes) = directory
            .report("a", vec![DeviceRecord::sample("x"), DeviceRecord::sample("y")], SECOND)
            .unwrap();
        assert!(taken.is_empty());
        assert_eq!(changes.len(), 2);
        let (taken, changes) = directory
            .report("b", vec![DeviceRecord::sample("x"), DeviceRecord::sample("z")], SECOND)
            .unwrap();
        assert_eq!(taken, [Taken { name: "x".to_owned(), by: "a".to_owned() }]);
        assert_eq!(changes, [NameChange::Put("b".to_owned(), DeviceRecord::sample("z"))]);
        // Not because its host has been silent.
        let (taken, _) = directory.report("b", vec![DeviceRecord::sample("x")], SECOND * 1000).unwrap();
        assert_eq!(taken.len(), 1);
        let (_, changes) = directory.report("a", vec![DeviceRecord::sample("y")], SECOND * 1001).unwrap();
        assert_eq!(changes, [NameChange::Remove("x".to_owned())]);
        let (taken, changes) = directory.report("b", vec![DeviceRecord::sample("x")], SECOND * 1002).unwrap();
        assert!(taken.is_empty());
        assert_eq!(changes, [NameChange::Put("b".to_owned(), DeviceRecord::sample("x"))]);
    }

    #[test]
    fn what_changes_all_the_time_is_not_kept() {
        let mut directory = Directory::default();
        directory.report("a", vec![DeviceRecord::sample("x")], SECOND).unwrap();
        let rates = vec![DeviceRate { unit: "packets".to_owned(), capacity: 7, reserved: 2 }];
        let trouble = Some("slow".to_owned());
        let busy = DeviceRecord { users: 3, trouble, rates, ..DeviceRecord::sample("x") };
        let (_, changes) = directory.report("a", vec![busy.clone()], SECOND * 2).unwrap();
        assert_eq!(changes, []);
        assert_eq!(directory.list(SECOND * 3)[0].device, busy);
        let larger = DeviceRecord { size: Some(5), ..busy };
        let (_, changes) = directory.report("a", vec![larger.clone()], SECOND * 4).unwrap();
        assert_eq!(changes, [NameChange::Put("a".to_owned(), larger.lasting())]);
    }

    #[test]
    fn hosts_are_there_while_they_report() {
        let mut directory = Directory::new([("a".to_owned(), DeviceRecord::sample("x"))]);
        assert_eq!(directory.list(SECOND)[0].seen, HostPresence::Never);
        directory.report("a", vec![DeviceRecord::sample("x")], SECOND).unwrap();
        assert_eq!(directory.list(SECOND + LEASE)[0].seen, HostPresence::Now);
        assert_eq!(directory.list(SECOND * 2 + LEASE)[0].seen, HostPresence::Lost(11_000));
        directory.report("a", vec![DeviceRecord::sample("x")], SECOND * 20).unwrap();
        directory.leave("a");
        assert_eq!(directory.list(SECOND * 21)[0].seen, HostPresence::Lost(1000));
    }

    #[test]
    fn only_what_nobody_reports_can_be_forgotten() {
        let mut directory = Directory::default();
        directory.report("a", vec![DeviceRecord::sample("x")], SECOND).unwrap();
        assert_eq!(directory.forget("x", SECOND), (Forgotten::Present("a".to_owned()), None));
        assert_eq!(directory.forget("y", SECOND), (Forgotten::Unknown, None));
        let later = SECOND * 60;
        let done = (Forgotten::Done, Some(NameChange::Remove("x".to_owned())));
        assert_eq!(directory.forget("x", later), done);
        assert_eq!(directory.list(later), []);
    }

    #[test]
    fn hosts_are_bounded_and_those_that_are_gone_make_room() {
        let mut directory = Directory::default();
        directory.report("keeper", vec![DeviceRecord::sample("x")], SECOND).unwrap();
        for host in 1..MOST_HOSTS {
            directory.report(&format!("h{host}"), Vec::new(), SECOND).unwrap();
        }
        assert!(matches!(directory.report("more", Vec::new(), SECOND), Err(NetbusError::Hosts)));
        directory.report("more", Vec::new(), SECOND * 60).unwrap();
        assert_eq!(directory.list(SECOND * 60)[0].host, "keeper");
        assert!(directory.leases.len() <= 2);
    }

    proptest! {
        /// Whatever hosts report in whatever order, what is kept is what is listed, and no name has two hosts.
        #[test]
        fn what_is_kept_is_what_is_listed(
            reports in prop::collection::vec((0..4_u8, prop::collection::btree_set(0..6_u8, 0..5), 0..30_u64), 1..60)
        ) {
            let mut directory = Directory::default();
            let mut kept = BTreeMap::new();
            let mut now = Duration::ZERO;
            for (host, names, pause) in reports {
                now += Duration::from_secs(pause);
                let devices: Vec<DeviceRecord> = names.iter().map(|name| DeviceRecord::sample(&format!("d{name}"))).collect();
                let host = format!("h{host}");
                let (taken, changes) = directory.report(&host, devices, now).unwrap();
                for change in changes {
                    match change {
                        NameChange::Put(host, device) => {
                            let before = kept.insert(device.name.clone(), (host.clone(), device));
                            prop_assert!(before.is_none_or(|(before, _)| before == host));
                        }
                        NameChange::Remove(name) => {
                            let before = kept.remove(&name);
                            prop_assert_eq!(before.map(|(host, _)| host), Some(host.clone()));
                        }
                    }
                }
                for Taken { name, by } in taken {
                    prop_assert!(by != host);
                    prop_assert_eq!(&kept[&name].0, &by);
                }
                let again = Directory::new(kept.values().cloned());
                let names = |directory: &Directory| -> Vec<(String, DeviceRecord)> {
                    directory.list(now).into_iter().map(|one| (one.host, one.device.lasting())).collect()
                };
                prop_assert_eq!(names(&again), names(&directory));
            }
        }
    }
}
