//! A host's session with etcd.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use super::endpoint::EtcdEndpoint;
use super::gateway::{Compare, Gateway, KeyValue, Operation, Transaction};
use super::records::{Entry, HOSTS, NAMES, Present, STATES, host_key, name_key, state_key};
use crate::device::{DeviceRecord, HostPresence, ListedDevice, check_all};
use crate::directory::{Directory, Forgotten, NameChange, Taken};
use crate::error::NetbusError;
use crate::limits::{LEASE, MOST_HOSTS, MOST_NAMES};
use crate::names::{is_host, is_name, shown};
use crate::stream::Security;

/// How long a member may take to take a connection and to answer the first read, before the next one is tried.
const ATTEMPT: Duration = Duration::from_secs(3);
/// How often something is tried again because somebody else has changed it meanwhile. Each time somebody has got what they wanted.
const ROUNDS: usize = 8;
/// Operations in one transaction: etcd takes 128.
const BATCH: usize = 64;
/// Names that are read at most, and states. Names are counted before they are taken, so that hosts that do that at once may pass the bound; states
/// of a session that was replaced may be there until its lease ends.
const READ_NAMES: usize = 2 * MOST_NAMES;
/// Hosts that are read at most, for the same reason.
const READ_HOSTS: usize = 2 * MOST_HOSTS;

/// A session. After an error it is of no use any more.
#[derive(Debug)]
pub(crate) struct EtcdSession {
    gateway: Gateway,
    host: String,
    lease: i64,
    /// The revision in which this session took its place.
    place: i64,
    /// Names that may be this host's.
    own: BTreeSet<String>,
    /// Devices as the others can see them.
    said: BTreeMap<String, DeviceRecord>,
}

/// Names as they were read, each with the revision of its key.
type Names = BTreeMap<String, (Entry, i64)>;

impl EtcdSession {
    /// Connects to the first of `members` that answers, and takes the place of this host's session.
    pub(crate) async fn connect(
        members: &[EtcdEndpoint],
        security: &Security,
        daemon: &str,
    ) -> Result<EtcdSession, NetbusError> {
        if !is_name(daemon) {
            return Err(NetbusError::Malformed(format!("{:?} is no name of a daemon", shown(daemon))));
        }
        let mut reasons = Vec::new();
        for member in members {
            let tried = tokio::time::timeout(ATTEMPT, reach(member, security)).await;
            match tried.unwrap_or(Err(NetbusError::Slow(ATTEMPT))) {
                Ok((gateway, host)) => return EtcdSession::enter(gateway, host, daemon).await,
                // Of this host, whichever member is asked.
                Err(error @ (NetbusError::Identity(_) | NetbusError::Host(_) | NetbusError::Scheme(_))) => {
                    return Err(error);
                }
                Err(error) => reasons.push(format!("{member}: {error}")),
            }
        }
        Err(NetbusError::NoMember(reasons.join("; ")))
    }

    async fn enter(mut gateway: Gateway, host: String, daemon: &str) -> Result<EtcdSession, NetbusError> {
        let (lease, place) = enter(&mut gateway, &host, daemon).await?;
        let mut own = BTreeSet::new();
        let scan = gateway.scan("reading the names", (NAMES, READ_NAMES), None, |pair| {
            let entry = Entry::of_name(&pair.key, &pair.value)?;
            if entry.host == host {
                own.insert(entry.device.name);
            }
            Ok(())
        });
        scan.await?;
        Ok(EtcdSession { gateway, host, lease, place, own, said: BTreeMap::new() })
    }

    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    pub(crate) fn local(&self) -> IpAddr {
        self.gateway.local()
    }

    /// Says all that this host publishes. Answers which names are others'.
    pub(crate) async fn report(&mut self, devices: Vec<DeviceRecord>) -> Result<Vec<Taken>, NetbusError> {
        check_all(&devices)?;
        if !self.gateway.renew(self.lease).await? {
            return Err(NetbusError::Lost);
        }
        self.own.extend(devices.iter().map(|device| device.name.clone()));
        for _ in 0..ROUNDS {
            let names = self.read().await?;
            let mut directory =
                Directory::new(names.values().map(|(entry, _)| (entry.host.clone(), entry.device.clone())));
            let (taken, changes) = directory.report(&self.host, devices.clone(), Duration::ZERO)?;
            if !self.apply(changes, &names).await? {
                continue;
            }
            let is_taken = |device: &DeviceRecord| taken.iter().any(|one| one.name == device.name);
            let ours: Vec<DeviceRecord> = devices.into_iter().filter(|device| !is_taken(device)).collect();
            self.own = ours.iter().map(|device| device.name.clone()).collect();
            self.say(ours).await?;
            return Ok(taken);
        }
        Err(NetbusError::Refused("others change the names of this host all the time".to_owned()))
    }

