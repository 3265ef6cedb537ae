//! A migration whose driver does not wait for anybody before the switch-over, as libvirt (docs/decisions/0087-virsh-migrate.md). QEMU itself does: it waits for
//! its vCPUs, which the library in its process keeps, and serves monitors and devices meanwhile.
//!
//! ```text
//!   somebody:   migrate                                                                        (migrate-continue)         (cont there)
//!   QEMU:              ... finish-migrate: vCPUs are to stop                   they have stopped --> the last of memory --> ...
//!   here:       ask ... -----------------------> keep --> rest, take --> free -'                                              revive, replay, ...
//! ```

use std::sync::atomic::AtomicBool;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::FunctionReport;
use ioplane_api::request::StopWord;
use ioplane_cli::client::Client;
use ioplane_cli::output::hint;
use serde_json::{Value, json};

use super::super::failed;
use super::super::monitor::{Monitor, is_under_way};
use super::late::{FOUND, finds};
use super::stall::Stalls;
use super::vcpus::{hold, say};
use super::{Functions, Moving, not_cancelled};

/// In place of QEMU's word for a migration whose QEMU waits for its vCPUs.
pub(super) const STOPPING: &str = "stopping";
/// Between two words to the library while the guest runs: a vCPU that is wanted back for something else waits for two of them.
const ASKING: Duration = Duration::from_millis(50);
/// How much longer than it may take to find the QEMU there the last try may take.
const SLOW: Duration = Duration::from_secs(4);
const RUN: &str = "start both QEMUs by `ioplane run -- qemu-system-x86_64 ...`, of libvirt's domains by a script that does, as their <emulator>";

/// Whether QEMU waits for its vCPUs while memory is copied. It says so before it wants the first one back; `state` was asked before `migration`.
fn is_stopping(state: &str, migration: &str) -> bool {
    matches!(state, "finish-migrate" | "paused") && matches!(migration, "setup" | "active")
}

/// Keeps the library waiting for QEMU's stop.
pub(super) struct Asking<'a> {
    here: &'a Client,
    name: String,
    last: Option<Instant>,
    /// QEMU stops its guest.
    pub stopping: bool,
    pub failed: Option<anyhow::Error>,
}

impl Asking<'_> {
    /// Sees in what state the VM and its migration are. Whether it is of no use to look on.
    pub(super) fn sees(&mut self, state: &str, now: &Value) -> bool {
        let status = now["status"].as_str().unwrap_or_default();
        self.stopping = is_stopping(state, status);
        // One that waits since the word before the last has waited while the guest was said to run: not for a stop.
        if state == "running" && self.last.is_none_or(|last| last.elapsed() >= ASKING) {
            self.failed = say(self.here, &self.name, StopWord::Ask).err();
            self.last = Some(Instant::now());
        }
        // With "device" it was not kept: the sooner it is cancelled the better.
        self.stopping || self.failed.is_some() || status == "device"
    }
}

impl<'a> Functions<'a> {
    pub(super) fn asking(&self) -> Option<Asking<'a>> {
        let name = self.all.first().filter(|_| self.keeps)?.name.clone();
        Some(Asking { here: self.here, name, last: None, stopping: false, failed: None })
    }
}

