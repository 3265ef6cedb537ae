//! Reading the configuration again, whole or not at all.
//!
//! Problems that can be seen beforehand refuse it before anything has changed. New disks and NICs are opened first: if one
//! cannot be, those opened before it are given up again. They go and change last, and only while no guest uses them.

mod steps;

use std::sync::Arc;

use ioplane_api::report::EventWord;
use ioplane_api::spec::{CoreSpec, Flaw, ServedSpec, SpecFields};

use super::Daemon;
use super::disk::Disk;
use super::exports::PublishedDisk;
use super::functions::Card;
use super::nic::Nic;
use super::registry::Registered;
use super::served::{ServedKind, blocking};
use super::state_file::{Entries, FunctionRecord, GroupRecord, Record, SwitchRecord};
use crate::config::{Config, Problem, Problems};
use crate::refusal::Refusal;
use steps::Steps;

/// What a reload would do.
struct ReloadPlan {
    disks: Steps<Disk>,
    exports: Steps<PublishedDisk>,
    nics: Steps<Nic>,
    functions: Steps<Card>,
    groups: Vec<GroupRecord>,
    remove_groups: Vec<String>,
    switches: Vec<SwitchRecord>,
    remove_switches: Vec<String>,
    start: Vec<CoreSpec>,
    set: Vec<CoreSpec>,
    retire: Vec<u32>,
}

impl Daemon {
    /// Reads the configuration again and makes what is served as it says. What was added or changed at run time stays, unless
    /// the configuration says something new about it. On an error everything is as it was; says what was done.
    pub async fn reload(self: &Arc<Self>) -> Result<Vec<String>, Problems> {
        let _one = self.reloading.lock().await;
        let file = self.config().file.clone();
        // Groups may have to be asked for over a network.
        let config = tokio::task::block_in_place(|| Config::read(&file))?;
        config.log_warnings();
        let plan = self.plan(&config).await?;
        let done = self.carry_out(&config, plan).await?;
        *self.config.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(config);
        let text = if done.is_empty() { "nothing to do".to_owned() } else { done.join("; ") };
        self.tell(EventWord::Reloaded, "", "", &text);
        self.pool.look_soon();
        Ok(done)
    }

    async fn plan(&self, config: &Config) -> Result<ReloadPlan, Problems> {
        let (old, mut problems) = (self.config(), Vec::new());
        let known = self.disks.records();
        let failed = self.disks.failed();
        // One that has failed and has not changed is tried again, and may fail again.
        config.images(|disk| match known.get(&disk.name) {
            Some(record) => {
                failed.contains(&disk.name) && Record::configured(disk, Some(record)).now != record.now
            }
            None => true,
        })?;
        let place = &config.daemon_place;
        for (field, differs) in [
            ("socket", old.daemon.socket != config.daemon.socket),
            ("run_dir", old.daemon.run_dir != config.daemon.run_dir),
            ("identity", old.daemon.identity != config.daemon.identity),
            ("state_dir", old.daemon.state_dir != config.daemon.state_dir),
            ("claim_wait_s", old.daemon.claim_wait_s != config.daemon.claim_wait_s),
            ("metrics", old.daemon.metrics != config.daemon.metrics),
            ("socket_group", old.daemon.access.group != config.daemon.access.group),
            ("socket_mode", config.daemon.access.asks_other_bits(old.daemon.access)),
        ] {
            if differs {
                let reason = format!("{field} cannot be changed while the daemon runs");
                problems.push(place.problem(Flaw::new(field, reason, "put it back, or restart the daemon")));
            }
        }
        let spec = |config: &Config| config.directory.as_ref().map(|(spec, _)| spec.clone());
        if spec(&old) != spec(config) {
            let place = config.directory.as_ref().map_or(place, |(_, place)| place);
            let reason = "the directory cannot be changed while the daemon runs";
            problems.push(place.problem(Flaw::new("at", reason, "put it back, or restart the daemon")));
        }
        let mut plan = ReloadPlan {
            disks: Steps::plan(self, config, &mut problems).await,
            exports: Steps::plan(self, config, &mut problems).await,
            nics: Steps::plan(self, config, &mut problems).await,
            functions: Steps::plan(self, config, &mut problems).await,
            groups: self.groups.merged(config),
            remove_groups: self.groups.gone(config),
            switches: self.switches.merged(config),
            remove_switches: self.switches.gone(config),
            start: Vec::new(),
            set: Vec::new(),
            retire: Vec::new(),
        };
        self.plan_cores(config, &mut plan, &mut problems);
        self.plan_groups(config, &plan, &mut problems);
        for name in &plan.remove_switches {
            // Those of the configuration name switches of the configuration.
            let mut nics = self.nics.records().into_values();
            if let Some(nic) = nics.find(|nic| nic.now.switch == *name && nic.configured.is_none()) {
                problems.push(Problem {
                    line: 0,
                    reason: format!(
                        "switch {name} is gone from the configuration, and nic {} is plugged in",
                        nic.now.name
                    ),
                    remedy: format!("`ioplane nic remove {}` first, or put the switch back", nic.now.name),
                });
            }
            let mut functions = self.functions.records().into_values();
            let plugged = |one: &FunctionRecord| one.now.switch() == Some(name) && one.configured.is_none();
            if let Some(FunctionRecord { now, .. }) = functions.find(plugged) {
                problems.push(Problem {
                    line: 0,
                    reason: format!(
                        "switch {name} is gone from the configuration, and PCI function {} is plugged in",
                        now.name
                    ),
                    remedy: format!("`ioplane pci remove {}` first, or put the switch back", now.name),
                });
            }
        }
        if problems.is_empty() { Ok(plan) } else { Err(Problems::new(&config.file, problems)) }
    }

