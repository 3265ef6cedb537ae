//! The monitor of a QEMU that a VM leaves, or comes to.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_cli::progress::ByteBar;
use ioplane_plain::plain;
use ioplane_qemu::{Endpoint, Qmp};
use serde_json::{Value, json};

use super::{failed, refused};

/// For an answer of the monitor. QEMU's main thread serves it, and is held up while rings stop.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// What came of a migration.
pub(super) enum Followed {
    /// What QEMU says of one that is as far as it was to come.
    There(Value),
    /// The guest has not left.
    Ended { cancelled: bool, why: String },
}

/// The monitor of the VM that moves.
pub(crate) struct Monitor {
    qmp: Qmp,
    path: String,
    unanswered: Arc<Unanswered>,
}

/// Which command of a monitor is not answered yet, and since when.
#[derive(Debug, Default)]
pub(super) struct Unanswered(Mutex<(u64, Option<Instant>)>);

impl Unanswered {
    fn set(&self, begun: Option<Instant>) {
        let (number, since) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *number += u64::from(begun.is_some());
        *since = begun;
    }

    /// Its number, and for how long it has not been answered; `None`: all are.
    pub(super) fn now(&self) -> Option<(u64, Duration)> {
        let (number, since) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        since.map(|since| (number, since.elapsed()))
    }
}

impl Monitor {
    pub(crate) fn connect(path: &Path) -> Result<Monitor> {
        Monitor::connect_to(&Endpoint::here(path))
    }

    pub(super) fn connect_to(place: &Endpoint) -> Result<Monitor> {
        let shown = place.to_string();
        let qmp = Qmp::connect_out_of_band(place, PATIENCE).map_err(|error| {
            failed(
                format!("the monitor at {shown}: {error}"),
                "give the socket of -qmp; it serves one client at a time",
            )
        })?;
        Ok(Monitor { qmp, path: shown, unanswered: Arc::default() })
    }

    /// The same, which errors name by its host: the socket here is the daemon's own.
    pub(super) fn of_host(self, host: Option<&str>) -> Monitor {
        let path = host.map_or(self.path, str::to_owned);
        Monitor { path, ..self }
    }

    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value> {
        self.unanswered.set(Some(Instant::now()));
        let answer = self.qmp.execute(command, arguments);
        self.unanswered.set(None);
        answer.map_err(|error| {
            failed(
                format!("the monitor at {}: {error}", self.path),
                "see what QEMU says, and whether the VM runs",
            )
        })
    }

    /// Whether it answers, for another thread.
    pub(super) fn unanswered(&self) -> Arc<Unanswered> {
        self.unanswered.clone()
    }

    /// Where it is.
    pub(super) fn place(&self) -> &str {
        &self.path
    }

    /// As [`Monitor::is_of`], where a VM without a name may be any.
    pub(crate) fn is_surely_of(&mut self, vm: &str) -> Result<()> {
        if self.is_of(vm)? {
            return Ok(());
        }
        let error =
            format!("the VM of the monitor at {} has no name, so it may be another than {vm}", self.path);
        Err(refused(error, "start its QEMU with -name"))
    }

    /// Whether it says that it is the VM's; an error if it says that it is another's.
    pub(crate) fn is_of(&mut self, vm: &str) -> Result<bool> {
        let name = self.execute("query-name", &json!({}))?;
        match name["name"].as_str() {
            Some(name) if name != vm => {
                let error = format!("the monitor at {} is that of VM {}", self.path, plain(name));
                Err(refused(error, format!("give the monitor of {vm}")))
            }
            name => Ok(name.is_some()),
        }
    }

    /// One of HMP's commands; what it prints.
    pub(crate) fn human(&mut self, line: &str) -> Result<String> {
        let said = self.execute("human-monitor-command", &json!({ "command-line": line }))?;
        Ok(said.as_str().unwrap_or_default().trim().to_owned())
    }

    /// Has it answer again, if it does not within `patience`: a QEMU that sends the last of its guest to one that does not read waits for that, and its
    /// monitor with it. That migration has failed then. Says whether it had to be cut.
    pub(super) fn wake(&mut self, patience: Duration) -> Result<bool> {
        self.qmp.set_patience(patience);
        let answers = self.state().is_ok();
        let cut = if answers { Ok(()) } else { self.qmp.cut_migration() };
        self.qmp.set_patience(PATIENCE);
        cut.map_err(|error| {
            failed(
                format!(
                    "the monitor at {} does not answer, and its migration cannot be cut: {error}",
                    self.path
                ),
                "end the QEMU that it sends its guest to, and see whether the VM runs",
            )
        })?;
        Ok(!answers)
    }

