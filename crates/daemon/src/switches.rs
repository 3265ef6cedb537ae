//! The switches, by name, each with its uplink.
//!
//! A switch is a table and counters; who works for it are the pollers of its ports. An uplink is a device without a guest: it
//! sits on an I/O core like any other queue.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_api::refusal::Code;
use ioplane_api::report::{EventWord, LearnedReport, PortReport, SwitchReport, SwitchTableReport};
use ioplane_api::spec::{SpecFields, SwitchSpec};
use ioplane_device::{
    Lifecycle, MoveError, OnMiss, QueueSet, QuiescePolicy, Quiescent, Running, SimpleOwner, quiesce_blocking,
};
use ioplane_network::{NetworkError, Port, PortOptions, Switch, SwitchSettings, Tap, interface};

use super::context::DaemonContext;
use super::cores::CorePlacement;
use super::readings;
use super::registry::OnFailure;
use super::retry_state::RetryState;
use super::state_file::SwitchRecord;
use crate::config::Config;
use crate::refusal::Refusal;

/// How long an uplink may take to come to rest: nothing is ever in flight there.
const REST: Duration = Duration::from_secs(2);
/// How often uplinks are looked at: whether somebody has deleted their devices.
const LOOK: Duration = Duration::from_secs(5);

struct Slot {
    switch: Arc<Switch>,
    record: SwitchRecord,
    uplink: Option<Running<Tap>>,
    /// Why there is no uplink although there should be one.
    failed: Option<RetryState>,
    /// It is being tried again.
    trying: bool,
}

/// What a reload does about one.
enum Step {
    Nothing,
    Add,
    /// Its uplink is tried again.
    Again,
    /// It gets another uplink.
    Change(Option<Running<Tap>>, Arc<Switch>),
}

/// What a successor needs to make one like it.
pub enum SwitchHandover {
    /// Nothing: it has no uplink.
    Plain,
    /// Its uplink's open device and port.
    Uplink(OwnedFd, Arc<Port>),
    /// There is no uplink although there should be one.
    Failed(Refusal),
}

/// All of them. Methods may block for a moment.
pub struct Switches {
    slots: Mutex<BTreeMap<String, Slot>>,
    context: Arc<DaemonContext>,
}

impl Switches {
    /// None yet.
    pub fn new(context: Arc<DaemonContext>) -> Self {
        Switches { slots: Mutex::default(), context }
    }

