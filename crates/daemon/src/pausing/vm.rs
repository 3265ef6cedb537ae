//! One VM, by its monitor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ioplane_api::report::{EventWord, VmPauseReport, VmPauseWord};
use ioplane_nbd::import::Import;
use ioplane_storage::Backing;
use tokio::sync::oneshot::{self, error::TryRecvError};

use super::monitor::{self, PAUSED, QmpFailure, RUNNING, VmFound};
use super::plan::{DiskSeen, LinkSeen, Next, next};
use super::probe::Link;
use crate::Daemon;
use crate::state_file::{PauseRecord, PauseStage};

/// From a failure to the next attempt, and at most, as it doubles.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);
/// How often a VM that is paused is looked at: somebody may have continued it.
const LOOK: Duration = Duration::from_secs(10);
/// How long a disk may be missing before it counts as removed: a reload removes and adds.
const MISSING: Duration = Duration::from_secs(3);

/// What a monitor is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doing {
    Pause,
    GoOn,
    Look,
}

struct Call {
    doing: Doing,
    /// The disks that hold the VM.
    disks: BTreeSet<String>,
    outcome: oneshot::Receiver<Result<VmFound, QmpFailure>>,
}

/// See the module.
pub struct PausableVm {
    socket: PathBuf,
    disks: BTreeMap<String, Link>,
    /// Disks that hold the VM and are not there, since when.
    missing: BTreeMap<String, Instant>,
    call: Option<Call>,
    /// What could not be done, and why.
    trouble: Option<(Doing, String)>,
    /// Why nothing is to be done now.
    remark: Option<String>,
    failures: u32,
    /// When something may be done again.
    due: Instant,
    looked: Instant,
}

impl PausableVm {
    /// One of which nothing is known yet.
    pub fn new(socket: &Path) -> Self {
        let now = Instant::now();
        let (disks, missing) = Default::default();
        let (call, trouble, remark) = (None, None, None);
        PausableVm {
            socket: socket.to_owned(),
            disks,
            missing,
            call,
            trouble,
            remark,
            failures: 0,
            due: now,
            looked: now,
        }
    }

    /// Whether its monitor is being talked to.
    pub fn is_talking(&self) -> bool {
        self.call.is_some()
    }

    /// Looks at its disks, and does what is next. `wanted`: its disks whose policy is to pause it, and when. Never waits.
    pub fn tick(
        &mut self,
        daemon: &Arc<Daemon>,
        record: Option<&PauseRecord>,
        wanted: &BTreeMap<String, Duration>,
    ) {
        if let Some((call, outcome)) = self.take_outcome() {
            // What it changes is read before the next step.
            return self.conclude(daemon, record, call, outcome);
        }
        self.disks.retain(|name, _| {
            let stays = wanted.contains_key(name);
            // It is not of this VM any more, or has another policy.
            if let Some(import) = import_of(daemon, name).filter(|_| !stays) {
                import.keep_claim(false);
            }
            stays
        });
        let seen: BTreeMap<String, DiskSeen> = wanted
            .iter()
            .map(|(name, timeout)| {
                let link = self.see(daemon, name, record.is_some());
                (name.clone(), DiskSeen { timeout: *timeout, link })
            })
            .collect();
        let gone = self.gone(record, wanted);
        if self.call.is_none() {
            self.proceed(daemon, record, &seen, &gone);
        }
        self.show(daemon, record, wanted);
    }

    fn see(&mut self, daemon: &Daemon, name: &str, asks: bool) -> LinkSeen {
        let link = self.disks.entry(name.to_owned()).or_default();
        import_of(daemon, name).map_or(LinkSeen::Unknown, |import| link.look(&import, asks))
    }

    /// Disks of the record that hold nothing any more.
    fn gone(
        &mut self,
        record: Option<&PauseRecord>,
        wanted: &BTreeMap<String, Duration>,
    ) -> BTreeSet<String> {
        let holders = record.map(|record| &record.disks).into_iter().flatten();
        let away: BTreeSet<&String> = holders.filter(|name| !wanted.contains_key(*name)).collect();
        self.missing.retain(|name, _| away.contains(name));
        for name in away {
            self.missing.entry(name.clone()).or_insert_with(Instant::now);
        }
        self.missing
            .iter()
            .filter(|(_, since)| since.elapsed() >= MISSING)
            .map(|(name, _)| name.clone())
            .collect()
    }

