//! A migration that somebody else drives (docs/decisions/0085-migrations-of-others.md): QEMU's own monitor commands, or a program that gives them. What is done for the
//! functions is what `ioplane move vm` does, at the same places; the differences are here.
//!
//! ```text
//!   somebody:            migrate                                                        (cont)
//!   here, attending:     log ... begun --> pre-switchover: rest, take --> migrate-continue --> ... revive, replay, gone, leave, cont
//! ```

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::RestedFunctionReport;
use ioplane_cli::client::Client;
use ioplane_cli::output::hint;
use serde_json::json;

use super::super::monitor::{Monitor, is_under_way};
use super::super::{failed, with_remedy};
use super::late::{Late, is_expected};
use super::vcpus::hold;
use super::way_back::LAST_WORD;
use super::{Functions, Stand, did_not_wait, not_cancelled};

/// Between two looks whether somebody has begun: QEMU waits before the switch-over for as long as it takes.
const PACE: Duration = Duration::from_millis(50);
/// Between two looks whether the QEMU there is still the one that waits.
const THERE: Duration = Duration::from_secs(5);
/// So many times the other host may not be reached in a row while nobody has begun.
const MISSED: u32 = 1;

/// Nobody else has let QEMU go on with the switch-over: what functions wrote before they came to rest would be missing there.
pub(super) fn still_waits(monitor: &mut Monitor) -> Result<()> {
    match monitor.migration()?.as_str() {
        "pre-switchover" => Ok(()),
        status => Err(failed(
            format!(
                "somebody else has gone on with the switch-over (it is {status}) before the functions were at rest"
            ),
            "have whoever drives the migration leave `migrate-continue` to `ioplane move attend`",
        )),
    }
}