    /// Each answer may take this long from now on.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.qmp.set_patience(patience);
    }

    /// The state of the VM, in QEMU's word.
    pub(crate) fn state(&mut self) -> Result<String> {
        let status = self.execute("query-status", &json!({}))?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// The state of its migration, in QEMU's word; empty if there was none.
    pub(crate) fn migration(&mut self) -> Result<String> {
        let migration = self.execute("query-migrate", &json!({}))?;
        Ok(migration["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Whether it is the VM's, and that can migrate now; what `removed` says of a reason against it is taken away before it begins. Says whether the VM runs.
    pub(super) fn may_go(&mut self, vm: &str, removed: impl Fn(&str) -> bool) -> Result<bool> {
        self.is_of(vm)?;
        let state = self.state()?;
        if !matches!(state.as_str(), "running" | "paused") {
            let error = format!("VM {vm} is {}", plain(&state));
            return Err(refused(error, "only one that runs, or is paused, can move"));
        }
        let migration = self.execute("query-migrate", &json!({}))?;
        if is_under_way(migration["status"].as_str().unwrap_or_default()) {
            let error = format!("a migration of VM {vm} is under way");
            return Err(refused(error, "wait for it, or cancel it where it was begun"));
        }
        let blocked = migration["blocked-reasons"].as_array().into_iter().flatten();
        if let Some(why) = blocked.filter_map(Value::as_str).find(|why| !removed(why)) {
            return Err(refused(
                format!("VM {vm} cannot migrate: {}", plain(why)),
                "take that device out of the VM",
            ));
        }
        Ok(state == "running")
    }

    /// Shows how far it is until it has ended, or has come to `wanted`: what QEMU says of it then. Looks every `pace`. It is cancelled when somebody
    /// interrupts, or at the deadline. `runs` is whether the VM ran when that was seen last.
    pub(super) fn follow(
        &mut self,
        wanted: &str,
        pace: Duration,
        interrupted: &AtomicBool,
        deadline: Option<Instant>,
        runs: Option<&mut bool>,
    ) -> Result<Followed> {
        self.follow_until(|_, now| now["status"] == wanted, pace, interrupted, deadline, runs)
    }

    /// The same, until `arrived` says so of what QEMU says: the state of the VM, which is asked before where `runs` is given, and then the migration's.
    pub(super) fn follow_until(
        &mut self,
        mut arrived: impl FnMut(&str, &Value) -> bool,
        pace: Duration,
        interrupted: &AtomicBool,
        deadline: Option<Instant>,
        mut runs: Option<&mut bool>,
    ) -> Result<Followed> {
        let bar = ByteBar::new()?;
        let mut cancelled = false;
        loop {
            let mut state = String::new();
            if let Some(runs) = &mut runs {
                state = self.state()?;
                match state.as_str() {
                    "running" => **runs = true,
                    "paused" => **runs = false,
                    _ => {}
                }
            }
            let now = self.execute("query-migrate", &json!({}))?;
            let status = now["status"].as_str().unwrap_or_default();
            let ram = |field: &str| now["ram"][field].as_u64().unwrap_or(0);
            match status {
                "failed" | "cancelled" => {
                    bar.clear();
                    let why =
                        now["error-desc"].as_str().map_or(String::new(), |why| format!(": {}", plain(why)));
                    return Ok(Followed::Ended { cancelled: status == "cancelled", why });
                }
                status if status == "completed" || (!cancelled && arrived(&state, &now)) => {
                    bar.clear();
                    return Ok(Followed::There(now));
                }
                _ => {}
            }
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if (interrupted.load(Ordering::SeqCst) || late) && !cancelled {
                cancelled = true;
                self.execute("migrate_cancel", &json!({}))?;
            }
            let words = if cancelled { "cancelling" } else { status };
            bar.show(ram("total").saturating_sub(ram("remaining")), ram("total"), words.to_owned());
            std::thread::sleep(pace);
        }
    }

    /// It has not moved. Says whether it runs.
    pub(super) fn stayed(&mut self, vm: &str, cancelled: bool, why: &str) -> anyhow::Error {
        let state = self.execute("query-status", &json!({})).ok();
        let running = state.as_ref().and_then(|state| state["running"].as_bool());
        let remedy = match running {
            Some(true) => "it runs here as before",
            Some(false) => {
                "it is here, and does not run: `cont` by its monitor lets it go on, if the other QEMU is gone"
            }
            None => "its monitor does not answer: see whether it runs",
        };
        match cancelled {
            true => refused(format!("the move of VM {vm} was cancelled{why}"), remedy),
            false => failed(format!("VM {vm} did not move{why}"), remedy),
        }
    }
}

/// Whether `query-migrate` speaks of a migration that has not ended.
pub(super) fn is_under_way(status: &str) -> bool {
    !matches!(status, "" | "none" | "completed" | "failed" | "cancelled")
}