    /// All devices, by name, as they were in one revision.
    pub(crate) async fn list(&mut self) -> Result<Vec<ListedDevice>, NetbusError> {
        const DOING: &str = "listing the devices";
        let (mut hosts, mut states, mut names) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
        let revision = self.gateway.scan(DOING, (NAMES, READ_NAMES), None, |pair| {
            names.push(Entry::of_name(&pair.key, &pair.value)?);
            Ok(())
        });
        let at = Some(revision.await?);
        let scan = self.gateway.scan(DOING, (HOSTS, READ_HOSTS), at, |pair| {
            hosts.insert(Present::of_host(&pair.key, &pair.value)?.0);
            Ok(())
        });
        scan.await?;
        let scan = self.gateway.scan(DOING, (STATES, READ_NAMES), at, |pair| {
            let Entry { host, device, .. } = Entry::of_state(&pair.key, &pair.value)?;
            states.insert((host, device.name.clone()), device);
            Ok(())
        });
        scan.await?;
        let listed = |Entry { host, device, .. }: Entry| {
            let seen = if hosts.contains(&host) { HostPresence::Now } else { HostPresence::Gone };
            // How a device is, only its host knows.
            let key = (host, device.name.clone());
            let state =
                states.remove(&key).filter(|state| seen == HostPresence::Now && state.lasting() == device);
            ListedDevice { host: key.0, seen, device: state.unwrap_or(device) }
        };
        Ok(names.into_iter().map(listed).collect())
    }

    /// Frees the name of a device whose host is not there.
    pub(crate) async fn forget(&mut self, name: &str) -> Result<Forgotten, NetbusError> {
        const DOING: &str = "forgetting a name";
        if !is_name(name) {
            return Ok(Forgotten::Unknown);
        }
        let key = name_key(name);
        for _ in 0..ROUNDS {
            let Some(pair) = self.gateway.get(DOING, &key).await? else { return Ok(Forgotten::Unknown) };
            let host = host_key(&Entry::of_name(&pair.key, &pair.value)?.host);
            if let Some(pair) = self.gateway.get(DOING, &host).await? {
                return Ok(Forgotten::Present(Present::of_host(&pair.key, &pair.value)?.0));
            }
            let transaction = Transaction {
                compare: vec![Compare::Unchanged(key.clone(), pair.mod_revision), Compare::Absent(host)],
                then: vec![Operation::Delete(key.clone())],
            };
            if self.gateway.transact(DOING, &transaction).await?.succeeded {
                return Ok(Forgotten::Done);
            }
        }
        Err(NetbusError::Refused(format!("others change {name} all the time")))
    }

    /// Says that this host ends: it keeps its names.
    pub(crate) async fn leave(mut self) -> Result<(), NetbusError> {
        self.gateway.revoke(self.lease).await
    }

    /// The names that may be this host's, as they are, and that this session is in place.
    async fn read(&mut self) -> Result<Names, NetbusError> {
        let mut names = Names::new();
        let all: Vec<&String> = self.own.iter().collect();
        // Once at least: without a name the place is looked at, too.
        let parts = all.len().div_ceil(BATCH).max(1);
        for part in 0..parts {
            let keys = all.iter().skip(part * BATCH).take(BATCH).map(|name| Operation::Get(name_key(name)));
            let transaction = Transaction { compare: vec![self.in_place()], then: keys.collect() };
            let answer = self.gateway.transact("reading this host's names", &transaction).await?;
            if !answer.succeeded {
                return Err(NetbusError::Lost);
            }
            for KeyValue { key, value, mod_revision, .. } in answer.found() {
                let entry = Entry::of_name(&key, &value)?;
                names.insert(entry.device.name.clone(), (entry, mod_revision));
            }
        }
        Ok(names)
    }

    /// Makes changes, each if the name is as in `names`. Whether all were made.
    async fn apply(&mut self, changes: Vec<NameChange>, names: &Names) -> Result<bool, NetbusError> {
        let unchanged = |key: &str, name: &str| match names.get(name) {
            Some((_, revision)) => Compare::Unchanged(key.to_owned(), *revision),
            None => Compare::Absent(key.to_owned()),
        };
        let new = changes.iter().filter(
            |change| matches!(change, NameChange::Put(_, device) if !names.contains_key(&device.name)),
        );
        let new = new.count();
        if new > 0 && self.gateway.count("counting the names", NAMES).await?.saturating_add(new) > MOST_NAMES
        {
            return Err(NetbusError::Names);
        }
        let mut swaps = Vec::new();
        for change in changes {
            let (compare, operation) = match change {
                NameChange::Put(host, device) => {
                    let key = name_key(&device.name);
                    let compare = unchanged(&key, &device.name);
                    let value = Entry::new(&host, device).text()?;
                    (compare, Operation::Put { key, value, lease: None })
                }
                NameChange::Remove(name) => {
                    let key = name_key(&name);
                    (unchanged(&key, &name), Operation::Delete(key))
                }
            };
            swaps.push(Transaction { compare: vec![self.in_place(), compare], then: vec![operation] });
        }
        self.all_of("changing names", swaps).await
    }