impl Functions<'_> {
    fn say(&self, stop: StopWord) -> Result<()> {
        self.all.first().map_or(Ok(()), |one| say(self.here, &one.name, stop))
    }

    /// Has the library keep what QEMU wants back from here on.
    pub(super) fn ask(&self) -> Result<()> {
        let error = |error: anyhow::Error| failed(format!("nothing keeps vCPUs here: {error:#}"), RUN);
        self.say(StopWord::Ask).map_err(error)
    }

    /// Finds the QEMU there, which somebody has started since. Its guest does not run before its functions are its. The one here is asked meanwhile.
    pub(super) fn find_other(&mut self, monitor: &mut Monitor, interrupted: &AtomicBool) -> Result<()> {
        let Some(look) = self.late.as_mut().and_then(|late| late.look.take()) else { return Ok(()) };
        let (end, found) = (Instant::now() + FOUND, finds(look));
        let far = loop {
            match found.recv_timeout(ASKING) {
                Ok(found) => break found?,
                Err(RecvTimeoutError::Timeout) if Instant::now() < end + SLOW => {}
                Err(_) => return Err(failed("the other host does not say whether its QEMU is there", "")),
            }
            not_cancelled(interrupted)?;
            if monitor.state()? == "running" {
                self.ask()?;
            }
            let status = monitor.migration()?;
            if !is_under_way(&status) {
                let why = format!("the migration has ended before the QEMU there was found: it is {status}");
                self.sent = status == "completed";
                return Err(failed(why, "migrate it again"));
            }
        };
        self.far = Some(far);
        self.late = None;
        self.far()?.execute("stop", &json!({}))?;
        let Some(one) = self.all.first() else { return Ok(()) };
        hold(self.there, &one.name, true).map_err(|error| {
            let why =
                format!("whoever migrates it has it run there at once, and nothing holds it: {error:#}");
            failed(why, RUN)
        })?;
        self.held[1] = true;
        Ok(())
    }

    /// Has vCPUs let go that QEMU's main loop waits for.
    pub(super) fn watch_stalls(&self, monitor: &Monitor) -> Option<Stalls> {
        let one = self.all.first()?;
        Some(Stalls::watch(self.here.socket(), &one.name, monitor.unanswered()))
    }

    /// QEMU stops its guest: its vCPUs are out of it, and it waits for them.
    pub(super) fn keep(&mut self, monitor: &mut Monitor) -> Result<()> {
        match self.say(StopWord::Keep) {
            Ok(()) => {
                self.kept = true;
                Ok(())
            }
            // One that is paused already has none to be waited for: it is enough that none enters the guest.
            Err(error) if monitor.state()? == "paused" => {
                self.hold_here();
                if self.held[0] { Ok(()) } else { Err(error) }
            }
            Err(error) => {
                let why = self.let_go_meanwhile();
                Err(failed(format!("QEMU does not wait for its vCPUs{why}: {error:#}"), RUN))
            }
        }
    }

    /// The functions are at rest, and what they wrote is sent once more: QEMU may stop its guest. Nothing of that comes too late.
    pub(super) fn let_stop(&mut self, monitor: &mut Monitor) -> Result<()> {
        let status = monitor.migration()?;
        if !matches!(status.as_str(), "setup" | "active") {
            return Err(self.not_kept(&status));
        }
        self.hold_here();
        if self.kept {
            self.say(StopWord::Free)?;
            self.kept = false;
        }
        Ok(())
    }

    /// QEMU has stopped its guest, and its functions are not at rest. It is to stay, if that is not too late.
    pub(super) fn missed(&mut self, monitor: &mut Monitor, status: &str) -> anyhow::Error {
        let cancelled = monitor.execute("migrate_cancel", &json!({}));
        let now = cancelled.and_then(|_| monitor.migration());
        // One that does not answer has been ended by whoever has the guest there.
        self.sent = !now.is_ok_and(|now| now != "completed");
        self.not_kept(status)
    }

    fn not_kept(&self, status: &str) -> anyhow::Error {
        let why = self.let_go_meanwhile();
        failed(
            format!(
                "QEMU has stopped the guest, and its migration is {status}, before the functions were at rest{why}"
            ),
            "migrate it again; a guest that is paused has to run first",
        )
    }

    /// What may be the reason for that.
    fn let_go_meanwhile(&self) -> &'static str {
        match self.stalls.as_ref().is_some_and(Stalls::has_let_go) {
            true => " (a vCPU was let go while its monitor did not answer, as for a reset of the guest)",
            false => "",
        }
    }

    /// The move has not come about: QEMU has its vCPUs back, and ends the migration. Says whether they enter no guest yet.
    pub(super) fn end_keeping(&mut self, monitor: &mut Monitor) -> Result<bool> {
        let seen = monitor.state().and_then(|state| Ok((state, monitor.migration()?)));
        let (state, migration) = seen.inspect_err(|_| {
            // It may wait for a vCPU: then nobody else would let that go.
            let _ = self.say(StopWord::Free);
            self.kept = false;
        })?;
        let stands = state == "finish-migrate" && matches!(migration.as_str(), "setup" | "active");
        if stands {
            self.hold_here();
        }
        // Nobody else stops it before all of the guest is there.
        let cancelled = match stands || self.attended && is_under_way(&migration) {
            true => monitor.execute("migrate_cancel", &json!({})).map(drop),
            false => Ok(()),
        };
        let freed = self.say(StopWord::Free);
        self.kept = false;
        cancelled?;
        // Of a move that was broken off nobody knows whether they were kept; the library gives up by itself, too.
        if self.attended {
            freed?;
        }
        Ok(stands && self.held[0])
    }

    /// Whether a function's QEMU here has ended: libvirt ends it when the guest is there.
    pub(super) fn has_lost_its_vmm(&self, one: &Moving) -> bool {
        let shown = self.here.get::<FunctionReport>(&format!("/v1/pci/{}", one.name));
        self.keeps && shown.is_ok_and(|shown| !shown.connected)
    }

    /// The guest that has left without its functions runs there.
    pub(super) fn runs_without(&mut self) {
        if let Err(error) = self.let_go_there() {
            hint(format!(
                "its vCPUs there may be held: `PUT /v1/pci/NAME/vcpus` there lets them go: {error:#}"
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn qemu_stops_its_guest_for_the_switch_over_or_because_somebody_pauses_it() {
        assert!(is_stopping("finish-migrate", "active") && is_stopping("paused", "active"));
        assert!(is_stopping("finish-migrate", "setup"));
        assert!(!is_stopping("running", "active") && !is_stopping("paused", "none"));
        for late in ["pre-switchover", "device", "completed", "cancelled", "failed", ""] {
            assert!(!is_stopping("finish-migrate", late), "{late}");
        }
    }
}
