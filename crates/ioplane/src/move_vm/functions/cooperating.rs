//! Functions whose driver cooperates come to rest while the guest still runs: their driver may have the lock of its page, and a processor that
//! stands still inside an operation set would keep it.
//!
//! ```text
//!   migrate, and QEMU is held back --> little is left to send: rest --> QEMU decides as it was set to --> pre-switchover
//!                    ^                                                   | too much is written meanwhile
//!                    `------------------- replay, log <------------------'
//! ```
//!
//! QEMU is held back by a downtime limit of a millisecond. Where it comes to pre-switchover all the same, since next to nothing is written, the
//! functions come to rest there, if no processor stands still with the lock.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::{DoneReport, FunctionReport, ReplayedFunctionReport, RestedFunctionReport};
use ioplane_api::request::FunctionStepForm;
use ioplane_cli::client::Method;
use serde_json::{Value, json};

use super::{Functions, Moving, STEPS, Stand, ms};
use crate::move_vm::journal;
use crate::move_vm::monitor::Monitor;

/// What such functions are added as.
pub(super) const MODE: &str = "cooperating";
/// How long `rest` may take of a guest that stands still, ms: nobody gives a lock back that is not free by then.
pub(super) const LOCKED: u64 = 2500;
/// QEMU's downtime limit while it is held back, ms. With 0 it does not look what was written since the last pass.
const HELD: u64 = 1;
/// QEMU's own downtime limit, ms.
const LIMIT: u64 = 300;
/// Bytes that are sent in no time.
const LITTLE: u64 = 1 << 20;
/// How long a function stands still before the guest does. If QEMU has not come to the switch-over by then, too much is written for that.
const STILL: Duration = Duration::from_secs(10);
/// How long the driver there may take to bring its function back, before it is said that it has not; and between two looks at that.
const BACK: Duration = Duration::from_secs(5);
const PACE: Duration = Duration::from_millis(100);

/// What was done to a QEMU to hold it back.
#[derive(Debug, Default)]
pub(super) struct Holding {
    /// Its downtime limit as it was, once it was changed, ms.
    limit: Option<u64>,
}

impl Holding {
    /// By what is written down of it.
    pub(super) fn noted(limit: Option<u64>) -> Holding {
        Holding { limit }
    }
}

/// Sees when little is left to send: as little as QEMU sends within a downtime limit, at the beginning of a pass.
struct Remainder {
    limit: u64,
    passes: u64,
}

impl Remainder {
    fn is_little(&mut self, now: &Value) -> bool {
        let passes = now["ram"]["dirty-sync-count"].as_u64().unwrap_or(0);
        // Later in a pass it says nothing about what was written since.
        let begins = passes != std::mem::replace(&mut self.passes, passes);
        if now["status"] != "active" || passes < 2 || !begins {
            return false;
        }
        // Megabits a second are 125 bytes a millisecond.
        let bytes = now["ram"]["mbps"].as_f64().unwrap_or(0.0).max(0.0) * 125.0 * self.limit as f64;
        now["ram"]["remaining"].as_u64().is_some_and(|remaining| remaining <= (bytes as u64).max(LITTLE))
    }
}

fn at_the_end(now: &Value) -> bool {
    now["status"] == "pre-switchover"
}