    /// Says how the devices are, as far as it has changed.
    async fn say(&mut self, devices: Vec<DeviceRecord>) -> Result<(), NetbusError> {
        let devices: BTreeMap<String, DeviceRecord> =
            devices.into_iter().map(|device| (device.name.clone(), device)).collect();
        let mut writes = Vec::new();
        for (name, device) in devices.iter().filter(|(name, device)| self.said.get(*name) != Some(device)) {
            let value = Entry::new(&self.host, device.clone()).text()?;
            let key = state_key(&self.host, name);
            writes.push(Operation::Put { key, value, lease: Some(self.lease) });
        }
        let over = self.said.keys().filter(|name| !devices.contains_key(*name));
        writes.extend(over.map(|name| Operation::Delete(state_key(&self.host, name))));
        let guarded = |write| Transaction { compare: vec![self.in_place()], then: vec![write] };
        let writes = writes.into_iter().map(guarded).collect();
        if !self.all_of("saying how the devices are", writes).await? {
            return Err(NetbusError::Lost);
        }
        self.said = devices;
        Ok(())
    }

    /// Does each of `transactions`. Whether all were done.
    async fn all_of(
        &mut self,
        doing: &'static str,
        transactions: Vec<Transaction>,
    ) -> Result<bool, NetbusError> {
        let mut all = true;
        let mut rest = transactions.into_iter().map(Operation::Transaction).peekable();
        while rest.peek().is_some() {
            let then: Vec<Operation> = rest.by_ref().take(BATCH).collect();
            let asked = then.len();
            let answer = self.gateway.transact(doing, &Transaction { compare: Vec::new(), then }).await?;
            all &= answer.done().filter(|done| *done).count() == asked;
        }
        Ok(all)
    }

    /// That no other session has this one's place, and that its lease has not ended.
    fn in_place(&self) -> Compare {
        Compare::Unchanged(host_key(&self.host), self.place)
    }
}

/// A connection to a member that can read what a majority of the members has.
async fn reach(member: &EtcdEndpoint, security: &Security) -> Result<(Gateway, String), NetbusError> {
    let (mut gateway, host) = Gateway::open(member, security).await?;
    if !is_host(&host) {
        return Err(NetbusError::Host(shown(&host)));
    }
    gateway.get("looking for this host's session", &host_key(&host)).await?;
    Ok((gateway, host))
}

/// Takes the place of this host's session: the lease of it, and the revision in which it was taken.
async fn enter(gateway: &mut Gateway, host: &str, daemon: &str) -> Result<(i64, i64), NetbusError> {
    const DOING: &str = "taking the place of this host's session";
    let key = host_key(host);
    for _ in 0..ROUNDS {
        let old = gateway.get(DOING, &key).await?;
        let compare = match &old {
            Some(pair) => {
                // It has been started again, or has lost its connection; each of two daemons would withdraw what the other one publishes.
                if Present::of_host(&pair.key, &pair.value)?.1.daemon != daemon {
                    return Err(NetbusError::Busy(host.to_owned()));
                }
                Compare::Unchanged(key.clone(), pair.mod_revision)
            }
            None if gateway.count(DOING, HOSTS).await? >= MOST_HOSTS => return Err(NetbusError::Hosts),
            None => Compare::Absent(key.clone()),
        };
        let lease = gateway.grant(LEASE).await?;
        let value = Present::new(daemon).text()?;
        let then = vec![Operation::Put { key: key.clone(), value, lease: Some(lease) }];
        let answer = gateway.transact(DOING, &Transaction { compare: vec![compare], then }).await?;
        if answer.succeeded && answer.revision() > 0 {
            // What the old session said of its devices goes with its lease, now or when it ends.
            if let Some(old) = old.filter(|pair| pair.lease != 0) {
                match gateway.revoke(old.lease).await {
                    Ok(()) | Err(NetbusError::Etcd { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            return Ok((lease, answer.revision()));
        }
        gateway.revoke(lease).await?;
    }
    Err(NetbusError::Busy(host.to_owned()))
}