    fn proceed(
        &mut self,
        daemon: &Arc<Daemon>,
        record: Option<&PauseRecord>,
        seen: &BTreeMap<String, DiskSeen>,
        gone: &BTreeSet<String>,
    ) {
        let step = next(record, seen, gone);
        if record.is_none() && step == Next::Wait {
            self.settle();
        }
        match (step, record) {
            (Next::Hold(disks), Some(record)) => {
                self.note(daemon, Some(PauseRecord { disks, ..record.clone() }));
            }
            (Next::Forget, _) => {
                tracing::info!(qmp = %self.socket.display(), "the disks of a VM that was left alone are back");
                self.note(daemon, None);
                self.settle();
            }
            // Nothing is begun that an upgrade would cut off.
            _ if Instant::now() < self.due || daemon.may_change().is_err() => {}
            (Next::Pause(disks), _) => self.pause(daemon, disks),
            (Next::GoOn, Some(record)) => {
                let (socket, known) = (self.socket.clone(), record.monitor.clone());
                self.begin(Doing::GoOn, record.disks.clone(), move || {
                    monitor::go_on(&socket, known.as_deref())
                });
            }
            (Next::Look, Some(record)) => self.look(record),
            (Next::Wait, Some(record)) if record.stage == PauseStage::Paused => {
                let started =
                    self.disks.values_mut().map(Link::take_started).filter(|started| *started).count() > 0;
                if started || self.looked.elapsed() >= LOOK {
                    self.look(record);
                }
            }
            _ => {}
        }
    }

    fn pause(&mut self, daemon: &Arc<Daemon>, disks: BTreeSet<String>) {
        self.keep_claims(daemon);
        let (daemon, socket, holders) = (daemon.clone(), self.socket.clone(), disks.clone());
        self.begin(Doing::Pause, disks, move || {
            monitor::pause(&socket, |monitor| {
                let stage = PauseStage::Pausing;
                let record = PauseRecord { stage, disks: holders, monitor, since_ms: now_ms() };
                daemon.note_pause(&socket, Some(record)).map_err(QmpFailure::NotNoted)
            })
        });
    }

    /// The rings of a VM that is paused stop, and its disks are not for others meanwhile.
    fn keep_claims(&self, daemon: &Daemon) {
        self.imports(daemon).for_each(|import| import.keep_claim(true));
    }

    /// They are kept for it no more; if it has `stopped` for good, others may have them.
    fn let_claims_go(&self, daemon: &Daemon, stopped: bool) {
        for import in self.imports(daemon) {
            import.keep_claim(false);
            if stopped {
                import.rest(false);
            }
        }
    }

    fn imports(&self, daemon: &Daemon) -> impl Iterator<Item = Arc<Import>> {
        self.disks.keys().filter_map(|name| import_of(daemon, name))
    }

    fn look(&mut self, record: &PauseRecord) {
        self.looked = Instant::now();
        let (socket, known) = (self.socket.clone(), record.monitor.clone());
        self.begin(Doing::Look, record.disks.clone(), move || monitor::look(&socket, known.as_deref()));
    }

    fn begin(
        &mut self,
        doing: Doing,
        disks: BTreeSet<String>,
        ask: impl FnOnce() -> Result<VmFound, QmpFailure> + Send + 'static,
    ) {
        let (sender, outcome) = oneshot::channel();
        // A thread of its own, for which the end of the daemon does not wait.
        let thread = std::thread::Builder::new().name("qmp".to_owned()).spawn(move || {
            let _ = sender.send(ask());
        });
        match thread {
            Ok(_) => self.call = Some(Call { doing, disks, outcome }),
            Err(error) => {
                tracing::error!(%error, "a thread for a monitor");
                self.later();
            }
        }
    }