impl Functions<'_> {
    /// Follows a migration that has begun to pre-switchover, before which functions whose driver cooperates come to rest. What QEMU says then.
    pub(super) fn come_to_rest_first(
        &mut self,
        monitor: &mut Monitor,
        interrupted: &AtomicBool,
    ) -> Result<Value> {
        let mut left = Remainder { limit: LIMIT, passes: 0 };
        loop {
            self.hold_back(monitor, true)?;
            left.limit = self.holding.limit.unwrap_or(LIMIT);
            let now = self.follow(monitor, |now| at_the_end(now) || left.is_little(now), interrupted)?;
            // Something else than that is for whoever called.
            if now["status"] != "active" {
                return Ok(now);
            }
            let rested = self.rest_before()?;
            self.hold_back(monitor, false)?;
            let begun = Instant::now();
            let now = self.follow(monitor, |now| at_the_end(now) || begun.elapsed() >= STILL, interrupted)?;
            if now["status"] != "active" {
                for one in self.all.iter_mut().filter(|one| one.cooperates) {
                    one.moved.rested_before_ms = Some(ms(rested));
                }
                return Ok(now);
            }
            self.let_go_on()?;
        }
    }

    /// Brings them to rest under a guest that runs. Says when that began.
    fn rest_before(&mut self) -> Result<Instant> {
        let begun = Instant::now();
        for one in self.all.iter_mut().filter(|one| one.cooperates) {
            one.stand = Stand::Still;
            let rested: RestedFunctionReport =
                one.step_as(self.here, "rest", FunctionStepForm { guest_stopped: false, ..STEPS })?;
            one.moved.stop_accesses += rested.stop_accesses;
        }
        Ok(begun)
    }

    /// Their drivers have them again, and memory is copied still.
    fn let_go_on(&mut self) -> Result<()> {
        for one in self.all.iter_mut().filter(|one| one.cooperates) {
            let _: ReplayedFunctionReport =
                one.step_as(self.here, "replay", FunctionStepForm { guest_stopped: false, ..STEPS })?;
            one.moved.stop_accesses = 0;
            one.stand = Stand::Runs;
            let _: DoneReport = self.here.ask(Method::POST, &one.path("log"), None::<&()>)?;
            one.stand = Stand::Logged;
        }
        Ok(())
    }

    /// Has QEMU go on sending until next to nothing is left, or decide by itself again when it stops the guest.
    pub(super) fn hold_back(&mut self, monitor: &mut Monitor, yes: bool) -> Result<()> {
        let limit = match (yes, self.holding.limit) {
            (true, None) => {
                let now = monitor.execute("query-migrate-parameters", &json!({}))?;
                let limit = now["downtime-limit"].as_u64().unwrap_or(LIMIT);
                self.journal.note.downtime_limit = Some(limit);
                self.journal.write()?;
                journal::moment("limit");
                self.holding.limit = Some(limit);
                HELD
            }
            (false, Some(limit)) => limit,
            _ => return Ok(()),
        };
        monitor.execute("migrate-set-parameters", &json!({ "downtime-limit": limit }))?;
        if !yes {
            self.holding.limit = None;
        }
        Ok(())
    }

    /// Waits a while for the drivers there, which have a guest that runs. One that has not brought its function back by then may still do so.
    pub(super) fn are_brought_back(&mut self) {
        let end = Instant::now() + BACK;
        for at in 0..self.all.len() {
            if !self.all[at].cooperates {
                continue;
            }
            let back = loop {
                let back = self.is_brought_back(&self.all[at]);
                if back || Instant::now() >= end {
                    break back;
                }
                std::thread::sleep(PACE);
            };
            self.all[at].moved.brought_back = Some(back);
        }
    }

    fn is_brought_back(&self, one: &Moving) -> bool {
        let shown = self.there.get::<FunctionReport>(&format!("/v1/pci/{}", one.name));
        let cooperation = shown.ok().and_then(|shown| shown.cooperation);
        cooperation.is_some_and(|now| now.announced && now.replayed == now.moves)
    }
}

/// Whether a function's driver has said that it cooperates; why not.
pub(in crate::move_vm) fn announced(function: &FunctionReport) -> std::result::Result<(), String> {
    match &function.cooperation {
        Some(now) if now.announced => Ok(()),
        Some(now) => match &now.refused {
            Some(why) => Err(why.clone()),
            None => Err("it has not announced a page".to_owned()),
        },
        None => Err("it is no function whose driver can say so".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(passes: u64, remaining: u64, mbps: f64) -> Value {
        json!({ "status": "active", "ram": { "dirty-sync-count": passes, "remaining": remaining, "mbps": mbps } })
    }

    #[test]
    fn little_is_left_at_the_beginning_of_a_later_pass() {
        let mut left = Remainder { limit: 300, passes: 0 };
        // 800 Mbit/s are 30 MB in 300 ms.
        let mut is_little = |passes, remaining| left.is_little(&said(passes, remaining, 800.0));
        assert!(!is_little(1, 1 << 30) && !is_little(1, 0), "the first pass sends all that there is");
        assert!(!is_little(2, 30_000_001), "more than that is left");
        assert!(!is_little(2, 0), "what is written during a pass is not known");
        assert!(is_little(3, 30_000_000));
        assert!(!is_little(3, 0) && is_little(4, 0));
    }

    #[test]
    fn a_rate_that_nobody_knows_yet_is_no_rate() {
        for mbps in [0.0, -1.0, f64::NAN] {
            let mut left = Remainder { limit: 300, passes: 0 };
            assert!(!left.is_little(&said(2, LITTLE + 1, mbps)));
            assert!(left.is_little(&said(3, LITTLE, mbps)));
        }
        let mut left = Remainder { limit: 300, passes: 0 };
        assert!(!left.is_little(&json!({ "status": "setup" })) && !left.is_little(&json!(null)));
        // As large as can be: no less than all.
        let mut left = Remainder { limit: u64::MAX, passes: 0 };
        assert!(left.is_little(&said(2, u64::MAX, f64::MAX)));
    }
}
