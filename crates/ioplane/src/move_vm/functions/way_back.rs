//! The way back of a move: the guest goes on here, with its functions, or it is said why not.

use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::{DoneReport, ReplayedFunctionReport, RestedFunctionReport};
use ioplane_cli::client::{Client, Method};
use ioplane_cli::output::{CommandError, hint};
use serde_json::json;

use super::super::bus::{self, Size, with_ports};
use super::super::monitor::{Monitor, is_under_way};
use super::super::{failed, with_remedy};
use super::{ARRIVAL, Functions, LOOK, Stand};

/// For an answer from there when the guest is to go on here, and for one from here before its migration is cut.
pub(super) const LAST_WORD: Duration = Duration::from_secs(4);

impl Functions<'_> {
    /// The guest goes on here, with its functions.
    pub(super) fn stay(mut self, monitor: &mut Monitor, error: anyhow::Error) -> anyhow::Error {
        let mut troubles = self.undo(monitor);
        if troubles.is_empty() {
            let ended = self.journal.end().err();
            troubles.extend(ended.map(|error| format!("what is written down of the move: {error:#}")));
        }
        for trouble in troubles {
            hint(format!("not as it was before: {trouble}"));
        }
        let runs = monitor.state().ok();
        let remedy = match (runs.as_deref(), self.running) {
            (Some("running"), _) => "it runs here as before",
            (Some("paused"), false) => "it is here, paused as before",
            (Some(_), _) => {
                "it is here, and does not run: `cont` by its monitor lets it go on, if the other QEMU is gone"
            }
            (None, _) => "its monitor does not answer: see whether it runs",
        };
        with_remedy(error, &format!("VM {} did not move", self.vm), remedy)
    }

    /// All that was done, in an order that never has two functions driven for one guest, nor the guest run here without its functions for longer than it
    /// takes to see that. What could not be undone.
    pub(super) fn undo(&mut self, monitor: &mut Monitor) -> Vec<String> {
        let mut troubles = Vec::new();
        let mut note = |what: &str, done: Result<()>| {
            if let Err(error) = done {
                troubles.push(format!("{what}: {error:#}"));
            }
        };
        // Before anything else: QEMU waits for its vCPUs.
        let mut stood = false;
        match self.keeps.then(|| self.end_keeping(monitor)) {
            Some(Ok(yes)) => stood = yes,
            Some(Err(error)) => note("the stop of the VM here", Err(error)),
            None => {}
        }
        // Nobody there is told anything more.
        self.telling = None;
        // What has the states there goes first, where it may have them.
        let mut ended = !self.sent || self.end_there();
        // Accesses to these wait, and a monitor with them whose guest runs.
        note("a function here", self.go_on(false));
        match monitor.wake(LAST_WORD) {
            Ok(false) => {}
            Ok(true) => hint("the QEMU here waited for the other one to read: its connection was cut"),
            Err(error) => note("the monitor here", Err(error)),
        }
        let standing = self.settled(monitor);
        if let Ok((_, true)) = standing
            && !self.sent
        {
            // It was too late to cancel it.
            ended = self.end_there();
        }
        let stopped = match standing {
            Ok((stopped, _)) => stopped,
            Err(error) => {
                note("the monitor here", Err(error));
                // Nothing is written under a guest that may run.
                self.let_go_waiting();
                self.forget_ahead();
                return troubles;
            }
        };
        note("a function here", self.go_on(true));
        if self.all.iter().any(|one| one.pin && one.command.is_some()) {
            note("the command register of a function", self.put_back_commands(monitor, stopped && !stood));
        }
        match ended {
            true => {
                self.let_go_here();
                note("the VM here", self.let_run(monitor, stopped));
            }
            false => note(
                "the VM here",
                Err(failed("it may run there: it is not let run here", "see what the QEMU there does")),
            ),
        }
        for one in self.all.iter().filter(|one| one.stand == Stand::Logged) {
            let ended = self.here.ask::<DoneReport>(Method::DELETE, &one.path("log"), None::<&()>);
            note("the log of a function", ended.map(drop));
        }
        // As long as the guards are out QEMU waits before the switch-over.
        note("what keeps it from being migrated without its functions", self.guards.put_back(monitor));
        note("its migration", self.pause_before(monitor, false));
        note("its downtime limit", self.hold_back(monitor, false));
        self.let_go_waiting();
        self.forget_ahead();
        troubles
    }

    /// Ends the QEMU there, which has all of the guest, and takes the functions there from it. `false`: it may run.
    fn end_there(&mut self) -> bool {
        // The guest stands still meanwhile, and whoever did not answer before may not do so now.
        // One that was never seen may run.
        let Some(far) = &mut self.far else { return self.late.is_none() };
        far.set_patience(LAST_WORD);
        // Whoever drives the migration may have let it run there, where nothing holds its vCPUs.
        let free = self.attended && !self.held[1];
        if free && far.state().is_ok_and(|state| state == "running") {
            return false;
        }
        let ended = far.execute("quit", &json!({}));
        if let Err(error) = &ended {
            hint(format!("end the QEMU there, and do not let it continue: {error:#}"));
            // What can be done without it. One that has no state, or no guest any more, refuses.
            let there = Client::new(self.there.socket()).map(|there| there.with_patience(LAST_WORD));
            for (one, there) in self.all.iter().zip(there.iter().cycle()) {
                let rested = one.step::<RestedFunctionReport>(there, "rest");
                if rested.is_ok() {
                    let _ = there.ask::<DoneReport>(Method::POST, &one.path("leave"), None::<&()>);
                }
            }
        }
        // It was told not to run by itself: only somebody else could have it run.
        ended.is_ok()
            || !free
                && matches!(
                    self.far_state.as_str(),
                    "inmigrate" | "paused" | "postmigrate" | "finish-migrate"
                )
    }

    /// Waits until QEMU has settled on what becomes of the guest here, which stands still then. Says whether it had to be stopped for that, and whether all
    /// of it was sent.
    fn settled(&mut self, monitor: &mut Monitor) -> Result<(bool, bool)> {
        let end = Instant::now() + ARRIVAL;
        loop {
            let (migration, state) = (monitor.migration()?, monitor.state()?);
            match (is_under_way(&migration), state.as_str()) {
                // At rest before the switch-over, and it stays so until it is cancelled; or memory is copied, and nothing was touched.
                (true, "finish-migrate") if migration == "pre-switchover" => return Ok((false, false)),
                (true, _) if self.all.iter().all(|one| one.command.is_none()) => return Ok((false, false)),
                // QEMU lets it run by itself as soon as it has given up.
                (_, "running") if self.all.iter().any(|one| one.command.is_some()) => {
                    monitor.execute("stop", &json!({}))?;
                    return Ok((true, false));
                }
                (false, "finish-migrate") | (true, _) if Instant::now() < end => {
                    if migration == "device" {
                        monitor.execute("migrate_cancel", &json!({}))?;
                    }
                    std::thread::sleep(LOOK);
                }
                (_, state) => return Ok((false, state == "postmigrate")),
            }
        }
    }

    /// Those at rest go on, of one sort.
    fn go_on(&mut self, direct: bool) -> Result<()> {
        let mut first = Ok(());
        for one in self.all.iter_mut().filter(|one| one.direct == direct && one.stand == Stand::Still) {
            let replay = || one.step::<ReplayedFunctionReport>(self.here, "replay");
            let had_not_rested = |error: &anyhow::Error| {
                let own = format!("{}: it runs", one.name);
                error.downcast_ref::<CommandError>().is_some_and(|CommandError(body)| body.error == own)
            };
            match replay() {
                Ok(_) => one.stand = Stand::Runs,
                Err(error) if had_not_rested(&error) => one.stand = Stand::Logged,
                Err(_) => match replay() {
                    Ok(_) => one.stand = Stand::Runs,
                    Err(error) => first = first.and(Err(error)),
                },
            }
        }
        first
    }

    /// The guest stands still. A function that is still held is left alone: an access would wait, and the monitor with it.
    fn put_back_commands(&mut self, monitor: &mut Monitor, ran: bool) -> Result<()> {
        if ran {
            // It may have used its ports since.
            self.latch = None;
        }
        let all = &self.all;
        with_ports(monitor, &mut self.latch, |ports| {
            let mut first = Ok(());
            for one in all.iter().filter(|one| one.pin && (one.direct || one.stand != Stand::Still)) {
                if let Some(command) = one.command {
                    first = first.and(ports.write(one.found.place, bus::COMMAND, Size::Word, command));
                }
            }
            first
        })
    }

    /// Ends the migration if it has not, and has the guest run if it did before.
    fn let_run(&mut self, monitor: &mut Monitor, stopped: bool) -> Result<()> {
        if is_under_way(&monitor.migration()?) {
            monitor.execute("migrate_cancel", &json!({}))?;
            let end = Instant::now() + ARRIVAL;
            while (is_under_way(&monitor.migration()?) || monitor.state()? == "finish-migrate")
                && Instant::now() < end
            {
                std::thread::sleep(LOOK);
            }
        }
        let state = monitor.state()?;
        if self.running && (state == "postmigrate" || (stopped && state == "paused")) {
            monitor.execute("cont", &json!({}))?;
        }
        Ok(())
    }
}