    /// Notes the devices that would be left in a group that is gone from the configuration.
    fn plan_groups(&self, config: &Config, plan: &ReloadPlan, problems: &mut Vec<Problem>) {
        fn left<K: Registered>(
            daemon: &Daemon,
            config: &Config,
            group: &str,
        ) -> Option<(&'static str, String)> {
            let inside = |name: &str, record: &Record<K::Spec>| {
                let said = K::configured(config).iter().find(|(spec, _)| spec.name() == name);
                match (said, &record.configured) {
                    (Some((spec, _)), _) => Record::configured(spec, Some(record)).now.group() == Some(group),
                    (None, None) => record.now.group() == Some(group),
                    (None, Some(_)) => false,
                }
            };
            let records = K::registry(daemon).records();
            let name = records.into_iter().find(|(name, record)| inside(name, record))?.0;
            Some((K::NAME, name))
        }
        for group in &plan.remove_groups {
            let left = left::<Disk>(self, config, group).or_else(|| left::<Nic>(self, config, group));
            if let Some((kind, name)) = left {
                problems.push(Problem {
                    line: 0,
                    reason: format!(
                        "group {group} is gone from the configuration, and {kind} {name} is in it"
                    ),
                    remedy: format!("`ioplane {kind} set {name} --group ''` first, or put the group back"),
                });
            }
        }
    }

    fn plan_cores(&self, config: &Config, plan: &mut ReloadPlan, problems: &mut Vec<Problem>) {
        let recorded = self.state_file.entries().cores;
        let running = self.cores.all();
        for (spec, place) in &config.cores {
            let base = recorded.get(&spec.id).and_then(|record| record.configured.as_ref());
            let Some(now) = running.iter().find(|core| core.id == spec.id) else {
                // One that was retired stays so unless the configuration says something new.
                if base != Some(spec) {
                    plan.start.push(spec.clone());
                }
                continue;
            };
            let next = CoreSpec::three_way(base.unwrap_or(now), spec, now);
            if (next.cpu, next.budget, next.yield_policy) != (now.cpu, now.budget, now.yield_policy) {
                let reason =
                    format!("core {}: cpu, budget and yield_policy cannot be changed while it runs", spec.id);
                let remedy =
                    "put it back and use `ioplane core add` and `core retire`, or restart the daemon";
                problems.push(place.problem(Flaw::new("id", reason, remedy)));
            } else if next != *now {
                plan.set.push(next);
            }
        }
        for (id, record) in &recorded {
            let gone = !config.cores.iter().any(|(spec, _)| spec.id == *id);
            let Some(now) =
                running.iter().find(|core| core.id == *id).filter(|_| record.configured.is_some() && gone)
            else {
                continue;
            };
            let queues =
                self.core_reports().iter().find(|core| core.id == now.id).map_or(0, |core| core.queues);
            if queues > 0 {
                problems.push(Problem {
                    line: 0,
                    reason: format!("core {id} is gone from the configuration, and serves {queues} queues"),
                    remedy: format!("move them away first: `ioplane core drain {id}`"),
                });
            } else {
                plan.retire.push(*id);
            }
        }
    }

