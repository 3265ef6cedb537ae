//! Whether the other host is still there while memory is copied. QEMU waits for a silent connection until TCP gives it up, a quarter of an hour.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;

use super::super::monitor::Monitor;
use super::kept::{Asking, STOPPING};
use super::{Functions, LOOK, followed, not_ended};

/// After so long without a byte sent the other QEMU is asked, and after as long again.
const SILENT: Duration = Duration::from_secs(5);

/// A time in which nothing is sent.
struct Silence<'m> {
    far: &'m mut Monitor,
    /// Bytes so far, and since when.
    sent: (u64, Instant),
    /// Why the move is of no use any more.
    lost: Option<anyhow::Error>,
}

impl Silence<'_> {
    /// Sees how far the migration is. Whether the other host is lost.
    fn is_for_good(&mut self, now: &Value) -> bool {
        let bytes = now["ram"]["transferred"].as_u64().unwrap_or(0);
        let (before, since) = self.sent;
        let passes = now["status"] == "active" && bytes == before;
        if !passes {
            self.sent = (bytes, Instant::now());
        } else if since.elapsed() >= SILENT {
            self.lost = self.far.state().err();
            self.sent.1 = Instant::now();
        }
        self.lost.is_some()
    }
}

impl Functions<'_> {
    /// Follows the migration until `arrived` says so of what QEMU says, or QEMU stops its guest and waits for vCPUs that are kept, while the other host is
    /// there: that.
    pub(super) fn follow(
        &mut self,
        monitor: &mut Monitor,
        mut arrived: impl FnMut(&Value) -> bool,
        interrupted: &AtomicBool,
    ) -> Result<Value> {
        let mut asking = self.asking();
        let far = not_ended(&mut self.far)?;
        let mut silence = Silence { far, sent: (0, Instant::now()), lost: None };
        let arrived = |state: &str, now: &Value| {
            asking.as_mut().is_some_and(|asking| asking.sees(state, now))
                || arrived(now)
                || silence.is_for_good(now)
        };
        let runs = Some(&mut self.running);
        let mut now = followed(monitor.follow_until(arrived, LOOK, interrupted, None, runs)?)?;
        if let Some(error) = silence.lost {
            return Err(super::with_remedy(error, "nothing is sent any more", ""));
        }
        match asking {
            Some(Asking { failed: Some(error), .. }) => return Err(error),
            Some(Asking { stopping: true, .. }) => now["status"] = STOPPING.into(),
            _ => {}
        }
        Ok(now)
    }
}