impl Functions<'_> {
    /// Waits until somebody has begun to migrate the VM.
    pub(super) fn is_begun(&mut self, monitor: &mut Monitor, interrupted: &AtomicBool) -> Result<()> {
        hint(format!("VM {} may be migrated now; press Ctrl-C to stop attending", self.vm));
        let (mut looked, mut missed) = (Instant::now(), 0);
        loop {
            if is_under_way(&monitor.migration()?) {
                return Ok(());
            }
            not_cancelled(interrupted)?;
            self.running = match monitor.state()?.as_str() {
                "running" => true,
                "paused" => false,
                // It was faster than one look, since it did not wait.
                "postmigrate" => {
                    self.sent = true;
                    return Err(did_not_wait());
                }
                _ => self.running,
            };
            // It ran at this look: what is wanted of a vCPU since before the one before is no stop.
            if self.keeps && self.running {
                self.ask()?;
            }
            if looked.elapsed() >= THERE {
                match &self.late {
                    None => self.is_awaited()?,
                    Some(Late { still: Some(there), .. }) => match is_expected(there) {
                        Ok(()) => missed = 0,
                        Err((no, error)) if no || missed >= MISSED => return Err(error),
                        Err(_) => missed += 1,
                    },
                    Some(_) => {}
                }
                looked = Instant::now();
            }
            std::thread::sleep(PACE);
        }
    }

    /// Whoever drives the migration sends the guest to the QEMU there, and to nobody else: another one could have it run.
    pub(super) fn is_received(&mut self) -> Result<()> {
        match self.far()?.migration()?.as_str() {
            "active" => Ok(()),
            status => Err(failed(
                format!(
                    "the guest is sent somewhere else: the QEMU there receives none (its migration is {status:?})"
                ),
                "migrate it to the QEMU whose host was named; or name the other one",
            )),
        }
    }

    /// Has no vCPU there enter the guest, whoever says `cont` there, until its functions are its.
    pub(super) fn hold_there(&mut self) {
        match self.all.first().map(|one| hold(self.there, &one.name, true)) {
            Some(Ok(())) => self.held[1] = true,
            Some(Err(error)) => hint(format!(
                "whoever drives the migration has to leave `cont` there to this command: {error:#}"
            )),
            None => {}
        }
    }

    /// The same here, once the functions are at rest: also if QEMU has the guest run after a failure.
    pub(super) fn hold_here(&mut self) {
        self.held[0] = self.all.first().is_some_and(|one| hold(self.here, &one.name, true).is_ok());
    }

    /// An attendance that has lost its way to the other host may have left the vCPUs there held. A host without the library, or before it, holds none.
    pub(super) fn let_go_of_former(&mut self) {
        if let Some(one) = self.all.first() {
            let _ = hold(self.there, &one.name, false);
        }
    }

    /// The functions there are the guest's.
    pub(super) fn let_go_there(&mut self) -> Result<()> {
        if let Some(one) = self.all.first().filter(|_| self.held[1]) {
            hold(self.there, &one.name, false)?;
            self.held[1] = false;
        }
        Ok(())
    }

    /// Has the guest run there, if nobody has yet.
    pub(super) fn have_run(&mut self) -> Result<()> {
        let far = self.far()?;
        if far.state()? == "running" {
            return Ok(());
        }
        match far.execute("cont", &json!({})) {
            Ok(_) => Ok(()),
            // Somebody was faster.
            Err(error) => {
                if far.state()? == "running" {
                    Ok(())
                } else {
                    Err(error)
                }
            }
        }
    }

    /// The move has not come about, and the guest there has ended: vCPUs here may enter it.
    pub(super) fn let_go_here(&mut self) {
        if let Some(one) = self.all.first().filter(|_| self.held[0]) {
            // Held only perhaps, where that is not known.
            self.held[0] = hold(self.here, &one.name, false).is_err();
        }
    }

    /// The QEMU there still waits for a guest: the next one that comes is not to be held. The guest here has gone on already.
    pub(super) fn let_go_waiting(&mut self) {
        let Some(one) = self.all.first().filter(|_| self.held[1] && !self.sent) else { return };
        let there = Client::new(self.there.socket()).map(|there| there.with_patience(LAST_WORD));
        match there.and_then(|there| hold(&there, &one.name, false)) {
            Ok(()) => self.held[1] = false,
            Err(error) if self.attended && !self.keeps => hint(format!(
                "the QEMU there may hold its vCPUs: start it again before the next move: {error:#}"
            )),
            Err(_) => {}
        }
    }

    /// Nobody else has let the guest run there before its functions are its.
    pub(super) fn stands_still_there(&mut self) -> Result<()> {
        self.far_state = self.far()?.state()?;
        match self.far_state.as_str() {
            "running" if !self.held[1] => Err(failed(
                "somebody else has let the guest run there before its functions were its",
                "have whoever drives the migration leave `cont` to `ioplane move attend`",
            )),
            _ => Ok(()),
        }
    }

    /// Whether the guest runs there, with functions that are not its, or has all been sent somewhere else. Then it can run nowhere else.
    pub(super) fn has_left(&mut self) -> bool {
        let [_, held] = self.held;
        let (sent, keeps) = (self.sent, self.keeps);
        let Ok(far) = self.far() else { return false };
        if keeps && sent {
            // Whoever drives it has it run there, and ends the QEMU here: if the other one has it, nobody takes it from that.
            return far.state().is_ok_and(|state| matches!(state.as_str(), "running" | "paused"));
        }
        let received = |status: &str| !matches!(status, "" | "none" | "setup");
        (sent && far.migration().is_ok_and(|status| !received(&status)))
            || (!held && far.state().is_ok_and(|state| state == "running"))
    }

    /// The guest is not let run here: its functions are at rest here, and have no link where it is.
    pub(super) fn lost_to_it(mut self, error: anyhow::Error) -> anyhow::Error {
        for one in self.all.iter().filter(|one| one.stand == Stand::Logged) {
            // One that its guest has left behind, and that nobody has brought to rest.
            if let Err(error) = one.step::<RestedFunctionReport>(self.here, "rest") {
                hint(format!("PCI function {} here does not come to rest: {error:#}", one.name));
            }
        }
        let given = self.journal.give_away();
        self.gone = true;
        self.runs_without();
        self.leave();
        if let Err(error) = given {
            hint(format!("that VM {} is the other host's is not written down: {error:#}", self.vm));
        } else if let Err(error) = self.journal.end() {
            hint(format!("that the move has come to its end is not written down: {error:#}"));
        }
        let before = format!("VM {} has left without its PCI functions", self.vm);
        let remedy = "end the QEMU here, and do not let it continue; in the guest unload the driver and load it again, or plug the device out and in";
        with_remedy(error, &before, remedy)
    }
}