    fn take_outcome(&mut self) -> Option<(Call, Result<VmFound, QmpFailure>)> {
        let outcome = match self.call.as_mut()?.outcome.try_recv() {
            Ok(outcome) => outcome,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Closed) => Err(QmpFailure::NotQmp("the question was given up".to_owned())),
        };
        self.call.take().map(|call| (call, outcome))
    }

    fn conclude(
        &mut self,
        daemon: &Daemon,
        record: Option<&PauseRecord>,
        call: Call,
        outcome: Result<VmFound, QmpFailure>,
    ) {
        let Call { doing, disks, .. } = call;
        let found = match outcome {
            Ok(found) => found,
            Err(error) => return self.fail(daemon, record, doing, &disks, error),
        };
        let ours = record.filter(|record| record.stage != PauseStage::Left);
        match (doing, found, ours) {
            (Doing::Pause, VmFound::Done, Some(record)) => {
                self.is_paused(daemon, PauseRecord { disks, ..record.clone() })
            }
            // It was stopped by us, before we knew that it was.
            (Doing::Pause | Doing::Look, VmFound::Not(status), Some(record))
                if status == PAUSED && record.stage == PauseStage::Pausing =>
            {
                self.is_paused(daemon, PauseRecord { disks, ..record.clone() });
            }
            (Doing::Look, VmFound::Not(status), Some(_)) if status == PAUSED => self.settle(),
            // It has not come to a pause.
            (Doing::Look, VmFound::Not(_), Some(record)) if record.stage == PauseStage::Pausing => {
                self.let_claims_go(daemon, false);
                self.note(daemon, None);
            }
            (Doing::Pause, VmFound::Not(status), None) if status == PAUSED => {
                self.let_claims_go(daemon, false);
                self.leave(daemon, disks, "somebody else has paused it");
            }
            (Doing::Pause, VmFound::Not(status), _) => {
                self.let_claims_go(daemon, false);
                self.trouble = None;
                self.remark = Some(format!("the VM does not run (\"{status}\")"));
                self.later();
            }
            (Doing::GoOn, VmFound::Done, _) => {
                self.let_claims_go(daemon, false);
                self.note(daemon, None);
                self.settle();
                self.tell(daemon, &disks, "the VM goes on: its disks are back");
            }
            (Doing::GoOn, VmFound::Not(status), _) => {
                self.let_claims_go(daemon, status != RUNNING);
                self.note(daemon, None);
                self.settle();
                let words = if status == RUNNING {
                    "somebody else has continued the VM".to_owned()
                } else {
                    format!("the VM is left as it is (\"{status}\")")
                };
                self.tell(daemon, &disks, &words);
            }
            (Doing::Look, VmFound::Not(status), Some(_)) => {
                self.let_claims_go(daemon, status != RUNNING);
                let words = if status == RUNNING {
                    "somebody else has continued it".to_owned()
                } else {
                    format!("it is not paused any more, but \"{status}\"")
                };
                self.leave(daemon, disks, &words);
            }
            (_, VmFound::Another, _) => {
                self.let_claims_go(daemon, false);
                self.note(daemon, None);
                self.settle();
                self.tell(daemon, &disks, "the VM that was paused is gone: its monitor is another one");
            }
            (Doing::Pause, VmFound::Done, None) | (Doing::Look, VmFound::Done | VmFound::Not(_), _) => {}
        }
    }

    fn is_paused(&mut self, daemon: &Daemon, record: PauseRecord) {
        let disks = record.disks.clone();
        self.keep_claims(daemon);
        self.note(daemon, Some(PauseRecord { stage: PauseStage::Paused, ..record }));
        self.settle();
        self.looked = Instant::now();
        // By the stop itself none start, and those that did before are of no interest.
        for link in self.disks.values_mut() {
            link.take_started();
        }
        self.tell(daemon, &disks, "the VM is paused: its server is not reachable, requests wait");
    }

    /// Somebody else decides until the disks are back.
    fn leave(&mut self, daemon: &Daemon, disks: BTreeSet<String>, why: &str) {
        self.settle();
        self.remark = Some(why.to_owned());
        self.tell(daemon, &disks, &format!("the VM is left alone until its disks are back: {why}"));
        let stage = PauseStage::Left;
        self.note(daemon, Some(PauseRecord { stage, disks, monitor: None, since_ms: now_ms() }));
    }

    fn fail(
        &mut self,
        daemon: &Daemon,
        record: Option<&PauseRecord>,
        doing: Doing,
        disks: &BTreeSet<String>,
        error: QmpFailure,
    ) {
        self.later();
        if doing == Doing::Pause && record.is_none_or(|record| record.stage == PauseStage::Left) {
            self.let_claims_go(daemon, false);
        }
        if matches!(error, QmpFailure::Absent(_)) && record.is_some() {
            self.let_claims_go(daemon, false);
            self.note(daemon, None);
            self.settle();
            return self.tell(daemon, disks, "the VM that was paused is gone: nobody listens at its monitor");
        }
        // Nothing is to be done about a look that fails, but to look again.
        if doing == Doing::Look {
            return;
        }
        let error = error.to_string();
        let known = self.trouble.as_ref().is_some_and(|(before, why)| *before == doing && *why == error);
        self.trouble = Some((doing, error.clone()));
        if known {
            return tracing::debug!(qmp = %self.socket.display(), error, "a VM is still not paused or continued");
        }
        let what = if doing == Doing::Pause {
            "could not be paused, requests wait"
        } else {
            "could not be continued"
        };
        let qmp = self.socket.display();
        tracing::warn!(%qmp, error, "a VM {what}: it is tried again");
        self.say(daemon, disks, &format!("the VM {what}: {qmp}: {error}"));
    }

    /// Nothing is wrong.
    fn settle(&mut self) {
        (self.trouble, self.remark, self.failures, self.due) = (None, None, 0, Instant::now());
    }

    /// Not before a while.
    fn later(&mut self) {
        self.due = Instant::now() + FIRST.saturating_mul(1 << self.failures.min(8)).min(LONGEST);
        self.failures = self.failures.saturating_add(1);
    }

    fn note(&mut self, daemon: &Daemon, record: Option<PauseRecord>) {
        if let Err(error) = daemon.note_pause(&self.socket, record) {
            tracing::error!(qmp = %self.socket.display(), error, "how a paused VM is was not written down");
            self.later();
        }
    }

    fn tell(&self, daemon: &Daemon, disks: &BTreeSet<String>, text: &str) {
        let names: Vec<&str> = disks.iter().map(String::as_str).collect();
        tracing::warn!(qmp = %self.socket.display(), disks = names.join(", "), "{text}");
        self.say(daemon, disks, text);
    }

    fn say(&self, daemon: &Daemon, disks: &BTreeSet<String>, text: &str) {
        for name in disks {
            daemon.disks.tell(EventWord::Changed, name, text);
        }
    }

    /// Lets its disks say how it stands.
    fn show(&self, daemon: &Daemon, record: Option<&PauseRecord>, wanted: &BTreeMap<String, Duration>) {
        let trouble =
            |doing| self.trouble.as_ref().filter(|(one, _)| *one == doing).map(|(_, why)| why.clone());
        let (state, why, since_ms) = match record {
            Some(PauseRecord { stage: PauseStage::Left, .. }) => {
                (VmPauseWord::LeftAlone, self.remark.clone(), None)
            }
            Some(PauseRecord { stage: PauseStage::Paused, since_ms, disks, .. }) => {
                match trouble(Doing::GoOn) {
                    Some(why) => (VmPauseWord::CannotContinue, Some(why), Some(*since_ms)),
                    None => (VmPauseWord::Paused, Some(self.held_by(disks)), Some(*since_ms)),
                }
            }
            Some(PauseRecord { stage: PauseStage::Pausing, .. }) | None => match trouble(Doing::Pause) {
                Some(why) => (VmPauseWord::CannotPause, Some(why), None),
                None => (VmPauseWord::Armed, self.remark.clone(), None),
            },
        };
        for (name, timeout) in wanted {
            let Ok(disk) = daemon.disks.served(name) else { continue };
            let lost = self.disks.get(name).and_then(Link::why).map(str::to_owned);
            let report = VmPauseReport {
                state,
                why: why.clone(),
                for_ms: since_ms.map(|since| now_ms().saturating_sub(since)),
                timeout_s: timeout.as_secs(),
                qmp: self.socket.clone(),
            };
            disk.show_vm_pause(report, lost);
        }
    }

    /// The disks that hold it, and what their servers say.
    fn held_by(&self, disks: &BTreeSet<String>) -> String {
        let one = |name: &String| {
            let why = self.disks.get(name).and_then(Link::why);
            why.map_or(name.clone(), |why| format!("{name} ({why})"))
        };
        format!("held by {}", disks.iter().map(one).collect::<Vec<_>>().join(", "))
    }
}

/// What is behind a disk that is served, where that is another machine's.
fn import_of(daemon: &Daemon, name: &str) -> Option<Arc<Import>> {
    daemon.disks.served(name).ok()?.import()
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
