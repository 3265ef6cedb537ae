//! What a reload does with the disks, and with the NICs.

use ioplane_api::spec::{Flaw, ServedSpec, SpecFields};

use crate::Daemon;
use crate::config::{Config, Place, Problem};
use crate::refusal::Refusal;
use crate::registry::{OnFailure, Registered, Registry};
use crate::served::ServedKind;
use crate::state_file::Record;

pub struct Steps<K: ServedKind> {
    add: Vec<Record<K::Spec>>,
    added: Vec<String>,
    adopt: Vec<Record<K::Spec>>,
    live: Vec<Record<K::Spec>>,
    /// Those that could not be served, and have not changed.
    again: Vec<Record<K::Spec>>,
    change: Vec<Record<K::Spec>>,
    remove: Vec<String>,
}

impl<K: Registered> Steps<K> {
    /// Decides on them; what cannot be done is noted.
    pub async fn plan(daemon: &Daemon, config: &Config, problems: &mut Vec<Problem>) -> Self {
        let registry = K::registry(daemon);
        let (known, failed) = (registry.records(), registry.failed());
        let mut steps = Steps {
            add: Vec::new(),
            added: Vec::new(),
            adopt: Vec::new(),
            live: Vec::new(),
            again: Vec::new(),
            change: Vec::new(),
            remove: Vec::new(),
        };
        for (spec, place) in K::configured(config) {
            match known.get(spec.name()) {
                None => steps.add.push(Record::configured(spec, None)),
                Some(record) => {
                    let next = Record::configured(spec, Some(record));
                    let failed = failed.iter().any(|name| name == spec.name());
                    problems.extend(steps.keep(daemon, record, next, failed, place).await);
                }
            }
        }
        for (name, record) in &known {
            let configured = K::configured(config).iter().any(|(spec, _)| spec.name() == name);
            if record.configured.is_none() || configured {
                continue;
            }
            if registry.in_use(name).await {
                let (kind, command) = (K::NAME, K::COMMAND);
                problems.push(Problem {
                    line: 0,
                    reason: format!("{kind} {name} is gone from the configuration, and a guest is using it"),
                    remedy: format!(
                        "unplug it or shut the guest down first, or `ioplane {command} remove {name} --force`"
                    ),
                });
            } else {
                steps.remove.push(name.clone());
            }
        }
        steps
    }

    /// What to do with one that is there.
    async fn keep(
        &mut self,
        daemon: &Daemon,
        record: &Record<K::Spec>,
        next: Record<K::Spec>,
        failed: bool,
        place: &Place,
    ) -> Option<Problem> {
        if !failed && next.now == record.now {
            if next != *record {
                self.adopt.push(next);
            }
            return None;
        }
        if failed && next.now == record.now {
            self.again.push(next);
            return None;
        }
        let name = record.now.name();
        let differing = next.now.differing(&record.now);
        let problem = |reason: &str, remedy: &str| {
            let reason = format!("{} {name}: {reason}", K::NAME);
            Some(place.problem(Flaw::new(differing.first().copied().unwrap_or("name"), reason, remedy)))
        };
        if K::registry(daemon).served(name).is_err() && !failed {
            return problem("it is still being opened", "try again when it is served");
        }
        if !failed && K::lives_on(&record.now, &next.now) {
            self.live.push(next);
            return None;
        }
        if let Some((reason, remedy)) = K::loses(record).filter(|_| !failed) {
            return problem(reason, remedy);
        }
        if K::registry(daemon).in_use(name).await {
            return problem("a guest is using it, and this change would take it away", K::LET_GO);
        }
        self.change.push(next);
        None
    }

    /// Adds those that are new. If one cannot be, those before it are given up again.
    pub async fn add(&mut self, daemon: &Daemon, config: &Config) -> Result<(), Problem> {
        for record in std::mem::take(&mut self.add) {
            let name = record.now.name().to_owned();
            if let Err(refused) = K::registry(daemon).add(record, OnFailure::Forget).await {
                self.give_up(daemon).await;
                return Err(config.served_problem(K::NAME, &name, refused.error, refused.remedy));
            }
            self.added.push(name);
        }
        Ok(())
    }

    /// Takes away again what was added.
    pub async fn give_up(&mut self, daemon: &Daemon) {
        for name in self.added.drain(..) {
            let _ = K::registry(daemon).remove(&name, true, false).await;
        }
    }

    /// Everything but adding. Each step stands for itself; what fails is said, and the rest is done.
    pub async fn rest(
        self,
        daemon: &Daemon,
        config: &Config,
        done: &mut Vec<String>,
        failed: &mut Vec<Problem>,
        lost: &mut Vec<String>,
    ) {
        let (kind, registry) = (K::NAME, K::registry(daemon));
        done.extend(self.added.iter().map(|name| format!("{kind} {name} added")));
        for record in self.adopt {
            let name = record.now.name().to_owned();
            let outcome = registry.served(&name).and_then(|one| one.note().adopt(record.configured));
            if let Err(refused) = outcome {
                failed.push(config.served_problem(kind, &name, refused.error, refused.remedy));
            }
        }
        for record in self.again {
            let name = record.now.name().to_owned();
            registry.configure(&name, record.configured);
            match registry.retry_now(&name).await {
                Ok(()) => done.push(format!("{kind} {name} served")),
                Err(refused) => done.push(format!("{kind} {name} still not served: {refused}")),
            }
        }
        let mut note = |name: &str, outcome: Result<(), Refusal>, what: &str| match outcome {
            Ok(()) => done.push(format!("{kind} {name} {what}")),
            Err(refused) => failed.push(config.served_problem(kind, name, refused.error, refused.remedy)),
        };
        for record in self.live {
            let name = record.now.name().to_owned();
            let outcome = match registry.served(&name) {
                Ok(one) => one.become_next(record).await,
                Err(refused) => Err(refused),
            };
            note(&name, outcome, "changed");
        }
        for record in self.change {
            let name = record.now.name().to_owned();
            note(&name, change(registry, record, lost).await, "changed");
        }
        for name in self.remove {
            let outcome = registry.remove(&name, false, false).await;
            note(&name, outcome, "removed");
        }
    }
}

/// Serves one as `next` has it. If that cannot be done it is served as before: nobody uses it, and what is open for it can be closed
/// and opened again. The new one cannot be opened first: it may be the same image, and has the same name and socket.
async fn change<K: ServedKind>(
    registry: &Registry<K>,
    next: Record<K::Spec>,
    lost: &mut Vec<String>,
) -> Result<(), Refusal> {
    let name = next.now.name().to_owned();
    let before = registry.served(&name).ok().map(|one| one.note().read());
    registry.make_way(&name, &next.now).await?;
    // One that could not be served before either is kept as the configuration has it now.
    let Some(before) = before else { return registry.add(next, OnFailure::Keep).await };
    let Err(refused) = registry.add(next, OnFailure::Forget).await else { return Ok(()) };
    let Err(more) = registry.add(before, OnFailure::Keep).await else { return Err(refused) };
    lost.push(format!("{} {name}", K::NAME));
    Err(Refusal { error: format!("{}; and as before: {more}", refused.error), ..refused })
}
