//! A guest of stock QEMU in L1 that ticks by the PIT, and its timer made slower.

use crate::daemon::binary;
use crate::l1::L1;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Without these Linux stops the PIT at once (`apic_needs_pit`).
pub const MACHINE: &str = "-machine pc,hpet=off -cpu host,tsc-deadline=off,arat=off -m 256M -sandbox on";
/// One clock event per tick from the PIT, at Debian's 250 per second.
pub const TICKS_BY_PIT: &str = "nohz=off highres=off nolapic_timer tsc=reliable";

/// What `ioplane exits clamp` says.
pub fn clamp(l1: &L1, words: &str) -> Result<Value> {
    let said = l1.run(&format!("{} exits clamp {words} --json", binary()?.display()), MINUTE)?;
    serde_json::from_str(&said).with_context(|| said)
}

/// Switches it on for a VM and waits until the timer is set: what it says then.
pub fn clamp_on(l1: &L1, vm: &str, hz: f64, clock: &str) -> Result<Value> {
    clamp(l1, &format!("{hz} --vm {vm} --clock {clock}"))?;
    let end = Instant::now() + 5 * MINUTE;
    loop {
        let status = clamp(l1, &format!("--vm {vm}"))?;
        if status["clamped"] == true {
            return Ok(status);
        }
        ensure!(Instant::now() < end, "{status:#}");
        std::thread::sleep(Duration::from_millis(200));
    }
}