    fn slots(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a switch and opens its uplink.
    pub fn add(&self, record: SwitchRecord, on_failure: OnFailure) -> Result<(), Refusal> {
        let name = record.now.name.clone();
        let mut slots = self.slots();
        if slots.contains_key(&name) {
            return Err(Refusal::conflict(format!("switch {name} is there already"), "give another name")
                .coded(Code::Exists));
        }
        let switch = Switch::new(&name, SwitchSettings::default());
        let (uplink, failed) = match self.open_uplink(&switch, &record.now, on_failure) {
            Ok(uplink) => (uplink, None),
            Err(refused) if on_failure == OnFailure::Keep => {
                let Refusal { error, remedy, .. } = &refused;
                tracing::error!(switch = name, error, remedy, "a switch without its uplink");
                (None, Some(RetryState::new(refused)))
            }
            Err(refused) => return Err(refused),
        };
        self.note(&record)?;
        tracing::info!(switch = name, uplink = record.now.uplink, "switching");
        slots.insert(name, Slot { switch, record, uplink, failed, trying: false });
        drop(slots);
        self.context.failed.notify_one();
        Ok(())
    }

    /// Makes one as somebody asks for it, and says whether it is new: one that is so already stays as it is.
    pub fn put(&self, wanted: SwitchSpec) -> Result<bool, Refusal> {
        let name = wanted.name.clone();
        let there = self.slots().get(&name).map(|slot| slot.record.now.clone());
        if let Some(now) = there {
            let differing = wanted.differing(&now);
            let Some(first) = differing.first() else { return Ok(false) };
            let error = format!("switch {name} is there already, with another {}", differing.join(", "));
            let remedy = format!("give another name, or `ioplane switch remove {name}` first");
            return Err(Refusal::new(Code::Exists, error, remedy).at(first));
        }
        if let Some(core) = wanted.core {
            self.context.cores.check(core).map_err(|refused| refused.at("core"))?;
        }
        self.add(SwitchRecord { configured: None, now: wanted }, OnFailure::Forget)?;
        self.context.events.tell(EventWord::Served, "switch", &name, "switching");
        Ok(true)
    }

    /// When the next uplink is to be tried again.
    pub fn next(&self) -> Option<Instant> {
        let mut slots = self.slots();
        let next =
            slots.values_mut().filter(|slot| !slot.trying).filter_map(|slot| match slot.retry_state() {
                Some(retry) => retry.next(),
                // Nobody says when one is deleted.
                None => slot.uplink.is_some().then(|| Instant::now() + LOOK),
            });
        next.min()
    }

    /// Begins to try uplinks again whose time has come: [`Switches::retry`] or [`Switches::later`] is to follow for each.
    pub fn due(&self) -> Vec<String> {
        let mut slots = self.slots();
        let due = slots.iter_mut().filter(|(_, slot)| !slot.trying);
        let due = due.filter_map(|(name, slot)| slot.retry_state()?.is_due().then_some((name, slot)));
        due.map(|(name, slot)| {
            slot.trying = true;
            name.clone()
        })
        .collect()
    }

    /// Tries the uplink of one again, unless somebody has taken it away or opened it meanwhile. No reload may be under way.
    pub async fn retry(self: &Arc<Self>, name: &str) {
        let (all, of) = (self.clone(), name.to_owned());
        let done = super::served::blocking(move || Ok(all.open_again(&of, false)));
        if let Ok(Some(unwanted)) = done.await {
            end(Some(unwanted)).await;
        }
        self.context.failed.notify_one();
    }

    /// One that was to be tried is not, now.
    pub fn later(&self, name: &str) {
        if let Some(slot) = self.slots().get_mut(name) {
            slot.trying = false;
            slot.failed = slot.retry_state().map(|retry| retry.postponed());
        }
        self.context.failed.notify_one();
    }

    /// Opens the uplink of one that has none that works, and gives back one that nobody wants any more. A device that somebody has
    /// deleted is made again only if that is asked for: whoever deleted it knows best how it is to be.
    fn open_again(&self, name: &str, make: bool) -> Option<Running<Tap>> {
        let (switch, spec, old) = {
            let mut slots = self.slots();
            let slot = slots.get_mut(name)?;
            let uplink = slot.record.now.uplink.clone().unwrap_or_default();
            let there = interface(&uplink).is_some();
            // One that the daemon made stays, unless somebody deletes it: a predecessor may have seen that.
            let ours = self.context.state_file.entries().taps.contains_key(&uplink);
            let deleted = (slot.is_deleted() || ours) && !make;
            if slot.retry_state().is_none() || deleted && !there {
                slot.trying = false;
                slot.failed = slot.retry_state().map(|retry| retry.again(retry.why.clone()));
                return None;
            }
            (slot.switch.clone(), slot.record.now.clone(), slot.uplink.take())
        };
        if let Some(old) = old
            && let Err(refused) = end_tap(old)
        {
            tracing::warn!(error = refused.error, "an uplink did not become quiescent");
        }
        let opened = self.open_uplink(&switch, &spec, OnFailure::Keep);
        let mut slots = self.slots();
        let slot =
            slots.get_mut(name).filter(|slot| Arc::ptr_eq(&slot.switch, &switch) && slot.uplink.is_none());
        let Some(slot) = slot else { return opened.ok().flatten() };
        slot.trying = false;
        match opened {
            Ok(uplink) => {
                tracing::info!(switch = name, uplink = spec.uplink, "a switch has its uplink");
                (slot.uplink, slot.failed) = (uplink, None);
            }
            Err(refused) => {
                let again = slot.failed.take().map(|retry| match make {
                    true => retry.asked(refused.clone()),
                    false => retry.again(refused.clone()),
                });
                slot.failed = Some(again.unwrap_or_else(|| RetryState::new(refused)));
            }
        }
        None
    }

    fn note(&self, record: &SwitchRecord) -> Result<(), Refusal> {
        let name = record.now.name.clone();
        Ok(self.context.state_file.change(|entries| {
            entries.removed_switches.remove(&name);
            entries.switches.insert(name, record.clone());
        })?)
    }

    fn placement(&self, core: Option<u32>) -> CorePlacement {
        CorePlacement { pool: self.context.cores.pool().clone(), core, moved: BTreeMap::new() }
    }

    fn open_uplink(
        &self,
        switch: &Arc<Switch>,
        spec: &SwitchSpec,
        on_failure: OnFailure,
    ) -> Result<Option<Running<Tap>>, Refusal> {
        let Some(name) = &spec.uplink else { return Ok(None) };
        if let Some(core) = spec.core.filter(|_| on_failure == OnFailure::Forget) {
            self.context.cores.check(core)?;
        }
        let tap = Tap::open(name, switch, PortOptions::new(name))?;
        super::taps::keep(name, &tap, &self.context.state_file)?;
        let running = Quiescent::new(tap).resume(&self.placement(spec.core)).map_err(|refused| {
            Refusal::failed(format!("uplink {name}: {}", refused.error), "see `ioplane core list`")
        })?;
        Ok(Some(running))
    }

    /// Every switch, for a successor.
    pub fn handovers(&self) -> Result<Vec<(String, SwitchHandover)>, Refusal> {
        let slots = self.slots();
        let each = slots.iter().map(|(name, slot)| {
            let one = match (&slot.uplink, slot.broken()) {
                (_, Some(why)) => SwitchHandover::Failed(why),
                (Some(uplink), None) => {
                    let file = uplink.device().file().try_clone_to_owned().map_err(|error| {
                        Refusal::failed(
                            format!("the uplink of switch {name}: {error}"),
                            "is the limit on open files too low?",
                        )
                    })?;
                    SwitchHandover::Uplink(file, uplink.device().port().clone())
                }
                (None, None) => SwitchHandover::Plain,
            };
            Ok((name.clone(), one))
        });
        each.collect()
    }

    /// Makes one that another process has had; nothing is written down.
    pub fn take_in(&self, record: SwitchRecord, failed: Option<Refusal>) -> Arc<Switch> {
        let name = record.now.name.clone();
        let switch = Switch::new(&name, SwitchSettings::default());
        let failed = failed.map(RetryState::new);
        self.slots()
            .insert(name, Slot { switch: switch.clone(), record, uplink: None, failed, trying: false });
        switch
    }

    /// The uplink of one that was taken in, by its open device. It does not run yet.
    pub fn adopt_uplink(&self, name: &str, switch: &Arc<Switch>, file: OwnedFd) -> Result<Tap, Refusal> {
        let uplink = self.slots().get(name).and_then(|slot| slot.record.now.uplink.clone());
        let uplink = uplink.ok_or_else(|| missing(name))?;
        Ok(Tap::adopt(&uplink, file, switch, PortOptions::new(&uplink))?)
    }

    /// Brings the uplink of one to rest. Until [`Switches::resume_uplink`] the switch has none.
    pub fn quiesce_uplink(&self, name: &str) -> Result<Quiescent<Tap>, Refusal> {
        let uplink = self.slots().get_mut(name).and_then(|slot| slot.uplink.take());
        let mut device = Lifecycle::from(uplink.ok_or_else(|| missing(name))?);
        let placement = self.placement(self.slots().get(name).and_then(|slot| slot.record.now.core));
        let policy = QuiescePolicy { deadline: Instant::now() + REST, on_miss: OnMiss::Undrain };
        let owner = &mut SimpleOwner { device: &mut device, placement: &placement };
        let why = match quiesce_blocking(owner, policy) {
            Ok(_) => match device.take() {
                Ok(quiescent) => return Ok(quiescent),
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        let why = format!("the uplink of switch {name} does not become quiescent: {why}");
        let refused = Refusal::conflict(why, "an I/O core does not turn: see `ioplane core list`");
        if let Some(slot) = self.slots().get_mut(name) {
            slot.uplink = match device {
                Lifecycle::Running(running) => Some(running),
                _ => None,
            };
            slot.failed = slot.uplink.is_none().then(|| RetryState::new(refused.clone()));
        }
        Err(refused)
    }

    pub fn resume_uplink(&self, name: &str, uplink: Quiescent<Tap>) {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(name) else { return };
        match uplink.resume(&self.placement(slot.record.now.core)) {
            Ok(running) => slot.uplink = Some(running),
            Err(refused) => {
                let why = format!("the uplink of switch {name}: {}", refused.error);
                tracing::error!(switch = name, error = why, "a switch has lost its uplink");
                slot.failed = Some(RetryState::new(Refusal::failed(why, "see `ioplane core list`")));
            }
        }
    }

    /// One of them, to plug into.
    pub fn switch(&self, name: &str) -> Result<Arc<Switch>, Refusal> {
        self.slots().get(name).map(|slot| slot.switch.clone()).ok_or_else(|| missing(name))
    }

    /// The switch that has a port of this name.
    pub fn with_port(&self, port: &str) -> Result<Arc<Switch>, Refusal> {
        let slots = self.slots();
        let mut switches = slots.values().map(|slot| &slot.switch);
        let found = switches.find(|switch| switch.ports().iter().any(|reading| reading.name == port));
        found.cloned().ok_or_else(|| {
            let remedy = "name a NIC (`ioplane nic list`) or an uplink (`ioplane switch list`)";
            Refusal::missing(format!("no switch has a port {port}"), remedy)
        })
    }

    /// Makes one as the configuration has it, whether or not it is there; says whether that changed anything.
    /// One that has not changed and whose uplink cannot be had stays so: that is shown, and no reason to refuse a configuration.
    pub async fn set(self: &Arc<Self>, record: SwitchRecord) -> Result<bool, Refusal> {
        let name = record.now.name.clone();
        let step = {
            let mut slots = self.slots();
            match slots.get_mut(&name) {
                None => Step::Add,
                Some(slot) if slot.record.now == record.now => {
                    self.note(&record)?;
                    slot.record = record.clone();
                    if slot.broken().is_none() { Step::Nothing } else { Step::Again }
                }
                Some(slot) => Step::Change(slot.uplink.take(), slot.switch.clone()),
            }
        };
        let (old, next) = match step {
            Step::Nothing => return Ok(false),
            Step::Add => return self.add(record, OnFailure::Forget).map(|()| true),
            Step::Again => {
                let (all, of) = (self.clone(), name.clone());
                end(super::served::blocking(move || Ok(all.open_again(&of, true))).await?).await;
                return Ok(self.slots().get(&name).is_some_and(|slot| slot.broken().is_none()));
            }
            Step::Change(old, next) => (old, next),
        };
        end(old).await;
        let uplink = self.open_uplink(&next, &record.now, OnFailure::Forget);
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(&name) else { return Err(missing(&name)) };
        match uplink {
            Ok(uplink) => {
                self.note(&record)?;
                *slot = Slot { switch: next, record, uplink, failed: None, trying: false };
                Ok(true)
            }
            Err(refused) => {
                // The old one back, if it can be had.
                slot.uplink = self.open_uplink(&next, &slot.record.now, OnFailure::Keep).ok().flatten();
                slot.failed = slot.uplink.is_none().then(|| RetryState::new(refused.clone()));
                self.context.failed.notify_one();
                Err(refused)
            }
        }
    }

    /// What the configuration wants of each.
    pub fn merged(&self, config: &Config) -> Vec<SwitchRecord> {
        let slots = self.slots();
        let merge = |spec: &SwitchSpec| merged(spec, slots.get(&spec.name).map(|slot| &slot.record));
        config.switches.iter().map(|(spec, _)| merge(spec)).collect()
    }

    /// Those that the configuration had and has no more.
    pub fn gone(&self, config: &Config) -> Vec<String> {
        let wanted = |name: &str| config.switches.iter().any(|(spec, _)| spec.name == name);
        let slots = self.slots();
        let gone = slots.iter().filter(|(name, slot)| slot.record.configured.is_some() && !wanted(name));
        gone.map(|(name, _)| name.clone()).collect()
    }

    /// Takes one away, unless a NIC is plugged in; `lasting` is to remember that a configured one is not wanted.
    pub async fn remove(&self, name: &str, lasting: bool) -> Result<(), Refusal> {
        let slot = {
            let mut slots = self.slots();
            let slot = slots.get(name).ok_or_else(|| missing(name))?;
            if let Some(port) = slot.switch.ports().into_iter().find(|port| !port.uplink) {
                return Err(Refusal::conflict(
                    format!("{} is plugged into switch {name}", port.name),
                    format!(
                        "take it away first: `ioplane nic remove {0}` or `ioplane pci remove {0}`",
                        port.name
                    ),
                )
                .coded(Code::InUse));
            }
            slots.remove(name)
        };
        let Some(slot) = slot else { return Ok(()) };
        end(slot.uplink).await;
        tracing::info!(switch = name, "removed");
        self.context.events.tell(EventWord::Removed, "switch", name, "removed");
        Ok(self.context.state_file.change(|entries| {
            entries.switches.remove(name);
            if let Some(configured) = slot.record.configured.filter(|_| lasting) {
                entries.removed_switches.insert(name.to_owned(), configured);
            }
        })?)
    }

    /// Moves the uplink of a switch to a core, and remembers it.
    pub fn move_uplink(&self, name: &str, queue: u16, core: u32) -> Result<(), Refusal> {
        self.context.cores.check(core)?;
        self.pin_uplink(name, queue, Some(core))?;
        self.relocate_uplink(name, core)
    }

    /// Remembers the core of an uplink, or that it may be on any. It stays where it is.
    pub fn pin_uplink(&self, name: &str, queue: u16, core: Option<u32>) -> Result<(), Refusal> {
        let mut slots = self.slots();
        let slot = slots.get_mut(name).ok_or_else(|| missing(name))?;
        if slot.uplink.is_none() || queue != 0 {
            return Err(no_queue(name, queue));
        }
        let mut record = slot.record.clone();
        record.now.core = core;
        self.note(&record)?;
        slot.record = record;
        Ok(())
    }

    /// Moves the uplink of a switch to a core, where it stays until it is moved again or opened anew. May block.
    pub fn relocate_uplink(&self, name: &str, core: u32) -> Result<(), Refusal> {
        let placement = self.placement(Some(core));
        let mut slots = self.slots();
        let slot = slots.get_mut(name).ok_or_else(|| missing(name))?;
        let uplink = slot.uplink.as_mut().ok_or_else(|| no_queue(name, 0))?;
        let moved = match uplink.move_queue(0, &placement, Instant::now() + REST) {
            // It has stopped, since both cores were gone: from here on it runs again.
            Err(MoveError::NotRunning(_) | MoveError::Stopped(_)) => {
                uplink.start(&QueueSet::from([0]), &placement).map_err(|error| error.to_string())
            }
            moved => moved.map_err(|error| error.to_string()),
        };
        moved.map_err(|said| Refusal::failed(said, "see `ioplane core list`"))
    }

    pub fn report(&self) -> Vec<SwitchReport> {
        self.slots().values_mut().map(Slot::report).collect()
    }

    pub fn report_of(&self, name: &str) -> Result<SwitchTableReport, Refusal> {
        let mut slots = self.slots();
        let slot = slots.get_mut(name).ok_or_else(|| missing(name))?;
        let mut table: Vec<LearnedReport> = slot.switch.table().into_iter().map(readings::learned).collect();
        table.sort_by(|a, b| (&a.port, a.vlan, &a.mac).cmp(&(&b.port, b.vlan, &b.mac)));
        Ok(SwitchTableReport { switch: slot.report(), table })
    }

    /// Ends the uplinks. The state file keeps everything.
    pub async fn stop(&self) {
        let slots = std::mem::take(&mut *self.slots());
        for slot in slots.into_values() {
            end(slot.uplink).await;
        }
    }
}

/// The record of a switch that the configuration names, given what is known of it.
pub fn merged(spec: &SwitchSpec, known: Option<&SwitchRecord>) -> SwitchRecord {
    let now = match known {
        Some(SwitchRecord { configured: Some(base), now }) => SwitchSpec::three_way(base, spec, now),
        _ => spec.clone(),
    };
    SwitchRecord { configured: Some(spec.clone()), now }
}

fn no_queue(name: &str, queue: u16) -> Refusal {
    Refusal::missing(
        format!("switch {name} has no queue {queue}"),
        "a switch with an uplink has queue 0, one without has none",
    )
}

fn missing(name: &str) -> Refusal {
    Refusal::missing(
        format!("there is no switch {name}"),
        format!("see `ioplane switch list`; `ioplane switch add {name}` makes it"),
    )
}

/// Brings a TAP device to rest and unplugs it. Blocks.
pub fn end_tap(running: Running<Tap>) -> Result<(), Refusal> {
    running
        .quiesce(Instant::now() + REST)
        .map(drop)
        .map_err(|missed| Refusal::failed(format!("{missed:?}"), "an I/O core does not turn"))
}

/// Brings an uplink to rest and unplugs it.
async fn end(uplink: Option<Running<Tap>>) {
    let Some(running) = uplink else { return };
    if let Err(refused) = super::served::blocking(move || end_tap(running)).await {
        tracing::warn!(error = refused.error, "an uplink did not become quiescent");
    }
}

impl Slot {
    /// Somebody has deleted the device behind its uplink.
    fn is_deleted(&self) -> bool {
        self.uplink.as_ref().is_some_and(|uplink| !uplink.device().port().is_up())
    }

    /// Why it has no uplink although it should have one.
    fn broken(&self) -> Option<Refusal> {
        let deleted = self.is_deleted().then(|| {
            let tap = self.record.now.uplink.as_deref().unwrap_or_default();
            let remedy =
                format!("make it again: ip tuntap add dev {tap} mode tap vnet_hdr; it is opened then");
            Refusal::failed(format!("uplink {tap}: the device has been deleted"), remedy)
        });
        deleted.or_else(|| self.failed.as_ref().map(|retry| retry.why.clone()))
    }

    /// The same, and when it is tried again.
    fn retry_state(&mut self) -> Option<&RetryState> {
        let why = self.broken()?;
        match &self.failed {
            Some(retry) if retry.why.error == why.error => {}
            _ => self.failed = Some(RetryState::new(why)),
        }
        self.failed.as_ref()
    }

    fn report(&mut self) -> SwitchReport {
        let broken = self.broken();
        let retry = self.retry_state().map(RetryState::report);
        let mut ports: Vec<PortReport> = self.switch.ports().into_iter().map(readings::port).collect();
        ports.sort_by(|a, b| (a.uplink, &a.name).cmp(&(b.uplink, &b.name)));
        SwitchReport {
            name: self.record.now.name.clone(),
            origin: if self.record.configured.is_some() { "config" } else { "added" }.to_owned(),
            uplink: self.record.now.uplink.clone(),
            uplink_core: self.uplink.as_ref().and_then(|uplink| uplink.core_of(0)).map(|core| core.0),
            error: broken.as_ref().map(|broken| broken.error.clone()),
            remedy: broken.map(|broken| broken.remedy),
            retry,
            learned: ports.iter().map(|port| port.learned).sum(),
            ports,
        }
    }
}

impl From<NetworkError> for Refusal {
    fn from(error: NetworkError) -> Self {
        let text = error.to_string();
        match error {
            NetworkError::Os { .. } => Refusal::failed(
                text,
                "make the interface first: ip tuntap add dev tap0 mode tap vnet_hdr; or see `ioplane doctor`",
            ),
            NetworkError::NoSuchPort { .. } => Refusal::missing(text, "see `ioplane switch list`"),
            NetworkError::NoSlot { .. } | NetworkError::NameTaken { .. } => {
                Refusal::conflict(text, "see `ioplane switch list`")
            }
            NetworkError::Captured { .. } => Refusal::conflict(
                text,
                "end the other `ioplane capture` (Ctrl-C), or wait for its --for or --count, then try again",
            )
            .coded(Code::InUse),
            NetworkError::Pairs { .. }
            | NetworkError::Vlan { .. }
            | NetworkError::Mac { .. }
            | NetworkError::CaptureSize { .. } => Refusal::invalid(text, "give another value"),
        }
    }
}
