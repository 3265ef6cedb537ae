//! Reading the configuration again, whole or not at all.
//!
//! Problems that can be seen beforehand refuse it before anything has changed. New disks are opened first: if one cannot be,
//! those opened before it are given up again. Disks go and change last, and only while no guest uses them.

use std::sync::Arc;

use super::Daemon;
use super::disks::OnFailure;
use super::ledger::{DiskRecord, ThreeWay, disk_record};
use crate::config::{Config, Problem, Problems};
use crate::refusal::Refusal;
use crate::spec::{BackingSpec, CoreSpec, Flaw};

/// What a reload would do.
#[derive(Default)]
struct Plan {
    add: Vec<DiskRecord>,
    adopt: Vec<DiskRecord>,
    change: Vec<DiskRecord>,
    remove: Vec<String>,
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
        let config = Config::read(&file)?;
        let plan = self.plan(&config).await?;
        let done = self.carry_out(&config, plan).await?;
        *self.config.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Arc::new(config);
        Ok(done)
    }

    async fn plan(&self, config: &Config) -> Result<Plan, Problems> {
        let (old, mut problems, mut plan) = (self.config(), Vec::new(), Plan::default());
        let known = self.disks.records();
        let failed = self.disks.failed();
        config.images(|name| !known.contains_key(name) || failed.iter().any(|f| f == name))?;
        let place = &config.daemon_place;
        for (field, differs) in [
            ("socket", old.daemon.socket != config.daemon.socket),
            ("run_dir", old.daemon.run_dir != config.daemon.run_dir),
            ("metrics", old.daemon.metrics != config.daemon.metrics),
        ] {
            if differs {
                let reason = format!("{field} cannot be changed while the daemon runs");
                problems.push(place.problem(Flaw::new(field, reason, "put it back, or restart the daemon")));
            }
        }
        self.plan_cores(config, &mut plan, &mut problems);
        for (spec, place) in &config.disks {
            let Some(record) = known.get(&spec.name) else {
                plan.add.push(disk_record(spec, None));
                continue;
            };
            let next = disk_record(spec, Some(record));
            if failed.contains(&spec.name) || next.now != record.now {
                let mut problem = |reason: String, remedy: &str| {
                    problems.push(place.problem(Flaw::new(
                        "name",
                        format!("disk {}: {reason}", spec.name),
                        remedy,
                    )));
                };
                if self.disks.served(&spec.name).is_err() && !failed.contains(&spec.name) {
                    problem("it is still being opened".to_owned(), "try again when it is served");
                } else if matches!(record.now.backing, BackingSpec::Memory { .. })
                    && !failed.contains(&spec.name)
                {
                    let remedy =
                        "if it may be lost, `ioplane disk remove` it first; or put the configuration back";
                    problem("changing a disk in memory would lose its content".to_owned(), remedy);
                } else if self.in_use(&spec.name).await {
                    let remedy = "unplug it or shut the guest down first; a backing is exchanged by `ioplane disk replace`";
                    problem("a guest is using it, and this change would take it away".to_owned(), remedy);
                } else {
                    plan.change.push(next);
                }
            } else if next != *record {
                plan.adopt.push(next);
            }
        }
        for (name, record) in &known {
            if record.configured.is_none() || config.disk(name).is_some() {
                continue;
            }
            if self.in_use(name).await {
                problems.push(Problem {
                    line: 0,
                    reason: format!("disk {name} is gone from the configuration, and a guest is using it"),
                    remedy: format!(
                        "unplug it or shut the guest down first, or `ioplane disk remove {name} --force`"
                    ),
                });
            } else {
                plan.remove.push(name.clone());
            }
        }
        if problems.is_empty() { Ok(plan) } else { Err(Problems::new(&config.file, problems)) }
    }

    fn plan_cores(&self, config: &Config, plan: &mut Plan, problems: &mut Vec<Problem>) {
        let recorded = self.ledger.entries().cores;
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
            if (next.cpu, next.budget, next.manners) != (now.cpu, now.budget, now.manners) {
                let reason =
                    format!("core {}: cpu, budget and manners cannot be changed while it runs", spec.id);
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
            let seats =
                self.cores.report().iter().find(|core| core.id == now.id).map_or(0, |core| core.seats);
            if seats > 0 {
                problems.push(Problem {
                    line: 0,
                    reason: format!("core {id} is gone from the configuration, and serves {seats} queues"),
                    remedy: "move them away first: `ioplane core move DISK QUEUE CORE`".to_owned(),
                });
            } else {
                plan.retire.push(*id);
            }
        }
    }

    async fn in_use(&self, name: &str) -> bool {
        match self.disks.served(name) {
            Ok(disk) => disk.in_use().await,
            Err(_) => false,
        }
    }

    async fn carry_out(self: &Arc<Self>, config: &Config, plan: Plan) -> Result<Vec<String>, Problems> {
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
            let outcome = super::disk::blocking(move || cores.start(spec.clone(), true, Some(spec))).await;
            match outcome {
                Ok(id) => started.push(id),
                Err(refused) => {
                    self.retire(started).await;
                    return Err(core_problem(id, refused));
                }
            }
        }
        let mut added: Vec<String> = Vec::new();
        for record in plan.add {
            let name = record.now.name.clone();
            if let Err(refused) = self.disks.add(record, OnFailure::Forget).await {
                for name in &added {
                    let _ = self.disks.remove(name, true, false).await;
                }
                self.retire(started).await;
                return Err(refuse(config.disk_problem(&name, refused.error, refused.remedy)));
            }
            added.push(name);
        }
        done.extend(started.iter().map(|id| format!("core {id} started")));
        done.extend(added.iter().map(|name| format!("disk {name} added")));

        // From here on each step stands for itself; what fails is said, and the rest is done.
        let mut failed = Vec::new();
        for record in plan.adopt {
            let outcome =
                self.disks.served(&record.now.name).and_then(|disk| disk.adopt(record.configured.clone()));
            if let Err(refused) = outcome {
                failed.push(config.disk_problem(&record.now.name, refused.error, refused.remedy));
            }
        }
        for record in plan.change {
            let name = record.now.name.clone();
            let outcome = match self.disks.remove(&name, false, false).await {
                Ok(()) => self.disks.add(record, OnFailure::Keep).await,
                Err(refused) => Err(refused),
            };
            match outcome {
                Ok(()) => done.push(format!("disk {name} changed")),
                Err(refused) => failed.push(config.disk_problem(&name, refused.error, refused.remedy)),
            }
        }
        for name in plan.remove {
            match self.disks.remove(&name, false, false).await {
                Ok(()) => done.push(format!("disk {name} removed")),
                Err(refused) => failed.push(config.disk_problem(&name, refused.error, refused.remedy)),
            }
        }
        for spec in plan.set {
            let (id, cores) = (spec.id, self.cores.clone());
            let set =
                move || cores.set(Some(id), |core| (core.notify, core.spin_us) = (spec.notify, spec.spin_us));
            match super::disk::blocking(set).await {
                Ok(()) => done.push(format!("core {id} changed")),
                Err(refused) => failed.extend(core_problem(id, refused).list),
            }
        }
        for id in plan.retire {
            let cores = self.cores.clone();
            match super::disk::blocking(move || cores.retire(id)).await {
                Ok(()) => done.push(format!("core {id} retired")),
                Err(refused) => failed.extend(core_problem(id, refused).list),
            }
        }
        self.settle(config);
        if failed.is_empty() { Ok(done) } else { Err(Problems::new(&config.file, failed)) }
    }

    async fn retire(&self, started: Vec<u32>) {
        for id in started {
            let cores = self.cores.clone();
            let _ = super::disk::blocking(move || cores.retire(id)).await;
        }
    }

    /// Writes down what the configuration says now of cores, and forgets those of which it says nothing any more.
    pub(super) fn settle(&self, config: &Config) {
        let kept = self.ledger.change(|entries| {
            for record in entries.cores.values_mut() {
                record.configured = None;
            }
            for (spec, _) in &config.cores {
                if let Some(record) = entries.cores.get_mut(&spec.id) {
                    record.configured = Some(spec.clone());
                }
            }
            entries.cores.retain(|_, record| record.now.is_some() || record.configured.is_some());
            entries.removed.retain(|name, spec| config.disk(name) == Some(spec));
        });
        if let Err(error) = kept {
            tracing::error!(%error, "the state file");
        }
    }
}