    async fn carry_out(
        self: &Arc<Self>,
        config: &Config,
        mut plan: ReloadPlan,
    ) -> Result<Vec<String>, Problems> {
        let mut done = Vec::new();
        let refuse = |line: Problem| Problems::new(&config.file, vec![line]);
        let core_problem = |id: u32, refused: Refusal| {
            let place = config.cores.iter().find(|(core, _)| core.id == id).map(|(_, place)| place.line);
            refuse(Problem {
                line: place.unwrap_or(0),
                reason: format!("core {id}: {refused}"),
                remedy: refused.remedy.clone(),
            })
        };
        let mut started = Vec::new();
        for spec in plan.start {
            let (id, cores) = (spec.id, self.cores.clone());
            let outcome = blocking(move || cores.start(spec.clone(), true, Some(spec))).await;
            match outcome {
                Ok(id) => started.push(id),
                Err(refused) => {
                    self.retire(started).await;
                    return Err(core_problem(id, refused));
                }
            }
        }
        let changing = self.groups.changing.lock().await;
        let known = self.groups.records();
        for record in plan.groups {
            let name = record.now.name.clone();
            let outcome = match self.groups.set(record) {
                Ok(true) => self.regroup(&name).await.map(|()| true),
                outcome => outcome,
            };
            match outcome {
                Ok(false) => {}
                Ok(true) => {
                    let what = if known.contains_key(&name) { "changed" } else { "added" };
                    done.push(format!("group {name} {what}"));
                }
                Err(refused) => {
                    self.retire(started).await;
                    let place = config.groups.iter().find(|(group, _)| group.name == name);
                    return Err(refuse(Problem {
                        line: place.map_or(0, |(_, place)| place.line),
                        reason: format!("group {name}: {refused}"),
                        remedy: refused.remedy,
                    }));
                }
            }
        }
        drop(changing);
        for record in plan.switches {
            let name = record.now.name.clone();
            match self.switches.set(record).await {
                Ok(false) => {}
                Ok(true) => done.push(format!("switch {name} set up")),
                Err(refused) => {
                    self.retire(started).await;
                    let line = config.switches.iter().find(|(switch, _)| switch.name == name);
                    return Err(refuse(Problem {
                        line: line.map_or(0, |(_, place)| place.of("uplink")),
                        reason: format!("switch {name}: {refused}"),
                        remedy: refused.remedy,
                    }));
                }
            }
        }
        let added = async {
            plan.disks.add(self, config).await?;
            plan.exports.add(self, config).await?;
            plan.nics.add(self, config).await?;
            plan.functions.add(self, config).await
        };
        if let Err(problem) = added.await {
            plan.nics.give_up(self).await;
            plan.exports.give_up(self).await;
            plan.disks.give_up(self).await;
            self.retire(started).await;
            return Err(refuse(problem));
        }
        done.extend(started.iter().map(|id| format!("core {id} started")));

        // From here on each step stands for itself; what fails is said, and the rest is done.
        let (mut failed, mut lost) = (Vec::new(), Vec::new());
        plan.disks.rest(self, config, &mut done, &mut failed, &mut lost).await;
        plan.exports.rest(self, config, &mut done, &mut failed, &mut lost).await;
        plan.nics.rest(self, config, &mut done, &mut failed, &mut lost).await;
        plan.functions.rest(self, config, &mut done, &mut failed, &mut lost).await;
        for name in plan.remove_switches {
            match self.switches.remove(&name, false).await {
                Ok(()) => done.push(format!("switch {name} removed")),
                Err(refused) => failed.push(Problem {
                    line: 0,
                    reason: format!("switch {name}: {refused}"),
                    remedy: refused.remedy,
                }),
            }
        }
        let changing = self.groups.changing.lock().await;
        for name in plan.remove_groups {
            match self.end_group(&name) {
                Ok(()) => done.push(format!("group {name} removed")),
                Err(refused) => failed.push(Problem {
                    line: 0,
                    reason: format!("group {name}: {refused}"),
                    remedy: refused.remedy,
                }),
            }
        }
        drop(changing);
        if self.config().pool() != config.pool() {
            done.push("the pool changed".to_owned());
        }
        for spec in plan.set {
            let (id, cores) = (spec.id, self.cores.clone());
            let set = move || cores.set(Some(id), |core| *core = spec.clone());
            match blocking(set).await {
                Ok(()) => done.push(format!("core {id} changed")),
                Err(refused) => failed.extend(core_problem(id, refused).list),
            }
        }
        for id in plan.retire {
            let cores = self.cores.clone();
            match blocking(move || cores.retire(id)).await {
                Ok(()) => done.push(format!("core {id} retired")),
                Err(refused) => failed.extend(core_problem(id, refused).list),
            }
        }
        self.settle(config);
        self.sweep().await;
        if failed.is_empty() {
            Ok(done)
        } else {
            Err(Problems { lost, ..Problems::new(&config.file, failed) })
        }
    }

    async fn retire(&self, started: Vec<u32>) {
        for id in started {
            let cores = self.cores.clone();
            let _ = blocking(move || cores.retire(id)).await;
        }
    }

    /// Writes down what the configuration says now of cores, and forgets those of which it says nothing any more.
    pub(super) fn settle(&self, config: &Config) {
        let kept = self.state_file.change(|entries| {
            for record in entries.cores.values_mut() {
                record.configured = None;
            }
            for (spec, _) in &config.cores {
                if let Some(record) = entries.cores.get_mut(&spec.id) {
                    record.configured = Some(spec.clone());
                }
            }
            entries.cores.retain(|_, record| record.now.is_some() || record.configured.is_some());
            fn keep<K: ServedKind>(entries: &mut Entries, config: &Config) {
                let said = |name: &str| K::configured(config).iter().find(|(spec, _)| spec.name() == name);
                K::removed(entries).retain(|name, spec| said(name).is_some_and(|(now, _)| now == spec));
            }
            keep::<Disk>(entries, config);
            keep::<Nic>(entries, config);
            keep::<Card>(entries, config);
            entries.removed_switches.retain(|_, spec| config.switches.iter().any(|(now, _)| now == spec));
        });
        if let Err(error) = kept {
            tracing::error!(%error, "the state file");
        }
    }
}
